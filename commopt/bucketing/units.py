"""The smallest parts that a plan can put together: gradients where DDP can be given other buckets, else its buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.feedback import Layout
from commopt.plan import Unit


@dataclass(frozen=True)
class Units:
    """Parts in the order in which DDP shows them; `single`: gradients rather than DDP's buckets."""

    names: tuple[tuple[str, ...], ...]
    nbytes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    single: bool

    @classmethod
    def of(cls, buckets: Sequence[Layout], parameters: Mapping[str, Tensor], *, single: bool) -> Units:
        """Return the units of a model whose DDP has `buckets`."""
        groups = [tuple(piece.name for piece in bucket.pieces) for bucket in buckets]
        if single:
            groups = [(name,) for group in groups for name in group]
        return cls(
            tuple(groups),
            tuple(sum(parameters[name].nbytes for name in group) for group in groups),
            tuple(parameters[group[0]].dtype for group in groups),
            single,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most bytes."""
        totals: Counter[torch.dtype] = Counter()
        for nbytes, dtype in zip(self.nbytes, self.dtypes, strict=True):
            totals[dtype] += nbytes
        return totals.most_common(1)[0][0]

    def untimed(self) -> tuple[Unit, ...]:
        """Return them as a plan has them, without the times at which they are ready."""
        return tuple(
            Unit(names, nbytes, 0.0, str(dtype))
            for names, nbytes, dtype in zip(self.names, self.nbytes, self.dtypes, strict=True)
        )


def are_exact(parameters: Mapping[str, Tensor]) -> bool:
    """Return whether DDP fills buckets of `parameters` one after the other: those of several dtypes interleave."""
    return len({(parameter.dtype, parameter.device) for parameter in parameters.values()}) == 1
