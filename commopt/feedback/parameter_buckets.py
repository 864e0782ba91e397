# SPDX-License-Identifier: Apache-2.0
"""Parameters in buckets, as LocalSGD and the parameter server send them: cut up alike on all ranks, and put back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from commopt.errors import ConfigurationError
from commopt.feedback.layout import Layout, Piece

BUCKET_NBYTES = 25 * 2**20  # the cap of DDP's buckets

Named = Mapping[str, Tensor]


@dataclass(frozen=True)
class ParameterBucket:
    """Tensors of one device that are sent in one buffer of `dtype`.

    pieces: of which parameter a tensor is a piece, by name, where it is not a whole one.
    """

    tensors: Named
    dtype: torch.dtype
    device: torch.device
    pieces: Mapping[str, Piece]

    @cached_property
    def layout(self) -> Layout:
        """The layout of the buffer."""
        whole = (Piece(name, 0, tensor.numel(), tuple(tensor.shape)) for name, tensor in self.tensors.items())
        return Layout(tuple(self.pieces.get(each.name, each) for each in whole))

    def values(self, *, copy: bool) -> Tensor:
        """Return the values as one buffer; if it need be no copy, those of one tensor where they are."""
        tensors = [tensor.detach() for tensor in self.tensors.values()]
        if not copy and len(tensors) == 1 and tensors[0].dtype == self.dtype and tensors[0].is_contiguous():
            return tensors[0].view(-1)
        return torch.cat([each.reshape(-1).to(self.dtype) for each in tensors])

    def parts(self, values: Tensor) -> dict[str, Tensor]:
        """Return each tensor's part of a buffer, in its shape."""
        parted = values.split([tensor.numel() for tensor in self.tensors.values()])
        return {name: part.view(each.shape) for (name, each), part in zip(self.tensors.items(), parted, strict=True)}

    def put(self, values: Tensor) -> None:
        """Set the tensors to the values of a buffer."""
        for tensor, part in zip(self.tensors.values(), self.parts(values).values(), strict=True):
            tensor.detach().copy_(part)

    def add(self, values: Tensor, share: float) -> None:
        """Add a share of a buffer to the tensors, each rounded once."""
        for tensor, part in zip(self.tensors.values(), self.parts(values).values(), strict=True):
            tensor.detach().copy_(torch.add(tensor.detach(), part, alpha=share))


def parameter_buckets(tensors: Named, pieces: Mapping[str, Piece]) -> list[ParameterBucket]:
    """Cut up tensors to be averaged, alike on all ranks: one device and dtype each, no longer than a bucket of DDP.

    16-bit tensors travel as float32, rounded once: gradients stand rounding in every sum better than weights do.
    """
    buckets: list[ParameterBucket] = []
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((torch.promote_types(tensor.dtype, torch.float32), tensor.device), {})[name] = tensor
    for (dtype, device), alike in kinds.items():
        nbytes, part = 0, dict[str, Tensor]()
        for name, tensor in alike.items():
            nbytes += tensor.numel() * dtype.itemsize
            if part and nbytes > BUCKET_NBYTES:
                buckets.append(ParameterBucket(part, dtype, device, pieces))
                nbytes, part = tensor.numel() * dtype.itemsize, {}
            part[name] = tensor
        buckets.append(ParameterBucket(part, dtype, device, pieces))
    return buckets


def fragments_of(tensors: Named, count: int) -> Sequence[Sequence[str]]:
    """Cut tensors, in their order, into `count` fragments of about as many bytes, each of one at least; return names.

    Blocks stay whole where there are as many: parameters in the same entry of a list of modules ("layers.3.").
    Raises ConfigurationError when there are fewer tensors.
    """
    if tensors and len(tensors) < count:
        raise ConfigurationError(
            f"LocalSGD(fragments={count}) is more than the model has parameters, {len(tensors)}; use fewer fragments"
        )
    blocks = [list(names) for _, names in groupby(tensors, _block_of)]
    units = blocks if len(blocks) >= count else [[name] for name in tensors]
    sizes = [sum(tensors[name].numel() * tensors[name].element_size() for name in unit) for unit in units]
    fragments: list[list[str]] = [[] for _ in range(count)]
    total, done, number = sum(sizes), 0, 0
    for left, unit, nbytes in zip(range(len(units), 0, -1), units, sizes, strict=True):
        # The next fragment begins where its share does, or where each later fragment needs one of the remaining units.
        ends = 2 * done + nbytes > 2 * total * (number + 1) // count or left < count - number
        if fragments[number] and number + 1 < count and ends:
            number += 1
        fragments[number] += unit
        done += nbytes
    return fragments


def _block_of(name: str) -> str:
    """Return the name up to its first index, all of it where there is none."""
    found = re.match(r"(?:.*?\.)?[0-9]+(?=\.)", name)
    return found[0] if found else name
