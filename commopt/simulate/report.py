"""What was simulated, for people and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any, TextIO

from commopt.display import show_table
from commopt.simulate.published import Reproduction
from commopt.simulate.scaling import Row
from commopt.version import __version__

FORMAT = 1
_MOST_NOTES = 6

CAPTION = (
    "Simulated, not measured. compute: of a usual rank; waiting: for the slowest; exposed: communication that nothing "
    "hides.\nMB sent: by a node to others in a step. efficiency: against one GPU, and one node with the same strategy."
)


def show(title: str, rows: Sequence[Row], stream: TextIO | None = None) -> None:
    """Print a table of all rows, and below it what their figures leave out."""
    stream = sys.stdout if stream is None else stream
    headings = ["strategy", "fastest", "nodes", "GPUs", "batch", "step ms", "compute ms", "waiting ms", "exposed ms"]
    headings += ["MB sent", "samples /s", "% of GPU", "% of node"]
    show_table(title, [headings, *map(_cells, rows)], 2, CAPTION, stream)
    notes = list(dict.fromkeys(note for row in rows for note in row.outcome.notes))
    for note in notes[:_MOST_NOTES]:
        print(f"note: {note}", file=stream)
    if len(notes) > _MOST_NOTES:
        print(f"note: {len(notes) - _MOST_NOTES} more, which -o FILE writes", file=stream)


def _cells(row: Row) -> list[str]:
    outcome = row.outcome
    times_us = (outcome.step_us, outcome.compute_us, outcome.waiting_us, outcome.exposed_us)
    return [
        row.strategy,
        "" if row.chosen == row.strategy else row.chosen,
        str(row.nodes),
        str(row.ranks),
        str(row.batch or "-"),
        *(f"{time_us / 1e3:.1f}" for time_us in times_us),
        f"{outcome.inter_bytes_per_node / 1e6:.1f}",
        f"{row.samples_per_s:.4g}" if row.batch else "-",
        f"{row.gpu_efficiency:.1%}",
        f"{row.node_efficiency:.1%}",
    ]


def show_smallest(
    batches: Mapping[str, int | None], efficiency: float, gpus: int, stream: TextIO | None = None
) -> None:
    """Print the smallest batch of each strategy."""
    stream = sys.stdout if stream is None else stream
    rows = [["strategy", "smallest batch"], *([name, str(batch or "none")] for name, batch in batches.items())]
    title = f"Samples per GPU that keep {efficiency:.0%} of one GPU's speed on {gpus} GPUs"
    show_table(title, rows, 1, "none: not with 65536 either.", stream)


def show_published(found: Sequence[Reproduction], stream: TextIO | None = None) -> None:
    """Print published figures beside simulated ones."""
    stream = sys.stdout if stream is None else stream
    headings = ["source", "assumed", "published", "simulated", "verdict"]
    rows = [[each.claim.source, each.claim.assumed, *_figures(each)] for each in found]
    caption = "Efficiency against one GPU, or (+) by how much faster. reproduced: within a tenth of what was published."
    show_table("Published figures", [headings, *rows], 2, caption, stream)
    for each in found:
        if each.claim.remark:
            print(f"{each.claim.source}: {each.claim.remark}.", file=stream)


def _figures(found: Reproduction) -> tuple[str, str, str]:
    claim, plus = found.claim, "+" if found.claim.against else ""
    low, high = claim.published
    text = f"{plus}{low:.0%}" if low == high else f"{plus}{low:.0%} to {high:.0%}" if isfinite(high) else f"> {low:.0%}"
    return text, f"{plus}{found.simulated:.0%}", found.verdict


def as_document(inputs: Mapping[str, Any], rows: Sequence[Row], batches: Mapping[str, int | None]) -> dict[str, Any]:
    """Return what a file of results holds."""
    return {
        "format": FORMAT,
        "version": __version__,
        "inputs": dict(inputs),
        "rows": [_entry(row) for row in rows],
        "smallest_batch": dict(batches),
    }


def _entry(row: Row) -> dict[str, Any]:
    entry: dict[str, Any] = asdict(row)
    outcome: dict[str, Any] = entry.pop("outcome")
    outcome["buckets"] = [
        {"nbytes": bucket.nbytes, "strategy": bucket.strategy, "parameters": len(bucket.names)}
        for bucket in row.outcome.buckets
    ]
    return entry | outcome | {"exposed_share": row.exposed_share}


def published_document(found: Sequence[Reproduction]) -> dict[str, Any]:
    """Return what a file of published figures holds."""
    rows = []
    for each in found:
        claim = asdict(each.claim)
        claim["published"] = [value if isfinite(value) else None for value in each.claim.published]
        network = claim["setup"]["network"]
        network["socket_gbps"] = network["socket_gbps"] if isfinite(network["socket_gbps"]) else None
        rows.append(claim | {"simulated": each.simulated, "verdict": each.verdict})
    return {"format": FORMAT, "version": __version__, "published": rows}
