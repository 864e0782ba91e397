# SPDX-License-Identifier: Apache-2.0
"""Each strategy at its own best learning rate: the table of `python -m bench.evidence.convergence --rates`.

python -m bench.evidence.convergence --rates --no-link --json bench/results/convergence_rates.json
python -m bench.evidence.convergence.rates bench/results/convergence_rates.json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import mean

from bench.command_line import print_table
from bench.document import table
from bench.evidence.convergence.plan import GPT, RATE_ENTRIES, RATES
from bench.evidence.convergence.report import Run, read
from bench.training.report import STOCK

_DENSE_BYTES = 2 * 4  # of an element, by two nodes together


Losses = dict[float, dict[int, float]]
"""Held-out loss at the end, by factor of the learning rate and by seed."""


def losses(runs: Sequence[Run]) -> dict[str, Losses]:
    """Return what was measured, by strategy."""
    found: dict[str, Losses] = {}
    for entry in RATE_ENTRIES:
        if by_seed := {run.seed: run.loss for run in runs if run.strategy == entry.name}:
            found.setdefault(entry.kind, {})[entry.rate] = by_seed
    return found


def gap(mine: Mapping[int, float], stock: Mapping[int, float]) -> float:
    """Return by how many per cent a loss is above stock DDP's, of the seeds that both have."""
    seeds = mine.keys() & stock.keys()
    return 100 * (sum(mine[seed] for seed in seeds) / sum(stock[seed] for seed in seeds) - 1) if seeds else inf


def best_rate(by_rate: Losses) -> float:
    """Return the rate with the smallest mean loss, of those with the most seeds."""
    most = max(map(len, by_rate.values()))
    return min((rate for rate in by_rate if len(by_rate[rate]) == most), key=lambda rate: mean(by_rate[rate].values()))


def markdown(path: Path) -> str:
    """Return a row for each strategy: its loss at each rate, and the best against stock DDP's best with either betas.

    Raises ValueError when `path` has no trainings of stock DDP.
    """
    environment, runs = read(path)
    known, shares = losses(runs), bytes_by_rate(runs)
    stocks = {name: each[best_rate(each)] for name, each in known.items() if name.startswith(STOCK[0])}
    if not stocks:
        raise ValueError(f"{path} has no trainings of {STOCK[0]}, which all are compared with")
    most = max(len(by_seed) for by_rate in known.values() for by_seed in by_rate.values())
    rows, open_ended = [], []
    for strategy, by_rate in known.items():
        best = best_rate(by_rate)
        if best in (min(by_rate), max(by_rate)):
            open_ended.append(f"`{strategy}`")
        cells = [_cell(by_rate.get(rate, {}), most) for rate in RATES]
        gaps = [f"{gap(by_rate[best], stock):+.1f} %" for stock in stocks.values()]
        rows.append([f"`{strategy}`", *cells, f"{mean(by_rate[best].values()):.3f}", *gaps, shares.get(strategy, "-")])
    rate = dict(GPT.learning_rates)["adamw"]
    caption = (
        f"GPT, AdamW, {environment.settings[GPT.name]['steps']} steps: held-out loss, the mean of {most} seed(s); "
        f"in brackets behind a cell: of so many. Best: of the rates with the most seeds, and how far above stock "
        f"DDP at its best, with the same seeds and either betas."
    )
    if open_ended:
        caption += f" At the edge of what was tried, so that there may be better: {', '.join(open_ended)}."
    against = [f"against `{name}`" for name in stocks]
    headings = ["strategy", *(f"rate {rate * each:g}" for each in RATES), "best", *against, "bytes of hierarchical's"]
    return f"{table(headings, rows)}\n\n{caption}"


def _cell(by_seed: Mapping[int, float], most: int) -> str:
    if not by_seed:
        return "-"
    return f"{mean(by_seed.values()):.3f}" + (f" ({len(by_seed)})" if len(by_seed) < most else "")


def bytes_by_rate(runs: Sequence[Run]) -> dict[str, str]:
    """Return what each strategy sends between the nodes, as a part of float32: what `hierarchical` sends."""
    return {
        entry.kind: f"{run.inter_bytes_per_step / (_DENSE_BYTES * run.parameters):.3f}"
        for run in runs
        for entry in RATE_ENTRIES
        if entry.name == run.strategy and run.inter_bytes_per_step is not None
    }


if __name__ == "__main__":
    print_table("bench.evidence.convergence.rates", markdown, "bench.evidence.convergence --rates --json")
