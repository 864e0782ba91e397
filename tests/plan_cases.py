# SPDX-License-Identifier: Apache-2.0
"""Random planning problems, and everything about them computed the slow and obvious way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product

from hypothesis import strategies as st

from commopt.cost import PriceTable
from commopt.schedule import Costs, Unit


@st.composite
def price_tables(draw: st.DrawFn) -> PriceTable:
    """Any table: with bends, jumps and stretches where more bytes take less time."""
    sizes = sorted(draw(st.sets(st.integers(0, 400), min_size=1, max_size=5)))
    times = draw(st.lists(st.floats(0, 300), min_size=len(sizes), max_size=len(sizes)))
    return PriceTable(tuple(sizes), tuple(times))


@st.composite
def cost_models(draw: st.DrawFn) -> Costs:
    strategies = ["flat", "hierarchical", "quantized"][: draw(st.integers(1, 3))]
    return Costs({name: draw(price_tables()) for name in strategies}, draw(st.sampled_from([0.0, 20.0])))


@st.composite
def unit_lists(draw: st.DrawFn, most: int = 10) -> list[Unit]:
    """Units, some empty, some of another dtype, ready in any order."""
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 120), st.floats(0, 500), st.sampled_from(["float32"] * 5 + ["float16"])),
            min_size=1,
            max_size=most,
        )
    )
    return [Unit((f"p{number}",), *row) for number, row in enumerate(rows)]


def partitions(units: Sequence[Unit], max_bytes: int | None) -> Iterator[tuple[int, ...]]:
    """Where the buckets end, for each of the 2^(n-1) partitions that are allowed."""
    for cuts in product((False, True), repeat=len(units) - 1):
        ends = (*(place + 1 for place, cut in enumerate(cuts) if cut), len(units))
        if all(allowed(units[begin:end], max_bytes) for begin, end in pairwise((0, *ends))):
            yield ends


def allowed(members: Sequence[Unit], max_bytes: int | None) -> bool:
    fits = max_bytes is None or sum(unit.nbytes for unit in members) <= max_bytes
    return len(members) == 1 or (fits and len({unit.dtype for unit in members}) == 1)


def finish_of(units: Sequence[Unit], ends: Sequence[int], costs: Costs, strategy: str = "flat") -> float:
    """When the last of these messages is done on a FIFO lane."""
    free = 0.0
    for begin, end in pairwise((0, *ends)):
        members = units[begin:end]
        nbytes = sum(unit.nbytes for unit in members)
        lane = costs.overhead_us + costs.prices[strategy](nbytes)
        free = max(free, *(unit.ready_us for unit in members)) + lane
    return free
