# SPDX-License-Identifier: Apache-2.0
"""The sites of a job's nodes, found by measuring pairs of them; what to set then, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from time import perf_counter

from commopt.display import significant
from commopt.document import read_as
from commopt.groups import Membership
from commopt.groups.sites import SITE_VARIABLE
from commopt.probe.pairs import PairProber, predicted_s
from commopt.probe.sites import LEAST_NODES, FoundSites, find_sites, most_matchings
from topology.network import Network, SiteLevel, between, level_names, rate_text

_MOST_NAMED = 6
Say = Callable[[str], None]


def node_names(membership: Membership) -> tuple[str, ...]:
    """Return a name for each node: the host's, with the place of the node where several have the same."""
    return distinct(membership.cluster.names)


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of nodes with the place of the node where several have the same."""
    return tuple(name if names.count(name) == 1 else f"{name}#{place}" for place, name in enumerate(names))


def looks_for_sites(membership: Membership) -> bool:
    """Return whether there may be sites that nobody has told: LEAST_NODES nodes or more, alike on all ranks."""
    return len(membership.cluster.nodes) >= LEAST_NODES and not membership.cluster.sites


def find_network(membership: Membership, budget_s: float, say: Say = lambda text: None) -> Network:
    """Return the sites of the nodes, in at most about `budget_s` seconds; collective, the same on all ranks."""
    names = node_names(membership)
    begun = perf_counter()
    needed_s = predicted_s(most_matchings(len(names)))
    say(f"pairs of {len(names)} nodes, for {min(needed_s, budget_s):.0f} s at most")
    found = find_sites(len(names), PairProber(membership, budget_s).measure)
    network = described(found, names, perf_counter() - begun, budget_s)
    answers = membership.exchange("the sites that were found", network=asdict(network))
    first: Network = read_as(Network, answers[0]["network"], "the sites that the first rank has found")
    return first


def described(found: FoundSites, names: tuple[str, ...], seconds: float, budget_s: float) -> Network:
    """Return what was found, with the names of nodes and sites."""
    labels = level_names(len(found.levels))
    sites = ["/".join(f"{label}{number}" for label, number in zip(labels, path, strict=True)) for path in found.paths]
    why = ""
    if not found.complete:
        need_s = predicted_s(most_matchings(len(names)))
        why = f"{budget_s:.3g} s were over after {found.matchings} matchings of pairs; {need_s:.3g} s are enough"
    return Network(
        names,
        tuple(sites) if found.levels else (),
        found.levels,
        found.best_gbps,
        tuple(names[node] for node in found.slow),
        found.matchings,
        round(seconds, 3),
        why,
    )


# -------------------------------------------------------------------------------------------------- text


def settings(network: Network) -> Iterator[str]:
    """Yield a line to set for each site, with its hosts."""
    for site in dict.fromkeys(network.sites):
        hosts = [node for node, own in zip(network.nodes, network.sites, strict=True) if own == site]
        yield f"export {SITE_VARIABLE}={site}   # on {', '.join(hosts)}"


def level_text(level: SiteLevel) -> str:
    """Return a sentence about a level."""
    counts = sorted(set(level.counts), reverse=True)
    each = f"{counts[0]} nodes" if len(counts) == 1 else f"{counts[-1]} to {counts[0]} nodes"
    text = f"{len(level.counts)} {level.name}s of {each}: {between(level)}"
    if level.across_us > 2 * level.inside_us and level.across_us > 1000:
        text += f"; latency {significant(level.inside_us / 1e3)} and {significant(level.across_us / 1e3)} ms"
    return text


def network_lines(network: Network) -> Iterator[str]:
    """Yield what was found, for people; `settings` follow where there are sites."""
    looked = f"{network.matchings} matchings of pairs in {network.seconds:.1f} s"
    if network.unmeasured:
        yield f"Sites: not all was looked into: {network.unmeasured}."
    elif not network.levels:
        yield f"Sites: none found; all nodes are equally near ({looked})."
    for level in network.levels:
        yield f"Sites: {level_text(level)}."
    if network.slow:
        more = f" and {len(network.slow) - _MOST_NAMED} more" if len(network.slow) > _MOST_NAMED else ""
        rates = dict(zip(network.nodes, network.gbps, strict=True))
        named = (f"{name} ({rate_text(rates[name])})" for name in network.slow[:_MOST_NAMED])
        best = rate_text(max(network.gbps))
        yield f"WARN slow nodes, to all others: {', '.join(named)}{more}; the fastest reaches {best}."
    if network.sites:
        yield "Nobody told these sites. Set this on the hosts, and probe again:"
