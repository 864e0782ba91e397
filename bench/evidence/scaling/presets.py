# SPDX-License-Identifier: Apache-2.0
"""Predict which preset suits which cluster: `python -m bench.evidence.scaling.presets --json FILE`, minutes.

No time is measured: as bench.evidence.scaling.predicted, for every preset by itself. Measured is which of them may be
the best with an optimizer: those that learned as stock DDP does in bench.evidence.convergence.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.document import table
from bench.evidence.convergence.report import OPTIMIZER_TITLES, Summary, compared
from bench.evidence.convergence.report import read as read_convergence
from bench.evidence.scaling.predicted import GBPS, Assumptions, assumptions, scaling
from bench.output import write_lines, written_by
from commopt.command_line import CommandParser, content_of, output_file, whole
from commopt.simulate import ScalingPoint, strategy
from commopt.simulate.scaling import FLAGGED, LOSSLESS, LOSSY, STOCK
from commopt.simulate.throughput import BATCHES

KIND = "preset_by_cluster"
MODELS = ("resnet50", "gpt2", "bert-large")
NODES = (2, 4, 8, 16)
EXACT = (STOCK, *LOSSLESS)
CANDIDATES = (
    *LOSSY,
    "hierarchical_quantized:bits=2",
    "quantized:bits=2",
    "hierarchical_dgc:density=0.05",
    *FLAGGED,
    *(f"{name}:adam=True" for name in FLAGGED),
)
# Of presets within this factor of the fastest the one that learned best is called the best.
_AS_FAST = 1.02
_LEARNED = Path("bench/results/convergence.json")
_OPTIMIZERS = ("sgd", "adamw")


@dataclass(frozen=True)
class Cell:
    """One model on one cluster; exact: the fastest exact preset."""

    model: str
    batch: int
    gbps: float
    nodes: int
    gpus: int
    compute_ms: float
    stock_ms: float
    exact: str
    exact_ms: float
    presets: list[dict[str, Any]]
    """Of each: preset, step_ms, exposed_ms; the fastest first."""
    record: str = "cell"

    def best(self, allowed: Sequence[str]) -> tuple[str, float]:
        """Return the first of `allowed` that is at most 2 % slower than the fastest of them, and its milliseconds."""
        step_ms = {each["preset"]: each["step_ms"] for each in self.presets}
        fastest_ms = min(step_ms[name] for name in allowed)
        return next((name, step_ms[name]) for name in allowed if step_ms[name] <= _AS_FAST * fastest_ms)


def cells(given: Assumptions, model: str, counts: Sequence[int] = NODES) -> Iterator[Cell]:
    """Yield a cell for each network and number of nodes."""
    strategies = [strategy(name) for name in (*EXACT, *CANDIDATES)]
    for gbps in GBPS:
        rows = scaling(model, gbps, given).weak(counts, strategies, BATCHES[model])
        for nodes in counts:
            yield _cell(model, gbps, [row for row in rows if row.nodes == nodes])


def _cell(model: str, gbps: float, rows: Sequence[ScalingPoint]) -> Cell:
    step_ms = {row.strategy: row.outcome.step_us / 1000 for row in rows}
    exposed_ms = {row.strategy: row.outcome.exposed_us / 1000 for row in rows}
    exact = min(EXACT, key=step_ms.__getitem__)
    return Cell(
        model=model,
        batch=rows[0].batch,
        gbps=gbps,
        nodes=rows[0].nodes,
        gpus=rows[0].ranks,
        compute_ms=rows[0].outcome.compute_us / 1000,
        stock_ms=step_ms[STOCK],
        exact=exact,
        exact_ms=step_ms[exact],
        presets=[
            {"preset": each, "step_ms": step_ms[each], "exposed_ms": exposed_ms[each]}
            for each in sorted(step_ms, key=step_ms.__getitem__)
        ],
    )


def allowed(learned: Sequence[Summary], optimizer: str) -> tuple[str, ...]:
    """Return the presets that learned as stock DDP does with an optimizer: exact ones, then the best first."""
    judges = {each.strategy: each for each in learned if each.optimizer == optimizer and each.acceptable}
    percent = {
        name: max(0.0, round(judges[_judge(name)].percent_of_loss, 1)) for name in CANDIDATES if _judge(name) in judges
    }
    return (*EXACT, *sorted(percent, key=percent.__getitem__))


def _judge(preset: str) -> str:
    """Return whose training judges a preset: between nodes, and where DGC sends as little as of a large model."""
    name, colon, options = preset.removeprefix("hierarchical_").partition(":")
    few = ":min_elements=1" if name == "dgc" and "density" not in options else ""
    return f"hierarchical_{name}{few}{colon}{options}"


def read(path: Path) -> tuple[Assumptions, list[Cell]]:
    """Read what `main` wrote; raises ValueError when `path` holds something else."""
    with written_by("bench.evidence.scaling.presets --json", path):
        header, *rows = (json.loads(line) for line in path.read_text().splitlines())
        if header["kind"] != KIND:
            raise ValueError(f"kind {header['kind']!r}")
        return Assumptions(**header), [Cell(**row) for row in rows]


def markdown(given: Assumptions, found: Sequence[Cell], presets: Mapping[str, Sequence[str]]) -> str:
    """Return a table with a column for each number of nodes, and what it rests on.

    presets: for each optimizer those that are allowed. It has a row for each model and network, one for each optimizer
    where their choices differ.
    """
    lines = []
    for model, gbps in dict.fromkeys((each.model, each.gbps) for each in found):
        row = [each for each in found if (each.model, each.gbps) == (model, gbps)]
        best = {OPTIMIZER_TITLES[optimizer]: [each.best(names) for each in row] for optimizer, names in presets.items()}
        if len({tuple(choices) for choices in best.values()}) == 1:
            best = {"any": next(iter(best.values()))}
        for title, choices in best.items():
            shown = [
                f"`{name}` {step_ms:.0f} ({each.stock_ms:.0f})"
                for each, (name, step_ms) in zip(row, choices, strict=True)
            ]
            lines.append([model, f"{gbps:g}", title, *shown])
    counts = dict.fromkeys(each.nodes for each in found)
    headings = ["model", "Gb/s", "optimizer", *(f"{nodes} nodes" for nodes in counts)]
    chosen = "; ".join(
        f"{OPTIMIZER_TITLES[optimizer]}: {', '.join(f'`{name}`' for name in names if name.startswith('hierarchical_'))}"
        for optimizer, names in presets.items()
    )
    told = (
        f"Milliseconds of a step; in brackets: stock DDP. Allowed, what learned best first: {chosen}; exact averages."
    )
    return f"{table(headings, lines)}\n\n{told} {given}"


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(whole(1), text.split(",")))


def main() -> None:
    """Predict, print and write."""
    parser = CommandParser(prog="python -m bench.evidence.scaling.presets", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write JSON lines: assumptions, then cells")
    parser.add_argument("--show", type=content_of(read), metavar="FILE", help="print a table of such a file instead")
    parser.add_argument(
        "--learned",
        type=content_of(read_convergence),
        default=str(_LEARNED),
        metavar="FILE",
        help=f"what bench.evidence.convergence measured ({_LEARNED})",
    )
    parser.add_argument("--gpus-per-node", type=whole(1), default=8, metavar="N", help="GPUs of a node (default 8)")
    nodes = ",".join(map(str, NODES))
    parser.add_argument(
        "--nodes", type=_counts, metavar="N,...", help=f"numbers of nodes (default {nodes}; of --show all)"
    )
    options = parser.parse_args()
    if options.show:
        given, found = options.show
        found = [each for each in found if options.nodes is None or each.nodes in options.nodes]
    else:
        counts = options.nodes or NODES
        what = f"--gpus-per-node {options.gpus_per_node} --nodes {','.join(map(str, counts))} --json FILE"
        given = assumptions(f"python -m bench.evidence.scaling.presets {what}", MODELS, KIND)
        given, found = replace(given, gpus_per_node=options.gpus_per_node), []
        for model in MODELS:
            print(f"{model}, up to {counts[-1]} nodes", file=sys.stderr)
            found += cells(given, model, counts)
    if options.json:
        write_lines(options.json, [asdict(given), *map(asdict, found)])
    learned = compared(*options.learned)
    print(markdown(given, found, {optimizer: allowed(learned, optimizer) for optimizer in _OPTIMIZERS}))


if __name__ == "__main__":
    main()
