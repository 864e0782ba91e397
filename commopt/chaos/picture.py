# SPDX-License-Identifier: Apache-2.0
"""The picture of a run, from its journals: who trained, waited, stood still, died and came back, over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from commopt.chaos.journal import Event, events_of

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = {"training": "#009E73", "waiting": "#E69F00", "stands still": "#999999", "leaves": "#D9D9D9"}
_FAULT, _ERROR = "#D55E00", "#000000"
_SILENT_S = 0.6  # without a sample, which comes ten times a second
_LEFT, _RIGHT, _TOP, _ROW, _BOTTOM, _WIDTH = 70, 60, 62, 30, 58, 830
_TICKS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)

Span = tuple[float, float, str]
"""From when until when a rank did what."""


def spans(events: Sequence[Event], until_s: float) -> list[Span]:
    """Return what a rank did, from its journal. until_s: when its process was gone."""
    left = next((event["t"] for event in events if event["event"] == "end"), until_s)
    samples = [(event["t"], event["doing"]) for event in events if event["event"] == "sample"]
    found: list[Span] = []
    for (begin, doing), (end, _) in zip(samples, [*samples[1:], (until_s, "")], strict=True):
        what = "leaves" if begin >= left else doing if end - begin < _SILENT_S else "stands still"
        if found and found[-1][2] == what:
            found[-1] = (found[-1][0], end, what)
        else:
            found.append((begin, end, what))
    return found


def draw(folder: Path, ranks: int, title: str, path: Path) -> None:
    """Write the picture of the run in a folder, as an SVG."""
    path.write_text(picture(*events_of(folder, ranks), title))


def picture(run: Sequence[Event], ranks: Sequence[Sequence[Event]], title: str) -> str:
    """Return an SVG: a row for each rank."""
    exits = {event["rank"]: event for event in run if event["event"] == "exit"}
    times = [event["t"] for each in (run, *ranks) for event in each]
    begin, end = min(times), max(times)
    faults = [event for event in run if event["event"] == "fault"]
    if faults:
        begin = max(begin, faults[0]["t"] - max(1.0, 0.15 * (end - faults[0]["t"])))
    scale = (_WIDTH - _LEFT - _RIGHT) / max(end - begin, 1e-3)
    zero = faults[0]["t"] if faults else begin

    def x(t: float) -> float:
        return float(round(_LEFT + (min(max(t, begin), end) - begin) * scale, 1))

    height = _TOP + _ROW * len(ranks) + _BOTTOM
    parts = [_text(_LEFT, 22, title, size=15, weight="bold"), *_legend()]
    for rank, events in enumerate(ranks):
        y = _TOP + _ROW * rank
        name = next((event["role"] for event in events if "role" in event), f"rank {rank}")
        parts.append(_text(_LEFT - 8, y + 15, name, anchor="end"))
        gone = exits.get(rank)
        for since, until, what in spans(events, gone["t"] if gone else end):
            if until > begin:
                parts.append(_bar(x(since), y, x(until) - x(since), COLOURS[what]))
        parts += _end(events, gone, x, y)
    bottom = _TOP + _ROW * len(ranks)
    for event in run:
        if event["event"] in ("fault", "over"):
            colour, place = (_FAULT, x(event["t"]))
            dash = ' stroke-dasharray="4 3"' if event["event"] == "over" else ""
            parts.append(f'<path d="M{place} {_TOP - 6}V{bottom}" stroke="{colour}" stroke-width="2"{dash}/>')
    if faults:
        parts.append(_text(x(zero), _TOP - 10, faults[0]["what"], colour=_FAULT))
    parts += _axis(zero, begin, end, x, bottom)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>', *parts, "</svg>", ""])


def _end(events: Sequence[Event], gone: Event | None, x: Callable[[float], float], y: int) -> list[str]:
    """Return the marks of what ended a rank: its error, the end of its process."""
    found = []
    for event in events:
        if event["event"] == "end" and event.get("error"):
            found.append(f'<path d="M{x(event["t"])} {y}v20" stroke="{_ERROR}" stroke-width="3"/>')
    if gone is not None:
        word = "stuck" if gone["stuck"] else "" if gone["status"] == 0 else "died" if gone["status"] < 0 else "error"
        place = x(gone["t"])
        if word == "died" or gone["stuck"]:
            found.append(
                f'<path d="M{place - 6} {y + 4}l12 12m0 -12l-12 12" stroke="{_FAULT}" stroke-width="3" fill="none"/>'
            )
        found.append(_text(place + 10, y + 15, word, weight="bold"))
    return found


def _legend() -> list[str]:
    parts, place = [], _LEFT + 340
    for what, colour in COLOURS.items():
        parts += [_bar(place, 12, 14, colour, 12), _text(place + 19, 22, what)]
        place += 34 + 7 * len(what)
    parts += [f'<path d="M{place} 12v12" stroke="{_ERROR}" stroke-width="3"/>', _text(place + 8, 22, "error")]
    return parts


def _axis(zero: float, begin: float, end: float, x: Callable[[float], float], y: int) -> list[str]:
    step = next((each for each in _TICKS if (end - begin) / each <= 10), 60.0)
    parts, tick = [], -int((zero - begin) / step) * step
    while zero + tick <= end:
        place = x(zero + tick)
        parts += [f'<path d="M{place} {y}v5" stroke="#555"/>', _text(place, y + 19, f"{tick:g}", anchor="middle")]
        tick += step
    return [*parts, _text(_WIDTH - _RIGHT, y + 40, "seconds since the fault", anchor="end", colour="#555555")]


def _bar(x: float, y: float, width: float, colour: str, height: int = 20) -> str:
    return f'<rect x="{x}" y="{y}" width="{max(width, 0.5):.1f}" height="{height}" fill="{colour}"/>'


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    size: int = 12,
    weight: str = "normal",
    colour: str = "#222222",
) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
