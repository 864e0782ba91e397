"""One rank of one world: times steps of every strategy in turns, and one that communicates nothing.

Started by bench.scaling on an emulated cluster; rank 0 writes what it found to --json.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import commopt
from bench.ranks import slowest_rank_ms
from bench.scaling.options import parser
from bench.training.measure import Bytes, node_traffic
from bench.training.run import FIRST_STEPS, Run
from examples.train_gpt import start_process_group
from topology import Cluster

NOOP = "noop"


class Entrant:
    """A strategy's run, and what its nodes sent in the turns that count."""

    def __init__(self, strategy: str, options: argparse.Namespace, device: torch.device) -> None:
        self.run = Run(strategy, options, device)
        self.sent_nbytes = 0

    def warm_up(self) -> None:
        """Take the steps that are not usual; collective."""
        dist.barrier()
        for _ in range(FIRST_STEPS):
            self.run.step()

    def take_turn(self, steps: int, cluster: Cluster) -> None:
        """Train for some steps; collective."""
        before = node_traffic()
        for _ in range(steps):
            self.run.step()
        self.sent_nbytes += Bytes.between(before, node_traffic(), cluster).sent or 0

    def found(self) -> dict[str, Any]:
        """Return the fields of a Point that are this strategy's own; collective."""
        counted_s = self.run.step_s[FIRST_STEPS:]
        return {
            "strategy": self.run.strategy,
            "step_ms": median(slowest_rank_ms(counted_s)),
            "inter_mib_per_step": self.sent_nbytes / len(counted_s) / 2**20,
        }


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the model's parameters, the step without communication and every strategy's figures; collective."""
    cluster = commopt.Communicator().cluster
    entrants = [Entrant(strategy, options, device) for strategy in (NOOP, *options.strategies)]
    for entrant in entrants:
        entrant.warm_up()
    for _ in range(options.turns):
        for entrant in entrants:
            entrant.take_turn(options.steps, cluster)
    noop, *others = (entrant.found() for entrant in entrants)
    if options.predict:
        from bench.scaling.prediction import predicted_ms

        expected = predicted_ms(options.strategies, entrants[0].run, noop["step_ms"], options.batch, options.predict)
        for other in others:
            other["predicted_ms"] = expected.get(other["strategy"])
    parameters = sum(parameter.numel() for parameter in entrants[0].run.training.ddp.parameters())
    return {"parameters": parameters, "noop_ms": noop["step_ms"], "strategies": others}


def main() -> None:
    """Measure; rank 0 writes."""
    options = parser().parse_args()
    device = start_process_group()
    found = measure(options, device)
    if dist.get_rank() == 0:
        options.json.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
