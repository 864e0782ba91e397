# SPDX-License-Identifier: Apache-2.0
"""One job of a kernel: who can do it, the bytes it must move, and the target it is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

from commopt.kernels.codec import TINY, ErrorFeedback


@dataclass(frozen=True)
class Figures:
    """What was measured of a case: its kernel, the copy beside it, and everything else, in microseconds of a call."""

    nbytes: int
    copy_gbps: float
    kernel_us: float
    others_us: Mapping[str, float]


@dataclass(frozen=True)
class Verdict:
    """Whether a kernel achieves something; `found` and `met` are None where what it is compared with is missing."""

    what: str
    relation: str
    limit: float
    found: float | None
    met: bool | None


@dataclass(frozen=True)
class Target:
    """A figure that a case's kernel is to reach."""

    what: str
    relation: Literal[">=", "<="]
    limit: float
    find: Callable[[Figures], float | None]

    def judge(self, figures: Figures) -> Verdict:
        """Compare what was measured with the limit."""
        found = self.find(figures)
        met = None if found is None else found >= self.limit if self.relation == ">=" else found <= self.limit
        return Verdict(self.what, self.relation, self.limit, found, met)


def of_copy(least: float) -> Target:
    """Ask for a share of the rate of a device copy."""
    return Target("of copy", ">=", least, lambda figures: _copy_us(figures, figures.nbytes) / figures.kernel_us)


def times_copy_of(most: float, nbytes: int, what: str) -> Target:
    """Ask for at most `most` times as long as a device copy moves `nbytes` bytes, which are `what`."""
    return Target(f"times a copy of {what}", "<=", most, lambda figures: figures.kernel_us / _copy_us(figures, nbytes))


def microseconds(most: float) -> Target:
    """Ask for a time."""
    return Target("us", "<=", most, lambda figures: figures.kernel_us)


def times_faster(least: float, than: str) -> Target:
    """Ask for a ratio to the time of another implementation."""

    def find(figures: Figures) -> float | None:
        return figures.others_us[than] / figures.kernel_us if than in figures.others_us else None

    return Target(f"times faster than {than}", ">=", least, find)


def _copy_us(figures: Figures, nbytes: int) -> float:
    return nbytes / figures.copy_gbps / 1000


KERNEL, REFERENCE = "kernel", "reference"

SCALE = 0.5
"""What values are multiplied by: with 1 there would be nothing to compute."""


@dataclass(frozen=True)
class Implementation:
    """Somebody who does a case's job, with the arguments for it."""

    name: str
    call: Callable[[], object]
    overwritten: tuple[Tensor, ...] = ()
    """What a call writes from end to end, whatever was there before."""


@dataclass(frozen=True)
class Case:
    """A kernel with its arguments; `variant` tells calls of one kernel apart."""

    name: str
    variant: str
    kernel: Callable[..., object]
    """The wrapper in commopt.kernels, which on the CPU is the reference."""
    reference: Callable[..., object]
    arguments: tuple[Any, ...]
    read: tuple[Tensor, ...]
    written: tuple[Tensor, ...]
    others: tuple[Implementation, ...] = ()
    targets: tuple[Target, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes read and written if each goes to or from memory once."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.read, *self.written))

    @property
    def overwritten(self) -> tuple[Tensor, ...]:
        """What is written and not read before."""
        return tuple(tensor for tensor in self.written if all(tensor is not other for other in self.read))

    def implementations(self, device: torch.device) -> list[Implementation]:
        """Return what there is to be timed on this device."""
        own = {REFERENCE: self.reference}
        if device.type == "cuda":
            own = {KERNEL: self.kernel, **own}
        calls = [Implementation(name, partial(each, *self.arguments), self.overwritten) for name, each in own.items()]
        return [*calls, *self.others]


def rows(count: int, nbytes: int, device: torch.device) -> Tensor:
    """Return so many empty rows of payload."""
    return torch.zeros(count, nbytes, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Setting:
    """What cases are made for: about `numel` elements of gradient, rows from `peers` ranks, and a device."""

    numel: int
    peers: int
    device: torch.device

    @cached_property
    def values(self) -> Tensor:
        """A gradient, float32 [numel]."""
        return self.random(self.numel)

    @cached_property
    def residual(self) -> ErrorFeedback:
        """A residual for it, smaller than it is."""
        return ErrorFeedback(self.random(self.numel) / 8, torch.empty(self.numel, device=self.device))

    def random(self, *shape: int) -> Tensor:
        """Return normal values, float32, the next ones of this setting."""
        return torch.randn(*shape, generator=self._generator, device=self.device)

    @cached_property
    def _generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(0)


@dataclass(frozen=True)
class Family:
    """A title, the names that its cases have, and how they are made; what one case needs may be the work of another."""

    title: str
    names: tuple[str, ...]
    build: Callable[[Setting], Iterator[Case]]


TOPK = "torch.topk route"


def int8_blocks(values: Tensor, residual: Tensor, scale: float, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (int8 [blocks, block]), scales ([blocks, 1]) and the new residual, as anybody would write it."""
    p = (values * scale + residual).view(-1, block)
    steps = p.abs().amax(1, keepdim=True).clamp_min(TINY) / 127
    codes = (p / steps).round()
    return codes.to(torch.int8), steps, p - codes * steps


def compiled_int8_blocks(values: Tensor, residual: Tensor, scale: float, block: int) -> Implementation:
    """Return torch.compile's version of `int8_blocks`, of as many whole blocks as there are."""
    numel = values.numel() // block * block
    compiled = torch.compile(int8_blocks, dynamic=False)
    return Implementation("torch.compile", partial(compiled, values[:numel], residual[:numel], scale, block))


def torchao_int8_blocks(values: Tensor, block: int) -> Implementation:
    """Return torchao's quantization of whole blocks: codes and scales of `values`, no factor and no residual."""
    blocks = values[: values.numel() // block * block].view(-1, block)

    def quantize() -> Tensor:
        torchao: Any = import_module("torchao.quantization.quant_primitives")  # where it is absent, that is reported
        shape = (1, block)
        scales, zeros = torchao.choose_qparams_affine(blocks, torchao.MappingType.SYMMETRIC, shape, torch.int8)
        codes: Tensor = torchao.quantize_affine(blocks, shape, scales, zeros, torch.int8)
        return codes

    return Implementation("torchao", quantize)


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
