"""Take messages through the lane, and count what is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from commopt import lanes
from commopt.aggregate import Aggregator
from commopt.bucketing import Message
from commopt.feedback import Account, Layout, Ledger
from commopt.groups import Membership, WireBytes
from commopt.recording import Recorder, running

_Sent = tuple[Aggregator, Layout, torch.dtype, torch.device, int]


class Sending:
    """What one registration has on the lane: operations in one order, the same on all ranks."""

    def __init__(self) -> None:
        self._sequence = count()
        self._sent: Counter[_Sent] = Counter()
        self._numbers = count()
        self._names: dict[Aggregator, str] = {}

    @property
    def messages(self) -> int:
        """How many buffers were reduced."""
        return self._sent.total()

    def begin_step(self) -> None:
        """Number the messages from 0 again."""
        self._numbers = count()

    def send(
        self,
        message: Message,
        aggregators: Sequence[Aggregator],
        membership: Membership,
        owner: str,
        ledger: Ledger,
        step: int,
        scaler: Any,
        recorder: Recorder,
        *,
        last: bool,
    ) -> lanes.Ticket:
        """Queue the reduction of one message, `last` of its step; return the ticket of its last bucket.

        aggregators: one for each of its buffers.
        """
        team, result = membership.team, message.held[-1].bucket
        numbers = [next(self._numbers) for _ in message.layouts]
        # Words only for who asks for them: this is on the way of backward.
        recorded = recorder.message(message.numbers, message.title, message.nbytes) if recorder.enabled else None

        def work() -> None:
            with running(recorded):
                if numbers[0] == 0:
                    ledger.begin_step()
                loss_scale = _loss_scale(scaler, result.device)
                buffers = message.pack(ledger.scratch)
                for number, layout, buffer, aggregator in zip(
                    numbers, message.layouts, buffers, aggregators, strict=True
                ):
                    # What is exact treats all elements alike; the rest may go by names and shapes.
                    known = Layout.anonymous(layout.numel) if aggregator.lossless else layout
                    account = Account(known, step, number, membership.global_rank, ledger, loss_scale)
                    aggregator.all_reduce(buffer, team, 1.0 / team.size, account)
                    ledger.end_bucket(last=last and number == numbers[-1])
                message.unpack(buffers)

        by = " and ".join(dict.fromkeys(map(self._name, aggregators)))
        what = f"bucket {', '.join(map(str, message.numbers))} by {by}"
        operation = lanes.Operation(membership, owner, next(self._sequence), what, message.numel, result.device.type)
        inputs = [each.bucket for each in message.held]
        reserved = [each.ticket for each in message.held if each.ticket is not None]
        ticket = lanes.lane_for(result.device).submit(operation, work, result, inputs, reserved)
        for layout, dtype, aggregator in zip(message.layouts, message.dtypes(), aggregators, strict=True):
            self._sent[aggregator, layout, dtype, result.device, aggregator.phase(step)] += 1
        return ticket

    def _name(self, aggregator: Aggregator) -> str:
        if aggregator not in self._names:
            self._names[aggregator] = str(aggregator)
        return self._names[aggregator]

    def run(
        self, work: Callable[[], None], what: str, membership: Membership, owner: str, device: torch.device
    ) -> lanes.Ticket:
        """Queue work of another kind, which every rank submits at the same point."""
        nothing = torch.zeros(1, device=device)
        operation = lanes.Operation(membership, owner, next(self._sequence), what, 0, device.type)
        return lanes.lane_for(nothing.device).submit(operation, work, nothing)  # "cuda" alone names no lane

    def wire_bytes(self, team: Any) -> WireBytes:
        """Return the payload this rank has sent so far."""
        sent = WireBytes()
        for (aggregator, layout, dtype, device, step), times in self._sent.items():
            sent += aggregator.wire_bytes(layout, dtype, team, device, step) * times
        return sent


def _loss_scale(scaler: Any, device: torch.device) -> Tensor | None:
    """Return what gradients are multiplied by, on `device`; None for 1. No host sync."""
    if scaler is None or not scaler.is_enabled() or scaler._scale is None:
        return None
    scale: Tensor = scaler._scale
    return scale.detach().to(device, torch.float32, non_blocking=True)
