"""Command line: `python -m bench.overlap --help`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import torch
import torch.distributed as dist

import bench.overlap
from bench.environment import run_of
from bench.overlap import report
from bench.overlap.steps import STEP, Steps, start_process_group
from bench.overlap.trace import Overlap, overlap_of
from bench.ranks import gather
from commopt.command_line import Parser, output_file, whole
from examples.train_gpt import strategy_name


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, or of `arguments`."""
    parser = Parser(prog="python -m bench.overlap", description=(bench.overlap.__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=whole(1), default=2, help="to start, unless torchrun has (default 2)")
    parser.add_argument("--strategy", type=strategy_name, default="hierarchical_quantized:bits=4")
    parser.add_argument("--steps", type=whole(1), default=3, help="to look at (default 3)")
    parser.add_argument("--layers", type=whole(1), default=6)
    parser.add_argument("--width", type=whole(1), default=768)
    parser.add_argument("--context", type=whole(1), default=128)
    parser.add_argument("--batch", type=whole(1), default=16)
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write JSON lines: the environment, then every rank"
    )
    parser.add_argument("--trace", type=output_file, metavar="FILE", help="write rank 0's trace, compressed (.json.gz)")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, device: torch.device) -> list[Overlap]:
    """Profile a few steps on every rank, write and print what was found; collective."""
    steps = Steps(options, device)
    trace = report.trace_of(steps.profiled(options.steps))
    overlaps = gather(overlap_of(trace["traceEvents"], STEP))
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        model = {key: getattr(options, key) for key in ("layers", "width", "context", "batch")}
        environment = {**run_of("bench.overlap"), "device": name, "strategy": str(steps.state.aggregator), **model}
        if options.json:
            report.write(options.json, environment, overlaps)
        if options.trace:
            report.write_trace(options.trace, trace)
        report.print_table(f"{options.strategy} on {name}, sums over the steps", overlaps)
    return overlaps


def main() -> int:
    """Start the ranks unless torchrun has; in each, measure. Return 1 where no communication was seen on a stream."""
    options = parse_options()
    if "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        launcher.append(f"--nproc-per-node={options.ranks}")
        return subprocess.run([*launcher, "-m", "bench.overlap", *sys.argv[1:]]).returncode
    device = start_process_group()
    overlaps = measure(options, device)
    seen = all(overlap.lane_kernels for overlap in overlaps)
    if not seen and dist.get_rank() == 0:
        why = "there is no GPU here" if device.type == "cpu" else "the profiler has recorded none"
        print(f"no kernel of NCCL was seen: {why}", file=sys.stderr)
    dist.destroy_process_group()
    return 0 if seen else 1


if __name__ == "__main__":
    sys.exit(main())
