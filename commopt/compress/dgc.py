# SPDX-License-Identifier: Apache-2.0
"""Deep Gradient Compression: the largest elements only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from commopt.compress.base import Candidates, CodingWork, Compressor, KernelCost
from commopt.compress.quantize import check_choice
from commopt.errors import ConfigurationError
from commopt.kernels import sparse
from commopt.kernels.codec import Encoding
from commopt.kernels.sparse import SparseRow


@dataclass(frozen=True, repr=False)
class DGC(Compressor):
    """Send the largest elements of each gradient, and keep the others in the residual (arXiv 1712.01887).

    This is top-k with error feedback and the paper's warm-up, and goes with any optimizer. The paper's momentum on each
    rank is not implemented: trainings learned no better with it than with the optimizer's.

    density: the share of elements that is sent, in (0, 1]; of a chunk of n elements exactly ceil(density n),
    min_elements: but no fewer than this of a message, or their share of each of its chunks: for messages so small that
        they take as long as an empty one.
    warmup: (steps, density) one after the other before `density` is in force; ((100, 0.25), (100, 0.0625)) for 200.
    value_dtype: how values travel: torch.bfloat16, torch.float16 (more exact, but inf above 65504, loss scale
        included), or torch.float32. The residual gets what rounding takes away, too.

    Tensors of one dimension travel dense. Raises ConfigurationError.
    """

    density: float = 0.001
    warmup: tuple[tuple[int, float], ...] = ()
    value_dtype: torch.dtype = torch.bfloat16
    min_elements: int = 1

    sparse: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_density("density", self.density)
        check_choice("DGC", "value_dtype", self.value_dtype, (torch.bfloat16, torch.float16, torch.float32))
        if type(self.min_elements) is not int or self.min_elements < 1:
            raise ConfigurationError(f"DGC(min_elements={self.min_elements!r}) must be a whole number from 1 on")
        object.__setattr__(self, "warmup", _checked_warmup(self.warmup))

    # ------------------------------------------------------------------------------------------ warm-up

    @property
    def start_step(self) -> int:
        """The first step of the final density."""
        return sum(steps for steps, _ in self.warmup)

    def at(self, step: int | None) -> Compressor | None:
        """Return the one of the density in force; there always is some."""
        if step is None or step >= self.start_step:
            return self
        return replace(self, density=self._stage(step)[1], warmup=())

    def phase(self, step: int) -> int:
        """Return the first step of the density in force."""
        return self._stage(step)[0]

    def _stage(self, step: int) -> tuple[int, float]:
        begin = 0
        for steps, density in self.warmup:
            if step < begin + steps:
                return begin, density
            begin += steps
        return begin, self.density

    def of_chunk(self, chunks: int) -> Compressor:
        """Return the one whose `min_elements` are a chunk's share of those of the message."""
        return replace(self, min_elements=ceil(self.min_elements / chunks))

    def should_compress(self, shape: tuple[int, ...]) -> bool:
        """Not one dimension: biases and the weights of norms are few and matter at once."""
        return len(shape) != 1

    # ------------------------------------------------------------------------------------------ payloads

    def nan_reach(self, chunk_numel: int) -> int:
        """Return the whole chunk: which elements are sent depends on all of them."""
        return chunk_numel

    def payload_nbytes(self, chunk_numel: int) -> int:
        """Return the bytes of so many values and their places."""
        return self._row(chunk_numel).nbytes

    def compress(self, values: Tensor, payload: Tensor, encoding: Encoding) -> None:
        """Choose the largest, as kernels.sparse.select says."""
        sparse.select(self._row(encoding.chunk_numel), values, payload, encoding.scale, encoding.residual)

    def decompress(self, payload: Tensor, values: Tensor, chunk_numel: int) -> None:
        """Put the values in their places, zeros elsewhere."""
        sparse.scatter(self._row(chunk_numel), payload, values)

    def accumulate(self, payloads: Tensor, total: Tensor) -> None:
        """Add values in their places, row by row."""
        sparse.accumulate(self._row(total.numel()), payloads, total)

    def finite(self, payload: Tensor, chunk_numel: int) -> Tensor:
        """Look at the values."""
        return sparse.finite(self._row(chunk_numel), payload)

    # ---------------------------------------------------------------------- for the tuner and simulator

    @classmethod
    def candidates(cls) -> Candidates[Compressor]:
        """Return 5, 1 and 0.1 % of the elements; the error of 1 % is the usual limit."""
        return Candidates("dgc", tuple(cls(density) for density in (0.05, 0.01, 0.001)), usual=1)

    def kernel_costs(self, ranks: int) -> dict[CodingWork, KernelCost]:
        """Return the cost of its work: values and residual in, p out and read again; the selected few hardly count."""
        value, wire = 4, self.payload_nbytes(2**20) / 2**20
        encode = KernelCost(4 * value + wire, 9)
        # Between two ranks both messages are decoded into one result; more ranks have servers for all but the shortest.
        decode = KernelCost(wire + (value / ranks if ranks == 2 else value), 1)
        return {"encode": encode, "decode": decode, "recode": KernelCost(wire + (value + encode.nbytes) / ranks, 10)}

    def squared_error(self, values: Tensor) -> float:
        """Return the error for a parameter of a long message: min_elements count for the whole message."""
        alone = DGC(self.density, value_dtype=self.value_dtype)
        return super(DGC, alone).squared_error(values)

    def _row(self, chunk_numel: int) -> SparseRow:
        return SparseRow.of(chunk_numel, self.density, self.value_dtype, self.min_elements)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_density(name: str, density: object) -> None:
    if not _is_number(density) or not 0 < density <= 1:  # type: ignore[operator]  # _is_number
        raise ConfigurationError(
            f"DGC({name}={density!r}) must be above 0 and at most 1, the share of elements to send, for example 0.001"
        )


def _checked_warmup(warmup: object) -> tuple[tuple[int, float], ...]:
    """Return it as tuples, which can be hashed."""
    try:
        stages = tuple((steps, density) for steps, density in warmup)  # type: ignore[attr-defined]  # caught
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"DGC(warmup={warmup!r}) must be pairs of steps and density, for example ((100, 0.25), (100, 0.0625))"
        ) from None
    for steps, density in stages:
        if type(steps) is not int or steps < 1:
            raise ConfigurationError(f"DGC(warmup={warmup!r}) has a stage of {steps!r} steps; whole numbers from 1 on")
        _check_density("warmup density", density)
    return stages
