"""PowerSGD after backward, as research code does it: what commopt's is compared with, nothing that overlaps.

Low-rank averages of all gradients in three messages once backward has ended (arXiv 1905.13727, algorithms 1 and 2),
written on plain torch: no communication hook, no bucket.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.models import Trainable


class LowRankAverage:
    """Averages the gradients of some parameters over all ranks; keeps right factors and residuals between calls."""

    def __init__(self, parameters: Iterable[nn.Parameter], matrix_rank: int) -> None:
        self.matrix_rank = matrix_rank
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        draws = torch.Generator().manual_seed(0)  # the same on every rank: all must begin with the same factors
        self.factors: dict[nn.Parameter, Tensor] = {}
        self.residuals: dict[nn.Parameter, Tensor] = {}
        for parameter in self.parameters:
            matrix = parameter.detach().flatten(1) if parameter.dim() > 1 else None
            if matrix is not None and self._pays(*matrix.shape):
                factor = torch.randn(matrix.shape[1], matrix_rank, generator=draws)
                self.factors[parameter] = factor.to(matrix)
                self.residuals[parameter] = torch.zeros_like(matrix)

    def __call__(self) -> None:
        """Put the average in the place of every gradient; collective."""
        dense = [p.grad for p in self.parameters if p.grad is not None and p not in self.factors]
        _average(dense)
        low_rank = [p for p in self.factors if p.grad is not None]
        matrices = [_matrix(p) + self.residuals[p] for p in low_rank]
        lefts = [matrix @ self.factors[p] for p, matrix in zip(low_rank, matrices, strict=True)]
        _average(lefts)
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.T @ left for matrix, left in zip(matrices, lefts, strict=True)]
        _average(rights)
        for parameter, matrix, left, right in zip(low_rank, matrices, lefts, rights, strict=True):
            approximation = left @ right.T
            self.factors[parameter] = right
            self.residuals[parameter] = matrix - approximation
            _matrix(parameter).copy_(approximation)

    def _pays(self, rows: int, cols: int) -> bool:
        return 2 * self.matrix_rank * (rows + cols) <= rows * cols


class Unoverlapped:
    """A Trainable whose gradients are averaged between backward and the optimizer's step, and not before."""

    def __init__(self, training: Trainable, average: LowRankAverage) -> None:
        self._training = training
        self.ddp, self.optimizer, self.device = training.ddp, training.optimizer, training.device
        self.evaluation = training.evaluation
        self.optimizer.register_step_pre_hook(lambda optimizer, arguments, options: average())

    def step(self) -> Tensor:
        """See Trainable."""
        with self.ddp.no_sync():
            return self._training.step()

    def held_out_loss(self) -> float:
        """See Trainable."""
        return self._training.held_out_loss()


def _matrix(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.view(parameter.shape[0], -1)


def _average(tensors: list[Tensor]) -> None:
    """Average the tensors over all ranks in one message."""
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))
