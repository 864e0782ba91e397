# SPDX-License-Identifier: Apache-2.0
"""The network between nodes as plain data: the sites and racks that were found by measuring it."""

from __future__ import annotations

from dataclasses import dataclass

NAMES = ("site", "pod", "rack")
"""Of levels, outermost first: of one level the first, of two the first and the last."""


def level_names(levels: int) -> tuple[str, ...]:
    """Return the names of so many levels (three at most), outermost first."""
    return NAMES if levels == len(NAMES) else (*NAMES[: min(levels, 1)], *NAMES[len(NAMES) - max(levels - 1, 0) :])


@dataclass(frozen=True)
class SiteLevel:
    """One level of sites. Rates are Gb/s of one node in each direction, medians over pairs of nodes.

    name: "site", or of inner levels "pod" or "rack".
    counts: number of nodes in each of its sites.
    inside_gbps: to a node of its own site, while all nodes send so.
    across_gbps: to another site, while all nodes send so.
    alone_gbps: to another site, while no other node of either does.
    inside_us, across_us: latency in one direction.
    """

    name: str
    counts: tuple[int, ...]
    inside_gbps: float
    across_gbps: float
    alone_gbps: float
    inside_us: float
    across_us: float

    @property
    def shared(self) -> bool:
        """Whether one pair alone gets clearly more across than each of all does: the nodes of a site share a link."""
        return self.alone_gbps > 1.5 * self.across_gbps


@dataclass(frozen=True)
class Network:
    """What was found between nodes.

    nodes: their names.
    sites: site of each node, levels outermost first, as COMMOPT_SITE takes it ("site0/rack1"); () if all are equally
        near.
    levels: of sites, outermost first.
    gbps: the best rate of each node to another one, in Gb/s.
    slow: names of nodes that are slower than the others to all of them.
    matchings: how many sets of disjoint pairs were measured.
    seconds: what that took.
    unmeasured: why sites were not looked for to the end, "" if they were.
    """

    nodes: tuple[str, ...]
    sites: tuple[str, ...] = ()
    levels: tuple[SiteLevel, ...] = ()
    gbps: tuple[float, ...] = ()
    slow: tuple[str, ...] = ()
    matchings: int = 0
    seconds: float = 0.0
    unmeasured: str = ""
