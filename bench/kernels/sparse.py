"""Sparse rows: the largest elements of a gradient, and the sum of the rows of all peers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from bench.kernels.alternatives import TOPK, topk_route
from bench.kernels.asked import times_copy_of, times_faster
from bench.kernels.case import SCALE, Case, Contender, rows
from bench.kernels.family import Family, Setting
from commopt.kernels import sparse
from commopt.kernels import sparse_reference as reference
from commopt.kernels.codec import ErrorFeedback, Momentum, Velocity
from commopt.kernels.sparse import SparseRow

_DENSITIES = (0.001, 0.01)
_MOMENTUM = Momentum(0.9)
_PASSES_NBYTES = 20
"""Of an element: gradient and residual read, the sum written, read again to choose from it, what is left written. With
momentum, two more reads and writes take the place of the second look."""


def families() -> list[Family]:
    """Return a family for each density, the first of them as DGC has it by default."""
    names = ("select", "scatter", "accumulate sparse")
    return [Family(f"{density:.1%} as bfloat16", names, partial(_cases, density)) for density in _DENSITIES]


def _cases(density: float, setting: Setting) -> Iterator[Case]:
    row = SparseRow.of(setting.numel, density, torch.bfloat16)
    payloads = rows(setting.peers, row.nbytes, setting.device)
    for peer in range(setting.peers):
        sparse.select(row, setting.values.roll(peer), payloads[peer : peer + 1], SCALE, None)
    title, total = f"{density:.1%} as bfloat16", torch.empty(setting.numel, device=setting.device)
    yield from _selections(row, title, setting)
    payload = payloads[:1]
    yield Case("scatter", title, sparse.scatter, reference.scatter, (row, payload, total), (payload,), (total,))
    yield Case(
        "accumulate sparse",
        f"{title}, {setting.peers} peers",
        sparse.accumulate,
        reference.accumulate,
        (row, payloads, total),
        (payloads,),
        (total,),
    )


def _selections(row: SparseRow, title: str, setting: Setting) -> Iterator[Case]:
    values, carry = setting.values, setting.carry
    payload = rows(1, row.nbytes, setting.device)
    asked = times_copy_of(1.4, _PASSES_NBYTES * setting.numel, f"{_PASSES_NBYTES} B an element")
    sent = torch.empty(row.count, dtype=row.value_dtype, device=setting.device)
    route = partial(topk_route, values, carry.old, carry.new, sent, SCALE)
    yield Case(
        "select",
        title,
        sparse.select,
        reference.select,
        (row, values, payload, SCALE, carry),
        (values, carry.old),
        (payload, carry.new),
        others=(Contender(TOPK, route, (carry.new, sent)),),
        asked=(asked, times_faster(5, TOPK)),
    )
    velocity = Velocity(setting.random(setting.numel), torch.empty_like(values), _MOMENTUM)
    moving: ErrorFeedback = replace(carry, velocity=velocity)
    yield Case(
        "select",
        f"{title}, momentum",
        sparse.select,
        reference.select,
        (row, values, payload, SCALE, moving),
        (values, carry.old, velocity.old),
        (payload, carry.new, velocity.new),
        asked=(asked,),
    )
