"""What a training took: time, and bytes between the nodes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import median, quantiles

import torch.distributed as dist

from bench.ranks import gather, slowest_rank_ms
from bench.training.report import Outcome
from bench.training.run import Run, Show
from commopt.cluster import Traffic, link_rate, traffic
from topology import Cluster


@dataclass(frozen=True)
class Bytes:
    """Bytes that left the nodes; None where nothing counts them."""

    sent: int | None = None
    payload: int | None = None

    @classmethod
    def between(cls, before: Traffic | None, after: Traffic | None, cluster: Cluster) -> Bytes:
        """Add up what all nodes sent; collective."""
        if before is None or after is None:
            return cls()
        moved = gather(after - before)
        speakers = [node[0] for node in cluster.nodes]  # the counters belong to the node: read them once
        sent = sum(moved[rank].link.tx_bytes for rank in speakers)
        return cls(sent, sum(moved[rank].link_payload_bytes for rank in speakers))


def node_traffic() -> Traffic | None:
    """Return this node's counters, None where it has none of its own; collective, so that nothing is on its way."""
    dist.barrier()
    return traffic() if link_rate() else None


def measure(run: Run, options: argparse.Namespace, cluster: Cluster, compute_ms: float, show: Show) -> Outcome:
    """Train by one strategy and return what it took. Collective."""
    before = node_traffic()
    curve = run.train(options.seconds, options.look_every, show)
    moved = Bytes.between(before, node_traffic(), cluster)
    step_ms, steps = slowest_rank_ms(run.step_s), len(run.step_s)
    predicted = None if run.state is None else sum(gather(run.state.stats()["inter_bytes"]))
    return Outcome(
        strategy=run.strategy,
        steps=steps,
        seconds=curve[-1].seconds,
        step_ms=median(step_ms),
        step_p90_ms=quantiles(step_ms, n=10)[-1] if len(step_ms) > 1 else step_ms[0],
        exposed_ms=median(step_ms) - compute_ms,
        inter_mib_per_step=_mib(moved.sent, steps),
        inter_payload_mib_per_step=_mib(moved.payload, steps),
        inter_predicted_mib_per_step=_mib(predicted, steps),
        curve=curve,
    )


def _mib(nbytes: int | None, steps: int) -> float | None:
    return None if nbytes is None else nbytes / steps / 2**20
