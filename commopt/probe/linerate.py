"""What the network should carry by its line rate, and what the fitted curves say it does."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import torch.distributed as dist

from commopt.cost import LinkKey, Links
from commopt.groups import Membership, WireModel
from topology.machine import discover
from topology.queries import node_nic_gbps

_ROOTED = ("reduce", "broadcast")
_PROBE_NBYTES = 1 << 40
_LEAST_SHARE = 0.5
_EMULATED = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_GBPS = {"k": 1e-6, "m": 1e-3, "g": 1.0, "": 1e-9}


def node_factor(key: LinkKey, nodes: tuple[int, ...]) -> float:
    """Return how many bytes the busiest node sends to others for each byte of the message, all groups together.

    nodes: ranks on each node of the cluster.
    """
    if key.level == "intra":
        return 0.0
    counts = nodes if key.level == "world" else (1,) * key.ranks
    placed = [node for node, count in enumerate(counts) for _ in range(count)]
    arguments = (_PROBE_NBYTES, 0) if key.primitive in _ROOTED else (_PROBE_NBYTES,)
    sent = [0] * len(counts)
    for rank, node in enumerate(placed):
        sent[node] += getattr(WireModel(rank, placed), key.primitive)(*arguments).inter
    return key.groups * max(sent) / _PROBE_NBYTES


def node_gbps(key: LinkKey, links: Links) -> float | None:
    """Return what a node sends into the network in a long message by the fit, in Gb/s; None where nothing leaves it."""
    factor = node_factor(key, links.header.nodes)
    beta = links.curves[key].segments[-1].beta_us_per_byte
    return factor * 8e-3 / beta if factor and beta else None


def _seen_gbps(key: LinkKey, links: Links) -> float:
    """Return what a node sent into the network in the largest message that was measured, latency and all."""
    nbytes, time_us = links.curves[key].points[-1]
    return node_factor(key, links.header.nodes) * nbytes * 8e-3 / time_us


@dataclass(frozen=True)
class Network:
    """The most that a node was seen to send, in Gb/s, by which curve, and what its network cards are rated at."""

    measured_gbps: float
    key: LinkKey
    nominal_gbps: float | None

    @classmethod
    def of(cls, links: Links, nominal_gbps: float | None) -> Network | None:
        """Return None where nothing left a node."""
        rates = {key: _seen_gbps(key, links) for key in links.curves if links.curves[key].points}
        if not any(rates.values()):
            return None
        best = max(rates, key=lambda key: rates[key])
        return cls(rates[best], best, nominal_gbps)

    @property
    def share(self) -> float | None:
        """Measured over nominal; None when the latter is unknown."""
        return self.measured_gbps / self.nominal_gbps if self.nominal_gbps else None

    @property
    def slow(self) -> bool:
        """Whether it is below half of nominal."""
        return self.share is not None and self.share < _LEAST_SHARE


def line_rate_gbps(membership: Membership, environ: Mapping[str, str] = os.environ) -> float | None:
    """Return what the slowest node's network cards carry together, None when one node's are unknown; collective."""
    everyone: list[Any] = [None] * len(membership.ranks)
    dist.all_gather_object(everyone, own_gbps(membership, environ), group=membership.parent())
    return None if None in everyone else min(everyone, default=inf)


def own_gbps(membership: Membership, environ: Mapping[str, str]) -> float | None:
    """Nodes that are blocks of ranks on one machine share a card, or have an emulated one."""
    emulated = environ.get("BENCH_CLUSTER_RATE")
    if emulated is not None:
        found = _EMULATED.fullmatch(emulated)
        return float(found[1]) * _GBPS[found[2]] if found else None
    return None if membership.cluster.emulated else node_nic_gbps(discover(environ=environ))
