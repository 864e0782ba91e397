# SPDX-License-Identifier: Apache-2.0
"""`commopt bandwidth`: how fast are collectives here? A loop of calls on every rank, of which the slowest counts."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.bandwidth import report
from commopt.bandwidth.collectives import TORCH, Implementation, Pattern, count_wrong, of_commopt, of_torch
from commopt.bandwidth.options import BandwidthOptions, add_arguments, options_of
from commopt.bandwidth.report import BandwidthMeasurement, TableRow, Timing
from commopt.collectives import Communicator
from commopt.command_line import refuse, writing
from commopt.document import write_whole
from commopt.errors import CommoptError, ConfigurationError, MismatchError, UnsupportedTensorError
from commopt.groups import join
from commopt.probe.cli import require_usable, start
from commopt.probe.timing import Repeats, loop, since_begin_us
from commopt.recording import clock_for

__all__ = ["add_arguments", "measure", "run"]

_WRONG_RESULTS = 1
_FAILED = 3


class Bench:
    """Measures rows on an initialized world; every method is collective over it."""

    def __init__(self, options: BandwidthOptions, device: torch.device) -> None:
        self.options = options
        self.device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.communicator = Communicator(ranks_per_node=options.ranks_per_node)
        self.implementations = [self._implementation(name) for name in options.aggregators]
        self._pattern = Pattern(options.dtype, self.world_size)

    def _implementation(self, name: str) -> Implementation:
        if name == TORCH:
            return of_torch(self.options.op, self.device)
        found = of_commopt(name, self.communicator, self.options.op)
        # An aggregator that cannot run on this cluster says so here, before the table begins.
        found.wire_bytes(self.options.collective.name, 1, self.options.dtype)
        return found

    def rows(self) -> Iterator[TableRow | str]:
        """Measure and yield row after row, or a remark in its place."""
        collective, dtype = self.options.collective, self.options.dtype
        for nbytes in self.options.steps_nbytes():
            count = collective.count(nbytes, dtype.itemsize, self.world_size)
            if count:
                yield from (self._measure(implementation, count) for implementation in self.implementations)
            else:
                per_rank = f" for each of {self.world_size} ranks" if collective.blocks else ""
                yield f"# {nbytes} bytes hold less than one {self.options.type_name}{per_rank}: skipped"

    def _measure(self, implementation: Implementation, count: int) -> TableRow:
        options, collective = self.options, self.options.collective
        wire = implementation.wire_bytes(collective.name, count, options.dtype)
        intra, inter = (None, None) if wire is None else _sum_over_ranks(wire.intra, wire.inter)
        return TableRow(
            collective=collective.name,
            nbytes=self._nbytes(count),
            count=count,
            type=options.type_name,
            redop=options.op if collective.reduces else "none",
            root=collective.root,
            aggregator=implementation.name,
            wire_intra_bytes=intra,
            wire_inter_bytes=inter,
            out_of_place=self._measure_side(implementation, count, in_place=False),
            in_place=self._measure_side(implementation, count, in_place=True) if collective.has_in_place else None,
        )

    def _nbytes(self, count: int) -> int:
        """Return the bytes of the larger side on one rank: the size in the table and in algbw."""
        return max(self.options.collective.numels(count, self.world_size)) * self.options.dtype.itemsize

    def _measure_side(self, implementation: Implementation, count: int, in_place: bool) -> BandwidthMeasurement:
        options, collective = self.options, self.options.collective
        send, recv = self._buffers(count, in_place)
        call = collective.bind(implementation.functions[collective.name], self.rank, send, recv)
        wrong = None
        if options.check:
            call()
            bound = implementation.error_bound
            expected = self._pattern.expected(collective, self.rank, count, options.op)
            tolerance = self._pattern.tolerance(options.op, collective.reduces, bound)
            pairs = zip(recv.split(count), expected, strict=True)
            (wrong,) = _sum_over_ranks(sum(count_wrong(*pair, tolerance, lossless=not bound) for pair in pairs))
        timing = time_calls(call, Repeats(options.warm_up_iterations, options.iterations), self.device)
        return BandwidthMeasurement.of(timing, self._nbytes(count), collective.bus_factor(self.world_size), wrong)

    def _buffers(self, count: int, in_place: bool) -> tuple[Tensor, Tensor]:
        """Return (send, recv). Raises ConfigurationError on every rank if some rank has no memory for them."""
        buffers, why = None, ""
        try:
            buffers = self._pattern.buffers(self.options.collective, self.rank, count, self.device, in_place)
        except RuntimeError as error:  # OutOfMemoryError, or the CPU allocator's
            why = f" ({str(error).splitlines()[0]})"
        (without,) = _sum_over_ranks(int(buffers is None))
        if buffers is None or without:
            raise ConfigurationError(
                f"{without} of {self.world_size} ranks cannot allocate buffers of {self._nbytes(count)} bytes{why}; "
                f"pass a lower -e"
            )
        return buffers


def time_calls(call: Callable[[], object], repeats: Repeats, device: torch.device) -> Timing:
    """Run `call` without barriers between iterations, as nccl-tests does; collective over the world."""
    clock = clock_for(device)

    def barrier() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        _sum_over_ranks(0)  # a barrier that never touches the GPU

    marks = loop(call, repeats, clock, barrier)
    ends_us = torch.tensor(since_begin_us(clock, marks), dtype=torch.float64, device="cpu")
    dist.all_reduce(ends_us, op=dist.ReduceOp.MAX)
    return Timing.of(ends_us.tolist())


def measure(options: BandwidthOptions, device: torch.device) -> int:
    """Measure everything, print on rank 0, and return the exit status; needs an initialized world.

    The world must have a backend for CPU tensors, and one for `device`. Raises ConfigurationError and MismatchError
    on every rank for settings that cannot work.
    """
    stated = {field.name: str(getattr(options, field.name)) for field in fields(options)}
    join(None, options.ranks_per_node).agree("a table of bandwidths", **stated)
    require_usable(options.json)
    bench = Bench(options, device)
    width = max(len("aggregator"), *map(len, options.aggregators))
    rows: list[TableRow] = []

    def tell(text: str) -> None:
        if bench.rank == 0:
            print(text, flush=True)

    tell(report.preamble(options, bench.communicator.cluster, device))
    heading, line = (report.heading, report.format_row) if options.wide else (report.short_heading, report.short_row)
    tell(heading(width))
    for row in bench.rows():
        tell(row if isinstance(row, str) else line(row, width))
        rows += [] if isinstance(row, str) else [row]
    tell(report.footer(rows, report.notes(options, bench.implementations, device)))
    status = _WRONG_RESULTS if any(row.wrong for row in rows) else 0
    if options.json is not None and bench.rank == 0:
        document = report.document(options, bench.communicator.cluster, device, rows)
        try:
            with writing(options.json):
                write_whole(options.json, f"{json.dumps(document, indent=2)}\n".encode())
        except ConfigurationError as error:
            status = refuse("commopt bandwidth", error)
    _sum_over_ranks(0)  # torchrun ends all ranks as soon as one of them exits with 1: not before rank 0 has written
    return status


def run(options: argparse.Namespace) -> int:
    """Measure, print, write, and return the exit status."""
    try:
        asked = options_of(options)
        if "RANK" not in os.environ:
            raise ConfigurationError(
                "no rank: start it with torchrun --nproc-per-node 2 -m commopt bandwidth ..., or with srun or mpirun "
                "python -m commopt bandwidth ..."
            )
        # With NCCL if every rank can have a GPU of its own, else with gloo.
        status = measure(asked, start(os.environ))
    except (ConfigurationError, MismatchError, UnsupportedTensorError) as error:
        status = refuse("commopt bandwidth", error)
    except CommoptError as error:
        refuse("commopt bandwidth", error)
        status = _FAILED
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def _sum_over_ranks(*numbers: int) -> list[int]:
    total = torch.tensor(numbers, device="cpu")
    dist.all_reduce(total)
    return [int(number) for number in total]
