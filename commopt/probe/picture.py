"""The picture of a probe: measured points and fitted curves, a panel for each level and one for encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from commopt.cost import Curve, LinkKey, Links
from commopt.display import require_drawable
from commopt.probe.linerate import Network
from commopt.probe.settings import nbytes_text

# Okabe and Ito's colours, which the colour-blind can tell apart.
_STYLES = {
    "all_reduce": ("#0072B2", "o"),
    "reduce_scatter": ("#E69F00", "s"),
    "all_gather": ("#009E73", "^"),
    "all_to_all": ("#CC79A7", "D"),
    "reduce": ("#D55E00", "v"),
    "broadcast": ("#56B4E9", "P"),
}
_MORE_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#6A3D9A", "#8C6D31", "#555555")
_MARKERS = "os^DvP*ph"
_TITLES = {
    "intra": "Inside a node",
    "inter": "Between the nodes",
    "world": "All ranks as one group",
}
_REACH = 4.0  # where curves are taken for extrapolated
_STEPS = 160


def draw(links: Links, path: Path) -> None:
    """Draw every curve into a file, in the format of its suffix. Raises ConfigurationError, OSError."""
    require_drawable(path)
    from matplotlib.figure import Figure

    levels = [level for level in _TITLES if any(key.level == level for key in links.curves)]
    encoders = {key.what: curve for key, curve in links.work.items() if key.kind == "encode"}
    count = len(levels) + bool(encoders)
    columns = min(count, 2)
    rows = ceil(count / columns)
    figure = Figure(figsize=(6.6 * columns, 4.9 * rows + 0.9), layout="constrained", facecolor="white")
    figure.suptitle(_headline(links), fontsize=14, fontweight="bold")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, level in zip(panels, levels, strict=False):
        _draw_level(axes, level, {key: curve for key, curve in links.curves.items() if key.level == level})
    if encoders:
        _draw_encoders(panels[len(levels)], encoders)
    for axes in panels[count:]:
        axes.set_axis_off()
    figure.supxlabel(_foot(links), fontsize=8.5, color="#444444")
    figure.savefig(path, dpi=110)


def _headline(links: Links) -> str:
    network = Network.of(links, None)
    if network is None:
        return "What messages and compression cost" if links.curves else "What compression costs"
    return f"What messages cost: {network.measured_gbps:.3g} Gb/s out of a node, once they are long"


def _foot(links: Links) -> str:
    header = links.header
    ranks = "+".join(str(count) for count in header.nodes)
    where = f"{len(header.nodes)} node{'s' if len(header.nodes) > 1 else ''} ({ranks} ranks), {header.device}"
    how = f"{header.backend}, " if header.backend else ""
    lines = "points: measured, the slowest rank's median; lines: fitted, dotted where extrapolated"
    return f"{lines}\n{where}, {how}torch {header.torch}, {header.date[:10]}"


def _draw_level(axes: Any, level: str, curves: Mapping[LinkKey, Curve]) -> None:
    from matplotlib.lines import Line2D

    most = max(key.groups for key in curves)
    for key, curve in curves.items():
        colour, marker = _STYLES[key.primitive]
        alone = key.groups == 1
        _draw_curve(axes, curve, colour, marker, "-" if alone else "--", colour if alone else "white")
    ranks = next(iter(curves)).ranks
    _finish(axes, f"{_TITLES[level]}: {ranks} ranks", curves.values(), "bytes of the message")
    present = [name for name in _STYLES if any(key.primitive == name for key in curves)]
    handles = [Line2D([], [], color=_STYLES[name][0], marker=_STYLES[name][1], label=name) for name in present]
    if most > 1:
        handles.append(Line2D([], [], color="#444444", marker="o", label="one group at work"))
        handles.append(
            Line2D([], [], color="#444444", marker="o", ls="--", mfc="white", label=f"{most} groups at once")
        )
    axes.legend(handles=handles, fontsize=8.5, frameon=False, loc="upper left")


def _draw_encoders(axes: Any, curves: Mapping[str, Curve]) -> None:
    for (what, curve), colour, marker in zip(curves.items(), cycle(_MORE_COLOURS), cycle(_MARKERS), strict=False):
        beta = curve.segments[-1].beta_us_per_byte
        speed = f", {1e-3 / beta:.2g} GB/s" if beta else ""
        _draw_curve(axes, curve, colour, marker, "-", colour, f"{what}{speed}")
    _finish(axes, "Encoding, on one rank", curves.values(), "bytes of float32")
    low, high = axes.get_ylim()
    axes.set_ylim(top=high * (high / low) ** 0.5)  # room for the names
    axes.legend(fontsize=8, frameon=False, loc="upper left")


def _draw_curve(
    axes: Any, curve: Curve, colour: str, marker: str, style: str, face: str, label: str | None = None
) -> None:
    first, last = curve.points[0][0], curve.points[-1][0]
    axes.plot(*zip(*curve.points, strict=True), ls="", marker=marker, ms=5, color=colour, mfc=face, zorder=3)
    inside = _spread(first, last)
    axes.plot(inside, [curve.time_us(nbytes) for nbytes in inside], color=colour, ls=style, lw=1.4, label=label)
    beyond = _spread(last, last * _REACH)
    axes.plot(beyond, [curve.time_us(nbytes) for nbytes in beyond], color=colour, ls=":", lw=1.2)


def _spread(first: float, last: float) -> Sequence[float]:
    """Return sizes from the first to the last in equal factors."""
    return [first * (last / first) ** (step / _STEPS) for step in range(_STEPS + 1)]


def _finish(axes: Any, title: str, curves: Any, xlabel: str) -> None:
    error = fmean(curve.mape for curve in curves)
    axes.set_title(f"{title} (mean error of the fits {error:.1%})", loc="left", fontsize=11)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda nbytes, _: nbytes_text(nbytes))
    axes.yaxis.set_major_formatter(lambda time_us, _: _time_text(time_us))
    axes.set_xlabel(xlabel)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _time_text(time_us: float) -> str:
    for unit in ("us", "ms"):
        if time_us < 1000:
            return f"{time_us:g} {unit}"
        time_us /= 1000
    return f"{time_us:g} s"
