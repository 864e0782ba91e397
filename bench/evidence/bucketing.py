# SPDX-License-Identifier: Apache-2.0
"""Adaptive buckets against DDP's default and every cap one could have tried, in turns within one run.

    python -m bench.cluster --nodes 2 --ranks-per-node 1 --rate 1gbit \\
        -m bench.evidence.bucketing --model transformer --batch 16 --caps --json out.json

Stock DDP runs with its default buckets and, with --caps, with bucket_cap_mb 1, 2, 5, 25 and 100; commopt's hook with
DDP's buckets and with plan="adaptive". A model whose hook sends nothing shows a step without communication.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from bench.document import table
from bench.environment import run_of
from bench.evidence.models import SUBJECTS, Subject
from bench.evidence.training_run import NOTHING, STOCK, TrainingRun
from bench.output import print_rows
from commopt.command_line import CommandParser, content_of, output_file, whole
from examples.train_gpt import progress_bar, start_process_group

CAPS_MB = (1, 2, 5, 25, 100)
DEFAULT, ADAPTIVE = "ddp default", "adaptive"


@dataclass(frozen=True)
class Standing:
    """One participant's steps on the slowest rank; milliseconds, the median over all its turns and that of each."""

    name: str
    step_ms: float
    turns_ms: list[float]
    buckets: int | None = None
    compute_ms: float | None = None
    exposed_ms: float | None = None
    last_exposed_ms: float | None = None
    predicted_exposed_ms: float | None = None
    communication_ms: float | None = None
    hidden: float | None = None
    decisions: list[str] | None = None


def names(presets: Sequence[str], caps: bool) -> list[str]:
    """Return who takes part."""
    ours = [f"commopt {preset} {plan}" for preset in presets for plan in ("ddp", ADAPTIVE)]
    return [NOTHING, DEFAULT, *(f"cap {cap} MB" for cap in CAPS_MB if caps), *ours]


def participant(name: str, subject: Subject) -> TrainingRun:
    """Return the model of one of `names` in training; collective."""
    if name in (NOTHING, DEFAULT):
        return TrainingRun(NOTHING if name == NOTHING else STOCK, subject)
    if name.startswith("cap "):
        return TrainingRun(STOCK, subject, bucket_cap_mb=float(name.split()[1]))
    _, preset, plan = name.split()
    return TrainingRun(preset, subject, {"plan": plan, "record": True})


def standing(name: str, run: TrainingRun, turns_s: Sequence[Sequence[float]]) -> Standing:
    """Return how one did; collective."""
    own = Standing(name, 1000 * median(run.step_s), [1000 * median(turn) for turn in turns_s])
    if run.state is None:
        return own
    report = run.state.report()
    mean, predicted = report.analysis.mean, report.predicted_exposed_us
    return replace(
        own,
        buckets=len(report.analysis.messages),
        compute_ms=mean.compute_us / 1000,
        exposed_ms=mean.exposed_us / 1000,
        last_exposed_ms=report.analysis.last_exposed_us / 1000,
        predicted_exposed_ms=None if predicted is None else predicted / 1000,
        communication_ms=mean.communication_us / 1000,
        hidden=1 - mean.exposed_us / mean.communication_us,
        decisions=[decision.reason for decision in run.state.decisions],
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if not rows or not all(isinstance(row, dict) and "standings" in row for row in rows):
        raise ValueError(f"{path} is not a file that bench.evidence.bucketing --json wrote")
    return rows


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(prog="python -m bench.evidence.bucketing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=SUBJECTS, default="transformer")
    parser.add_argument("--batch", type=whole(1), help="sets how long backward takes (default: by model)")
    parser.add_argument("--presets", type=lambda text: text.split(","), default=["flat"], metavar="NAME[,NAME...]")
    parser.add_argument("--caps", action="store_true", help="stock DDP with other caps too")
    parser.add_argument("--warm-up", type=whole(0), default=34, metavar="STEPS", help="to let plans settle (34)")
    parser.add_argument("--turns", type=whole(1), default=5, help="of every participant (default 5)")
    parser.add_argument("--steps", type=whole(1), default=8, help="in every turn (default 8)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="append one line")
    parser.add_argument("--show", type=content_of(_rows), metavar="FILE", help="print a table of such a file instead")
    return parser.parse_args()


def main() -> None:
    """Train in turns; rank 0 reports."""
    options = parse_options()
    if options.show:
        print(markdown(options.show))
        return
    start_process_group()
    subject = SUBJECTS[options.model]
    subject = replace(subject, batch=options.batch or subject.batch)
    with progress_bar() as show:
        show(0.0, "warm-up")
        runs = {name: participant(name, subject) for name in names(options.presets, options.caps)}
        turns_s: dict[str, list[list[float]]] = {name: [] for name in runs}
        for name, run in runs.items():
            run.turn(options.warm_up if name.endswith(ADAPTIVE) else 5, counts=False)
        for turn in range(options.turns):
            show(0.5 + 0.5 * turn / options.turns, f"turn {turn + 1} of {options.turns}")
            for name, run in runs.items():
                turns_s[name].append(run.turn(options.steps))
    standings = [standing(name, run, turns_s[name]) for name, run in runs.items()]
    if dist.get_rank() == 0:
        record = {"kind": "bucketing", "model": options.model, "batch": subject.batch}
        record |= {**run_of("bench.evidence.bucketing"), **verdict(standings)}
        record["standings"] = [asdict(each) for each in standings]
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(record) + "\n")
        show_table(record, standings)
    dist.destroy_process_group()


def verdict(standings: Sequence[Standing]) -> dict[str, Any]:
    """Return how the first adaptive participant compares with DDP's default and the best cap."""
    steps_ms = {each.name: each.step_ms for each in standings}
    adaptive = next(each for each in standings if each.name.endswith(ADAPTIVE))
    best = min((name for name in steps_ms if name.startswith("cap ")), key=steps_ms.__getitem__, default=DEFAULT)
    return {
        "best_cap": best,
        "adaptive_to_best_cap": adaptive.step_ms / steps_ms[best],
        "adaptive_to_default": adaptive.step_ms / steps_ms[DEFAULT],
        "communication_to_compute": (adaptive.communication_ms or 0.0) / steps_ms[NOTHING],
    }


def markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the runs in a file; milliseconds of a step."""
    headings = ["model, link", "no communication", "DDP's default", "best cap by trial", ADAPTIVE]
    rows = []
    for record in records:
        steps_ms = {each["name"]: f"{each['step_ms']:.0f}" for each in record["standings"]}
        adaptive = next(steps_ms[name] for name in steps_ms if name.endswith(ADAPTIVE))
        best = f"{steps_ms[record['best_cap']]} ({record['best_cap']})"
        shares = [f"{record[name]:.2f}" for name in ("adaptive_to_default", "adaptive_to_best_cap")]
        link = f"{record['model']}, {record['emulated_rate']}"
        rows.append([link, steps_ms[NOTHING], steps_ms[DEFAULT], best, adaptive, *shares])
    return table([*headings, "of the default", "of the best cap"], rows)


def show_table(record: Mapping[str, Any], standings: Sequence[Standing]) -> None:
    """Print one run."""
    default_ms = next(each.step_ms for each in standings if each.name == DEFAULT)
    rows = [
        [each.name, f"{each.step_ms:.1f}", f"{each.step_ms / default_ms:.3f}", str(each.buckets or "")]
        for each in standings
    ]
    title = f"{record['model']}, batch {record['batch']}, {record['emulated_rate'] or 'no emulated link'}"
    caption = f"adaptive takes {record['adaptive_to_best_cap']:.3f} of the best cap ({record['best_cap']})"
    print_rows(title, ["", "step ms", "of default", "messages"], rows, caption)


if __name__ == "__main__":
    main()
