"""Take messages through the lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from commopt import lanes
from commopt.aggregate import Aggregator, Flat, account_for
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

    def send(
        self, number: int, layout: Layout, bucket: Tensor, aggregator: Aggregator, step: Step, *, last: bool
    ) -> lanes.Ticket:
        """Queue the reduction of one of DDP's buckets, `last` of its step; return its ticket."""
        sampled = self.watch_fidelity and not aggregator.lossless and self.fidelity.takes(step.number)
        work = self._work(number, layout, bucket, aggregator, sampled, step, last=last)
        ticket = self._submit(f"bucket {number} by {_name(aggregator)}", layout.numel, work, bucket, [bucket])
        self.messages += 1
        step.buffers.append(layout)
        self.traffic.count(aggregator, layout, bucket.dtype, bucket.device, step.number)
        if sampled:
            sample = _anonymous(sample_numel(layout.numel))
            self.traffic.count(Flat(), sample, torch.float32, bucket.device, step.number)
        return ticket

    def _work(
        self,
        number: int,
        layout: Layout,
        bucket: Tensor,
        aggregator: Aggregator,
        sampled: bool,
        step: Step,
        *,
        last: bool,
    ) -> Callable[[], None]:
        """Return what the lane is to do."""
        team, rank, ledger = self.team, self.membership.global_rank, step.ledger
        fidelity = self.fidelity if sampled else None
        place = len(step.buffers)
        # Words only for who asks for them: this is on the way of backward.
        recorder = self._recorder
        recorded = recorder.message((number,), layout.title, bucket.nbytes) if recorder.enabled else None

        def work() -> None:
            with running(recorded):
                if place == 0:
                    ledger.begin_step()
                loss_scale = _loss_scale(step.scaler, bucket.device)
                account = account_for(aggregator, layout, team, ledger, step.number, place, rank, loss_scale)
                _average(bucket.view(-1), aggregator, team, account, fidelity)
                ledger.end_bucket([bucket], last=last)

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


def _average(buffer: Tensor, aggregator: Aggregator, team: Team, account: Account, fidelity: Fidelity | None) -> None:
    """Replace `buffer` by its average; `fidelity` compares it with the exact one."""
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
