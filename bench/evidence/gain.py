# SPDX-License-Identifier: Apache-2.0
"""What the verdict's strategy saves, predicted and measured: `python -m bench.evidence.gain --json FILE`, as root.

On each of ten emulated clusters `commopt doctor --measure --script` recommends a strategy and predicts its step. Then
stock DDP and that strategy take turns of a few steps, in the same processes, so that a machine that is slower for a
while is so for both. The gain is stock's step over the strategy's, measured as the median over turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from bench.command_line import measure_lines
from bench.document import table
from bench.evidence.shapes import STOCK, WARM_UP_STEPS, SmallTraining, step_s
from bench.output import read_lines, written_by
from bench.training.strategies import enter
from commopt.cluster import ClusterUnavailableError, EmulatedCluster
from commopt.cluster.sites import EmulatedSites
from commopt.command_line import CommandParser, content_of, output_file, whole
from commopt.doctor.verdict.facts import Measurements, Training
from commopt.doctor.verdict.judge import tried_first

PROGRAM = "bench.evidence.gain"
WITHIN, OF_TEN = 0.10, 8
"""By how much a predicted gain may differ from the measured one, and of how many clusters in ten."""
_STEPS = 1_000_000  # until the doctor has seen enough
_PERIOD = 16  # of a LocalSGD
_CHECKED = "hierarchical_quantized:bits=4"
"""Is measured where the verdict recommends nothing: no strategy may gain much there."""


@dataclass(frozen=True)
class Case:
    """A cluster and a batch. nodes: ranks on each. rate: of a node's link; two rates: of receiving and of sending.

    sites: nodes in each, () for one network, with `site_rate` between them. samples: of a rank's batch.
    """

    nodes: tuple[int, ...]
    rate: str
    samples: int = 16
    sites: tuple[int, ...] = ()
    site_rate: str = "none"

    def cluster(self) -> EmulatedCluster:
        """Return the cluster, which is made when it is entered."""
        sites = EmulatedSites(self.sites, self.site_rate)
        return EmulatedCluster(len(self.nodes), self.nodes, rate=self.rate, sites=sites)

    def __str__(self) -> str:
        """Return what a reader wants to know: "2 x 2, 200mbit, batch 16"."""
        sites = f" in sites of {'+'.join(map(str, self.sites))}, {self.site_rate} between" if self.sites else ""
        return f"{len(self.nodes)} x {self.nodes[0]}, {self.rate}{sites}, batch {self.samples}"


CASES = (
    Case((1, 1), "200mbit"),
    Case((1, 1), "20mbit"),
    Case((1, 1), "100mbit/50mbit"),
    Case((1, 1), "100mbit", 512),
    Case((2, 2), "200mbit"),
    Case((2, 2), "500mbit", 256),
    Case((2, 2), "50mbit"),
    Case((1, 1, 1), "100mbit"),
    Case((1, 1, 1, 1), "200mbit", 128),
    Case((1, 1, 1, 1), "500mbit", sites=(2, 2), site_rate="100mbit"),
)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, or of `arguments`."""
    parser = CommandParser(prog=f"python -m {PROGRAM}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=whole(1), nargs="+", default=list(range(1, len(CASES) + 1)), metavar="N")
    parser.add_argument("--turns", type=whole(1), default=5, help="of which the median counts (default 5)")
    parser.add_argument("--steps", type=whole(1), default=4, help="of stock and strategy in a turn (default 4)")
    parser.add_argument("--budget", type=whole(5), default=25, help="of the doctor, in seconds (default 25)")
    parser.add_argument("--samples", type=whole(1), default=16, help=argparse.SUPPRESS)  # of a rank
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", type=output_file, metavar="FILE", help="write JSON lines: environment, then each case")
    what.add_argument("--report", type=content_of(read), metavar="FILE", help="show such a file")
    what.add_argument("--train", action="store_true", help=argparse.SUPPRESS)  # a rank, for the doctor
    what.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)  # a rank: a strategy, and where to write
    options = parser.parse_args(arguments)
    if max(options.cases) > len(CASES):
        parser.error(f"--cases {max(options.cases)}: there are {len(CASES)}")
    return options


# --------------------------------------------------------------------------------------------------- a rank


def train(samples: int) -> None:
    """Train as the script of the doctor, which ends it."""
    _begin()
    training = SmallTraining(samples)
    for _ in range(_STEPS):
        training.step()


def take_turns(strategy: str, file: Path, options: argparse.Namespace) -> None:
    """Measure stock DDP and a strategy as one of the ranks; the first writes what a step took in each turn."""
    trainings = {name: enter(SmallTraining(options.samples), name, None)[0] for name in (STOCK, strategy)}
    steps, warm_up = options.steps, WARM_UP_STEPS
    if strategy.endswith("_local"):
        steps, warm_up = max(steps, _PERIOD), 2 * _PERIOD  # its first round is a dense one
    turns: dict[str, list[float]] = {name: [] for name in trainings}
    for turn in range(options.turns + 1):
        for name, training in trainings.items():
            dist.barrier()
            taken = [step_s(training) for _ in range(steps if turn else warm_up)]
            if turn:
                turns[name].append(median(taken) if warm_up == WARM_UP_STEPS else fmean(taken))
    if dist.get_rank() == 0:
        file.write_text(json.dumps(turns))


def _begin() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


# -------------------------------------------------------------------------------------------------- the whole


def measured(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of one cluster. Raises ClusterUnavailableError where it cannot be made, or nothing was said."""
    with tempfile.TemporaryDirectory() as folder, case.cluster() as cluster:
        verdict, found = Path(folder, "verdict.json"), Path(folder, "found.json")
        batch = ["--samples", str(case.samples)]
        doctor = ["-m", "commopt", "doctor", "--measure", "--budget", str(options.budget), "--save", str(verdict)]
        ended = cluster.run([*doctor, "--script", "-m", PROGRAM, "--train", *batch])
        training = Measurements.load(verdict).training if verdict.is_file() else None
        if training is None:
            raise ClusterUnavailableError(f"{case}: the doctor recorded no step: {ended.stderr[-400:]}")
        strategy = tried_first(training.gains) if training.gains else _CHECKED
        given = ["--turns", str(options.turns), "--steps", str(options.steps), *batch]
        ended = cluster.run(["-m", PROGRAM, *given, "--worker", strategy, str(found)])
        if ended.returncode:
            raise ClusterUnavailableError(f"{case}: ranks ended with status {ended.returncode}: {ended.stderr[-400:]}")
        return record_of(str(case), training, strategy, json.loads(found.read_text()))


def record_of(case: str, training: Training, strategy: str, turns: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the record of a cluster. turns: of stock and of the strategy, the seconds of a step in each."""
    predicted_ms = {gain.strategy: gain.step_ms for gain in training.gains}.get(strategy, training.step_ms)
    return {
        "case": case,
        "strategy": strategy if training.gains else "",
        "exposed_share": round(training.exposed_share, 4),
        "recorded_ms": round(training.step_ms, 2),
        "predicted_ms": round(predicted_ms, 2),
        "stock_ms": round(1e3 * median(turns[STOCK]), 2),
        "strategy_ms": round(1e3 * median(turns[strategy]), 2),
        "predicted_gain": round(training.step_ms / predicted_ms, 4),
        "measured_gain": round(_gain(turns[STOCK], turns[strategy]), 4),
    }


def _gain(stock: Sequence[float], strategy: Sequence[float]) -> float:
    return median(its / mine for its, mine in zip(stock, strategy, strict=True))


def error_of(record: Mapping[str, Any]) -> float:
    """Return by how much the predicted milliseconds that a step saves differ from the measured ones.

    Where nothing was recommended, what was saved all the same, as a share of a step; slower is as predicted.
    """
    saved_ms = saved(record)[1]
    if not record["strategy"]:
        return -max(saved_ms, 0.0) / float(record["stock_ms"])
    return saved(record)[0] / saved_ms - 1 if saved_ms > 0 else inf


def saved(record: Mapping[str, Any]) -> tuple[float, float]:
    """Return the milliseconds that a step saves, predicted and measured."""
    predicted = float(record["recorded_ms"]) - float(record["predicted_ms"])
    return predicted, float(record["stock_ms"]) - float(record["strategy_ms"])


def speed_error_of(record: Mapping[str, Any]) -> float:
    """Return the same of how many times as fast a step becomes, in which what is left of a step counts alone."""
    measured_gain: float = record["measured_gain"] if record["strategy"] else max(record["measured_gain"], 1.0)
    return float(record["predicted_gain"]) / measured_gain - 1


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header of a file, and its rows. Raises ValueError when it holds something else."""
    with written_by(f"{PROGRAM} --json", path):
        header, rows = read_lines(path, "gain")
        markdown(header, rows)
        return header, rows


def markdown(header: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row for each cluster, and a sentence that counts the predictions that hold."""
    rows = [
        [
            record["case"],
            f"{record['recorded_ms']:.0f}, {record['stock_ms']:.0f}",
            f"`{record['strategy']}`" if record["strategy"] else "none",
            f"{record['predicted_ms']:.0f}, {record['strategy_ms']:.0f}",
            "{:.0f}, {:.0f}".format(*saved(record)),
            _judged(error_of(record)),
            f"{record['predicted_gain']:.2f}, {record['measured_gain']:.2f}",
            _judged(speed_error_of(record)),
        ]
        for record in records
    ]
    held, fast = (sum(abs(error(record)) <= WITHIN for record in records) for error in (error_of, speed_error_of))
    caption = (
        f"Within {WITHIN:.0%} of what was measured: {held} of {len(records)} in what a step saves, which is what the "
        f"verdict says; {fast} in how many times as fast it becomes. {header['turns']} turns of "
        f"{header['steps']} steps, a model of 1.3 million parameters, {header['cpu_count']} processors for all nodes. "
        f'Where the verdict recommends nothing, "none", `{_CHECKED}` was measured.'
    )
    headings = [
        "nodes x ranks, rate of a link",
        "stock, ms: recorded, measured",
        "recommended",
        "its step, ms: predicted, measured",
        "saves, ms: predicted, measured",
        "error",
        "times as fast: predicted, measured",
        "error",
    ]
    return f"{table(headings, rows)}\n\n{caption}"


def _judged(error: float) -> str:
    return f"{error:+.0%}" + ("" if abs(error) <= WITHIN else ", missed")


def main() -> int:
    """Measure, and report; return the exit status: 1 where too few predictions hold."""
    options = parse_options()
    if options.train:
        train(options.samples)
        return 0
    if options.worker:
        _begin()
        take_turns(options.worker[0], Path(options.worker[1]), options)
        dist.barrier()
        dist.destroy_process_group()
        return 0
    records: list[dict[str, Any]] = []

    def measure() -> Iterator[dict[str, Any]]:
        for number in options.cases:
            records.append(measured(CASES[number - 1], options))
            print(f"{records[-1]}", file=sys.stderr, flush=True)
            yield records[-1]

    facts = {"turns": options.turns, "steps": options.steps, "budget_s": options.budget}
    status = measure_lines(PROGRAM, ("gain", "gain"), options, facts, measure, markdown)
    held = sum(abs(error_of(record)) <= WITHIN for record in records)
    return status or int(held * 10 < OF_TEN * len(records))


if __name__ == "__main__":
    sys.exit(main())
