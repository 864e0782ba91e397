"""A picture of one step or a few: what every rank computes and sends when (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from commopt.display import require_drawable
from commopt.errors import ConfigurationError
from commopt.timeline.analysis import Analysis, analyse, begins_us, comparable, follows
from commopt.timeline.recordings import LOCAL, WAITING, Timeline, last_starts_us, segments
from commopt.timeline.text import numbers

# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLOURS = {LOCAL: "#E69F00", "intra": "#009E73", "inter": "#0072B2", "world": "#CC79A7"}
_LEGEND = {
    LOCAL: "local work (packing, compressing)",
    "intra": "collective inside the node",
    "inter": "collective between nodes",
    "world": "collective over all ranks",
}
_COMPUTE, _EXPOSED, _INK, _READY = "#C9CED6", "#FBE3D6", "#1f2933", "#1f2933"
_WIDTH = 13.0  # inches
_MOST_RANKS = 16
# Heights in a row that reaches from 0 (top) to 1.
_ROW_COMPUTE, _ROW_LANE = (0.08, 0.34), (0.44, 0.46)
_LABEL_POINTS = 7


def draw(timeline: Timeline, path: str | Path, step: int | None = None, steps: int = 1) -> None:
    """Draw up to `steps` steps that follow each other, from number `step` on, into a file: .svg, .png or .pdf.

    step: None takes the one whose length is most typical. Of more than 16 ranks the latest are shown.
    Raises ConfigurationError for another suffix, a step that was not recorded, and where matplotlib is missing; OSError
    where the file cannot be written.
    """
    path = Path(path)
    require_drawable(path)
    if steps < 1:
        raise ConfigurationError(f"steps={steps} leaves nothing to draw; pass 1 or more")
    from matplotlib.figure import Figure

    found = analyse(timeline)
    first = _place_of(timeline, step)
    last = first + 1
    while last < min(first + steps, len(timeline.steps)) and follows(timeline, last):
        last += 1
    chosen = range(first, last)
    shown = _shown(found)
    row_height = 0.8 if len(shown) <= 4 else 0.55
    figure = Figure(figsize=(_WIDTH, 1.9 + row_height * len(shown)), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    origin_us = min(begins_us(timeline, first))
    for row, place in enumerate(shown):
        for number in chosen:
            _row(axes, row, timeline, number, place, origin_us)
    _frame(axes, timeline, chosen, shown, origin_us)
    _labels(axes, timeline, chosen, shown, origin_us)
    axes.set_title(_headline(found), loc="left", fontsize=13, fontweight="bold", color=_INK, pad=22)
    caption = _caption(timeline, chosen, found, len(shown))
    axes.annotate(caption, (0, 1), xytext=(0, 7), xycoords="axes fraction", textcoords="offset points", color=_INK)
    _legend(figure, timeline, chosen)
    figure.savefig(path, dpi=130)


def _place_of(timeline: Timeline, step: int | None) -> int:
    if step is None:
        places = comparable(timeline)
        lengths = [_length_us(timeline, place) for place in places]
        return min(places, key=lambda place: abs(_length_us(timeline, place) - median(lengths)))
    for place, records in enumerate(timeline.steps):
        if records[0].step == step:
            return place
    recorded = numbers([records[0].step for records in timeline.steps])
    raise ConfigurationError(f"step={step} was not recorded; pass one of {recorded}, or None")


def _length_us(timeline: Timeline, place: int) -> float:
    pairs = zip(timeline.steps[place], begins_us(timeline, place), strict=True)
    return median(record.completed_us - begin_us for record, begin_us in pairs)


def _shown(found: Analysis) -> list[int]:
    """The places of the ranks to draw."""
    latest = sorted(range(len(found.ranks)), key=lambda place: -found.ranks[place].late_us)
    return sorted(latest[:_MOST_RANKS])


def _headline(found: Analysis) -> str:
    if found.stragglers:
        first, *others = found.stragglers
        more = f" and {len(others)} more" if others else ""
        return f"The ranks wait for rank {first.rank}{more}: {first.late_us / 1000:.1f} ms late"
    share = found.mean.exposed_us / found.mean.step_us if found.mean.step_us else 0.0
    return f"{100 * share:.0f} % of the step is exposed communication"


def _caption(timeline: Timeline, chosen: range, found: Analysis, ranks: int) -> str:
    numbers_shown = [timeline.steps[place][0].step for place in chosen]
    which = f"step {numbers_shown[0]}" if len(chosen) == 1 else f"steps {numbers_shown[0]} to {numbers_shown[-1]}"
    more = f"; the {ranks} latest of {len(found.ranks)} ranks" if ranks < len(found.ranks) else ""
    return (
        f"{which}; typical: step {found.mean.step_us / 1000:.1f} ms = compute {found.mean.compute_us / 1000:.1f} + "
        f"exposed {found.mean.exposed_us / 1000:.1f}{more}"
    )


def _row(axes: Any, row: int, timeline: Timeline, number: int, place: int, origin_us: float) -> None:
    step = timeline.steps[number]
    record = step[place]

    def ms(time_us: float) -> float:
        return (time_us - origin_us) / 1000

    end, completed = ms(record.compute_end_us), ms(record.completed_us)
    axes.broken_barh([(end, completed - end)], (row + 0.02, 0.96), facecolors=_EXPOSED, zorder=0)
    begin = ms(begins_us(timeline, number)[place])
    axes.broken_barh([(begin, end - begin)], (row + _ROW_COMPUTE[0], _ROW_COMPUTE[1]), facecolors=_COMPUTE, zorder=1)
    ready = [ms(bucket.ready_us) for bucket in record.buckets]
    top = row + _ROW_COMPUTE[0]
    axes.vlines(ready, top, top + _ROW_COMPUTE[1], colors=_READY, linewidth=0.9, zorder=2)
    bars: dict[str, list[tuple[float, float]]] = {}
    outlines = []
    for message, last_start_us in zip(record.messages, last_starts_us(step, timeline.nodes)[place], strict=True):
        for part in segments(message, last_start_us):
            bars.setdefault(part.stage, []).append((ms(part.begin_us), ms(part.end_us) - ms(part.begin_us)))
        outlines.append((ms(message.started_us), ms(message.finished_us) - ms(message.started_us)))
    lane = (row + _ROW_LANE[0], _ROW_LANE[1])
    for stage, spans in bars.items():
        if stage == WAITING:
            axes.broken_barh(spans, lane, facecolors="white", edgecolors="#8a94a0", hatch="//////", lw=0, zorder=1)
        else:
            axes.broken_barh(spans, lane, facecolors=_COLOURS[stage], zorder=1)
    edge = 0.8 if len(record.messages) <= 24 else 0.4
    axes.broken_barh(outlines, lane, facecolors="none", edgecolors="white", linewidth=edge, zorder=3)


def _frame(axes: Any, timeline: Timeline, chosen: range, shown: list[int], origin_us: float) -> None:
    last_us = max(record.completed_us for record in timeline.steps[chosen[-1]])
    axes.set_xlim(0, max((last_us - origin_us) / 1000 * 1.005, 1e-3))
    axes.set_ylim(len(shown), 0)
    axes.set_yticks(
        [row + 0.5 for row in range(len(shown))],
        [f"rank {timeline.ranks[place]}\nnode {timeline.nodes[place]}" for place in shown],
        fontsize=8 if len(shown) > 8 else 9,
    )
    axes.tick_params(axis="y", length=0)
    for row in range(1, len(shown)):
        other_node = timeline.nodes[shown[row]] != timeline.nodes[shown[row - 1]]
        axes.axhline(row, color="#52606d" if other_node else "#dfe3e8", linewidth=1.0 if other_node else 0.6, zorder=4)
    axes.set_xlabel("ms")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#e4e7eb", linewidth=0.6, zorder=-1)


def _labels(axes: Any, timeline: Timeline, chosen: range, shown: list[int], origin_us: float) -> None:
    """Write DDP's bucket numbers into the messages that are wide enough."""
    left, right = axes.get_xlim()
    ms_per_inch = (right - left) / (0.9 * _WIDTH)
    messages = [
        (row, message)
        for row, place in enumerate(shown)
        for number in chosen
        for message in timeline.steps[number][place].messages
    ]
    for row, message in messages:
        text = numbers(message.buckets)
        width = (message.finished_us - message.started_us) / 1000 / ms_per_inch
        if width >= (0.65 * len(text) + 0.8) * _LABEL_POINTS / 72:
            axes.text(
                ((message.started_us + message.finished_us) / 2 - origin_us) / 1000,
                row + _ROW_LANE[0] + _ROW_LANE[1] / 2,
                text,
                fontsize=_LABEL_POINTS,
                ha="center",
                va="center_baseline",
                zorder=5,
                color=_INK,
                bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            )


def _legend(figure: Any, timeline: Timeline, chosen: range) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    levels = {
        span.level
        for place in chosen
        for record in timeline.steps[place]
        for message in record.messages
        for span in message.spans
    }
    handles: list[Any] = [
        Patch(facecolor=_COMPUTE, label="computing"),
        Line2D(
            [], [], color=_READY, marker="|", linestyle="none", markersize=9, label="a bucket's gradients are ready"
        ),
        Patch(facecolor="white", edgecolor="#8a94a0", hatch="//////", lw=0, label="waiting for the last rank to start"),
        *(
            Patch(facecolor=colour, label=_LEGEND[stage])
            for stage, colour in _COLOURS.items()
            if stage == LOCAL or stage in levels
        ),
        Patch(facecolor=_EXPOSED, label="exposed: nothing left to compute"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
