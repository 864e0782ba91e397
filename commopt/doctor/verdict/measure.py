# SPDX-License-Identifier: Apache-2.0
"""Measures on every rank: the pace of its device, collectives of every level at three sizes, and compression."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from time import perf_counter

import torch

from commopt.cost import Curve, LinkKey, Links, WorkKey
from commopt.cost.links import PRIMITIVES, ring
from commopt.doctor.machine import Machine
from commopt.doctor.verdict.facts import InterfaceRates, Level, Measurements, Pace
from commopt.groups import Membership
from commopt.probe.collectives import COLLECTIVES, Collective
from commopt.probe.network import node_names
from commopt.probe.operations import ConcurrentGroups, TimedWork, call_of, groups_of
from commopt.probe.prober import read_header
from commopt.probe.report import node_factor
from commopt.probe.timing import LaneTimer, Measured, Repeats
from commopt.simulate import Workload
from topology.queries import node_nic_gbps, peer_bandwidth_gbps

MEASURED = ("all_reduce", "all_gather", "all_to_all")
_LIKE = {"reduce_scatter": "all_reduce", "reduce": "all_reduce", "broadcast": "all_gather"}
"""Of collectives that are not measured, whose ring's steps and volume theirs are counted from."""
SIZES = {"cpu": (2**14, 2**18, 2**22), "cuda": (2**16, 2**22, 2**26)}
WORK_SIZES = {"cpu": (2**17, 2**21), "cuda": (2**20, 2**26)}
MEMORY_SHARE = 0.05
"""The most that buffers take of the memory of the device."""

_ITERATIONS = 5
_WORK_US = 6e6
_PACE_S = 0.3
_US = 1e6

Say = Callable[[str], None]


@dataclass
class Found:
    """What is known so far: a verdict can be given on it at any time."""

    measurements: Measurements
    links: Links | None = None
    work: dict[WorkKey, Curve] = field(default_factory=dict)
    workload: Workload | None = None

    def add(self, **parts: object) -> None:
        """Replace parts of the measurements."""
        self.measurements = replace(self.measurements, **parts)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------- pace


def own_tflops(device: torch.device) -> float:
    """Return the rate of matrix products here, from the fastest tenth: what disturbs others is not this device's."""
    cuda = device.type == "cuda"
    side, dtype = (4096, torch.bfloat16) if cuda else (192, torch.float32)
    matrix = torch.ones(side, side, device=device, dtype=dtype)
    product = torch.empty_like(matrix)
    times_s: list[float] = []
    until = perf_counter() + _PACE_S
    while perf_counter() < until:
        begun = perf_counter()
        torch.mm(matrix, matrix, out=product)
        if cuda:
            torch.cuda.synchronize(device)
        times_s.append(perf_counter() - begun)
    times_s.sort()
    return 2 * side**3 / times_s[len(times_s) // 10] / 1e12


def measure_paces(membership: Membership, device: torch.device) -> tuple[Pace, ...]:
    """Return the pace of every rank, in their order; collective."""
    answers = membership.exchange("the pace of devices", tflops=own_tflops(device))
    node_of = {rank: name for name, ranks in zip(*_named_nodes(membership), strict=True) for rank in ranks}
    return tuple(
        Pace(rank, node_of[place], float(answer["tflops"]))
        for place, (rank, answer) in enumerate(zip(membership.ranks, answers, strict=True))
    )


def _named_nodes(membership: Membership) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    return node_names(membership), membership.cluster.nodes


# --------------------------------------------------------------------------------------------- memory


def memory_nbytes(device: torch.device, root: Path = Path("/")) -> int:
    """Return the memory of which a measurement may take its share: free on the device, and in the host where shared."""
    host = _host_nbytes(root)
    if device.type != "cuda":
        return host
    free, _ = torch.cuda.mem_get_info(device)
    unified = bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))
    return min(free, host) if unified else free


def _host_nbytes(root: Path) -> int:
    found = re.search(r"MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text())
    nbytes = int(found[1]) << 10 if found else 1 << 30
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            nbytes = min(nbytes, int((root / name).read_text()))
        except (OSError, ValueError):  # no such limit
            continue
    return nbytes


def most_nbytes(membership: Membership, device: torch.device) -> int:
    """Return the largest message, whose buffers on all ranks of a machine keep to MEMORY_SHARE; collective."""
    answers = membership.exchange("memory", nbytes=memory_nbytes(device))
    here = max(len(node) for node in membership.cluster.nodes)
    if membership.cluster.emulated:
        here = len(membership.ranks)
    sharing = 1 if device.type == "cuda" else here
    least = min(int(answer["nbytes"]) for answer in answers)
    return max(int(least * MEMORY_SHARE / sharing / (len(membership.ranks) + 1)), 2**12)


# ---------------------------------------------------------------------------------------- collectives


class CollectiveProber:
    """Measures collectives within a budget of time; every method is collective over the membership."""

    def __init__(self, membership: Membership, budget_s: float, say: Say) -> None:
        self._membership = membership
        self._timer = LaneTimer(membership)
        self._left_us = budget_s * _US
        self._say = say
        most = most_nbytes(membership, self._timer.device)
        self._sizes = [min(nbytes, most) for nbytes in SIZES[self._timer.device.type]]
        self._work_sizes = [min(nbytes, most) for nbytes in WORK_SIZES[self._timer.device.type]]

    def levels(self, found: Found) -> None:
        """Measure all levels; `found` has each one as soon as it is known."""
        groups = groups_of(self._membership.team)
        header = read_header(self._membership, self._timer.device, "python -m commopt doctor --measure")
        curves: dict[LinkKey, Curve] = {}
        left = len(groups) * len(MEASURED)
        for group in groups:
            at_once = f", {group.groups} groups at once" if group.groups > 1 else ""
            self._say(f"{group.level}, {group.ranks} ranks{at_once}: {', '.join(MEASURED)}")
            for name in MEASURED:
                curves[group.key(name)] = self._curve(COLLECTIVES[name], group, self._left_us / left)
                left -= 1
            found.links = Links(header, with_all(curves))
            found.add(levels=levels_of(Links(header, curves)))

    def work(self, wanted: Iterable[TimedWork], found: Found) -> None:
        """Measure the local work of compressors."""
        self._say("compression")
        tasks = list(wanted)
        left_us = min(self._left_us, _WORK_US)
        for place, task in enumerate(tasks):
            share_us = left_us / (len(tasks) - place)
            points: list[tuple[int, float]] = []
            for nbytes in _distinct(self._work_sizes, task.least_nbytes):
                repeats = _affordable(points, nbytes, share_us) or _LEAST
                taken = self._timer.time(partial(task.prepare, nbytes // 4, self._timer.device), repeats)
                points.append((nbytes, taken.time_us))
                left_us -= taken.spent_us
                self._left_us -= taken.spent_us
            found.work[task.key] = Curve.fit(points)

    def _curve(self, collective: Collective, group: ConcurrentGroups, share_us: float) -> Curve:
        grain = 4 * group.ranks
        points: list[tuple[int, float]] = []
        for size in _distinct(self._sizes, grain):
            nbytes = -(-size // grain) * grain
            repeats = _affordable(points, nbytes, share_us)
            if repeats is None:  # a shorter one, which there is time for
                nbytes = _shorter(points, share_us, grain)
                repeats = _LEAST
            if points and nbytes <= points[-1][0]:
                break
            taken = self._time(collective, group, nbytes, repeats)
            points.append((nbytes, taken.time_us))
            share_us -= taken.spent_us
            self._left_us -= taken.spent_us
        return curve_of(points)

    def _time(self, collective: Collective, group: ConcurrentGroups, nbytes: int, repeats: Repeats) -> Measured:
        what = f"{group.level} {collective.name}, {nbytes} bytes"
        bind = partial(call_of, collective, nbytes, self._timer.device)
        alone = group.groups == 1
        return self._timer.time_collective(bind, group.team, what, repeats, closed=collective.closed, alone=alone)


_LEAST = Repeats(1, 3)


def curve_of(points: Sequence[tuple[int, float]]) -> Curve:
    """Return the line through the longest two messages: buffers on the way swallow the shortest."""
    return replace(Curve.fit(points[-2:]), points=tuple(points))


def _distinct(sizes: Sequence[int], least: int) -> list[int]:
    """Return two sizes or more, increasing, none below `least`."""
    found = sorted({max(size, least) for size in sizes})
    return found if len(found) > 1 else [found[0], 4 * found[0]]


def _affordable(points: Sequence[tuple[int, float]], nbytes: int, share_us: float) -> Repeats | None:
    """Return how often to time a message, None when there is no time for it; two sizes are measured in any case."""
    if not points:
        return _LEAST
    predicted_us = points[-1][1] * nbytes / points[-1][0]  # no latency makes it longer
    count = min(int(share_us / predicted_us) - 1, _ITERATIONS)
    return Repeats(1, count) if count >= _LEAST.iterations else None


def _shorter(points: Sequence[tuple[int, float]], share_us: float, grain: int) -> int:
    before_nbytes, before_us = points[-1]
    nbytes = int(before_nbytes * share_us / (4 * before_us))
    least = 2 * before_nbytes if len(points) == 1 else 0  # one size alone tells no latency from a rate
    return max(nbytes, least) // grain * grain


def with_all(curves: Mapping[LinkKey, Curve]) -> dict[LinkKey, Curve]:
    """Return the curves with those of collectives that follow from them by the steps and volumes of rings."""
    found = dict(curves)
    for name in PRIMITIVES:
        like = _LIKE.get(name)
        for key, curve in curves.items():
            if key.primitive == like:
                mine, theirs = ring(name, key.ranks), ring(key.primitive, key.ranks)
                note = f"{name} from {like}"
                derived = curve.scaled(mine.steps / theirs.steps, mine.volume / theirs.volume, note)
                found[key._replace(primitive=name)] = derived
    return found


def levels_of(links: Links) -> tuple[Level, ...]:
    """Return the rates of each level: all groups at once where they were measured, since training sends so."""
    found: dict[str, tuple[LinkKey, dict[str, float], float]] = {}
    for key, curve in sorted(links.curves.items()):
        nbytes, time_us = curve.points[-1]
        if key.level == "intra":
            moved = ring(key.primitive, key.ranks).volume * nbytes
        else:
            moved = node_factor(key, links.header.nodes) * nbytes
        gbps = moved * 8e-3 / time_us
        known = found.get(key.level)
        rates = {} if known is None else known[1]
        rates[key.primitive] = max(gbps, rates.get(key.primitive, 0.0))
        first = curve.points[0][1]
        latency_us = min(first, known[2]) if known is not None else first
        found[key.level] = (key, rates, latency_us)
    several = len(links.header.nodes) > 1
    return tuple(
        Level("intra" if level == "world" and not several else level, key.ranks, tuple(rates.items()), latency_us)
        for level, (key, rates, latency_us) in found.items()
    )


def with_expected(
    levels: Sequence[Level], wires: Sequence[InterfaceRates], machine: Machine, gpus: bool
) -> tuple[Level, ...]:
    """Return the levels beside what they should reach: RDMA ports or the slowest used interface; NVLink or PCIe."""
    stated = [wire.expected_gbps for wire in wires if wire.used]
    known = [gbps for gbps in stated if gbps is not None]
    across, source = (min(known), "its interface") if known and len(known) == len(stated) else (None, "")
    rails = node_nic_gbps(machine.topology) if gpus and across is None else None
    if rails is not None:
        across, source = rails, "the node's ports"
    topology = machine.topology
    pairs = combinations(range(len(topology.gpus)), 2) if gpus else ()
    rates = [peer_bandwidth_gbps(topology, a, b) for a, b in pairs]
    inside = min((rate for rate in rates if rate is not None), default=None)
    return tuple(
        replace(level, expected_gbps=across, source=source)
        if level.between_nodes
        else replace(level, expected_gbps=inside, source="NVLink or PCIe" if inside is not None else "")
        for level in levels
    )
