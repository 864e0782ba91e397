"""What joins the GPUs of a cluster, as it is sold and as it is used: ports, protocols, connections."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite

from commopt.cost import Curve, LinkKey, Links, Segment, Speeds, nominal_links
from commopt.cost.formulas import tree_us
from commopt.errors import ConfigurationError
from commopt.groups import TeamShape


@dataclass(frozen=True)
class Network:
    """Rates in one direction.

    nic_gbps: of one port, in Gb/s; a node has `nics` of them. efficiency: the share of it that payload gets.
    intra_gb_per_s: what a GPU sends to another one of its node, as collectives achieve it.
    socket_gbps: what one TCP connection carries at most; infinite with RDMA. connections: of a ring, from one rank to
        the next on another node: NCCL's channels times the sockets of each.
    trees: whether all_reduce may go along a double tree where that is faster than the ring, as with NCCL from 2.4 on.
    """

    nic_gbps: float
    intra_gb_per_s: float
    nics: int = 1
    efficiency: float = 0.9
    inter_latency_us: float = 15.0
    intra_latency_us: float = 3.0
    socket_gbps: float = inf
    connections: int = 2
    trees: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ConfigurationError(f"efficiency {self.efficiency!r} must be above 0 and at most 1, for example 0.9")
        if not self.socket_gbps > 0:
            raise ConfigurationError(f"socket_gbps {self.socket_gbps!r} must be above 0, in Gb/s, for example 10")
        if not (isfinite(self.nic_gbps) and self.nic_gbps > 0):
            raise ConfigurationError(f"nic_gbps {self.nic_gbps!r} must be a finite number above 0, for example 25")
        for name in ("nics", "connections"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(f"{name} {value!r} must be a whole number, 1 or more")
        self._speeds(self._line_gbps)  # which checks the others

    def links(self, shape: TeamShape) -> Links:
        """Return the nominal links of a cluster of this shape, each at the rate that is to be had; no work."""
        at_line = nominal_links(shape, self._speeds(self._line_gbps))
        rates_gbps = {key: self.node_gbps(key) for key in at_line.curves}
        at_rate = {gbps: nominal_links(shape, self._speeds(gbps)).curves for gbps in {*rates_gbps.values()}}
        curves = {key: at_rate[gbps][key] for key, gbps in rates_gbps.items()}
        if self.trees:
            for key, ring in curves.items():
                if key.primitive == "all_reduce" and key.level != "intra" and shape.node_count > 1:
                    curves[key] = _lower(self._tree(key, shape), ring)
        return Links(at_line.header, curves, nominal=True)

    def node_gbps(self, key: LinkKey) -> float:
        """Return what a node sends during a collective: what its ports give, or what its connections carry."""
        rings = max(key.groups, self.nics) if key.level == "inter" else 1
        peers = key.ranks - 1 if key.primitive == "all_to_all" else 1
        return min(self._line_gbps, rings * peers * self.connections * self.socket_gbps)

    @property
    def _line_gbps(self) -> float:
        return self.nics * self.nic_gbps * self.efficiency

    def _speeds(self, node_gbps: float) -> Speeds:
        return Speeds(node_gbps, self.intra_gb_per_s, self.nics, self.inter_latency_us, self.intra_latency_us)

    def _tree(self, key: LinkKey, shape: TeamShape) -> Curve:
        speeds = self._speeds(self.node_gbps(key))
        across = speeds.node if key.level == "world" else speeds.inter(key.groups)
        per_node = max(shape.ranks_per_node) if key.level == "world" else 1
        alpha_us, one_byte_us = (tree_us(nbytes, shape.node_count, per_node, speeds.intra, across) for nbytes in (0, 1))
        return Curve.linear(alpha_us, one_byte_us - alpha_us)


def _lower(one: Curve, other: Curve) -> Curve:
    """Return the lower of two straight lines, everywhere."""
    low, high = sorted((one.segments[0], other.segments[0]), key=lambda line: (line.alpha_us, line.beta_us_per_byte))
    gained = low.beta_us_per_byte - high.beta_us_per_byte
    if gained <= 0:
        return Curve((low,))
    crossing = (high.alpha_us - low.alpha_us) / gained
    moved = Segment(crossing, high.alpha_us, high.beta_us_per_byte)
    return Curve((low, moved)) if crossing > 0 else Curve((high,))
