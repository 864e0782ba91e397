"""What recording every step costs in a training: `torchrun ... -m bench.recording_cost --json out.json`.

Three models alike train in turns: two that record nothing, one that records all. The first two tell the noise apart
from the cost: off against off should be 1.
"""

from __future__ import annotations

import json
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commopt
from bench.bucketing.models import SUBJECTS, Subject
from bench.environment import run_of
from bench.table import print_rows
from commopt.command_line import Parser, output_file, whole
from examples.train_gpt import progress_bar, start_process_group

_NAMES = ("off", "off again", "on")


class Trainee:
    """A model that is trained on one batch, with every bucket a message of its own."""

    def __init__(self, name: str, subject: Subject, batch: int) -> None:
        torch.manual_seed(0)
        self.inputs = subject.inputs(batch)
        self.ddp = DistributedDataParallel(subject.make(), bucket_cap_mb=1)
        self.state = commopt.attach(self.ddp, "flat", plan="ddp", record=name == "on")
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-6)

    def step_ms(self) -> float:
        """Train for a step; return how long the slowest rank took; collective."""
        dist.barrier()
        started = perf_counter()
        self.optimizer.zero_grad()
        self.ddp(self.inputs).float().square().mean().backward()
        self.optimizer.step()
        taken = torch.tensor(1000 * (perf_counter() - started), dtype=torch.float64)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return float(taken)


def measure(subject: Subject, batch: int, steps: int) -> dict[str, Any]:
    """Return the median step of each, and the median over the steps of what one took relative to the other."""
    trainees = {name: Trainee(name, subject, batch) for name in _NAMES}
    taken: dict[str, list[float]] = {name: [] for name in _NAMES}
    with progress_bar() as show:
        for number in range(-5, steps):  # DDP rebuilds its buckets in the first
            show(max(0, number) / steps, f"step {number + 1} of {steps}")
            for name in _NAMES[number % 3 :] + _NAMES[: number % 3]:  # each is as often the first
                step_ms = trainees[name].step_ms()
                if number >= 0:
                    taken[name].append(step_ms)
    ratios = {
        f"{later} / {earlier}": median(b / a for a, b in zip(taken[earlier], taken[later], strict=True))
        for earlier, later in pairwise(_NAMES)
    }
    buckets = trainees["on"].state.stats()["buckets"] // (steps + 5)
    return {"buckets": buckets, "step_ms": {name: median(each) for name, each in taken.items()}, "ratios": ratios}


def main() -> None:
    """Measure; rank 0 reports."""
    parser = Parser(prog="python -m bench.recording_cost", description=__doc__)
    parser.add_argument("--model", choices=SUBJECTS, default="many_small")
    parser.add_argument("--batch", type=whole(1), help="default: by model")
    parser.add_argument("--steps", type=whole(1), default=200)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="append one line")
    options = parser.parse_args()
    start_process_group()
    subject = SUBJECTS[options.model]
    batch = options.batch or subject.batch
    found = {"model": options.model, "batch": batch, **run_of("bench.recording_cost")}
    found |= measure(subject, batch, options.steps)
    if dist.get_rank() == 0:
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(found) + "\n")
        rows = [[name, f"{step_ms:.2f}"] for name, step_ms in found["step_ms"].items()]
        rows += [[name, f"{ratio:.4f}"] for name, ratio in found["ratios"].items()]
        print_rows(f"{options.model}, {found['buckets']} messages", ["recording", "step ms"], rows, width=60)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
