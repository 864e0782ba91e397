# SPDX-License-Identifier: Apache-2.0
"""`python -m commopt probe`: what do messages and compression cost here?"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commopt.command_line import BAD_INPUT, number, parse_nbytes, refuse, require_writable, writing
from commopt.errors import CommoptError, ConfigurationError, MismatchError
from commopt.groups import join
from commopt.probe import report
from commopt.probe.operations import PARTS, ProbeOptions
from commopt.probe.prober import command_line, survey

_FAILED = 1

ALONE = (
    "commopt probe: one rank has nobody to send to, so only compression is measured; for the links start every rank: "
    "torchrun --nproc-per-node 2 -m commopt probe -o links.json, or srun or mpirun python -m commopt probe"
)
EPILOG = f"""exit status: 0, {_FAILED} when a rank failed meanwhile, {BAD_INPUT} bad input (one line on stderr).
Sizes are bytes of a message, with K, M or G for powers of 1024. NCCL is used when every rank has a GPU, else gloo."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the probe."""
    parser.description = "Measure the links of every level and the compressors, and fit latency and bandwidth to them."
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    default = ProbeOptions()
    add: Any = parser.add_argument
    add("-o", "--output", type=Path, metavar="FILE", help="write the curves to FILE, for commopt's planner")
    # The names of nccl-tests; torchrun would take --min and --max for its own.
    size = {"type": parse_nbytes, "metavar": "SIZE"}
    add("-b", "--min-bytes", dest="min_nbytes", default="1K", **size, help="smallest message (default 1K)")
    add("-e", "--max-bytes", dest="max_nbytes", default="256M", **size, help="largest message (default 256M)")
    add("-f", "--factor", type=number(1.0, 64.0), default=default.factor, help="from one size to the next (default 2)")
    add(
        "--budget",
        dest="budget_s",
        type=number(),
        default=default.budget_s,
        metavar="SECONDS",
        help=f"time for everything; slow links get no longer messages than it allows (default {default.budget_s:g})",
    )
    every = ",".join(PARTS)
    add("--only", dest="parts", default=every, metavar="PART[,PART...]", help=f"measure only these of {every}")


def run(options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> int:
    """Measure, print, write, and return the exit status."""
    try:
        asked = ProbeOptions(
            options.min_nbytes,
            options.max_nbytes,
            options.factor,
            options.budget_s,
            tuple(dict.fromkeys(options.parts.split(","))),
        )
        if not dist.is_initialized():
            start(environ)
        require_usable(options.output)
        _run(options, asked, environ)
    except (ConfigurationError, MismatchError, OSError) as error:
        return refuse("commopt probe", error)
    except CommoptError as error:
        refuse("commopt probe", error)
        return _FAILED
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def start(environ: Mapping[str, str]) -> torch.device:
    """Start the world that the environment describes, or one of this process alone, and return the device to measure.

    With NCCL if every rank can have a GPU of its own, else with gloo.
    Raises MismatchError when the ranks do not meet, or the environment is incomplete.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0
    alone = "RANK" not in environ
    try:
        usual = "0" if gpus < 2 or alone else ""
        local_rank = int(environ.get("LOCAL_RANK", usual))
    except ValueError:
        raise MismatchError("LOCAL_RANK is not a whole number, or not set; start every rank with torchrun") from None
    try:
        store, rank, world_size = (dist.HashStore(), 0, 1) if alone else next(dist.rendezvous("env://"))
        store.set(f"commopt/probe/gpu/{rank}", str(local_rank < gpus))
        everywhere = all(store.get(f"commopt/probe/gpu/{other}") == b"True" for other in range(world_size))
        if everywhere:
            torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl" if everywhere else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    except (RuntimeError, ValueError, OverflowError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MismatchError(f"the ranks did not meet: {reason}; start every rank with torchrun") from error
    return torch.device("cuda", local_rank) if everywhere else torch.device("cpu")


def _run(options: argparse.Namespace, asked: ProbeOptions, environ: Mapping[str, str]) -> None:
    if dist.get_world_size() == 1:
        print(ALONE, file=sys.stderr)
    membership = join()
    # sys.argv, not options: what is written down is what was typed
    found = survey(membership, asked, command_line(sys.argv[2:], environ))
    nominal_gbps = report.line_rate_gbps(membership, environ)
    if dist.get_rank() != 0:
        return
    report.show(found, report.LineRate.of(found.links, nominal_gbps), asked.budget_s)
    if options.output is not None:
        with writing(options.output):
            found.links.save(options.output)


def require_usable(path: Path | None) -> None:
    """Raise ConfigurationError on every rank if rank 0 cannot write to `path`: now, not after the measurements."""
    problem: str | None = None
    if path is not None and dist.get_rank() == 0:
        try:
            require_writable(path)
        except ConfigurationError as error:
            problem = str(error)
    answers = join().exchange("an output file", found=problem)
    problem = next((answer["found"] for answer in answers if answer["found"] is not None), None)
    if problem is not None:
        raise ConfigurationError(problem)
