"""Command line: `python -m bench.kernels --help`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import bench.kernels
from bench.environment import machine
from bench.kernels.case import Case
from bench.kernels.cases import cases
from bench.kernels.report import Measurement, print_table, write
from bench.turns import times_s


def measure(case: Case, gradient: Tensor, repeats: int) -> list[Measurement]:
    """Time every implementation of a case in turns with a clone of the gradient."""
    calls = case.calls(gradient.device)
    clones_s, *others_s = times_s([gradient.clone, *calls.values()], repeats, gradient.device)
    clone_gbps = 2 * gradient.numel() * gradient.element_size() / median(clones_s) / 1e9
    found = []
    for implementation, taken_s in zip(calls, others_s, strict=True):
        gbps = case.nbytes / median(taken_s) / 1e9
        best_us, median_us = 1e6 * min(taken_s), 1e6 * median(taken_s)
        of_clone = gbps / clone_gbps
        found.append(
            Measurement(case.name, case.variant, implementation, case.nbytes, best_us, median_us, gbps, of_clone)
        )
    return found


def main() -> None:
    """Measure every kernel, print and write the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels", description=(bench.kernels.__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--numel", type=int, default=25_000_000, help="elements of the gradient")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines: the environment, then kernels")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gradient = torch.randn(options.numel, device=device)
    found: list[Measurement] = []
    for case in cases(options.numel, device):
        print(f"{case.name}, {case.variant}", file=sys.stderr, flush=True)
        found += measure(case, gradient, options.repeats)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {options.threads} threads"
    print_table(f"{options.numel:,} elements, {name}; bytes read and written", found)
    if options.json is not None:
        command = shlex.join(["python", "-m", "bench.kernels", *sys.argv[1:]])
        write(options.json, {**machine(), "command": command, "device": name, "numel": options.numel}, found)


if __name__ == "__main__":
    main()
