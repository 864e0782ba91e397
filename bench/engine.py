# SPDX-License-Identifier: Apache-2.0
"""Emulated nodes with names of their own, node0, node1, ..., on which an engine starts ranks: Slurm, Ray.

And what the programs of both, bench.slurm and bench.ray, have in common: options, results and their table.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from bench.document import table
from bench.environment import machine
from bench.output import read_lines, write_results, written_by
from commopt.cluster import EmulatedCluster
from commopt.command_line import CommandParser, content_of, output_file

ROOT = Path(__file__).parents[1]
_FOREIGN = re.compile(r"(SLURM|SBATCH|OMPI|PMI|RAY|NCCL|GLOO|COMMOPT)_|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR)$")
_Engine = TypeVar("_Engine", bound="Engine")


class Engine:
    """Context manager: an engine whose nodes are those of an emulated cluster; its files are in a temporary folder.

    nodes, rate: as of EmulatedCluster.
    """

    def __init__(self, nodes: int = 2, rate: str = "none") -> None:
        self.cluster = EmulatedCluster(nodes=nodes, ranks_per_node=1, rate=rate)
        self._nodes = nodes
        self._stack = ExitStack()
        self.folder = Path()

    def __enter__(self: _Engine) -> _Engine:
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="engine-")))
            self.folder.chmod(0o755)
            stack.enter_context(self.cluster)
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        """Start the engine's daemons, and return when it takes jobs."""
        raise NotImplementedError

    def _daemon(self, node: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a program that ends with the cluster."""
        return self._begin(node, command, self.folder / "daemons.log")

    def _begin(self, node: int, command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        with output.open("a") as log:
            return subprocess.Popen(
                self._on(node, command), env=self._environment(), cwd=self.folder, stdout=log, stderr=log, stdin=-3
            )

    def _on(self, node: int, command: Sequence[str]) -> list[str]:
        named = ["unshare", "--uts", "--mount", "bash", "-c", f'hostname node{node} && exec "$@"', "bash", *command]
        return self.cluster._network.enter(node, named)

    def _environment(self) -> dict[str, str]:
        """Return the environment without a surrounding job's or launcher's variables, in which python is this one."""
        kept = {name: value for name, value in os.environ.items() if not _FOREIGN.match(name)}
        return {**kept, "PATH": self._path(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def _path(self) -> str:
        """Return a PATH on which python, torchrun and commopt are those of this environment."""
        folder = self.folder / "bin"
        if not folder.exists():
            folder.mkdir()
            modules = {"python": "", "torchrun": "-m torch.distributed.run ", "commopt": "-m commopt "}
            for name, module in modules.items():
                (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
                (folder / name).chmod(0o755)
        return f"{folder}{os.pathsep}{os.environ['PATH']}"

    def start(self, command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        """Start a command on node 0, in the temporary folder; what it says goes to a file."""
        return self._begin(0, command, output)

    def call(
        self, command: Sequence[str], timeout_s: float = 300.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on node 0, from the temporary folder."""
        return subprocess.run(
            self._on(0, command),
            env={**self._environment(), **(env or {})},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


# ----------------------------------------------------------------------------- stock DDP beside a strategy


def command_line(program: str, document: str) -> CommandParser:
    """Return what reads the options of a program that trains with stock DDP and with a strategy."""
    parser = CommandParser(prog=f"python -m {program}", description=document.partition("\n")[0])
    parser.add_argument("--rate", default="200mbit", help="of each node's link (default 200mbit)")
    parser.add_argument("--strategy", default="hierarchical_quantized:bits=4", metavar="NAME[:OPTION=VALUE...]")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", type=output_file, metavar="FILE", help="write JSON lines: environment, then each row")
    what.add_argument("--report", type=content_of(_reader(program)), metavar="FILE", help="show such a file")
    return parser


def _reader(program: str) -> Callable[[Path], tuple[dict[str, Any], list[dict[str, Any]]]]:
    def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        with written_by(f"{program} --json", path):
            header, rows = read_lines(path, "row")
            markdown(header, rows)
            return header, rows

    return read


def finish(program: str, engine: str, options: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write what was found where the options say, and print it."""
    command = shlex.join(["python", "-m", program, *sys.argv[1:]])
    header = {"kind": "engine", **machine(), "engine": engine, "rate": options.rate, "command": command}
    if options.json:
        write_results(options.json, header, "row", rows)
    print(markdown(header, rows))


def markdown(header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row for each average, and below it where it was made."""
    figures = [[row["average"], f"{row['step_ms']:.0f}", f"{row['loss']:.3f}"] for row in rows]
    caption = (
        f"{header['engine']}: {rows[0]['ranks']} ranks on 2 nodes at {header['rate']}, "
        f"on {header['cpu_count']} processors for all."
    )
    return f"{table(['average', 'ms per step', 'loss'], figures)}\n\n{caption}"
