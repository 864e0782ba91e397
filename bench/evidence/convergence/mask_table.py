# SPDX-License-Identifier: Apache-2.0
"""The table of `python -m bench.evidence.convergence --local-mask RATE`: what bfloat16 sees against the largest.

python -m bench.evidence.convergence.mask_table bench/results/convergence_mask_*.json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from statistics import mean

from bench.document import table
from bench.evidence.convergence import mask
from bench.evidence.convergence.mask import OUTER_RATES
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
    "mask",
    "as many, the largest",
    "DGC",
    "4 bits",
    "mask against the largest",
    "mask against DGC",
)
_CAPTION = (
    f"GPT, AdamW, 2 nodes of one rank. float32: mean loss in nats per byte of `LocalSGD(period)`. Others: how much "
    f"higher the loss ends than that of the same seed, mean ± 95 % t-interval; bytes of rounds, over float32's. @: the "
    f"outer rate, the best of {', '.join(map(str, OUTER_RATES))} in one shorter training. In brackets: the share of "
    f"the elements that is sent. Windows reversed: float32 again, with its sums in another order. Continued: from a "
    f"model trained at a usual rate, on other batches. bfloat16: matrices are multiplied in it, elsewhere in float32."
)


def markdown(*paths: Path) -> str:
    """Return the table of files; raises ValueError as `rows` does."""
    return _table([rows(path) for path in paths])


def _table(files: Sequence[Sequence[Sequence[str]]]) -> str:
    return f"{table(_HEADINGS, [row for found in files for row in found])}\n\n{_CAPTION}"


def rows(path: Path) -> list[list[str]]:
    """Return a row for each period; raises ValueError when a file has nothing to compare."""
    environment, runs = read(path)
    name = next((mask.COMPARISONS[run.task] for run in runs if run.task in mask.COMPARISONS), None)
    if name is None:
        raise ValueError(f"{path} has no trainings that --local-mask compares")
    task = mask.comparison(name).task
    steps, nodes = environment.settings[task.name]["steps"], len(environment.ranks_per_node)
    title = name.replace("-bf16", ", bfloat16") + ", continued" * isinstance(task, mask.Continued)
    found = []
    for period in mask.PERIODS:
        ways = mask.Ways.of(name, period)
        by_seed = [(way, runs_of(runs, task, way)) for way in ways.all()]
        seeds = sorted(set.intersection(*(set(own) for _, own in by_seed)))
        if not seeds:
            raise ValueError(f"{path} has no seed that every way of period {period} was trained with")
        own = {way: [each[seed] for seed in seeds] for way, each in by_seed}
        null = {run.seed: run for run in runs if run.strategy == own[ways.plain][0].strategy + REVERSED}
        again = [null[seed] for seed in seeds if seed in null]
        found.append([title, str(period), *_cells(ways, own, again, steps, nodes)])
    return found


def _cells(
    ways: mask.Ways, own: Mapping[LocalSGD, Sequence[Run]], null: Sequence[Run], steps: int, nodes: int
) -> list[str]:
    plain, masked, largest = own[ways.plain], own[ways.mask], own[ways.largest]
    exact = dense_bytes(plain[0].parameters, nodes)  # of the average at the end

    def sent(runs: Sequence[Run]) -> float:
        return mean(run.inter_bytes_per_step or 0.0 for run in runs) * steps - exact

    def cell(runs: Sequence[Run], density: float | None = None) -> str:
        share = "" if density is None else f" ({density:.3f})"
        return f"{_gap(plain, runs)}; {sent(runs) / sent(plain):.3f}{share} {_outer(runs)}"

    def density(runs: Sequence[Run]) -> float:
        return mean(run.density or 0.0 for run in runs)

    return [
        str(len(plain)),
        f"{mean(run.loss for run in plain):.4f} {_outer(plain)}",
        _gap(plain[: len(null)], null) if null else "-",
        cell(masked, density(masked)),
        cell(largest, density(largest)),
        cell(own[ways.dgc], ways.density),
        cell(own[ways.four_bits]) if ways.four_bits else "-",
        _gap(largest, masked),
        _gap(own[ways.dgc], masked),
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
    return f"{round(middle, 3) + 0.0:+.3f}{f' ±{half:.3f}' if isfinite(half) else ''} %"


if __name__ == "__main__":
    parser = CommandParser(
        prog="python -m bench.evidence.convergence.mask_table", description="Print the table of files."
    )
    parser.add_argument(
        "files", nargs="+", type=content_of(rows), help="what bench.evidence.convergence --local-mask --json wrote"
    )
    print(_table(parser.parse_args().files))
