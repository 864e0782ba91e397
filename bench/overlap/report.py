"""What the overlap benchmark found: its file of JSON lines, the trace, and the table."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.profiler import profile

from bench.overlap.trace import Overlap
from bench.table import print_rows

KIND = "overlap"
_WIDTH = 110  # without a terminal


def trace_of(profiler: profile) -> dict[str, Any]:
    """Return what a profiler has recorded, as a Chrome trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text())
    return trace


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    """Write a trace for ui.perfetto.dev, which reads it as it is."""
    with gzip.open(path, "wt") as file:
        json.dump(trace, file)


def write(path: Path, environment: dict[str, Any], overlaps: Sequence[Overlap]) -> None:
    """Write one JSON object per line, each naming its kind under "record": the environment, then every rank."""
    records = [{"record": "environment", "kind": KIND, **environment}]
    records += [{"record": "rank", "rank": rank, **asdict(overlap)} for rank, overlap in enumerate(overlaps)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def print_table(title: str, overlaps: Sequence[Overlap]) -> None:
    """Print a row for each rank, and below it the calls that waited."""
    headings = ["rank", "steps", "lane ms", "backward ms", "both ms", "lane kernels", "backward kernels", "waits"]
    rows = [
        [
            str(rank),
            str(overlap.steps),
            f"{overlap.lane_ms:.2f}",
            f"{overlap.backward_ms:.2f}",
            f"{overlap.both_ms:.2f}",
            str(overlap.lane_kernels),
            str(overlap.backward_kernels),
            str(sum(overlap.waits.values())),
        ]
        for rank, overlap in enumerate(overlaps)
    ]
    waits = [
        f"rank {rank}: {count} x {call}"
        for rank, overlap in enumerate(overlaps)
        for call, count in overlap.waits.items()
    ]
    print_rows(title, headings, rows, "\n".join(waits), width=_WIDTH)
