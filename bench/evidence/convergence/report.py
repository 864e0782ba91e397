# SPDX-License-Identifier: Apache-2.0
"""What the convergence benchmark found: its records, their file of JSON lines, and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import inf, isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bench.command_line import print_table
from bench.document import table
from bench.environment import Header
from bench.evidence.convergence.plan import DIGITS, ENTRIES, GPT, OPTIMIZERS, RATE, SHARDED_TASKS, TASKS
from bench.output import read_lines, write_results, written_by
from bench.training.report import STOCK, Outcome, first_below
from bench.training.report import read as read_training

POINTS_ALLOWED = 0.5
PERCENT_ALLOWED = 1.0
# The loss that counts for the time to it: what stock DDP ends with, and so much more.
TARGET_PERCENT = 5.0


@dataclass(frozen=True)
class Environment(Header):
    """Where and how the trainings were made; the first line of the file."""

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
    """Sent by all nodes, as wire_bytes() has it, averaged over the training; None for torch's own."""
    curve: list[Point] = field(repr=False)
    digest: str = ""
    """Of the bits of all parameters at the end, on all ranks."""
    learning_rate: float | None = None
    """At the beginning; None where it was not recorded."""

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
    """Write JSON lines: the environment, then a line for each training."""
    write_results(path, asdict(environment), "run", map(asdict, runs))


def read(path: Path) -> tuple[Environment, list[Run]]:
    """Read what `write` wrote; raises ValueError when `path` holds something else."""
    with written_by("bench.evidence.convergence --json", path):
        header, rows = read_lines(path, "run")
        curves = [[Point(**point) for point in row.pop("curve")] for row in rows]
        return Environment(**header), [Run(**row, curve=curve) for row, curve in zip(rows, curves, strict=True)]


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
    made = [each.revision or "an unrecorded one" for each in (saved, environment)]
    return replace(saved, revision=saved.revision if made[1] in made[0] else " and ".join(made)), runs


@dataclass(frozen=True)
class Summary:
    """One strategy's trainings of one task with one optimizer, against stock's: torch's own averages."""

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
    same_bits: bool
    """Whether all its parameters end as stock's."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from others."""
        return self.task, self.optimizer, self.strategy

    @property
    def acceptable(self) -> bool:
        """Whether it learns as well as stock DDP, to the tolerance this project promises."""
        return self.points >= -POINTS_ALLOWED if self.points is not None else self.percent_of_loss <= PERCENT_ALLOWED


def summarize(runs: Sequence[Run]) -> list[Summary]:
    """Return a summary for every task, optimizer and strategy of which stock has the same seeds."""
    by_key = {run.key: run for run in runs}
    groups: dict[tuple[str, str, str], list[tuple[Run, Run]]] = {}
    for run in runs:
        known = (by_key.get((run.task, run.optimizer, name, run.seed)) for name in STOCK)
        if (stock := next(filter(None, known), None)) is not None:
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
        same_bits=all(run is not stock and run.digest and run.digest == stock.digest for run, stock in pairs),
    )


def _percent(loss: float, stock_loss: float) -> float:
    return 100 * (loss / stock_loss - 1)


_YARDSTICKS = ("hierarchical", "Hierarchical(inter=Flat())")  # what the bytes are compared with, as files name it
OPTIMIZER_TITLES = {"sgd": "SGD", "adamw": "AdamW"}


def rows(runs: Sequence[Run], outcomes: Sequence[Outcome]) -> list[dict[str, str]]:
    """Return a row for each strategy, by heading; outside of the tolerance a figure has an exclamation mark."""
    summaries = {summary.key: summary for summary in summarize(runs)}
    kinds = [
        kind
        for kind in product((*TASKS, *SHARDED_TASKS), OPTIMIZERS)
        if any(key[:2] == (kind[0].name, kind[1]) for key in summaries)
    ]
    step_ms = {outcome.strategy: outcome.step_ms for outcome in outcomes}
    shares, order = bytes_of_yardstick(runs), [entry.strategy for entry in ENTRIES]
    found = []
    known = dict.fromkeys(key[2] for key in summaries)
    for strategy in sorted(known, key=lambda name: order.index(name) if name in order else len(order)):
        row = {"strategy": f"`{strategy}`"}
        for task, optimizer in kinds:
            row[f"{task.name} {OPTIMIZER_TITLES[optimizer]}"] = verdict(summaries.get((task.name, optimizer, strategy)))
        if shares:
            row["bytes of hierarchical's"] = _number(shares.get(strategy), 3)
        if outcomes:
            row["step ms"] = _number(step_ms.get(strategy), 0)
            for optimizer in OPTIMIZERS:
                gpt = summaries.get((GPT.name, optimizer, strategy))
                row[f"s to loss, {OPTIMIZER_TITLES[optimizer]}"] = _number(
                    seconds_to_target(gpt, step_ms.get(strategy)), 1
                )
        found.append(row)
    return found


def bytes_of_yardstick(runs: Sequence[Run]) -> Mapping[str, float]:
    """Return what each strategy sends between the nodes for the GPT, as a part of what `hierarchical` sends."""
    sent: dict[str, list[float]] = {}
    for run in runs:
        if run.task == GPT.name and run.inter_bytes_per_step is not None:
            sent.setdefault(run.strategy, []).append(run.inter_bytes_per_step)
    yardstick = next((mean(sent[name]) for name in _YARDSTICKS if name in sent), None)
    return {} if yardstick is None else {strategy: mean(nbytes) / yardstick for strategy, nbytes in sent.items()}


def caption(environment: Environment, runs: Sequence[Run], outcomes: Sequence[Outcome]) -> str:
    """Say in sentences what the columns are."""
    seeds = len({run.seed for run in runs})
    spread = ", ± the standard deviation of that over the seeds" if seeds > 1 else ""
    ranks = " + ".join(map(str, environment.ranks_per_node))
    steps = ", ".join(f"{name} {task['steps']}" for name, task in environment.settings.items())
    stock = "stock DDP" if any(run.strategy == "ddp" for run in runs) else "torch's own, `hsdp` or `fsdp`"
    digits = "Digits: held-out accuracy in %; " if DIGITS.name in environment.settings else ""
    sentences = [
        f"{ranks} ranks on {len(environment.ranks_per_node)} nodes, {seeds} seed(s), steps: {steps}.",
        f"{digits}GPT: held-out loss in nats per byte; in brackets: against {stock}{spread}.",
        f"!: more than {POINTS_ALLOWED} points or {PERCENT_ALLOWED:g} % worse than {stock}.",
    ]
    if outcomes:
        sentences.append(
            "step ms: one step of the GPT on emulated nodes; s to loss: that times the steps the GPT needs to come "
            f"within {TARGET_PERCENT:g} % of the loss that stock DDP ends with."
        )
    return " ".join(sentences)


def markdown(path: Path) -> str:
    """Return the table of a file, with the times on a slow network from the file beside it; raises ValueError."""
    environment, runs = read(path)
    timed = on_link(path)
    outcomes = read_training(timed)[1] if timed.exists() else []
    found = rows(runs, outcomes)
    return f"{table(list(found[0]), [list(row.values()) for row in found])}\n\n{caption(environment, runs, outcomes)}"


def on_link(path: Path) -> Path:
    """Return where the times on a slow network that belong to a file are."""
    return path.with_stem(f"{path.stem}_{RATE}")


def verdict(summary: Summary | None) -> str:
    """Return how well it learned, and how that compares with stock DDP."""
    if summary is None:
        return "-"
    if not isfinite(summary.loss):
        return "diverged !"
    if summary.same_bits:
        return f"{summary.loss:.3f} (the same bits)"
    mark = "" if summary.acceptable else " !"
    spread = f" ±{stdev(summary.each):.1f}" if len(summary.each) > 1 else ""
    if summary.accuracy is not None and summary.points is not None:
        return f"{100 * summary.accuracy:.1f} ({summary.points:+.1f}{spread}){mark}"
    return f"{summary.loss:.3f} ({summary.percent_of_loss:+.1f}{spread} %){mark}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    print_table("bench.evidence.convergence.report", markdown, "bench.evidence.convergence --json")
