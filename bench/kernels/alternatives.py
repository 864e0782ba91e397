"""What others offer for jobs of the kernels: torch's own operations, its compiler, and bitsandbytes."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

from bench.kernels.case import Absent, Contender
from commopt.kernels.codec import TINY

TOPK = "torch.topk route"


def int8_blocks(values: Tensor, residual: Tensor, scale: float, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (int8 [blocks, block]), scales ([blocks, 1]) and the new residual, as anybody would write it."""
    p = (values * scale + residual).view(-1, block)
    steps = p.abs().amax(1, keepdim=True).clamp_min(TINY) / 127
    codes = (p / steps).round()
    return codes.to(torch.int8), steps, p - codes * steps


def compiled_int8_blocks(values: Tensor, residual: Tensor, scale: float, block: int) -> Contender:
    """Return torch.compile's version of `int8_blocks`, of as many whole blocks as there are."""
    numel = values.numel() // block * block
    compiled = torch.compile(int8_blocks, dynamic=False)
    return Contender("torch.compile", partial(compiled, values[:numel], residual[:numel], scale, block))


def bitsandbytes_int8(values: Tensor, block: int) -> Contender | Absent:
    """Return bitsandbytes' 8-bit block quantization: other levels, no scale, no residual, and as many bytes."""
    name = "bitsandbytes"
    try:
        quantize = import_module("bitsandbytes.functional").quantize_blockwise
    except Exception as error:  # where it is broken it raises whatever its libraries raise
        return Absent(name, f"{type(error).__name__}: {error}")
    return Contender(name, partial(quantize, values, blocksize=block))


def topk_route(values: Tensor, old: Tensor, new: Tensor, sent: Tensor, scale: float) -> Tensor:
    """Put the largest elements of old + scale * values into `sent`, the others into `new`; return where they were."""
    torch.add(old, values, alpha=scale, out=new)
    chosen = torch.topk(new.abs(), sent.numel(), sorted=False).indices
    sent.copy_(new.gather(0, chosen))
    new.index_fill_(0, chosen, 0.0)
    return chosen


def hook_orthogonalize(factors: Tensor, out: Tensor) -> None:
    """Do what torch's PowerSGD hook does, which is in place; a copy of so few bytes takes next to nothing."""
    _orthogonalize(out.copy_(factors))
