# SPDX-License-Identifier: Apache-2.0
"""The table of `python -m bench.evidence.convergence --local-mask RATE`: what bfloat16 sees against the largest.

python -m bench.evidence.convergence.mask_table bench/results/convergence_mask_*.json
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from bench.document import table
from bench.evidence.convergence.mask import OUTER_RATES, PERIODS, Continued, comparison, ways
from bench.evidence.convergence.plan import REVERSED, Task
from bench.evidence.convergence.report import Run, dense_bytes, interval, read
from commopt import LocalSGD, Outer
from commopt.command_line import CommandParser, content_of

_HEADINGS = (
    "AdamW's rate",
    "period",
    "seeds",
    "float32",
    "windows reversed",
    "the mask's elements",
    "mask",
    "DGC",
    "mask against DGC",
)
_CAPTION = (
    f"GPT, AdamW, 2 nodes of one rank, all in float32. float32: mean loss in nats per byte of `LocalSGD(period)`. "
    f"Mask, DGC: how much higher the loss ends than that of the same seed, mean ± 95 % t-interval; bytes of rounds, "
    f"over float32's. @: the outer rate, the best of {', '.join(map(str, OUTER_RATES))} in one shorter training. "
    f"Windows reversed: float32 again, with its sums in another order. Continued: from a model trained at a usual "
    f"rate, on other batches."
)


def markdown(*paths: Path) -> str:
    """Return the table of files; raises ValueError as `rows` does."""
    return _table([rows(path) for path in paths])


def _table(files: Sequence[Sequence[Sequence[str]]]) -> str:
    return f"{table(_HEADINGS, [row for found in files for row in found])}\n\n{_CAPTION}"


def rows(path: Path) -> list[list[str]]:
    """Return a row for each period; raises ValueError when a file has nothing to compare."""
    environment, runs = read(path)
    rate = next((run.learning_rate for run in runs if run.learning_rate), 0.0)
    try:
        task = comparison(rate).task
    except KeyError:
        raise ValueError(f"{path} is of a learning rate that --local-mask does not take: {rate:g}") from None
    steps, nodes = environment.settings[task.name]["steps"], len(environment.ranks_per_node)
    found = []
    for period in PERIODS:
        by_way = [runs_of(runs, task, way) for way in ways(rate, period)]
        seeds = sorted(set.intersection(*map(set, by_way)))
        if not seeds:
            raise ValueError(f"{path} has no seed that every way of period {period} was trained with")
        null = {run.seed: run for run in runs if run.strategy == by_way[0][seeds[0]].strategy + REVERSED}
        plain, mask, largest = ([each[seed] for seed in seeds] for each in by_way)
        title = f"{rate:g}{', continued' * isinstance(task, Continued)}"
        again = [null[seed] for seed in seeds if seed in null]
        found.append([title, str(period), *_cells(plain, mask, largest, again, steps, nodes)])
    return found


def _cells(
    plain: Sequence[Run], mask: Sequence[Run], largest: Sequence[Run], null: Sequence[Run], steps: int, nodes: int
) -> list[str]:
    exact = dense_bytes(plain[0].parameters, nodes)  # of the average at the end

    def sent(runs: Sequence[Run]) -> float:
        return mean(run.inter_bytes_per_step or 0.0 for run in runs) * steps - exact

    def cell(runs: Sequence[Run]) -> str:
        return f"{_gap(plain, runs)}; {sent(runs) / sent(plain):.3f} {_outer(runs)}"

    return [
        str(len(plain)),
        f"{mean(run.loss for run in plain):.4f} {_outer(plain)}",
        _gap(plain[: len(null)], null) if null else "-",
        f"{mean(run.density or 0.0 for run in mask):.3f}",
        cell(mask),
        cell(largest),
        _gap(largest, mask),
    ]


def runs_of(runs: Sequence[Run], task: Task, way: LocalSGD) -> dict[int, Run]:
    """Return the trainings of a way by seed, at the one outer rate that it was compared at."""
    names = {repr(replace(way, outer=Outer(rate))) for rate in OUTER_RATES}
    return {run.seed: run for run in runs if run.task == task.name and run.strategy in names}


def _outer(runs: Sequence[Run]) -> str:
    """Return the outer rate of trainings of one way."""
    rate = next((rate for rate in OUTER_RATES if f"outer={Outer(rate)!r}" in runs[0].strategy), 1.0)
    return f"@ {rate:g}"


def _gap(base: Sequence[Run], others: Sequence[Run]) -> str:
    middle, half = interval([100 * (b.loss / a.loss - 1) for a, b in zip(base, others, strict=True)])
    return f"{middle:+.3f} ±{half:.3f} %"


if __name__ == "__main__":
    parser = CommandParser(
        prog="python -m bench.evidence.convergence.mask_table", description="Print the table of files."
    )
    parser.add_argument(
        "files", nargs="+", type=content_of(rows), help="what bench.evidence.convergence --local-mask --json wrote"
    )
    print(_table(parser.parse_args().files))
