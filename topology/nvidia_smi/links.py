"""NVLinks from the NV# cells of a matrix, which do not say whether a switch is in between.

A cell has the number of links that carry the traffic of one pair. Through NVSwitches every pair of a GPU uses the
same links, so that the numbers add up to more links than any GPU has; direct links belong to one pair each.
"""

from __future__ import annotations

from collections import defaultdict

from topology.model import NvLinks

MOST_LINKS = 18
"""Of one GPU, up to and with Blackwell."""
MOST_LINKS_TO_EACH_OF_SEVERAL = 6
"""No board joins a GPU directly to two or more others with more links than this to each."""


def nvlinks_of_cells(cells: dict[tuple[int, int], int], gpus: int) -> tuple[NvLinks, ...]:
    """NVLinks of all of a matrix's GPUs from the counts of pairs (by place, each pair once)."""
    by_gpu: dict[int, dict[int, int]] = defaultdict(dict)
    for (a, b), count in cells.items():
        by_gpu[a][b] = by_gpu[b][a] = count
    switched = {gpu for gpu, counts in by_gpu.items() if _needs_switch(list(counts.values()))}
    # Whoever a switch reaches is on a switch, also where too few of its own cells are known.
    switched |= {peer for gpu in switched for peer in by_gpu[gpu]}
    links: list[NvLinks] = []
    for gpu, counts in sorted(by_gpu.items()):
        if gpu in switched:
            links.append(NvLinks(gpu, None, max(counts.values()), kind="switch"))
        else:
            # Two GPUs alone with many links: a bridge between them, or two GPUs of a machine with NVSwitches.
            either = gpus == 2 and max(counts.values()) >= MOST_LINKS_TO_EACH_OF_SEVERAL
            for peer, count in sorted(counts.items()):
                links.append(NvLinks(gpu, peer, count, kind="unknown" if either else "gpu"))
    return tuple(links)


def _needs_switch(counts: list[int]) -> bool:
    return sum(counts) > MOST_LINKS or (len(counts) > 1 and min(counts) > MOST_LINKS_TO_EACH_OF_SEVERAL)
