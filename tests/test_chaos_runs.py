# SPDX-License-Identifier: Apache-2.0
"""`commopt chaos` for real: faults strike trainings of every kind, none of which hangs or ends with a wrong model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from commopt.__main__ import main
from commopt.chaos.cli import SCRIPT, Campaign, Judged, perform
from commopt.chaos.faults import read_faults
from commopt.cluster import EmulatedCluster
from tests.speed import limit

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 6.0
KINDS = (
    *("flat", "hierarchical_bf16", "hierarchical_quantized:bits=4", "hierarchical_onebit", "hierarchical_dgc"),
    *("hierarchical_powersgd", "auto", "diloco:period=4"),
)
OF_HSDP = ("hierarchical", "hierarchical_quantized:bits=4", "onebit_local:period=4")
HSDP = ("--model", "hsdp")

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture(autouse=True, scope="module")
def _skip_without_cluster() -> None:
    if missing := EmulatedCluster.missing():
        pytest.skip(missing)


def all_is_well(folder: Path, faults: str, strategies: tuple[str, ...], *arguments: str, **shape: Any) -> list[Judged]:
    """Run a campaign of which every run must end well; return the verdicts."""
    limit_s = limit(TIMEOUT_S + 5)
    campaign = Campaign(
        SCRIPT, arguments, strategies, read_faults(faults), timeout_s=TIMEOUT_S, limit_s=limit_s, **shape
    )
    found = perform(campaign, folder)
    assert len(found) == len(strategies) * len(campaign.faults)
    assert [f"{judged.line()}: {judged.verdict.said}" for judged in found if not judged.verdict.ok] == []
    return found


@pytest.mark.parametrize("faults", ["kill,oom,diskfull", "stop,slow,flap,clock", "nan,partition"])
def test_every_kind_of_strategy_survives_or_names(faults: str, tmp_path: Path) -> None:
    found = all_is_well(tmp_path, faults, KINDS)
    outcomes = {judged.verdict.outcome for judged in found if judged.order.fault in ("kill", "oom", "partition")}
    assert outcomes <= {"named error"}
    assert {judged.verdict.outcome for judged in found if judged.order.fault in ("stop", "flap", "clock")} <= {"right"}
    for judged in found:
        assert (Path(judged.order.folder) / "picture.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("faults", ["kill,stop,partition", "flap,nan,clock", "oom,diskfull"])
def test_hsdp(faults: str, tmp_path: Path) -> None:
    all_is_well(tmp_path, faults, OF_HSDP, *HSDP)


def test_rank_0_of_two_and_of_three_nodes(tmp_path: Path) -> None:
    for nodes in (2, 3):
        shape = {"nodes": nodes, "ranks_per_node": 1, "victim": 0}
        all_is_well(tmp_path / str(nodes), "kill,stop,oom,nan", ("quantized:bits=4",), **shape)


@pytest.mark.parametrize("faults", ["kill,stop,partition", "slow,flap,clock", "nan,oom,diskfull"])
def test_workers_of_a_parameter_server(faults: str, tmp_path: Path) -> None:
    """The others go on; in a worker of several ranks the struck one is named."""
    shape = {"nodes": 3, "ranks_per_node": 1}
    strategies = ("parameter_server:period=4", "parameter_server:period=4:quorum=2:compressor=OneBit()")
    found = all_is_well(tmp_path / "alone", faults, strategies, **shape)
    found += all_is_well(tmp_path / "ddp", faults, strategies[:1])
    assert {judged.verdict.outcome for judged in found} == {"right"}


@pytest.mark.parametrize("faults", ["kill,stop,partition,slow", "flap,oom,diskfull,clock"])
def test_a_parameter_server_is_struck(faults: str, tmp_path: Path) -> None:
    found = all_is_well(tmp_path, faults, ("parameter_server:period=4:quorum=2",), victim=4)
    outcomes = {judged.order.fault: judged.verdict.outcome for judged in found}
    ends = {fault: "named error" for fault in ("kill", "oom")}
    assert outcomes == {fault: ends.get(fault, "right") for fault in faults.split(",")}
    for judged in found:
        assert ">server</text>" in (Path(judged.order.folder) / "picture.svg").read_text()


IMPATIENT = """
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(20):
    begun = time.monotonic()
    optimizer.zero_grad()
    ddp(torch.ones(4, 8)).square().sum().backward()
    if time.monotonic() - begun < {patience}:
        optimizer.step()
"""


def script(folder: Path, patience: float) -> str:
    """Write a script that skips the update of a step that takes too long."""
    path = folder / "train.py"
    path.write_text(IMPATIENT.format(patience=patience))
    return str(path)


def test_a_script_that_loses_an_update_by_the_fault_is_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--script", script(tmp_path, 3.0), "--strategy", "flat", "--faults", "stop", "--jobs", "1"]
    out = tmp_path / "out"
    assert main(["chaos", *arguments, "--json", "--out", str(out)]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["outcome"], row["ok"]) == ("wrong model", False)
    assert "ends with other parameters" in row["said"]
    assert (out / "flat" / "stop" / "picture.svg").exists()


def test_a_script_that_ends_before_the_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--script", script(tmp_path, 1e9), "--strategy", "flat", "--faults", "kill", "--at", "500"]
    assert main(["chaos", *arguments, "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert "give it more steps" in row["said"]


def test_what_is_interrupted_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "commopt", "chaos", "--strategy", "flat", "--faults", "stop"]
    with subprocess.Popen([*command, "--out", str(tmp_path / "out")], cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + limit(120)
        while not list(tmp_path.glob("out/*/*/rank0.jsonl")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(limit(90)) == 128 + signal.SIGTERM
    names = [path.name for path in Path("/run/netns").glob(f"commopt-{process.pid}-*")]
    assert names == []
    assert not any(str(tmp_path) in _command(pid) for pid in os.listdir("/proc") if pid.isdigit())


def _command(pid: str) -> str:
    try:
        return Path("/proc", pid, "environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""
