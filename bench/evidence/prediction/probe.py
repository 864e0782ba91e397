# SPDX-License-Identifier: Apache-2.0
"""Probe what a prediction needs and no more: a survey of everything would leave little time for long messages."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from time import process_time
from typing import Literal, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from commopt import ConfigurationError
from commopt.aggregate import Aggregator, Buffer
from commopt.aggregate import Call as Step
from commopt.cluster import link_rate
from commopt.cost import Curve, LinkKey, Links, WorkKey
from commopt.feedback import Layout
from commopt.groups import Membership, Team, TeamShape
from commopt.probe.collectives import COLLECTIVES
from commopt.probe.operations import ConcurrentGroups, TimedWork, call_of, groups_of, known_compressors, work_of
from commopt.probe.prober import link_text, nbytes_text, read_header, work_text
from commopt.probe.timing import Call, LaneTimer, Measured, Repeats, sweep
from commopt.schedule import Unit
from commopt.simulate import Bucket


@dataclass(frozen=True)
class Wanted:
    """By what is to be measured, the largest message or most work in bytes, as a curve counts them."""

    links: dict[LinkKey, int]
    work: dict[WorkKey, int]

    def __or__(self, other: Wanted) -> Wanted:
        return Wanted(dict(Counter(self.links) | Counter(other.links)), dict(Counter(self.work) | Counter(other.work)))


def wanted(aggregators: Iterable[Aggregator], buffers: Iterable[Layout], shape: TeamShape) -> Wanted:
    """Return what the prices of these float32 buffers rest on, on a cluster of this shape."""
    links: Counter[LinkKey] = Counter()
    work: Counter[WorkKey] = Counter()
    seen = [shape.seen_from(rank) for rank in range(shape.size)]
    layouts = list(buffers)
    for aggregator in aggregators:
        for layout in layouts:
            steps = [aggregator.calls(Buffer(layout, torch.float32), each) for each in seen]
            across = sum(
                any(isinstance(step, Step) and step.level == "inter" for step in own)
                for own in steps[: shape.ranks_per_node[0]]
            )
            for own, each in zip(steps, seen, strict=True):
                for step in own:
                    if not isinstance(step, Step):
                        key = WorkKey(step.kind, step.what)
                        work[key] = max(work[key], step.nbytes)
                        continue
                    ranks = each.at(step.level).size
                    at_once = {"inter": across if shape.uniform else 1, "intra": shape.ranks_per_node.count(ranks)}
                    link = LinkKey(step.level, step.primitive, ranks, at_once.get(step.level, 1))
                    if shape.wire.sites:
                        link = _measured_with_sites(link, shape)
                    links[link] = max(links[link], step.nbytes)
    return Wanted(dict(links), dict(work))


def _measured_with_sites(link: LinkKey, shape: TeamShape) -> LinkKey:
    """Return the link that the probe measures for a level of sites: all its groups at once, else the whole world."""
    groups = [group for group in groups_of(cast(Team, shape)) if group.level == link.level]
    if not groups:
        return LinkKey("world", link.primitive, shape.size)
    return max((group.key(link.primitive) for group in groups), key=lambda key: key.groups)


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


_LEAST_NBYTES = 4 * 2**10
_OFTEN = Repeats(warm_up=2, iterations=10)
_US = 1e6
_LEAST_US = 0.1  # finer than any clock: a curve's times are above 0


Key = TypeVar("Key")


class _Curves(NamedTuple):
    time: Curve
    processor: Curve


@dataclass(frozen=True)
class Probed:
    """What messages and work take, as `time`; as `processor`, for how long they keep a core busy on each rank."""

    time: Links
    processor: Links
    spent_s: float


@dataclass
class _Processor:
    """How long this process kept a core busy in some calls."""

    spent_s: float = 0.0
    calls: int = 0

    def counted(self, call: Call) -> Call:
        def run() -> None:
            begun_s = process_time()
            call()
            self.spent_s += process_time() - begun_s
            self.calls += 1

        return run

    def per_call_us(self) -> float:
        """Return the mean over all ranks' calls; collective."""
        total = torch.tensor([self.spent_s, self.calls], dtype=torch.float64)
        dist.all_reduce(total)
        return max(float(total[0] / total[1]) * _US, _LEAST_US)


_Measure = Callable[[_Processor, int, Repeats], Measured]


@dataclass
class Probe:
    """One measurement of all that is `wanted` in about `budget_s`; collective over the membership.

    A median says nothing of the calls in which a rank waited for a core: where ranks share `processors`, no time is
    less than what all of them are busy for.
    Raises ConfigurationError for work that the probe does not know.
    """

    membership: Membership
    wanted: Wanted
    processors: Processors
    budget_s: float

    def __post_init__(self) -> None:
        self._timer = LaneTimer(self.membership)
        self._left_us = self.budget_s * _US
        self._weights_left = len(self.wanted.work) + sum(map(_weight, self.wanted.links))

    def run(self) -> Probed:
        """Measure and fit; every rank returns the first rank's curves."""
        jobs = {job.key: job for job in work_of(known_compressors())}
        unknown = [work_text(key) for key in self.wanted.work if key not in jobs]
        if unknown:
            raise ConfigurationError(f"nobody measures {', '.join(unknown)}; leave the strategies out that do it")
        work: dict[WorkKey, _Curves] = {}
        for key, most in self.wanted.work.items():
            nbytes = sizes(jobs[key].least_nbytes, most, blocks=1)
            ranks = self.membership.team.size
            share_us = self._share_us(1)
            work[key] = self._curves(work_text(key), nbytes, ranks, share_us, partial(self._work, jobs[key]))
        links: dict[LinkKey, _Curves] = {}
        groups = groups_of(self.membership.team)
        # Those across the network come last: they may have what the others leave of their shares.
        for link in sorted(
            self.wanted.links, key=lambda key: ("intra", "inter", "world").index(key.level.split(".")[0])
        ):
            group = next(group for group in groups if group.key(link.primitive) == link)
            nbytes = sizes(_LEAST_NBYTES, self.wanted.links[link], link.ranks)
            ranks = link.ranks * link.groups
            share_us = self._share_us(_weight(link))
            measure = partial(self._link, link.primitive, group)
            links[link] = self._curves(link_text(link), nbytes, ranks, share_us, measure)
        header = read_header(self.membership, self._timer.device, "bench.evidence.prediction")
        result = [
            Links(header, _each(links, "time"), _each(work, "time")),
            Links(header, _each(links, "processor"), _each(work, "processor")),
        ]
        dist.broadcast_object_list(result, src=0)
        time, processor = result
        return Probed(time, processor, self.budget_s - self._left_us / _US)

    def _share_us(self, weight: int) -> float:
        """Return how much of the time that is left the next curve may have."""
        share_us = self._left_us * weight / self._weights_left
        self._weights_left -= weight
        return share_us

    def _curves(self, name: str, nbytes: tuple[int, ...], ranks: int, share_us: float, measure: _Measure) -> _Curves:
        """Measure one thing, which so many ranks do at once, in about `share_us`."""
        busy: list[tuple[int, float]] = []

        def both(message_nbytes: int, repeats: Repeats) -> Measured:
            processor = _Processor()
            measured = measure(processor, message_nbytes, repeats)
            busy_us = processor.per_call_us()
            busy.append((message_nbytes, busy_us))
            return replace(measured, time_us=max(measured.time_us, self.processors.least_us(busy_us, ranks)))

        found = sweep(nbytes, share_us, _OFTEN, both)
        self._left_us -= found.spent_us
        if dist.get_rank() == 0:
            largest = nbytes_text(found.points[-1][0])
            print(f"{name}: {len(found.points)} sizes up to {largest} in {found.spent_us / _US:.1f} s", file=sys.stderr)
        return _Curves(Curve.fit(found.points), Curve.fit(busy))

    def _link(
        self, primitive: str, group: ConcurrentGroups, processor: _Processor, nbytes: int, repeats: Repeats
    ) -> Measured:
        collective = COLLECTIVES[primitive]

        def prepare(team: Team) -> Call:
            return processor.counted(call_of(collective, nbytes, self._timer.device, team))

        what = f"{link_text(group.key(primitive))}, {nbytes} bytes"
        alone = group.groups == 1
        return self._timer.time_collective(prepare, group.team, what, repeats, closed=collective.closed, alone=alone)

    def _work(self, job: TimedWork, processor: _Processor, nbytes: int, repeats: Repeats) -> Measured:
        def prepare() -> Call:
            return processor.counted(job.prepare(nbytes // torch.float32.itemsize, self._timer.device))

        return self._timer.time(prepare, repeats)


def _each(curves: Mapping[Key, _Curves], kind: Literal["time", "processor"]) -> dict[Key, Curve]:
    return {key: both.time if kind == "time" else both.processor for key, both in curves.items()}


def _weight(link: LinkKey) -> int:
    """Return how much more time than others a link needs: those inside a node are fast."""
    return 1 if link.level == "intra" else 6


def sizes(least_nbytes: int, most_nbytes: int, blocks: int) -> tuple[int, ...]:
    """Return the bytes to measure, smallest first: the most that is sent, its half, its quarter, down to the least.

    At least four sizes, rounded up to so many blocks of whole float32 elements.
    """
    grain = torch.float32.itemsize * blocks
    exact = float(max(most_nbytes, 8 * least_nbytes))
    found: list[int] = []
    while exact >= least_nbytes:
        found.append(ceil(exact / grain) * grain)
        exact /= 2
    return tuple(reversed(found))
