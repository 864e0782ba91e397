# SPDX-License-Identifier: Apache-2.0
"""`doctor --measure` on emulated clusters: each ends in the sentence that names what is wrong there."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from commopt.cluster import EmulatedCluster, Result
from commopt.doctor.verdict.facts import Measurements
from commopt.doctor.verdict.judge import AS_IT_SHOULD_BE, NOT_MEASURED, SLOWER
from tests.speed import limit

ROOT = Path(__file__).parents[1]
RATE = "100mbit"
MEASURE = ("-m", "commopt", "doctor", "--measure", "--budget", "15")

TRAIN = """
import os, time, torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(200):
    if os.environ["RANK"] == "1":
        time.sleep(0.15)
    optimizer.zero_grad()
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(autouse=True)
def emulator() -> None:
    if missing := EmulatedCluster.missing(rate=RATE):
        pytest.skip(missing)


def measured(cluster: EmulatedCluster, *options: str, env: dict[str, str] | None = None) -> Result:
    return cluster.run([*MEASURE, *options], timeout_s=limit(150), env={"PYTHONPATH": str(ROOT), **(env or {})})


def node(cluster: EmulatedCluster, place: int) -> str:
    return cluster._network.nodes[place]


def ip(*arguments: str, tool: str = "ip") -> None:
    subprocess.run([tool, *arguments], check=True, capture_output=True, timeout=30)


def sentence(result: Result) -> str:
    return " ".join(result.stdout.partition("\n\n")[0].split())


def test_a_healthy_cluster_is_as_it_should_be_and_its_file_can_be_compared(tmp_path: Path) -> None:
    file = tmp_path / "healthy.json"
    with EmulatedCluster(nodes=2, ranks_per_node=2, rate=RATE) as cluster:
        result = measured(cluster, "--params", "1M", "--batch", "1", "--save", str(file))
        assert result.returncode == AS_IT_SHOULD_BE, result.stderr[-2000:]
        assert sentence(result).startswith("As it should be: 2 nodes of 2, 4 ranks, ")
        assert "of 100 Mb/s between nodes" in result.stdout
        assert "1M parameters, predicted: " in result.stdout
        assert len(result.stdout.splitlines()) <= 25
        again = measured(cluster, "--compare", str(file), "--json")
    found = Measurements.load(file)
    assert {level.level for level in found.levels} == {"intra", "inter", "world"}
    assert all(60e-3 < (wire.gbps or 0) < 105e-3 for wire in found.used)
    assert found.training is not None
    assert found.training.exposed_ms > 0
    document: dict[str, Any] = json.loads(again.stdout)
    assert document["verdict"]["status"] == again.returncode == AS_IT_SHOULD_BE
    assert document["changes"][0].startswith("Since 20")


def test_a_node_with_a_slower_link_is_named() -> None:
    with EmulatedCluster(nodes=3, ranks_per_node=1, rate=RATE) as cluster:
        slower = ("tbf", "rate", "20mbit", "burst", "50000b", "limit", "640000b")
        ip("-n", node(cluster, 1), "qdisc", "replace", "dev", "eth0", "root", *slower, tool="tc")
        result = measured(cluster)
        slow = node(cluster, 1)
    assert result.returncode == SLOWER, result.stdout + result.stderr[-2000:]
    assert sentence(result).startswith(f"Slower than it should be: {slow} carries ")
    assert f"$ ethtool eth0 # on {slow}" in " ".join(result.stdout.split())


def test_one_stream_on_a_long_path_is_named_with_the_number_that_carries_more() -> None:
    with EmulatedCluster(nodes=2, ranks_per_node=1, rate="200mbit", delay="20ms", loss="0.01%") as cluster:
        result = measured(cluster)
    assert result.returncode == SLOWER, result.stdout + result.stderr[-2000:]
    named = r"Mb/s is reached over eth0 by one stream on a path of (\d+) ms, and 4 connections"
    path = re.search(named, sentence(result))
    assert path, result.stdout
    assert 40 <= int(path.group(1)) < limit(60)
    assert "$ export GLOO_SOCKET_IFNAME=eth0,eth0,eth0,eth0" in result.stdout


def test_an_interface_that_is_slower_than_another_is_named_with_the_right_one() -> None:
    with EmulatedCluster(nodes=2, ranks_per_node=1, rate=RATE) as cluster:
        first, second = node(cluster, 0), node(cluster, 1)
        ip("-n", first, "link", "add", "eth1", "type", "veth", "peer", "name", "eth1", "netns", second)
        for place, name in enumerate((first, second)):
            ip("-n", name, "address", "add", f"10.78.0.{place + 1}/24", "dev", "eth1")
            ip("-n", name, "link", "set", "eth1", "up")
        result = measured(cluster)
    assert result.returncode == SLOWER, result.stdout + result.stderr[-2000:]
    assert "gloo uses eth0" in sentence(result)
    assert "$ export GLOO_SOCKET_IFNAME=eth1" in result.stdout


def test_a_host_name_that_means_loopback_is_no_measurement_and_is_named() -> None:
    with EmulatedCluster(nodes=2, ranks_per_node=1, rate=RATE) as cluster:
        for place in range(2):
            hosts = Path("/etc/netns", node(cluster, place), "hosts")
            hosts.write_text(f"127.0.1.1 {socket.gethostname()}\n{hosts.read_text()}")
        result = measured(cluster, env={"GLOO_SOCKET_IFNAME": ""})
    assert result.returncode == NOT_MEASURED, result.stdout + result.stderr[-2000:]
    assert sentence(result).startswith("Could not measure: loopback is offered to other nodes")
    assert "$ export GLOO_SOCKET_IFNAME=eth0" in result.stdout


def test_a_slow_rank_of_a_script_is_named_and_not_the_network(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    with EmulatedCluster(nodes=2, ranks_per_node=1, rate=RATE) as cluster:
        result = measured(cluster, "--script", str(script))
        slow = node(cluster, 1)
    assert result.returncode == SLOWER, result.stdout + result.stderr[-2000:]
    assert f"rank 1 on {slow} is ready" in sentence(result)
    assert re.search("not (for )?the network", sentence(result))
    assert "Linear, recorded: " in result.stdout


def ranks(words: Sequence[str], count: int, folder: Path) -> list[subprocess.Popen[str]]:
    """Start ranks on this machine, which meet at a free port."""
    with socket.socket() as asker:
        asker.bind(("127.0.0.1", 0))
        port = asker.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [sys.executable, *words],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def test_ctrl_c_leaves_what_was_measured_so_far(tmp_path: Path) -> None:
    processes = ranks(MEASURE, 2, tmp_path)
    try:
        assert processes[0].stderr is not None
        for line in processes[0].stderr:  # until collectives are measured
            if "all_reduce" in line:
                break
        for process in processes:
            process.send_signal(signal.SIGINT)
        until = time.monotonic() + limit(20)
        out, _ = processes[0].communicate(timeout=max(until - time.monotonic(), 1))
        assert processes[0].returncode == NOT_MEASURED
        assert "stopped by a signal" in " ".join(out.split())
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "gpt5"), "gpt5"),
        (("--params", "12X"), "no number of parameters"),
        (("--params", "1M", "--model", "gpt2"), "pass one"),
        (("--compare", "absent.json"), "absent.json"),
        (("--script",), "names no script"),
    ],
)
def test_bad_input_is_one_line_and_status_2(words: Sequence[str], message: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *MEASURE, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=limit(60),
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
