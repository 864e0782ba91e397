# SPDX-License-Identifier: Apache-2.0
"""The table of `python -m bench.evidence.convergence --large`: a row for each model, optimizer and strategy.

python -m bench.evidence.convergence.large_table bench/results/convergence_large.json
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from bench.command_line import print_table
from bench.document import table
from bench.evidence.convergence.large import FACTORS, RATE_ENTRIES, TASKS
from bench.evidence.convergence.report import (
    OPTIMIZER_TITLES,
    PERCENT_ALLOWED,
    POINTS_ALLOWED,
    Run,
    Summary,
    read,
    summarize,
    verdict,
)

_FLOAT32_BYTES = 4


def sent_bytes(run: Run, nodes: int) -> float:
    """Return what all nodes send in a step, averaged over the training; stock DDP's is reckoned as `dense_bytes`."""
    return dense_bytes(run, nodes) if run.inter_bytes_per_step is None else run.inter_bytes_per_step


def dense_bytes(run: Run, nodes: int) -> float:
    """Return what a ring of nodes with one rank each sends in a step in float32."""
    return 2 * (nodes - 1) * _FLOAT32_BYTES * run.parameters


def markdown(path: Path) -> str:
    """Return the table of a file; raises ValueError."""
    environment, runs = read(path)
    if environment.kind == "convergence_large_rates":
        return f"{_by_rate(runs)}\n\n{_trained(environment.settings, runs)} Bold: a method's best rate."
    nodes, summaries = len(environment.ranks_per_node), summarize(runs)
    kinds = [(task.name, optimizer) for task in TASKS for optimizer, _ in task.learning_rates]
    ordered = sorted(summaries, key=lambda each: kinds.index((each.task, each.optimizer)))
    rows = [_row(each, [run for run in runs if run.key[:3] == each.key], nodes) for each in ordered]
    headings = ["model, optimizer", "strategy", "bytes of float32's", "learning rate", "seeds", "held out"]
    caption = (
        f"{_trained(environment.settings, runs)} gpt-5m: held-out loss in nats per byte; resnet18: held-out accuracy "
        f"in %; in brackets: against stock DDP with the same seeds, ± the standard deviation of that where there are "
        f"several. !: more than {POINTS_ALLOWED} points or {PERCENT_ALLOWED:g} % worse. Bytes of stock DDP: a ring's."
    )
    return f"{table(headings, rows)}\n\n{caption}"


def _row(summary: Summary, runs: list[Run], nodes: int) -> list[str]:
    share = mean(sent_bytes(run, nodes) / dense_bytes(run, nodes) for run in runs)
    rate = runs[0].learning_rate or 0.0
    return [
        f"{summary.task}, {OPTIMIZER_TITLES[summary.optimizer]}",
        f"`{summary.strategy}`",
        f"{share:.4f}",
        f"{rate:g}",
        str(summary.seeds),
        verdict(summary),
    ]


def _by_rate(runs: list[Run]) -> str:
    """Return a row for each method on each model, with what each learning rate came to."""
    tried: dict[tuple[str, str, str], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.learning_rate or 0.0):
        tried.setdefault((run.task, run.optimizer, run.strategy.partition(", rate x")[0]), []).append(run)
    rows = []
    for entry in (entry for entry in RATE_ENTRIES if entry.rate == 1):
        own = tried.get((entry.tasks[0], entry.optimizers[0], entry.kind), [])
        lowest = min((run.loss for run in own), default=None)
        cells = [f"{'**' * (run.loss == lowest)}{run.loss:.3f}{'**' * (run.loss == lowest)}" for run in own]
        cells = [f"{cell} at {run.learning_rate:g}" for cell, run in zip(cells, own, strict=True)]
        cells += ["-"] * (len(FACTORS) - len(cells))
        rows.append([f"{entry.tasks[0]}, {OPTIMIZER_TITLES[entry.optimizers[0]]}", f"`{entry.kind}`", *cells])
    return table(["model, optimizer", "strategy", *["held-out loss"] * len(FACTORS)], rows)


def _trained(settings: dict[str, dict[str, object]], runs: list[Run]) -> str:
    sizes = {run.task: run.parameters for run in runs}
    models = ", ".join(
        f"{task} {size:,} parameters and {settings[task]['steps']} steps" for task, size in sizes.items()
    )
    return f"One rank on each of two nodes; {models}."


if __name__ == "__main__":
    print_table("bench.evidence.convergence.large_table", markdown, "bench.evidence.convergence --large --json")
