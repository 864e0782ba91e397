# SPDX-License-Identifier: Apache-2.0
"""Direct access between devices, on and off: what breaks is named with its switch, and ends in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from commopt.doctor.verdict.direct import PEERS, RDMA, Trial, trials, worst
from commopt.doctor.verdict.facts import FAILS, HANGS, WRONG, Direct, Measurements, TrialOutcome
from commopt.doctor.verdict.judge import AS_IT_SHOULD_BE, SLOWER, judge
from commopt.doctor.verdict.show import MOST_LINES, lines_of
from tests.speed import limit
from tests.test_verdict import HEALTHY

ROOT = Path(__file__).parents[1]
FAST, SLOW = TrialOutcome(90.0), TrialOutcome(30.0)


def found(with_it: TrialOutcome, without: TrialOutcome, *, used: bool = True, name: str = "node0") -> Measurements:
    one = Direct(name, PEERS.what, PEERS.variable, PEERS.off, with_it, without, used)
    return replace(HEALTHY, backend="nccl", direct=(one,))


# ------------------------------------------------------------------------------------------------- the judgement


@pytest.mark.parametrize("fault", [HANGS, WRONG, f"{FAILS}: RuntimeError: unhandled cuda error"])
def test_what_breaks_with_peer_access_comes_first_with_the_switch(fault: str) -> None:
    verdict = judge(found(TrialOutcome(fault=fault), SLOW))
    assert verdict.status == SLOWER
    assert verdict.sentence.startswith(f"Broken: NCCL between GPUs of node0 {fault} with peer access; without it")
    assert verdict.first == "export NCCL_P2P_DISABLE=1"
    assert "30.0 Gb/s" in verdict.causes[0].text
    assert len(lines_of(verdict)) <= MOST_LINES


def test_with_the_switch_set_what_would_break_is_no_cause() -> None:
    assert judge(found(TrialOutcome(fault=HANGS), SLOW, used=False)).status == AS_IT_SHOULD_BE


def test_the_faster_way_is_named_where_it_pays() -> None:
    for with_it, without, used, remedy in (
        (SLOW, FAST, True, "export NCCL_P2P_DISABLE=1"),
        (FAST, SLOW, False, "unset NCCL_P2P_DISABLE"),
    ):
        cause = judge(found(with_it, without, used=used)).causes[0]
        assert cause.weight == pytest.approx(3.0)
        assert cause.remedy == remedy
    for with_it, without, used in ((FAST, SLOW, True), (FAST, TrialOutcome(100.0), True), (FAST, TrialOutcome(), True)):
        assert judge(found(with_it, without, used=used)).status == AS_IT_SHOULD_BE


def test_where_nothing_works_the_log_is_asked_for() -> None:
    cause = judge(found(TrialOutcome(fault=HANGS), TrialOutcome(fault=HANGS))).causes[0]
    assert cause.text.count(HANGS) == 2
    assert cause.remedy.startswith("export NCCL_DEBUG=INFO")


def test_nodes_with_the_same_fault_are_one_cause() -> None:
    broken = [found(TrialOutcome(fault=HANGS), SLOW, name=f"node{place}").direct[0] for place in range(3)]
    causes = judge(replace(HEALTHY, direct=tuple(broken))).causes
    assert len(causes) == 1
    assert "GPUs of node0 and 2 more hangs" in causes[0].text


def test_a_file_keeps_what_was_tried(tmp_path: Path) -> None:
    measured = found(TrialOutcome(fault=HANGS), SLOW)
    measured.save(tmp_path / "measured.json")
    assert Measurements.load(tmp_path / "measured.json") == measured


# ------------------------------------------------------------------------------------------------- who tries what


def answers(nodes: list[int], gpu: bool = True, rdma: bool = False) -> list[dict[str, object]]:
    names = [name for name, count in enumerate(nodes) for _ in range(count)]
    return [{"key": str(name), "name": f"node{name}", "gpu": gpu, "rdma": rdma} for name in names]


def test_gpus_of_each_node_try_peers_and_one_of_each_rdma() -> None:
    assert trials(answers([2, 1, 3])) == [Trial(PEERS, "node0", (0, 1)), Trial(PEERS, "node2", (3, 4, 5))]
    assert trials(answers([1, 1], rdma=True)) == [Trial(RDMA, "all nodes", (0, 1))]
    assert trials(answers([2], rdma=True)) == [Trial(PEERS, "node0", (0, 1))]
    assert trials([*answers([2]), {"key": "1", "name": "node1", "gpu": False, "rdma": False}]) == []


def test_the_worst_of_all_ranks_counts() -> None:
    assert worst([FAST, SLOW]) == SLOW
    assert worst([FAST, TrialOutcome(fault=HANGS)]) == TrialOutcome(fault=HANGS)
    wrong = TrialOutcome(50.0, WRONG)
    assert worst([TrialOutcome(fault=HANGS), wrong, FAST]) == wrong


# ---------------------------------------------------------------------------------------------------- real processes

# In place of a driver: loaded by every Python that finds it.
BREAKS = {
    "nothing": "",
    HANGS: """
        import time
        dist.all_reduce = lambda values: time.sleep(600)
    """,
    WRONG: """
        real = dist.all_reduce
        def all_reduce(values):
            real(values)
            values[12345] += 1
        dist.all_reduce = all_reduce
    """,
    FAILS: """
        def all_reduce(values):
            raise RuntimeError("unhandled cuda error")
        dist.all_reduce = all_reduce
    """,
}
BROKEN = """
import os, sys
tries = "commopt.doctor.verdict.direct" in sys.orig_argv
if tries and os.environ.get("BREAKS") and "NCCL_P2P_DISABLE" not in os.environ:
    import torch.distributed as dist
{}
"""


PROGRAM = """
import argparse, json, os, sys
from dataclasses import asdict
from pathlib import Path
from commopt.doctor.verdict import command, direct

direct.BACKEND, direct.TRIAL_S, direct.devices_here = "gloo", 8.0, lambda: 2
options = dict.fromkeys(("model", "params", "script", "log", "flight", "compare", "html", "batch"))
save = Path(sys.argv[1])
asked = argparse.Namespace(**options, budget_s=60.0, json=False, save=save, root=Path("/"))
status = command.run(asked)
Path(f"{save}.{os.environ['RANK']}").write_text(json.dumps([status, os.environ.get("NCCL_P2P_DISABLE")]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", list(BREAKS))
def test_what_breaks_ends_and_the_rest_is_measured_without(how: str, tmp_path: Path) -> None:
    """Over gloo, as if it were NCCL: two ranks of one node, whose all_reduce breaks unless peer access is off."""
    code = textwrap.indent(textwrap.dedent(BREAKS[how]), "    ") or "    pass"
    (tmp_path / "sitecustomize.py").write_text(BROKEN.format(code))
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "BREAKS": "1"}
    file = tmp_path / "measured.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, str(tmp_path / "program.py"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=limit(150), check=False)
    assert done.returncode == 0, done.stderr
    ended = [json.loads(Path(f"{file}.{rank}").read_text()) for rank in range(2)]
    measured = Measurements.load(file)
    (tried,) = measured.direct
    assert tried.without.gbps
    assert not tried.without.fault
    assert measured.levels
    if how == "nothing":
        assert tried.with_it.gbps
        assert [off for _, off in ended] == [None, None]
    else:
        assert tried.with_it.fault.startswith(how)
        assert ("unhandled cuda error" in tried.with_it.fault) == (how == FAILS)
        assert ended[0][0] == SLOWER
        assert "Broken: NCCL between GPUs" in done.stdout
        assert [off for _, off in ended] == ["1", "1"]
