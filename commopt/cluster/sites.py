# SPDX-License-Identifier: Apache-2.0
"""Sites of emulated nodes: each has a bridge of its own, and one link of a rate of its own to the other sites."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from commopt.cluster.link import EmulatedLink


@dataclass(frozen=True)
class EmulatedSites:
    """The sites of a cluster. Raises ValueError for what cannot be.

    nodes: number of nodes in each site; none for a network where all nodes are equally near.
    rate: rate of each site's link to the others, as a node's.
    told: whether ranks are told, by COMMOPT_SITE.
    """

    nodes: tuple[int, ...] = ()
    rate: str = "none"
    told: bool = False
    link: EmulatedLink = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "link", EmulatedLink.parse(self.rate))
        if len(self.nodes) == 1 or any(count < 1 for count in self.nodes):
            raise ValueError(f"sites of {self.nodes} nodes must be two or more, with a node or more each")
        if not self.nodes and (self.rate != "none" or self.told):
            raise ValueError("--site-rate and --tell-sites need --sites; add for example --sites 2")

    @classmethod
    def of(cls, sites: int | Sequence[int], nodes: int, rate: str = "none", told: bool = False) -> EmulatedSites:
        """Return so many sites of equally many nodes each, or sites of so many nodes each; 1: no sites."""
        if isinstance(sites, int):
            if sites < 1 or nodes % sites:
                raise ValueError(
                    f"{nodes} nodes cannot be divided into {sites} equal sites; give the nodes of each, as --sites 3,2"
                )
            return cls((nodes // sites,) * sites if sites > 1 else (), rate, told)
        return cls(tuple(sites), rate, told)

    def site_of(self, node_rank: int) -> int:
        """Return the site of a node: nodes are numbered site by site."""
        return next((site for site, end in enumerate(accumulate(self.nodes)) if node_rank < end), 0)

    def options(self) -> str:
        """Return the options of `commopt cluster` that make these sites."""
        if not self.nodes:
            return ""
        told = ["--tell-sites"] if self.told else []
        return shlex.join(["--sites", ",".join(map(str, self.nodes)), "--site-rate", self.rate, *told])
