# SPDX-License-Identifier: Apache-2.0
"""Checksums of tensors: sums of their words of 32 bits, each times an odd number of 64 bits of its own, modulo 2**64.

A change of one word always changes the sum, as an odd factor loses no bit. So does any other change, a permutation too,
but for a chance of 2**-32 or less: a difference of two words has at most 31 zeros at its end, so 32 bits of the factors
count. Products of a chunk stay in a cache of the device, so memory is read once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

WORD_NBYTES = 4
_CHUNKS = {"cpu": 2**19, "cuda": 2**21}  # words whose products a cache holds
_SMALL = 2**14  # words; shorter tensors are joined first, for each kernel costs the host some microseconds

# Odd, without a pattern: of Weyl sequences and mixers of 64 bits, as signed numbers.
_STEP, _MIX, _OTHER = -7046029254386353131, -4658895280553007687, -7723592293110705685


def checksum(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a checksum of the bits of `tensors`, in their order: int64 [1] on `device`. The host does not wait.

    Shapes do not count, and another type of device has other checksums. Needs up to 32 MiB for a moment, on a CPU 8.
    """
    runs: dict[torch.device, list[Tensor]] = {}
    for words in _words(tensors):
        runs.setdefault(words.device, []).append(words)
    total = torch.full((1,), _MIX, dtype=torch.int64, device=device)  # zeros have one too
    if runs:
        sums = torch.cat([_sums(alike).to(device) for alike in runs.values()])
        total += (sums * _weights(len(sums), device, _OTHER)).sum()
    return total


def _sums(runs: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum of each chunk of `runs`, which are int32 [n] on one device."""
    device = runs[0].device
    chunks = [chunk for words in runs for chunk in words.split(_CHUNKS[device.type])]
    weights = _weights(max(map(len, chunks)), device, _STEP)
    products, sums = torch.empty_like(weights), weights.new_empty(len(chunks))
    for number, chunk in enumerate(chunks):
        torch.mul(chunk, weights[: len(chunk)], out=products[: len(chunk)])
        torch.sum(products[: len(chunk)], 0, out=sums[number])
    return sums


def _weights(count: int, device: torch.device, step: int) -> Tensor:
    """Return `count` odd numbers, the same on all devices."""
    numbers = torch.arange(1, count + 1, dtype=torch.int64, device=device) * step
    numbers ^= numbers >> 31
    numbers *= _MIX
    numbers ^= numbers >> 29
    return numbers | 1


def _words(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the bits of tensors as int32 [n]: of long ones where they are, of the others and of odd ends together."""
    small: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        flat = as_bytes(tensor)
        whole = len(flat) - len(flat) % WORD_NBYTES
        if whole < _SMALL * WORD_NBYTES or flat.storage_offset() % WORD_NBYTES:
            whole = 0
        if whole:
            yield flat[:whole].view(torch.int32)
        if whole < len(flat):
            small.setdefault(flat.device, []).append(flat[whole:])
    for device, parts in small.items():
        filling = -sum(map(len, parts)) % WORD_NBYTES
        yield torch.cat([*parts, torch.zeros(filling, dtype=torch.uint8, device=device)]).view(torch.int32)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as uint8 [n]: where they are if they are dense there, else of a copy.

    It is to be `comparable`: what a quantized tensor returns for its bits ends the process.
    """
    # A view that conjugates or negates as it is read has the same bits as what it is a view of.
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # a view of a single element may keep any stride


def comparable(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose values are what lies in their memory: of others there are no bits to compare, or copy.

    Those are sparse, nested, MKL-DNN and quantized ones, those of subclasses that hold other tensors or none (fake
    ones), those on other devices than CPUs and CUDA's (meta), and those without memory, not yet or no more.
    """
    return {name: tensor for name, tensor in named.items() if not is_lazy(tensor) and _is_plain(local(tensor))}


def _is_plain(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type not in _CHUNKS:
        return False
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


def local(tensor: Tensor) -> Tensor:
    """Return a tensor, of a DTensor this rank's part."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()
