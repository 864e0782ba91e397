# SPDX-License-Identifier: Apache-2.0
"""Write a page with sliders, link speed and nodes, that shows what each strategy would take: docs/explorer.html.

    python -m bench.evidence.explorer docs/explorer.html

Its figures are those of bench.evidence.scaling.presets, predictions, and beside them the exposed communication that
bench.gpu.exposed measured. It loads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.evidence.scaling.presets import Cell
from bench.evidence.scaling.presets import read as read_cells
from bench.gpu.exposed import read as read_exposed
from commopt import pages
from commopt.aggregate.learning import LEARNED, LEARNED_THROUGH_SERVERS, StepsToLoss
from commopt.command_line import CommandParser, output_file
from commopt.simulate.scaling import LOSSLESS, STOCK

FILES = (Path("bench/results/preset_by_cluster.json"), Path("bench/results/preset_by_cluster_1gpu.json"))
MEASURED = Path("bench/results/gpu/exposed-10gbit.json")
OPTIMIZERS = ("adamw", "sgd")
_TEMPLATE = Path(__file__).with_name("explorer.html")
_DIGITS = 2  # of milliseconds


def steps_to_a_loss() -> dict[str, dict[str, float]]:
    """Return, by strategy and optimizer, the steps to a loss over those of exact averages; only what was measured."""
    found = {name: dict.fromkeys(OPTIMIZERS, 1.0) for name in (STOCK, *LOSSLESS)}
    return found | {name: steps for learned in LEARNED.values() for name, steps in _by_name(learned, learned.preset)}


def steps_of_many() -> dict[str, dict[str, float]]:
    """Return the same of those that are others where more than two ranks compress for each other."""
    served = LEARNED_THROUGH_SERVERS.items()
    return {name: steps for key, learned in served for name, steps in _by_name(learned, LEARNED[key].preset)}


def _by_name(learned: StepsToLoss, preset: str) -> Iterator[tuple[str, dict[str, float]]]:
    steps = {each: value for each in OPTIMIZERS if (value := learned.with_optimizer(each)) is not None}
    for name in {preset, preset.removeprefix("hierarchical_")}:
        yield name, steps


def grid(cells: Sequence[Cell], gpus_per_node: int) -> list[dict[str, Any]]:
    """Return an entry for each model, rate and number of nodes: times of the strategies whose steps are known."""
    known = steps_to_a_loss()
    return [
        {
            "model": cell.model,
            "gpus": gpus_per_node,
            "nodes": cell.nodes,
            "gbps": cell.gbps,
            "compute": round(cell.compute_ms, _DIGITS),
            "steps": {
                each["preset"]: round(each["step_ms"], _DIGITS) for each in cell.presets if each["preset"] in known
            },
        }
        for cell in cells
    ]


def measured(path: Path) -> dict[str, Any]:
    """Return what two ranks on a GPU measured: the model, the cluster and the exposed milliseconds of strategies."""
    facts, rows = read_exposed(path)
    exposed = {
        "stock" if each.strategy == "ddp" else each.strategy: round(each.exposed_ms, _DIGITS)
        for each in rows
        if each.replay is not False
    }
    return {
        "model": facts["model"],
        "gpus": facts["ranks_per_node"],
        "nodes": facts["nodes"],
        "gbps": facts["measured_gbps"],
        "device": facts["device"],
        "exposed": exposed,
    }


def write(file: Path) -> None:
    """Write the page from the files of results."""
    points: list[dict[str, Any]] = []
    headers = []
    for path in FILES:
        given, cells = read_cells(path)
        headers.append(given)
        points += grid(cells, given.gpus_per_node)
    data = {
        "points": points,
        "steps": steps_to_a_loss(),
        "many": steps_of_many(),
        "measured": measured(MEASURED),
    }
    pages.write_page(
        file,
        _TEMPLATE,
        data=json.dumps(data, separators=(",", ":"), sort_keys=True).replace("</", "<\\/"),
        models=sorted({each["model"] for each in points}),
        assumptions=str(headers[0]),
        made=", ".join(f"{each.date[:10]} at {each.revision}" for each in headers),
    )


def main() -> None:
    """Write it."""
    parser = CommandParser(prog="python -m bench.evidence.explorer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=output_file, help="docs/explorer.html")
    write(parser.parse_args().file)


if __name__ == "__main__":
    main()
