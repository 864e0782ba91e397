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

_Runs = Mapping[int, Run]
"""Of one way, by seed."""
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
        own = {way: runs_of(runs, task, way) for way in ways.all()}
        plain = own[ways.plain]
        if not plain.keys() & own[ways.mask].keys():
            continue
        null = {run.seed: run for run in runs if run.strategy == next(iter(plain.values())).strategy + REVERSED}
        found.append([title, str(period), *_cells(ways, own, null, steps, nodes)])
    if not found:
        raise ValueError(f"{path} has no seed that float32 and the mask were trained with")
    return found


def _cells(ways: mask.Ways, own: Mapping[LocalSGD, _Runs], null: _Runs, steps: int, nodes: int) -> list[str]:
    plain, masked = own[ways.plain], own[ways.mask]
    most = len(plain.keys() & masked.keys())
    exact = dense_bytes(next(iter(plain.values())).parameters, nodes)  # of the average at the end

    def sent(runs: _Runs) -> float:
        return mean(run.inter_bytes_per_step or 0.0 for run in runs.values()) * steps - exact

    def cell(way: LocalSGD | None, density: float | None = None) -> str:
        runs = own[way] if way is not None else {}
        if not runs:
            return "-"
        counted = [run.density for run in runs.values() if run.density is not None]
        share = mean(counted) if counted else density
        elements = "" if share is None else f" ({share:.3f})"
        return f"{_gap(plain, runs, most)}; {sent(runs) / sent(plain):.3f}{elements} {_outer(runs)}"

    return [
        str(most),
        f"{mean(run.loss for seed, run in plain.items() if seed in masked):.4f} {_outer(plain)}",
        _gap(plain, null, most),
        cell(ways.mask),
        cell(ways.largest),
        cell(ways.dgc, ways.density),
        cell(ways.four_bits),
        _gap(own[ways.largest], masked, most),
        _gap(own[ways.dgc], masked, most),
    ]


def runs_of(runs: Sequence[Run], task: Task, way: LocalSGD) -> dict[int, Run]:
    """Return the trainings of a way by seed, at the one outer rate that it was compared at."""
    names = {repr(replace(way, outer=Outer(rate))) for rate in OUTER_RATES}
    return {run.seed: run for run in runs if run.task == task.name and run.strategy in names}


def _outer(runs: _Runs) -> str:
    """Return the outer rate of trainings of one way."""
    strategy = next(iter(runs.values())).strategy
    return f"@ {next((rate for rate in OUTER_RATES if f'outer={Outer(rate)!r}' in strategy), 1.0):g}"


def _gap(base: _Runs, others: _Runs, most: int) -> str:
    """Return how much higher the loss of others is, seed by seed; of how many seeds, where fewer than `most`."""
    seeds = sorted(base.keys() & others.keys())
    if not seeds:
        return "-"
    middle, half = interval([100 * (others[seed].loss / base[seed].loss - 1) for seed in seeds])
    spread = f" ±{half:.3f}" if isfinite(half) else ""
    return f"{round(middle, 3) + 0.0:+.3f}{spread} %{f' (n = {len(seeds)})' if len(seeds) < most else ''}"


if __name__ == "__main__":
    parser = CommandParser(
        prog="python -m bench.evidence.convergence.mask_table", description="Print the table of files."
    )
    parser.add_argument(
        "files", nargs="+", type=content_of(rows), help="what bench.evidence.convergence --local-mask --json wrote"
    )
    print(_table(parser.parse_args().files))
