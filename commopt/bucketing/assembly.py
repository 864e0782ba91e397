"""Hold DDP's buckets until a message is complete, and messages until it is their turn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commopt.bucketing.grouping import Grouping
from commopt.bucketing.messages import Held, Message
from commopt.feedback import Layout
from commopt.plan import Plan

_PATIENCE_STEPS = 3


class Assembly:
    """Makes messages of DDP's buckets: the same on every rank, since DDP shows all ranks the same buckets.

    A plan needs to know the buckets of a step before they come. It takes them to be those of the step before, and a
    step in which they turn out otherwise (DDP makes new ones in the first steps) sends the rest one by one.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._grouping = Grouping()
        self._target: tuple[Layout, ...] = ()
        self._patience = 0
        self._seen: list[Layout] = []
        self._shown: list[tuple[Layout, Tensor]] = []
        self._start()

    def _start(self) -> None:
        self._open: list[Held] = []
        self._complete: dict[int, Message] = {}
        self._made = self._sent = 0
        self._device: torch.device | None = None
        self._foreseen = True

    @property
    def buckets(self) -> tuple[Layout, ...]:
        """DDP's buckets in the last whole step."""
        return self._grouping.buckets

    @property
    def gradients(self) -> list[tuple[Layout, Tensor]]:
        """DDP's buckets as they came in the last step, and what lies in them: averages, until the next backward."""
        return list(self._shown)

    def forget_gradients(self) -> None:
        """Keep DDP's buckets of the last step no longer in memory."""
        self._shown = []

    @property
    def settled(self) -> bool:
        """Whether the last whole step had the buckets of the one before, and no checkpoint is being followed."""
        return self._foreseen and not self._target and bool(self._grouping.buckets)

    def messages(self) -> list[tuple[tuple[Layout, ...], int | None]]:
        """Return DDP's buckets in each message, and the number of the plan's bucket, in the order of sending."""
        groups: list[list[Layout]] = [[]]
        shares = []
        for layout, share, closes in zip(
            self._grouping.buckets, self._grouping.shares, self._grouping.closes, strict=True
        ):
            groups[-1].append(layout)
            if closes:
                groups.append([])
                shares.append(share)
        return [(tuple(groups[number]), shares[number]) for number in self._grouping.order]

    def follow(self, plan: Plan | None) -> None:
        """Send what `plan` says from the next step on; None: each of DDP's buckets by itself."""
        self._plan = plan
        self.forget_gradients()  # DDP may make others now
        self._grouping = Grouping.of(plan, self._grouping.buckets)
        self._foreseen = False  # until a step has shown that it is so

    def imitate(self, target: Sequence[Layout]) -> None:
        """Lay whole steps out in the buffers of a checkpoint, until DDP's buckets are again what they were there.

        What a value is rounded to depends on its neighbours in a buffer, so a resumed run takes the same way, bit by
        bit, only if it starts with the buffers the old one had. A new DDP model finds its buckets after a step or two.
        """
        self._target = tuple(target)
        self._patience = _PATIENCE_STEPS
        self._foreseen = False

    def begin_step(self) -> None:
        """Start anew, without what a backward that raised has left."""
        self._start()
        self._seen, self._shown = [], []

    def add(self, held: Held, *, last: bool) -> list[Message]:
        """Take in DDP's next bucket; return the messages to send now, in order."""
        messages: list[Message] = []
        if self._device not in (None, held.bucket.device):
            # A message is of one device; plans and checkpoints' buffers know of one only.
            messages, self._foreseen, self._target = self._rest(), False, ()
        self._device = held.bucket.device
        self._foreseen &= self._grouping.foresees(held.number, held.layout)
        self._seen.append(held.layout)
        self._shown.append((held.layout, held.bucket))
        self._open.append(held)
        if self._target:
            messages += self._whole_step() if last else []
        elif self._foreseen:
            messages += self._planned(held.number)
        else:
            messages += self._rest()
        if last:
            messages += self._rest()
            self._end_step()
        return messages

    def _planned(self, number: int) -> list[Message]:
        if self._grouping.closes[number]:
            self._complete[self._made] = Message.joined(self._open, self._grouping.shares[number])
            self._open = []
            self._made += 1
        messages = []
        order = self._grouping.order
        while self._sent < len(order) and order[self._sent] in self._complete:
            messages.append(self._complete.pop(order[self._sent]))
            self._sent += 1
        return messages

    def _rest(self) -> list[Message]:
        """Return all there is, in the order in which it came."""
        messages = [self._complete[number] for number in sorted(self._complete)]
        if self._open:
            messages.append(Message.joined(self._open))
        self._complete, self._open = {}, []
        return messages

    def _whole_step(self) -> list[Message]:
        """Return one message of all buckets, in the buffers of the checkpoint."""
        held, self._open = self._open, []
        present = {piece.name: piece.numel for each in held for piece in each.layout.pieces}
        wanted = {piece.name: piece.numel for layout in self._target for piece in layout.pieces}
        # Other parameters train now: then there is nothing to follow.
        layouts = self._target if present == wanted else tuple(each.layout for each in held)
        self._patience -= 1
        if self._buffers(held) == self._target or self._patience == 0:
            self._target = ()
        return [Message(tuple(held), layouts, Grouping.of(self._plan, layouts).shares)]

    def _buffers(self, held: Sequence[Held]) -> tuple[Layout, ...]:
        """Return the buffers that these buckets would be sent in, were there no checkpoint to follow."""
        grouping = Grouping.of(self._plan, [each.layout for each in held])
        groups: list[list[Held]] = [[]]
        for each, closes in zip(held, grouping.closes, strict=True):
            groups[-1].append(each)
            if closes:
                groups.append([])
        return tuple(layout for number in grouping.order for layout in Message.joined(groups[number]).layouts)

    def _end_step(self) -> None:
        self._foreseen &= len(self._seen) == len(self._grouping.buckets)
        if not self._foreseen:
            self._grouping = Grouping.of(self._plan, self._seen)
