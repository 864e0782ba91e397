# SPDX-License-Identifier: Apache-2.0
"""The results of a probe for people: tables, and a comparison of the network with its line rate."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from textwrap import wrap
from typing import TextIO

from commopt.cluster.link import EmulatedLink
from commopt.cluster.network import RATE_VARIABLE
from commopt.cost import Curve, LinkKey, Links
from commopt.display import WIDTH, show_table, significant
from commopt.groups import Membership, WireModel
from commopt.probe.network import network_lines, settings
from commopt.probe.prober import Survey, link_text, nbytes_text
from topology.machine import discover
from topology.queries import node_nic_gbps

# ---------------------------------------------------------------------------------------------- line rate

_ROOTED = ("reduce", "broadcast")
_PROBE_NBYTES = 1 << 40
_LEAST_SHARE, _MOST_SHARE = 0.5, 1.05  # of a line rate: below something is slow, above the measurement is wrong
_LEAST_FIT = 0.9  # R^2


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


def node_gbps(key: LinkKey, links: Links) -> float:
    """Return the rate, in Gb/s, at which a node sent the largest message that was measured, latency included."""
    nbytes, time_us = links.curves[key].points[-1]
    return node_factor(key, links.header.nodes) * nbytes * 8e-3 / time_us


@dataclass(frozen=True)
class LineRate:
    """The highest measured rate of a node, in Gb/s, the curve that it comes from, and the rate of the network cards."""

    measured_gbps: float
    key: LinkKey
    nominal_gbps: float | None

    @classmethod
    def of(cls, links: Links, nominal_gbps: float | None) -> LineRate | None:
        """Return None where nothing left a node."""
        rates = {key: node_gbps(key, links) for key in links.curves if links.curves[key].points}
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

    @property
    def unreliable(self) -> bool:
        """Whether it is more than the network can carry."""
        return self.share is not None and self.share > _MOST_SHARE


def line_rate_gbps(membership: Membership, environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the rate of the slowest node's network cards together, None if a node's are unknown; collective."""
    answers = membership.exchange("a line rate", gbps=own_gbps(membership, environ))
    everyone = [answer["gbps"] for answer in answers]
    return None if None in everyone else min(everyone, default=inf)


def own_gbps(membership: Membership, environ: Mapping[str, str]) -> float | None:
    """Nodes that are blocks of ranks on one machine share a card, or have an emulated one."""
    if (rate := environ.get(RATE_VARIABLE)) is not None:
        link = EmulatedLink.parse(rate)
        return min((bps / 1e9 for bps in (link.send_bps, link.receive_bps) if bps is not None), default=None)
    return None if membership.cluster.emulated else node_nic_gbps(discover(environ=environ))


# ------------------------------------------------------------------------------------------------- tables

_KINDS = ("encode", "decode", "recode", "factor", "refresh", "copy", "pack", "unpack")
_LEVELS = ("intra", "inter", "world")

LINKS = (
    "GB/s: of the message, when it is long; node Gb/s: what a node sent to others in the largest one; 1e9. "
    "R^2: how well the curve fits, 1 at best."
)
WORK = "GB/s of dense float32, when there is much of it."
REASONS = {
    "nccl": "NCCL opens one TCP connection to each peer (try: export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4)",
    "gloo": "gloo has one TCP connection for each pair of ranks (try: export COMMOPT_CONNECTIONS=4), and its ranks "
    "copy and add on the CPU",
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
        _say(
            f"--budget {budget_s:g} ended {len(survey.stopped)} of {len(links.curves) + len(links.work)} "
            f"curves below the largest size, {shortest} at {nbytes_text(survey.stopped[shortest])}. A curve is to "
            f"be trusted up to 4 times what was measured; --budget {4 * budget_s:g} takes it further.",
            stream,
        )
    if badly := [
        link_text(key) for key, curve in links.curves.items() if curve.points and curve.r_squared < _LEAST_FIT
    ]:
        more = f" and {len(badly) - _MOST_NAMED} more" if len(badly) > _MOST_NAMED else ""
        _say(
            f"WARN unreliable: {len(badly)} of {len(links.curves)} curves fit badly (R^2 below {_LEAST_FIT}): "
            f"{', '.join(badly[:_MOST_NAMED])}{more}. Predictions from them are too: probe again when machine and "
            f"network are quiet, with a larger --budget.",
            stream,
        )
    if links.network is not None:
        for line in network_lines(links.network):
            _say(line, stream)
        for line in settings(links.network):  # to be pasted: never broken
            print(f"  {line}", file=stream)
    if rate is not None:
        largest = links.curves[rate.key].largest_nbytes
        for line in _compared(rate, links.header.backend, nbytes_text(largest)):
            _say(line, stream)


_MOST_NAMED = 3


def _say(text: str, stream: TextIO) -> None:
    print(*wrap(text, WIDTH, subsequent_indent="  "), sep="\n", file=stream)


def _compared(rate: LineRate, backend: str, largest: str) -> list[str]:
    seen = f"{significant(rate.measured_gbps)} Gb/s out of a node ({link_text(rate.key)})"
    if rate.share is None:
        return [f"Network: {seen}; the line rate is not known here."]
    compared = f"{seen}, {rate.share:.0%} of a line rate of {rate.nominal_gbps:g} Gb/s"
    if rate.unreliable:
        return [
            f"WARN unreliable: {compared}. More than a line carries: the largest message, {largest}, passes in one "
            f"burst. Measure larger ones: -e 256M, with a larger --budget."
        ]
    if not rate.slow:
        return [f"Network: {compared}."]
    return [
        f"WARN measured bandwidth: {compared}. Likely reasons:",
        f"  - {REASONS.get(backend, 'one connection for each pair of ranks')}",
        "  - small frames (MTU 1500), or another interface than the fast one; python -m commopt doctor looks at both",
        "  - others share the network card or the switch: probe again when they are quiet",
    ]


def _by_level(key: LinkKey) -> tuple[int, str, int]:
    """Return the order of curves: levels of sites follow "inter"."""
    return _LEVELS.index(key.level.partition(".")[0]), key.level, key.groups


def _link_rows(links: Links) -> list[list[str]]:
    rows = [["level", "operation", "ranks", "groups", "alpha us", "GB/s", "node Gb/s", "R^2", "MAPE", "up to"]]
    for key in sorted(
        links.curves, key=lambda key: (_LEVELS.index(key.level.partition(".")[0]), key.level, key.groups)
    ):
        curve, gbps = links.curves[key], node_gbps(key, links)
        names = [key.level, key.primitive, str(key.ranks), str(key.groups)]
        r_squared = f"{curve.r_squared:.3f}" if curve.r_squared > 0 else "none"
        fit = [r_squared, f"{curve.mape:.1%}", nbytes_text(curve.largest_nbytes)]
        alpha = significant(curve.segments[0].alpha_us)
        rows.append([*names, alpha, gigabytes_per_s(curve), significant(gbps) if gbps else "-", *fit])
    return rows


def _work_rows(links: Links) -> list[list[str]]:
    found = [kind for kind in _KINDS if any(key.kind == kind for key in links.work)]
    rows = [["compressor", *(f"{kind} {unit}" for kind in found for unit in ("GB/s", "MAPE"))]]
    for what in dict.fromkeys(key.what for key in links.work):
        curves = {key.kind: curve for key, curve in links.work.items() if key.what == what}
        figures: list[str] = []
        for kind in found:
            curve = curves.get(kind)
            figures += ["-", "-"] if curve is None else [gigabytes_per_s(curve), f"{curve.mape:.1%}"]
        rows.append([what or "(none)", *figures])
    return rows


def gigabytes_per_s(curve: Curve) -> str:
    """Return the rate of long messages, or of much work, as text."""
    beta = curve.segments[-1].beta_us_per_byte
    return significant(1e-3 / beta) if beta else "-"
