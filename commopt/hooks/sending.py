"""Take messages through the lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import compress, count
from typing import Any

import torch
from torch import Tensor

from commopt import lanes
from commopt.aggregate import Aggregator, Flat, account_for
from commopt.bucketing import Message, packed
from commopt.errors import ConfigurationError
from commopt.feedback import Account, Fidelity, Layout, Ledger, sample_numel
from commopt.groups import Membership, Team
from commopt.hooks.traffic import Traffic
from commopt.recording import Recorder, running


@dataclass(frozen=True)
class Step:
    """What the messages of one step have in common.

    scaler: the torch.amp.GradScaler that multiplied its loss, or None. buffers: what was sent in it so far, in order.
    """

    number: int
    ledger: Ledger
    scaler: Any
    buffers: list[Layout] = field(default_factory=list)


class Sending:
    """What one registration, called `owner`, has on the lane: operations in one order, the same on all ranks.

    watch_fidelity: whether to compare lossy averages with exact ones now and then; the same on every rank.
    """

    def __init__(self, membership: Membership, owner: str, recorder: Recorder) -> None:
        self.membership = membership
        self.owner = owner
        self.closed = False
        self.messages = 0
        self.traffic = Traffic()
        self.watch_fidelity = False
        self.fidelity = Fidelity()
        self._recorder = recorder
        self._sequence = count()

    @property
    def team(self) -> Team:
        """All ranks."""
        return self.membership.team

    def send(self, message: Message, aggregators: Sequence[Aggregator], step: Step, *, last: bool) -> lanes.Ticket:
        """Queue the reduction of one message, `last` of its step; return the ticket of its last bucket.

        aggregators: one for each of its buffers.
        """
        result = message.held[-1].bucket
        by = " and ".join(dict.fromkeys(map(_name, aggregators)))
        what = f"bucket {', '.join(map(str, message.numbers))} by {by}"
        sampled = [self._is_sampled(aggregator, step) for aggregator in aggregators]
        work = self._work(message, aggregators, sampled, step, last=last)
        inputs = [each.bucket for each in message.held]
        reserved = [each.ticket for each in message.held if each.ticket is not None]
        ticket = self._submit(what, message.numel, work, result, inputs, reserved)
        self.messages += 1
        step.buffers.extend(message.layouts)
        for layout, dtype, aggregator in zip(message.layouts, message.dtypes(), aggregators, strict=True):
            self.traffic.count(aggregator, layout, dtype, result.device, step.number)
        for layout in compress(message.layouts, sampled):
            sample = _anonymous(sample_numel(layout.numel))
            self.traffic.count(Flat(), sample, torch.float32, result.device, step.number)
        return ticket

    def _is_sampled(self, aggregator: Aggregator, step: Step) -> bool:
        """Return whether the next buffer, averaged by `aggregator`, is to be compared with its exact average."""
        return self.watch_fidelity and not aggregator.lossless and self.fidelity.takes(step.number)

    def _work(
        self,
        message: Message,
        aggregators: Sequence[Aggregator],
        sampled: Sequence[bool],
        step: Step,
        *,
        last: bool,
    ) -> Callable[[], None]:
        """Return what the lane is to do."""
        team, rank, ledger, fidelity = self.team, self.membership.global_rank, step.ledger, self.fidelity
        device = message.held[-1].bucket.device
        numbers = range(len(step.buffers), len(step.buffers) + len(message.layouts))
        # Words only for who asks for them: this is on the way of backward.
        recorder = self._recorder
        recorded = recorder.message(message.numbers, message.title, message.nbytes) if recorder.enabled else None

        def work() -> None:
            with running(recorded):
                if numbers[0] == 0:
                    ledger.begin_step()
                loss_scale = _loss_scale(step.scaler, device)
                for number, layout, parts, aggregator, compared in zip(
                    numbers, message.layouts, message.parts(), aggregators, sampled, strict=True
                ):
                    account = account_for(aggregator, layout, team, ledger, step.number, number, rank, loss_scale)
                    _average(parts, aggregator, team, account, fidelity if compared else None)
                    ledger.end_bucket(parts, last=last and number == numbers[-1])

        return work

    def require_open(self, what: str) -> None:
        """Raise ConfigurationError when HookState.close() came before `what`."""
        if self.closed:
            raise ConfigurationError(
                f"{self.owner} was closed, and this is its {what}; make a new HookState, and a new DDP model for it"
            )

    def run(self, work: Callable[[], None], what: str, device: torch.device) -> lanes.Ticket:
        """Queue work of another kind, which every rank submits at the same point."""
        return self._submit(what, 0, work, torch.zeros(1, dtype=torch.float32, device=device))

    def _submit(
        self,
        what: str,
        numel: int,
        work: Callable[[], None],
        result: Tensor,
        inputs: Sequence[Tensor] = (),
        reserved: Sequence[lanes.Ticket] = (),
    ) -> lanes.Ticket:
        self.require_open(what)
        device = result.device  # with its index, by which lanes are told apart
        operation = lanes.Operation(self.membership, self.owner, next(self._sequence), what, numel, device.type)
        return lanes.lane_for(device).submit(operation, work, result, inputs, reserved)


def _average(
    parts: Sequence[Tensor], aggregator: Aggregator, team: Team, account: Account, fidelity: Fidelity | None
) -> None:
    """Replace the buffer that lies in `parts` by its average; `fidelity` compares it with the exact one."""
    with packed(parts, account.scratch) as buffer:
        scale = account.add_leftover(buffer, 1.0 / team.size)
        if aggregator.lossless:  # what is exact treats all elements alike; the rest may go by names and shapes
            account = replace(account, layout=_anonymous(account.layout.numel))
        exact = None if fidelity is None else fidelity.exact(buffer, team, scale)
        aggregator.all_reduce(buffer, team, scale, account)
        if fidelity is not None and exact is not None:
            fidelity.add(exact, buffer)


# Asked for every message, in backward.
@lru_cache(maxsize=64)
def _name(aggregator: Aggregator) -> str:
    return str(aggregator)


@lru_cache(maxsize=1024)
def _anonymous(numel: int) -> Layout:
    return Layout.anonymous(numel)


def _loss_scale(scaler: Any, device: torch.device) -> Tensor | None:
    """Return what gradients are multiplied by, on `device`; None for 1. No host sync."""
    if scaler is None or not scaler.is_enabled() or scaler._scale is None:
        return None
    scale: Tensor = scaler._scale
    return scale.detach().to(device, torch.float32, non_blocking=True)
