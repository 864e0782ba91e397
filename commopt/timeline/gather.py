"""The recordings of all ranks on one clock."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from commopt.groups import Team, gather_bytes
from commopt.recording import StepRecord
from commopt.timeline.clocks import measure_offsets

# Every rank gets everybody's steps: as many as make about this many messages and collectives, but not fewer than 8.
_MOST_PIECES = 400_000
_FEWEST_STEPS = 8


@dataclass(frozen=True)
class Timeline:
    """Steps that all ranks recorded, with the same buckets and messages; times are on the clock of the first rank.

    `ranks` are the global ranks and `nodes` the node of each; `steps[k][place]` is what rank `ranks[place]` did in
    step k. Times of a rank may be wrong by `uncertainty_us[place]` against those of the first.
    """

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    uncertainty_us: tuple[float, ...]
    steps: tuple[tuple[StepRecord, ...], ...]


def gather(team: Team, records: Sequence[StepRecord]) -> Timeline:
    """Return the timeline of all ranks' `records`, on every rank; collective, on a lane.

    Of large models on many ranks only the last steps are taken. Clocks are compared now: earlier steps are off by what
    the clocks have drifted apart since, which no uncertainty contains.
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
    """Return the last of `records`, as many as so many ranks can show each other."""
    if not records:
        return records
    pieces = max(sum(1 + len(message.spans) for message in record.messages) for record in records)
    return records[-max(_FEWEST_STEPS, _MOST_PIECES // (pieces * ranks)) :]
