# SPDX-License-Identifier: Apache-2.0
"""The recordings of all ranks on one clock, and the stages of each message on the lane."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt
import torch

from commopt.groups import Team, gather_bytes
from commopt.recording import MessageRecord, StepRecord

_WARM_UP_ROUNDS = 4


@dataclass(frozen=True)
class Offsets:
    """Differences between the clocks of the ranks.

    offset_us: to add to each rank's clock to get rank 0's.
    uncertainty_us: largest error of each offset, in either direction.
    """

    offset_us: tuple[float, ...]
    uncertainty_us: tuple[float, ...]


def offsets_from(entered_us: Sequence[Sequence[float]], left_us: Sequence[Sequence[float]]) -> Offsets:
    """Return the offsets that follow from `[round][rank]` times, each on the rank's own clock.

    No rank leaves a collective before the last one has entered it. With offsets o this means left_i + o_i >= entered_j
    + o_j for any two ranks, an upper bound of o_j - o_i. The tightest bounds of all rounds, also through third ranks
    (shortest paths), leave an interval for each offset; the result is its middle. The clocks must not drift during
    the rounds.
    """
    entered, left = np.asarray(entered_us, dtype=np.float64), np.asarray(left_us, dtype=np.float64)
    world_size = entered.shape[1]
    bound = np.full((world_size, world_size), np.inf)  # [i, j]: o_j - o_i is at most this
    for enters, leaves in zip(entered, left, strict=True):
        np.minimum(bound, leaves[:, None] - enters[None, :], out=bound)
    np.fill_diagonal(bound, 0.0)
    upper, lower = _shortest(bound), -_shortest(bound.T)
    middle, half = (upper + lower) / 2, (upper - lower) / 2
    return Offsets(tuple(middle.tolist()), tuple(half.tolist()))


def _shortest(length: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the length of the shortest path from 0 to every place (Bellman and Ford)."""
    distance: npt.NDArray[np.float64] = length[0].copy()
    for _ in range(len(length)):
        shorter = np.minimum(distance, (distance[:, None] + length).min(axis=0))
        if (shorter == distance).all():
            break
        distance = shorter
    return distance


def measure_offsets(team: Team, rounds: int = 32) -> Offsets:
    """Compare the clocks (perf_counter) of all ranks of `team`. Collective, on a lane."""
    source = torch.zeros(1, dtype=torch.float32, device=team.default_device)
    output = source.new_empty(team.size)
    times_ns = []
    for number in range(_WARM_UP_ROUNDS + rounds):
        entered_ns = perf_counter_ns()
        team.all_gather(output, source)
        output.cpu()  # on CUDA the collective has only been queued
        if number >= _WARM_UP_ROUNDS:
            times_ns.append((entered_ns, perf_counter_ns()))
    own = torch.tensor(times_ns, device=team.default_device)
    everyone = own.new_empty(team.size * own.numel())
    team.all_gather(everyone, own.flatten())
    table = everyone.cpu().view(team.size, rounds, 2).numpy().astype(np.float64) / 1000
    return offsets_from(table[:, :, 0].T.tolist(), table[:, :, 1].T.tolist())


# Every rank gets the steps of all ranks: about this many messages and collectives, but at least 8 steps.
_MOST_PIECES = 400_000
_FEWEST_STEPS = 8


@dataclass(frozen=True)
class Timeline:
    """Steps that all ranks recorded with the same buckets and messages, on the clock of the first rank.

    ranks: global ranks.
    nodes: node of each rank.
    uncertainty_us: largest error of each rank's times against the first rank's.
    steps: `steps[k][place]` is step k of rank `ranks[place]`.
    """

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    uncertainty_us: tuple[float, ...]
    steps: tuple[tuple[StepRecord, ...], ...]


def gather(team: Team, records: Sequence[StepRecord]) -> Timeline:
    """Return the timeline of all ranks' `records` on every rank. Collective, on a lane.

    For large models on many ranks only the last steps are taken. Clocks are compared now. Their drift since earlier
    steps is not part of the uncertainty.
    """
    clocks = measure_offsets(team)
    lists = json.dumps([record.to_lists() for record in affordable(records, team.size)])
    payloads = gather_bytes(team, zlib.compress(lists.encode()))
    by_rank = [
        {record.step: record.shifted(offset_us) for record in map(StepRecord.from_lists, json.loads(text))}
        for text, offset_us in zip(map(zlib.decompress, payloads), clocks.offset_us, strict=True)
    ]
    shared = sorted(set.intersection(*(set(steps) for steps in by_rank)))
    alike = [number for number in shared if len({steps[number].layout for steps in by_rank}) == 1]
    return Timeline(
        tuple(team.ranks),
        tuple(team.wire.nodes),
        clocks.uncertainty_us,
        tuple(tuple(steps[number] for steps in by_rank) for number in alike),
    )


def affordable(records: Sequence[StepRecord], ranks: int) -> Sequence[StepRecord]:
    """Return the last of `records`, as many as this number of ranks can exchange."""
    if not records:
        return records
    pieces = max(sum(1 + len(message.spans) for message in record.messages) for record in records)
    return records[-max(_FEWEST_STEPS, _MOST_PIECES // (pieces * ranks)) :]


WAITING = "waiting"
LOCAL = "local"
STAGES = (WAITING, LOCAL, "intra", "inter", "world")


@dataclass(frozen=True)
class StageInterval:
    """A time interval of a message in which the lane was in one stage."""

    stage: str
    begin_us: float
    end_us: float


def stays_inside(step: Sequence[StepRecord]) -> bool:
    """Return whether no collective of a step crossed between nodes, as in the steps of LocalSGD."""
    return all(map(_stays_inside, _by_message(step)))


def last_starts_us(step: Sequence[StepRecord], nodes: Sequence[int]) -> list[list[float]]:
    """Return the start of each message on the last of its ranks, [rank][message]. It cannot have ended before.

    All ranks take part in a message, unless it stays inside the nodes.

    nodes: node of each rank.
    """
    columns = []
    for same in _by_message(step):
        parts = nodes if _stays_inside(same) else [0] * len(nodes)
        last_us = dict.fromkeys(parts, -inf)
        for part, message in zip(parts, same, strict=True):
            last_us[part] = max(last_us[part], message.started_us)
        columns.append([last_us[part] for part in parts])
    return [list(row) for row in zip(*columns, strict=True)]


def _by_message(step: Sequence[StepRecord]) -> list[tuple[MessageRecord, ...]]:
    """Return each message as all ranks recorded it."""
    return list(zip(*(record.messages for record in step), strict=True))


def _stays_inside(same: Iterable[MessageRecord]) -> bool:
    return all(span.level == "intra" for message in same for span in message.spans)


def stage_intervals(message: MessageRecord, last_start_us: float) -> list[StageInterval]:
    """Return the stages of a message, in order and without gaps.

    The time up to `last_start_us` counts as waiting.
    """
    begin_us, end_us = message.started_us, message.finished_us
    edges = {time for span in message.spans for time in (span.begin_us, span.end_us)} | {last_start_us}
    cuts = sorted({begin_us, end_us, *(time for time in edges if begin_us < time < end_us)})
    found: list[StageInterval] = []
    for begin, end in pairwise(cuts):
        stage = WAITING if begin < last_start_us else _stage(message, (begin + end) / 2)
        if found and found[-1].stage == stage:
            begin = found.pop().begin_us
        found.append(StageInterval(stage, begin, end))
    return found


def stages_us(message: MessageRecord, last_start_us: float) -> dict[str, float]:
    """Return the time of the message in each of STAGES."""
    found = dict.fromkeys(STAGES, 0.0)
    for segment in stage_intervals(message, last_start_us):
        found[segment.stage] += segment.end_us - segment.begin_us
    return found


def _stage(message: MessageRecord, time_us: float) -> str:
    level = next((span.level for span in message.spans if span.begin_us <= time_us < span.end_us), LOCAL)
    return level.partition(".")[0]  # levels of sites are between nodes
