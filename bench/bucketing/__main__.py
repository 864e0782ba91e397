"""Adaptive buckets against DDP's default and every cap one could have tried, in turns within one run.

    python -m bench.cluster --nodes 2 --ranks-per-node 1 --rate 1gbit \\
        -m bench.bucketing --model transformer --batch 16 --json out.json

Stock DDP runs with its default buckets and with bucket_cap_mb 1, 2, 5, 25 and 100; commopt's hook with DDP's buckets
and with plan="adaptive". A model whose hook sends nothing shows what a step takes without communication.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench.bucketing.contest import DEFAULT, NOTHING, Contender, Standing, names
from bench.bucketing.models import SUBJECTS
from bench.document import table
from bench.environment import run_of
from bench.table import print_rows
from commopt.command_line import Parser, content_of, output_file, whole
from examples.train_gpt import progress_bar, start_process_group


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is not a file that bench.bucketing --json wrote")
    return rows


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(prog="python -m bench.bucketing", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SUBJECTS, default="transformer")
    parser.add_argument("--batch", type=whole(1), help="sets how long backward takes (default: by model)")
    parser.add_argument("--presets", type=lambda text: text.split(","), default=["flat"], metavar="NAME[,NAME...]")
    parser.add_argument(
        "--warm-up", type=whole(0), default=30, metavar="STEPS", help="to let plans settle (default 30)"
    )
    parser.add_argument("--turns", type=whole(1), default=5, help="of every contender (default 5)")
    parser.add_argument("--steps", type=whole(1), default=8, help="in every turn (default 8)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="append one line")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw a step of the first preset with each plan, as FILE_ddp and so on",
    )
    parser.add_argument("--show", type=content_of(_rows), metavar="FILE", help="print a table of such a file instead")
    return parser.parse_args()


def main() -> None:
    """Run the contest; rank 0 reports."""
    options = parse_options()
    if options.show:
        print(markdown(options.show))
        return
    start_process_group()
    subject = SUBJECTS[options.model]
    batch = options.batch or subject.batch
    with progress_bar() as show:
        contenders = [Contender(name, subject, batch) for name in names(options.presets)]
        for number, contender in enumerate(contenders):
            show(0.5 * number / len(contenders), f"warm-up: {contender.name}")
            contender.take_turn(options.warm_up if contender.name.endswith("adaptive") else 5, counts=False)
        for turn in range(options.turns):
            show(0.5 + 0.5 * turn / options.turns, f"turn {turn + 1} of {options.turns}")
            for contender in contenders:
                contender.take_turn(options.steps)
    if options.plot:
        for contender in [each for each in contenders if each.state is not None][:2]:
            contender.draw(options.plot)
    standings = [contender.standing() for contender in contenders]
    if dist.get_rank() == 0:
        record = {
            "kind": "bucketing",
            "model": options.model,
            "batch": batch,
            **run_of("bench.bucketing"),
            **verdict(standings),
        }
        record["standings"] = [asdict(standing) for standing in standings]
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(record) + "\n")
        show_table(record, standings)
    dist.destroy_process_group()


def verdict(standings: list[Standing]) -> dict[str, Any]:
    """Return how the first adaptive contender compares."""
    steps_ms = {standing.name: standing.step_ms for standing in standings}
    adaptive = next(standing for standing in standings if standing.name.endswith("adaptive"))
    tried = {name: step_ms for name, step_ms in steps_ms.items() if name.startswith("cap ")}
    best = min(tried, key=lambda name: tried[name])
    return {
        "best_cap": best,
        "adaptive_to_best_cap": adaptive.step_ms / tried[best],
        "adaptive_to_default": adaptive.step_ms / steps_ms[DEFAULT],
        "communication_to_compute": (adaptive.communication_ms or 0.0) / steps_ms[NOTHING],
    }


def markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the contests in a file; milliseconds of a step."""
    headings = ["model, link", "no communication", "DDP's default", "best cap by trial", "adaptive"]
    rows = []
    for record in records:
        steps_ms = {standing["name"]: f"{standing['step_ms']:.0f}" for standing in record["standings"]}
        adaptive = next(steps_ms[name] for name in steps_ms if name.endswith("adaptive"))
        best = f"{steps_ms[record['best_cap']]} ({record['best_cap']})"
        shares = [f"{record[name]:.2f}" for name in ("adaptive_to_default", "adaptive_to_best_cap")]
        link = f"{record['model']}, {record['emulated_rate']}"
        rows.append([link, steps_ms[NOTHING], steps_ms[DEFAULT], best, adaptive, *shares])
    return table([*headings, "of the default", "of the best cap"], rows)


def show_table(record: dict[str, Any], standings: list[Standing]) -> None:
    """Print the contest."""

    def shown(value: float | None, digits: int = 1) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    rows = [
        [
            standing.name,
            shown(standing.step_ms),
            shown(standing.step_ms / next(s.step_ms for s in standings if s.name == DEFAULT), 3),
            "" if standing.buckets is None else str(standing.buckets),
            shown(standing.communication_ms),
            shown(standing.exposed_ms),
            shown(standing.last_exposed_ms),
            shown(standing.predicted_exposed_ms),
            shown(standing.hidden, 2),
        ]
        for standing in standings
    ]
    headings = ["", "step ms", "of default", "messages", "comm ms", "exposed ms", "last rank", "predicted", "hidden"]
    title = f"{record['model']}, batch {record['batch']}, {record['emulated_rate'] or 'no emulated link'}"
    caption = f"adaptive takes {record['adaptive_to_best_cap']:.3f} of the best cap ({record['best_cap']})"
    print_rows(title, headings, rows, caption, width=110)


if __name__ == "__main__":
    main()
