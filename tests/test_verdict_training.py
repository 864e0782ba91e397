# SPDX-License-Identifier: Apache-2.0
"""The verdict at the end of `commopt run --report`: from recordings made up here, of which every number is known."""

from __future__ import annotations

import json
import random
import string
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commopt.doctor.machine import Machine
from commopt.doctor.verdict import recording
from commopt.doctor.verdict.facts import Gain, Leg, Measurements, Overlap, Training
from commopt.doctor.verdict.gain import CANDIDATES
from commopt.doctor.verdict.judge import AS_IT_SHOULD_BE, SLOWER
from commopt.doctor.verdict.recording import form_of, groups_at, legs_of, measured, verdict_on
from commopt.doctor.verdict.show import MOST_LINES, lines_of
from commopt.doctor.verdict.trained import judge_training
from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.groups import TeamShape, WireBytes
from commopt.hooks import build_preset
from commopt.recording import Recorder
from commopt.run.cli import _show_verdict
from commopt.run.models import Models, Trained
from commopt.run.recorded import BLOCK, PERIOD, Recorded, StepRecording
from commopt.run.script import Choice
from commopt.timeline import Timeline, TrafficOutside, report
from commopt.timeline.page import write_page
from tests.html_pages import Page
from tests.machines import Tree
from tests.timelines import training

SHAPE = TeamShape.of((2, 2))
MIB = 1 << 20


def recorded(timeline: Timeline, preset: str = "hierarchical_bf16", **facts: Any) -> Recorded:
    """Return a recording of a model with one layer of 250 elements a bucket, on two nodes of two ranks."""
    buckets = timeline.steps[-1][0].buckets
    known: dict[str, Any] = {
        "aggregator": build_preset(preset),
        "averages": True,
        "buffers": tuple(Layout.of_parameters([(bucket.label, (25, 10))]) for bucket in buckets),
        "dtype": torch.float32,
        "busy": {},
    }
    return Recorded("GPT", preset, timeline, SHAPE, ("a", "b"), **(known | facts))


def said(of: Recorded) -> str:
    return " ".join(" ".join(lines_of(verdict_on(of))).split())


# ----------------------------------------------------------------------------------------- what it says


def test_exposed_communication_is_told_with_what_hides_it() -> None:
    """Four messages of 6 ms, of which three run beside buckets of 5 ms: 9 ms are left of a step of 39 ms."""
    verdict = verdict_on(recorded(training()))
    assert verdict.status == SLOWER
    assert verdict.sentence == "23% of a step of 39.0 ms is exposed communication, and no rank is waited for."
    assert verdict.overlap is not None
    assert verdict.overlap.transfer_ms == pytest.approx(24.0)
    assert verdict.overlap.hidden_share == pytest.approx(15 / 24, abs=0.03)  # 9 of 24 ms are exposed, less local work
    text = said(recorded(training()))
    assert "Recorded: 39.0 ms a step of GPT with hierarchical_bf16, 23% of it exposed" in text
    assert "Transfer in 4 messages: 24.0 ms" in text


def test_what_is_hidden_is_not_called_exposed() -> None:
    verdict = verdict_on(recorded(training(transfer_us=100.0)))
    assert verdict.status == AS_IT_SHOULD_BE
    assert verdict.causes == ()
    assert verdict.sentence.startswith("0% of a step of 30.1 ms is exposed")
    assert "all there is to win" in verdict.not_expected
    assert verdict.first == ""
    hidden = {leg.name: leg.hidden_share for leg in measured(recorded(training(transfer_us=100.0))).legs}
    assert hidden == pytest.approx({"inside a node": 0.75, "between nodes": 0.75})  # all but the last message


def test_a_late_rank_is_named_with_its_node_and_where_it_falls_behind() -> None:
    late = training(delay_us=lambda step, rank, bucket: 9000.0 if (rank, bucket) == (3, -1) else 0.0)
    verdict = verdict_on(recorded(late))
    assert "all wait for rank 3 on b, which is 9.00 ms late" in verdict.sentence
    assert "rank 3 on b is ready 9.00 ms after the others" in verdict.causes[0].text
    assert "Rank 3 falls behind before backward." in verdict.notes
    assert "while ranks wait for each other" in verdict_on(recorded(late, aggregator=None)).not_expected
    busy = verdict_on(recorded(late, busy={0: 0.1, 3: 0.6}))
    assert "in 60% of the time a program of its host waits for a CPU" in busy.causes[0].text


def test_ranks_that_are_late_in_turn_blame_nobody() -> None:
    turns = training(steps=12, delay_us=lambda step, rank, bucket: 30e3 if (rank, bucket) == (step % 4, 0) else 0.0)
    verdict = verdict_on(recorded(turns, busy={0: 0.9}))
    assert "for none in particular" in verdict.sentence
    assert not any(f"rank {rank} " in verdict.sentence for rank in range(4))
    (cause,) = [cause for cause in verdict.causes if "for each other" in cause.text]
    assert "wait for a CPU in 90% of the time" in cause.text
    assert "uneven batches" in said(recorded(turns, busy={0: 0.0}))


def test_each_leg_has_its_form_its_bytes_and_the_rate_that_was_reached() -> None:
    """A message is 100 bytes of a reduce_scatter in 1.8 ms, and 50 of an all_reduce by two pairs in 3.6 ms."""
    legs = {leg.name: leg for leg in legs_of(recorded(training()))}
    inside, between = legs["inside a node"], legs["between nodes"]
    assert (inside.form, between.form) == ("float32", "bfloat16")
    assert (inside.nbytes, between.nbytes) == (4 * 50, 4 * 2 * 50)  # a rank's half; a node's two ranks send all
    assert inside.gbps == pytest.approx(50 * 8e-3 / 1800)
    assert between.gbps == pytest.approx(100 * 8e-3 / 3600)
    assert (inside.taken_ms, between.taken_ms) == pytest.approx((4 * 1.8, 4 * 3.6))
    assert list(legs) == ["between nodes", "inside a node"], "the one that takes longest comes first"


@pytest.mark.parametrize(
    ("preset", "form"),
    [
        ("hierarchical", "float32"),
        ("hierarchical_bf16", "bfloat16"),
        ("hierarchical_quantized", "8 bits"),
        ("hierarchical_quantized:bits=4", "4 bits"),
        ("hierarchical_onebit", "1 bit"),
        ("hierarchical_powersgd", "rank 4"),
        ("hierarchical_dgc", "DGC"),
    ],
)
def test_the_form_between_nodes_is_the_compressors(preset: str, form: str) -> None:
    timeline = training()
    layouts = tuple(Layout.of_parameters([(f"layer{bucket}", (512, 512))]) for bucket in range(4))
    (between,) = [leg for leg in legs_of(recorded(timeline, preset, buffers=layouts)) if leg.name == "between nodes"]
    assert between.form == form


def test_forms_of_other_compressors_are_their_names() -> None:
    assert form_of("Cast(dtype=torch.float16)") == "float16"
    assert form_of("MyOwn(level=3)") == "MyOwn"


def test_float32_between_nodes_is_a_cause_where_16_bits_would_do() -> None:
    exact = recorded(training(transfer_us=60_000.0), "hierarchical", buffers=large(4))
    verdict = verdict_on(exact)
    (cause,) = [cause for cause in verdict.causes if "float32" in cause.text]
    assert cause.text.startswith("float32 goes between nodes, ")
    assert cause.remedy == "torchrun ... -m commopt run --strategy hierarchical_bf16 train.py"
    narrow = verdict_on(recorded(training(transfer_us=60_000.0), buffers=large(4)))
    assert not any("float32" in cause.text for cause in narrow.causes)


def large(count: int) -> tuple[Layout, ...]:
    return tuple(Layout.of_parameters([(f"layer{bucket}", (1024, 1024))]) for bucket in range(count))


def test_strategies_that_would_win_are_predicted_and_the_best_in_use_is_said_to_be() -> None:
    slow = training(transfer_us=60_000.0)
    verdict = verdict_on(recorded(slow, "hierarchical", buffers=large(4)))
    assert verdict.training is not None
    gains = verdict.training.gains
    assert 0 < len(gains) <= 3
    assert all(gain.step_ms < verdict.training.step_ms for gain in gains)
    assert verdict.first.startswith("torchrun ... -m commopt run --strategy ")
    assert any("Savings are predicted" in note for note in verdict.notes)


def test_the_strategy_in_use_is_said_to_be_the_best_where_it_is() -> None:
    slow = training(transfer_us=60_000.0)
    exact = verdict_on(recorded(slow, "hierarchical", buffers=large(4))).training
    assert exact is not None
    for preset in CANDIDATES:
        of = recorded(slow, preset, buffers=large(4))
        verdict = verdict_on(of)
        assert verdict.training is not None
        assert preset not in {gain.strategy for gain in verdict.training.gains}
        if not verdict.training.gains:
            assert f"none is faster than {preset}" in verdict.not_expected
            break
    else:
        pytest.fail("something is always better than every candidate")


def test_one_message_that_nothing_hides_is_a_cause_with_a_remedy() -> None:
    one = verdict_on(recorded(training(buckets=1, forward_us=8000.0, bucket_us=12_000.0)))
    (cause,) = [cause for cause in one.causes if "the only message" in cause.text]
    assert "--option plan=adaptive" in cause.remedy
    fsdp = verdict_on(recorded(training(buckets=1, bucket_us=12_000.0), buffers=()))
    assert any("call fully_shard on every block" in cause.text and not cause.remedy for cause in fsdp.causes)
    several = verdict_on(recorded(training()))
    assert not any("the only message" in cause.text for cause in several.causes)


def test_a_link_is_called_slow_by_its_long_messages_only(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write("proc/net/route", "")
    leg = Leg("inter", "between nodes", "float32", 8 * MIB, 0.05, 9.0, 0.0, 0.2, "commopt cluster --rate", 2 * MIB)
    step = Training("GPT", True, 500.0, 200.0, 300.0)
    found = Measurements(("a", "b"), (1, 1), training=step, legs=(leg,))
    verdict = judge_training(found)
    assert "50.0 Mb/s of 200 Mb/s (commopt cluster --rate)" in verdict.causes[0].text
    assert verdict.rows[0].verdict == "slow"
    short = judge_training(replace(found, legs=(replace(leg, largest_nbytes=1000),)))
    assert short.causes == ()
    assert short.rows[0].verdict == "short messages"
    with_machine = measured(recorded(training()), Machine(tmp_path, {}))
    assert all(each.expected_gbps is None for each in with_machine.legs)


# ----------------------------------------------------------------------- what is not recorded is not there


def test_a_partial_recording_invents_nothing() -> None:
    """Of a model that was gone only the messages are known: no form, no rate of links, no strategy is named."""
    gone = Recorded("GPT", "hierarchical_bf16", training(), SHAPE, ("a", "b"))
    verdict = verdict_on(gone)
    assert verdict.training is not None
    assert (verdict.training.gains, verdict.first) == ((), "")
    assert {row.should_be + row.verdict for row in verdict.rows} == {""}
    text = said(gone)
    assert "should be" not in text
    assert not any(word in text for word in ("float32", "bfloat16", "Savings", "plan=adaptive", "None", "nan"))
    assert not any(name in text for name in CANDIDATES if name != "hierarchical_bf16" and name != "hierarchical")


def test_messages_without_collectives_have_no_legs_and_no_prediction() -> None:
    """As a LocalSGD on nodes of one rank has them."""
    bare = training()
    steps = tuple(
        tuple(
            replace(record, messages=tuple(replace(message, spans=()) for message in record.messages))
            for record in step
        )
        for step in bare.steps
    )
    local = recorded(replace(bare, steps=steps), "onebit_local")
    verdict = verdict_on(local)
    assert verdict.rows == ()
    assert verdict.training is not None
    assert verdict.training.gains == ()
    assert "what nodes send each other every 16 steps" in said(local)


def test_without_a_recorded_step_there_is_no_verdict() -> None:
    with pytest.raises(ConfigurationError, match="no step of a training was recorded"):
        judge_training(Measurements(("a",), (1,)))


def test_teams_of_a_level_are_those_that_shapes_have() -> None:
    shape = TeamShape.of((2, 2, 2, 2), sites=[[0, 0, 1, 1]])
    for rank in range(shape.size):
        for part in shape.seen_from(rank).parts:
            if part.size > 1:
                (own,) = [members for members in groups_at(shape, part.level) if rank in members]
                assert len(own) == part.size
                assert own.index(rank) == part.rank
                assert [shape.wire.nodes[member] for member in own] == list(part.wire.nodes)


# --------------------------------------------------------------------------------------- made-up recordings


def made_up(draw: random.Random) -> Recorded:
    """Return a recording of any sense, with names of any length and any part missing."""

    def name(longest: int = 90) -> str:
        return "".join(draw.choices(string.ascii_letters + "-. \n%{", k=draw.randint(1, longest))).replace("{", "")

    buckets, jitter = draw.randint(1, 5), 10 ** draw.uniform(0, 5)
    timeline = training(
        buckets=buckets,
        steps=draw.randint(1, 9),
        transfer_us=10 ** draw.uniform(0, 7),
        jitter_us=jitter,
        seed=draw.randint(0, 9),
        delay_us=lambda step, rank, bucket: 2 * jitter if rank == draw.randint(0, 3) else 0.0,
        name=name(60) + "{}",
    )
    preset = draw.choice([*CANDIDATES, "auto", "hierarchical_onebit", "dgc"])
    known = recorded(timeline, preset)
    gone: dict[str, Any] = {"aggregator": None, "buffers": (), "dtype": None, "averages": False}
    missing = {field: value for field, value in gone.items() if draw.random() < 0.3}
    busy: dict[int, float | None] = {rank: draw.choice([None, draw.random()]) for rank in range(4)}
    return replace(known, model=name(60), hosts=(name(), name()), busy=busy, planned=draw.random() < 0.3, **missing)


@pytest.mark.parametrize("seed", range(10))
def test_any_recording_fits_a_small_terminal(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(6):
        verdict = verdict_on(made_up(draw))
        lines = lines_of(verdict)
        assert len(lines) <= MOST_LINES, lines
        assert all(len(line) <= 80 and "\n" not in line for line in lines), lines
        assert verdict.status in (AS_IT_SHOULD_BE, SLOWER)
        assert not {"nan", "inf", "None"} & set(" ".join(lines).split())
        json.dumps(verdict.as_document(), allow_nan=False)


@pytest.mark.parametrize("seed", range(10))
def test_any_facts_fit_a_small_terminal_and_come_back_from_a_file(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)

    def number(low: float = -3, high: float = 6) -> float:
        return 10 ** draw.uniform(low, high)

    def share() -> float:
        return draw.random()

    for _ in range(100):
        legs = tuple(
            Leg(
                *("inter", "x" * draw.randint(1, 40), "y" * draw.randint(0, 20), int(number()), number(), number()),
                *(share(), draw.choice([None, number()]), "z" * draw.randint(0, 50), int(number())),
            )
            for _ in range(draw.randint(0, 9))
        )
        gains = tuple(Gain(draw.choice(CANDIDATES), number(), False, (None, number(0, 1))) for _ in range(9))
        step = Training(
            "m" * draw.randint(1, 60), True, number(), number(), number(), draw.randint(-1, 3), number(), gains, "note"
        )
        overlap = Overlap(
            draw.randint(1, 9),
            share() < 0.5,
            share() < 0.5,
            number(),
            share(),
            number(),
            draw.choice([None, share()]),
            *(
                number(),
                number(),
                draw.choice([None, number()]),
                number(),
                number(),
                share(),
                "l" * draw.randint(1, 90),
            ),
        )
        found = Measurements(
            ("a", "b"), (2, 2), training=step, legs=legs, overlap=draw.choice([None, overlap]), unrecorded="u" * 99
        )
        lines = lines_of(judge_training(found))
        assert len(lines) <= MOST_LINES, lines
        assert all(len(line) <= 80 for line in lines), lines
        found.save(tmp_path / "then.json")
        assert Measurements.load(tmp_path / "then.json") == found


# ------------------------------------------------------------------------------------------- what is recorded


class Asked(Exception):
    """Another rank was asked for something."""


class Alone:
    """A membership whose other ranks do not answer."""

    alive = True
    ranks = (0, 1)

    @property
    def store(self) -> object:
        raise Asked


def alone(steps: int = 0) -> tuple[StepRecording, SimpleNamespace]:
    """Return a recording of a rank whose others are gone, and its registration."""
    registration = SimpleNamespace(
        recorder=Recorder(),
        recorded_with=SimpleNamespace(closed=False, membership=Alone(), team=SimpleNamespace(rank=0)),
        logs=[],
        steps=steps,
    )
    state: Any = Holder()
    state._registration = registration
    registration.state = state  # as the model keeps it
    return StepRecording(state, "GPT", "flat"), registration


class Holder:
    """Stands for a CommState."""


def test_nobody_is_waited_for_while_an_error_passes_through() -> None:
    """A script may destroy its process group on the way out, which other ranks never come to."""
    recording, _registration = alone()
    with pytest.raises(Asked):
        recording.gather()
    models = Models(Choice("flat"))
    models.trained.append(Trained("GPT", 1, recording=recording))
    for error in (ValueError(), KeyboardInterrupt(), SystemExit(1), SystemExit("no")):
        models.end(error)
        assert models.trained[0].recording is recording
    models.end(SystemExit(0))
    assert models.trained[0].recording is None, "the other rank was asked"


def test_most_steps_of_a_long_training_are_not_recorded() -> None:
    """Recorded steps are not replayed as CUDA graphs."""
    recording, registration = alone()
    recorder = registration.recorder
    assert registration.logs == [recording]
    enabled = []
    for step in range(2 * PERIOD):
        enabled.append(recorder.enabled)
        registration.steps = step + 1
        recording()
    assert enabled == ([True] * BLOCK + [False] * (PERIOD - BLOCK)) * 2


def test_what_is_recorded_anyway_stays_so() -> None:
    registration: Any = SimpleNamespace(recorder=Recorder(always=True), recorded_with=None, logs=[])
    state: Any = Holder()
    state._registration = registration
    StepRecording(state, "GPT", "flat")
    assert registration.logs == []
    assert registration.recorder.enabled


# ---------------------------------------------------------------------------------------------- at the end


class Ended(StepRecording):
    """A recording that was gathered."""

    def __init__(self, of: Recorded) -> None:
        self.recorded = of


def trained(of: Recorded, rank: int = 0) -> Trained:
    return Trained(of.model, rank, recording=Ended(of))


def test_the_first_rank_prints_it_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 0):
        _show_verdict([trained(recorded(training()), rank)], printed=True)
        printed = capsys.readouterr().out.splitlines()
        assert bool(printed) == (rank == 0)
    assert printed[1].startswith("23% of a step of 39.0 ms is exposed communication")


def test_of_several_models_the_one_that_waits_longest_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    short = replace(recorded(training(transfer_us=100.0)), model="Critic")
    _show_verdict([trained(short), trained(recorded(training()))], printed=True)
    printed = capsys.readouterr().out
    assert "a step of GPT" in printed
    assert "Critic" not in printed


def test_an_error_in_it_is_one_line_and_ends_no_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("two\nlines")

    monkeypatch.setattr(recording, "verdict_on", fail)
    _show_verdict([trained(recorded(training()))], printed=True)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "commopt run: no verdict: ValueError: two lines\n"


def test_the_page_of_a_run_has_it(tmp_path: Path) -> None:
    timeline = training()
    lines = lines_of(verdict_on(recorded(timeline)))
    found = report(timeline, WireBytes(), TrafficOutside())
    write_page(tmp_path / "page.html", timeline, found, "", [], lines)
    assert lines[0] in "\n".join(Page(tmp_path / "page.html").texts)
