"""What was measured, for people: tables, how the network compares with its line rate, and a picture of all curves."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import cycle
from math import ceil, inf
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

import torch.distributed as dist

from commopt.cost import Curve, LinkKey, Links
from commopt.display import require_drawable, show_table
from commopt.groups import Membership, WireModel
from commopt.probe.prober import Survey, link_text, nbytes_text
from topology.machine import discover
from topology.queries import node_nic_gbps

# ---------------------------------------------------------------------------------------------- line rate

_ROOTED = ("reduce", "broadcast")
_PROBE_NBYTES = 1 << 40
_LEAST_SHARE = 0.5
_EMULATED = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_GBPS = {"k": 1e-6, "m": 1e-3, "g": 1.0, "": 1e-9}


def node_factor(key: LinkKey, nodes: tuple[int, ...]) -> float:
    """Return how many bytes the busiest node sends to others for each byte of the message, all groups together.

    nodes: ranks on each node of the cluster.
    """
    if key.level == "intra":
        return 0.0
    counts = nodes if key.level == "world" else (1,) * key.ranks
    placed = [node for node, count in enumerate(counts) for _ in range(count)]
    arguments = (_PROBE_NBYTES, 0) if key.primitive in _ROOTED else (_PROBE_NBYTES,)
    sent = [0] * len(counts)
    for rank, node in enumerate(placed):
        sent[node] += getattr(WireModel(rank, placed), key.primitive)(*arguments).inter
    return key.groups * max(sent) / _PROBE_NBYTES


def node_gbps(key: LinkKey, links: Links) -> float | None:
    """Return what a node sends into the network in a long message by the fit, in Gb/s; None where nothing leaves it."""
    factor = node_factor(key, links.header.nodes)
    beta = links.curves[key].segments[-1].beta_us_per_byte
    return factor * 8e-3 / beta if factor and beta else None


def _seen_gbps(key: LinkKey, links: Links) -> float:
    """Return what a node sent into the network in the largest message that was measured, latency and all."""
    nbytes, time_us = links.curves[key].points[-1]
    return node_factor(key, links.header.nodes) * nbytes * 8e-3 / time_us


@dataclass(frozen=True)
class LineRate:
    """The most that a node was seen to send, in Gb/s, by which curve, and what its network cards are rated at."""

    measured_gbps: float
    key: LinkKey
    nominal_gbps: float | None

    @classmethod
    def of(cls, links: Links, nominal_gbps: float | None) -> LineRate | None:
        """Return None where nothing left a node."""
        rates = {key: _seen_gbps(key, links) for key in links.curves if links.curves[key].points}
        if not any(rates.values()):
            return None
        best = max(rates, key=lambda key: rates[key])
        return cls(rates[best], best, nominal_gbps)

    @property
    def share(self) -> float | None:
        """Measured over nominal; None when the latter is unknown."""
        return self.measured_gbps / self.nominal_gbps if self.nominal_gbps else None

    @property
    def slow(self) -> bool:
        """Whether it is below half of nominal."""
        return self.share is not None and self.share < _LEAST_SHARE


def line_rate_gbps(membership: Membership, environ: Mapping[str, str] = os.environ) -> float | None:
    """Return what the slowest node's network cards carry together, None when one node's are unknown; collective."""
    everyone: list[Any] = [None] * len(membership.ranks)
    dist.all_gather_object(everyone, own_gbps(membership, environ), group=membership.parent())
    return None if None in everyone else min(everyone, default=inf)


def own_gbps(membership: Membership, environ: Mapping[str, str]) -> float | None:
    """Nodes that are blocks of ranks on one machine share a card, or have an emulated one."""
    emulated = environ.get("BENCH_CLUSTER_RATE")
    if emulated is not None:
        found = _EMULATED.fullmatch(emulated)
        return float(found[1]) * _GBPS[found[2]] if found else None
    return None if membership.cluster.emulated else node_nic_gbps(discover(environ=environ))


# ------------------------------------------------------------------------------------------------- tables

_KINDS = ("encode", "decode", "recode", "factor", "refresh", "copy")
_LEVELS = {"intra": "Inside a node", "inter": "Between the nodes", "world": "All ranks as one group"}

LINKS = "GB/s: of the message, when it is long; node Gb/s: what that makes a node send into the network; 1e9."
WORK = "GB/s of dense float32, when there is much of it."
REASONS = {
    "nccl": "NCCL opens one TCP connection to each peer (try: export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4)",
    "gloo": "gloo has one TCP connection for each pair of ranks, and its ranks copy and add on the CPU",
}


def show(survey: Survey, rate: LineRate | None, budget_s: float, stream: TextIO | None = None) -> None:
    """Print everything to `stream`, by default stdout."""
    stream = sys.stdout if stream is None else stream
    links = survey.links
    if links.curves:
        show_table("Links", _link_rows(links), 2, LINKS, stream)
    if links.work:
        show_table("Compression, on one rank", _work_rows(links), 1, WORK, stream)
    if survey.stopped:
        shortest = min(survey.stopped, key=lambda what: survey.stopped[what])
        print(
            f"--budget {budget_s:g} ended {len(survey.stopped)} of {len(links.curves) + len(links.work)} "
            f"curves below the largest size, {shortest} at {nbytes_text(survey.stopped[shortest])}. A curve is to "
            f"be trusted up to 4 times what was measured; --budget {4 * budget_s:g} takes it further.",
            file=stream,
        )
    if rate is not None:
        print(*_compared(rate, links.header.backend), sep="\n", file=stream)


def _compared(rate: LineRate, backend: str) -> list[str]:
    seen = f"{rate.measured_gbps:.3g} Gb/s out of a node ({link_text(rate.key)})"
    if rate.share is None:
        return [f"Network: {seen}; the line rate is not known here."]
    compared = f"{seen}, {rate.share:.0%} of a line rate of {rate.nominal_gbps:g} Gb/s"
    if not rate.slow:
        return [f"Network: {compared}."]
    return [
        f"WARN measured bandwidth: {compared}. Likely reasons:",
        f"  - {REASONS.get(backend, 'one connection for each pair of ranks')}",
        "  - small frames (MTU 1500), or another interface than the fast one; python -m commopt doctor looks at both",
        "  - others share the network card or the switch: probe again when they are quiet",
    ]


def _link_rows(links: Links) -> list[list[str]]:
    rows = [["level", "operation", "ranks", "groups", "alpha us", "GB/s", "node Gb/s", "R^2", "MAPE", "up to"]]
    for key in sorted(links.curves, key=lambda key: ([*_LEVELS].index(key.level), key.groups)):
        curve, gbps = links.curves[key], node_gbps(key, links)
        names = [key.level, key.primitive, str(key.ranks), str(key.groups)]
        fit = [f"{curve.r_squared:.4f}", f"{curve.mape:.1%}", nbytes_text(curve.largest_nbytes)]
        alpha = f"{curve.segments[0].alpha_us:.4g}"
        rows.append([*names, alpha, _gigabytes(curve), "-" if gbps is None else f"{gbps:.3g}", *fit])
    return rows


def _work_rows(links: Links) -> list[list[str]]:
    found = [kind for kind in _KINDS if any(key.kind == kind for key in links.work)]
    rows = [["compressor", *(f"{kind} {unit}" for kind in found for unit in ("GB/s", "MAPE"))]]
    for what in dict.fromkeys(key.what for key in links.work):
        curves = {key.kind: curve for key, curve in links.work.items() if key.what == what}
        figures: list[str] = []
        for kind in found:
            curve = curves.get(kind)
            figures += ["-", "-"] if curve is None else [_gigabytes(curve), f"{curve.mape:.1%}"]
        rows.append([what or "(none)", *figures])
    return rows


def _gigabytes(curve: Curve) -> str:
    beta = curve.segments[-1].beta_us_per_byte
    return f"{1e-3 / beta:.3g}" if beta else "-"


# ------------------------------------------------------------------------------------------------ picture

# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#6A3D9A", "#8C6D31", "#555555")
_MARKERS = "os^DvP*ph"
_REACH = 4.0  # where curves are taken for extrapolated
_STEPS = 160


def draw(links: Links, path: Path) -> None:
    """Draw points and curves into a file, a panel for each level and one for encoding. The suffix is the format.

    Raises ConfigurationError, OSError.
    """
    require_drawable(path)
    from matplotlib.figure import Figure

    panels: dict[str, list[tuple[str, str, Curve]]] = {}
    for key, curve in sorted(links.curves.items(), key=lambda item: ([*_LEVELS].index(item[0].level), item[0])):
        title = f"{_LEVELS[key.level]}: {key.ranks} ranks"
        at_once = f", {key.groups} groups at once" if key.groups > 1 else ""
        panels.setdefault(title, []).append((key.primitive, f"{key.primitive}{at_once}", curve))
    encoders = [(key.what, f"{key.what}, {_gigabytes(curve)} GB/s", curve) for key, curve in links.work.items()]
    encoders = [each for each, key in zip(encoders, links.work, strict=True) if key.kind == "encode"]
    if encoders:
        panels["Encoding float32, on one rank"] = encoders
    columns = min(len(panels), 2)
    rows = ceil(len(panels) / columns)
    figure = Figure(figsize=(6.6 * columns, 4.9 * rows + 0.9), layout="constrained", facecolor="white")
    rate = LineRate.of(links, None)
    sent = "" if rate is None else f": {rate.measured_gbps:.3g} Gb/s out of a node, once messages are long"
    figure.suptitle(f"What messages and compression cost{sent}", fontsize=14, fontweight="bold")
    drawn = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in drawn[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, curves) in zip(drawn, panels.items(), strict=False):
        _draw_panel(axes, title, curves)
    header = links.header
    counts = "+".join(map(str, header.nodes))
    where = f"{len(header.nodes)} node(s), {counts} ranks, {header.device}"
    how = f"{header.backend}, torch {header.torch}, {header.date[:10]}".removeprefix(", ")
    lines = "points: measured, the slowest rank's median; lines: fitted, dotted where extrapolated"
    figure.supxlabel(f"{lines}\n{where}, {how}", fontsize=8.5, color="#444444")
    figure.savefig(path, dpi=110)


def _draw_panel(axes: Any, title: str, curves: Iterable[tuple[str, str, Curve]]) -> None:
    """Draw curves with their names and labels; those of one name share a colour, the second of them is dashed."""
    styles: dict[str, tuple[str, str]] = {}
    free = zip(cycle(_COLOURS), cycle(_MARKERS), strict=False)
    errors = []
    for name, label, curve in curves:
        line, face = ("--", "white") if name in styles else ("-", None)
        colour, marker = styles.setdefault(name, styles[name] if name in styles else next(free))
        first, last = curve.points[0][0], curve.points[-1][0]
        axes.plot(*zip(*curve.points, strict=True), ls="", marker=marker, ms=5, color=colour, mfc=face or colour)
        for begin, end, style, shown in ((first, last, line, label), (last, last * _REACH, ":", None)):
            sizes = [begin * (end / begin) ** (step / _STEPS) for step in range(_STEPS + 1)]
            axes.plot(sizes, [curve.time_us(nbytes) for nbytes in sizes], color=colour, ls=style, lw=1.4, label=shown)
        errors.append(curve.mape)
    axes.set_title(f"{title} (mean error of the fits {fmean(errors):.1%})", loc="left", fontsize=11)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda nbytes, _: nbytes_text(nbytes))
    axes.yaxis.set_major_formatter(lambda time_us, _: _time_text(time_us))
    axes.set_xlabel("bytes")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    low, high = axes.get_ylim()
    axes.set_ylim(top=high * (high / low) ** 0.4)  # room for the names
    axes.legend(fontsize=7.5, frameon=False, loc="upper left", ncols=2)


def _time_text(time_us: float) -> str:
    for unit in ("us", "ms"):
        if time_us < 1000:
            return f"{time_us:g} {unit}"
        time_us /= 1000
    return f"{time_us:g} s"
