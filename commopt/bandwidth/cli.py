"""`commopt bandwidth`: how fast are collectives here?"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commopt.bandwidth import report
from commopt.bandwidth.collective import COLLECTIVES
from commopt.bandwidth.contenders import TORCH, Commopt, Contender, Torch, find_aggregator, known_aggregators
from commopt.bandwidth.pattern import Pattern, count_wrong
from commopt.bandwidth.settings import COMMOPT, DTYPES, Settings, settings_of
from commopt.bandwidth.table import Measurement, Row, footer, format_row, heading
from commopt.bandwidth.timing import Progress, time_calls
from commopt.collectives import Communicator
from commopt.command_line import refuse, whole
from commopt.errors import ConfigurationError, MismatchError, UnsupportedTensorError
from commopt.probe.cli import start

_WRONG_RESULTS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options: flags of nccl-tests, and ours."""
    parser.usage = "torchrun ... -m commopt bandwidth [OPTIONS]"
    parser.description = "Time a collective over all ranks and print nccl-tests' table."
    parser.epilog = "Exit status: 0, 1 when a result was wrong, 2 for settings that cannot work."
    add: Any = parser.add_argument
    add("-b", dest="min_nbytes", default="32M", metavar="BYTES", help="smallest size: 8, 4K, 32M, 1G (default 32M)")
    add("-e", dest="max_nbytes", default="32M", metavar="BYTES", help="largest size (default 32M)")
    add("-f", dest="step_factor", type=whole(1), default=1, metavar="N", help="multiply sizes by N (default: add -i)")
    add("-i", dest="step_nbytes", default="1M", metavar="BYTES", help="add this to each size (default 1M)")
    add("-n", dest="iterations", type=whole(1), default=20, metavar="N", help="timed iterations (default 20)")
    add(
        "-w",
        dest="warm_up_iterations",
        type=whole(0, 10**6),
        default=5,
        metavar="N",
        help="warm-up iterations (default 5)",
    )
    add("-c", dest="check", type=int, choices=(0, 1), default=1, help="check results before timing (default 1)")
    add("-d", dest="datatype", choices=DTYPES, default="float", help="element type (default float)")
    add("-o", dest="op", choices=("sum", "avg"), default="sum", help="reduction (default sum)")
    add("--collective", choices=COLLECTIVES, default="all_reduce", help="what to time (default all_reduce)")
    add(
        "--aggregator",
        metavar="NAME[,NAME...]",
        help=f"what to time it with: {TORCH} (the backend's own collective) or, for all_reduce, one of "
        f"{', '.join(sorted(known_aggregators()))} (default hierarchical); {COMMOPT} for other collectives",
    )
    add(
        "--ranks-per-node",
        type=whole(1),
        metavar="L",
        help="declare blocks of L ranks to be nodes (default: ask hosts)",
    )
    add("--json", type=Path, metavar="FILE", help="also write environment and results to FILE")


class Bench:
    """Measures rows on an initialized world; every method is collective over it."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        self.rank = dist.get_rank()
        self.communicator = Communicator(ranks_per_node=settings.ranks_per_node)
        self.contenders = [self._contender(name) for name in settings.contenders]
        self._pattern = Pattern(settings.dtype, dist.get_world_size())
        self._progress = Progress(self.rank)

    def rows(self) -> Iterator[Row | str]:
        """Measure and yield row after row, or a remark in its place."""
        collective, dtype, world_size = self.settings.collective, self.settings.dtype, dist.get_world_size()
        for nbytes in self.settings.steps_nbytes():
            count = collective.count(nbytes, dtype, world_size)
            if not count:
                per_rank = f" for each of {world_size} ranks" if collective.blocks else ""
                yield f"# {nbytes} bytes hold less than one {self.settings.type_name}{per_rank}: skipped"
                continue
            for contender in self.contenders:
                row = self._measure(contender, count)
                self._progress.clear()
                yield row

    def _measure(self, contender: Contender, count: int) -> Row:
        settings, collective, dtype = self.settings, self.settings.collective, self.settings.dtype
        nbytes = collective.nbytes(count, dtype, dist.get_world_size())
        self._progress.start(f"{nbytes} B, {contender.name}")
        wire_intra_bytes, wire_inter_bytes = self._wire_bytes(contender, count)
        return Row(
            collective=collective.name,
            nbytes=nbytes,
            count=count,
            type=settings.type_name,
            redop=settings.op if collective.reduces else "none",
            root=collective.root,
            aggregator=contender.name,
            wire_intra_bytes=wire_intra_bytes,
            wire_inter_bytes=wire_inter_bytes,
            out_of_place=self._measure_side(contender, count, nbytes, in_place=False),
            in_place=self._measure_side(contender, count, nbytes, in_place=True) if collective.has_in_place else None,
        )

    def _measure_side(self, contender: Contender, count: int, nbytes: int, in_place: bool) -> Measurement:
        settings, collective = self.settings, self.settings.collective
        send, recv = collective.buffers(self._pattern, self.rank, count, self.device, in_place)
        call = collective.bind(contender, self.rank, send, recv)
        wrong = None
        if settings.check:
            call()
            wrong = self._count_wrong(recv, count, contender.error_bound)
        timing = time_calls(call, settings.iterations, settings.warm_up_iterations, self.device, self._progress)
        return Measurement.of(timing, nbytes, collective.bus_factor(dist.get_world_size()), wrong)

    def _count_wrong(self, recv: torch.Tensor, count: int, error_bound: float) -> int:
        collective, op = self.settings.collective, self.settings.op
        expected = collective.expected(self._pattern, self.rank, count, op)
        tolerance = self._pattern.tolerance(op, collective.reduces, error_bound)
        blocks = recv.split(count)
        own = sum(
            count_wrong(*pair, tolerance, lossless=not error_bound) for pair in zip(blocks, expected, strict=True)
        )
        return _sum_over_ranks(own)[0]

    def _wire_bytes(self, contender: Contender, count: int) -> tuple[int | None, int | None]:
        own = contender.wire_bytes(self.settings.collective.name, count, self.settings.dtype)
        if own is None:
            return None, None
        intra, inter = _sum_over_ranks(own.intra, own.inter)
        return intra, inter

    def _contender(self, name: str) -> Contender:
        if name == TORCH:
            return Torch(self.settings.op, self.device)
        contender = Commopt(name, self.communicator, self.settings.op, find_aggregator(name))
        # An aggregator that cannot run on this cluster says so here, before the table begins.
        contender.wire_bytes(self.settings.collective.name, 1, self.settings.dtype)
        return contender


def measure(settings: Settings, device: torch.device) -> int:
    """Measure everything, print on rank 0, and return the exit status; needs an initialized world.

    The world must have a backend for CPU tensors, and one for `device`. Raises ConfigurationError and MismatchError
    on every rank for settings that cannot work.
    """
    report.require_same_everywhere(settings)
    report.require_json(settings.json)
    bench = Bench(settings, device)
    print_first = print if bench.rank == 0 else _discard
    print_first(report.preamble(settings, bench.communicator.cluster, device), flush=True)
    width = max(len("aggregator"), *map(len, settings.contenders))
    print_first(heading(width), flush=True)
    rows: list[Row] = []
    for row in bench.rows():
        print_first(row if isinstance(row, str) else format_row(row, width), flush=True)
        if isinstance(row, Row):
            rows.append(row)
    print_first(footer(rows, report.notes(settings, bench.contenders, device)), flush=True)
    if settings.json is not None and bench.rank == 0:
        report.write_json(settings.json, report.document(settings, bench.communicator.cluster, device, rows))
    _sum_over_ranks(0)  # torchrun ends all ranks as soon as one of them exits with 1: not before rank 0 has written
    return _WRONG_RESULTS if any(row.wrong for row in rows) else 0


def initialize() -> torch.device:
    """Start the world that torchrun described, with NCCL if every rank can have a GPU of its own, else with gloo."""
    if "RANK" not in os.environ:
        raise ConfigurationError("no rank: start it with torchrun --nproc-per-node 2 -m commopt bandwidth ...")
    return start(os.environ)


def run(options: argparse.Namespace) -> int:
    """Measure, print, write, and return the exit status."""
    try:
        status = measure(settings_of(options), initialize())
    except (ConfigurationError, MismatchError, UnsupportedTensorError) as error:
        status = refuse("commopt bandwidth", error)
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def _sum_over_ranks(*numbers: int) -> list[int]:
    total = torch.tensor(numbers, device="cpu")
    dist.all_reduce(total)
    return [int(number) for number in total]


def _discard(*values: object, flush: bool) -> None:
    """Print nothing: only rank 0 reports."""
