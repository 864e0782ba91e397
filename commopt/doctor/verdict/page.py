# SPDX-License-Identifier: Apache-2.0
"""The verdict as one page: every link beside what it should be, all causes with their commands, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

from commopt import pages
from commopt.display import significant
from commopt.doctor.verdict.facts import Measurements, Training
from commopt.doctor.verdict.judge import FINE, Verdict
from commopt.doctor.verdict.show import learns
from topology.network import rate_text

_STATUS = ("as it should be", "slower than it should be", "not measured")
_LEAST_DECADES = 1


def write_verdict(file: Path, verdict: Verdict, found: Measurements, changed: Sequence[str]) -> None:
    """Write the page. changed: what differs from an earlier measurement, as lines. Raises OSError."""
    pages.write_page(
        file,
        Path(__file__).with_name("page.html"),
        status=_STATUS[verdict.status],
        fine=verdict.status == 0,
        verdict=verdict,
        found=found,
        nodes=list(zip(found.nodes, found.ranks, strict=True)),
        links=_links(verdict),
        training=None if verdict.training is None else _training(verdict.training),
        changed=changed,
    )


def _links(verdict: Verdict) -> dict[str, Any]:
    """Return rows with bars on a logarithmic scale: links inside a node are a thousand times as fast as others."""
    rates = [each for row in verdict.rows for each in (row.gbps, row.expected_gbps) if each]
    low, high = (floor(log10(min(rates))), ceil(log10(max(rates)))) if rates else (-1, 1)
    decades = max(high - low, _LEAST_DECADES)

    def at(gbps: float | None) -> float | None:
        return None if not gbps else round(100 * (log10(gbps) - low) / decades, 2)

    rows = [
        {"row": row, "fine": row.verdict == FINE, "width": at(row.gbps), "should": at(row.expected_gbps)}
        for row in verdict.rows
    ]
    ticks = [(round(100 * place / decades, 2), rate_text(10.0 ** (low + place))) for place in range(decades + 1)]
    return {"rows": rows, "ticks": ticks}


def _training(training: Training) -> dict[str, Any]:
    """Return a step with stock DDP and with each strategy, as bars of one length of computing and the rest."""
    steps = [("stock DDP", training.step_ms, "the same")]
    steps += [(gain.strategy, gain.step_ms, learns(gain)) for gain in training.gains]
    longest = max(step_ms for _, step_ms, _ in steps)
    bars = [
        {
            "name": name,
            "ms": significant(step_ms),
            "compute": round(100 * min(training.compute_ms, step_ms) / longest, 2),
            "width": round(100 * step_ms / longest, 2),
            "saves": significant((training.step_ms - step_ms) / training.step_ms * 100, 2),
            "learns": how,
        }
        for name, step_ms, how in steps
    ]
    return {"bars": bars, "share": f"{training.exposed_share:.0%}", "facts": training}
