# SPDX-License-Identifier: Apache-2.0
"""The network between nodes as plain data: the sites and racks that were found by measuring it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import floor, log10
from typing import Any

from topology.model import TopologyError, shown

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


def read_network(text: str, source: str) -> Network:
    """Read the network in a JSON file of `commopt probe -o` or `commopt doctor --save`.

    Raises TopologyError, with a message of one line, for anything else, or where nobody looked for sites.
    """
    try:
        content = json.loads(text)
        found = content["network"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise TopologyError(f"{source}: has no network; pass what `commopt probe -o` or doctor --save wrote") from None
    if found is None:
        raise TopologyError(f"{source}: sites were told, or too few nodes for any were there: nothing was looked for")
    try:
        levels = tuple(SiteLevel(**_fields(each, _LEVEL)) for each in _listed(found["levels"]))
        network = Network(**{**_fields(found, _NETWORK), "levels": levels})
        if network.sites and len(network.sites) != len(network.nodes):
            raise ValueError(f"{len(network.sites)} sites of {len(network.nodes)} nodes")
        if any(len(site.split("/")) != len(levels) for site in network.sites):
            raise ValueError(f"a site that has not {len(levels)} levels")
    except (KeyError, TypeError, ValueError) as error:
        raise TopologyError(f"{source}: its network is damaged ({shown(error)}); probe again") from None
    return network


_TEXT, _NUMBER, _WHOLE = str, (int, float), int
_LEVEL: dict[str, Any] = {
    **{"name": _TEXT, "counts": [_WHOLE]},
    **dict.fromkeys(("inside_gbps", "across_gbps", "alone_gbps", "inside_us", "across_us"), _NUMBER),
}
_NETWORK: dict[str, Any] = {
    **{"nodes": [_TEXT], "sites": [_TEXT], "gbps": [_NUMBER], "slow": [_TEXT]},
    **{"matchings": _WHOLE, "seconds": _NUMBER, "unmeasured": _TEXT},
}


def _fields(found: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a JSON object. Raises KeyError, TypeError or ValueError unless they have these types."""
    values: dict[str, Any] = {}
    for name, kind in kinds.items():
        several = isinstance(kind, list)
        items = _listed(found[name]) if several else [found[name]]
        wanted = kind[0] if several else kind
        if not all(isinstance(item, wanted) and not isinstance(item, bool) for item in items):
            raise ValueError(f"{name} is {found[name]!r}")
        values[name] = tuple(items) if several else items[0]
    return values


def _listed(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value


def network_text(network: Network) -> Iterator[str]:
    """Yield lines: the tree of sites with their nodes, and the rates of each level."""
    names, rates = [level.name for level in network.levels], dict(zip(network.nodes, network.gbps, strict=False))
    yield f"{len(network.nodes)} nodes" + ("" if names else ", all equally near")
    before: tuple[str, ...] = ()
    paths = [tuple(site.split("/")) for site in network.sites] or [()] * len(network.nodes)
    first: dict[tuple[str, ...], int] = {}
    for node, path in enumerate(paths):
        for depth in range(len(path)):
            first.setdefault(path[: depth + 1], node)
    order = sorted(range(len(paths)), key=lambda node: [first[paths[node][: depth + 1]] for depth in range(len(names))])
    for node in order:
        path = paths[node]
        for depth in range(len(path)):
            if path[: depth + 1] != before[: depth + 1]:
                yield f"{'  ' * depth}  {path[depth]}"
        before, name = path, network.nodes[node]
        slow = ", slow" if name in network.slow else ""
        yield f"{'  ' * len(path)}  {name}" + (f"  {rate_text(rates[name])}{slow}" if name in rates else "")
    yield from (f"{level.name}s: {between(level)}" for level in network.levels)
    if network.unmeasured:
        yield f"not all was looked into: {network.unmeasured}"


def between(level: SiteLevel) -> str:
    """Return the rates of a level as text."""
    text = f"{rate_text(level.inside_gbps)} a node inside, {rate_text(level.across_gbps)} across while all send"
    return text + (f" ({rate_text(level.alone_gbps)} for one alone: they share a link)" if level.shared else "")


def rate_text(gbps: float) -> str:
    """Return a rate with its unit."""
    value, unit = (gbps, "Gb/s") if gbps >= 1 else (gbps * 1e3, "Mb/s")
    decimals = max(0, 2 - floor(log10(value))) if value > 0 else 0
    return f"{value:.{decimals}f} {unit}"
