# SPDX-License-Identifier: Apache-2.0
"""What recording every step costs in a training: `torchrun ... -m bench.evidence.recording_cost --json out.json`.

Three models alike train in turns: two that record nothing, one that records all. The first two tell the noise apart
from the cost: off against off should be 1.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch.distributed as dist

from bench.environment import run_of
from bench.evidence.models import SUBJECTS, Subject
from bench.evidence.training_run import TrainingRun
from bench.output import print_rows
from commopt.command_line import CommandParser, output_file, whole
from examples.train_gpt import progress_bar, start_process_group

_NAMES = ("off", "off again", "on")


def measure(subject: Subject, steps: int) -> dict[str, Any]:
    """Return the median step of each, and the median over the steps of what one took relative to the other."""
    trainings = {
        name: TrainingRun("flat", subject, {"plan": "ddp", "record": name == "on"}, bucket_cap_mb=1) for name in _NAMES
    }
    taken: dict[str, list[float]] = {name: [] for name in _NAMES}
    with progress_bar() as show:
        for number in range(-5, steps):  # DDP rebuilds its buckets in the first
            show(max(0, number) / steps, f"step {number + 1} of {steps}")
            for name in _NAMES[number % 3 :] + _NAMES[: number % 3]:  # each is as often the first
                (step_s,) = trainings[name].turn(1)
                if number >= 0:
                    taken[name].append(1000 * step_s)
    ratios = {
        f"{later} / {earlier}": median(b / a for a, b in zip(taken[earlier], taken[later], strict=True))
        for earlier, later in pairwise(_NAMES)
    }
    state = trainings["on"].state
    assert state is not None  # it is no stock DDP
    buckets = state.stats()["buckets"] // (steps + 5)
    return {"buckets": buckets, "step_ms": {name: median(each) for name, each in taken.items()}, "ratios": ratios}


def main() -> None:
    """Measure; rank 0 reports."""
    parser = CommandParser(prog="python -m bench.evidence.recording_cost", description=__doc__)
    parser.add_argument("--model", choices=SUBJECTS, default="many_small")
    parser.add_argument("--batch", type=whole(1), help="default: by model")
    parser.add_argument("--steps", type=whole(1), default=200)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="append one line")
    options = parser.parse_args()
    start_process_group()
    subject = SUBJECTS[options.model]
    subject = replace(subject, batch=options.batch or subject.batch)
    found = {"model": options.model, "batch": subject.batch, **run_of("bench.evidence.recording_cost")}
    found |= measure(subject, options.steps)
    if dist.get_rank() == 0:
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(found) + "\n")
        rows = [[name, f"{step_ms:.2f}"] for name, step_ms in found["step_ms"].items()]
        rows += [[name, f"{ratio:.4f}"] for name, ratio in found["ratios"].items()]
        print_rows(f"{options.model}, {found['buckets']} messages", ["recording", "step ms"], rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
