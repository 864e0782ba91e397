# SPDX-License-Identifier: Apache-2.0
"""Payloads that are the values themselves: rounded to 16 bits, or float32 as it is."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from commopt.compress.base import Candidates, CodingWork, Compressor, KernelCost
from commopt.compress.quantize import check_choice
from commopt.errors import ConfigurationError
from commopt.kernels.codec import Encoding
from commopt.kernels.finite import all_finite
from commopt.kernels.loader import cpu_kernels
from commopt.kernels.residual import round_with_residual

_ROW_ALIGNMENT = 16


class Plain(Compressor):
    """Every element travels as one number of `wire_dtype`."""

    @property
    @abstractmethod
    def wire_dtype(self) -> torch.dtype:
        """The format of the payload."""

    @property
    def granularity(self) -> int:
        """16 bytes, so that every row starts aligned for vector loads."""
        return _ROW_ALIGNMENT // self.wire_dtype.itemsize

    def nan_reach(self, chunk_numel: int) -> int:
        """Return 1: each element is rounded by itself."""
        return 1

    @property
    def error_bound(self) -> float:
        """Half a unit in the last place of the element itself, if it is no denormal number."""
        return torch.finfo(self.wire_dtype).eps / 2

    def payload_nbytes(self, chunk_numel: int) -> int:
        """Return the bytes of the numbers."""
        return chunk_numel * self.wire_dtype.itemsize

    def compress(self, values: Tensor, payload: Tensor, encoding: Encoding) -> None:
        """Round every element."""
        begin, scale, residual = 0, encoding.scale, encoding.residual
        for row in self._rows(payload):
            end = min(begin + row.numel(), values.numel())
            own = None if residual is None else residual.cut(begin, end)
            if self.stochastic:
                from commopt.kernels import quantize  # few need it

                quantize.round_stochastically(
                    values[begin:end], row[: end - begin], scale, own, encoding.rng_key, begin
                )
            else:
                round_with_residual(values[begin:end], row[: end - begin], scale, own)
            row[end - begin :].zero_()
            begin = end

    @torch.no_grad()
    def decompress(self, payload: Tensor, values: Tensor, chunk_numel: int) -> None:
        """Convert every element."""
        begin = 0
        for row in self._rows(payload):
            end = min(begin + row.numel(), values.numel())
            values[begin:end].copy_(row[: end - begin])
            begin = end

    def accumulate(self, payloads: Tensor, total: Tensor) -> None:
        """Add rows as they are, in their order."""
        rows = payloads.view(self.wire_dtype)
        cpu = cpu_kernels() if rows.dtype == torch.bfloat16 and rows.device.type == "cpu" else None
        if cpu is not None:
            cpu.sum_bfloat16(rows.data_ptr(), rows.stride(0), len(rows), len(total), total.data_ptr())
            return
        total.copy_(rows[0])
        for row in rows[1:]:
            total.add_(row)

    def finite(self, payload: Tensor, chunk_numel: int) -> Tensor:
        """Look at the numbers."""
        return all_finite(payload.view(self.wire_dtype))

    def kernel_costs(self, ranks: int) -> dict[CodingWork, KernelCost]:
        """Return the cost of its work; a sum stays in memory while the rows are added to it, one after the other."""
        value, wire = 4, self.wire_dtype.itemsize
        return {
            "encode": KernelCost(value + wire, 1),
            "decode": KernelCost(wire + value, 1),
            "recode": KernelCost(wire + 2 * value, ranks + 1),
        }

    def _rows(self, payload: Tensor) -> list[Tensor]:
        """Return the rows as numbers; those without gaps between them count as one."""
        if payload.is_contiguous():
            return [payload.view(-1).view(self.wire_dtype)]
        return list(payload.view(self.wire_dtype))


@dataclass(frozen=True, repr=False)
class Cast(Plain):
    """Round to bfloat16 or float16 for the wire, add up in float32.

    bfloat16 keeps float32's range and 8 bits of precision; float16 keeps 11 bits and overflows to inf above 65504,
    which every rank then sees.

    rounding: "stochastic" rounds to bfloat16 up or down at random, so that the mean over steps is exact without
        feedback; one step is less exact than with "nearest". Chance makes nothing infinite: what is beyond the largest
        bfloat16 is rounded to nearest.
    """

    dtype: torch.dtype = torch.bfloat16
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ConfigurationError(f"Cast({self.dtype}) is not a 16-bit format; use torch.bfloat16 or torch.float16")
        check_choice("Cast", "rounding", self.rounding, ("nearest", "stochastic"))
        if self.stochastic and self.dtype != torch.bfloat16:
            raise ConfigurationError(
                f"Cast({self.dtype}, rounding='stochastic') does not exist; use torch.bfloat16 or rounding='nearest'"
            )

    @cached_property
    def wire_dtype(self) -> torch.dtype:
        """The 16-bit format."""
        return self.dtype

    @cached_property
    def stochastic(self) -> bool:
        """With rounding="stochastic"."""
        return self.rounding == "stochastic"

    @property
    def error_bound(self) -> float:
        """Half a unit in the last place of the element itself, if it is no denormal number; or, by chance, a whole."""
        return super().error_bound * (2 if self.stochastic else 1)

    @classmethod
    def candidates(cls) -> Candidates[Compressor]:
        """Return bfloat16, which needs no residuals."""
        return Candidates("bf16", (cls(torch.bfloat16),), feedback=False)


@dataclass(frozen=True, repr=False)
class Exact(Plain):
    """Send float32: aggregators use it for dense tensors beside compressed ones. Its residual is always zero."""

    exact: ClassVar[bool] = True

    @cached_property
    def wire_dtype(self) -> torch.dtype:
        """Always float32."""
        return torch.float32
