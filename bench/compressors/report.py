"""What was found: the records, their file of JSON lines, and a table for each model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.compressors.contenders import CONTENDERS
from bench.compressors.measure import Measurement
from bench.json_lines import write_lines
from bench.table import print_rows

KIND = "compressors"
_WIDTH = 120  # without a terminal
_MIB = 2**20


@dataclass(frozen=True)
class Failure:
    """Why there is no measurement of a contender."""

    model: str
    contender: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """A preset beside the hook of torch that does what it does; asked, met: None where nothing was asked."""

    beside: str
    times_as_fast: float
    asked: float | None
    met: bool | None

    def __str__(self) -> str:
        found = f"{self.times_as_fast:.2f} x {self.beside.removeprefix('torch.')}"
        return found if self.asked is None else f"{found} (asked {self.asked:g}: {'met' if self.met else 'missed'})"


def compare(found: Measurement, among: Sequence[Measurement]) -> Comparison | None:
    """Return how fast a preset is beside torch's hook on the same model; None where nothing is to be compared."""
    beside = CONTENDERS.get(found.contender)
    if beside is None:
        return None
    theirs = [each for each in among if (each.model, each.contender) == (found.model, beside.hook)]
    if not theirs:
        return None
    times_as_fast = theirs[0].median_ms / found.median_ms
    asked = beside.asked if found.device == "cuda" else None
    return Comparison(beside.hook, times_as_fast, asked, None if asked is None else times_as_fast >= asked)


def write(path: Path, environment: dict[str, Any], found: Sequence[Measurement], failed: Sequence[Failure]) -> None:
    """Write one JSON object per line, each naming its kind under "record"; a killed writer leaves the old file."""
    records: list[dict[str, Any]] = [{"record": "environment", "kind": KIND, **environment}]
    for each in found:
        comparison = compare(each, found)
        records.append({"record": "step", **asdict(each), **(asdict(comparison) if comparison else {})})
    records += [{"record": "failure", **asdict(each)} for each in failed]
    write_lines(path, records)


def print_table(title: str, found: Sequence[Measurement], failed: Sequence[Failure]) -> None:
    """Print a row for each measurement of a model, and under them what could not be measured."""
    headings = ["contender", "ms", "best ms", "host ms", "peak MiB", "payload MiB", "times as fast as"]
    rows = [
        [
            each.contender,
            f"{each.median_ms:.2f}",
            f"{each.best_ms:.2f}",
            f"{each.host_ms:.2f}",
            "-" if each.peak_bytes is None else f"{each.peak_bytes / _MIB:.0f}",
            f"{each.payload_bytes / _MIB:.2f}",
            str(compare(each, found) or ""),
        ]
        for each in found
    ]
    missing = [f"{each.contender}: {each.reason}" for each in failed]
    print_rows(title, headings, rows, "\n".join(missing), _WIDTH)
