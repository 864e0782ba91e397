# SPDX-License-Identifier: Apache-2.0
"""Clocks of other ranks, bytes over a team, and which steps are gathered."""

from __future__ import annotations

import random
import time
from unittest.mock import patch

import pytest

from commopt.groups import broadcast_bytes, gather_bytes, join
from commopt.timeline import Timeline, gather, recordings
from commopt.timeline.recordings import affordable, measure_offsets, offsets_from
from tests.ranks import run
from tests.timelines import training


def test_two_ranks_by_hand() -> None:
    found = offsets_from(entered_us=[[0.0, 100.0]], left_us=[[10.0, 107.0]])
    # Rank 0 left at 10, after rank 1 had entered at its 100: at most -90. Rank 1 left at 107, after 0: at least -107.
    assert found.offset_us == (0.0, -98.5)
    assert found.uncertainty_us == (0.0, 8.5)


@pytest.mark.parametrize("seed", range(20))
def test_skewed_clocks_are_found_within_the_uncertainty(seed: int) -> None:
    dice = random.Random(seed)
    ranks, rounds = dice.randint(2, 6), 24
    ahead_us = [0.0, *(dice.uniform(-1e9, 1e9) for _ in range(ranks - 1))]  # what the clocks show more than true time
    now, entered, left = 0.0, [], []
    for _ in range(rounds):
        enters = [now + dice.expovariate(1 / 50) for _ in range(ranks)]
        leaves = [max(enters) + 20 + dice.expovariate(1 / 100) for _ in range(ranks)]
        entered.append([time + ahead for time, ahead in zip(enters, ahead_us, strict=True)])
        left.append([time + ahead for time, ahead in zip(leaves, ahead_us, strict=True)])
        now = max(leaves)
    found = offsets_from(entered, left)
    for offset, uncertainty, ahead in zip(found.offset_us, found.uncertainty_us, ahead_us, strict=True):
        assert abs(offset + ahead) <= uncertainty + 1e-6
        assert uncertainty < 100


def test_many_ranks_show_each_other_fewer_steps() -> None:
    (records,) = zip(*training(ranks=1, nodes=1, buckets=10, steps=64).steps, strict=True)  # 30 pieces a step
    assert affordable(records, ranks=200) == records
    assert affordable(records, ranks=1000) == records[-13:]
    assert affordable(records, ranks=100_000) == records[-8:]
    assert affordable((), ranks=2) == ()


# ------------------------------------------------------------------------------------------ real ranks


def bytes_over(rank: int, world_size: int) -> bool:
    team = join().team
    for lengths in ((0, 0, 0), (1, 0, 5), (3, 3, 3), (100_000, 7, 99_999)):
        sent = [random.Random(place).randbytes(length) for place, length in enumerate(lengths)]
        assert gather_bytes(team, sent[team.rank]) == sent
        for src in range(world_size):
            assert broadcast_bytes(team, sent[src] if team.rank == src else None, src) == sent[src]
    return True


def test_bytes_of_any_length_reach_everyone() -> None:
    assert run(bytes_over, 3) == [True] * 3


def gather_uneven(rank: int, world_size: int) -> Timeline:
    """Ranks that recorded different steps, one of them with other buckets on rank 1."""
    plain = [step[rank] for step in training(ranks=3, buckets=2, steps=6).steps]
    other = [step[rank] for step in training(ranks=3, buckets=3, steps=6).steps]
    kept = {0: plain[:5], 1: [*plain[1:3], other[3], *plain[4:]], 2: plain[1:]}
    return gather(join().team, kept[rank])


def test_only_steps_that_all_ranks_recorded_alike_are_gathered() -> None:
    results = run(gather_uneven, 3, nodes=((0, 2), (1,)))
    assert all(timeline == results[0] for timeline in results)
    found = results[0]
    assert (found.ranks, found.nodes) == ((0, 2, 1), (0, 0, 1))
    assert [step[0].step for step in found.steps] == [1, 2, 4]
    assert len(found.uncertainty_us) == 3


AHEAD_S = 5


def compare_clocks(rank: int, world_size: int) -> list[float]:
    """Give each process a clock of its own, as on other machines; return by how much the offsets are wrong."""

    def ahead_ns() -> int:
        return time.perf_counter_ns() + rank * AHEAD_S * 1_000_000_000

    with patch.object(recordings, "perf_counter_ns", ahead_ns):
        offsets = measure_offsets(join().team)
    errors_us = [offset + place * AHEAD_S * 1e6 for place, offset in enumerate(offsets.offset_us)]
    assert all(abs(error) <= bound for error, bound in zip(errors_us, offsets.uncertainty_us, strict=True))
    return errors_us


@pytest.mark.alone
def test_clocks_of_other_machines_are_found() -> None:
    first, *others = run(compare_clocks, 3)
    assert max(map(abs, first)) < 20_000
    assert others == [first, first]  # all know the same
