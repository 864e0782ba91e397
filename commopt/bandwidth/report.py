# SPDX-License-Identifier: Apache-2.0
"""The table and the JSON file: nccl-tests' columns in its own widths, ours to their right, and notes around them."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from math import ceil
from textwrap import wrap
from typing import Any

import torch
import torch.distributed as dist

from commopt.bandwidth.collectives import TORCH, Implementation, Pattern
from commopt.bandwidth.options import BandwidthOptions
from commopt.cluster import link_rate
from commopt.display import WIDTH, significant
from commopt.groups import join
from commopt.probe.timing import durations_us
from commopt.version import __version__, revision
from topology import Cluster


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the mean of the loop on the slowest rank, and percentiles over its iterations.

    An iteration lasts from when the last rank has ended the one before until the last rank has ended it, so the
    iterations add up to the loop. (The longest duration on any rank would count a wait twice, as ranks drift.)
    """

    mean_us: float
    p50_us: float
    p99_us: float

    @classmethod
    def of(cls, ends_us: Sequence[float]) -> Timing:
        """Derive it from the time at which the last rank ended each iteration, counted from the common start."""
        ranked = sorted(durations_us(ends_us))
        # A percentile is the smallest value that so many of them do not exceed.
        p50_us, p99_us = (ranked[max(0, ceil(fraction * len(ranked)) - 1)] for fraction in (0.50, 0.99))
        return cls(ends_us[-1] / len(ends_us), p50_us, p99_us)


@dataclass(frozen=True)
class BandwidthMeasurement:
    """One side of a row; GB/s = 1e9 B/s. `wrong` counts elements over all ranks, None when nothing was checked."""

    timing: Timing
    algbw_gbps: float
    busbw_gbps: float
    wrong: int | None

    @classmethod
    def of(cls, timing: Timing, nbytes: int, bus_factor: float, wrong: int | None) -> BandwidthMeasurement:
        """Derive the bandwidths from the mean time; `nbytes` and `bus_factor` are the collective's."""
        algbw_gbps = nbytes / (timing.mean_us * 1e3)
        return cls(timing, algbw_gbps, algbw_gbps * bus_factor, wrong)


@dataclass(frozen=True)
class TableRow:
    """One size with one contender; `in_place` is None where that does not exist, wire bytes where no formula says.

    Wire bytes are of one call, added up over all ranks.
    """

    collective: str
    nbytes: int
    count: int
    type: str
    redop: str
    root: int
    aggregator: str
    wire_intra_bytes: int | None
    wire_inter_bytes: int | None
    out_of_place: BandwidthMeasurement
    in_place: BandwidthMeasurement | None

    @property
    def measurements(self) -> tuple[BandwidthMeasurement, ...]:
        """Both sides, or the one there is."""
        return (self.out_of_place,) if self.in_place is None else (self.out_of_place, self.in_place)

    @property
    def wrong(self) -> int:
        """Wrong elements of all sides."""
        return sum(measurement.wrong or 0 for measurement in self.measurements)


def heading(aggregator_width: int) -> str:
    """Return the three header lines."""
    left = "#{:>11}  {:>12}  {:>8}  {:>6}  {:>6}"
    side = "  {:>7}  {:>6}  {:>6} {:>6}"
    ours = "  {:>" + str(aggregator_width) + "}  {:>12}  {:>12}  {:>8}  {:>8}"
    names = ("time", "algbw", "busbw", "#wrong")
    units = ("(us)", "(GB/s)", "(GB/s)", "")
    lines = (
        left.format(*[""] * 5) + "           out-of-place                       in-place          ",
        left.format("size", "count", "type", "redop", "root")
        + side.format(*names) * 2
        + ours.format("aggregator", "wire_intra", "wire_inter", "p50", "p99"),
        left.format("(B)", "(elements)", "", "", "")
        + side.format(*units) * 2
        + ours.format("", "(B)", "(B)", "(us)", "(us)"),
    )
    return "\n".join(line.rstrip() for line in lines)


def format_row(row: TableRow, aggregator_width: int) -> str:
    """Return one line, aligned below the heading."""
    times = (row.in_place or row.out_of_place).timing
    wire = [f"{'n/a' if nbytes is None else nbytes:>12}" for nbytes in (row.wire_intra_bytes, row.wire_inter_bytes)]
    return (
        f"{row.nbytes:>12}  {row.count:>12}  {row.type:>8}  {row.redop:>6}  {row.root:>6}"
        f"{_side(row.out_of_place)}{_side(row.in_place)}"
        f"  {row.aggregator:>{aggregator_width}}  {wire[0]}  {wire[1]}  {_us(times.p50_us):>8}  {_us(times.p99_us):>8}"
    )


def short_heading(aggregator_width: int) -> str:
    """Return the two header lines of the table for 80 columns: one side, without columns that seldom change."""
    names = ("size", "time", "algbw", "busbw", "#wrong", "wire_inter")
    units = ("(B)", "(us)", "(GB/s)", "(GB/s)", "", "(B)")
    lines = (_short(names, "aggregator", aggregator_width), _short(units, "", aggregator_width))
    return "\n".join(f"#{line[1:]}".rstrip() for line in lines)


def short_row(row: TableRow, aggregator_width: int) -> str:
    """Return one line of the short table: in place, where that exists."""
    side = row.in_place or row.out_of_place
    wrong = "N/A" if side.wrong is None else str(side.wrong)
    wire = "n/a" if row.wire_inter_bytes is None else str(row.wire_inter_bytes)
    figures = (str(row.nbytes), _us(side.timing.mean_us), _short_gbps(side.algbw_gbps), _short_gbps(side.busbw_gbps))
    return _short((*figures, wrong, wire), row.aggregator, aggregator_width)


def _short(cells: Sequence[str], aggregator: str, width: int) -> str:
    size, time, algbw, busbw, wrong, wire = cells
    return f"{size:>10} {aggregator:<{width}}{time:>8} {algbw:>7} {busbw:>7} {wrong:>6}{wire:>11}"


def footer(rows: Sequence[TableRow], notes: Sequence[str]) -> str:
    """Return the closing lines; the last one is nccl-tests' average."""
    names = dict.fromkeys(row.aggregator for row in rows)
    lines = [line for note in notes for line in _comment(note)]
    if len(names) > 1:
        averages = {name: average_busbw_gbps([row for row in rows if row.aggregator == name]) for name in names}
        words = ", ".join(f"{name} {significant(busbw_gbps)}" for name, busbw_gbps in averages.items())
        lines += _comment(f"Average busbw of each: {words}")
    checked = any(row.out_of_place.wrong is not None for row in rows)
    wrong = sum(row.wrong for row in rows)
    lines.append(f"# Out of bounds values : {f'{wrong} FAILED' if wrong else '0 OK' if checked else 'N/A'}")
    lines.append(f"# Avg bus bandwidth    : {average_busbw_gbps(rows):.6g}")
    return "\n".join(lines)


def _comment(text: str) -> list[str]:
    return wrap(text, WIDTH, initial_indent="# ", subsequent_indent="#   ")


def average_busbw_gbps(rows: Sequence[TableRow]) -> float:
    """Return the mean over rows and sides, as nccl-tests does."""
    values = [measurement.busbw_gbps for row in rows for measurement in row.measurements]
    return sum(values) / len(values) if values else 0.0


def _side(measurement: BandwidthMeasurement | None) -> str:
    if measurement is None:
        time, algbw, busbw, wrong = ["N/A"] * 4
    else:
        time = _us(measurement.timing.mean_us)
        algbw, busbw = _gbps(measurement.algbw_gbps), _gbps(measurement.busbw_gbps)
        wrong = "N/A" if measurement.wrong is None else str(measurement.wrong)
    return f"  {time:>7}  {algbw:>6}  {busbw:>6}  {wrong:>5}"


def _gbps(rate: float) -> str:
    """Write it as nccl-tests does, and with more digits where that would be 0.01."""
    return f"{rate:.2f}" if rate >= 0.1 else significant(rate, 2)


def _short_gbps(rate: float) -> str:
    """Write it with three digits that count, or as many as there is room for."""
    return next((text for text in (significant(rate, digits) for digits in (3, 2, 1)) if len(text) <= 7), f"{rate:.0e}")


def _us(time_us: float) -> str:
    digits = 0 if time_us >= 10_000 else 1 if time_us >= 100 else 2
    return f"{time_us:.{digits}f}"


def preamble(options: BandwidthOptions, cluster: Cluster, device: torch.device) -> str:
    """Return the lines above the table; collective over the world."""
    mine: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "name": _device_name(device)}
    ranks = join(None, options.ranks_per_node).exchange("who measures", **mine)
    step = f"{options.step_factor}(factor)" if options.step_factor > 1 else f"{options.step_nbytes}(bytes)"
    times = f"warmup iters: {options.warm_up_iterations} iters: {options.iterations} validation: {int(options.check)}"
    lines = [
        *_comment(f"Collective: {options.collective.name} over {cluster}, {_backend(device)}"),
        *_comment(f"minBytes {options.min_nbytes} maxBytes {options.max_nbytes} step: {step} {times}"),
        "#",
        "# Using devices",
    ]
    for rank, its in enumerate(ranks):
        of = f"Pid {its['pid']:>6} on {its['host']:>10} device {its['name']}"
        lines += _comment(f" Rank {rank:>2} Node {cluster.node_of(rank):>2} {of}")
    return "\n".join([*lines, "#"])


def notes(options: BandwidthOptions, implementations: Sequence[Implementation], device: torch.device) -> list[str]:
    """Return one sentence for each thing a reader of this table could get wrong."""
    collective, op = options.collective, options.op
    world_size = dist.get_world_size()
    side = "in place" if collective.has_in_place else "out of place"
    short = "" if options.wide else f" The table is of calls {side}; --wide has nccl-tests' columns, p50 and p99."
    few = "; p99 of less than 100 is the maximum" if options.iterations < 100 else ""
    lines = [
        f"time: mean of a loop without barriers on the slowest rank; GB/s = 1e9 B/s.{short}",
    ]
    if options.wide:
        lines.append(f"p50, p99: of the loop's iterations {side}, each ending when the last rank has{few}.")
    if options.wide and not collective.has_in_place:
        lines.append(f"in-place N/A: {collective.name} needs two buffers.")
    elif options.wide and not collective.blocks:
        whose = "the input" if collective.root < 0 else f"rank {collective.root}'s input"
        lines.append(f"out-of-place: {whose} is copied first, as {collective.name} works in place.")
    if collective.aggregates:
        lines.append("wire: payload bytes of one call by formula, added up over all ranks; n/a: no formula.")
    if TORCH in options.aggregators and collective.reduces and op == "avg" and _backend(device) == "gloo":
        lines.append("torch avg: gloo cannot average, so a sum and a division, as in stock DDP.")
    for bound in sorted({one.error_bound for one in implementations} if options.check else ()):
        tolerance = Pattern(options.dtype, world_size).tolerance(op, collective.reduces, bound)
        names = ", ".join(one.name for one in implementations if one.error_bound == bound)
        of = f"the largest element, for {names}" if bound else "every element"
        lines.append(f"#wrong: error above {tolerance:.3g} of {of}." if tolerance else "#wrong: any difference.")
    if any(one.error_bound for one in implementations):
        lines.append("algbw and busbw of aggregators that round are effective: dense bytes, whatever was sent.")
    return lines


def document(
    options: BandwidthOptions, cluster: Cluster, device: torch.device, rows: Sequence[TableRow]
) -> dict[str, Any]:
    """Return everything as JSON values."""
    return {
        "environment": {
            "kind": "bandwidth",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join(["commopt", *sys.argv[1:]]),
            "commopt": __version__,
            "revision": revision(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "backend": _backend(device),
            "device": _device_name(device),
            "cpu_count": os.cpu_count(),
            "world_size": dist.get_world_size(),
            "nodes": cluster.nodes,
            "nodes_declared": cluster.emulated,
            "emulated_link_rate": link_rate(),
            "iterations": options.iterations,
            "warm_up_iterations": options.warm_up_iterations,
        },
        "rows": [asdict(row) for row in rows],
        "out_of_bounds_values": sum(row.wrong for row in rows) if options.check else None,
        "average_busbw_gbps": average_busbw_gbps(rows),
    }


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device.index} {torch.cuda.get_device_name(device)}"
    return platform.machine() + " CPU"
