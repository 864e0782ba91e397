"""How NVLinks join the GPUs of one machine.

A link between two GPUs stands once for each direction in Topology.nvlinks, or only once where the source gives one
side; links to NVSwitches stand with each GPU. Links to a CPU, or to a GPU outside this machine's list, count for the
GPU that they leave and join nobody here.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import Literal

from topology.model import Topology

NvlinkKind = Literal["switch", "mesh", "pairs", "hybrid_cube_mesh", "irregular", "none", "unknown"]


def nvlink_kind(topology: Topology) -> NvlinkKind:
    """The shape in which NVLinks join the GPUs.

    "switch": through NVSwitches. "mesh": every GPU of a group of three or more directly with every other, with equal
    or unequal numbers of links. "pairs": each with one other. "hybrid_cube_mesh": two full quads whose GPUs are joined
    one to one (DGX-1 and its relatives). "irregular": anything else. "none": the source tells that no two GPUs are
    joined. "unknown": it does not tell, or not whether a switch is in between. GPUs without any NVLink (a display GPU)
    do not count.
    """
    links = topology.nvlinks
    if links is None or not topology.gpus:
        return "unknown"
    switched = {link.gpu for link in links if link.kind == "switch"}
    joined = direct_links(topology)
    if switched:
        return "switch" if all(a in switched and b in switched for a, b in joined) else "irregular"
    if any(link.kind == "unknown" for link in links):
        return "unknown"
    groups = _groups(set(joined))
    if not groups:
        return "none"
    kinds = {_kind_of_group(group, set(joined)) for group in groups}
    return kinds.pop() if len(kinds) == 1 else "irregular"


def links_per_gpu(topology: Topology) -> tuple[int | None, ...]:
    """How many NVLinks leave each GPU, whatever is at their other end; None where the source does not tell."""
    links = topology.nvlinks
    if links is None:
        return (None,) * len(topology.gpus)
    counts = [0] * len(topology.gpus)
    for (a, b), count in direct_links(topology).items():
        counts[a] += count
        counts[b] += count
    for link in links:
        if link.peer is None:
            counts[link.gpu] += link.count
    return tuple(counts)


def links_between(topology: Topology, a: int, b: int) -> int | None:
    """How many NVLinks carry data between two GPUs (by place): direct ones, or the smaller number into the switches.

    0 when none do; None when the source does not tell.
    """
    if topology.nvlinks is None:
        return None
    into_switches = [
        sum(link.count for link in topology.nvlinks if link.kind == "switch" and link.gpu == place) for place in (a, b)
    ]
    return direct_links(topology).get((min(a, b), max(a, b)), 0) + min(into_switches)


def direct_links(topology: Topology) -> dict[tuple[int, int], int]:
    """NVLinks from GPU to GPU without a switch: count by pair of places, the smaller place first."""
    one_way: dict[tuple[int, int], int] = defaultdict(int)
    for link in topology.nvlinks or ():
        if link.peer is not None and link.peer != link.gpu:
            one_way[link.gpu, link.peer] += link.count
    pairs = {(min(pair), max(pair)) for pair in one_way}
    return {(a, b): max(one_way.get((a, b), 0), one_way.get((b, a), 0)) for a, b in sorted(pairs)}


def _groups(pairs: set[tuple[int, int]]) -> list[set[int]]:
    """GPUs that direct links join, however indirectly."""
    groups: list[set[int]] = []
    for pair in sorted(pairs):
        touched = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if not group & set(pair)] + [set(pair).union(*touched)]
    return groups


def _kind_of_group(group: set[int], pairs: set[tuple[int, int]]) -> NvlinkKind:
    if len(group) == 2:
        return "pairs"
    if _is_full(group, pairs):
        return "mesh"
    return "hybrid_cube_mesh" if _is_cube_mesh(group, pairs) else "irregular"


def _is_full(group: set[int], pairs: set[tuple[int, int]]) -> bool:
    return all(pair in pairs for pair in combinations(sorted(group), 2))


def _is_cube_mesh(group: set[int], pairs: set[tuple[int, int]]) -> bool:
    """Whether eight GPUs with four peers each split into two full quads: numbering and wiring differ by vendor.

    With four peers each, the rest is a full quad when one quad is.
    """
    if len(group) != 8 or any(sum(place in pair for pair in pairs) != 4 for place in group):
        return False
    first, *others = sorted(group)
    quads = ({first, *three} for three in combinations(others, 3))
    return any(_is_full(quad, pairs) for quad in quads)
