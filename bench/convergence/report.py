"""What the convergence benchmark found: its records, their file of JSON lines, and what follows from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any

from bench.convergence.plan import STOCK
from bench.crossing import first_below
from bench.json_lines import write_lines

POINTS_ALLOWED = 0.5
PERCENT_ALLOWED = 1.0
# The loss that counts for the time to it: what stock DDP ends with, and so much more.
TARGET_PERCENT = 5.0


@dataclass(frozen=True)
class Environment:
    """Where and how the trainings were made; the first line of the file."""

    date: str
    command: str
    torch: str
    python: str
    cpu_count: int
    ranks_per_node: list[int]
    settings: dict[str, Any]
    """As plan.settings has it: what the trainings of each task have in common."""
    kind: str = "convergence"


@dataclass(frozen=True)
class Point:
    """What was known at one step; a loss of None was not finite, an accuracy of None has no meaning for the task."""

    step: int
    held_out_loss: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Run:
    """One training from start to end."""

    task: str
    optimizer: str
    strategy: str
    seed: int
    parameters: int
    step_ms: float
    """Median over steps of the slowest rank's, on local ranks."""
    inter_bytes_per_step: float | None
    """Sent by all nodes, as wire_bytes() has it, averaged over the training; None for stock DDP."""
    curve: list[Point] = field(repr=False)

    @property
    def key(self) -> tuple[str, str, str, int]:
        """As plan.Case has it."""
        return self.task, self.optimizer, self.strategy, self.seed

    @property
    def loss(self) -> float:
        """Held-out loss at the end; infinite when training diverged."""
        last = self.curve[-1].held_out_loss
        return inf if last is None else last

    def steps_to(self, loss: float) -> float | None:
        """Return after how many steps the held-out loss was down at `loss`, between two looks; None if it never was."""
        return first_below(
            ((point.step, inf if point.held_out_loss is None else point.held_out_loss) for point in self.curve), loss
        )


def write(path: Path, environment: Environment, runs: Sequence[Run]) -> None:
    """Write one JSON object per line, each naming its kind under "record"; a killed writer leaves the old file."""
    records = [{"record": "environment", **asdict(environment)}, *({"record": "run", **asdict(run)} for run in runs)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_lines(path, records)


def read(path: Path) -> tuple[Environment, list[Run]]:
    """Read what `write` wrote; raises ValueError when `path` holds something else."""
    try:
        header, *rows = (json.loads(line) for line in path.read_text().splitlines())
        if header.pop("record") != "environment" or any(row.pop("record") != "run" for row in rows):
            raise ValueError("unexpected kinds of records")
        curves = [[Point(**point) for point in row.pop("curve")] for row in rows]
        return Environment(**header), [Run(**row, curve=curve) for row, curve in zip(rows, curves, strict=True)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a file that bench.convergence --json wrote: {error}") from error


def resume(path: Path, environment: Environment) -> tuple[Environment, list[Run]]:
    """Return what `path` has, for more to be added; raises ValueError when it was made in another way."""
    if not path.exists():
        return environment, []
    saved, runs = read(path)
    for name in ("settings", "torch", "ranks_per_node"):
        then, now = getattr(saved, name), getattr(environment, name)
        if then != now:
            raise ValueError(
                f"{path} was made with {name} {then}, now it is {now}, so nothing can be added to it; "
                f"remove it or choose another file"
            )
    return saved, runs


@dataclass(frozen=True)
class Summary:
    """One strategy's trainings of one task with one optimizer, against stock DDP's."""

    task: str
    optimizer: str
    strategy: str
    seeds: int
    loss: float
    """Mean over the seeds at the end."""
    accuracy: float | None
    percent_of_loss: float
    """How much higher the loss is than stock DDP's with the same seeds."""
    points: float | None
    """How much the accuracy is above stock DDP's with the same seeds, in percentage points."""
    each: tuple[float, ...]
    """`points` seed by seed, or `percent_of_loss` where the task has no accuracy."""
    steps_to_target: float | None
    """Mean over the seeds; None when one never got there."""

    @property
    def acceptable(self) -> bool:
        """Whether it learns as well as stock DDP, to the tolerance this project promises."""
        return self.points >= -POINTS_ALLOWED if self.points is not None else self.percent_of_loss <= PERCENT_ALLOWED


def summarize(runs: Sequence[Run]) -> list[Summary]:
    """Return a summary for every task, optimizer and strategy of which stock DDP has the same seeds."""
    by_key = {run.key: run for run in runs}
    groups: dict[tuple[str, str, str], list[tuple[Run, Run]]] = {}
    for run in runs:
        stock = by_key.get((run.task, run.optimizer, STOCK, run.seed))
        if stock is not None:
            groups.setdefault((run.task, run.optimizer, run.strategy), []).append((run, stock))
    return [_summary(pairs) for pairs in groups.values()]


def seconds_to_target(summary: Summary | None, step_ms: float | None) -> float | None:
    """Return how long the steps to the loss take at `step_ms` each; None when one of them is unknown."""
    if summary is None or summary.steps_to_target is None or step_ms is None:
        return None
    return summary.steps_to_target * step_ms / 1000


def _summary(pairs: Sequence[tuple[Run, Run]]) -> Summary:
    runs, stocks = zip(*pairs, strict=True)
    loss, stock_loss = mean(run.loss for run in runs), mean(run.loss for run in stocks)
    accuracies = [run.curve[-1].accuracy for run in runs if run.curve[-1].accuracy is not None]
    stock_accuracies = [run.curve[-1].accuracy for run in stocks if run.curve[-1].accuracy is not None]
    each = [100 * (mine - stock) for mine, stock in zip(accuracies, stock_accuracies, strict=True)]
    target = stock_loss * (1 + TARGET_PERCENT / 100)
    arrivals = [run.steps_to(target) for run in runs]
    return Summary(
        task=runs[0].task,
        optimizer=runs[0].optimizer,
        strategy=runs[0].strategy,
        seeds=len(runs),
        loss=loss,
        accuracy=mean(accuracies) if accuracies else None,
        percent_of_loss=_percent(loss, stock_loss),
        points=mean(each) if each else None,
        each=tuple(each) or tuple(_percent(run.loss, stock.loss) for run, stock in pairs),
        steps_to_target=mean(arrivals) if None not in arrivals else None,
    )


def _percent(loss: float, stock_loss: float) -> float:
    return 100 * (loss / stock_loss - 1)
