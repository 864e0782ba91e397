"""Which of DDP's buckets make up each bucket of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commopt.feedback import Layout
from commopt.plan import Plan


@dataclass(frozen=True)
class Grouping:
    """For DDP's buckets, in their order: the plan's bucket each belongs to, and after which one a message is complete.

    order: in which messages, numbered as they become complete, are sent.
    """

    buckets: tuple[Layout, ...] = ()
    shares: tuple[int | None, ...] = ()
    closes: tuple[bool, ...] = ()
    order: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: Plan | None, buckets: Sequence[Layout]) -> Grouping:
        """Merge DDP's `buckets` as `plan` has it, as far as they are no larger than what is planned.

        DDP's bucket goes where its latest gradient is planned to go, since it is not ready before. Without a plan, or
        with one for other parameters, each is a message of its own.
        """
        buckets = tuple(buckets)
        if plan is None:
            return cls.separate(buckets)
        planned = {name: number for number, bucket in enumerate(plan.buckets) for name in bucket.names}
        if any(piece.name not in planned for bucket in buckets for piece in bucket.pieces):
            return cls.separate(buckets)
        shares = [max(planned[piece.name] for piece in bucket.pieces) for bucket in buckets]
        closes = [number + 1 == len(shares) or shares[number + 1] != share for number, share in enumerate(shares)]
        sent = [share for share, close in zip(shares, closes, strict=True) if close]
        exact = sent == list(range(len(plan.buckets)))
        order = plan.order if exact else tuple(range(len(sent)))
        return cls(buckets, tuple(shares), tuple(closes), order)

    @classmethod
    def separate(cls, buckets: tuple[Layout, ...]) -> Grouping:
        """Send each bucket by itself."""
        return cls(buckets, (None,) * len(buckets), (True,) * len(buckets), tuple(range(len(buckets))))

    def foresees(self, number: int, layout: Layout) -> bool:
        """Return whether DDP's bucket `number` is the one it was made for."""
        return number < len(self.buckets) and self.buckets[number] == layout
