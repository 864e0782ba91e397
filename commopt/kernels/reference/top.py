"""The largest elements, exactly, without sorting them all."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from commopt.kernels.reference.residual import piece_numel

_SMALLEST_SAMPLE = 4096
_SAMPLED_ONE_IN = 101  # prime, so that no width of a matrix divides it
_MAGNITUDE_MASK = 0x7FFFFFFF  # a float32 without its sign: as an integer it grows with |x|; inf and then NaN on top


def top(p: Tensor, count: int) -> Tensor:
    """Return the indices, ascending int64, of the `count` largest |p| (float32, 1-D, at least as many).

    Equal ones come first where their index is lower. A sample tells above which threshold there are probably a few more
    than `count` elements; the choice among those is exact.
    """
    if count == p.numel():
        return torch.arange(count, device=p.device)
    candidates = p.new_empty(0, dtype=torch.int64)
    for threshold in _thresholds(p, count):
        candidates = _at_least(p, threshold)
        if candidates.numel() >= count:
            return _top_of(p, candidates, count)
    # There are not as many other than zero. The zeros still needed lie among the first `count` elements.
    zeros = (p[:count] == 0).nonzero().view(-1)[: count - candidates.numel()]
    return torch.cat((candidates, zeros)).sort().values


def _magnitudes(p: Tensor) -> Tensor:
    return p.view(torch.int32).bitwise_and(_MAGNITUDE_MASK)


def _thresholds(p: Tensor, count: int) -> Iterator[int]:
    """Yield ever lower thresholds, the last of which is that of the smallest number other than zero."""
    stride = min(max(p.numel() // _SMALLEST_SAMPLE, 1), _SAMPLED_ONE_IN)
    sample = _magnitudes(p[::stride].contiguous())
    expected = -(-count // stride)
    rank = expected if stride == 1 else expected + int(3 * expected**0.5) + 8  # three deviations of a random sample's
    while rank <= sample.numel():
        threshold = int(torch.topk(sample, rank, sorted=False).values.min())
        if threshold <= 1:
            break
        yield threshold
        rank *= 2
    yield 1


def _at_least(p: Tensor, threshold: int) -> Tensor:
    """Return where magnitudes are `threshold` or more, ascending."""
    step = min(piece_numel(p.device), p.numel())
    magnitudes = torch.empty(step, dtype=torch.int32, device=p.device)
    large = torch.empty(step, dtype=torch.bool, device=p.device)
    bits = p.view(torch.int32)
    found = []
    for begin in range(0, p.numel(), step):
        part = bits[begin : begin + step]
        torch.bitwise_and(part, _MAGNITUDE_MASK, out=magnitudes[: part.numel()])
        torch.ge(magnitudes[: part.numel()], threshold, out=large[: part.numel()])
        found.append(large[: part.numel()].nonzero().view(-1).add_(begin))
    return torch.cat(found)


def _top_of(p: Tensor, candidates: Tensor, count: int) -> Tensor:
    """Return those of the ascending indices `candidates` where |p| is among the `count` largest of all of them."""
    magnitudes = _magnitudes(p.index_select(0, candidates))
    smallest = torch.topk(magnitudes, count, sorted=False).values.min()
    above, equal = magnitudes > smallest, magnitudes == smallest
    return candidates[above | (equal & (equal.cumsum(0) <= count - above.sum()))]
