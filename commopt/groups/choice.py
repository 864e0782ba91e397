# SPDX-License-Identifier: Apache-2.0
"""How many connections gloo gets between nodes where nobody says: measured once, and only where the path is long.

One TCP connection carries a window of bytes in each round trip, and every lost packet halves its window. On a short
path neither matters, and more connections only cost. So the round trip is measured always, which takes eight of them,
and rates only where it is long.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
import torch.distributed as dist

from commopt.groups import gloo
from commopt.groups.connections import MOST_CONNECTIONS
from commopt.groups.team import Team
from topology.network import rate_text

LONG_US = 4000.0
"""A round trip from which on rates are measured."""
COUNTS = (1, 2, 4, MOST_CONNECTIONS)
AS_FAST = 0.7
"""Of the best rate. A trial is short, and one connection may meet none of the losses that hold it back later."""

_TRIES = 8  # the shortest counts: a busy host is not a long path
_RUN_US, _BUDGET_US, _MOST_RUNS = 0.2e6, 1.5e6, 5  # the last two of each number
_LEAST_NBYTES, _MOST_NBYTES = 2**17, 2**24


def across(team: Team) -> Team | None:
    """Return the team of this rank whose members are all on different nodes, None where it is in none."""
    if team.inter is not None:
        return team.inter
    return team if team.node_count == team.size > 1 else None


def round_trip_us(group: dist.ProcessGroup) -> int:
    """Return the shortest of some round trips between neighbours, the longest of all ranks; collective."""
    token = torch.zeros(1, device="cpu")
    return round(_longest(min(_neighbours_us(token, group, 1) for _ in range(_TRIES)), group))


def measure_gbps(group: dist.ProcessGroup) -> list[float]:
    """Return the best rate of each rank to the next, all at once, with each of COUNTS; collective, alike on all ranks.

    The group has MOST_CONNECTIONS. Takes some seven seconds, and 32 MiB at most. Of the runs with a number the first
    warms connections up, as TCP is slow until it knows the network, and counts where there is no other. Of the others
    the best counts: a packet that is lost in one of few runs says little.
    """

    def run_us(connections: int) -> float:
        return _longest(_neighbours_us(values, group, connections), group)  # so ranks go on and end alike

    values = torch.zeros(_LEAST_NBYTES, dtype=torch.uint8, device="cpu")
    while run_us(MOST_CONNECTIONS) < _RUN_US and values.nbytes < _MOST_NBYTES:
        values = values.repeat(2)
    rates = {}
    for count in reversed(COUNTS):  # the largest is warm
        took_us = [run_us(count)]
        while sum(took_us) < _BUDGET_US and len(took_us) < _MOST_RUNS:
            took_us.append(run_us(count))
        rates[count] = values.nbytes * 8e-3 / min(took_us[1:] or took_us)
    return [rates[count] for count in COUNTS]


def best(gbps: Sequence[Sequence[float]]) -> int:
    """Return the largest of COUNTS with which no group is clearly slower than with its best one.

    gbps: of each group, the rates with COUNTS.
    """
    fast = [count for place, count in enumerate(COUNTS) if all(rates[place] >= AS_FAST * max(rates) for rates in gbps)]
    return max(fast, default=1)


def reason(gbps: Sequence[Sequence[float]], long_us: float) -> str:
    """Say in words what was measured."""
    slowest = [min(rates) for rates in zip(*gbps, strict=True)]
    shown = ", ".join(f"{rate_text(rate)} over {count}" for count, rate in zip(COUNTS, slowest, strict=True))
    return f"measured {shown}, at a round trip of {long_us / 1e3:.0f} ms"


def _neighbours_us(values: torch.Tensor, group: dist.ProcessGroup, connections: int) -> float:
    rank, size = group.rank(), group.size()
    arriving = torch.empty_like(values)
    begun = perf_counter()
    gloo.shift(arriving, values, group, (rank + 1) % size, (rank - 1) % size, connections)
    return (perf_counter() - begun) * 1e6


def _longest(own_us: float, group: dist.ProcessGroup) -> float:
    """Return the largest of all ranks' values, after log2(P) rounds."""
    rank, size, distance = group.rank(), group.size(), 1
    longest = torch.tensor([own_us], dtype=torch.float64, device="cpu")
    while distance < size:
        theirs = torch.empty_like(longest)
        gloo.shift(theirs, longest.clone(), group, (rank + distance) % size, (rank - distance) % size, 1)
        longest = torch.maximum(longest, theirs)
        distance *= 2
    return float(longest)
