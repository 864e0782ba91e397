# SPDX-License-Identifier: Apache-2.0
"""Links from advertised line rates, without derating, and closed forms of the cost of an all_reduce on them.

nbytes is the gradient on each rank (S), `ranks` P, in a hierarchy `per_node` L on each of `nodes` N. `intra` is the
link between two ranks of a node, `inter` the one to other nodes. docs/cost.md has them in a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import isfinite, log2

from commopt.cost.curve import Curve
from commopt.cost.links import PRIMITIVES, LinkCost, LinkKey, Links, LinksHeader, ring
from commopt.errors import ConfigurationError
from commopt.groups import TeamShape

_US_PER_BYTE_AT_1_GBPS = 8e-3
_TREE_EFFICIENCY = 0.78  # of NCCL's double binary tree, against a ring on large messages


@dataclass(frozen=True)
class Speeds:
    """Line rates in one direction, and the time of a step of a collective.

    nic_gbps: of a node with all its ports, in Gb/s.
    intra_gb_per_s: from a rank to another one of its node, in GB/s.
    nics: ports of a node; one rank by itself uses one.
    inter_latency_us: of a step between nodes.
    intra_latency_us: of a step inside a node.
    """

    nic_gbps: float
    intra_gb_per_s: float
    nics: int = 1
    inter_latency_us: float = 15.0
    intra_latency_us: float = 3.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = "0 or more" if name.endswith("latency_us") else "above 0"
            if not (isfinite(value) and value >= 0) or (value == 0 and least == "above 0"):
                raise ConfigurationError(f"Speeds({name}={value!r}) must be a finite number, {least}")

    @property
    def intra(self) -> LinkCost:
        """The link between two ranks of a node."""
        return LinkCost(self.intra_latency_us, 1e-3 / self.intra_gb_per_s)

    def inter(self, groups: int) -> LinkCost:
        """Return the link to other nodes for each of `groups` ranks that send at once: a port, or a share of all."""
        gbps = self.nic_gbps / max(groups, self.nics)
        return LinkCost(self.inter_latency_us, _US_PER_BYTE_AT_1_GBPS / gbps)

    @property
    def node(self) -> LinkCost:
        """The link between nodes, for a whole node."""
        return replace(self, nics=1).inter(1)


def tree_us(nbytes: float, nodes: int, per_node: int, intra: LinkCost, inter: LinkCost) -> float:
    """2 (log2(N) alpha_n + (L-1) alpha_i) + 2 S beta_n / 0.78: NCCL's double binary tree over chains in the nodes."""
    latency_us = 2 * (log2(nodes) * inter.alpha_us + (per_node - 1) * intra.alpha_us)
    link = inter if nodes > 1 else intra
    return latency_us + 2 * nbytes * link.beta_us_per_byte / _TREE_EFFICIENCY


def nominal_links(shape: TeamShape, speeds: Speeds) -> Links:
    """Return the links of a cluster at line rate: latency and bandwidth of the ring's formulas, no work."""
    return Links(LinksHeader(nodes=shape.ranks_per_node), dict(_curves(shape.ranks_per_node, speeds)), nominal=True)


def _curves(counts: tuple[int, ...], speeds: Speeds) -> Iterator[tuple[LinkKey, Curve]]:
    several = len(counts) > 1 and max(counts) > 1
    for primitive in PRIMITIVES:
        if sum(counts) > 1:
            yield LinkKey("world", primitive, sum(counts)), _world(primitive, counts, speeds)
        for ranks in sorted(set(counts) - {1}) if several else []:
            for groups in {1, counts.count(ranks)}:
                yield LinkKey("intra", primitive, ranks, groups), _curve(primitive, ranks, speeds.intra)
        for groups in {1, counts[0] if len(set(counts)) == 1 else 1} if several else []:
            yield LinkKey("inter", primitive, len(counts), groups), _curve(primitive, len(counts), speeds.inter(groups))


def _curve(primitive: str, ranks: int, link: LinkCost) -> Curve:
    takes = ring(primitive, ranks)
    return Curve.linear(takes.steps * link.alpha_us, takes.volume * link.beta_us_per_byte)


def _world(primitive: str, counts: tuple[int, ...], speeds: Speeds) -> Curve:
    """Over all ranks in node order: a ring crosses to each node once, an all_to_all from every rank to every other."""
    ranks, nodes = sum(counts), len(counts)
    if primitive == "broadcast":  # a tree over the nodes, then one in each
        parts = ((ring(primitive, nodes), speeds.node), (ring(primitive, max(counts)), speeds.intra))
        return Curve.linear(
            sum(takes.steps * link.alpha_us for takes, link in parts),
            sum(takes.volume * link.beta_us_per_byte for takes, link in parts),
        )
    takes = ring(primitive, ranks)
    hops_us = (nodes - 1) * speeds.inter_latency_us + (ranks - nodes) * speeds.intra_latency_us
    volumes = [(takes.volume, speeds.intra.beta_us_per_byte)] if max(counts) > 1 else []
    if nodes > 1:
        direct = max(count * (ranks - count) / ranks for count in counts)
        leaving = direct if primitive == "all_to_all" else takes.volume
        volumes.append((leaving, speeds.node.beta_us_per_byte))
    beta = max(volume * beta for volume, beta in volumes)
    return Curve.linear(hops_us * takes.steps / (ranks - 1), beta)
