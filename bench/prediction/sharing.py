"""What it costs that several ranks, and in each of them backward and communication, run on the same processors.

A simulated rank has a processor for backward and another one for what its lane does: adding up, copying into sockets,
compressing. The ranks of an emulated cluster share a few, so that every microsecond the lanes spend is taken from
backward. How many they spend is measured (`links.Probed.processor`); here it delays the gradients that are not ready
yet, in proportion to how much of a message passes before they are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from commopt.cluster import link_rate
from commopt.plan import Unit
from commopt.simulate import Bucket


@dataclass(frozen=True)
class Processors:
    """Those of a machine, and how many ranks run on it."""

    ranks: int
    cores: int

    @classmethod
    def of_this_machine(cls, world_size: int) -> Processors:
        """Return what this rank shares with others: with all of them in an emulated cluster."""
        ranks = world_size if link_rate() else int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        return cls(ranks, os.cpu_count() or 1)

    @property
    def load(self) -> float:
        """How long backward stands still for a microsecond of every lane's work.

        Backward and lane take a core each; with fewer than that, what one gets the other lacks.
        """
        return 0.0 if self.cores >= 2 * self.ranks else max(1.0, self.ranks / self.cores)

    def least_us(self, busy_us: float, ranks: int) -> float:
        """Return what passes at least while so many ranks keep a core busy for `busy_us` each."""
        return busy_us * min(ranks, self.ranks) / self.cores


def delayed(
    units: Sequence[Unit], buckets: Sequence[Bucket], lane_us: Sequence[float], busy_us: Sequence[float], load: float
) -> tuple[Unit, ...]:
    """Return the units with the times at which they are ready beside the communication of `buckets`.

    lane_us: how long each bucket keeps the lane. busy_us: how much of that it keeps a core of each rank busy.
    """
    ready_us = np.array([unit.ready_us for unit in units])
    home = {name: place for place, unit in enumerate(units) for name in unit.names}
    free_us = 0.0
    for bucket, taken_us, worked_us in zip(buckets, lane_us, busy_us, strict=True):
        begin_us = max(free_us, max(float(ready_us[home[name]]) for name in bucket.names))
        free_us = begin_us + taken_us
        beside = np.clip((ready_us - begin_us) / taken_us, 0.0, 1.0) if taken_us else ready_us > begin_us
        ready_us = ready_us + load * worked_us * beside
    return tuple(replace(unit, ready_us=float(at)) for unit, at in zip(units, ready_us, strict=True))
