# SPDX-License-Identifier: Apache-2.0
"""`commopt bandwidth`: how fast are collectives here? A loop of calls on every rank, of which the slowest counts."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import pairwise

import torch
import torch.distributed as dist

from commopt.bandwidth import report
from commopt.bandwidth.collectives import TORCH, Implementation, Pattern, count_wrong, of_commopt, of_torch
from commopt.bandwidth.report import Measurement, Row, Timing, percentile
from commopt.bandwidth.settings import Settings, add_arguments, settings_of
from commopt.collectives import Communicator
from commopt.command_line import refuse
from commopt.errors import ConfigurationError, MismatchError, UnsupportedTensorError
from commopt.groups import join
from commopt.probe.cli import require_usable, start
from commopt.recording import clock_for

__all__ = ["add_arguments", "measure", "run"]

_WRONG_RESULTS = 1


class Bench:
    """Measures rows on an initialized world; every method is collective over it."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.communicator = Communicator(ranks_per_node=settings.ranks_per_node)
        self.implementations = [self._implementation(name) for name in settings.aggregators]
        self._pattern = Pattern(settings.dtype, self.world_size)

    def _implementation(self, name: str) -> Implementation:
        if name == TORCH:
            return of_torch(self.settings.op, self.device)
        found = of_commopt(name, self.communicator, self.settings.op)
        # An aggregator that cannot run on this cluster says so here, before the table begins.
        found.wire_bytes(self.settings.collective.name, 1, self.settings.dtype)
        return found

    def rows(self) -> Iterator[Row | str]:
        """Measure and yield row after row, or a remark in its place."""
        collective, dtype = self.settings.collective, self.settings.dtype
        for nbytes in self.settings.steps_nbytes():
            count = collective.count(nbytes, dtype, self.world_size)
            if count:
                yield from (self._measure(implementation, count) for implementation in self.implementations)
            else:
                per_rank = f" for each of {self.world_size} ranks" if collective.blocks else ""
                yield f"# {nbytes} bytes hold less than one {self.settings.type_name}{per_rank}: skipped"

    def _measure(self, implementation: Implementation, count: int) -> Row:
        settings, collective = self.settings, self.settings.collective
        wire = implementation.wire_bytes(collective.name, count, settings.dtype)
        intra, inter = (None, None) if wire is None else _sum_over_ranks(wire.intra, wire.inter)
        return Row(
            collective=collective.name,
            nbytes=collective.nbytes(count, settings.dtype, self.world_size),
            count=count,
            type=settings.type_name,
            redop=settings.op if collective.reduces else "none",
            root=collective.root,
            aggregator=implementation.name,
            wire_intra_bytes=intra,
            wire_inter_bytes=inter,
            out_of_place=self._measure_side(implementation, count, in_place=False),
            in_place=self._measure_side(implementation, count, in_place=True) if collective.has_in_place else None,
        )

    def _measure_side(self, implementation: Implementation, count: int, in_place: bool) -> Measurement:
        settings, collective = self.settings, self.settings.collective
        send, recv = collective.buffers(self._pattern, self.rank, count, self.device, in_place)
        call = collective.bind(implementation, self.rank, send, recv)
        wrong = None
        if settings.check:
            call()
            bound = implementation.error_bound
            expected = collective.expected(self._pattern, self.rank, count, settings.op)
            tolerance = self._pattern.tolerance(settings.op, collective.reduces, bound)
            pairs = zip(recv.split(count), expected, strict=True)
            (wrong,) = _sum_over_ranks(sum(count_wrong(*pair, tolerance, lossless=not bound) for pair in pairs))
        timing = time_calls(call, settings.iterations, settings.warm_up_iterations, self.device)
        nbytes = collective.nbytes(count, settings.dtype, self.world_size)
        return Measurement.of(timing, nbytes, collective.bus_factor(self.world_size), wrong)


def time_calls(call: Callable[[], object], iterations: int, warm_up_iterations: int, device: torch.device) -> Timing:
    """Run `call` without barriers between iterations, as nccl-tests does; collective over the world."""
    for _ in range(warm_up_iterations):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    _sum_over_ranks(0)  # a barrier that never touches the GPU
    clock = clock_for(device)
    marks = [clock.mark()]
    for _ in range(iterations):
        call()
        marks.append(clock.mark())
    ((begin_us, *ended_us),) = clock.times_us([marks])
    ends_us = torch.tensor(ended_us, dtype=torch.float64, device="cpu") - begin_us
    dist.all_reduce(ends_us, op=dist.ReduceOp.MAX)
    return timing_of(ends_us.tolist())


def timing_of(ends_us: list[float]) -> Timing:
    """Derive it from the time at which the last rank ended each iteration, counted from the common start."""
    singles_us = [end - begin for begin, end in pairwise([0.0, *ends_us])]
    return Timing(ends_us[-1] / len(ends_us), percentile(singles_us, 0.50), percentile(singles_us, 0.99))


def measure(settings: Settings, device: torch.device) -> int:
    """Measure everything, print on rank 0, and return the exit status; needs an initialized world.

    The world must have a backend for CPU tensors, and one for `device`. Raises ConfigurationError and MismatchError
    on every rank for settings that cannot work.
    """
    stated = {field.name: str(getattr(settings, field.name)) for field in fields(settings)}
    join(None, settings.ranks_per_node).agree("a table of bandwidths", **stated)
    require_usable(settings.json)
    bench = Bench(settings, device)
    width = max(len("aggregator"), *map(len, settings.aggregators))
    rows: list[Row] = []

    def tell(text: str) -> None:
        if bench.rank == 0:
            print(text, flush=True)

    tell(report.preamble(settings, bench.communicator.cluster, device))
    heading, line = (report.heading, report.format_row) if settings.wide else (report.short_heading, report.short_row)
    tell(heading(width))
    for row in bench.rows():
        tell(row if isinstance(row, str) else line(row, width))
        rows += [] if isinstance(row, str) else [row]
    tell(report.footer(rows, report.notes(settings, bench.implementations, device)))
    if settings.json is not None and bench.rank == 0:
        document = report.document(settings, bench.communicator.cluster, device, rows)
        settings.json.write_text(json.dumps(document, indent=2) + "\n")
    _sum_over_ranks(0)  # torchrun ends all ranks as soon as one of them exits with 1: not before rank 0 has written
    return _WRONG_RESULTS if any(row.wrong for row in rows) else 0


def run(options: argparse.Namespace) -> int:
    """Measure, print, write, and return the exit status."""
    try:
        settings = settings_of(options)
        if "RANK" not in os.environ:
            raise ConfigurationError("no rank: start it with torchrun --nproc-per-node 2 -m commopt bandwidth ...")
        # With NCCL if every rank can have a GPU of its own, else with gloo.
        status = measure(settings, start(os.environ))
    except (ConfigurationError, MismatchError, UnsupportedTensorError) as error:
        status = refuse("commopt bandwidth", error)
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def _sum_over_ranks(*numbers: int) -> list[int]:
    total = torch.tensor(numbers, device="cpu")
    dist.all_reduce(total)
    return [int(number) for number in total]
