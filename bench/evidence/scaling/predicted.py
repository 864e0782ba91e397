# SPDX-License-Identifier: Apache-2.0
"""Predict how six models scale to thousands of GPUs: `python -m bench.evidence.scaling.predicted --json FILE`, minutes.

Nothing is measured: commopt.simulate, with the assumptions of docs/simulator.md and those in the file's header. Stock
DDP, the best exact average and the best that loses something, on 10, 25 and 100 Gb/s; and for ModelArts' figure, more
than 0.8 for ResNet-50 at thousands of GPUs, the slowest network that reaches it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench.document import table
from bench.environment import machine
from bench.output import write_lines, written_by
from commopt.command_line import Parser, content_of, output_file, whole
from commopt.simulate import (
    ClusterSpec,
    Network,
    Scaling,
    ScalingPoint,
    Stragglers,
    Workload,
    gpu,
    model,
    of_model,
    strategy,
)

KIND = "predicted_scaling"
# A usual batch of each; sequences of 128, 512 and 1,024 tokens, images of 224 x 224.
BATCHES = {"resnet50": 128, "vgg16": 64, "swin-t": 64, "bert-base": 32, "bert-large": 16, "gpt2": 8}
GBPS = (10, 25, 100)
SHOWN_GPUS = (64, 512, 4096)
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
STRATEGIES = ("stock", "lossless", "lossy")
FLOOR, FLOOR_MODEL = 0.8, "resnet50"
_NETWORKS_GBPS = (1, 2, 4, 5, 10, 16, 25, 40, 50, 100, 200)


@dataclass(frozen=True)
class Assumptions:
    """What all predictions of a file rest on; the first line of the file."""

    command: str
    version: str  # commopt's
    gpu: str = "a100"
    precision: str = "fp16"
    gpus_per_node: int = 8
    intra_gb_per_s: float = 200.0
    inter_latency_us: float = 15.0
    efficiency: float = 0.9
    straggler_sigma: float = 0.02
    record: str = "assumptions"
    kind: str = KIND
    date: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Prediction:
    """One strategy on one cluster. efficiency: against one GPU, at equal batches per GPU (weak scaling)."""

    model: str
    batch: int
    gbps: float
    nodes: int
    gpus: int
    strategy: str
    chosen: str
    step_ms: float
    exposed_ms: float
    efficiency: float
    record: str = "prediction"

    @classmethod
    def of(cls, name: str, gbps: float, row: ScalingPoint) -> Prediction:
        """Return what a row of a simulation says."""
        step, exposed = row.outcome.step_us / 1000, row.outcome.exposed_us / 1000
        found = (row.strategy, row.chosen, step, exposed, row.gpu_efficiency)
        return cls(name, row.batch, gbps, row.nodes, row.ranks, *found)


@dataclass(frozen=True)
class Floor:
    """The slowest of some networks on which a strategy stays above `efficiency`; None where none does."""

    model: str
    batch: int
    gpus: int
    strategy: str
    efficiency: float
    gbps: float | None
    record: str = "floor"


def scaling(name: str, gbps: float, given: Assumptions) -> Scaling:
    """Return the simulation of a model on a network."""
    network = Network(gbps, given.intra_gb_per_s, efficiency=given.efficiency, inter_latency_us=given.inter_latency_us)
    cluster = ClusterSpec(given.gpus_per_node, gpu(given.gpu), network)
    workload = partial(_workload, name, given)
    return Scaling(workload, cluster, stragglers=Stragglers(given.straggler_sigma))


def _workload(name: str, given: Assumptions, batch: int) -> Workload:
    return of_model(model(name), gpu(given.gpu), batch, given.precision)


def predictions(given: Assumptions, models: Sequence[str], nodes: Sequence[int]) -> Iterator[Prediction]:
    """Yield every model on every network with every strategy."""
    for name in models:
        for gbps in GBPS:
            rows = scaling(name, gbps, given).weak(nodes, [strategy(each) for each in STRATEGIES], BATCHES[name])
            yield from (Prediction.of(name, gbps, row) for row in rows)


def floors(given: Assumptions, nodes: int) -> Iterator[Floor]:
    """Yield for each strategy the network that the floor needs."""
    batch = BATCHES[FLOOR_MODEL]
    for name in STRATEGIES:
        needed = None
        for gbps in _NETWORKS_GBPS:
            (row,) = scaling(FLOOR_MODEL, gbps, given).weak([nodes], [strategy(name)], batch)
            if row.gpu_efficiency > FLOOR:
                needed = gbps
                break
        yield Floor(FLOOR_MODEL, batch, nodes * given.gpus_per_node, name, FLOOR, needed)


def main() -> None:
    """Predict, print and write."""
    parser = Parser(prog="python -m bench.evidence.scaling.predicted", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write JSON lines: the assumptions, then predictions"
    )
    parser.add_argument("--show", type=content_of(read), metavar="FILE", help="print a table of such a file instead")
    parser.add_argument("--gpus", type=whole(1), metavar="N", help="with --show: on that many, in per cent, by network")
    options = parser.parse_args()
    if options.show:
        print(markdown(options.show[1], options.gpus))
        return
    told = "python -m bench.evidence.scaling.predicted" + (f" --json {options.json}" if options.json else "")
    now = machine()
    given = Assumptions(told, now["commopt"], date=now["date"], revision=now["revision"])
    found: list[Prediction] = []
    for number, name in enumerate(BATCHES, 1):
        print(f"{name}, up to {NODES[-1] * given.gpus_per_node} GPUs ({number} of {len(BATCHES)})", file=sys.stderr)
        found += predictions(given, [name], NODES)
    needs = list(floors(given, NODES[-1]))
    if options.json:
        write_lines(options.json, [asdict(given), *map(asdict, found), *map(asdict, needs)])
    print(markdown(found))
    for each in needs:
        network = "on none of these" if each.gbps is None else f"from {each.gbps:g} Gb/s on"
        print(f"{each.model} above {each.efficiency} at {each.gpus} GPUs, {each.strategy}: {network}")


def markdown(found: Sequence[Prediction], gpus: int | None = None) -> str:
    """Return a table of efficiencies, of every strategy in each cell: by number of GPUs, or in per cent on `gpus`."""
    known = {(each.model, each.gbps, each.gpus, each.strategy): each.efficiency for each in found}

    def cell(name: str, gbps: int, count: int, factor: int, digits: int) -> str:
        return " / ".join(f"{factor * known[name, gbps, count, each]:.{digits}f}" for each in STRATEGIES)

    named = {name: f"{name}, {batch}" for name, batch in BATCHES.items()}
    if gpus is not None:
        headings = ["model, batch per GPU", *(f"{gbps} Gb/s" for gbps in GBPS)]
        return table(headings, [[named[name], *(cell(name, each, gpus, 100, 0) for each in GBPS)] for name in named])
    counts = (8, *SHOWN_GPUS)
    rows = [[named[name], str(gbps), *(cell(name, gbps, n, 1, 2) for n in counts)] for name in named for gbps in GBPS]
    return table(["model, batch", "Gb/s", *(f"{count} GPUs" for count in counts)], rows)


def read(path: Path) -> tuple[Assumptions, list[Prediction], list[Floor]]:
    """Read what `main` wrote; raises ValueError when `path` holds something else."""
    with written_by("bench.evidence.scaling.predicted --json", path):
        header, *rows = (json.loads(line) for line in path.read_text().splitlines())
        if header["kind"] != KIND:
            raise ValueError(f"kind {header['kind']!r}")
        predicted = [Prediction(**row) for row in rows if row["record"] == "prediction"]
        return Assumptions(**header), predicted, [Floor(**row) for row in rows if row["record"] == "floor"]


if __name__ == "__main__":
    main()
