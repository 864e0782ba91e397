# SPDX-License-Identifier: Apache-2.0
"""The table of `python -m bench.evidence.convergence --local-sgd`: LocalSGD by compressor and period.

python -m bench.evidence.convergence.local_table bench/results/convergence_local.json
"""

from __future__ import annotations

from pathlib import Path

from bench.command_line import print_table
from bench.document import table
from bench.evidence.convergence.plan import GPT, LOCAL_ENTRIES, LOCAL_PERIODS
from bench.evidence.convergence.report import (
    PERCENT_ALLOWED,
    TARGET_PERCENT,
    Summary,
    read,
    summarize,
    verdict,
)
from commopt import LocalSGD


def markdown(path: Path) -> str:
    """Return a row for each kind of LocalSGD, a column for each period, those of all ranks first; raises ValueError."""
    environment, runs = read(path)
    found = {summary.strategy: summary for summary in summarize(runs, len(environment.ranks_per_node))}
    if "ddp" not in found:
        raise ValueError(f"{path} has no trainings of ddp, which all are compared with")
    to_stock = found["ddp"].steps_to_target

    def cell(summary: Summary | None) -> str:
        if summary is None:
            return "-"
        steps = ""
        if summary.steps_to_target is not None and to_stock:
            steps = f"; x {summary.steps_to_target / to_stock:.2f}"
        share = f"; {summary.sent:.4f}" if summary.sent is not None else ""
        return f"{verdict(summary)}{steps}{share}"

    rows: dict[str, list[str]] = {}
    for entry in LOCAL_ENTRIES:
        average, summary = entry.aggregator, found.get(entry.strategy)
        if not isinstance(average, LocalSGD):
            rows[f"`{entry.strategy}`"] = [cell(summary), *["-"] * len(LOCAL_PERIODS)]
            continue
        period = f"period={average.period}"
        kind = entry.strategy.replace(f"{period}, ", "").replace(period, "")
        row = rows.setdefault(f"`{kind}`", ["-"] * (1 + len(LOCAL_PERIODS)))
        row[1 + LOCAL_PERIODS.index(average.period)] = cell(summary)
    headings = ["", "every step", *(f"period={period}" for period in LOCAL_PERIODS)]
    ranks = " + ".join(map(str, environment.ranks_per_node))
    seeds = len({run.seed for run in runs})
    caption = (
        f"GPT, AdamW, {environment.settings[GPT.name]['steps']} steps on {ranks} ranks, {seeds} seed(s): how much "
        f"higher the loss ends than stock DDP's (its own: nats per byte), mean ± 95 % t-interval; steps to within "
        f"{TARGET_PERCENT:g} % of what stock DDP ends with, over its own; bytes between nodes, over float32's. "
        f"!: the interval's upper end is above {PERCENT_ALLOWED:g} %."
    )
    return f"{table(headings, [[name, *row] for name, row in rows.items()])}\n\n{caption}"


if __name__ == "__main__":
    print_table("bench.evidence.convergence.local_table", markdown, "bench.evidence.convergence --local-sgd --json")
