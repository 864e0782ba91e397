"""Orders in which GPUs of one machine can pass data round, along NVLinks where there are any."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from topology.facts.nvlink import direct_links, nvlink_kind
from topology.facts.paths import Paths
from topology.model import Distance, Topology

Ring = tuple[int, ...]
Links = dict[tuple[int, int], int]

SEARCH_STEPS = 5_000
"""Bound of each search: enough for every wiring of eight GPUs that is built, and a fraction of a second."""
MOST_GPUS = 16
"""Beyond, no machine has direct NVLinks, and a ring is not improved by exchanges."""


def rings(topology: Topology) -> tuple[Ring, ...]:
    """Rings over all GPUs (by place, beginning at 0, the last sends to the first).

    Where direct NVLinks allow rings over all GPUs: as many as share no link, so that the same ring may appear as often
    as it has links (a cube mesh of V100 has three). Otherwise one ring: through NVSwitches in the order of the GPUs,
    else with as few and as short hops outside NVLink as can be found. Each ring can be run in both directions at once.
    Empty for fewer than two GPUs.
    """
    count = len(topology.gpus)
    if count < 2:
        return ()
    if nvlink_kind(topology) == "switch":
        return (tuple(range(count)),)
    if count == 2:
        return ((0, 1),)
    links = direct_links(topology) if count <= MOST_GPUS else {}
    return _disjoint(_hamiltonian(links, count), links, count) or (_shortest(topology, count),)


def _hamiltonian(links: Links, count: int) -> list[Ring]:
    """Rings along links, each in one direction only; not all of them where there are very many."""
    peers = {a: [b for b in range(count) if (min(a, b), max(a, b)) in links] for a in range(count)}
    found: list[Ring] = []
    steps = 0
    stack: list[Ring] = [(0,)]
    while stack and steps < SEARCH_STEPS:
        steps += 1
        path = stack.pop()
        if len(path) == count:
            if 0 in peers[path[-1]] and path[1] < path[-1]:
                found.append(path)
            continue
        stack += [(*path, peer) for peer in reversed(peers[path[-1]]) if peer not in path]
    return found


def _disjoint(candidates: list[Ring], links: Links, count: int) -> tuple[Ring, ...]:
    """The largest choice of rings, with repetition, that uses no link twice (the largest found, past the bound)."""
    most = min(sum(links[pair] for pair in links if place in pair) // 2 for place in range(count))
    best: list[Ring] = []
    steps = 0

    def search(first: int, left: Links, chosen: list[Ring]) -> None:
        nonlocal best, steps
        if len(chosen) > len(best):
            best = list(chosen)
        for number in range(first, len(candidates)):
            steps += 1
            if len(best) == most or steps > SEARCH_STEPS:
                return
            hops = _hops(candidates[number])
            if all(left[hop] for hop in hops):
                search(number, left | {hop: left[hop] - 1 for hop in hops}, [*chosen, candidates[number]])

    search(0, links, [])
    return tuple(best)


def _hops(ring: Ring) -> list[tuple[int, int]]:
    return [(min(a, b), max(a, b)) for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)]


def _shortest(topology: Topology, count: int) -> Ring:
    """One ring with small distances between neighbours: the nearest next, then exchanges while they help."""
    paths = Paths(topology)
    far = len(Distance)
    cost = [[0] * count for _ in range(count)]
    for a, b in combinations(range(count), 2):
        distance = paths.gpu(a, b)
        # Squares: two near hops and a far one are better than three of middle length.
        cost[a][b] = cost[b][a] = (far if distance is None else distance.rank) ** 2
    ring = [0]
    while len(ring) < count:
        ring.append(min((place for place in range(count) if place not in ring), key=lambda p: (cost[ring[-1]][p], p)))
    if count > MOST_GPUS:
        return tuple(ring)
    return _improved(ring, lambda order: sum(cost[a][b] for a, b in _hops(tuple(order))))


def _improved(ring: list[int], cost: Callable[[list[int]], int]) -> Ring:
    """Reverse a stretch of the ring as long as that makes it cheaper."""
    best = cost(ring)
    for _ in range(len(ring)):
        turns = (ring[:i] + ring[i:j][::-1] + ring[j:] for i, j in combinations(range(1, len(ring) + 1), 2))
        candidate = min(turns, key=cost)
        if cost(candidate) >= best:
            break
        ring, best = candidate, cost(candidate)
    return tuple(ring)
