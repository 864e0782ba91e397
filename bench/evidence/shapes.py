# SPDX-License-Identifier: Apache-2.0
"""Steps beside stock DDP's on clusters of many shapes: `python -m bench.evidence.shapes --json FILE`, as root.

On each cluster a small model trains with every strategy. They take turns of a few steps, so that a machine that is
slower for a while is so for all. A step's time is the median over turns, and its share of stock DDP's the median over
turns of the two, side by side.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import commopt
from bench.command_line import measure_lines
from bench.document import table
from bench.models import Trainable
from bench.output import read_lines, written_by
from bench.training.strategies import enter, require_known, split_strategies
from commopt.cluster import ClusterUnavailableError, EmulatedCluster
from commopt.cluster.sites import EmulatedSites
from commopt.command_line import CommandParser, content_of, output_file, whole

PROGRAM = "bench.evidence.shapes"
STOCK = "ddp"
STRATEGIES = (STOCK, "flat", "hierarchical")
SHAPES = (
    *("1+1@100mbit", "1+1@1gbit", "2+2@100mbit", "2+2@1gbit", "4+4@200mbit", "3+1@100mbit", "1+1+1@100mbit"),
    *("1+1+1+1@100mbit", "1+1+1+1@1gbit", "2+2+2+2@100mbit", "2+1+1+2@100mbit", "1+1+1+1+1+1+1+1@100mbit"),
    *("1+1+1|1+1+1@500mbit/50mbit", "1+1+1|1+1+1@500mbit/50mbit:told", "1+1+1+1|1+1+1+1@200mbit/200mbit"),
    *("1+1+1+1|1+1+1+1@200mbit/200mbit:told", "1+1+1|1+1@500mbit/50mbit:told"),
)
WARM_UP_STEPS = 4  # DDP rebuilds its buckets, and PowerSGD begins densely
PLANNED_STEPS = 60  # where sites are told, exact sums are timed both ways, and the faster one has stayed by then
_SHAPE = re.compile(r"([\d+|]+)@(\w+)(?:/(\w+))?(:told)?")


@dataclass(frozen=True)
class Shape:
    """A cluster: ranks on each node, the rate of a node's link, and of a site's.

    sites: nodes in each, () for one network.
    told: whether ranks are told of the sites.
    """

    name: str
    nodes: tuple[int, ...]
    rate: str
    sites: tuple[int, ...]
    site_rate: str
    told: bool

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read "2+2+1@100mbit", or "1+1|1+1@500mbit/50mbit:told" with a bar between sites. Raises ValueError."""
        found = _SHAPE.fullmatch(text)
        if found is None:
            raise ValueError(f"shape {text!r} must be as 2+2+1@100mbit, or 1+1|1+1@500mbit/50mbit:told with sites")
        counts, rate, site_rate, told = found.groups()
        sites = [[int(count) for count in site.split("+") if count] for site in counts.split("|")]
        sizes = tuple(len(site) for site in sites) if len(sites) > 1 else ()
        nodes = tuple(count for site in sites for count in site)
        shape = cls(text, nodes, rate, sizes, site_rate or "none", bool(told))
        shape.cluster()
        return shape

    def cluster(self) -> EmulatedCluster:
        """Return the cluster, which is made when it is entered."""
        sites = EmulatedSites(self.sites, self.site_rate, self.told)
        return EmulatedCluster(len(self.nodes), self.nodes, rate=self.rate, sites=sites)

    def __str__(self) -> str:
        """Return what a reader wants to know: "4 x 1, 100mbit", "two sites of 3, 500mbit, 50mbit between, told"."""
        ranks = set(self.nodes)
        of_nodes = f"{len(self.nodes)} x {ranks.pop()}" if len(ranks) == 1 else "+".join(map(str, self.nodes))
        if not self.sites:
            return f"{of_nodes}, {self.rate}"
        sites = "+".join(map(str, self.sites))
        return f"{of_nodes} in sites of {sites}, {self.rate}, {self.site_rate} between{', told' if self.told else ''}"


def _strategies(text: str) -> list[str]:
    names = split_strategies(text)
    for name in names:
        require_known(name)
    if STOCK not in names:
        raise ValueError(f"strategies {text!r} must name {STOCK}, which the others are compared with")
    return names


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, or of `arguments`."""
    parser = CommandParser(prog=f"python -m {PROGRAM}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--shapes",
        type=Shape.parse,
        nargs="+",
        default=[Shape.parse(text) for text in SHAPES],
        metavar="L+L[|L+L]@RATE[/RATE][:told]",
        help="ranks of each node, a bar between sites, rate of a node's link, of a site's (default: many)",
    )
    about = f"to measure (default {','.join(STRATEGIES)}), or to show of a file (default: all)"
    parser.add_argument("--strategies", type=_strategies, metavar="NAME,...", help=about)
    parser.add_argument("--turns", type=whole(1), default=7, help="of which the median counts (default 7)")
    parser.add_argument("--steps", type=whole(1), default=3, help="of each strategy in a turn (default 3)")
    parser.add_argument("--warm-up", type=whole(1), default=WARM_UP_STEPS, help=argparse.SUPPRESS)  # of a rank
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", type=output_file, metavar="FILE", help="write JSON lines: environment, then each shape")
    what.add_argument(
        "--report",
        type=content_of(read),
        nargs="+",
        metavar="FILE",
        help="show such files; of a cluster in several, the last",
    )
    what.add_argument("--worker", help=argparse.SUPPRESS)  # a rank: where its rank 0 writes what it found
    options = parser.parse_args(arguments)
    if options.report is None:
        options.strategies = options.strategies or list(STRATEGIES)
        return options
    try:
        options.report = joined(options.report)
    except ValueError as error:
        parser.error(f"--report: {error}")
    missing = set(options.strategies or []).difference(*(record["share"] for record in options.report[1]))
    if missing:
        parser.error(f"--strategies: no file has {', '.join(sorted(missing))}")
    return options


# --------------------------------------------------------------------------------------------------- a rank


class SmallTraining:
    """A bench.models.Trainable of 1.3 million parameters, in messages of 1 and 4 MiB. samples: of a rank's batch."""

    evaluation = "its batches, which are not held out"

    def __init__(self, samples: int = 16) -> None:
        self._samples = samples
        torch.manual_seed(0)
        layers = [nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
        self.model: nn.Module = DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.device = torch.device("cpu")
        self._draws = torch.Generator().manual_seed(dist.get_rank())

    def step(self) -> Tensor:
        """Do one optimizer step; return the loss."""
        images = torch.randn(self._samples, 256, generator=self._draws)
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(images), images[:, :10].argmax(1))
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def held_out_loss(self) -> float:
        """Return the loss of a step."""
        return float(self.step())

    def follow(self, state: commopt.CommState | None) -> None:
        """Take the optimizer that goes with the hook, where the hook does Adam's part of AdamW."""
        if state is not None and (aggregator := state.aggregator) is not None and aggregator.adam is not None:
            raise ValueError(f"{aggregator} makes Adam's directions, and this model is trained by SGD")


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return by strategy what a step took in each turn, in seconds."""
    trainings = {strategy: enter(SmallTraining(), strategy, None)[0] for strategy in options.strategies}
    turns: dict[str, list[float]] = {strategy: [] for strategy in trainings}
    for turn in range(options.turns + 1):
        for strategy, training in trainings.items():
            dist.barrier()
            taken = [step_s(training) for _ in range(options.steps if turn else options.warm_up)]
            if turn:
                turns[strategy].append(median(taken))
    return turns


def step_s(training: Trainable) -> float:
    """Return the seconds of one step."""
    begin = time.perf_counter()
    training.step()
    return time.perf_counter() - begin


def work(options: argparse.Namespace) -> None:
    """Measure as one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    turns = measure(options)
    if dist.get_rank() == 0:
        Path(options.worker).write_text(json.dumps(turns))
    dist.barrier()
    dist.destroy_process_group()


# -------------------------------------------------------------------------------------------------- the whole


def measured(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of one cluster. Raises ClusterUnavailableError where it cannot be made."""
    given = ["--strategies", ",".join(options.strategies), "--turns", str(options.turns), "--steps", str(options.steps)]
    given += ["--warm-up", str(PLANNED_STEPS if shape.told else WARM_UP_STEPS)]
    with tempfile.TemporaryDirectory() as folder, shape.cluster() as cluster:
        found = Path(folder, "found.json")
        ended = cluster.run(["-m", PROGRAM, *given, "--worker", str(found)], capture=False)
        if ended.returncode:
            raise ClusterUnavailableError(f"the ranks of {shape} ended with status {ended.returncode}")
        return record_of(shape, json.loads(found.read_text()))


def record_of(shape: Shape, turns: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the record of a cluster. turns: by strategy, the seconds of a step in each turn."""
    return {
        "shape": shape.name,
        "step_ms": {strategy: round(1e3 * median(took), 2) for strategy, took in turns.items()},
        "share": {strategy: round(_share(took, turns[STOCK]), 4) for strategy, took in turns.items()},
    }


def _share(took: Sequence[float], stock: Sequence[float]) -> float:
    return median(mine / its for mine, its in zip(took, stock, strict=True))


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header of a file, and its rows. Raises ValueError when it holds something else."""
    with written_by(f"{PROGRAM} --json", path):
        return read_lines(path, "shape")


def joined(
    files: Sequence[tuple[dict[str, Any], list[dict[str, Any]]]],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return files as one. Raises ValueError when they were not measured alike."""
    (header, _), *_ = files
    for fact in ("turns", "steps", "cpu_count"):
        found = {each[fact] for each, _ in files}
        if len(found) > 1:
            raise ValueError(f"the files differ in {fact}: {', '.join(map(str, sorted(found)))}; show each by itself")
    return header, list({record["shape"]: record for _, records in files for record in records}.values())


def markdown(header: Mapping[str, Any], records: Sequence[Mapping[str, Any]], only: Sequence[str] | None = None) -> str:
    """Return a table with a row for each cluster. only: the strategies to show beside stock DDP, None for all."""
    found = dict.fromkeys(name for record in records for name in record["share"])
    strategies = [name for name in found if name != STOCK and (only is None or name in only)]
    rows = [
        [
            str(Shape.parse(record["shape"])),
            f"{record['step_ms'][STOCK]:.0f}",
            *(f"{record['share'][name]:.2f}" if name in record["share"] else "-" for name in strategies),
        ]
        for record in records
    ]
    caption = (
        f"A step's share of stock DDP's, {header['turns']} turns of {header['steps']} steps, a model of 1.3 million "
        f"parameters, {header['cpu_count']} processors for all nodes."
    )
    headings = ["nodes x ranks, rate of a link", "stock, ms", *(f"`{name}`" for name in strategies)]
    return f"{table(headings, rows)}\n\n{caption}"


def main() -> int:
    """Measure, and report; return the exit status."""
    options = parse_options()
    if options.worker:
        work(options)
        return 0

    def measure() -> Iterator[dict[str, Any]]:
        for shape in options.shapes:
            record = measured(shape, options)
            print(f"{shape}: {record['step_ms']}", file=sys.stderr, flush=True)
            yield record

    facts = {"turns": options.turns, "steps": options.steps}
    show = partial(markdown, only=options.strategies)
    return measure_lines(PROGRAM, ("shapes", "shape"), options, facts, measure, show)


if __name__ == "__main__":
    sys.exit(main())
