# SPDX-License-Identifier: Apache-2.0
"""Predict which preset suits which cluster: `python -m bench.evidence.scaling.presets --json FILE`, minutes.

Nothing is measured: as bench.evidence.scaling.predicted, for every preset by itself. What learned worse than stock DDP
where that was measured (commopt.simulate.scaling.FLAGGED) is simulated and never the best.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.document import table
from bench.evidence.scaling.predicted import BATCHES, GBPS, Assumptions, assumptions, scaling
from bench.output import write_lines, written_by
from commopt.command_line import Parser, content_of, output_file
from commopt.simulate import ScalingPoint, strategy
from commopt.simulate.scaling import FLAGGED, LOSSLESS, LOSSY, STOCK

KIND = "preset_by_cluster"
MODELS = {"resnet50": "sgd", "gpt2": "adamw", "bert-large": "adamw"}
NODES = (2, 4, 8, 16)
# By what they leave out, least first; of presets within this factor of the fastest the first is called the best.
_ALLOWED = (STOCK, *LOSSLESS, *LOSSY)
_AS_FAST = 1.02
_TITLES = {"sgd": "SGD", "adamw": "AdamW"}


@dataclass(frozen=True)
class Cell:
    """One model on one cluster.

    best: of the presets without a flag the one that leaves out least, 2 % above the fastest of them or less. exact: the
    fastest exact one.
    """

    model: str
    optimizer: str
    batch: int
    gbps: float
    nodes: int
    gpus: int
    compute_ms: float
    stock_ms: float
    best: str
    best_ms: float
    exact: str
    exact_ms: float
    presets: list[dict[str, Any]]
    """Of each: preset, step_ms, exposed_ms, flagged; the fastest first."""
    record: str = "cell"


def cells(given: Assumptions, model: str) -> Iterator[Cell]:
    """Yield a cell for each network and number of nodes."""
    strategies = [strategy(name) for name in (*_ALLOWED, *FLAGGED)]
    for gbps in GBPS:
        rows = scaling(model, gbps, given).weak(NODES, strategies, BATCHES[model])
        for nodes in NODES:
            yield _cell(model, gbps, [row for row in rows if row.nodes == nodes])


def _cell(model: str, gbps: float, rows: Sequence[ScalingPoint]) -> Cell:
    step_ms = {row.strategy: row.outcome.step_us / 1000 for row in rows}
    exposed_ms = {row.strategy: row.outcome.exposed_us / 1000 for row in rows}
    fastest_ms = min(step_ms[name] for name in _ALLOWED)
    best = next(name for name in _ALLOWED if step_ms[name] <= _AS_FAST * fastest_ms)
    exact = min((STOCK, *LOSSLESS), key=step_ms.__getitem__)
    return Cell(
        model=model,
        optimizer=MODELS[model],
        batch=rows[0].batch,
        gbps=gbps,
        nodes=rows[0].nodes,
        gpus=rows[0].ranks,
        compute_ms=rows[0].outcome.compute_us / 1000,
        stock_ms=step_ms[STOCK],
        best=best,
        best_ms=step_ms[best],
        exact=exact,
        exact_ms=step_ms[exact],
        presets=[
            {"preset": each, "step_ms": step_ms[each], "exposed_ms": exposed_ms[each], "flagged": each in FLAGGED}
            for each in sorted(step_ms, key=step_ms.__getitem__)
        ],
    )


def read(path: Path) -> tuple[Assumptions, list[Cell]]:
    """Read what `main` wrote; raises ValueError when `path` holds something else."""
    with written_by("bench.evidence.scaling.presets --json", path):
        header, *rows = (json.loads(line) for line in path.read_text().splitlines())
        if header["kind"] != KIND:
            raise ValueError(f"kind {header['kind']!r}")
        return Assumptions(**header), [Cell(**row) for row in rows]


def markdown(given: Assumptions, found: Sequence[Cell]) -> str:
    """Return a table with a row for each model and network, a column for each number of nodes, and what it rests on."""
    rows: dict[tuple[str, float], list[str]] = {}
    for each in found:
        row = rows.setdefault((f"{each.model}, {_TITLES[each.optimizer]}", each.gbps), [])
        row.append(f"`{each.best}` {each.best_ms:.0f} ({each.stock_ms:.0f})")
    headings = ["model, optimizer", "Gb/s", *(f"{nodes} nodes" for nodes in NODES)]
    lines = [[name, f"{gbps:g}", *shown] for (name, gbps), shown in rows.items()]
    return f"{table(headings, lines)}\n\nMilliseconds of a step; in brackets: stock DDP. {given}"


def main() -> None:
    """Predict, print and write."""
    parser = Parser(prog="python -m bench.evidence.scaling.presets", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write JSON lines: assumptions, then cells")
    parser.add_argument("--show", type=content_of(read), metavar="FILE", help="print a table of such a file instead")
    options = parser.parse_args()
    if options.show:
        given, found = options.show
    else:
        given, found = assumptions("python -m bench.evidence.scaling.presets --json FILE", MODELS, KIND), []
        for model in MODELS:
            print(f"{model}, up to {NODES[-1]} nodes", file=sys.stderr)
            found += cells(given, model)
    if options.json:
        write_lines(options.json, [asdict(given), *map(asdict, found)])
    print(markdown(given, found))


if __name__ == "__main__":
    main()
