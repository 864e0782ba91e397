"""The contract of a compressor: values in, payload of fixed shape out, and back. It never communicates."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from commopt.concise_repr import ConciseRepr
from commopt.kernels.codec import Carry, Dice, Momentum


class Compressor(ConciseRepr, ABC):
    """Turns chunks of values into payload rows that can be exchanged, summed and decoded.

    A payload is uint8 [rows, payload_nbytes(chunk_numel)]: one row per chunk, so that each row can travel to its own
    rank in one message. Rows start at multiples of 16 bytes but need not be adjacent. Implementations are frozen
    dataclasses: the object is its configuration.
    """

    @property
    @abstractmethod
    def granularity(self) -> int:
        """Chunks must be a multiple of this many elements."""

    @property
    def start_step(self) -> int:
        """The first step at which warm-up is over; before, gradients travel dense, or less compressed."""
        return 0

    def at(self, step: int | None) -> Compressor | None:
        """Return the compressor in force at a step (None: after all warm-up), None when everything travels dense."""
        return self if step is None or step >= self.start_step else None

    def stage(self, step: int) -> int:
        """Return the first of the neighbouring steps at which the same compressor is in force as at `step`."""
        return self.start_step if step >= self.start_step else 0

    def suits(self, shape: tuple[int, ...]) -> bool:
        """Return whether parameters of this shape (() when unknown) are worth compressing at all."""
        return True

    @property
    def sparse(self) -> bool:
        """Whether rows are short enough for every rank to send its own to all, which spares encoding the sum."""
        return False

    @property
    def throws_dice(self) -> bool:
        """Whether encoding rounds at random: otherwise in every step."""
        return False

    @property
    def inertia(self) -> Momentum | None:
        """The momentum that is applied before compression, in place of the optimizer's."""
        return None

    @property
    def norm_limit(self) -> float | None:
        """What the L2 norm of a buffer is clipped to before it is compressed, over the root of the ranks."""
        return None

    @property
    def error_bound(self) -> float:
        """The largest error of one encoding of an element, as a share of the largest element near it."""
        return 1.0

    @abstractmethod
    def payload_nbytes(self, chunk_numel: int) -> int:
        """Return the exact bytes of one row, a multiple of 16."""

    @abstractmethod
    def compress(
        self,
        values: Tensor,
        payload: Tensor,
        chunk_numel: int,
        scale: float,
        carry: Carry | None = None,
        dice: Dice = Dice(),
    ) -> None:
        """Encode p = `scale * values` (1-D, floating) into the rows of `payload`; elements past the end count as zero.

        With a carry (of as many elements as values), p = scale * values + decay * loss_scale * old, and
        new = (p - decoded p) / loss_scale. A non-finite p makes its decoded block non-finite, and `finite` false.
        """

    @abstractmethod
    def decompress(self, payload: Tensor, values: Tensor, chunk_numel: int) -> None:
        """Decode the rows of `payload` into `values` (1-D, any floating dtype, at most rows * chunk_numel)."""

    @abstractmethod
    def accumulate(self, payloads: Tensor, total: Tensor) -> None:
        """Set `total` (float32 [chunk_numel]) to the sum of the decoded rows, added in row order.

        The fixed order makes the bits of the sum equal wherever it is computed.
        """

    @abstractmethod
    def finite(self, payload: Tensor, chunk_numel: int) -> Tensor:
        """Return whether everything in the rows of `payload` decodes to finite values: bool, 0-d, on its device."""

    def recompress(
        self,
        payloads: Tensor,
        payload: Tensor,
        chunk_numel: int,
        numel: int,
        carry: Carry | None = None,
        dice: Dice = Dice(),
    ) -> None:
        """Encode the sum of the rows of `payloads`, whose first `numel` elements are real, into the row `payload`."""
        total = torch.empty(chunk_numel, dtype=torch.float32, device=payload.device)
        self.accumulate(payloads, total)
        self.compress(total[:numel], payload, chunk_numel, 1.0, carry, dice)
