# SPDX-License-Identifier: Apache-2.0
"""The judge of `commopt chaos` tells every way a run can end, its picture shows it, and bad input is refused."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from commopt.__main__ import main
from commopt.chaos.faults import FAULTS, STOP_S, read_faults
from commopt.chaos.journal import Journal, JournalReader, events_of
from commopt.chaos.judge import NotedStep, RankRecord, Reference, RunRecord, RunVerdict, gist, judge, named_ranks
from commopt.chaos.picture import COLOURS, picture, spans
from commopt.errors import ConfigurationError

LIMIT_S, TIMEOUT_S = 20.0, 15.0
VICTIM = 3
STEPS = tuple(NotedStep(number, True, True, 0.5, 1.0) for number in range(1, 21))
WELL = RankRecord(0, 31.0, 30.0, digest="a", steps=STEPS)
NAMED = "rank 0 lost a peer in bucket 0: no sign of life from rank 3 within 2 s\nConnection closed by peer"
RIGHT = RunRecord("flat", "", VICTIM, (2, 3), 0.0, None, (WELL,) * 4)
REFERENCE = Reference([RIGHT, RIGHT])


def error(text: str = NAMED, named: str | None = NAMED, after_s: float = 2.0) -> RankRecord:
    return RankRecord(1, 10 + after_s + 1, 10 + after_s, f"LaneError: {text}", named, None, STEPS[:9])


def run_of(fault: str, *ranks: RankRecord) -> RunRecord:
    """Return a run of four ranks that the fault struck after 10 s."""
    return replace(RIGHT, fault=fault, struck_s=10.0, ranks=ranks)


def verdict(run: RunRecord, reference: Reference = REFERENCE) -> RunVerdict:
    return judge(run, reference, LIMIT_S, TIMEOUT_S)


KILLED = RankRecord(-9, 10.0, steps=STEPS[:9])
STUCK = RankRecord(None, 60.0, steps=STEPS[:9])


# ------------------------------------------------------------------------------------------- the judge


def test_a_killed_rank_that_all_others_name_is_fine() -> None:
    found = verdict(run_of("kill", error(), error(after_s=2.5), error(), KILLED))
    assert (found.outcome, found.ok, found.seconds) == ("named error", True, 2.5)
    assert found.said == "no sign of life from rank 3 within 2 s"


def test_the_same_bits_after_a_fault_that_passes_are_right() -> None:
    for fault in ("stop", "slow", "flap", "clock"):
        found = verdict(run_of(fault, *[WELL] * 4))
        assert (found.outcome, found.ok, found.said) == ("right", True, "same bits")


@pytest.mark.parametrize("rank", range(4))
def test_one_rank_that_is_stuck_is_a_hang(rank: int) -> None:
    ranks = [error()] * 4
    ranks[rank] = STUCK
    found = verdict(run_of("partition", *ranks))
    assert (found.outcome, found.ok) == ("hang", False)
    assert f"rank {rank} was stuck after step 9" in found.said


def test_an_error_after_the_limit_is_a_hang() -> None:
    late = error(after_s=LIMIT_S + 1)
    found = verdict(run_of("kill", error(), late, error(), KILLED))
    assert (found.outcome, found.ok) == ("hang", False)
    assert "rank 1 noticed only after 21.0 s" in found.said


def test_a_process_that_outlives_its_error_is_a_hang() -> None:
    found = verdict(run_of("kill", replace(error(), status=None), error(), error(), KILLED))
    assert (found.outcome, found.ok) == ("hang", False)
    assert "process of rank 0 did not end" in found.said


def test_other_parameters_on_one_rank_are_a_wrong_model() -> None:
    found = verdict(run_of("stop", WELL, WELL, replace(WELL, digest="b"), WELL))
    assert (found.outcome, found.ok) == ("wrong model", False)
    assert "rank 2 ends with other parameters" in found.said


def test_survivors_that_train_on_without_the_dead_are_a_wrong_model() -> None:
    alone = replace(WELL, digest="b")
    assert verdict(run_of("kill", alone, alone, alone, KILLED)).outcome == "wrong model"


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (error("Connection reset by peer", None), "rank 0 raised no error of commopt: LaneError: Connection reset"),
        (error("rank 1 is late", "rank 1 is late"), r"rank 0 names none of \[3\]"),
        (RankRecord(-11, 12.0, steps=STEPS[:9]), "rank 0 died without a word, with status -11"),
        (replace(WELL, status=-6), "rank 0 ended with status -6 after its script"),
    ],
)
def test_an_error_that_does_not_name_the_fault_is_unnamed(record: RankRecord, says: str) -> None:
    found = verdict(run_of("kill", record, error(), error(), KILLED))
    assert (found.outcome, found.ok) == ("unnamed error", False)
    assert re.match(says, found.said), found.said


@pytest.mark.parametrize(("fault", "says"), [("oom", "not enough memory"), ("diskfull", "No space left on device")])
def test_the_rank_that_is_struck_has_to_say_why(fault: str, says: str) -> None:
    told = f"rank 3 (host) ended with an exception\nTraceback (most recent call last):\nOSError: {says}"
    others = error(told, told)
    found = verdict(run_of(fault, others, others, others, error(says, None)))
    assert (found.outcome, found.ok) == ("named error", True)
    assert found.said == f"rank 3 (host) ended with an exception: OSError: {says}"
    mute = verdict(run_of(fault, others, others, others, error("unexpected pos 64 vs 0", None)))
    assert (mute.outcome, mute.said[:24]) == ("unnamed error", "rank 3 does not say why:")


def test_both_sides_of_a_cut_name_the_other_one() -> None:
    near, far = (error(text, text) for text in ("no sign of life from rank 2, 3", "no sign of life from rank 0, 1"))
    store = error("the store did not answer", "the store did not answer")
    assert verdict(run_of("partition", near, near, far, store)).ok
    assert verdict(run_of("partition", near, near, near, far)).outcome == "unnamed error"
    assert verdict(run_of("partition", store, near, far, far)).outcome == "unnamed error"
    of_the_store = replace(run_of("partition", far, far, store, near), cut=(0, 1), victim=0)
    assert verdict(of_the_store).outcome == "unnamed error"  # rank 3 names its own side
    assert verdict(replace(of_the_store, ranks=(near, near, store, store))).ok


def test_an_error_where_training_could_have_gone_on_is_a_failure() -> None:
    run = run_of("stop", *[error()] * 4)
    assert not verdict(run).ok
    assert verdict(run).outcome == "named error"
    assert judge(run, REFERENCE, LIMIT_S, STOP_S / 2).ok  # the timeout is shorter


def nan_steps(after: float | str) -> tuple[NotedStep, ...]:
    return (*STEPS[:9], *(NotedStep(number, False, False, after) for number in range(10, 21)))


def test_a_nan_has_to_reach_every_rank_and_to_change_no_residual() -> None:
    told = replace(WELL, digest="nan", steps=nan_steps(0.5))
    assert verdict(run_of("nan", *[told] * 4)).ok
    unaware = verdict(run_of("nan", told, WELL, told, told))
    assert (unaware.outcome, unaware.said) == ("wrong model", "the NaN of rank 3 never reached rank 1")
    some = replace(told, steps=tuple(replace(step, any_finite=True) for step in nan_steps(0.6)))
    assert verdict(run_of("nan", *[some] * 4)).ok  # other messages were finite
    for after in (0.6, "nan"):
        changed = replace(told, steps=nan_steps(after))
        found = verdict(run_of("nan", told, told, changed, told))
        assert found.outcome == "wrong model"
        assert "residuals of rank 2" in found.said


def test_a_script_that_ends_before_the_fault_is_no_success() -> None:
    found = verdict(replace(run_of("kill", *[WELL] * 4), struck_s=None))
    assert not found.ok
    assert "give it more steps" in found.said


def test_a_run_that_never_came_to_the_fault_is_told_apart() -> None:
    found = verdict(replace(run_of("kill", error("no network", None), *[STUCK] * 3), struck_s=None))
    assert (found.outcome, found.ok) == ("unnamed error", False)
    assert found.said == "before the fault rank 0 did not end well: LaneError: no network"


def test_a_script_that_fails_by_itself_is_told_apart() -> None:
    broken = replace(RIGHT, ranks=(error("out of ideas", None), *[WELL] * 3))
    found = verdict(run_of("kill", *[error()] * 3, KILLED), Reference([RIGHT, broken]))
    assert not found.ok
    assert found.said == "without any fault rank 0 did not end well: LaneError: out of ideas"


def test_a_strategy_that_follows_times_is_judged_by_its_loss_and_its_replicas() -> None:
    tuned = Reference([RIGHT, RIGHT], tuned=True)
    other = replace(WELL, digest="b")
    assert verdict(run_of("stop", *[other] * 4), tuned).ok
    assert verdict(run_of("stop", other, other, other, WELL), tuned).outcome == "wrong model"
    worse = replace(other, steps=tuple(replace(step, loss=1.3) for step in STEPS))
    assert "loss of 1.3" in verdict(run_of("stop", *[worse] * 4), tuned).said


def test_a_script_that_ends_with_other_bits_each_time_is_judged_by_its_loss() -> None:
    other = replace(RIGHT, ranks=(replace(WELL, digest="c"),) * 4)
    assert not Reference([RIGHT, other]).reproducible
    assert verdict(run_of("stop", *[replace(WELL, digest="d")] * 4), Reference([RIGHT, other])).ok


def test_ranks_in_a_message() -> None:
    assert named_ranks("rank 12 waits for rank 3, 4 and 5; ranks 7 and 8 left at 9, Rank1") == {12, 3, 4, 5, 7, 8}
    assert gist("a" * 500).endswith("...")


# ------------------------------------------------------------------------------- journals and pictures


def test_a_line_that_is_not_whole_yet_is_read_later(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    reader = JournalReader(path)
    assert reader.new() == []
    Journal(path).write("begin", 1.0, pid=5)
    with path.open("a") as file:
        file.write('{"t": 2.0, "ev')
    assert reader.new() == [{"t": 1.0, "event": "begin", "pid": 5}]
    with path.open("a") as file:
        file.write('ent": "end"}\n')
    assert reader.new() == [{"t": 2.0, "event": "end"}]


def samples(*doing: tuple[float, str]) -> list[dict[str, object]]:
    return [{"t": t, "event": "sample", "doing": what} for t, what in doing]


def test_the_picture_shows_who_trained_waited_stood_still_came_back_and_died(tmp_path: Path) -> None:
    steady = [(tenth / 10, "training" if tenth < 20 else "waiting") for tenth in range(60)]
    gap = [(tenth / 10, "training") for tenth in range(60) if not 20 <= tenth < 50]
    assert [each[2] for each in spans(samples(*gap), 6.0)] == ["training", "stands still", "training"]
    events = {"events": [{"t": 0.0, "event": "begin"}], "rank0": samples(*steady), "rank1": samples(*gap)}
    events["events"] += [
        {"t": 2.0, "event": "fault", "what": "rank 1 <stopped>"},
        {"t": 5.0, "event": "over", "what": "continued"},
        {"t": 6.0, "event": "exit", "rank": 0, "status": 0, "stuck": False},
        {"t": 6.0, "event": "exit", "rank": 1, "status": -9, "stuck": False},
    ]
    for name, lines in events.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    svg = picture(*events_of(tmp_path, 2), "stop, flat & <hierarchical>")
    root = ET.fromstring(svg)
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"stop, flat & <hierarchical>", "rank 0", "rank 1", "rank 1 <stopped>", "died"} <= set(texts)
    for colour in (COLOURS["training"], COLOURS["waiting"], COLOURS["stands still"]):
        assert svg.count(colour) >= 2, colour  # in the legend, and in a row


# ------------------------------------------------------------------------------------------ bad input


def test_an_unknown_fault_names_the_known_ones() -> None:
    assert [fault.name for fault in read_faults("kill, nan,kill")] == ["kill", "nan"]
    with pytest.raises(ConfigurationError, match=r"fault 'kil' is unknown; did you mean kill\? known faults: kill, "):
        read_faults("stop,kil")
    with pytest.raises(ConfigurationError, match="fault '' is unknown"):
        read_faults("")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--faults", "meteor"], "fault 'meteor' is unknown; known faults: kill"),
        (["--strategy", "quantised"], "preset 'quantised' is unknown; did you mean"),
        (["--option", "check_every=-1"], "check_every is -1; it must be a whole number >= 0"),
        (["--option", "timeout=3"], "--option timeout=3 is what --timeout says"),
        (["--script", "nowhere.py"], "--script nowhere.py: there is no such file; pass the path of a script"),
        (["train.py"], "'train.py' is an argument for the script, and none is named; pass --script train.py"),
        (["--victim", "4"], "--victim 4 is none of 4 ranks; pass 0 to the last of them"),
        (["--limit", "3"], "--limit 3 is not more than --timeout 15"),
        (["--nodes", "1"], "'1' is not a whole number from 2 to 16"),
        (["--out", str(Path(__file__).parent)], "is not empty; pass a new folder"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["chaos", *arguments])
    except SystemExit as leave:
        status = int(str(leave.code))
    told = capsys.readouterr().err
    assert status == 2
    assert told.startswith("commopt chaos: ")
    assert told.count("\n") == 1
    assert says in told


def test_the_help_names_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chaos", "--help"])
    told = capsys.readouterr().out
    for fault in FAULTS.values():
        assert f"{fault.name:10} {fault.about}" in told
