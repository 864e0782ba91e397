# SPDX-License-Identifier: Apache-2.0
"""What the CUDA kernels of low-rank factors must do, wherever they run: the reference, up to roundings."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.aggregate.matrices import RankRule, matrix_plan
from commopt.feedback import Layout
from commopt.kernels import lowrank
from commopt.kernels import lowrank_reference as reference
from commopt.kernels.loader import Loader
from commopt.kernels.lowrank import MatrixTable
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

    def all_at_once(self, shapes: tuple[tuple[int, int], ...], matrix_rank: int, factor: Tensor | float) -> None:
        """Make matrices of a buffer and their residual, and multiply, subtract, decode; nothing else may be written."""
        plan = matrix_plan(Layout.of_parameters(_with_vectors(shapes)), RankRule(1, 1.0, ()))
        assert len(plan.matrices) == len(shapes)
        rights, lefts = (torch.randn(plan.rows[side], matrix_rank) for side in ("right", "left"))
        buffer, old = torch.randn(plan.layout.numel), torch.randn(plan.stacked.numel)
        table = MatrixTable.of(plan.table, torch.device(self._device))
        made, subtracted, decoded = (torch.full((numel,), 7.0) for numel in (old.numel(), old.numel(), buffer.numel()))
        products = torch.full_like(lefts, 7.0)
        moved = [each.to(self._device) for each in (buffer, old, rights, lefts, made, products, decoded)]
        with launched_by(self._loader):
            began = lowrank.begin_all(table, moved[0], moved[1], factor, moved[2], moved[5], moved[4])
            assert began == (matrix_rank <= 4)
            made, products = moved[4].cpu().clone(), moved[5].cpu()
            assert lowrank.multiply_all("subtract", table, moved[3], moved[2], moved[4])
            assert lowrank.multiply_all("decode", table, moved[3], moved[2], moved[6])
            subtracted, decoded = moved[4].cpu(), moved[6].cpu()
            for group in plan.groups:
                left, right = group.factors("left", lefts), group.factors("right", rights)
                each = [part.to(self._device) for part in (group.stack(made).clone(), left, right)]
                lowrank.subtract(*each)
                assert torch.equal(each[0].cpu(), group.stack(subtracted)), "subtract"
                lowrank.decode(each[1], each[2], each[0])
                for number, (matrix, first, last) in enumerate(group.ranges):
                    wanted = torch.addcmul(old[first:last], buffer[matrix.begin : matrix.end], torch.tensor(0.25))
                    assert not began or torch.allclose(made[first:last], wanted, rtol=1e-5, atol=1e-6), "begin"
                    assert torch.equal(each[0][number].cpu().view(-1), decoded[matrix.begin : matrix.end]), "decode"
                    decoded[matrix.begin : matrix.end] = 7.0
                if began:
                    each = [part.to(self._device) for part in (group.stack(made).clone(), right, left)]
                    lowrank.project(*each)
                    assert torch.equal(each[2].cpu(), group.factors("left", products)), "project"
        assert (decoded == 7).all()


def _with_vectors(shapes: tuple[tuple[int, int], ...]) -> list[tuple[str, tuple[int, ...]]]:
    parts = ((f"{number} matrix", shape) for number, shape in enumerate(shapes))
    return [part for matrix in parts for part in (matrix, (f"{matrix[0]}.bias", (3,)))]


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
