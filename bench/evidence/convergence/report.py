# SPDX-License-Identifier: Apache-2.0
"""What the convergence benchmark found: its records, their file of JSON lines, and its tables.

python -m bench.evidence.convergence.report bench/results/convergence.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf, isfinite, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bench.command_line import print_table
from bench.document import table
from bench.environment import Header
from bench.evidence.convergence.plan import ENTRIES, FACTORS, NULL, OPTIMIZERS, STOCK
from bench.output import read_lines, write_results, written_by
from bench.training.report import first_below

PERCENT_ALLOWED = 1.0
# The loss that counts for the steps to it: what stock DDP ends with, and so much more.
TARGET_PERCENT = 5.0
OPTIMIZER_TITLES = {"sgd": "SGD", "adamw": "AdamW", "adamw_short": "AdamW, betas 0.5 and 0.95", "muon": "Muon"}
# Student's t of 0.975, by degrees of freedom; beyond the last one the normal distribution's.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half of its 95 % confidence interval: infinite for one difference."""
    count = len(differences)
    if count < 2:
        return mean(differences), inf
    return mean(differences), _T.get(count - 1, 1.96) * stdev(differences) / sqrt(count)


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
    density: float | None = None
    """The share of the elements that rounds sent, where their values decide."""
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


def add(path: Path, run: Run) -> None:
    """Add a line, in one piece: others add theirs meanwhile."""
    with path.open("ab", buffering=0) as file:
        file.write((json.dumps({"record": "run", **asdict(run)}) + "\n").encode())


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
    """One strategy's trainings of one task with one optimizer, each against stock DDP's with the same seed."""

    task: str
    optimizer: str
    strategy: str
    loss: float
    """Mean over the seeds at the end."""
    each: tuple[float, ...]
    """By how many per cent the loss is above stock DDP's, seed by seed."""
    steps_to_target: float | None
    """Mean over the seeds; None when one never got there."""
    sent: float | None
    """Bytes between the nodes, as a part of what float32 takes; None for torch's own."""
    rate: float | None
    same_bits: bool
    """Whether all its parameters end as stock DDP's."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from others."""
        return self.task, self.optimizer, self.strategy

    @property
    def percent_of_loss(self) -> float:
        """Return how much higher the loss is than stock DDP's, in the mean."""
        return mean(self.each)

    @property
    def percent_at_worst(self) -> float:
        """Return the upper end of its confidence interval; of one seed, that seed's."""
        middle, half = interval(self.each)
        return middle + half if isfinite(half) else middle

    @property
    def acceptable(self) -> bool:
        """Whether it is sure to learn as well as stock DDP, to the tolerance this project promises."""
        return self.percent_at_worst <= PERCENT_ALLOWED

    @property
    def is_worse(self) -> bool:
        """Whether it is outside of the tolerance, and sure to be worse than stock DDP."""
        middle, half = interval(self.each)
        return middle > PERCENT_ALLOWED and middle > half


def compared(environment: Environment, runs: Sequence[Run]) -> list[Summary]:
    """Return the summaries of a file, but for the trainings that try learning rates."""
    return summarize([run for run in runs if not run.task.endswith("-rates")], len(environment.ranks_per_node))


def summarize(runs: Sequence[Run], nodes: int = 2) -> list[Summary]:
    """Return a summary for every task, optimizer and strategy of which stock DDP has the same seeds."""
    by_key = {run.key: run for run in runs}
    groups: dict[tuple[str, str, str], list[tuple[Run, Run]]] = {}
    for run in runs:
        if (stock := by_key.get((run.task, run.optimizer, STOCK, run.seed))) is not None:
            groups.setdefault((run.task, run.optimizer, run.strategy), []).append((run, stock))
    return [_summary(pairs, nodes) for pairs in groups.values()]


def _summary(pairs: Sequence[tuple[Run, Run]], nodes: int) -> Summary:
    runs, stocks = zip(*pairs, strict=True)
    target = mean(run.loss for run in stocks) * (1 + TARGET_PERCENT / 100)
    arrivals = [run.steps_to(target) for run in runs]
    sent = [run.inter_bytes_per_step for run in runs if run.inter_bytes_per_step is not None]
    return Summary(
        task=runs[0].task,
        optimizer=runs[0].optimizer,
        strategy=runs[0].strategy,
        loss=mean(run.loss for run in runs),
        each=tuple(100 * (run.loss / stock.loss - 1) for run, stock in pairs),
        steps_to_target=mean(arrivals) if None not in arrivals else None,
        sent=mean(sent) / dense_bytes(runs[0].parameters, nodes) if sent else None,
        rate=runs[0].learning_rate,
        same_bits=all(run is not stock and run.digest and run.digest == stock.digest for run, stock in pairs),
    )


def dense_bytes(parameters: int, nodes: int) -> float:
    """Return what all nodes send in a step in float32, in a ring."""
    return 2 * (nodes - 1) * 4 * parameters


def rows(summaries: Sequence[Summary]) -> list[dict[str, str]]:
    """Return a row for each strategy, by heading: stock DDP, the null, then what is compared."""
    optimizers = [name for name in OPTIMIZERS if any(each.optimizer == name for each in summaries)]
    order = [entry.strategy for entry in ENTRIES]

    def place(name: str) -> tuple[int, str]:
        strategy = name.partition(", rate")[0]
        return (order.index(strategy) if strategy in order else len(order)), name

    most = max(len(each.each) for each in summaries)
    found = []
    for strategy in sorted({each.strategy for each in summaries}, key=place):
        own = {each.optimizer: each for each in summaries if each.strategy == strategy}
        row = {"strategy": f"`{strategy}`"}
        for optimizer in optimizers:
            row[OPTIMIZER_TITLES[optimizer]] = verdict(own.get(optimizer), most)
        sent = [each.sent for each in own.values() if each.sent is not None]
        row["bytes of float32's"] = f"{mean(sent):.4f}" if sent else "-"
        found.append(row)
    return found


def verdict(summary: Summary | None, most: int = 0) -> str:
    """Return how well it learned against stock DDP, with how many seeds where fewer than `most`."""
    if summary is None:
        return "-"
    if not isfinite(summary.loss):
        return "diverged !"
    if summary.strategy == STOCK:
        rate = f" at {summary.rate:g}" if summary.rate else ""
        return f"{summary.loss:.3f}{rate}"
    if summary.same_bits:
        return "the same bits"
    middle, half = interval(summary.each)
    spread = f" ±{half:.2f}" if isfinite(half) else ""
    seeds = f" (n = {len(summary.each)})" if len(summary.each) < most else ""
    return f"{round(middle, 2) + 0.0:+.2f}{spread} %{seeds}{'' if summary.acceptable else ' !'}"


def caption(environment: Environment, runs: Sequence[Run], seeds: int) -> str:
    """Say in sentences what the figures are."""
    settings = environment.settings[runs[-1].task]
    windows = f"{settings['windows']} held-out windows" if "windows" in settings else "held-out text"
    ranks = " + ".join(map(str, environment.ranks_per_node))
    sentences = [
        f"{runs[-1].parameters:,} parameters, {settings['steps']} steps, {ranks} ranks on "
        f"{len(environment.ranks_per_node)} nodes, n = {seeds} paired seeds.",
        f"`{STOCK}`: mean loss in nats per byte on {windows}, and the learning rate.",
        "Others: how much higher the loss is than stock DDP's of the same optimizer and seed, mean ± 95 % t-interval.",
        f"!: the interval's upper end is above {PERCENT_ALLOWED:g} %.",
    ]
    if any(run.strategy == NULL for run in runs):
        sentences.append(f"`{NULL}`: the same sums in another order, so that no difference below it can be seen.")
    return " ".join(sentences)


def rates(runs: Sequence[Run]) -> str:
    """Return the table of learning rates that were tried, "" where none were."""
    tried = {run.key[1:3]: run for run in runs if run.task.endswith("-rates")}
    if not tried:
        return ""
    optimizers = [name for name in OPTIMIZERS if any(optimizer == name for optimizer, _ in tried)]
    lines = []
    strategies = {strategy.partition(", rate")[0] for _, strategy in tried}
    for entry in (entry for entry in ENTRIES if entry.is_tuned and entry.strategy in strategies):
        cells = []
        for optimizer in optimizers:
            names = [replace(entry, rate=factor).name for factor in FACTORS]
            own = [tried[optimizer, name].loss for name in names if (optimizer, name) in tried]
            cells.append(", ".join(f"**{loss:.3f}**" if loss == min(own) else f"{loss:.3f}" for loss in own) or "-")
        lines.append([f"`{entry.strategy}`", *cells])
    factors = ", ".join(f"x {factor:g}" for factor in FACTORS)
    return (
        f"{table(['strategy', *(OPTIMIZER_TITLES[name] for name in optimizers)], lines)}\n\nHeld-out loss at learning "
        f"rates {factors}, one shorter training each with a seed of its own. Bold: the best. A method whose best is "
        "another than stock DDP's has a row of its own above, at so many times stock DDP's rate."
    )


def markdown(path: Path) -> str:
    """Return the tables of a file; raises ValueError when it has nothing to compare with."""
    environment, runs = read(path)
    summaries = compared(environment, runs)
    if not summaries:
        raise ValueError(f"{path} has no trainings of {STOCK}, which all are compared with")
    found = rows(summaries)
    main = table(list(found[0]), [list(row.values()) for row in found])
    told = caption(environment, runs, max(len(each.each) for each in summaries))
    return "\n\n".join(filter(None, (main, told, rates(runs))))


if __name__ == "__main__":
    print_table("bench.evidence.convergence.report", markdown, "bench.evidence.convergence --json")
