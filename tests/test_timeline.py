# SPDX-License-Identifier: Apache-2.0
"""What a timeline says: times known by hand, who is named, and the report."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from commopt.errors import ConfigurationError
from commopt.groups import WireBytes
from commopt.recording import MessageRecord, Span
from commopt.timeline import StepBreakdown, Timeline, TrafficOutside, analyse, report
from commopt.timeline.analysis import lateness_us
from commopt.timeline.recordings import StageInterval, stage_intervals
from tests.timelines import training

MS = 1000.0


def test_a_message_is_cut_into_stages_without_gaps() -> None:
    spans = (Span("intra", "reduce", 8, 12.0, 18.0), Span("inter", "all_reduce", 8, 18.0, 25.0))
    message = MessageRecord((0,), "a", 8, 9.0, 10.0, 30.0, spans)
    assert stage_intervals(message, last_start_us=10.0) == [
        StageInterval("local", 10.0, 12.0),
        StageInterval("intra", 12.0, 18.0),
        StageInterval("inter", 18.0, 25.0),
        StageInterval("local", 25.0, 30.0),
    ]
    assert stage_intervals(message, last_start_us=15.0)[:2] == [
        StageInterval("waiting", 10.0, 15.0),
        StageInterval("intra", 15.0, 18.0),
    ]
    assert stage_intervals(message, last_start_us=99.0) == [StageInterval("waiting", 10.0, 30.0)]


def test_an_even_step_by_hand() -> None:
    # Forward 10 ms, a bucket every 5, messages of 6: ready at 15 and 20, on the lane from 15 to 21 and from 21 to 27.
    found = analyse(training(ranks=2, buckets=2))
    assert found.mean == StepBreakdown(27 * MS, 20 * MS, 5 * MS, 0, 7 * MS, 0)
    assert found.mean.communication_us == 12 * MS
    assert (found.mean.hidden_transfer_us, found.mean.exposed_transfer_us) == (5 * MS, 7 * MS)
    assert [rank.times for rank in found.ranks] == [found.mean] * 2
    assert [bucket.ready_us for bucket in found.buckets] == [15 * MS, 20 * MS]
    first, second = found.messages
    assert (first.ready_us, first.queue_us, first.finished_us) == (15 * MS, 0, 21 * MS)
    assert (second.ready_us, second.queue_us, second.finished_us) == (20 * MS, 1 * MS, 27 * MS)
    for message in found.messages:
        expected = {"waiting": 0, "local": 0.6 * MS, "intra": 1.8 * MS, "inter": 3.6 * MS, "world": 0}
        assert message.stages_us == pytest.approx(expected, abs=1e-6)


def test_a_late_rank_by_hand() -> None:
    # Rank 1 needs 3 ms more for its second bucket: rank 0 starts at 21 and waits until 23; both are done at 29.
    found = analyse(training(ranks=2, buckets=2, delay_us=lambda step, rank, bucket: 3 * MS * (rank == bucket == 1)))
    quick, slow = found.ranks
    assert quick.times == StepBreakdown(29 * MS, 20 * MS, 5 * MS, 0, 9 * MS, 2 * MS)
    assert slow.times == StepBreakdown(29 * MS, 23 * MS, 6 * MS, 0, 6 * MS, 0)
    assert (quick.late_us, slow.late_us) == (0, 3 * MS)
    assert found.last_exposed_us == 6 * MS
    assert found.buckets[1].ready_us == 23 * MS
    assert found.messages[1].stages_us["waiting"] == 1 * MS  # two on one rank, none on the other
    (straggler,) = found.stragglers
    assert (straggler.rank, straggler.late_us, straggler.bucket) == (1, 3 * MS, 1)


def test_a_step_of_unknown_beginning_counts_only_if_there_is_no_other() -> None:
    plain = training(ranks=2, buckets=2, steps=2)
    unknown = tuple(replace(record, forward_us=None) for record in plain.steps[0])
    found = analyse(replace(plain, steps=(unknown, plain.steps[1])))
    assert (found.first_step, found.compared_steps, found.mean.step_us) == (1, 1, 27 * MS)
    assert analyse(replace(plain, steps=(unknown,))).mean.step_us == 12 * MS  # from the first bucket on
    on_one = (unknown[0], plain.steps[0][1])
    assert analyse(replace(plain, steps=(on_one, plain.steps[1]))).compared_steps == 1


def test_a_message_waits_no_longer_than_it_lasts_whatever_the_clocks_say() -> None:
    plain = training(ranks=2, buckets=2)
    wrong = tuple((quick, slow.shifted(8 * MS)) for quick, slow in plain.steps)
    quick = analyse(replace(plain, steps=wrong)).ranks[0].times
    assert quick.hidden_waiting_us + quick.exposed_waiting_us == quick.communication_us == 12 * MS


def test_only_steps_with_the_present_buckets_are_compared() -> None:
    early, late = training(ranks=2, buckets=1, steps=3), training(ranks=2, buckets=2, steps=8)
    mixed = Timeline(late.ranks, late.nodes, late.uncertainty_us, early.steps + late.steps[3:])
    found = analyse(mixed)
    assert (found.first_step, found.last_step, found.compared_steps, found.recorded_steps) == (3, 7, 5, 8)
    assert len(found.messages) == 2


def test_parts_add_up_and_odd_steps_do_not_count() -> None:
    noisy = training(
        ranks=3, steps=21, jitter_us=4000, delay_us=lambda step, rank, at: 500 * MS if step % 5 == at == 1 else 0.0
    )
    found = analyse(noisy)
    for times in (found.mean, *(rank.times for rank in found.ranks)):
        assert times.compute_us + times.exposed_us == pytest.approx(times.step_us)
        assert times.step_us < 60 * MS
    for message in found.messages:
        assert message.ready_us + message.queue_us + sum(message.stages_us.values()) == pytest.approx(
            message.finished_us
        )


def test_no_step_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="enable recording"):
        analyse(Timeline((0,), (0,), (0.0,), ()))


# ------------------------------------------------------------------------------------------ who is late


@pytest.mark.parametrize("ranks", range(1, 8))
def test_lateness_is_measured_against_the_median_of_the_others(ranks: int) -> None:
    dice = np.random.default_rng(ranks)
    ready = dice.integers(0, 5, (3, ranks, 4)).astype(float)  # with ties
    found = lateness_us(ready)
    for rank in range(ranks):
        others = np.delete(ready, rank, axis=1)
        expected = ready[:, rank] - np.median(others, axis=1) if ranks > 1 else np.zeros((3, 4))
        assert np.array_equal(found[:, rank], expected)


def named(timeline: Timeline) -> list[tuple[int, int | None]]:
    return [(straggler.rank, straggler.bucket) for straggler in analyse(timeline).stragglers]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("bucket", [-1, 0, 1, 3])
def test_a_slow_rank_is_named_with_the_place_where_it_falls_behind(ranks: int, bucket: int) -> None:
    slow = training(
        ranks=ranks,
        jitter_us=1000,
        delay_us=lambda step, rank, at: 200 * MS if (rank, at) == (1, bucket) else 0.0,
    )
    (straggler,) = analyse(slow).stragglers
    assert straggler.rank == 1
    assert straggler.bucket == (bucket if bucket > 0 else None)
    assert straggler.late_us == pytest.approx(200 * MS, rel=0.05)
    assert ("before backward" in str(straggler)) == (bucket <= 0)


@pytest.mark.parametrize("jitter_us", [0.0, 300.0, 3000.0, 10_000.0])
def test_a_balanced_run_names_nobody(jitter_us: float) -> None:
    for seed in range(12):
        for ranks, steps in ((2, 5), (2, 10), (4, 6), (4, 20), (8, 5)):
            assert named(training(ranks=ranks, steps=steps, jitter_us=jitter_us, seed=seed)) == []


def test_what_is_rare_or_small_or_uncertain_names_nobody() -> None:
    once = training(delay_us=lambda step, rank, at: 200 * MS if (step, rank, at) == (3, 1, 1) else 0.0)
    assert named(once) == []
    small = training(delay_us=lambda step, rank, at: 1 * MS if (rank, at) == (1, 1) else 0.0)
    assert named(small) == []  # 1 of 40 ms
    slow = training(delay_us=lambda step, rank, at: 10 * MS if (rank, at) == (1, 1) else 0.0)
    assert named(slow) == [(1, 1)]
    unsteady = training(
        delay_us=lambda step, rank, at: 10 * MS if (rank, at) == (1, 1) else 30 * MS * (step % 2) * (at == -1)
    )
    assert named(unsteady) == []  # steps differ by more
    for uncertainty_us in ((0.0, 6 * MS, 0.0, 0.0), (6 * MS, 0.0, 6 * MS, 6 * MS)):
        assert named(replace(slow, uncertainty_us=uncertainty_us)) == []
    few = Timeline(slow.ranks, slow.nodes, slow.uncertainty_us, slow.steps[:4])
    assert named(few) == []


# ------------------------------------------------------------------- nodes that do not wait for each other


def apart(slow_us: float) -> Timeline:
    """Two nodes that average by themselves, as LocalSGD has them; rank 3 needs longer for its forward."""
    one = training(ranks=2, nodes=1)
    other = training(ranks=2, nodes=1, delay_us=lambda step, rank, at: slow_us if (rank, at) == (1, -1) else 0.0)
    both = [left + right for left, right in zip(one.steps, other.steps, strict=True)]
    inside = tuple(
        tuple(
            replace(
                record,
                messages=tuple(
                    replace(message, spans=tuple(replace(span, level="intra") for span in message.spans))
                    for message in record.messages
                ),
            )
            for record in step
        )
        for step in both
    )
    return Timeline((0, 1, 2, 3), (0, 0, 1, 1), (0.0,) * 4, inside)


def test_who_is_waited_for_where_nodes_do_not_wait_for_each_other() -> None:
    found = analyse(apart(5 * MS))
    waiting = [rank.times.hidden_waiting_us + rank.times.exposed_waiting_us for rank in found.ranks]
    assert waiting == pytest.approx([0, 0, 5 * MS, 0])
    (straggler,) = found.stragglers  # of 39 ms; what node 1 is behind node 0 by, step after step, is nobody's
    assert (straggler.rank, straggler.bucket) == (3, None)
    assert straggler.late_us == pytest.approx(5 * MS)
    assert analyse(apart(0.0)).stragglers == ()


# ------------------------------------------------------------------------------------------ the report

EVEN = report(
    training(ranks=2, buckets=2),
    WireBytes(intra=3_000_000, inter=1_500_000),
    TrafficOutside(start_up_broadcast_bytes=4_000_000, buffers_bytes_per_step=2_000),
    plan="2 buckets",
    predicted_exposed_us=6_500.0,
    predicted_finish_us=[21_000.0, 26_500.0],
)


def test_the_report_says_what_was_measured() -> None:
    text = str(EVEN).replace("\n  ", " ")  # how long lines go on
    for line in (
        "2 ranks on 2 nodes; steps 0 to 7: 8 compared of 8 recorded, those with the present buckets",
        "step 27.00 ms = compute 20.00 + exposed communication 7.00 (waiting 0.00, transfer 7.00)",
        "communication 12.00 ms, of which 42 % hidden behind compute",
        "slowest: no rank stands out",
        "plan: 2 buckets; exposed after the last rank's last gradient: 6.50 ms predicted, 7.00 measured",
        "this rank sends per step: 3 MB inside its node, 1.5 MB to other nodes; outside the hook: 0.002 MB of buffers "
        "per step, 4 MB at start-up",
        "rank  node   step  compute  waiting  transfer  waiting  transfer   late",
        "0        0  27.00    20.00     0.00      5.00     0.00      7.00  +0.00",
        "mean        27.00    20.00     0.00      5.00     0.00      7.00",
        "buckets  parameters     MB  ready  queue  local  intra  inter    end   plan",
        "1        layer1      0.001  20.00   1.00   0.60   1.80   3.60  27.00  26.50",
    ):
        assert line in text.split("\n")
    assert max(map(len, str(EVEN).split("\n"))) <= 80


def test_the_report_fits_many_ranks_and_long_names() -> None:
    late = report(
        training(ranks=40, buckets=60, steps=5, delay_us=lambda step, rank, at: 50 * MS if rank == 33 else 0.0),
        WireBytes(),
        TrafficOutside(),
    )
    lines = str(late).split("\n")
    assert max(map(len, lines)) <= 80
    assert any("rank 33 is 3050.00 ms behind" in line for line in lines)
    ranks = lines[lines.index("Ranks, ms (the 16 latest; 24 more)") :]
    ranks = ranks[: ranks.index("")]
    assert len(ranks) == 1 + 2 + 16 + 1  # title, headings, ranks, mean
    assert any(line.startswith("33 ") for line in ranks)
    assert "plan" not in str(late)
    assert "predicted" not in str(late)


def test_long_parameter_names_keep_their_ends() -> None:
    timeline = training(ranks=1, nodes=1, buckets=1, name="transformer.blocks.11.attention.output.weight .. x.bias")
    lines = str(report(timeline, WireBytes(), TrafficOutside())).split("\n")
    place = next(number for number, line in enumerate(lines) if line.startswith("0        ...tention.output."))
    assert "x.bias" in lines[place] + lines[place + 1]
    assert max(map(len, lines)) <= 80


def test_the_report_is_json() -> None:
    found = json.loads(json.dumps(EVEN.to_dict()))
    assert found["analysis"]["mean"]["exposed_us"] == 7 * MS
    assert found["sent_per_step"] == {"intra": 3_000_000, "inter": 1_500_000}
    assert found["analysis"]["messages"][1]["stages_us"]["inter"] == pytest.approx(3.6 * MS)


def test_a_prediction_of_other_messages_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="1 times for 2 messages"):
        report(training(buckets=2), WireBytes(), TrafficOutside(), predicted_finish_us=[1.0])
