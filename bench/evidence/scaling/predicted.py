# SPDX-License-Identifier: Apache-2.0
"""Predict how six models scale to thousands of GPUs: `python -m bench.evidence.scaling.predicted --json FILE`, minutes.

Nothing is measured: commopt.simulate, with the assumptions of docs/simulator.md and those in the file's header. Stock
DDP, the best exact average and the best that loses something, on 1, 10, 25 and 100 Gb/s; for ModelArts' figure, more
than 0.8 for ResNet-50 at thousands of GPUs, the slowest network that reaches it; and which published measurements the
same simulator does not reproduce.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from bench.document import table
from bench.environment import machine
from bench.evidence.scaling import published
from bench.output import write_lines, written_by
from commopt.command_line import CommandParser, content_of, output_file
from commopt.simulate import (
    ClusterSpec,
    NetworkSpec,
    Scaling,
    ScalingPoint,
    Stragglers,
    Workload,
    gpu,
    model,
    of_model,
    strategy,
)
from commopt.simulate.step import USUAL_SPREAD
from commopt.simulate.throughput import BATCHES

KIND = "predicted_scaling"
GBPS = (1, 10, 25, 100)
SHOWN_NODES = (2, 4, 16, 64, 512)
NODES = (1, *SHOWN_NODES)
STRATEGIES = ("stock", "lossless", "lossy")
FLOOR, FLOOR_MODEL = 0.8, "resnet50"
_NETWORKS_GBPS = (1, 2, 4, 5, 10, 16, 25, 40, 50, 100, 200)


@dataclass(frozen=True)
class Assumptions:
    """What all predictions of a file rest on, its first line; claims: rows of `published.markdown`."""

    date: str
    command: str
    version: str
    revision: str | None = None
    gpu: str = "a100"
    precision: str = "fp16"
    gpus_per_node: int = 8
    intra_gb_per_s: float = 200.0
    inter_latency_us: float = 15.0
    efficiency: float = 0.9
    straggler_sigma: float = USUAL_SPREAD
    computation: Mapping[str, str] = field(default_factory=dict)
    claims: Sequence[Sequence[str]] = ()
    record: str = "assumptions"
    kind: str = KIND

    def _node(self) -> str:
        if self.gpus_per_node == 1:
            return "one to a node"
        return f"{self.gpus_per_node} to a node with {self.intra_gb_per_s:g} GB/s between them"

    def __str__(self) -> str:
        """What belongs beside every table."""
        told = (
            f"Simulated, nothing measured. Assumed: {self.gpu.upper()}, {self._node()}, one port per node "
            f"with {self.efficiency:g} of its line rate "
            f"for payload, {self.inter_latency_us:g} us for a step between nodes, no other traffic, {self.precision} "
            f"with float32 gradients, {self.straggler_sigma:.0%} of noise in what ranks compute."
        )
        computed = "; ".join(f"{name}: {note}" for name, note in self.computation.items())
        missed = "; ".join(
            f"{source}: {figure}, here {simulated}"
            for source, figure, simulated, verdict, _ in self.claims
            if verdict.startswith(published.NOT_REPRODUCED)
        )
        return f"{told} Computation: {computed}. Published measurements that it does not reproduce: {missed}."


def assumptions(command: str, models: Iterable[str], kind: str = KIND) -> Assumptions:
    """Return what predictions of these models rest on, published measurements beside it."""
    now = machine()
    given = Assumptions(now["date"], command, now["commopt"], now["revision"], kind=kind)
    notes = {name: _workload(name, given, BATCHES[name]).note for name in models}
    return replace(given, computation=notes, claims=[claim.shown() for claim in published.CLAIMS])


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
    network = NetworkSpec(
        gbps, given.intra_gb_per_s, efficiency=given.efficiency, inter_latency_us=given.inter_latency_us
    )
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
        rows = (
            (gbps, scaling(FLOOR_MODEL, gbps, given).weak([nodes], [strategy(name)], batch)) for gbps in _NETWORKS_GBPS
        )
        needed = next((gbps for gbps, (row,) in rows if row.gpu_efficiency > FLOOR), None)
        yield Floor(FLOOR_MODEL, batch, nodes * given.gpus_per_node, name, FLOOR, needed)


def main() -> None:
    """Predict, print and write."""
    parser = CommandParser(
        prog="python -m bench.evidence.scaling.predicted", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write JSON lines: the assumptions, then predictions"
    )
    parser.add_argument("--show", type=content_of(read), metavar="FILE", help="print a table of such a file instead")
    parser.add_argument("--published", action="store_true", help="with --show: what others have measured instead")
    options = parser.parse_args()
    if options.show:
        print(published.markdown(options.show[0].claims) if options.published else markdown(*options.show))
        return
    told = "python -m bench.evidence.scaling.predicted" + (f" --json {options.json}" if options.json else "")
    given = assumptions(told, BATCHES)
    found: list[Prediction] = []
    for number, name in enumerate(BATCHES, 1):
        print(f"{name}, up to {NODES[-1] * given.gpus_per_node} GPUs ({number} of {len(BATCHES)})", file=sys.stderr)
        found += predictions(given, [name], NODES)
    needs = list(floors(given, NODES[-1]))
    if options.json:
        write_lines(options.json, [asdict(given), *map(asdict, found), *map(asdict, needs)])
    print(markdown(given, found, needs))


def markdown(given: Assumptions, found: Sequence[Prediction], needs: Sequence[Floor]) -> str:
    """Return a table of efficiencies, those of every strategy in each cell, the floors, and what it rests on."""
    known = {(each.model, each.gbps, each.nodes, each.strategy): each.efficiency for each in found}
    shown = [count for count in SHOWN_NODES if any(each.nodes == count for each in found)]
    rows = [
        [
            f"{name}, {batch}",
            str(gbps),
            *(" / ".join(f"{known[name, gbps, nodes, each]:.2f}" for each in STRATEGIES) for nodes in shown),
        ]
        for name, batch in BATCHES.items()
        for gbps in GBPS
    ]
    headings = ["model, batch", "Gb/s", *(f"{nodes} nodes, {nodes * given.gpus_per_node} GPUs" for nodes in shown)]
    floor = ", ".join(f"{each.strategy} {'none' if each.gbps is None else f'{each.gbps:g}'}" for each in needs)
    needed = f"Gb/s from which on {needs[0].model} is above {FLOOR} at {needs[0].gpus} GPUs: {floor}."
    return f"{table(headings, rows)}\n\n{needed} {given}"


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
