# SPDX-License-Identifier: Apache-2.0
"""What the CUDA kernels of low-rank factors must do, wherever they run: the reference, up to roundings."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.kernels import lowrank
from commopt.kernels import lowrank_reference as reference
from commopt.kernels.loader import Loader
from tests.emulator import launched_by

SHAPES = ((1, 1, 1), (3, 7, 1), (2, 9000, 1), (3, 40, 4), (2, 3500, 4), (1, 900, 16), (2, 17, 17), (2, 600, 32))
"""[count, rows, columns]: less than a slice, parts of several."""


class Check:
    """Runs kernels with one loader on one device."""

    def __init__(self, loader: Loader, device: str) -> None:
        self._loader = loader
        self._device = device

    def like_the_reference(self, factors: Tensor, initial: Tensor | None) -> None:
        """Orthogonalize factors that are far from singular, so that roundings stay small."""
        wanted = torch.empty_like(factors)
        reference.orthogonalize_each([(factors, wanted, initial)])
        torch.testing.assert_close(self.orthogonalize(factors, initial), wanted, rtol=0.0, atol=2e-5)

    def orthogonalize(self, factors: Tensor, initial: Tensor | None = None, *, in_place: bool = False) -> Tensor:
        """Return orthogonalized factors, none of whose singular values may exceed 1; nothing else may be written."""
        moved = factors.to(self._device)
        arena = torch.full((factors.numel() + 14,), 7.0, device=self._device)
        out = arena[7:-7].view(factors.shape)
        if in_place:
            out.copy_(moved)
        initial = None if initial is None else initial.to(self._device)
        with launched_by(self._loader):
            lowrank.orthogonalize(out if in_place else moved, out, initial)
        assert torch.equal(moved.cpu().nan_to_num(), factors.nan_to_num())
        assert (arena[:7] == 7).all()
        assert (arena[-7:] == 7).all()
        result = out.cpu()
        if result.isfinite().all():
            assert torch.linalg.matrix_norm(result.double(), 2).max() <= 1 + 1e-5
        return result

    def multiply(self, count: int, rows: int, cols: int, matrix_rank: int) -> None:
        """Decode and subtract."""
        left, right = torch.randn(count, rows, matrix_rank), torch.randn(count, cols, matrix_rank)
        before = torch.randn(count, rows, cols)
        product = left.double() @ right.double().mT
        bound = 2.0**-23 * (matrix_rank + 1) * (left.double().abs() @ right.double().abs().mT + before.abs())
        moved = left.to(self._device), right.to(self._device)
        for wanted, matrices in ((product, torch.full_like(before, 7.0)), (before - product, before)):
            arena = torch.full((before.numel() + 14,), 7.0, device=self._device)
            target = arena[7:-7].view(before.shape).copy_(matrices)
            with launched_by(self._loader):
                if matrices is before:
                    lowrank.subtract(target, *moved)
                else:
                    lowrank.decode(*moved, target)
            assert ((target.cpu() - wanted).abs() <= bound).all()
            assert (arena[:7] == 7).all()
            assert (arena[-7:] == 7).all()

    def project(self, count: int, rows: int, cols: int, matrix_rank: int) -> None:
        """Multiply matrices and factors; nothing else may be written."""
        matrices, right = torch.randn(count, rows, cols), torch.randn(count, cols, matrix_rank)
        wanted = matrices.double() @ right.double()
        bound = 2.0**-23 * (cols + 1) * (matrices.double().abs() @ right.double().abs())
        moved = matrices.to(self._device), right.to(self._device)
        arena = torch.full((wanted.numel() + 14,), 7.0, device=self._device)
        with launched_by(self._loader):
            lowrank.project(*moved, arena[7:-7].view(wanted.shape))
        assert ((arena[7:-7].view(wanted.shape).cpu() - wanted).abs() <= bound).all()
        assert (arena[:7] == 7).all()
        assert (arena[-7:] == 7).all()


def orthonormal(count: int, rows: int, matrix_rank: int) -> Tensor:
    """Return random factors with orthonormal columns, as far as there are enough rows."""
    result = torch.zeros(count, rows, matrix_rank)
    result[..., : min(rows, matrix_rank)] = torch.linalg.qr(torch.randn(count, rows, matrix_rank)).Q
    return result


def spread(count: int, rows: int, matrix_rank: int, smallest: float) -> Tensor:
    """Return factors whose singular values go from 1 down to `smallest`."""
    values = torch.logspace(0, torch.tensor(smallest).log10().item(), matrix_rank)
    turn: Tensor = torch.linalg.qr(torch.randn(count, matrix_rank, matrix_rank)).Q
    factors: Tensor = orthonormal(count, rows, matrix_rank) * values @ turn
    return factors
