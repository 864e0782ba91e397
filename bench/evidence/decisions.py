# SPDX-License-Identifier: Apache-2.0
"""What was measured about mechanisms that were deleted, as tables: `python -m bench.evidence.decisions TABLE FILE...`.

hook: stock DDP beside the hook with DDP's own buckets. merging: buckets that DDP makes anew beside those merged in the
hook. adaptive: adaptive buckets beside DDP's own. budget: what the tuner chose beside the fastest uniform strategy.
momentum: DGC with and without a momentum of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from bench.document import table
from bench.evidence.convergence.report import read as read_convergence
from bench.evidence.convergence.report import summarize, verdict
from bench.evidence.tuning.report import read as read_tuning
from commopt.command_line import Parser

_UNIFORM = ("plain", "as found")  # how a choice of one strategy at one strength ends in a file of the tuner


def _contests(paths: Sequence[Path]) -> list[tuple[str, dict[str, float]]]:
    """Return for each run of bench.evidence.bucketing what it is of, and the step of everybody in it, in ms."""
    found = []
    for path in paths:
        for record in map(json.loads, path.read_text().splitlines()):
            nodes = re.search(r"--ranks-per-node (\S+)", record["command"])
            ranks = nodes[1].replace(",", "+") if nodes else str(record["world_size"])
            where = f"{record['model']}, {ranks} ranks, {_link(record['emulated_rate'])}"
            found.append((where, {each["name"]: each["step_ms"] for each in record["standings"]}))
    return found


def _link(rate: str | None) -> str:
    return "link not shaped" if rate in (None, "none") else str(rate)


def hook(paths: Sequence[Path]) -> str:
    """Return a row for each run: stock DDP, the hook with DDP's buckets, and their ratio."""
    rows = [
        [
            where,
            f"{ms['ddp default']:.0f}",
            f"{ms['commopt flat ddp']:.0f}",
            _ratio(ms, "commopt flat ddp", "ddp default"),
        ]
        for where, ms in _contests(paths)
    ]
    return table(["model, cluster", "stock DDP, ms", "`flat`, DDP's buckets, ms", "of stock"], rows)


def merging(paths: Sequence[Path]) -> str:
    """Return a row for each run and preset: steps as shares of those with DDP's buckets."""
    rows = []
    for where, ms in _contests(paths):
        for name in ms:
            preset, _, plan = name.removeprefix("commopt ").rpartition(" ")
            if plan == "ddp" and f"commopt {preset} merged" in ms:
                ways = (f"commopt {preset} {way}" for way in ("adaptive", "merged"))
                rows.append([where, f"`{preset}`", f"{ms[name]:.0f}", *(_ratio(ms, way, name) for way in ways)])
    return table(["model, cluster", "preset", "DDP's buckets, ms", "made anew by DDP", "merged in the hook"], rows)


def adaptive(paths: Sequence[Path]) -> str:
    """Return a sentence over all strategies that the tuner's benchmark tried with both kinds of buckets."""
    ratios = [
        ms / each.candidates_ms[own]
        for _, configurations in read_tuning(paths)
        for each in configurations
        for name, ms in each.candidates_ms.items()
        if name.endswith(" (adaptive)") and (own := name.replace(" (adaptive)", " (ddp)")) in each.candidates_ms
    ]
    return (
        f"{len(ratios)} pairs of a strategy and a cluster: adaptive buckets take {median(ratios):.3f} of a step with "
        f"DDP's in the median, {min(ratios):.2f} to {max(ratios):.2f}; they are faster in {sum(r < 1 for r in ratios)}."
    )


def budget(paths: Sequence[Path]) -> str:
    """Return a row for each configuration: the tuner's choice beside the fastest uniform one, in the same turns."""
    rows = []
    for world, configurations in read_tuning(paths):
        for each in configurations:
            uniform = "one" if each.tuned.endswith(_UNIFORM) else "by bucket"
            best = f"`{each.best}`"
            ratio = f"{each.to_best:.2f}"
            rows.append([world.cluster, f"`{each.model}`", each.tuned, uniform, best, ratio])
    headings = ["cluster, link", "model", "`auto` chose", "strengths", "fastest uniform candidate", "chosen / fastest"]
    return table(headings, rows)


def momentum(paths: Sequence[Path]) -> str:
    """Return a row for each DGC with SGD that had a momentum of its own, and for those beside it."""
    found = {
        (each.task, each.strategy): each
        for path in paths
        for each in summarize(read_convergence(path)[1])
        if each.optimizer == "sgd"
    }
    names = [
        name
        for task, name in found
        if task == "gpt" and re.fullmatch(r"hierarchical_dgc(:min_elements=1)?(:momentum.*)?", name)
    ]
    rows = [[f"`{name}`", *(verdict(found.get((task, name))) for task in ("digits", "gpt"))] for name in sorted(names)]
    return table(["strategy", "digits, SGD: accuracy", "GPT, SGD: loss"], rows)


def _ratio(ms: dict[str, float], name: str, base: str) -> str:
    return f"{ms[name] / ms[base]:.3f}"


TABLES: dict[str, Callable[[Sequence[Path]], str]] = {
    made.__name__: made for made in (hook, merging, adaptive, budget, momentum)
}


def main() -> None:
    """Print one of the tables."""
    parser = Parser(prog="python -m bench.evidence.decisions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    options = parser.parse_args()
    try:
        print(TABLES[options.table](options.files))
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{error}")


if __name__ == "__main__":
    main()
