# SPDX-License-Identifier: Apache-2.0
"""Racks whose nodes share an uplink: the bytes that cross it, and from how many nodes on compression saves none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

import torch

from commopt.aggregate import Aggregator, Buffer, Call, Flat, LocalSGD
from commopt.cost import LinkKey, first_node, ring
from commopt.document import require_whole
from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.groups import TeamShape


@dataclass(frozen=True)
class Racks:
    """Neighbouring nodes that share an uplink to all others; racks are equally long, and the last may be shorter.

    count: of racks.
    oversubscription: the rate of all nodes of a rack over that of its uplink, in one direction.
    """

    count: int = 1
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        require_whole(self.count, 1, "racks")
        if not (isfinite(self.oversubscription) and self.oversubscription >= 1):
            raise ConfigurationError(
                f"oversubscription {self.oversubscription!r} must be a finite number from 1 on, for example 4: all "
                f"nodes of a rack together can send 4 times what its uplink carries"
            )

    def nodes_in_one(self, nodes: int) -> int:
        """Return the number of nodes in the first rack of a cluster of so many, which has the most."""
        return -(-nodes // self.count)

    def crossing(self, key: LinkKey, shape: TeamShape) -> float:
        """Return the bytes that leave the first rack for each byte of a collective, run by all its groups at once."""
        inside = self.nodes_in_one(shape.node_count)
        if key.level == "world":
            return crossing(key.primitive, shape.size, sum(shape.ranks_per_node[:inside]))
        return key.groups * crossing(key.primitive, key.ranks, inside) if key.level == "inter" else 0.0

    def uplink_bytes(self, aggregator: Aggregator, layout: Layout, dtype: torch.dtype, shape: TeamShape) -> int:
        """Return the payload that the first rack of equal nodes sends to others in a step, after all warm-up.

        layout: of all gradients, as one message. With a LocalSGD it is the mean over a period.
        """
        share, average = 1.0, aggregator
        if isinstance(aggregator, LocalSGD) and shape.node_count > 1:
            share, average = 1 / aggregator.period, aggregator.parameters
        total = 0.0
        for seen in first_node(shape):
            for action in average.calls(Buffer(layout, dtype, seen.default_device), seen):
                if isinstance(action, Call) and (action.level == "inter" or seen.rank == 0):
                    key = LinkKey(action.level, action.primitive, seen.at(action.level).size)
                    total += self.crossing(key, shape) * action.nbytes
        return round(share * total)

    def told_bytes(self, aggregator: Aggregator, layout: Layout, dtype: torch.dtype, shape: TeamShape) -> int:
        """Return what `uplink_bytes` does for a shape whose sites are the racks."""
        first = range(sum(shape.ranks_per_node[: self.nodes_in_one(shape.node_count)]))
        seen = (shape.seen_from(rank) for rank in first)
        sent = (aggregator.wire_bytes(layout, dtype, each, each.default_device) for each in seen)
        return sum(sum(each.beyond[:1]) for each in sent)

    def saves_none_from(
        self,
        aggregator: Aggregator,
        layout: Layout,
        dtype: torch.dtype,
        shape_of: Callable[[int], TeamShape],
        most_nodes: int,
    ) -> int | None:
        """Return from how many nodes on a rack sends as many bytes as with stock DDP; None if never up to `most_nodes`.

        A ring crosses an uplink once, an exchange of every node with every node once for each node of the rack.
        shape_of: returns the shape of so many nodes.
        """

        def saves(in_each: int) -> bool:
            shape = shape_of(in_each * self.count)
            sent, stock = (self.uplink_bytes(each, layout, dtype, shape) for each in (aggregator, Flat()))
            return sent < stock

        fewest, most = 1, most_nodes // self.count
        if self.count == 1 or most < 1 or saves(most):
            return None
        while fewest < most:
            middle = (fewest + most) // 2
            fewest, most = (middle + 1, most) if saves(middle) else (fewest, middle)
        return most * self.count


def crossing(primitive: str, ranks: int, inside: int) -> float:
    """Return the bytes that leave `inside` neighbouring ranks of a collective, for each byte as `WireModel` counts.

    A ring leaves them once: 2 M (P-1)/P of an all_reduce of M bytes. In an all_to_all each of them sends to each of the
    others: M inside (P - inside)/P. A tree that knows the racks sends a broadcast to each once.
    """
    if inside >= ranks:
        return 0.0
    match primitive:
        case "all_to_all":
            return inside * (ranks - inside) / ranks
        case "broadcast":
            return 1.0
    return ring(primitive, ranks).volume
