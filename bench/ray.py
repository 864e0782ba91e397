# SPDX-License-Identifier: Apache-2.0
"""A real Ray of two nodes on this machine, and a training in it: stock DDP beside a strategy.

    python -m bench.ray --rate 200mbit --strategy hierarchical_quantized:bits=4

Its nodes are those of an emulated cluster, with their files in a temporary folder. It needs root and Ray
(pip install '.[engines]').
"""

from __future__ import annotations

import ast
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.engine import ROOT, Engine, command_line, finish, markdown
from commopt.cluster import ClusterUnavailableError, EmulatedCluster
from commopt.command_line import refuse
from commopt.errors import ConfigurationError

PROGRAM = "bench.ray"
EXAMPLE = ROOT / "examples" / "train_ray.py"
_HEAD = "10.77.0.1:6379"
_START_S = 120.0
_RAY = "from ray.scripts.scripts import main; main()"
_ALIVE = "import ray; ray.init(log_to_driver=False); print('alive', sum(each['Alive'] for each in ray.nodes()))"


class EmulatedRay(Engine):
    """A Ray whose nodes are those of an emulated cluster, called node0, node1, ...; the first is its head.

    cpus: of each node, as Ray counts them; a worker takes one.
    """

    def __init__(self, nodes: int = 2, rate: str = "none", cpus: int = 2) -> None:
        super().__init__(nodes, rate)
        self._cpus = cpus
        self._token = secrets.token_hex(32)
        self._raylets: dict[int, subprocess.Popen[bytes]] = {}

    @staticmethod
    def missing() -> str | None:
        """Return the reason why this machine cannot run it, None if it can."""
        if find_spec("ray") is None:
            return "no Ray; pip install '.[engines]'"
        return EmulatedCluster.missing()

    def _start(self) -> None:
        for node in range(self._nodes):
            self.join(node)
            self.wait_for(node + 1)

    def join(self, node: int) -> None:
        """Let a node become one of Ray's."""
        place = ["--address", _HEAD]
        if node == 0:
            place = ["--head", "--port", _HEAD.partition(":")[2], "--temp-dir", str(self.folder / "ray")]
            place += ["--include-dashboard", "false"]
        address = f"10.77.0.{node + 1}"
        size = ["--num-cpus", str(self._cpus), "--object-store-memory", "200000000", "--node-ip-address", address]
        self._raylets[node] = self._daemon(node, ["python", "-c", _RAY, "start", "--block", *place, *size])

    def lose(self, node: int) -> None:
        """Cut a node off: nobody is told, and what is sent to it is lost."""
        self.cluster.cut(node)

    def bring_back(self, node: int) -> None:
        """Start a node anew that was lost."""
        self._raylets[node].terminate()
        self._raylets[node].wait(60)
        self.cluster.mend(node)
        self.join(node)

    def wait_for(self, nodes: int) -> None:
        """Wait until Ray counts so many nodes."""
        deadline = time.monotonic() + _START_S
        while f"alive {nodes}\n" not in (done := self.call(["python", "-c", _ALIVE])).stdout:
            if time.monotonic() > deadline:
                log = (self.folder / "daemons.log").read_text()[-2000:]
                raise ClusterUnavailableError(
                    f"Ray did not count {nodes} nodes within {_START_S:g} s: {log}{done.stderr[-2000:]}"
                )

    def _environment(self) -> dict[str, str]:
        quick = {"period_ms": "1000", "timeout_ms": "2000", "failure_threshold": "3"}  # a lost node is noticed in 5 s
        return {
            **super()._environment(),
            **{f"RAY_health_check_{name}": value for name, value in quick.items()},
            "RAY_ADDRESS": _HEAD,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    def train(self, *options: str, script: Path = EXAMPLE) -> list[str]:
        """Return the command that runs the example, or a script with the same options."""
        return ["python", str(script), "--storage", str(self.folder), *options]


def last_metrics(lines: Sequence[str]) -> dict[str, Any]:
    """Return the metrics that the example has printed at its end."""
    (last,) = [line for line in lines if line.startswith("{'loss': ")]
    return dict(ast.literal_eval(last))


def main() -> int:
    """Train with stock DDP and with the strategy, and report; return the exit status."""
    options = command_line(PROGRAM, __doc__ or "").parse_args()
    if options.report:
        print(markdown(*options.report))
        return 0
    missing = EmulatedRay.missing()
    if missing is not None:
        return refuse(PROGRAM, ConfigurationError(missing))
    rows = []
    with EmulatedRay(rate=options.rate) as ray:
        for name, words in (("stock DDP", ["--stock"]), (options.strategy, ["--strategy", options.strategy])):
            steps = ["--workers", "4", "--steps", "60", "--every", "30"]
            done = ray.call(ray.train(*steps, *words))
            if done.returncode:
                print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
                return done.returncode
            found = last_metrics(done.stdout.splitlines())
            rows.append(
                {"average": name, **{key: found[key] for key in ("step_ms", "loss")}, "ranks": found["workers"]}
            )
    finish(PROGRAM, f"Ray {version('ray')}", options, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
