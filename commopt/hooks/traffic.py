"""Count the payload that one rank sends."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import torch

from commopt.aggregate import Aggregator
from commopt.feedback import Layout
from commopt.groups import TeamShape, WireBytes


class Traffic:
    """What was sent, by all that tells how long it was: a step is like many others, so there are few kinds."""

    def __init__(self) -> None:
        self._sent: Counter[tuple[Aggregator, Layout, torch.dtype, torch.device, int]] = Counter()

    def count(
        self, aggregator: Aggregator, layout: Layout, dtype: torch.dtype, device: torch.device, step: int
    ) -> None:
        """Note one all_reduce of a buffer."""
        self._sent[aggregator, layout, dtype, device, _phase(aggregator, step)] += 1

    def wire_bytes(self, team: TeamShape) -> WireBytes:
        """Return the payload this rank has sent so far."""
        sent = WireBytes()
        # A copy: another thread may ask during a step.
        for (aggregator, layout, dtype, device, step), times in dict(self._sent).items():
            sent += aggregator.wire_bytes(layout, dtype, team, device, step) * times
        return sent


@lru_cache(maxsize=64)
def _phase(aggregator: Aggregator, step: int) -> int:  # asked for every message of a step, in backward
    return aggregator.phase(step)
