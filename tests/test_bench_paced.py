# SPDX-License-Identifier: Apache-2.0
"""Slow links on one machine without namespaces: which connections are paced, and a rehearsal of what runs over them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gpu import mps, paced
from bench.gpu.exposed import read

ROOT = Path(__file__).parents[1]
BYTES_PER_S = 25_000_000
UNPACED = 2**64 - 1

LISTEN = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
found, _ = listener.accept()
print(int.from_bytes(found.getsockopt(socket.SOL_SOCKET, 47, 8), "little"))
"""
CONNECT = """
import socket, sys
made = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print(int.from_bytes(made.getsockopt(socket.SOL_SOCKET, 47, 8), "little"))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paced.pacing_library(tmp_path_factory.mktemp("pace"))


def start(code: str, library: Path, rank: int | None, *arguments: str) -> subprocess.Popen[str]:
    variables = {"LD_PRELOAD": str(library), paced.RATE_VARIABLE: str(BYTES_PER_S), "COMMOPT_RANKS_PER_NODE": "2"}
    variables |= {} if rank is None else {"RANK": str(rank)}
    command = [sys.executable, "-I", "-S", "-c", code, *arguments]
    others = {name: value for name, value in os.environ.items() if name != "RANK"}
    return subprocess.Popen(command, env={**others, **variables}, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("here", "there", "accepting", "connecting"),
    [
        (0, 2, BYTES_PER_S, BYTES_PER_S),  # another node
        (3, 1, BYTES_PER_S, BYTES_PER_S),
        (0, 1, BYTES_PER_S, UNPACED),  # who accepts does not know
        (None, 2, UNPACED, UNPACED),  # the rendezvous
    ],
)
def test_connections_between_nodes_are_paced(
    library: Path, here: int | None, there: int, accepting: int, connecting: int
) -> None:
    listener = start(LISTEN, library, here)
    assert listener.stdout is not None
    port = int(listener.stdout.readline())
    assert (20000 <= port < 32000) == (here is not None)
    said, _ = start(CONNECT, library, there, str(port)).communicate(timeout=60)
    assert int(said) == connecting
    assert int(listener.communicate(timeout=60)[0]) == accepting


def test_every_listener_gets_a_port_of_its_own(library: Path) -> None:
    several = "import socket\nmade = [socket.create_server(('127.0.0.1', 0)) for _ in range(40)]\n"
    several += "print(*[each.getsockname()[1] for each in made])"
    ports = [int(port) for port in start(several, library, 3).communicate(timeout=60)[0].split()]
    assert len(set(ports)) == 40
    assert all(21000 <= port < 22000 for port in ports)


def test_a_rehearsal_measures_every_strategy_at_the_rate_of_the_links(tmp_path: Path) -> None:
    file = tmp_path / "exposed.json"
    strategies = "ddp,torch_powersgd,hierarchical_quantized:bits=4"
    measured = ["--model", "tiny", "--strategies", strategies, "--without-replay", "hierarchical_quantized:bits=4"]
    command = [
        sys.executable,
        "-m",
        "bench.gpu.paced",
        "--device",
        "cpu",
        "--rate",
        "100mbit",
        "-m",
        "bench.gpu.exposed",
    ]
    done = subprocess.run([*command, *measured, "--json", str(file)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    header, rows = read(file)
    assert (header["paced_gbps"], header["nodes"], header["ranks_per_node"]) == (0.1, 2, 1)
    assert 0.05 < header["measured_gbps"] < 0.11
    ours = "hierarchical_quantized:bits=4"
    assert [(each.strategy, each.replay) for each in rows] == [
        ("ddp", None),
        ("torch_powersgd", None),
        (ours, True),
        (ours, False),
    ]
    assert all(each.steps >= 4 and each.step_ms > 0 and each.loss < 6 for each in rows)
    assert rows[0].exposed_ms > 0
    assert "0.1 Gbit/s" in done.stdout


def test_the_daemon_ends_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the program of the driver notes how it was called."""
    program, calls = tmp_path / mps.CONTROL, tmp_path / "calls"
    program.write_text(f'#!/bin/sh\n(echo "$@"; ls -d "$CUDA_MPS_PIPE_DIRECTORY"; [ $# -gt 0 ] || cat) >> {calls}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(KeyboardInterrupt), mps.mps(tmp_path):
        raise KeyboardInterrupt
    pipe = str(tmp_path / "pipe")
    assert calls.read_text().split() == ["-d", pipe, pipe, "quit"]


def test_where_there_is_no_daemon_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="nvidia-cuda-mps-control is not on PATH"), mps.mps(tmp_path):
        pass


def test_an_interrupt_reaches_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import os, pathlib, time\npathlib.Path(os.environ['RANK']).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-m", "bench.gpu.paced", "--device", "cpu", "--rate", "1gbit", "-m", "waits"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    files = [tmp_path / "0", tmp_path / "1"]
    while process.poll() is None and not all(file.exists() and file.read_text() for file in files):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast", "-m", "bench.gpu.exposed"], "rate 'fast' must be a number and one of"),
        (["-m"], "-m names no module"),
    ],
)
def test_bad_options(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.gpu.paced", *arguments])
    with pytest.raises(SystemExit):
        paced.main()
    assert message in capsys.readouterr().err
