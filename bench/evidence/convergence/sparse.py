# SPDX-License-Identifier: Apache-2.0
"""What `--second-selection` compares: sparse rows to all ranks, and by way of servers, which choose once more.

The aggregators themselves let the lengths of rows decide (docs/performance.md); here each way is taken throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.evidence.convergence.plan import GPT, STOCK, Comparison, Entry, of_aggregators
from commopt import DGC, Compressed
from commopt.aggregate.rows import RowFormat

DENSITIES = (0.05, 0.01)
OPTIMIZERS = ("sgd", "adamw")


@dataclass(frozen=True, repr=False)
class ToAll(Compressed):
    """Every rank sends its row to all others."""

    def sends_to_all(self, row: RowFormat, chunk_rows: RowFormat, ranks: int) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True, repr=False)
class ThroughServers(Compressed):
    """Every rank sends a chunk's row to each server."""

    def sends_to_all(self, row: RowFormat, chunk_rows: RowFormat, ranks: int) -> bool:
        """Return False."""
        return False


PAIRS = tuple(of_aggregators((ToAll(DGC(each)), ThroughServers(DGC(each))), OPTIMIZERS) for each in DENSITIES)
ENTRIES = (Entry(STOCK, OPTIMIZERS), *(entry for pair in PAIRS for entry in pair))


def comparison(ranks: int) -> Comparison:
    """Return it on so many nodes of one rank."""
    return Comparison(GPT, ENTRIES, (1,) * ranks, seeds=3)
