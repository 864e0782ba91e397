# SPDX-License-Identifier: Apache-2.0
"""The table of `python -m bench.evidence.convergence --second-selection RANKS`: servers against rows to all, in pairs.

python -m bench.evidence.convergence.sparse_table bench/results/convergence_sparse_8.json
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from bench.command_line import print_table
from bench.document import table
from bench.evidence.convergence.plan import GPT
from bench.evidence.convergence.report import OPTIMIZER_TITLES, Run, interval, read
from bench.evidence.convergence.sparse import OPTIMIZERS, PAIRS


def markdown(path: Path) -> str:
    """Return a row for each optimizer and density; raises ValueError where a training lacks its counterpart."""
    environment, runs = read(path)
    found = {(run.optimizer, run.strategy, run.seed): run for run in runs}
    seeds = sorted({run.seed for run in runs})

    def all_of(optimizer: str, strategy: str) -> list[Run]:
        missing = [seed for seed in seeds if (optimizer, strategy, seed) not in found]
        if missing:
            raise ValueError(f"{path} has no training of {strategy} with {optimizer}, seed {missing[0]}")
        return [found[optimizer, strategy, seed] for seed in seeds]

    rows = []
    for optimizer in OPTIMIZERS:
        stock = all_of(optimizer, "ddp")
        for to_all, servers in PAIRS:
            one, other = all_of(optimizer, to_all.strategy), all_of(optimizer, servers.strategy)
            middle, half = interval([100 * (b.loss / a.loss - 1) for a, b in zip(one, other, strict=True)])
            sent = [mean(run.inter_bytes_per_step or 0.0 for run in each) for each in (one, other)]
            losses = [f"{mean(run.loss for run in each):.3f}" for each in (stock, one, other)]
            title = to_all.strategy.removeprefix("ToAll(").removesuffix(")")
            row = [f"`{title}`, {OPTIMIZER_TITLES[optimizer]}", *losses, f"{middle:+.1f} ±{half:.1f} %"]
            rows.append([*row, f"{sent[1] / sent[0]:.2f}"])
    headings = ["", "stock DDP", "rows to all", "by way of servers", "servers against all", "their bytes, over all's"]
    ranks, steps = len(environment.ranks_per_node), environment.settings[GPT.name]["steps"]
    caption = (
        f"GPT, {ranks} ranks, {steps} steps, {len(seeds)} seeds: mean held-out loss at the end; how much higher it is "
        f"by way of servers than with rows to all, seed by seed, with the 95 % confidence interval of the mean."
    )
    return f"{table(headings, rows)}\n\n{caption}"


if __name__ == "__main__":
    print_table(
        "bench.evidence.convergence.sparse_table", markdown, "bench.evidence.convergence --second-selection --json"
    )
