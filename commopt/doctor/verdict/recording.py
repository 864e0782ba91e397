# SPDX-License-Identifier: Apache-2.0
"""From what a training recorded to measurements: a step, the legs of its messages, and what strategies would save."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import lru_cache
from itertools import pairwise
from math import prod
from statistics import fmean

import torch

from commopt.aggregate import Buffer, Call, LocalSGD
from commopt.cost import PRIMITIVES, LinkKey, Links, Speeds, nominal_links, ring
from commopt.doctor.machine import Machine
from commopt.doctor.verdict import gain
from commopt.doctor.verdict.facts import InterfaceRates, Leg, Level, Measurements, Overlap, Training
from commopt.doctor.verdict.judge import Verdict
from commopt.doctor.verdict.measure import Found, with_expected
from commopt.doctor.verdict.script import training_of
from commopt.doctor.verdict.trained import judge_training
from commopt.doctor.verdict.wires import own_endpoints
from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.feedback.layout import Piece
from commopt.groups import TeamShape
from commopt.probe.network import distinct
from commopt.probe.report import node_factor
from commopt.recording import Span, StepRecord
from commopt.run.recorded import Recorded
from commopt.simulate import Parameter, Workload
from commopt.timeline import Analysis, analyse
from commopt.timeline.analysis import typical_steps
from commopt.timeline.recordings import LOCAL, WAITING

_INSIDE_GB_PER_S = {"gloo": 1.0, "nccl": 20.0}
"""Assumed inside a node where a strategy sends nothing there by itself: gloo on one host; PCIe 4."""
_LATENCY_US = {"gloo": (100.0, 50.0), "nccl": (15.0, 3.0)}  # of a step of a collective, between nodes and inside one
_LONG = 0.5  # of the longest collective: shorter ones say more of latency than of a rate
_ITEMSIZES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def verdict_on(recorded: Recorded, machine: Machine | None = None) -> Verdict:
    """Return the verdict on a training that has ended. machine: as `measured`."""
    return judge_training(measured(recorded, machine))


def measured(recorded: Recorded, machine: Machine | None = None) -> Measurements:
    """Return what a recording tells. machine: this rank's, which knows what its links should carry."""
    timeline, shape = recorded.timeline, recorded.shape
    analysis, backend = analyse(timeline), _backend(shape)
    nodes = distinct(recorded.hosts)
    training = replace(_training(recorded, analysis, nodes), strategy=_strategy(recorded))
    legs = legs_of(recorded)
    if machine is not None:
        legs = _beside_expected(legs, machine, backend)
    training, note = _with_gains(recorded, analysis, training, legs)
    return Measurements(
        nodes,
        shape.ranks_per_node,
        backend,
        training=replace(training, note=note),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        legs=legs,
        overlap=_overlap(recorded, analysis, legs),
        unrecorded=_unrecorded(recorded),
    )


def _backend(shape: TeamShape) -> str:
    return "nccl" if shape.default_device.type == "cuda" else "gloo"


def _strategy(recorded: Recorded) -> str:
    """Return the strategy as asked for, with the one in use where it is another."""
    if recorded.aggregator is None or not recorded.strategy.startswith("auto"):
        return recorded.strategy
    return f"auto, now {gain.preset_of(recorded.aggregator)}"


def _unrecorded(recorded: Recorded) -> str:
    local = recorded.aggregator
    if isinstance(local, LocalSGD) and recorded.shape.node_count > 1:
        return f"what nodes send each other every {local.period} steps"
    return "" if recorded.averages or recorded.aggregator is None else "the weights that FSDP2 gathers"


# --------------------------------------------------------------------------------- the step and its overlap


def _training(recorded: Recorded, analysis: Analysis, nodes: Sequence[str]) -> Training:
    training = training_of(recorded.timeline, recorded.model)
    if not analysis.stragglers:
        return training
    late = analysis.stragglers[0]
    place = "before backward" if late.bucket is None else f"in backward, up to bucket {late.bucket} ({late.label})"
    node = next(each.node for each in analysis.ranks if each.rank == late.rank)
    return replace(training, late_host_busy=recorded.busy.get(late.rank), late_node=nodes[node], late_place=place)


def _overlap(recorded: Recorded, analysis: Analysis, legs: Sequence[Leg]) -> Overlap:
    messages, last = analysis.messages, analysis.messages[-1]
    stages_us = [{name: time_us for name, time_us in each.stages_us.items() if name != WAITING} for each in messages]
    transfer_us = sum(sum(each.values()) for each in stages_us)
    taken_ms = sum(leg.taken_ms for leg in legs)
    records = [record for place in typical_steps(recorded.timeline) for record in recorded.timeline.steps[place]]
    window_us = [each.compute_end_us - min(bucket.ready_us for bucket in each.buckets) for each in records]
    passes_us = [each.compute_end_us - each.forward_us for each in records if each.forward_us is not None]
    known = [share for share in recorded.busy.values() if share is not None]
    return Overlap(
        messages=len(messages),
        movable=bool(recorded.buffers),
        planned=recorded.planned,
        transfer_ms=transfer_us / 1e3,
        hidden_share=sum(leg.taken_ms * leg.hidden_share for leg in legs) / taken_ms if taken_ms else 0.0,
        waiting_ms=analysis.mean.exposed_waiting_us / 1e3,
        hosts_busy=max(known, default=None),
        local_ms=sum(message.stages_us[LOCAL] for message in messages) / 1e3,
        window_ms=fmean(window_us) / 1e3,
        passes_ms=fmean(passes_us) / 1e3 if passes_us else None,
        last_ms=sum(stages_us[-1].values()) / 1e3,
        last_queue_ms=last.queue_us / 1e3,
        last_share=last.nbytes / max(sum(message.nbytes for message in messages), 1),
        last_label=last.label,
    )


# ------------------------------------------------------------------------------------------------- legs


@dataclass
class _Passed:
    """The collectives of one level: how long they took, how much of that was hidden, and what passed in it.

    long: of each, its bytes, the bytes that passed and the time.
    """

    taken_us: float = 0.0
    hidden_us: float = 0.0
    nbytes: float = 0.0
    long: list[tuple[int, float, float]] = field(default_factory=list)


def legs_of(recorded: Recorded) -> tuple[Leg, ...]:
    """Return the legs of a typical step's messages, the longest first; none where nothing was sent."""
    timeline, shape = recorded.timeline, recorded.shape
    passed: dict[str, _Passed] = defaultdict(_Passed)
    steps = [timeline.steps[place] for place in typical_steps(timeline)]
    for step in steps:
        _add(step, shape, passed)
    forms = _forms(recorded)
    legs = []
    for level, each in passed.items():
        largest = max(nbytes for nbytes, _, _ in each.long)
        long = [row for row in each.long if row[0] >= _LONG * largest]
        gbps = sum(row[1] for row in long) * 8e-3 / max(sum(row[2] for row in long), 1e-9)
        hidden = each.hidden_us / each.taken_us if each.taken_us else 0.0
        name, nbytes = _name(level, shape), round(each.nbytes / len(steps))
        taken_ms = each.taken_us / len(steps) / 1e3
        legs.append(Leg(level, name, forms.get(level, ""), nbytes, gbps, taken_ms, hidden, largest_nbytes=largest))
    return tuple(sorted(legs, key=lambda leg: -leg.taken_ms))


def _add(step: Sequence[StepRecord], shape: TeamShape, passed: dict[str, _Passed]) -> None:
    """Add the collectives of a step on all ranks. One begins when its last rank has come, and ends with its last."""
    computed_us = [record.compute_end_us for record in step]
    for same in zip(*(record.messages for record in step), strict=True):
        for level in dict.fromkeys(span.level for message in same for span in message.spans):
            teams = []
            for members in groups_at(shape, level):
                rows = [_known(span for span in same[place].spans if span.level == level) for place in members]
                until_us = max(computed_us[place] for place in members)
                teams.append([(spans, until_us) for spans in zip(*rows, strict=False)])
            for calls in zip(*filter(None, teams), strict=False):  # of all teams at once
                _count(passed[level], calls, level, shape.ranks_per_node)


def _count(passed: _Passed, calls: Sequence[tuple[Sequence[Span], float]], level: str, nodes: tuple[int, ...]) -> None:
    """Count a collective that teams of a level make at once, each with its end of computing; the slowest counts."""
    first = calls[0][0][0]
    taken_us, hidden_us = max(
        (end_us - begin_us, min(max(until_us - begin_us, 0.0), end_us - begin_us))
        for spans, until_us in calls
        for begin_us, end_us in [(max(each.begin_us for each in spans), max(each.end_us for each in spans))]
    )
    nbytes = first.nbytes * _factor(LinkKey(level, first.name, len(calls[0][0]), len(calls)), nodes)
    passed.taken_us += taken_us
    passed.hidden_us += hidden_us
    passed.nbytes += nbytes
    passed.long.append((first.nbytes, nbytes, taken_us))


def _known(spans: Iterator[Span]) -> list[Span]:
    return [span for span in spans if span.name in PRIMITIVES]


@lru_cache(maxsize=256)
def _factor(key: LinkKey, nodes: tuple[int, ...]) -> float:
    """Return the bytes that pass a node's link for each of a message; inside a node, that pass a rank's."""
    if key.level == "intra" or len(nodes) == 1:
        return ring(key.primitive, key.ranks).volume
    return node_factor(key, nodes)


def groups_at(shape: TeamShape, level: str) -> list[list[int]]:
    """Return the places of the ranks in each team of a level."""
    groups = [list(range(shape.size))]
    divisions = (shape.wire.nodes, *shape.wire.sites)
    for depth, part in enumerate([] if level == "world" else level.split(".")):
        division, found = divisions[depth], list[list[int]]()
        for members in groups:
            units: dict[int, list[int]] = {}
            for member in members:
                units.setdefault(division[member], []).append(member)
            if part == "intra":
                found += units.values()
            else:
                found += [list(across) for across in zip(*units.values(), strict=False)]
        groups = found
    return [members for members in groups if len(members) > 1]


def _name(level: str, shape: TeamShape) -> str:
    if shape.node_count == 1 or level == "intra":
        return "inside a node"
    if level == "world":
        return "all ranks" if max(shape.ranks_per_node) > 1 else "between nodes"
    if level.endswith("intra"):
        return "inside a site"
    return "between sites" if "." in level else "between nodes"


def _forms(recorded: Recorded) -> dict[str, str]:
    """Return the form of the values on each level, by the calls that the aggregator makes for the last buffers."""
    aggregator, dtype = recorded.aggregator, recorded.dtype or _dtype_of(recorded)
    if aggregator is None or dtype is None:
        return {}
    found: dict[str, Counter[str]] = defaultdict(Counter)
    messages = recorded.timeline.steps[-1][0].messages
    layouts = recorded.buffers or [Layout.anonymous(max(each.nbytes // dtype.itemsize, 1)) for each in messages]
    for layout in layouts:
        form = _short(str(dtype))
        for action in aggregator.calls(Buffer(layout, dtype), recorded.shape):
            if isinstance(action, Call):
                found[action.level][form] += action.nbytes
            elif action.kind in ("encode", "recode", "factor", "refresh") and action.what != "Exact()":
                form = form_of(action.what)
            elif action.kind == "decode":
                form = _short(str(dtype))
    return {level: forms.most_common(1)[0][0] for level, forms in found.items()}


def form_of(compressor: str) -> str:
    """Return what a compressor sends, in a word or two, by its repr."""
    if dtype := re.search(r"dtype=(torch\.\w+)", compressor):
        return _short(dtype[1])
    if bits := re.search(r"bits=(\d+)", compressor):
        return f"{bits[1]} bits"
    if rank := re.match(r"PowerSGD\((?:matrix_rank=)?(\d+)", compressor):
        return f"rank {rank[1]}"
    name = compressor.partition("(")[0]
    return {"OneBit": "1 bit", "Quantize": "8 bits", "Cast": "bfloat16"}.get(name, name)


def _short(dtype: str) -> str:
    return dtype.removeprefix("torch.")


def _dtype_of(recorded: Recorded) -> torch.dtype | None:
    """Return the dtype that buckets have by their bytes."""
    buckets = recorded.timeline.steps[-1][0].buckets
    if len(buckets) != len(recorded.buffers) or not buckets:
        return None
    sizes = {bucket.nbytes / max(layout.numel, 1) for bucket, layout in zip(buckets, recorded.buffers, strict=True)}
    return _ITEMSIZES.get(int(sizes.pop())) if len(sizes) == 1 else None


def _beside_expected(legs: Sequence[Leg], machine: Machine, backend: str) -> tuple[Leg, ...]:
    """Return the legs beside what adapters, cloud instance types or the emulator state."""
    wires = [
        InterfaceRates("", one.interface, one.used, 0, None, None, expected_gbps=one.gbps, source=one.source)
        for one in own_endpoints(machine)
    ]
    between, inside = with_expected(
        [Level("inter", 2, (), 0.0), Level("intra", 2, (), 0.0)], wires, machine, backend == "nccl"
    )
    stated = {"inside a node": inside, "inside a site": None, "between sites": None}
    found = []
    for leg in legs:
        level = stated.get(leg.name, between)
        found.append(leg if level is None else replace(leg, expected_gbps=level.expected_gbps, source=level.source))
    return tuple(found)


# ------------------------------------------------------------------------------------------------ gains


def _with_gains(
    recorded: Recorded, analysis: Analysis, training: Training, legs: Sequence[Leg]
) -> tuple[Training, str]:
    """Return the step with what strategies would save, and what that rests on; without, where it cannot be known."""
    aggregator, shape = recorded.aggregator, recorded.shape
    workload = workload_of(recorded, analysis)
    links, note = _links(recorded, legs)
    if aggregator is None or workload is None or links is None or not recorded.averages:
        return training, ""
    cuda = shape.default_device.type == "cuda"
    device = torch.cuda.get_device_name() if cuda else ""
    work = {} if cuda else gain.assumed_work(shape)
    found = Found(Measurements((), ()), links, {**work, **links.work})
    used = gain.Used(aggregator, _names(recorded, analysis))
    try:
        return gain.predict(workload, shape, found, device, training, used, len(gain.CANDIDATES)), note
    except ConfigurationError:  # the strategy in use cannot be simulated
        return training, ""


def _names(recorded: Recorded, analysis: Analysis) -> list[list[str]]:
    """Return the names of the units in each message."""
    of_bucket = {
        bucket.number: names for bucket, names in zip(analysis.buckets, _units(recorded, analysis), strict=True)
    }
    return [[part.name for number in message.buckets for part in of_bucket[number]] for message in analysis.messages]


def _units(recorded: Recorded, analysis: Analysis) -> list[list[Parameter]]:
    """Return the parameters in each bucket; where their shapes are unknown each bucket counts as one of them."""
    buckets, layouts = analysis.buckets, recorded.buffers
    dtype = recorded.dtype or _dtype_of(recorded) or torch.float32
    if len(layouts) == len(buckets):
        return [[_parameter(piece) for piece in layout.pieces] for layout in layouts]
    return [[Parameter(f"bucket {each.number}", (max(each.nbytes // dtype.itemsize, 1),))] for each in buckets]


def _parameter(piece: Piece) -> Parameter:
    return Parameter(piece.name, piece.shape if prod(piece.shape) == piece.numel else (piece.numel,))


def workload_of(recorded: Recorded, analysis: Analysis) -> Workload | None:
    """Return the step without communication: gradients are ready in the order of their buckets. None for no step."""
    dtype = recorded.dtype or _dtype_of(recorded) or torch.float32
    units = _units(recorded, analysis)
    marks = [0.5 * analysis.buckets[0].ready_us, *(bucket.ready_us for bucket in analysis.buckets)]
    gradients = []
    for parts, (before, after) in zip(units, pairwise(marks), strict=True):
        total, sent = max(sum(part.numel for part in parts), 1), 0
        for part in parts:
            sent += part.numel
            gradients.append((part, max(before + (after - before) * sent / total, 0.0), dtype))
    try:
        return Workload.of(recorded.model, gradients, 0, "recorded")
    except ConfigurationError:  # a parameter in two buckets
        return None


def _links(recorded: Recorded, legs: Sequence[Leg]) -> tuple[Links | None, str]:
    """Return the links by the rates of the run, or those that the user gave, and what that rests on."""
    if recorded.links is not None:
        return recorded.links, "Savings are predicted from the links given"
    shape, backend = recorded.shape, _backend(recorded.shape)
    between = [leg.gbps for leg in legs if leg.name != "inside a node" and leg.gbps > 0]
    inside = [leg.gbps / 8 for leg in legs if leg.name == "inside a node" and leg.gbps > 0]
    if (shape.node_count > 1 and not between) or (shape.node_count == 1 and not inside):
        return None, ""
    inside_gb_per_s = inside[0] if inside else _INSIDE_GB_PER_S[backend]
    latency_us, inside_latency_us = _LATENCY_US[backend]
    nic_gbps = min(between) if between else 8 * inside_gb_per_s
    speeds = Speeds(nic_gbps, inside_gb_per_s, inter_latency_us=latency_us, intra_latency_us=inside_latency_us)
    assumed = "" if inside or max(shape.ranks_per_node) == 1 else f"; {inside_gb_per_s:g} GB/s assumed inside a node"
    return nominal_links(shape, speeds), f"Savings are predicted from these rates{assumed}"
