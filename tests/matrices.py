# SPDX-License-Identifier: Apache-2.0
"""Texts as `nvidia-smi topo -m` prints them, drawn from a function of two places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""
CUBE_MESH = (
    {pair: 1 for pair in [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)]}
    | {pair: 2 for pair in [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)]}
)  # fmt: skip
"""NVLinks by pair in a machine with eight V100: six for each GPU."""


def matrix(
    gpus: int,
    cell: Callable[[int, int], str],
    nics: Sequence[str] = (),
    affinity: Mapping[str, Sequence[str]] | None = None,
    legend: str = LEGEND,
) -> str:
    """Text with tabs; `cell(a, b)` has a < b, NICs count after the GPUs; `affinity` has a value per GPU by column."""
    affinity = affinity or {}
    labels = [f"GPU{place}" for place in range(gpus)] + list(nics)
    lines = ["\t" + "\t".join([*labels, *affinity])]
    for a, label in enumerate(labels):
        cells = [" X " if a == b else cell(min(a, b), max(a, b)) for b in range(len(labels))]
        lines.append("\t".join([label, *cells, *(values[a] for values in affinity.values() if a < gpus)]))
    return "\n".join(lines) + "\n" + legend


def all_pairs(word: str) -> Callable[[int, int], str]:
    """Every cell alike."""
    return lambda a, b: word


def wired(links: Mapping[tuple[int, int], int], other: str = "SYS") -> Callable[[int, int], str]:
    """NV# where `links` has the pair."""
    return lambda a, b: f"NV{links[a, b]}" if (a, b) in links else other
