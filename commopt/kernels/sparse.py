"""Sparse rows: the largest elements of each chunk to a payload row, and back, and the sum of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.kernels import sparse_cuda
from commopt.kernels.checks import check_carry, check_rows, check_total, check_values
from commopt.kernels.codec import Carry
from commopt.kernels.loader import Loader, loader_for
from commopt.kernels.quantize_cuda import DTYPES
from commopt.kernels.reference import sparse as reference
from commopt.kernels.sparse_row import SparseRow


def select(row: SparseRow, values: Tensor, payload: Tensor, scale: float, carry: Carry | None) -> None:
    """Put the `row.count` largest elements of p into each row of `payload`, exactly as SparseRow says.

    values: 1-D, floating; chunk i of `row.chunk_numel` elements goes into row i. payload: uint8 [rows, row.nbytes].
    Every operation below is one float32 operation, rounded by itself (no fused multiply-add); products of the scalars
    come first. S is the loss scale (1 without one), v the carry's residual, u its velocity, m and decay the factors:

        g = float32(values) * float32(scale)
        without a carry                         p = g
        with a carry                            p = g + (S decay) v_old
        with a velocity as well                 w = (S m) u_old + g,           p = w + (S decay) v_old
        and with Nesterov's momentum            w = m (S u_old + g),     p = (w + g) + (S decay) v_old

    Of the chosen elements value_dtype(p) is sent. What is kept:

        v_new = (p - sent) (1/S)                sent = 0 where p is not among the chosen
        u_new = w (1/S)                         0 where p is among the chosen, with masking

    No CUDA implementation waits for the device. Raises ConfigurationError (shapes, strides, devices) and
    UnsupportedTensorError (dtypes).
    """
    check_rows(payload, row.chunk_numel, row.nbytes)
    check_values(values, payload, row.chunk_numel)
    check_carry(carry, values.numel(), payload)
    loader = _loader(payload, values.dtype)
    if loader is None:
        reference.select(row, values, payload, scale, carry)
    else:
        sparse_cuda.select(loader, row, values, payload, scale, carry)


def scatter(row: SparseRow, payload: Tensor, values: Tensor) -> None:
    """Set `values` (1-D, any floating dtype, at most rows * chunk_numel) to what the rows of `payload` stand for.

    Entries past the end of `values` are zeros, and dropped.
    """
    check_rows(payload, row.chunk_numel, row.nbytes)
    check_values(values, payload, row.chunk_numel)
    loader = _loader(payload, values.dtype)
    if loader is None:
        reference.scatter(row, payload, values)
    else:
        sparse_cuda.scatter(loader, row, payload, values)


def accumulate(row: SparseRow, payloads: Tensor, total: Tensor) -> None:
    """Set `total` (float32 [chunk_numel]) to the sum of the rows: zeros, to which they are added one after the other.

    No index occurs twice in a row, so every bit is determined.
    """
    check_rows(payloads, row.chunk_numel, row.nbytes)
    check_values(total, payloads, row.chunk_numel)
    check_total(total)
    loader = _loader(payloads, total.dtype)
    if loader is None:
        reference.accumulate(row, payloads, total)
    else:
        sparse_cuda.accumulate(loader, row, payloads, total)


def finite(row: SparseRow, payload: Tensor) -> Tensor:
    """Return whether all entries of all rows are finite: bool, 0-d."""
    check_rows(payload, row.chunk_numel, row.nbytes)
    return reference.finite(row, payload)


def _loader(payload: Tensor, dtype: torch.dtype) -> Loader | None:
    """Return what launches the kernel for values of `dtype`, None where the reference must run."""
    if payload.device.type != "cuda" or dtype not in DTYPES:
        return None
    return loader_for(payload.device)
