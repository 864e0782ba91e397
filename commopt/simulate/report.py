# SPDX-License-Identifier: Apache-2.0
"""The results of a simulation: a table and a JSON document."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from commopt.display import WIDTH, show_table, significant
from commopt.simulate.scaling import ScalingPoint
from commopt.version import __version__

FORMAT = 1
_MOST_NOTES = 6

CAPTION = (
    "Simulated, not measured. step: a usual rank's computation, waiting for the slowest, and exposed communication, "
    "which nothing hides.\nMB sent: by a node to others in a step, in brackets in the one that sends most. "
    "% of GPU: samples per second of each GPU against one GPU by itself."
)
RACKS_CAPTION = " MB up: by a rack to others in a step."


def show(title: str, rows: Sequence[ScalingPoint]) -> None:
    """Print a table of all rows, and below it the notes on their figures."""
    headings = ["strategy", "nodes", "step ms", "waiting ms", "exposed ms", "MB sent", "MB up", "samples /s"]
    caption = CAPTION + (RACKS_CAPTION if any(row.uplink_bytes_per_rack for row in rows) else "")
    show_table(title, [[*headings, "% of GPU"], *map(_cells, rows)], 1, caption, sys.stdout)
    notes = list(dict.fromkeys(note for row in rows for note in row.outcome.notes))
    for note in notes[:_MOST_NOTES]:
        print(*wrap(f"note: {note}", WIDTH), sep="\n")
    if len(notes) > _MOST_NOTES:
        print(f"note: {len(notes) - _MOST_NOTES} more, which -o FILE writes")


def _cells(row: ScalingPoint) -> list[str]:
    outcome = row.outcome
    times_us = (outcome.step_us, outcome.waiting_us, outcome.exposed_us)
    return [
        row.strategy if row.chosen == row.strategy else f"{row.strategy}: {row.chosen}",
        str(row.nodes),
        *(f"{time_us / 1e3:.1f}" for time_us in times_us),
        _sent(outcome.inter_bytes_per_node, outcome.peak_inter_bytes_per_node),
        f"{row.uplink_bytes_per_rack / 1e6:.1f}" if row.uplink_bytes_per_rack else "",
        significant(row.samples_per_s, 4) if row.batch else "-",
        f"{row.gpu_efficiency:.1%}",
    ]


def _sent(mean: int, peak: int) -> str:
    return f"{mean / 1e6:.1f}" + (f" ({peak / 1e6:.1f})" if peak > mean else "")


def as_document(inputs: Mapping[str, Any], rows: Sequence[ScalingPoint]) -> dict[str, Any]:
    """Return the content of a file of results."""
    return {"format": FORMAT, "version": __version__, "inputs": dict(inputs), "rows": [_entry(row) for row in rows]}


def _entry(row: ScalingPoint) -> dict[str, Any]:
    entry: dict[str, Any] = asdict(row)
    outcome: dict[str, Any] = entry.pop("outcome")
    outcome["buckets"] = [{"nbytes": bucket.nbytes, "parameters": len(bucket.names)} for bucket in row.outcome.buckets]
    return entry | outcome | {"exposed_share": row.exposed_share}
