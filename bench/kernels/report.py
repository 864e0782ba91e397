"""What the kernel benchmark found: its records, their file of JSON lines, and the table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.table import print_rows

KIND = "kernels"
_WIDTH = 110  # without a terminal


@dataclass(frozen=True)
class Measurement:
    """One implementation of one kernel; times are of one call."""

    name: str
    variant: str
    implementation: str
    nbytes: int
    """Read and written."""
    best_us: float
    median_us: float
    gbps: float
    """Of the median."""
    of_clone: float
    """Its bytes per second over those of a clone of the gradient in the same turns, in their medians."""


def write(path: Path, environment: dict[str, Any], measurements: Sequence[Measurement]) -> None:
    """Write one JSON object per line, each naming its kind under "record"."""
    records = [{"record": "environment", "kind": KIND, **environment}]
    records += [{"record": "kernel", **asdict(measurement)} for measurement in measurements]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def print_table(title: str, measurements: Sequence[Measurement]) -> None:
    """Print a row per implementation of a kernel."""
    headings = ["kernel", "variant", "implementation", "MiB", "best us", "median us", "GB/s", "of clone's"]
    rows = [
        [
            each.name,
            each.variant,
            each.implementation,
            f"{each.nbytes / 2**20:.1f}",
            f"{each.best_us:.0f}",
            f"{each.median_us:.0f}",
            f"{each.gbps:.2f}",
            f"{each.of_clone:.3f}",
        ]
        for each in measurements
    ]
    print_rows(title, headings, rows, width=_WIDTH)
