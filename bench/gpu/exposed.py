# SPDX-License-Identifier: Apache-2.0
"""Milliseconds that communication adds to a step, of every strategy, in one launch: `python -m bench.gpu.exposed`.

    python -m bench.gpu.paced --rate 10gbit -m bench.gpu.exposed --model gpt2 --json exposed.json
    python -m bench.gpu.exposed --show exposed.json

Every strategy trains a fresh model, one after the other, over the same communicators. Before the first and after the
last, steps without communication are timed: what a step takes beyond them is exposed. Presets are measured with replay
of CUDA graphs; those of --without-replay once more with COMMOPT_REPLAY=0.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import bench.gpu.exposed
import commopt
from bench.document import table
from bench.environment import from_rank_0, run_of, slowest_rank_ms
from bench.gpu.paced import RATE_VARIABLE
from bench.gpu.synthetic import SIZES, SyntheticGPT
from bench.gpu_memory import peak_nbytes, start_counting
from bench.output import print_rows, read_lines, write_results, written_by
from bench.replay import replay
from bench.training.report import STOCK, is_ours
from bench.training.strategies import KNOWN, enter, require_known, split_strategies
from commopt.command_line import CommandParser, content_of, number, output_file, whole
from examples.train_gpt import start_process_group

KIND = "exposed"
STRATEGIES = (
    "ddp",
    "torch_bf16",
    "torch_powersgd",
    "flat",
    "hierarchical_bf16",
    "hierarchical_quantized",
    "hierarchical_quantized:bits=4",
    "hierarchical_quantized:bits=2",
    "hierarchical_onebit",
    "hierarchical_dgc:density=0.01",
    "hierarchical_powersgd",
)
SHARDED = ("hsdp", *STRATEGIES[3:5], "hierarchical_quantized:bits=4", "hierarchical_powersgd")
_LEAST_STEPS = 4  # before those that count where nothing is captured, and that count
_TRIAL_NUMEL, _TRIALS = 2**23, 5


@dataclass(frozen=True)
class Exposed:
    """One strategy's steps.

    replay: whether CUDA graphs may be replayed; None for what is not commopt's. replayed: buckets that were.
    step_ms: median over steps of the slowest rank's. exposed_ms: less that of steps without communication.
    peak_bytes: allocated at most on a GPU, by rank 0, the model and its optimizer included; None on a CPU.
    loss: of rank 0 after all steps.
    """

    strategy: str
    replay: bool | None
    steps: int
    step_ms: float
    exposed_ms: float
    peak_bytes: int | None
    replayed: int
    loss: float


@dataclass(frozen=True)
class Taken:
    """What one strategy's steps took, before anything is subtracted."""

    step_ms: list[float]
    peak_bytes: int | None
    replayed: int
    loss: float


def measure(strategy: str, options: argparse.Namespace, device: torch.device) -> Taken:
    """Train a fresh model and time its steps. Collective."""
    before = start_counting(device)
    parallel = "node" if strategy == "noop" and options.parallel != "ddp" else options.parallel
    training, state = enter(SyntheticGPT(SIZES[options.model], parallel, device), strategy, "ddp")
    for _ in range(options.warm_up if is_ours(strategy) else _LEAST_STEPS):
        loss = training.step()
    step_s: list[float] = []
    deadline_s = time.perf_counter() + options.seconds
    while from_rank_0(len(step_s) < _LEAST_STEPS or time.perf_counter() < deadline_s) and len(step_s) < options.steps:
        _finish(device)
        dist.barrier()
        _finish(device)
        begun_s = time.perf_counter()
        loss = training.step()
        _finish(device)
        step_s.append(time.perf_counter() - begun_s)
    peak = peak_nbytes(device, before)
    replayed = 0
    if state is not None:
        replayed = int(state.stats().get("replayed", 0))
        state.close()
    return Taken(slowest_rank_ms(step_s), peak, replayed, float(loss))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured_gbps(device: torch.device) -> float:
    """Return what each rank sends in an all_reduce of this world, in Gbit/s. Collective."""
    values, world_size, taken_s = torch.zeros(_TRIAL_NUMEL, device=device), dist.get_world_size(), []
    for _ in range(_TRIALS):
        dist.barrier()
        _finish(device)
        begun_s = time.perf_counter()
        dist.all_reduce(values)
        _finish(device)
        taken_s.append(time.perf_counter() - begun_s)
    return 8 * 2 * (world_size - 1) / world_size * values.nbytes / median(taken_s[1:]) / 1e9


def describe(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return where and how the numbers are made. Collective."""
    per_node = int(os.environ.get("COMMOPT_RANKS_PER_NODE", "1"))
    on_gpu = device.type == "cuda"
    return {
        "kind": KIND,
        **run_of("bench.gpu.exposed"),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "model": options.model,
        "size": asdict(SIZES[options.model]),
        "parallel": options.parallel,
        "nodes": dist.get_world_size() // per_node,
        "ranks_per_node": per_node,
        "paced_gbps": 8 * int(os.environ.get(RATE_VARIABLE, "0")) / 1e9,
        "measured_gbps": measured_gbps(device),
    }


def _runs(options: argparse.Namespace) -> list[tuple[str, bool | None]]:
    """Return the strategies to measure, each with whether it may replay; those without communication at both ends."""
    runs: list[tuple[str, bool | None]] = [("noop", None)]
    for name in options.strategies:
        runs.append((name, True if is_ours(name) else None))
        runs += [(name, False)] if name in options.without_replay else []
    return [*runs, ("noop", None)]


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(
        prog="python -m bench.gpu.exposed", description=(bench.gpu.exposed.__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", choices=SIZES, default="gpt2", help="default gpt2, of 124M parameters")
    parser.add_argument("--parallel", choices=("ddp", "hsdp"), default="ddp", help="default ddp")
    parser.add_argument("--strategies", type=split_strategies, metavar="NAMES", help=f"of {', '.join(KNOWN)}")
    parser.add_argument("--without-replay", type=split_strategies, default=[], metavar="NAMES", help="of those, again")
    parser.add_argument("--warm-up", type=whole(1), default=8, help="steps of presets that do not count (default 8)")
    parser.add_argument("--steps", type=whole(_LEAST_STEPS), default=8, help="that count, at most (default 8)")
    parser.add_argument("--seconds", type=number(), default=4.0, help="in which they begin, but 4 at least (default 4)")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write JSON lines: the environment, strategies"
    )
    parser.add_argument(
        "--show", type=content_of(read), metavar="FILE", help="print a table of such a file instead, or of --strategies"
    )
    options = parser.parse_args()
    if options.show:
        return options
    options.strategies = options.strategies or list(STRATEGIES if options.parallel == "ddp" else SHARDED)
    try:
        for name in (*options.strategies, *options.without_replay):
            require_known(name, options.parallel)
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> None:
    """Measure, write after each strategy, and print the table on rank 0."""
    options = parse_options()
    if options.show:
        header, rows = options.show
        print(markdown(header, rows, options.strategies))
        return
    device = start_process_group()
    is_reporter = dist.get_rank() == 0
    lasting = commopt.Communicator()  # commopt's process groups go with the last who uses them
    header = describe(options, device)
    taken: list[tuple[str, bool | None, Taken]] = []
    for name, wanted in _runs(options):
        if is_reporter:
            print(f"{name}{' without replay' if wanted is False else ''}", file=sys.stderr, flush=True)
        with replay(wanted is not False):
            taken.append((name, wanted, measure(name, options, device)))
        rows = _less_computing(taken)
        if is_reporter and options.json is not None:
            compute_ms = median(_computing(taken))
            write_results(options.json, {**header, "compute_ms": compute_ms}, "strategy", map(asdict, rows))
    if is_reporter:
        print_rows(title({**header, "compute_ms": median(_computing(taken))}), HEADINGS, rows_of(rows))
    lasting.close()
    dist.destroy_process_group()


def _computing(taken: list[tuple[str, bool | None, Taken]]) -> list[float]:
    return [ms for name, _, each in taken if name == "noop" for ms in each.step_ms]


def _less_computing(taken: list[tuple[str, bool | None, Taken]]) -> list[Exposed]:
    compute_ms = median(_computing(taken))
    return [
        Exposed(
            strategy=name,
            replay=wanted,
            steps=len(each.step_ms),
            step_ms=median(each.step_ms),
            exposed_ms=median(each.step_ms) - compute_ms,
            peak_bytes=each.peak_bytes,
            replayed=each.replayed,
            loss=each.loss,
        )
        for name, wanted, each in taken
        if name != "noop"
    ]


HEADINGS = ["strategy", "replay", "step ms", "exposed ms", "of stock's", "peak MiB beside stock's"]


def read(path: Path) -> tuple[dict[str, Any], list[Exposed]]:
    """Read what `--json` wrote; raises ValueError when `path` holds something else."""
    with written_by("bench.gpu.exposed --json", path):
        header, rows = read_lines(path, "strategy")
        if header["kind"] != KIND:
            raise ValueError(f"its kind is {header['kind']!r}, not {KIND!r}")
        return header, [Exposed(**row) for row in rows]


def title(header: dict[str, Any]) -> str:
    """Say what was trained, on what and over which link."""
    world = f"{header['nodes']} nodes x {header['ranks_per_node']}"
    link = f"links of {header['paced_gbps']:g} Gbit/s ({header['measured_gbps']:.2f} measured)"
    model = f"{header['model']} under {header['parallel'].upper()}"
    return f"{model}, {world} ranks on one {header['device']}, {link}; {header['compute_ms']:.1f} ms of computing"


def rows_of(rows: list[Exposed]) -> list[list[str]]:
    """Return a row for each strategy; the memory is beside that of torch's own averages."""
    stock = next((each for each in rows if each.strategy in STOCK), None)
    lines = []
    for each in rows:
        shown = {True: f"{each.replayed} buckets", False: "off", None: ""}[each.replay]
        share = f"{each.exposed_ms / stock.exposed_ms:.3f}" if stock and stock.exposed_ms > 0 else "-"
        memory = "-"
        if stock and each.peak_bytes is not None and stock.peak_bytes is not None:
            memory = f"{(each.peak_bytes - stock.peak_bytes) / 2**20:+.0f}"
        lines.append([each.strategy, shown, f"{each.step_ms:.1f}", f"{each.exposed_ms:.1f}", share, memory])
    return lines


def markdown(header: dict[str, Any], rows: list[Exposed], strategies: list[str] | None = None) -> str:
    """Return the table of a file for a document, below its title: of some strategies, or of all."""
    cells = [[f"`{name}`", *others] for name, *others in rows_of(rows) if not strategies or name in strategies]
    return f"{title(header)}:\n\n{table(HEADINGS, cells)}"


if __name__ == "__main__":
    main()
