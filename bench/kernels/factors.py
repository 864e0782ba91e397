"""Low-rank factors: what PowerSGD does with matrices, and with the factors themselves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import isqrt

import torch

from bench.kernels.alternatives import hook_orthogonalize
from bench.kernels.asked import microseconds
from bench.kernels.case import Case, Contender
from bench.kernels.family import Family, Setting
from commopt.kernels import lowrank
from commopt.kernels import lowrank_reference as reference

_MATRIX_RANK = 4
_COUNT, _ROWS = 50, 2048
_MOST_US = {4: 60.0, 32: 400.0}
"""What orthogonalizing `_COUNT` factors may take, by their number of columns."""


def _products(setting: Setting) -> Iterator[Case]:
    """Yield what is done with a square matrix."""
    side = max(_MATRIX_RANK, isqrt(setting.numel))
    matrices = setting.random(1, side, side)
    left, right, out = (setting.random(1, side, _MATRIX_RANK) for _ in range(3))
    product, factors = torch.empty_like(matrices), (left, right)
    changed, variant = (matrices, *factors), f"rank {_MATRIX_RANK}"
    projected = partial(reference.project, transposed=False)
    yield Case("project", variant, lowrank.project, projected, (matrices, right, out), (matrices, right), (out,))
    yield Case("decode low rank", variant, lowrank.decode, reference.decode, (*factors, product), factors, (product,))
    yield Case("subtract", variant, lowrank.subtract, reference.subtract, changed, changed, (matrices,))


def _bases(setting: Setting) -> Iterator[Case]:
    """Yield what makes factors orthonormal, beside what torch has for it."""
    for matrix_rank, most_us in _MOST_US.items():
        factors = setting.random(_COUNT, _ROWS, matrix_rank)
        initial = torch.linalg.qr(setting.random(_COUNT, _ROWS, matrix_rank)).Q.contiguous()
        out, other = torch.empty_like(factors), torch.empty_like(factors)
        yield Case(
            "orthogonalize",
            f"{_COUNT} of {_ROWS} x {matrix_rank}",
            lowrank.orthogonalize,
            reference.orthogonalize,
            (factors, out, initial),
            (factors, initial),
            (out,),
            others=(
                Contender("torch.linalg.qr", partial(torch.linalg.qr, factors)),
                Contender("torch's powerSGD_hook", partial(hook_orthogonalize, factors, other), (other,)),
            ),
            asked=(microseconds(most_us),),
        )


PRODUCTS = Family("products with factors", ("project", "decode low rank", "subtract"), _products)
BASES = Family("orthonormal factors", ("orthogonalize",), _bases)
