"""The text people parse: nccl-tests' columns in its own widths, ours to their right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commopt.bandwidth.timing import Timing


@dataclass(frozen=True)
class Measurement:
    """One side of a row; GB/s = 1e9 B/s. `wrong` counts elements over all ranks, None when nothing was checked."""

    timing: Timing
    algbw_gbps: float
    busbw_gbps: float
    wrong: int | None

    @classmethod
    def of(cls, timing: Timing, nbytes: int, bus_factor: float, wrong: int | None) -> Measurement:
        """Derive the bandwidths from the mean time; `nbytes` and `bus_factor` are the collective's."""
        algbw_gbps = nbytes / (timing.mean_us * 1e3)
        return cls(timing, algbw_gbps, algbw_gbps * bus_factor, wrong)


@dataclass(frozen=True)
class Row:
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
    out_of_place: Measurement
    in_place: Measurement | None

    @property
    def measurements(self) -> tuple[Measurement, ...]:
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


def format_row(row: Row, aggregator_width: int) -> str:
    """Return one line, aligned below the heading."""
    times = (row.in_place or row.out_of_place).timing
    wire = [f"{'n/a' if nbytes is None else nbytes:>12}" for nbytes in (row.wire_intra_bytes, row.wire_inter_bytes)]
    return (
        f"{row.nbytes:>12}  {row.count:>12}  {row.type:>8}  {row.redop:>6}  {row.root:>6}"
        f"{_side(row.out_of_place)}{_side(row.in_place)}"
        f"  {row.aggregator:>{aggregator_width}}  {wire[0]}  {wire[1]}  {_us(times.p50_us):>8}  {_us(times.p99_us):>8}"
    )


def footer(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Return the closing lines; the last one is nccl-tests' average."""
    names = dict.fromkeys(row.aggregator for row in rows)
    lines = [f"# {note}" for note in notes]
    if len(names) > 1:
        averages = {name: average_busbw_gbps([row for row in rows if row.aggregator == name]) for name in names}
        words = ", ".join(f"{name} {busbw_gbps:.4g}" for name, busbw_gbps in averages.items())
        lines.append(f"# Average busbw of each: {words}")
    checked = any(row.out_of_place.wrong is not None for row in rows)
    wrong = sum(row.wrong for row in rows)
    lines.append(f"# Out of bounds values : {f'{wrong} FAILED' if wrong else '0 OK' if checked else 'N/A'}")
    lines.append(f"# Avg bus bandwidth    : {average_busbw_gbps(rows):.6g}")
    return "\n".join(lines)


def average_busbw_gbps(rows: Sequence[Row]) -> float:
    """Return the mean over rows and sides, as nccl-tests does."""
    values = [measurement.busbw_gbps for row in rows for measurement in row.measurements]
    return sum(values) / len(values) if values else 0.0


def _side(measurement: Measurement | None) -> str:
    if measurement is None:
        time, algbw, busbw, wrong = ["N/A"] * 4
    else:
        time = _us(measurement.timing.mean_us)
        algbw, busbw = f"{measurement.algbw_gbps:.2f}", f"{measurement.busbw_gbps:.2f}"
        wrong = "N/A" if measurement.wrong is None else str(measurement.wrong)
    return f"  {time:>7}  {algbw:>6}  {busbw:>6}  {wrong:>5}"


def _us(time_us: float) -> str:
    digits = 0 if time_us >= 10_000 else 1 if time_us >= 100 else 2
    return f"{time_us:.{digits}f}"
