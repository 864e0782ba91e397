# SPDX-License-Identifier: Apache-2.0
"""Does a slow or dead machine stop the others? `python -m bench.evidence.parameter_server --json FILE`, as root.

Three emulated nodes train the example's GPT as workers of a parameter server on a fourth, three times over the same
number of steps: "synchronous" waits for all; "undisturbed" has a quorum of two; "disturbed" has it too, and its third
worker makes a third of the steps at first, is killed, and comes back. Every step is padded to a fixed time, since the
nodes share the processors of one machine. Held-out losses are of the server's parameters, computed when all is over.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import commopt
from bench.document import table
from bench.environment import end_when_told, machine
from bench.output import read_lines, write_results, written_by
from commopt.cluster import ClusterUnavailableError, EmulatedCluster
from commopt.cluster.network import address
from commopt.command_line import CommandParser, content_of, number, output_file, refuse, whole
from commopt.server import Scheduler, Server
from commopt.server.secret import SECRET_VARIABLE
from examples.train_gpt import Training, add_model_options

PROGRAM = "bench.evidence.parameter_server"
RUNS: dict[str, int | None] = {"synchronous": None, "undisturbed": 2, "disturbed": 2}  # their quorums
STAGES = ("slow", "dead", "back")  # of the disturbed run's last worker: a third of the steps each
_WORKERS = 3
_SLOWER = 3
_READS_PER_TIMEOUT = 8
_PORT = 29400
_TIMEOUT_S = 10.0  # without a sign of life
_POLL_S = 0.05
_LONGEST_S = 3600.0  # of a run
_SETTINGS = ("steps", "pace", "period", "compressor", "rate", "layers", "width", "context", "batch", "seed")
_COMPRESSORS = {"onebit": commopt.OneBit(), "quantize": commopt.Quantize(bits=4), "none": None}


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, or of `arguments`."""
    parser = CommandParser(prog=f"python -m {PROGRAM}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=whole(1), default=1440, help="of all workers together (default 1440)")
    parser.add_argument("--pace", type=number(), default=0.6, metavar="SECONDS", help="of a step (default 0.6)")
    parser.add_argument("--period", type=whole(1), default=16, help="steps between two rounds (default 16)")
    parser.add_argument("--compressor", choices=_COMPRESSORS, default="onebit")
    parser.add_argument("--rate", default="100mbit", help="of each node's link (default 100mbit)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", type=output_file, metavar="FILE", help="write JSON lines: environment, then each run")
    what.add_argument("--report", type=content_of(read), nargs="+", metavar="FILE", help="show such files")
    add_model_options(parser)
    parser.add_argument("--role", choices=("all", "serve", "train"), default="all", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--quorum", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--once", default="", help=argparse.SUPPRESS)
    parser.add_argument("--slower", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.parallel = "ddp"
    return options


# ------------------------------------------------------------------------------------------- on the nodes


def serve(options: argparse.Namespace) -> None:
    """Be scheduler and server until there is a file "stop" and no worker; then write losses, by steps done."""
    host = options.address.rpartition(":")[0]
    scheduler = Scheduler(_PORT, host, _TIMEOUT_S)
    server = Server(options.address, workers=_WORKERS, host=host)
    looks: list[dict[str, Any]] = []
    while not (options.folder / "stop").exists() or server.workers:
        if len(looks) < _READS_PER_TIMEOUT and server.done >= options.steps * (len(looks) + 1) / _READS_PER_TIMEOUT:
            looks.append(server.state_dict())
        _replace(options.folder / "done", str(server.done))
        time.sleep(_POLL_S)
    server.close()
    scheduler.close()
    training, losses = alone(options), []
    for look in looks:
        training.model.module.load_state_dict(look["parameters"])  # type: ignore[union-attr]
        losses.append((look["done"], training.held_out_loss()))
    _replace(options.folder / "losses", json.dumps(losses))


def train(options: argparse.Namespace) -> None:
    """Be a worker until there is a file "stop"; write when each step ended, and what the parameters of a round are."""
    training = alone(options)
    while not (options.folder / options.once).exists():  # what starts late is not to take its time for loading torch
        time.sleep(_POLL_S)
    server = commopt.ParameterServer(
        options.address, options.period, _COMPRESSORS[options.compressor], quorum=options.quorum
    )
    begun_s = time.monotonic()

    def pad(*_: object) -> None:  # computing takes so long; what an exchange takes comes on top
        time.sleep(max(0.0, begun_s + options.pace * options.slower - time.monotonic()))

    training.optimizer.register_step_pre_hook(pad)
    worker = commopt.attach(training.model, server)
    known = -1
    with (options.folder / f"worker-{options.place}").open("a") as log:
        while not (options.folder / "stop").exists():
            if worker.round != known:  # before a step, its parameters are those of the round
                known = worker.round
                digest = hashlib.sha256()
                for parameter in training.model.parameters():
                    digest.update(parameter.detach().numpy().tobytes())
                log.write(json.dumps({"round": known, "digest": digest.hexdigest()}) + "\n")
            begun_s = time.monotonic()
            training.step()  # with the exchange, where one is due
            log.write(json.dumps({"end_s": time.monotonic(), "refused": worker.refused}) + "\n")
            log.flush()
    worker.close()


def alone(options: argparse.Namespace) -> Training:
    """Return the example's training in a world of one rank: a DDP model is one worker, whatever its ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return Training(options, torch.device("cpu"))


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


# ------------------------------------------------------------------------------------------- one run


@dataclass
class Run:
    """A run on the emulated nodes: its processes, and when each stage began (time.monotonic, one for all nodes)."""

    name: str
    arguments: Sequence[str]
    cluster: EmulatedCluster
    folder: Path

    def __post_init__(self) -> None:
        self.options = parse_options(self.arguments)

    def start(self, role: str, node: int, *more: object) -> subprocess.Popen[str]:
        """Start a process of this program; its output goes to a file in the folder."""
        quorum = RUNS[self.name]
        extra = ["--role", role, "--folder", self.folder, "--address", f"{address(_WORKERS)}:{_PORT}", *more]
        extra += [] if quorum is None else ["--quorum", quorum]
        command = [sys.executable, "-m", PROGRAM, *self.arguments, *map(str, extra)]
        log = (self.folder / f"{role}-{node}.log").open("a")
        return self.cluster.start(node, command, stdout=log, stderr=subprocess.STDOUT)

    def worker(self, place: int, *more: object) -> subprocess.Popen[str]:
        """Start a worker with batches of its own."""
        seed = _WORKERS * self.options.seed + place
        return self.start("train", place, "--place", place, "--seed", seed, *more)

    def take(self) -> dict[str, Any]:
        """Do it; return the record of it. Raises SystemExit, with what was printed, when a process fails or hangs."""
        disturbed, last, third = self.name == "disturbed", _WORKERS - 1, self.options.steps / len(STAGES)
        workers = [self.worker(place) for place in range(last)]
        workers.append(self.worker(last, "--slower", _SLOWER if disturbed else 1))
        server = self.start("serve", _WORKERS)
        watched = [server, *workers]
        if disturbed:
            watched[-1] = self.worker(last, "--once", "back")
        begins_s = [self._when(watched, 1.0), self._when(watched, third)]
        if disturbed:
            workers[-1].kill()
            workers[-1] = watched[-1]
        begins_s.append(self._when(watched, 2 * third))
        rounds = self._rounds_of(last)
        (self.folder / "back").touch()
        begins_s.append(self._when(watched, self.options.steps, last, rounds + 3))
        (self.folder / "stop").touch()
        for process in watched:
            if process.wait(_LONGEST_S):
                self._fail("a process failed")
        return self._record(begins_s)

    def _when(self, processes: Sequence[subprocess.Popen[str]], steps: float, place: int = 0, rounds: int = 0) -> float:
        """Wait until the server's rounds hold so many steps, and a worker was in so many; return when it was."""
        file, deadline = self.folder / "done", time.monotonic() + _LONGEST_S
        while not file.exists() or float(file.read_text()) < steps or self._rounds_of(place) < rounds:
            if any(process.poll() is not None for process in processes) or time.monotonic() > deadline:
                self._fail("a process ended, or nothing goes on")
            time.sleep(_POLL_S)
        return time.monotonic()

    def _rounds_of(self, place: int) -> int:
        file = self.folder / f"worker-{place}"
        return file.read_text().count('"round"') if file.exists() else 0

    def _fail(self, why: str) -> NoReturn:
        logs = "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))
        raise SystemExit(f"{self.name}: {why}\n{logs}")

    def _record(self, begins_s: Sequence[float]) -> dict[str, Any]:
        lines = [
            [json.loads(line) for line in (self.folder / f"worker-{place}").read_text().splitlines()]
            for place in range(_WORKERS)
        ]
        digests: dict[int, set[str]] = {}
        for line in (each for worker in lines for each in worker if "round" in each):
            digests.setdefault(line["round"], set()).add(line["digest"])
        others = [[line["end_s"] for line in worker if "end_s" in line] for worker in lines[:-1]]
        stages = list(pairwise(begins_s))
        return {
            "run": self.name,
            "quorum": RUNS[self.name],
            "rounds": max(digests),
            "rounds_whose_parameters_differ": sum(len(found) > 1 for found in digests.values()),
            "rounds_of_the_last_worker": len({line["round"] for line in lines[-1] if "round" in line}),
            "seconds": begins_s[-1] - begins_s[0],
            # Of the workers that nothing was done to; the longest step shows whether anything hung.
            "steps_per_s": [[rate(ends_s, *stage) for ends_s in others] for stage in stages],
            "longest_step_s": max(b - a for ends_s in others for a, b in pairwise(ends_s)),
            "refused": [max((line["refused"] for line in worker if "refused" in line), default=0) for worker in lines],
            "losses": json.loads((self.folder / "losses").read_text()),
        }


def rate(ends_s: Sequence[float], begin_s: float, end_s: float) -> float:
    """Return the steps per second between two times."""
    return sum(begin_s <= each < end_s for each in ends_s) / (end_s - begin_s)


# ------------------------------------------------------------------------------------------- all of them


def verdict(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what is asked of the disturbed run, relative to the others."""
    by_name = {record["run"]: record for record in records}
    synchronous, undisturbed, disturbed = (by_name[name] for name in RUNS)
    usual = [median(stage[place] for stage in undisturbed["steps_per_s"]) for place in range(_WORKERS - 1)]
    return {
        "throughput_relative_to_undisturbed": {
            stage: min(each / its for each, its in zip(rates, usual, strict=True))
            for stage, rates in zip(STAGES, disturbed["steps_per_s"], strict=True)
        },
        "loss_relative_to_synchronous": disturbed["losses"][-1][1] / synchronous["losses"][-1][1],
    }


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header of a file, and its runs; raises ValueError when it holds something else."""
    with written_by(f"{PROGRAM} --json", path):
        return read_lines(path, "run")


def markdown(files: Sequence[tuple[dict[str, Any], list[dict[str, Any]]]]) -> str:
    """Return a table with a row for each run of the files, which differ by their seeds, and what is asked of them."""
    rows = [
        [
            record["run"],
            str(header["seed"]),
            str(record["quorum"] or _WORKERS),
            str(record["rounds"]),
            *("/".join(f"{each:.2f}" for each in stage) for stage in record["steps_per_s"]),
            f"{record['longest_step_s']:.1f}",
            f"{record['losses'][-1][1]:.3f}",
        ]
        for header, records in files
        for record in records
    ]
    apart = sum(record["rounds_whose_parameters_differ"] for _, records in files for record in records)
    kept = min(share for header, _ in files for share in header["throughput_relative_to_undisturbed"].values())
    losses = [100 * header["loss_relative_to_synchronous"] - 100 for header, _ in files]
    caption = (
        f"steps/s: of the two workers that nothing was done to, while the third was slow, dead and back; no less than "
        f"{100 * kept:.0f} % of the undisturbed. Loss of the disturbed, from synchronous: {mean(losses):+.1f} % "
        f"({', '.join(f'{each:+.1f}' for each in losses)}). Rounds that workers began with other bits: {apart}."
    )
    headings = ["run", "seed", "quorum", "rounds", *(f"steps/s, {each}" for each in STAGES), "longest step, s", "loss"]
    return f"{table(headings, rows)}\n\n{caption}"


def main() -> int:
    """Do all runs, and report; or be one process of one."""
    options = parse_options()
    if options.report:
        print(markdown(options.report))
        return 0
    if options.role != "all":
        {"serve": serve, "train": train}[options.role](options)
        return 0
    end_when_told()
    os.environ[SECRET_VARIABLE] = secrets.token_hex()  # the nodes inherit it
    records = []
    try:
        with EmulatedCluster(_WORKERS + 1, 1, options.rate) as cluster:
            for name in RUNS:
                with tempfile.TemporaryDirectory() as folder:
                    print(f"{name} ...", file=sys.stderr, flush=True)
                    records.append(Run(name, sys.argv[1:], cluster, Path(folder)).take())
    except (ClusterUnavailableError, ValueError) as error:
        return refuse(PROGRAM, error)
    header = {"kind": "parameter_server", **machine(), "command": shlex.join(["python", "-m", PROGRAM, *sys.argv[1:]])}
    header |= {name: getattr(options, name) for name in _SETTINGS} | verdict(records)
    if options.json:
        write_results(options.json, header, "run", records)
    print(markdown([(header, records)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
