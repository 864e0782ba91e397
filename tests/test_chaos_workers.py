# SPDX-License-Identifier: Apache-2.0
"""The judge of runs with a parameter server: who is not struck has to go on, and who is has to say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from commopt import OneBit, ParameterServer
from commopt.__main__ import main
from commopt.chaos.asynchronous import judge_workers
from commopt.chaos.cli import Campaign
from commopt.chaos.faults import FAULTS, STOP_S
from commopt.chaos.judge import NotedStep, RankRecord, Reference, RunRecord, RunVerdict
from commopt.chaos.parameter_server import settings_of
from commopt.chaos.picture import picture
from commopt.errors import ConfigurationError

LIMIT_S, TIMEOUT_S = 20.0, 15.0
STEPS = tuple(NotedStep(number, True, True, None, 1.0) for number in range(1, 31))
ROUNDS = tuple((number, f"bits {number}") for number in range(8))
WELL = RankRecord(0, 31.0, 30.0, digest="a", steps=STEPS, pulled=ROUNDS, done=28.0)
SERVER = RankRecord(0, 32.0, 31.0, digest="s", done=84.0)
LOST = "the parameter server is lost: gave no sign of life for 15 s"
RIGHT = RunRecord("parameter_server:period=4", "", 2, (2,), 0.0, None, (WELL, WELL, WELL, SERVER), 3)


def error(text: str = LOST, named: bool = True, after_s: float = 2.0, done: float | None = 8.0) -> RankRecord:
    found = RankRecord(1, 11 + after_s, 10 + after_s, f"TransportError: {text}", text if named else None)
    return replace(found, steps=STEPS[:11], pulled=ROUNDS[:3], done=done)


def counting(done: float) -> RankRecord:
    return replace(SERVER, done=done)


def verdict(fault: str, *ranks: RankRecord, timeout_s: float = TIMEOUT_S, of: RunRecord = RIGHT) -> RunVerdict:
    """Return the verdict on a run that the fault struck after 10 s.

    of: tells whom it struck: the last worker, unless it is said.
    """
    run = replace(of, fault=fault, struck_s=10.0, ranks=ranks)
    reference = replace(RIGHT, ranks=(WELL,) * len(ranks))
    return judge_workers(run, Reference([reference, reference], tuned=True), LIMIT_S, timeout_s)


KILLED = RankRecord(-9, 10.0, steps=STEPS[:9], pulled=ROUNDS[:3], done=8.0)
OF_SERVER = replace(RIGHT, victim=3, cut=(0, 3))


@pytest.mark.parametrize("counted", [64.0, 66.0])
def test_the_others_go_on_without_a_worker_that_is_killed(counted: float) -> None:
    """Its last delta may have counted, or not."""
    found = verdict("kill", WELL, WELL, KILLED, counting(counted))
    assert (found.outcome, found.ok) == ("right", True)
    assert found.said == "same loss, alike in every round"


@pytest.mark.parametrize("fault", ["stop", "slow", "flap", "clock"])
def test_a_fault_that_passes_ends_no_worker(fault: str) -> None:
    assert verdict(fault, WELL, WELL, WELL, SERVER).ok
    found = verdict(fault, WELL, WELL, error(), counting(64))
    assert (found.outcome, found.ok) == ("named error", False)
    assert found.said.startswith("rank 2 could have gone on: the parameter server is lost")


def test_a_worker_that_was_silent_for_too_long_may_be_left_behind() -> None:
    assert verdict("stop", WELL, WELL, error(), counting(64), timeout_s=STOP_S / 2).ok
    assert not verdict("stop", WELL, error(), WELL, counting(64), timeout_s=STOP_S / 2).ok


@pytest.mark.parametrize("fault", ["kill", "partition", "nan", "oom"])
def test_nobody_else_may_end(fault: str) -> None:
    why = LOST if fault == "partition" else "no memory: parameter 'w' is not finite"
    struck = KILLED if fault == "kill" else error(why)
    assert verdict(fault, WELL, WELL, struck, counting(64)).ok
    found = verdict(fault, WELL, error("out of ideas", named=False), struck, counting(44))
    assert (found.outcome, found.ok) == ("unnamed error", False)
    assert found.said.startswith("rank 1 could have gone on")


@pytest.mark.parametrize("fault", ["partition", "nan"])
def test_who_is_struck_has_to_end_and_to_say_why(fault: str) -> None:
    found = verdict(fault, WELL, WELL, WELL, SERVER)
    assert (found.outcome, found.said) == ("wrong model", "rank 2 went on, and could not have")
    vague = verdict(fault, WELL, WELL, error("something is odd"), counting(64))
    assert (vague.outcome, vague.said) == ("unnamed error", "rank 2 does not name the fault: something is odd")


def test_a_server_that_dies_is_named_by_every_worker() -> None:
    found = verdict("kill", error(), error(), error(after_s=3), replace(KILLED, done=None), of=OF_SERVER)
    assert (found.outcome, found.ok, found.seconds) == ("named error", True, 3.0)
    assert found.said == LOST
    mute = verdict("kill", error(), error("reset", named=False), error(), KILLED, of=OF_SERVER)
    assert (mute.outcome, mute.said[:39]) == ("unnamed error", "rank 1 raised no error of commopt: Tran")
    alone = verdict("kill", error(), WELL, error(), KILLED, of=OF_SERVER)
    assert alone.outcome == "wrong model"


def test_a_server_that_fails_says_why() -> None:
    failed = replace(error("round 2 could not be closed: can't allocate memory", done=None), pulled=())
    assert verdict("oom", error(), error(), error(), failed, of=OF_SERVER).outcome == "named error"
    mute = replace(failed, error="it is over", named="it is over")
    found = verdict("oom", error(), error(), error(), mute, of=OF_SERVER)
    assert (found.outcome, found.said) == ("unnamed error", "the server does not say why: it is over")


def test_a_full_disk_does_not_end_the_server() -> None:
    unsaved = replace(SERVER, status=1)
    assert verdict("diskfull", WELL, WELL, WELL, unsaved, of=OF_SERVER).ok
    found = verdict("diskfull", WELL, WELL, WELL, SERVER, of=OF_SERVER)
    assert (found.outcome, found.said) == ("unnamed error", "the server ended with status 0 after its script")
    assert not verdict("diskfull", error(), error(), error(), counting(24), of=OF_SERVER).ok


def test_of_a_server_that_is_cut_off_its_own_node_keeps_training() -> None:
    assert verdict("partition", WELL, error(), error(), counting(44), of=OF_SERVER).outcome == "right"
    assert verdict("partition", error(), error(), error(), counting(24), of=OF_SERVER).outcome == "named error"
    assert not verdict("partition", error(), error(), error(), counting(24), of=OF_SERVER).ok


def test_ranks_of_one_worker_name_the_dead_one_by_its_place_there() -> None:
    two_by_two = replace(RIGHT, victim=3, cut=(2, 3), server=4)
    others = (WELL, replace(WELL, done=None))  # only the first rank of a worker counts
    killed, server = replace(KILLED, done=None), counting(36.0)
    mate = error("rank 0 lost rank 1 outside of commopt's own communication")
    assert verdict("kill", *others, mate, killed, server, of=two_by_two).ok
    found = verdict("kill", *others, error("rank 0 lost rank 3"), killed, server, of=two_by_two)
    assert (found.outcome, found.said) == ("unnamed error", "rank 2 does not name rank 1: rank 0 lost rank 3")
    found = verdict("kill", *others, mate, killed, counting(41.0), of=two_by_two)
    assert found.said == "the server counts 41 steps, and its workers 36 to 40"


def test_other_bits_in_a_round_are_a_wrong_model() -> None:
    odd = replace(WELL, pulled=(*ROUNDS[:5], (5, "others"), *ROUNDS[6:]))
    found = verdict("stop", WELL, odd, WELL, SERVER)
    assert (found.outcome, found.said) == ("wrong model", "ranks 0 and 1 pulled different parameters of round 5")


def test_each_step_counts_once() -> None:
    for wrong in (80.0, 88.0):
        found = verdict("stop", WELL, WELL, WELL, counting(wrong))
        assert (found.outcome, found.said) == ("wrong model", f"the server counts {wrong:g} steps, and its workers 84")
    found = verdict("kill", WELL, WELL, KILLED, counting(70.0))
    assert found.said == "the server counts 70 steps, and its workers 64 to 66"


def test_workers_have_to_learn_as_much_together() -> None:
    def ending_with(loss: float) -> RankRecord:
        return replace(WELL, steps=tuple(replace(step, loss=loss) for step in STEPS))

    assert verdict("stop", ending_with(1.25), ending_with(0.9), ending_with(1.0), SERVER).ok
    assert verdict("stop", *[ending_with(0.5)] * 3, SERVER).ok
    found = verdict("stop", WELL, ending_with(1.6), ending_with(1.0), SERVER)
    assert (found.outcome, found.said) == (
        "wrong model",
        "workers end with a mean loss of 1.2, and without the fault with 1",
    )
    assert verdict("stop", *[ending_with(float("nan"))] * 3, SERVER).outcome == "wrong model"


def test_without_one_worker_they_are_as_far_as_with_it_after_as_many_steps() -> None:
    def falling(record: RankRecord, of: Sequence[NotedStep], slope: float) -> RankRecord:
        return replace(record, steps=tuple(replace(step, loss=3.0 - slope * step.number / 28) for step in of))

    usual = [falling(WELL, STEPS, 1.0)] * 3
    reference = Reference([replace(RIGHT, ranks=(*usual, SERVER))] * 2)
    killed = falling(KILLED, KILLED.steps, 1.0)

    def found(slope: float) -> RunVerdict:
        ranks = (*[falling(WELL, STEPS, slope)] * 2, killed, counting(64.0))
        run = replace(RIGHT, fault="kill", struck_s=1.0, ranks=ranks)
        return judge_workers(run, reference, 20.0, 15.0)

    assert found(0.75).ok, "slower than three workers, but they have made three quarters of the steps"
    assert not found(0.3).ok


def test_a_worker_that_waits_forever_is_a_hang() -> None:
    stuck = replace(error(), status=None, noticed_s=None, error="", named=None)
    assert verdict("kill", WELL, stuck, KILLED, counting(64)).outcome == "hang"


# ------------------------------------------------------------------------------------------ bad input


def test_the_strategy_has_the_options_of_a_parameter_server() -> None:
    expected = ParameterServer(period=4, compressor=OneBit(), quorum=2)
    assert settings_of("parameter_server:period=4:compressor=OneBit():quorum=2") == expected
    for wrong in ("period", "perod=4", "period=0", "compressor=open('x')", "address='a:1'", "period=("):
        with pytest.raises(ConfigurationError):
            settings_of(f"parameter_server:{wrong}")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--strategy", "flat", "--victim", "server"], "--victim server is of parameter_server, and flat has none"),
        (["--strategy", "parameter_server", "--option", "check_every=5"], "--option check_every=5 is of attach"),
        (["--strategy", "parameter_server", "--victim", "server", "--faults", "nan"], "nan does not strike a server"),
        (["--strategy", "parameter_server", "--victim", "4"], "--victim 4 is none of 4 ranks"),
        (["--strategy", "parameter_server:perod=4"], "does not describe a ParameterServer"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert says in told


def test_orders_share_a_secret_that_the_script_does_not_know(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "train.py", (), ("parameter_server",), (FAULTS["kill"],), victim=4)
    found = campaign.orders(tmp_path)
    assert [order.victim for order in found] == [4] * 3
    assert {len(order.environment["COMMOPT_SECRET"]) for order in found} == {64}


def test_the_picture_has_a_row_for_the_server() -> None:
    journal = [{"t": 0.0, "event": "begin", "role": "server"}, {"t": 0.1, "event": "sample", "doing": "waiting"}]
    assert ">server</text>" in picture([{"t": 0.0, "event": "begin"}], [journal[1:], journal], "kill")
