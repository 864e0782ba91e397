# SPDX-License-Identifier: Apache-2.0
"""examples/train_ray.py under Ray Train: a worker that is killed, and the bits at the end."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.speed import limit

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason='needs pip install "ray[train]"'),
]


class Training:
    """A run of the example in a Ray of its own, on two workers that pass for two nodes."""

    def __init__(self, folder: Path, name: str, *options: str) -> None:
        self.folder = folder / name
        command = [sys.executable, str(ROOT / "examples" / "train_ray.py"), "--storage", str(folder), "--name", name]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables = {"PYTHONPATH": path, "COMMOPT_RANKS_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
        variables |= {"RAY_USAGE_STATS_ENABLED": "0", "GLOO_SOCKET_IFNAME": "lo"}
        strategy = ["--strategy", "hierarchical_quantized:bits=2"]
        self._process = subprocess.Popen(
            [*command, *strategy, *options],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(line for line in self._process.stdout)

    def kill_a_worker(self) -> None:
        """Kill the last worker once Ray has taken note of a checkpoint, which is a while after it was written."""
        deadline, known = time.monotonic() + limit(240), self.folder / "checkpoint_manager_snapshot.json"
        while not (known.exists() and "checkpoint_20" in known.read_text()):
            assert self._process.poll() is None, "".join(self.lines)
            assert time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.02)
        found = [match for line in self.lines if (match := re.search(r"pid=(\d+)\) world_rank=1\b", line))]
        os.kill(int(found[-1][1]), signal.SIGKILL)

    def metrics(self) -> dict[str, Any]:
        """Wait for the end and return the last metrics."""
        assert self._process.wait(limit(400)) == 0, "".join(self.lines)
        self._reader.join()
        (last,) = [line for line in self.lines if line.startswith("{'loss': ")]
        return dict(ast.literal_eval(last))

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(30)


def test_a_killed_worker_changes_no_bit(tmp_path: Path) -> None:
    flags = ["--steps", "200", "--every", "10"]
    ended = []
    for name in ("undisturbed", "killed"):
        training = Training(tmp_path, name, *flags)
        try:
            if name == "killed":
                training.kill_a_worker()
            ended.append(training.metrics())
        finally:
            training.stop()
    undisturbed, killed = ended
    assert (undisturbed["first"], undisturbed["step"], killed["step"]) == (0, 200, 200)
    assert killed["first"] in range(10, 200, 10)  # it was started again, from a checkpoint
    assert killed["bits"] == undisturbed["bits"]
