# SPDX-License-Identifier: Apache-2.0
"""What was left of AdamW's gap, and where, as tables: `python -m bench.evidence.adam_forms FILE`.

The trainings of bench/results/adam_forms.json were made by a program that is deleted: none of its forms was taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bench.document import table
from bench.evidence.convergence import plan
from bench.output import read_lines, written_by
from commopt.command_line import Parser, content_of

NODES = 2
LEARNING_RATE = dict(plan.GPT.learning_rates)["adamw"]
DENSE = "AdamW"
TODAY = "one bit, own v"

# What costs something: with it, and without.
PRICES: dict[str, tuple[str, str]] = {
    "the mean of directions by own v, not AdamW's direction of the mean": ("own v", DENSE),
    "one bit behind it": (TODAY, "own v"),
    "own v, not shared in every step": ("own v", "v shared"),
    "own v, not shared in every step, with one bit": (TODAY, "one bit, v shared"),
    "own v, not shared in every 32nd step, with one bit": (TODAY, "one bit, v shared every 32"),
    "own v, not scaled to the mean of blocks of 512, with one bit": (TODAY, "one bit, own v, blocks of 512 every 8"),
    "lengths measured, not exact": ("own v", "own v, length exact"),
    "lengths measured, not exact, with one bit": (TODAY, "one bit, own v, length exact"),
    "lengths measured, not sketched, with one bit": (TODAY, "one bit, own v, length sketched"),
    "lengths measured, not left at 1, with one bit": (TODAY, "one bit, own v, length 1"),
    "momentum in the nodes, not behind, with one bit": (TODAY, "one bit, own v, momentum behind"),
    "both, with betas 0.5 and 0.95": ("one bit, own v, betas 0.5 and 0.95", "AdamW, betas 0.5 and 0.95"),
}


@dataclass(frozen=True)
class Run:
    """One training."""

    form: str
    rate: float
    """Times the benchmark's learning rate."""
    seed: int
    loss: float | None
    """Held out, at the end; None where it is not finite."""
    bytes_of_dense: float | None


def read(path: Path) -> tuple[dict[str, Any], list[Run]]:
    """Return the header and the trainings of a file; raises ValueError when it holds something else."""
    with written_by("bench.evidence.adam_forms", path):
        header, rows = read_lines(path, "run")
        return header, [Run(**row) for row in rows]


Losses = Mapping[float, Mapping[int, float]]
"""By rate and seed."""


def best_rate(by_rate: Losses) -> float:
    """Return the rate with the least mean loss of the seeds that all forms have, of the rates with the most of them."""
    known = {rate: _counted(by_seed) for rate, by_seed in by_rate.items()}
    most = max(map(len, known.values()))
    return min((rate for rate in known if len(known[rate]) == most), key=lambda rate: mean(known[rate].values()))


def _counted(by_seed: Mapping[int, float]) -> dict[int, float]:
    return {seed: by_seed[seed] for seed in plan.SEEDS if seed in by_seed}


def gaps(mine: Mapping[int, float], dense: Mapping[int, float]) -> list[float]:
    """Return by how many per cent each seed's loss is above that of the same seed in `dense`."""
    return [100 * (loss / dense[seed] - 1) for seed, loss in mine.items() if seed in dense]


def at_each_rate(mine: Losses, others: Losses) -> list[float]:
    """Return by how many per cent each loss is above that at the same rate and seed."""
    return [gap for rate in sorted(mine.keys() & others.keys()) for gap in gaps(mine[rate], others[rate])]


def markdown(path: Path) -> str:
    """Return what each part costs, then a row for each form: its loss at each rate, and how far it is above AdamW."""
    header, runs = read(path)
    losses: dict[str, dict[float, dict[int, float]]] = {}
    for run in runs:
        losses.setdefault(run.form, {}).setdefault(run.rate, {})[run.seed] = inf if run.loss is None else run.loss
    if DENSE not in losses:
        raise ValueError(f"{path} has no trainings of {DENSE}, which all are compared with")
    dense, shares = losses[DENSE], {run.form: run.bytes_of_dense for run in runs}
    rates = sorted({run.rate for run in runs})
    rows = []
    for name in losses:
        mine, share = losses[name], shares[name]
        cells = [_cell(mine.get(rate, {})) for rate in rates]
        against = (
            _shown(gaps(_counted(mine[best_rate(mine)]), dense[best_rate(dense)])),
            _shown(at_each_rate(mine, dense)),
        )
        rows.append([name, *cells, *against, "oracle" if share is None else f"{share:.3f}"])
    prices = [[what, *_price(losses, *pair)] for what, pair in PRICES.items() if losses.keys() >= set(pair)]
    columns = ["form", *(f"rate {rate * LEARNING_RATE:g}" for rate in rates), "best", "all rates", "bytes of dense"]
    caption = (
        f"{NODES} nodes in one process, {header['steps']} steps: held-out loss, the mean of seeds 0 to "
        f"{plan.SEEDS[-1]}, or of as many as in brackets. Best: at the best of the rates with the most seeds, against "
        f"{DENSE} at its best, seed by seed. All rates: at the same rate and seed, all that there are. ±: the standard "
        f"error of the mean; in brackets: how many trainings."
    )
    priced = table(["price of", "at its best rate", "all rates"], prices)
    return "\n\n".join([*([priced] if prices else []), table(columns, rows), caption])


def _price(losses: Mapping[str, Losses], mine: str, others: str) -> tuple[str, str]:
    """Return what is lost at `mine`'s best rate, and at every rate of both."""
    rate = best_rate(losses[mine])
    found = gaps(losses[mine][rate], losses[others].get(rate, {}))
    return _shown(found), _shown(at_each_rate(losses[mine], losses[others]))


def _cell(by_seed: Mapping[int, float]) -> str:
    if not (counted := _counted(by_seed)):
        return "-"
    return f"{mean(counted.values()):.3f}" + ("" if len(counted) == len(plan.SEEDS) else f" ({len(counted)})")


def _shown(percents: Sequence[float]) -> str:
    if not all(map(isfinite, percents)):
        return "diverged"
    error = f" ± {stdev(percents) / sqrt(len(percents)):.1f}" if len(percents) > 1 else ""
    return f"{mean(percents):+.1f}{error} % ({len(percents)})" if percents else "-"


def main() -> None:
    """Print."""
    parser = Parser(prog="python -m bench.evidence.adam_forms", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=content_of(markdown), help="bench/results/adam_forms.json")
    print(parser.parse_args().file)


if __name__ == "__main__":
    main()
