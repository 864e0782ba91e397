# SPDX-License-Identifier: Apache-2.0
"""Each strategy at its own best learning rate: the table of `python -m bench.evidence.convergence --rates`.

python -m bench.evidence.convergence --rates --no-link --json bench/results/convergence_rates.json
python -m bench.evidence.convergence.rates bench/results/convergence_rates.json
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from bench.document import table
from bench.evidence.convergence.plan import GPT, RATE_ENTRIES, RATES
from bench.evidence.convergence.report import Run, read
from commopt.command_line import Parser, content_of


def losses(runs: Sequence[Run]) -> dict[str, dict[float, float]]:
    """Return the mean held-out loss at the end, by strategy and factor of the learning rate."""
    by_name: dict[str, list[float]] = {}
    for run in runs:
        by_name.setdefault(run.strategy, []).append(run.loss)
    found: dict[str, dict[float, float]] = {}
    for entry in RATE_ENTRIES:
        if entry.name in by_name:
            found.setdefault(entry.strategy, {})[entry.rate] = mean(by_name[entry.name])
    return found


def markdown(path: Path) -> str:
    """Return a row for each strategy: its loss at each rate, and the best of them against stock DDP's best."""
    environment, runs = read(path)
    known = losses(runs)
    if "ddp" not in known:
        raise ValueError(f"{path} has no trainings of ddp, which all are compared with")
    stock, rows, open_ended = min(known["ddp"].values()), [], []
    for strategy, by_rate in known.items():
        best = min(by_rate, key=lambda rate: by_rate[rate])
        if best in (min(RATES), max(RATES)):
            open_ended.append(f"`{strategy}`")
        cells = [f"{by_rate[rate]:.3f}" if rate in by_rate else "-" for rate in RATES]
        rows.append([f"`{strategy}`", *cells, f"{by_rate[best]:.3f} ({100 * (by_rate[best] / stock - 1):+.1f} %)"])
    rate = dict(GPT.learning_rates)["adamw"]
    seeds = len({run.seed for run in runs})
    caption = f"GPT, AdamW, {environment.settings[GPT.name]['steps']} steps, {seeds} seed(s): held-out loss."
    if open_ended:
        caption += f" At the edge of what was tried, so that there may be better: {', '.join(open_ended)}."
    return f"{table(['strategy', *(f'rate {rate * each:g}' for each in RATES), 'best'], rows)}\n\n{caption}"


def main() -> None:
    """Print the table of a file."""
    parser = Parser(prog="python -m bench.evidence.convergence.rates", description="Losses by learning rate.")
    parser.add_argument("file", type=content_of(markdown), help="what bench.evidence.convergence --rates --json wrote")
    print(parser.parse_args().file)


if __name__ == "__main__":
    main()
