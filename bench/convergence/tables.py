"""The convergence benchmark's results as a table, on the terminal and in a Markdown document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import mean, stdev

from bench.convergence.plan import CONTENDERS, GPT, OPTIMIZERS, TASKS
from bench.convergence.report import (
    PERCENT_ALLOWED,
    POINTS_ALLOWED,
    TARGET_PERCENT,
    Environment,
    Run,
    Summary,
    seconds_to_target,
    summarize,
)
from bench.document import table, write_between
from bench.table import print_rows
from bench.training.report import Outcome

_YARDSTICK = "hierarchical"
BEGIN, END = "<!-- results: written by bench.convergence -->", "<!-- end of results -->"
_TITLES = {"sgd": "SGD", "adamw": "AdamW"}
_WIDTH = 190


def headings() -> list[str]:
    """Return the headings of `rows`."""
    learned = [f"{task.name} {_TITLES[optimizer]}" for task in TASKS for optimizer in OPTIMIZERS]
    to_target = [f"s to loss, {_TITLES[optimizer]}" for optimizer in OPTIMIZERS]
    return ["strategy", *learned, f"bytes of {_YARDSTICK}'s", "step ms", *to_target]


def rows(runs: Sequence[Run], outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return a row per strategy; outside of the tolerance a figure has an exclamation mark."""
    summaries = {(summary.task, summary.optimizer, summary.strategy): summary for summary in summarize(runs)}
    step_ms = {outcome.strategy: outcome.step_ms for outcome in outcomes}
    shares = bytes_of_yardstick(runs)
    found = []
    for strategy in (contender.strategy for contender in CONTENDERS):
        learned = [summaries.get((task.name, optimizer, strategy)) for task in TASKS for optimizer in OPTIMIZERS]
        if not any(learned):
            continue
        gpt = [summaries.get((GPT.name, optimizer, strategy)) for optimizer in OPTIMIZERS]
        found.append(
            [
                strategy,
                *map(verdict, learned),
                _number(shares.get(strategy), 3),
                _number(step_ms.get(strategy), 0),
                *(_number(seconds_to_target(summary, step_ms.get(strategy)), 1) for summary in gpt),
            ]
        )
    return found


def bytes_of_yardstick(runs: Sequence[Run]) -> Mapping[str, float]:
    """Return what each strategy sends between the nodes for the GPT, as a part of what `hierarchical` sends."""
    sent: dict[str, list[float]] = {}
    for run in runs:
        if run.task == GPT.name and run.inter_bytes_per_step is not None:
            sent.setdefault(run.strategy, []).append(run.inter_bytes_per_step)
    if _YARDSTICK not in sent:
        return {}
    return {strategy: mean(nbytes) / mean(sent[_YARDSTICK]) for strategy, nbytes in sent.items()}


def caption(environment: Environment, runs: Sequence[Run], outcomes: Sequence[Outcome]) -> str:
    """Say in sentences what the columns are."""
    seeds = len({run.seed for run in runs})
    spread = ", ± the standard deviation of that over the seeds" if seeds > 1 else ""
    ranks = " + ".join(map(str, environment.ranks_per_node))
    steps = ", ".join(f"{name} {task['steps']}" for name, task in environment.settings.items())
    sentences = [
        f"{ranks} ranks on {len(environment.ranks_per_node)} nodes, {seeds} seed(s), steps: {steps}.",
        f"Digits: held-out accuracy in %; GPT: held-out loss in nats per byte; in brackets: against stock DDP{spread}.",
        f"!: more than {POINTS_ALLOWED} points or {PERCENT_ALLOWED:g} % worse than stock DDP.",
    ]
    if outcomes:
        sentences.append(
            "step ms: one step of the GPT on emulated nodes; s to loss: that times the steps the GPT needs to come "
            f"within {TARGET_PERCENT:g} % of the loss that stock DDP ends with."
        )
    return " ".join(sentences)


def print_table(environment: Environment, runs: Sequence[Run], outcomes: Sequence[Outcome]) -> None:
    """Print everything to stdout."""
    print_rows(
        "Does it still learn?", headings(), rows(runs, outcomes), caption(environment, runs, outcomes), width=_WIDTH
    )


def fill_in(document: Path, environment: Environment, runs: Sequence[Run], outcomes: Sequence[Outcome]) -> None:
    """Replace what is between the two marks in a Markdown file; raises ValueError when there are none."""
    named = [[f"`{row[0]}`", *row[1:]] for row in rows(runs, outcomes)]
    write_between(document, BEGIN, END, f"{table(headings(), named)}\n\n{caption(environment, runs, outcomes)}")


def verdict(summary: Summary | None) -> str:
    """Return how well it learned, and how that compares with stock DDP."""
    if summary is None:
        return "-"
    if not isfinite(summary.loss):
        return "diverged !"
    mark = "" if summary.acceptable else " !"
    spread = f" ±{stdev(summary.each):.1f}" if len(summary.each) > 1 else ""
    if summary.accuracy is not None and summary.points is not None:
        return f"{100 * summary.accuracy:.1f} ({summary.points:+.1f}{spread}){mark}"
    return f"{summary.loss:.3f} ({summary.percent_of_loss:+.1f}{spread} %){mark}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
