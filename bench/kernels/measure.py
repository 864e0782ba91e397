# SPDX-License-Identifier: Apache-2.0
"""Time everybody who can do a kernel's job, in turns with a device copy; the records, their file and the table."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bench.document import table
from bench.kernels.case import KERNEL, REFERENCE, Case, Figures, Implementation, Verdict
from bench.output import print_rows, written_by
from bench.timing import Clock, Timings, interleave

KIND = "kernels"


@dataclass(frozen=True)
class Measurement:
    """One implementation of one kernel; times are of one call."""

    name: str
    variant: str
    implementation: str
    nbytes: int
    """Read and written."""
    calls: int
    """Timed together in each turn: several where one takes too short."""
    best_us: float
    median_us: float
    host_us: float | None
    """Until a call returns; None where a device had to wait for the host, so that the times are those of launches."""
    gbps: float
    """Of the median."""
    copy_gbps: float
    """Of a device copy that moves as many bytes, in the same turns."""
    targets: tuple[Verdict, ...]

    @property
    def of_copy(self) -> float:
        """Its bytes per second over the copy's."""
        return self.gbps / self.copy_gbps


@dataclass(frozen=True)
class Missing:
    """An implementation that is not among the figures; `failed` where it is one of commopt's, which never should."""

    name: str
    variant: str
    implementation: str
    failed: bool
    why: str


Record: TypeAlias = Measurement | Missing


class ResultFile:
    """JSON lines, each written as soon as it is known: a run that is stopped leaves what it has."""

    def __init__(self, path: Path, environment: dict[str, Any]) -> None:
        self._path = path
        path.write_text("")
        self._add({"record": "environment", "kind": KIND, **environment})

    def add(self, record: Record) -> None:
        """Append a record."""
        if isinstance(record, Measurement):
            self._add({"record": "kernel", **asdict(record), "of_copy": record.of_copy})
        else:
            self._add({"record": "missing", **asdict(record)})

    def _add(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def markdown(path: Path, only: Container[str]) -> str:
    """Return a table of some kernels in a file: of a GPU's beside all others, of a CPU's in plain torch.

    Raises ValueError.
    """
    with written_by("bench.kernels --json", path):
        header, *rows = (json.loads(line) for line in path.read_text().splitlines())
        rows = [row for row in rows if "of_copy" in row and row["name"] in only]
        if header.get("loader") is not None:
            return _beside_others(rows)
        lines = [
            [
                row["name"],
                row["variant"],
                f"{1000 * row['best_us'] / header['numel']:.2f}",
                f"{row['gbps']:.2f}",
                f"{row['of_copy']:.2f}",
            ]
            for row in rows
            if row.get("implementation") == REFERENCE
        ]
    return table(["kernel", "variant", "ns per element", "GB/s", "of a copy"], lines)


def _beside_others(rows: Sequence[dict[str, Any]]) -> str:
    """Return a row for each kernel, with the times of everybody else who can do its job."""
    times: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        times.setdefault((row["name"], row["variant"]), {})[row["implementation"]] = row
    lines = []
    for (name, variant), by in times.items():
        if KERNEL not in by:
            continue
        kernel, reference = by[KERNEL], by.get(REFERENCE)
        others = [f"{each}: {row['median_us']:.0f}" for each, row in by.items() if each not in (KERNEL, REFERENCE)]
        plain = f"{reference['median_us']:.0f}" if reference else "-"
        lines.append(
            [name, variant, f"{kernel['median_us']:.0f}", f"{kernel['of_copy']:.2f}", plain, "; ".join(others)]
        )
    return table(["kernel", "variant", "us", "of a copy", "plain torch, us", "others, us"], lines)


def print_table(title: str, records: Sequence[Record]) -> None:
    """Print a row per implementation of a kernel, and who is missing."""
    headings = ["kernel", "variant", "implementation", "MiB", "best us", "median us", "host us"]
    headings += ["GB/s", "of copy", "targets"]
    rows = [
        [
            each.name,
            each.variant,
            each.implementation,
            f"{each.nbytes / 2**20:.1f}",
            f"{each.best_us:.1f}",
            f"{each.median_us:.1f}",
            "-" if each.host_us is None else f"{each.host_us:.1f}",
            f"{each.gbps:.2f}",
            f"{each.of_copy:.3f}",
            "; ".join(map(_told, each.targets)),
        ]
        for each in records
        if isinstance(each, Measurement)
    ]
    missing = [each for each in records if isinstance(each, Missing)]
    told = [f"{each.name}, {each.variant}, {each.implementation}: {each.why}" for each in missing]
    print_rows(title, headings, rows, "\n".join(told))


def _told(verdict: Verdict) -> str:
    target = f"{verdict.relation} {verdict.limit:g} {verdict.what}"
    if verdict.found is None:
        return f"{target}: not known"
    return f"{target}: {verdict.found:.3g}, {'met' if verdict.met else 'missed'}"


_SMALL_S = 20e-6  # below, what events take now more and now less would count
_BATCH_S = 200e-6
_MOST_CALLS = 50
_POISONS = (0xA5, 0x5A)  # no byte equals both


class DeviceCopy:
    """A copy from memory to other memory of one device."""

    def __init__(self, device: torch.device) -> None:
        self._source = self._target = torch.empty(0, device=device)

    def moving(self, nbytes: int) -> tuple[Callable[[], object], int]:
        """Return what moves `nbytes` or a little less, half of them read, half written; and how many exactly."""
        numel = max(nbytes // 8, 1)
        if numel > self._source.numel():
            self._source = torch.randn(numel, device=self._source.device)
            self._target = torch.empty_like(self._source)
        return partial(self._target[:numel].copy_, self._source[:numel]), 8 * numel


def calls_for(taken_s: float) -> int:
    """Return how many calls to time together when one takes `taken_s`."""
    if taken_s >= _SMALL_S:
        return 1
    return _MOST_CALLS if taken_s * _MOST_CALLS <= _BATCH_S else ceil(_BATCH_S / taken_s)


def measure(case: Case, copy: DeviceCopy, device: torch.device, repeats: int, clock: Clock) -> Iterator[Record]:
    """Yield a record for each implementation: what it takes, or why it cannot be measured."""
    missing = partial(Missing, case.name, case.variant)
    able = []
    for implementation in case.implementations(device):
        try:
            require_written(implementation)
        except Exception as error:  # whatever is wrong with one, the others are measured
            yield missing(implementation.name, failed=implementation.name in (KERNEL, REFERENCE), why=described(error))
        else:
            able.append(implementation)
    yield from _timed(case, able, copy, repeats, clock)


def require_written(implementation: Implementation) -> None:
    """Call a implementation twice; raises RuntimeError when it leaves a byte of what it should overwrite as it was."""
    outputs = [tensor.view(-1).view(torch.uint8) for tensor in implementation.overwritten]
    untouched = [torch.ones_like(output, dtype=torch.bool) for output in outputs]
    for poison in _POISONS:
        for output in outputs:
            output.fill_(poison)
        implementation.call()
        for output, same in zip(outputs, untouched, strict=True):
            same &= output == poison
    nbytes = sum(int(same.sum()) for same in untouched)
    if nbytes:
        raise RuntimeError(f"{nbytes} of {sum(map(Tensor.numel, outputs))} bytes were not written")


def described(error: Exception) -> str:
    """Return an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _timed(
    case: Case, implementations: list[Implementation], copy: DeviceCopy, repeats: int, clock: Clock
) -> Iterator[Measurement]:
    move, moved_nbytes = copy.moving(case.nbytes)
    operations = [move, *(implementation.call for implementation in implementations)]
    move()  # the only one that has not run yet
    calls = [calls_for(clock(operation, 1).taken_s) for operation in operations]
    copied, *taken = interleave(operations, repeats, clock, calls)
    copy_gbps = moved_nbytes / copied.median_us / 1000
    by_name = {implementation.name: turns for implementation, turns in zip(implementations, taken, strict=True)}
    for name, turns in by_name.items():
        yield _measurement(case, name, turns, copy_gbps, {each: by_name[each].median_us for each in by_name})


def _measurement(case: Case, name: str, turns: Timings, copy_gbps: float, all_us: dict[str, float]) -> Measurement:
    figures = Figures(case.nbytes, copy_gbps, turns.median_us, all_us)
    return Measurement(
        case.name,
        case.variant,
        name,
        case.nbytes,
        turns.calls,
        turns.best_us,
        turns.median_us,
        turns.host_us if turns.queued else None,
        case.nbytes / turns.median_us / 1000,
        copy_gbps,
        tuple(target.judge(figures) for target in case.targets) if name == KERNEL else (),
    )
