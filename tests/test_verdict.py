# SPDX-License-Identifier: Apache-2.0
"""The judgement of `doctor --measure`: measurements in, one sentence, causes, remedies and a status out."""

from __future__ import annotations

import json
import random
import string
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from bench.evidence import verdict as evidence
from commopt.command_line import BAD_INPUT
from commopt.doctor.verdict.command import conclude
from commopt.doctor.verdict.facts import Gain, InterfaceRates, Level, Measurements, Pace, Problem, Training
from commopt.doctor.verdict.judge import AS_IT_SHOULD_BE, NOT_MEASURED, SLOWER, judge
from commopt.doctor.verdict.show import MOST_LINES, changes, lines_of
from commopt.errors import ConfigurationError
from commopt.run.recorded import waited_us
from topology.network import Network, SiteLevel

NODES = ("node0", "node1", "node2")


def wire(node: str, gbps: float = 9.4, interface: str = "eth0", used: bool = True) -> InterfaceRates:
    return InterfaceRates(node, interface, used, 2, gbps, gbps, gbps, 100.0, 10.0, "the adapter's speed")


def level(gbps: float = 9.0) -> Level:
    rates = (("all_gather", gbps), ("all_reduce", gbps), ("all_to_all", gbps))
    return Level("inter", 3, rates, 80.0, 10.0, "its interface")


HEALTHY = Measurements(
    NODES,
    (2, 2, 2),
    wires=tuple(map(wire, NODES)),
    levels=(level(),),
    paces=tuple(Pace(rank, NODES[rank // 2], 0.05) for rank in range(6)),
)
TRAINING = Training("GPT", True, 500.0, 200.0, 300.0, gains=(Gain("hierarchical_bf16", 350.0, False, (1.0, 1.0)),))


def test_a_healthy_cluster_is_as_it_should_be() -> None:
    verdict = judge(HEALTHY)
    assert (verdict.status, verdict.causes) == (AS_IT_SHOULD_BE, ())
    assert verdict.sentence == "As it should be: 3 nodes of 2, 6 ranks, 9.00 Gb/s of 10.0 Gb/s between nodes."
    assert {row.verdict for row in verdict.rows} == {"as it should be"}


def test_the_slow_node_is_named_with_a_command_for_it() -> None:
    wires = (wire("node0"), wire("node1", 2.0), wire("node2"))
    verdict = judge(replace(HEALTHY, wires=wires, levels=(level(1.9),)))
    assert verdict.status == SLOWER
    assert "node1 carries 2.00 Gb/s over eth0, the other nodes 9.40 Gb/s" in verdict.sentence
    assert len(verdict.causes) == 1
    assert "on node1" in verdict.causes[0].remedy
    assert verdict.rows[0].verdict == "slow"


def test_of_two_nodes_neither_is_called_the_slow_one() -> None:
    found = replace(HEALTHY, nodes=NODES[:2], ranks=(2, 2), wires=(wire("node0", 2.0), wire("node1", 2.0)))
    verdict = judge(replace(found, levels=(level(1.9),)))
    assert verdict.status == SLOWER
    assert "eth0 of every node carries 2.00 Gb/s of 10.0 Gb/s" in verdict.sentence


def test_the_likely_reason_of_a_slow_wire_is_what_the_checks_found() -> None:
    mtu = Problem("mtu", "warning", "1500", "sudo ip link set eth0 mtu 9000; then: ping OTHER")
    wires = tuple(wire(node, 4.0) for node in NODES)
    verdict = judge(replace(HEALTHY, wires=wires, levels=(level(3.8),), problems=(mtu,)))
    assert "likely: mtu 1500" in verdict.sentence
    assert verdict.first == "sudo ip link set eth0 mtu 9000"


@pytest.mark.parametrize(
    ("backend", "remedy"), [("gloo", "export GLOO_SOCKET_IFNAME=eth1"), ("nccl", "export NCCL_SOCKET_IFNAME==eth1")]
)
def test_a_wrong_interface_is_named_with_the_right_one(backend: str, remedy: str) -> None:
    slow = tuple(replace(wire(node, 0.9), expected_gbps=1.0) for node in NODES)
    fast = tuple(wire(node, 9.4, "eth1", used=False) for node in NODES)
    verdict = judge(replace(HEALTHY, backend=backend, wires=slow + fast, levels=(level(0.8),)))
    assert verdict.status == SLOWER
    assert "uses eth0 (900 Mb/s); eth1 carries 9.40 Gb/s" in verdict.sentence
    assert verdict.first == remedy


def test_an_interface_that_not_all_nodes_have_is_no_remedy() -> None:
    verdict = judge(replace(HEALTHY, wires=(*HEALTHY.wires, wire("node0", 99.0, "eth1", used=False))))
    assert verdict.status == AS_IT_SHOULD_BE


def test_loopback_by_host_name_is_no_measurement_and_names_the_interface() -> None:
    silent = Problem("nodes-reach", "error", "127.0.1.1 of rank 0 (node0), from node1: Connection refused", "x")
    wires = tuple(replace(each, used=False) for each in HEALTHY.wires)
    verdict = judge(replace(HEALTHY, wires=wires, levels=(), problems=(silent,)))
    assert verdict.status == NOT_MEASURED
    assert "127.0.1.1 of rank 0" in verdict.sentence
    assert "loopback is offered" in verdict.sentence
    assert verdict.first == "export GLOO_SOCKET_IFNAME=eth0"


def test_one_connection_that_does_not_fill_the_link() -> None:
    wires = tuple(replace(each, send_gbps=2.5, receive_gbps=2.5) for each in HEALTHY.wires)
    verdict = judge(replace(HEALTHY, wires=wires, levels=(level(2.4),)))
    assert "2.50 Gb/s is reached over eth0, and 4 connections carry 3.8 times as much" in verdict.sentence
    assert verdict.first == "export GLOO_SOCKET_IFNAME=eth0,eth0,eth0,eth0"
    over_nccl = judge(replace(HEALTHY, wires=wires, levels=(level(2.4),), backend="nccl"))
    assert "4 connections carry 3.8 times as much; NCCL opens one a channel" in over_nccl.sentence
    assert over_nccl.first == "export NCCL_SOCKET_NTHREADS=2 NCCL_NSOCKS_PERTHREAD=2"  # four together, as measured
    listed = replace(HEALTHY, wires=wires, levels=(level(9.2),), connections=4)
    assert judge(listed).status == AS_IT_SHOULD_BE  # what several connections reach already
    assert judge(listed).notes == ("You have 4 connections between two ranks; without them there is one.",)
    assert judge(replace(listed, split=True)).first == verdict.first  # others than commopt have one
    far = judge(replace(HEALTHY, wires=tuple(replace(each, latency_us=40_200) for each in wires), levels=(level(2.4),)))
    assert "2.50 Gb/s is reached over eth0 by one stream on a path of 40 ms, and 4 connections" in far.sentence


def test_a_disturbed_test_of_an_interface_blames_nobody_where_collectives_got_more_through_it() -> None:
    slow = replace(wire("node1", 2.0), several_gbps=2.1)
    assert judge(replace(HEALTHY, wires=(wire("node0"), slow, wire("node2")))).status == AS_IT_SHOULD_BE
    one = tuple(replace(each, send_gbps=3.0) for each in HEALTHY.wires)
    assert judge(replace(HEALTHY, wires=one)).status == AS_IT_SHOULD_BE


def test_collectives_far_below_plain_tcp() -> None:
    verdict = judge(replace(HEALTHY, levels=(level(1.0),)))
    assert "gloo reaches 1.00 Gb/s between nodes where plain TCP carries 9.40 Gb/s" in verdict.sentence


def test_a_slow_rank_is_named_and_not_the_network() -> None:
    paces = tuple(replace(pace, tflops=0.02) if pace.rank == 3 else pace for pace in HEALTHY.paces)
    verdict = judge(replace(HEALTHY, paces=paces))
    assert verdict.status == SLOWER
    assert "rank 3 on node1 computes 2.5 times slower than the others" in verdict.sentence


def test_a_late_rank_of_the_script_is_named_and_not_the_network() -> None:
    verdict = judge(replace(HEALTHY, training=replace(TRAINING, late_rank=4, late_ms=120.0)))
    assert verdict.status == SLOWER
    assert "rank 4 on node2 is ready 120 ms after the others" in verdict.sentence
    assert "not the network" in verdict.sentence
    assert judge(replace(HEALTHY, training=replace(TRAINING, late_rank=4, late_ms=20.0))).status == AS_IT_SHOULD_BE


def test_a_late_rank_on_a_host_without_a_free_cpu_is_the_hosts_fault() -> None:
    late = replace(TRAINING, late_rank=4, late_ms=120.0)
    busy = judge(replace(HEALTHY, training=replace(late, late_host_busy=0.6)))
    assert busy.status == SLOWER
    assert "rank 4 on node2 is ready 120 ms after the others" in busy.sentence
    assert "in 60% of the time a program of its host waits for a CPU" in busy.sentence
    assert busy.causes[0].remedy == "top -b -n 1 | head -20   # on node2"
    idle = judge(replace(HEALTHY, training=replace(late, late_host_busy=0.1)))
    assert "its data, its device or its model" in idle.sentence


def test_how_long_programs_waited_is_read_from_the_kernel(tmp_path: Path) -> None:
    assert waited_us(tmp_path) is None
    (tmp_path / "proc/pressure").mkdir(parents=True)
    lines = "some avg10=2.11 avg60=2.97 avg300=18.99 total=32497260284\nfull avg10=0.00 total=7\n"
    (tmp_path / "proc/pressure/cpu").write_text(lines)
    assert waited_us(tmp_path) == 32497260284


def test_the_largest_cause_comes_first() -> None:
    paces = tuple(replace(pace, tflops=0.005) if pace.rank == 3 else pace for pace in HEALTHY.paces)
    wires = (wire("node0"), wire("node1", 2.0), wire("node2"))
    causes = judge(replace(HEALTHY, paces=paces, wires=wires, levels=(level(1.9),))).causes
    assert [cause.weight for cause in causes] == pytest.approx([10.0, 4.7])
    assert causes[0].text.startswith("rank 3")


def test_a_partial_measurement_is_not_called_healthy() -> None:
    stopped = replace(HEALTHY, levels=(), unmeasured="stopped by a signal")
    verdict = judge(stopped)
    assert verdict.status == NOT_MEASURED
    assert "stopped by a signal" in verdict.sentence
    assert judge(replace(stopped, wires=(wire("node0"), wire("node1", 2.0), wire("node2")))).status == SLOWER


def test_sites_that_nobody_told_are_a_cause_and_what_they_explain_is_none() -> None:
    nodes = ("a", "b", "c", "d")
    level = SiteLevel("site", (2, 2), 9.0, 1.0, 4.0, 20.0, 30.0)
    network = Network(nodes, ("site0", "site0", "site1", "site1"), (level,), (9.0,) * 4)
    slow = Level("world", 4, (("all_reduce", 1.0), ("all_to_all", 0.5)), 100.0, 10.0, "its interface")
    wires = tuple(InterfaceRates(node, "eth0", True, 3, 9.0, 9.0, None, 50.0, 10.0, "it") for node in nodes)
    untold = Measurements(nodes, (1, 1, 1, 1), wires=wires, levels=(slow,))
    assert "plain TCP carries" in judge(untold).causes[0].text
    verdict = judge(replace(untold, network=network))
    assert verdict.status == SLOWER
    (cause,) = verdict.causes
    assert cause.weight == 9.0
    assert "2 sites of 2 nodes: 9.00 Gb/s a node inside, 1.00 Gb/s across while all send (4.00" in cause.text
    assert cause.remedy == "export COMMOPT_SITE=site0   # on a, b"
    assert cause.elsewhere == ("export COMMOPT_SITE=site1   # on c, d",)
    shown = lines_of(verdict)
    assert "   $ export COMMOPT_SITE=site1   # on c, d" in shown
    assert any(
        line.split() == ["between", "sites,", "a", "node", "of", "all", "1.00", "Gb/s", "9.00", "Gb/s", "slow"]
        for line in shown
    )
    told = Measurements.read(json.loads(json.dumps(replace(untold, network=network).as_document())))
    assert told.network == network
    assert judge(replace(untold, network=Network(nodes))).causes == judge(untold).causes


def test_one_rank_alone_is_told_how_to_start_more() -> None:
    verdict = judge(Measurements(("a",), (1,)))
    assert verdict.status == NOT_MEASURED
    assert verdict.first.startswith("torchrun")


def test_what_a_strategy_saves_and_does_to_learning_is_shown_with_its_source() -> None:
    text = "\n".join(lines_of(judge(replace(HEALTHY, training=TRAINING))))
    assert "GPT, recorded: 500 ms a step with stock DDP, 60% of it exposed" in text
    assert "hierarchical_bf16  0.150 s" in text
    assert "SGD x 1.00, AdamW x 1.00" in text
    assert "docs/evidence/convergence.md" in text
    assert "--strategy hierarchical_bf16 train.py" in text
    assert "more than 2.5 times the speed" in text


def test_a_strategy_that_learns_slower_is_shown_and_not_the_one_to_try_first() -> None:
    gains = (Gain("onebit_local", 250.0, False, (None, 1.26)), *TRAINING.gains)
    verdict = judge(replace(HEALTHY, training=replace(TRAINING, gains=gains)))
    assert "--strategy hierarchical_bf16 " in verdict.first
    assert any(line.startswith("onebit_local") for line in lines_of(verdict))


# ------------------------------------------------------------------------------ made-up measurements


def made_up(draw: random.Random) -> Measurements:
    """Return measurements of any size and any sense, with names of any length."""

    def name(longest: int = 90) -> str:
        return "".join(draw.choices(string.ascii_letters + "-. \n;%", k=draw.randint(1, longest)))

    def rate() -> float:
        return 10 ** draw.uniform(-9, 6) if draw.random() < 0.9 else draw.choice([0.0, 1e-300, 1e12])

    def perhaps(value: float) -> float | None:
        return value if draw.random() < 0.7 else None

    nodes = tuple(name() for _ in range(draw.randint(1, 12)))
    wires = tuple(
        InterfaceRates(
            node, interface, used, 3, perhaps(rate()), perhaps(rate()), perhaps(rate()), None, perhaps(rate()), name(40)
        )
        for node in nodes
        for interface, used in (("eth0", True), (name(15), False))[: draw.randint(0, 2)]
    )
    levels = tuple(
        Level(each, 4, tuple((what, rate()) for what in ("all_reduce", "all_to_all")), 9.0, perhaps(rate()), name(40))
        for each in draw.sample(["intra", "inter", "world"], draw.randint(0, 3))
    )
    problems = tuple(
        Problem(draw.choice(["mtu", "nodes-reach", "sockets"]), draw.choice(["error", "warning"]), name(), name(200))
        for _ in range(draw.randint(0, 4))
    )
    gains = tuple(Gain(name(60), rate(), draw.random() < 0.3, (perhaps(rate()), None)) for _ in range(3))
    training = Training(name(60), True, rate(), rate(), rate(), draw.randint(-1, 3), rate(), gains, name(200))
    paces = tuple(Pace(rank, draw.choice(nodes), rate()) for rank in range(draw.randint(0, 9)))
    sites = draw.randint(2, 9)
    level = SiteLevel("site", (1, 2) * sites, rate(), rate(), rate(), rate(), rate())
    network = Network(nodes, tuple(f"site{place % sites}" for place in range(len(nodes))), (level,), (rate(),))
    return Measurements(
        nodes,
        tuple(draw.randint(1, 8) for _ in nodes),
        draw.choice(["gloo", "nccl"]),
        wires,
        levels,
        paces,
        problems,
        training if draw.random() < 0.7 else None,
        name(300) if draw.random() < 0.3 else "",
        "2026-11-27",
        network if draw.random() < 0.3 else None,
    )


@pytest.mark.parametrize("seed", range(20))
def test_any_verdict_fits_a_small_terminal(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        found, before = made_up(draw), made_up(draw)
        verdict = judge(found)
        lines = lines_of(verdict)
        assert len(lines) <= MOST_LINES, lines
        assert all(len(line) <= 80 and "\n" not in line for line in (*lines, *changes(found, before))), lines
        assert verdict.status in (AS_IT_SHOULD_BE, SLOWER, NOT_MEASURED)
        begins = ("As it should be: ", "Slower than it should be: ", "Could not measure: ")
        assert lines[0].startswith(begins[verdict.status].rstrip())
        weights = [cause.weight for cause in verdict.causes]
        known = [weight for weight in weights if weight is not None]
        assert known == sorted(known, reverse=True)
        assert weights[len(weights) - len(known) :] == known, "what gets nothing through comes first"
        json.dumps(verdict.as_document(), allow_nan=False)


@pytest.mark.parametrize("seed", range(10))
def test_measurements_come_back_from_a_file(seed: int, tmp_path: Path) -> None:
    found = made_up(random.Random(seed))
    found.save(tmp_path / "then.json")
    assert Measurements.load(tmp_path / "then.json") == found


def test_a_document_gets_the_verdict_on_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "verdict.json"
    file.write_text(json.dumps({"header": {}, "measured": HEALTHY.as_document()}))
    monkeypatch.setattr(sys, "argv", ["verdict", "--show", str(file)])
    assert evidence.main() == 0
    assert capsys.readouterr().out.splitlines() == ["```text", *lines_of(judge(HEALTHY)), "```"]
    file.write_text(json.dumps({"header": {}, "lines": ["38% of a step of 160 ms is exposed", "", "..."]}))
    assert evidence.main() == 0
    assert capsys.readouterr().out.splitlines()[1:-1] == ["38% of a step of 160 ms is exposed", "", "..."]
    file.write_text('{"measured": {"nodes": 3}}')
    with pytest.raises(SystemExit):
        evidence.main()
    assert "is none of python -m bench.evidence.verdict --json" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 1}', '{"format": 2, "nodes": [], "ranks": []}', '{"format": 1, "nodes": 3}']
)
def test_another_file_is_refused_with_the_remedy(text: str, tmp_path: Path) -> None:
    file = tmp_path / "then.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"then\.json.*measure again with --save"):
        Measurements.load(file)


def test_what_changed_since_then_is_told_the_largest_change_first() -> None:
    then = replace(HEALTHY, date="yesterday")
    now = replace(HEALTHY, wires=(wire("node0"), wire("node1", 4.7), wire("node2", 8.0)))
    assert changes(now, then) == [
        "Since yesterday:",
        "  node1 eth0: 4.70 Gb/s, was 9.40 Gb/s (0.50 times)",
        "  node2 eth0: 8.00 Gb/s, was 9.40 Gb/s (0.85 times)",
    ]
    assert changes(then, then) == ["Since yesterday:", "  no rate differs by more than 10 %"]


@pytest.mark.parametrize("option", ["html", "save"])
def test_a_file_that_can_be_written_no_more_is_one_line_below_the_verdict(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, why in (("/dev/full", "No space left on device"), (tmp_path / "gone" / "file", "No such file")):
        asked = Namespace(**{"json": False, "html": None, "save": None, option: Path(file)})
        assert conclude(HEALTHY, asked, None) == BAD_INPUT
        said = capsys.readouterr()
        assert said.out.startswith("As it should be")
        assert said.err.startswith(f"commopt doctor: {file} cannot be written: {why}")
        assert said.err.count("\n") == 1
