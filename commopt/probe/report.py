"""What was measured, for people: tables, and how the network compares with its line rate."""

from __future__ import annotations

import sys
from typing import TextIO

from commopt.cost import Curve, Links
from commopt.display import show_table
from commopt.probe.linerate import Network, node_gbps
from commopt.probe.settings import nbytes_text
from commopt.probe.surveyor import Survey, link_text

_KINDS = ("encode", "decode", "recode", "factor", "refresh", "copy")
_LEVELS = ("intra", "inter", "world")

LINKS = "GB/s: of the message, when it is long; node Gb/s: what that makes a node send into the network; 1e9."
WORK = "GB/s of dense float32, when there is much of it."
REASONS = {
    "nccl": "NCCL opens one TCP connection to each peer (try: export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4)",
    "gloo": "gloo has one TCP connection for each pair of ranks, and its ranks copy and add on the CPU",
}


def show(survey: Survey, network: Network | None, budget_s: float, stream: TextIO | None = None) -> None:
    """Print everything to `stream`, by default stdout."""
    stream = sys.stdout if stream is None else stream
    links = survey.links
    if links.curves:
        show_table("Links", _link_rows(links), 2, LINKS, stream)
    if links.work:
        show_table("Compression, on one rank", _work_rows(links), 1, WORK, stream)
    for line in closing(survey, network, budget_s):
        print(line, file=stream)


def closing(survey: Survey, network: Network | None, budget_s: float) -> list[str]:
    """Return what is to be said below the tables."""
    lines = []
    if survey.stopped:
        shortest = min(survey.stopped, key=lambda what: survey.stopped[what])
        lines.append(
            f"--budget {budget_s:g} ended {len(survey.stopped)} of {len(survey.links.curves) + len(survey.links.work)} "
            f"curves below the largest size, {shortest} at {nbytes_text(survey.stopped[shortest])}. A curve is to "
            f"be trusted up to 4 times what was measured; --budget {4 * budget_s:g} takes it further."
        )
    if network is not None:
        lines += _network(network, survey.links.header.backend)
    return lines


def _network(network: Network, backend: str) -> list[str]:
    seen = f"{network.measured_gbps:.3g} Gb/s out of a node ({link_text(network.key)})"
    if network.share is None:
        return [f"Network: {seen}; the line rate is not known here."]
    compared = f"{seen}, {network.share:.0%} of a line rate of {network.nominal_gbps:g} Gb/s"
    if not network.slow:
        return [f"Network: {compared}."]
    return [
        f"WARN measured bandwidth: {compared}. Likely reasons:",
        f"  - {REASONS.get(backend, 'one connection for each pair of ranks')}",
        "  - small frames (MTU 1500), or another interface than the fast one; python -m commopt doctor looks at both",
        "  - others share the network card or the switch: probe again when they are quiet",
    ]


def _link_rows(links: Links) -> list[list[str]]:
    rows = [["level", "operation", "ranks", "groups", "alpha us", "GB/s", "node Gb/s", "R^2", "MAPE", "up to"]]
    order = sorted(links.curves, key=lambda key: (_LEVELS.index(key.level), key.groups))
    for key in order:
        curve, rate = links.curves[key], node_gbps(key, links)
        names = [key.level, key.primitive, str(key.ranks), str(key.groups)]
        fit = [f"{curve.r_squared:.4f}", f"{curve.mape:.1%}", nbytes_text(curve.largest_nbytes)]
        alpha = f"{curve.segments[0].alpha_us:.4g}"
        rows.append([*names, alpha, _gigabytes(curve), "-" if rate is None else f"{rate:.3g}", *fit])
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
