"""What the kernel benchmark found: its records, their file of JSON lines, and the table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from bench.kernels.asked import Verdict
from bench.table import print_rows

KIND = "kernels"
_WIDTH = 150  # without a terminal


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
    asked: tuple[Verdict, ...]

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


def print_table(title: str, records: Sequence[Record]) -> None:
    """Print a row per implementation of a kernel, and who is missing."""
    headings = ["kernel", "variant", "implementation", "MiB", "best us", "median us", "host us"]
    headings += ["GB/s", "of copy", "asked"]
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
            "; ".join(map(_told, each.asked)),
        ]
        for each in records
        if isinstance(each, Measurement)
    ]
    missing = [each for each in records if isinstance(each, Missing)]
    told = [f"{each.name}, {each.variant}, {each.implementation}: {each.why}" for each in missing]
    print_rows(title, headings, rows, "\n".join(told), width=_WIDTH)


def _told(verdict: Verdict) -> str:
    asked = f"{verdict.relation} {verdict.limit:g} {verdict.what}"
    if verdict.found is None:
        return f"{asked}: not known"
    return f"{asked}: {verdict.found:.3g}, {'met' if verdict.met else 'missed'}"
