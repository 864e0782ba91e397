# SPDX-License-Identifier: Apache-2.0
"""The contract of a compressor: values in, payload of fixed shape out, and back. It never communicates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from math import ceil, inf, isfinite
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from commopt.concise_repr import ConciseRepr
from commopt.kernels.codec import Codec, Encoding
from commopt.kernels.finite import all_finite

T = TypeVar("T")
CodingWork = Literal["encode", "decode", "recode"]

_SAMPLE_NUMEL = 65_536
_RUN_NUMEL = 4096


@dataclass(frozen=True)
class Candidates(Generic[T]):
    """The strengths of one family of compression that a tuner may try.

    family: its name in `auto(allow=...)`.
    strengths: the weakest first.
    usual: the place of the one to try if how well they learn was not measured.
    feedback: whether a compressor's residuals are kept.
    """

    family: str
    strengths: tuple[T, ...]
    usual: int = 0
    feedback: bool = True


@dataclass(frozen=True)
class KernelCost:
    """The cost of some work on a GPU.

    nbytes: memory traffic, in bytes for each value.
    kernels: number of launches.
    """

    nbytes: float
    kernels: int


class Compressor(ConciseRepr, ABC):
    """Turns chunks of values into payload rows that can be exchanged, summed and decoded.

    A payload is uint8 [rows, payload_nbytes(chunk_numel)]: one row per chunk, so that each row can travel to its own
    rank in one message. Rows start at multiples of 16 bytes but need not be adjacent. Implementations are frozen
    dataclasses: the object is its configuration. Three methods have to be written; everything else has a default.
    """

    @abstractmethod
    def payload_nbytes(self, chunk_numel: int) -> int:
        """Return the exact bytes of one row, a multiple of 16."""

    @abstractmethod
    def compress(self, values: Tensor, payload: Tensor, encoding: Encoding) -> None:
        """Encode p = `scale * values` (1-D, floating) into the rows of `payload`; elements past the end count as zero.

        With a residual (of as many elements as values), p = scale * values + decay * loss_scale * old, and
        new = (p - decoded p) / loss_scale. A non-finite p is non-finite when decoded (`nan_reach`), and `finite` false.
        """

    @abstractmethod
    def decompress(self, payload: Tensor, values: Tensor, chunk_numel: int) -> None:
        """Decode the rows of `payload` into `values` (1-D, any floating dtype, at most rows * chunk_numel)."""

    # --------------------------------------------------------------- defaults that kernels can do faster

    def accumulate(self, payloads: Tensor, total: Tensor) -> None:
        """Set `total` (float32 [chunk_numel]) to the sum of the decoded rows, added in row order.

        The fixed order makes the bits of the sum equal wherever it is computed.
        """
        row = torch.empty_like(total)
        self.decompress(payloads[:1], total, total.numel())
        for number in range(1, len(payloads)):
            self.decompress(payloads[number : number + 1], row, total.numel())
            total.add_(row)

    def recompress(self, payloads: Tensor, payload: Tensor, numel: int, encoding: Encoding) -> None:
        """Encode the sum of the rows of `payloads`, whose first `numel` elements are real, into the row `payload`.

        The sum is not scaled: `encoding.scale` is 1.
        """
        total = torch.empty(encoding.chunk_numel, dtype=torch.float32, device=payload.device)
        self.accumulate(payloads, total)
        self.compress(total[:numel], payload, encoding)

    def finite(self, payload: Tensor, chunk_numel: int) -> Tensor:
        """Return whether everything in the rows of `payload` decodes to finite values: bool, 0-d, on its device."""
        values = torch.empty(len(payload) * chunk_numel, dtype=torch.float32, device=payload.device)
        self.decompress(payload, values, chunk_numel)
        return all_finite(values)

    # ---------------------------------------------------------------------------------- its properties

    @property
    def granularity(self) -> int:
        """Chunks must be a multiple of this many elements."""
        return 1

    @property
    def error_bound(self) -> float:
        """The largest error of one encoding of an element, as a share of the largest element near it."""
        return 1.0

    def nan_reach(self, chunk_numel: int) -> int:
        """Return how far an element's value, a NaN for instance, shows: in its own block of so many elements only.

        Blocks are counted from the beginning of the chunk. After a NaN at least one element of its block decodes to
        something that is not finite, and no other block changes.
        """
        return self.granularity

    exact: ClassVar[bool] = False
    """Whether float32 values survive as they are."""

    sparse: ClassVar[bool] = False
    """Whether rows may be so short that every rank sends its own to all, which spares encoding the sum."""

    @cached_property
    def stochastic(self) -> bool:
        """Whether encoding rounds at random: otherwise in every step."""
        return False

    @property
    def codec_without_zero(self) -> Codec | None:
        """The codec of its payload where that has no value for zero, but a sign bit; None where zeros stay zeros.

        An aggregator then decodes the elements that no rank has ever touched to zero itself.
        """
        return None

    def of_chunk(self, chunks: int) -> Compressor:
        """Return the compressor of each of the `chunks` chunks of a message: itself, unless it counts by the message.

        Its repr is no name of its work.
        """
        return self

    def should_compress(self, shape: tuple[int, ...]) -> bool:
        """Return whether parameters of this shape (() when unknown) are worth compressing at all."""
        return True

    # ------------------------------------------------------------------------------------------ warm-up

    @property
    def start_step(self) -> int:
        """The first step at which warm-up is over; before, gradients travel dense, or less compressed."""
        return 0

    def at(self, step: int | None) -> Compressor | None:
        """Return the compressor in force at a step (None: after all warm-up), None when everything travels dense."""
        return self if step is None or step >= self.start_step else None

    def phase(self, step: int) -> int:
        """Return the first of the neighbouring steps at which the same compressor is in force as at `step`."""
        return self.start_step if step >= self.start_step else 0

    # ---------------------------------------------------------------------- for the tuner and simulator

    @classmethod
    def candidates(cls) -> Candidates[Compressor] | None:
        """Return the strengths a tuner may try; by default the class with its defaults, under its lower-case name."""
        made: Any = cls
        needed = [field for field in fields(made) if field.default is field.default_factory is MISSING]
        return None if needed else Candidates(cls.__name__.lower(), (made(),))

    def kernel_costs(self, ranks: int) -> dict[CodingWork, KernelCost]:
        """Return the cost of its work, with residuals; one kernel each by default. ranks: rows of a sum."""
        wire = self.payload_nbytes(2**20) / 2**20
        value, residuals = 4, 2 * 4
        return {
            "encode": KernelCost(value + residuals + wire, 1),
            "decode": KernelCost(wire + value, 1),
            "recode": KernelCost(wire + (residuals + wire) / ranks, 1),  # the sum never leaves the registers
        }

    def squared_error(self, values: Tensor) -> float:
        """Return the squared L2 norm of the error of one encoding of a parameter's `values` (1-D), without feedback.

        Measured on up to 65,536 of them: 16 runs of whole blocks, evenly spread. inf where they decode to no number.
        """
        numel, step = values.numel(), self.granularity
        run = max(_RUN_NUMEL // step, 1) * step
        if numel > _SAMPLE_NUMEL:
            runs = _SAMPLE_NUMEL // run
            values = values[: runs * (numel // runs)].view(runs, numel // runs)[:, :run].reshape(-1)
        values = values.float()
        chunk_numel = ceil(values.numel() / step) * step
        payload = torch.empty(1, self.payload_nbytes(chunk_numel), dtype=torch.uint8, device=values.device)
        decoded = torch.empty_like(values)
        self.compress(values, payload, Encoding(chunk_numel))
        self.decompress(payload, decoded, chunk_numel)
        error = float(torch.linalg.vector_norm(values - decoded, dtype=torch.float64)) ** 2
        return error * numel / max(values.numel(), 1) if isfinite(error) else inf
