# SPDX-License-Identifier: Apache-2.0
"""The example of ranks that die and come, both ways, from the command line."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from tests.speed import limit

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
EXAMPLE = ["-m", "examples.train_elastic"]


@pytest.mark.slow
def test_a_group_shrinks_in_process_and_grows_again_at_a_checkpoint(tmp_path: Path) -> None:
    options = ["--ranks", "4", "--kill", "2:30", "--join", "60", "--steps", "120", "--folder", str(tmp_path / "new")]
    done = subprocess.run(
        [sys.executable, *EXAMPLE, *options],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=limit(200),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"(\d) ranks: (.+) after step (\d+), loss ([\d.]+)", done.stdout)
    ranks, what, steps, losses = zip(*said, strict=True)
    assert ranks == ("4", "3", "4", "4")
    assert what == ("begins", "goes on from memory", "goes on from a checkpoint", "done")
    assert steps[:2] == ("0", "30")
    assert int(steps[2]) >= 60
    assert int(steps[2]) % 20 == 0
    assert float(losses[3]) < float(losses[1]) < float(losses[0])
    assert "3 of 4 ranks go on after step 30, without rank 2" in done.stderr
    assert float(re.findall(r"went on within ([\d.]+) s", done.stdout)[0]) < limit(5.0)


def agent(port: int, folder: Path, log: IO[str]) -> subprocess.Popen[str]:
    """Start torchrun's agent of one machine with two ranks."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "digits"]
    # Of its own defaults, an agent that was killed is missed after 15 s, and a machine that may yet come waited for 30.
    soon = "keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=3"
    elastic = ["--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-conf", soon]
    options = ["--folder", str(folder), "--steps", "200", "--every", "10", "--pause", "0.1"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *rendezvous, *elastic, *EXAMPLE, *options],
        cwd=ROOT,
        env={**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},  # docs/elastic.md says why
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_until(happened: Callable[[], object], what: str, seconds: float) -> None:
    deadline = time.monotonic() + limit(seconds)
    while not happened():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.2)


def wait_for(pattern: str, logs: list[Path], seconds: float) -> None:
    wait_until(lambda: any(re.search(pattern, log.read_text()) for log in logs), f"{pattern!r} in {logs}", seconds)


def end(process: subprocess.Popen[str]) -> None:
    """Kill an agent and its ranks, which the agent started in sessions of their own or in its own."""
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    for pid in (process.pid, *map(int, children)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


@pytest.mark.slow
def test_torchrun_goes_on_with_the_machines_that_are_left(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    with first.open("w") as log, second.open("w") as other_log:
        agents = [agent(port, tmp_path, log)]  # the first holds the store
        try:
            time.sleep(1)
            agents.append(agent(port, tmp_path, other_log))
            # Of which agent rank 0 is, the rendezvous says.
            wait_for(r"4 ranks: .+ after step", [first, second], 120)
            wait_until((tmp_path / "digits.pt").exists, "a checkpoint", 60)
            end(agents[1])
            wait_for(r"2 ranks: goes on from a checkpoint after step [1-9]", [first], 120)
            wait_for(r"2 ranks: done after step 200, loss 0", [first], 120)
            assert agents[0].wait(limit(60)) == 0
        finally:
            for each in agents:
                end(each)
