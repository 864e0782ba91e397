"""Clocks of other ranks, bytes over a team, and a made-up training on ranks whose clocks differ."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch

from commopt import recording
from commopt.groups import Team, WireBytes, broadcast_bytes, gather_bytes, join
from commopt.recording import Recorder
from commopt.timeline import Report, Timeline, TrafficOutside, gather, recordings, report
from commopt.timeline.recordings import affordable, measure_offsets, offsets_from
from tests.ranks import run
from tests.timelines import training


def test_two_ranks_by_hand() -> None:
    found = offsets_from(entered_us=[[0.0, 100.0]], left_us=[[10.0, 107.0]])
    # Rank 0 left at 10, after rank 1 had entered at its 100: at most -90. Rank 1 left at 107, after 0: at least -107.
    assert found.offset_us == (0.0, -98.5)
    assert found.uncertainty_us == (0.0, 8.5)


def test_one_rank_has_its_own_clock() -> None:
    assert offsets_from([[1.0]], [[2.0]]).offset_us == (0.0,)


def test_ranks_in_between_tighten_the_bounds() -> None:
    # In round k only ranks k and k+1 come late and leave at once; what the others tell alone is 500 times as vague.
    near = [{number, number + 1} for number in range(3)]
    entered = [[1000.0 if rank in pair else 0.0 for rank in range(4)] for pair in near]
    left = [[1002.0 if rank in pair else 2000.0 for rank in range(4)] for pair in near]
    found = offsets_from(entered, left)
    assert found.offset_us == (0, 0, 0, 0)
    assert found.uncertainty_us == (0, 2, 4, 6)


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


BUCKETS, SLEEPS_AT = 4, 2
AHEAD_S = 5


@contextmanager
def clock_ahead(rank: int) -> Iterator[None]:
    """Give this process a clock of its own, as on another machine."""

    def ahead_ns() -> int:
        return time.perf_counter_ns() + rank * AHEAD_S * 1_000_000_000

    with ExitStack() as stack:
        for module in (recordings, recording.recorder):
            stack.enter_context(patch.object(module, "perf_counter_ns", ahead_ns))
        yield


def train(team: Team, steps: int, slow: int | None) -> tuple[Report, float]:
    """Compute and reduce like a DDP model with a lane of its own; rank `slow` sleeps 0.2 s in every backward.

    Return also how many microseconds of sleep that really became, at most: machines may be busy.
    """
    recorder, slept_us = Recorder(), 0.0
    recorder.enabled = True
    gradient = torch.ones(1000)
    with ThreadPoolExecutor(1) as lane:

        def work(message: recording.Message | None) -> None:
            with recording.running(message), recording.primitive("world", "all_reduce", 4000):
                team.all_reduce(gradient)

        for step in range(steps):
            recorder.forward_begins()
            time.sleep(0.01)
            pending = []
            for bucket in range(BUCKETS):
                begun_ns = time.perf_counter_ns()
                time.sleep(0.2 if team.rank == slow and bucket == SLEEPS_AT else 0.005)
                slept_us = max(slept_us, (time.perf_counter_ns() - begun_ns) / 1000)
                if bucket == 0:
                    recorder.begin_step(step, torch.device("cpu"))
                recorder.bucket(bucket, f"layer{bucket}", 4000)
                if bucket == BUCKETS - 1:
                    recorder.compute_ends()
                pending.append(lane.submit(work, recorder.message([bucket], f"layer{bucket}", 4000)))
            for future in pending:
                future.result()
    return report(gather(team, recorder.steps()), WireBytes(), TrafficOutside()), slept_us


def late_and_even(rank: int, world_size: int) -> tuple[list[float], Report, Report, float]:
    team = join().team
    with clock_ahead(rank):
        offsets = measure_offsets(team)
        errors_us = [offset + place * AHEAD_S * 1e6 for place, offset in enumerate(offsets.offset_us)]
        assert all(abs(error) <= bound for error, bound in zip(errors_us, offsets.uncertainty_us, strict=True))
        late, slept_us = train(team, 6, slow=1)
        return errors_us, late, train(team, 12, slow=None)[0], slept_us


@pytest.mark.alone
def test_a_sleeping_rank_is_named_and_an_even_run_names_nobody() -> None:
    results = run(late_and_even, 2)
    assert results[0][1] == results[1][1]  # every rank has the whole timeline
    errors_us, late, even, _ = results[0]
    assert max(map(abs, errors_us)) < 20_000
    (straggler,) = late.analysis.stragglers
    assert (straggler.rank, straggler.bucket, straggler.label) == (1, SLEEPS_AT, f"layer{SLEEPS_AT}")
    assert 150_000 < straggler.late_us < 1.5 * results[1][3]
    assert "rank 1 is" in str(late)
    waiter, sleeper = late.analysis.ranks
    assert waiter.times.exposed_waiting_us + waiter.times.hidden_waiting_us > 150_000
    assert sleeper.times.exposed_waiting_us < waiter.times.exposed_waiting_us / 2
    assert even.analysis.stragglers == ()
    assert "no rank stands out" in str(even)
