# SPDX-License-Identifier: Apache-2.0
"""A report as one self-contained HTML page with SVG pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10
from pathlib import Path
from typing import Any

from commopt import pages
from commopt.recording import StepRecord
from commopt.timeline.advice import advice
from commopt.timeline.analysis import begins_us, typical_step
from commopt.timeline.recordings import Timeline, last_starts_us, stage_intervals
from commopt.timeline.text import Report, head, latest_ranks, messages, numbers, ranks, words

_MOST_RANKS = 32  # in the picture
_MOST_TICKS = 8


@dataclass(frozen=True)
class _Scale:
    """Converts times to per cent of a picture's width."""

    begin_us: float
    length_us: float

    def at(self, time_us: float) -> float:
        """Return the position of a time."""
        return round((time_us - self.begin_us) / self.length_us * 100, 3)

    def bar(self, kind: str, begin_us: float, end_us: float, label: str) -> dict[str, Any]:
        """Return the bar of a time interval."""
        begin, end = self.at(begin_us), self.at(end_us)
        times = " to ".join(f"{(time_us - self.begin_us) / 1000:.2f}" for time_us in (begin_us, end_us))
        return {"kind": kind, "x": begin, "width": round(end - begin, 3), "title": f"{label}, {times} ms"}

    def ticks(self) -> list[tuple[float, str]]:
        """Return positions and labels of round milliseconds."""
        least_us = self.length_us / _MOST_TICKS
        power = 10.0 ** floor(log10(least_us))
        each_us = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least_us)
        times_us = [number * each_us for number in range(_MOST_TICKS + 1) if number * each_us < 0.97 * self.length_us]
        return [(self.at(self.begin_us + time_us), f"{time_us / 1000:g}") for time_us in times_us]


def write_page(
    file: Path,
    timeline: Timeline,
    report: Report,
    explanation: str,
    decisions: Sequence[str],
    verdict: Sequence[str] = (),
) -> None:
    """Write the page of a timeline and its report.

    Raises OSError.

    explanation: description of the strategy in use.
    decisions: descriptions of the decisions about it.
    verdict: its lines, once training has ended.
    """
    pages.write_page(
        file,
        Path(__file__).with_name("page.html"),
        mean=report.analysis.mean,
        verdict=verdict,
        head=head(report),
        advice=advice(timeline, report),
        step=_typical_step(timeline, report),
        messages=_messages(report),
        tables=[ranks(report, len(timeline.ranks)), messages(report)],
        explanation=explanation,
        decisions=decisions,
        words=words(report),
    )


def _typical_step(timeline: Timeline, report: Report) -> dict[str, Any]:
    place = typical_step(timeline)
    step, begins = timeline.steps[place], begins_us(timeline, place)
    scale = _Scale(min(begins), max(record.completed_us for record in step) - min(begins))
    last_starts, shown = last_starts_us(step, timeline.nodes), {rank.rank for rank in latest_ranks(report, _MOST_RANKS)}
    rows = [
        {"rank": rank, "node": node, **_row(scale, record, begin_us, starts)}
        for rank, node, record, begin_us, starts in zip(
            timeline.ranks, timeline.nodes, step, begins, last_starts, strict=True
        )
        if rank in shown
    ]
    kinds = {bar["kind"] for row in rows for bar in row["above"] + row["below"]}
    left_out = len(timeline.ranks) - len(rows)
    return {"number": step[0].step, "rows": rows, "ticks": scale.ticks(), "kinds": kinds, "left_out": left_out}


def _row(scale: _Scale, record: StepRecord, begin_us: float, last_starts_us: Sequence[float]) -> dict[str, Any]:
    """Return a rank's bars: its compute above, its lane below, and the times at which buckets were ready."""
    end_us, completed_us = record.compute_end_us, record.completed_us
    above = [scale.bar("compute", begin_us, end_us, "compute")]
    if completed_us > end_us:
        above.append(scale.bar("exposed", end_us, completed_us, "exposed communication"))
    below = [
        scale.bar(piece.stage, piece.begin_us, piece.end_us, f"bucket {numbers(message.buckets)}: {piece.stage}")
        for message, last_start_us in zip(record.messages, last_starts_us, strict=True)
        for piece in stage_intervals(message, last_start_us)
    ]
    return {"above": above, "below": below, "ready": [scale.at(bucket.ready_us) for bucket in record.buckets]}


def _messages(report: Report) -> dict[str, Any]:
    """Return the bars of the messages, as means over ranks, and the predicted ends."""
    found, predicted = report.analysis.messages, report.predicted_finish_us
    ends_us = (report.analysis.mean.step_us, *(each.finished_us for each in found), *(predicted or ()))
    scale, rows = _Scale(0.0, 1.02 * max(ends_us)), []
    for place, each in enumerate(found):
        start_us = each.ready_us + each.queue_us
        queue = scale.bar("queue", each.ready_us, start_us, "behind other messages")
        bars = [queue, scale.bar("lane", start_us, each.finished_us, "under way")]
        predicted_end = None if predicted is None else scale.at(predicted[place])
        rows.append({"name": numbers(each.buckets), "label": each.label, "bars": bars, "predicted": predicted_end})
    return {"rows": rows, "ticks": scale.ticks(), "compute_end": scale.at(report.analysis.mean.compute_us)}
