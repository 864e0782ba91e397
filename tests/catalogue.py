# SPDX-License-Identifier: Apache-2.0
"""Every aggregator that the registries can make, how exact each must be, and on which clusters it is tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from commopt import (
    AGGREGATORS,
    COMPRESSORS,
    DGC,
    Aggregator,
    Cast,
    Compressed,
    Compressor,
    Flat,
    Hierarchical,
    OneBit,
    PowerSGD,
    Quantize,
)
from commopt.aggregate.forms import Form
from tests.ranks import Nodes, run

T = TypeVar("T")

# name: (world size, nodes); ranks are dealt to nodes in blocks unless they are listed one by one.
LAYOUTS: dict[str, tuple[int, Nodes | None]] = {
    "1": (1, None),
    "2": (2, None),
    "3": (3, None),
    "4": (4, None),
    "1+1": (2, (1, 1)),
    "2x2": (4, (2, 2)),
    "3x2": (6, (2, 2, 2)),
    "2+1": (3, (2, 1)),
    "2x2 interleaved": (4, ((0, 2), (1, 3))),
    "2+1 interleaved": (3, ((0, 2), (1,))),
}


def run_on(layout: str, fn: Callable[..., T], *args: object, **options: Any) -> list[T]:
    """Return what `fn` returns on each rank of one of LAYOUTS; see tests.ranks.run."""
    world_size, nodes = LAYOUTS[layout]
    return run(fn, world_size, *args, nodes=nodes, **options)


# All their combinations would be too many; a compressor that is not listed is tried as it is by default.
_WORTH_TRYING: dict[type[Compressor], list[Compressor]] = {
    Cast: [Cast(torch.bfloat16), Cast(torch.float16), Cast(rounding="stochastic")],
    Quantize: [
        Quantize(8),
        Quantize(4),
        Quantize(2),
        Quantize(8, rounding="stochastic"),
        Quantize(4, levels="uniform"),
    ],
    OneBit: [OneBit()],
    DGC: [DGC(0.25), DGC(0.05, value_dtype=torch.float32)],
}


def compressors() -> list[Compressor]:
    """Return every registered compressor in every configuration worth trying."""
    return [made for kind in COMPRESSORS.values() for made in _WORTH_TRYING.get(kind) or [kind()]]


def aggregators(name: str | None = None) -> list[Aggregator]:
    """Return every configuration of one registered aggregator, or of all; inner aggregators nest one level."""
    kinds = AGGREGATORS.values() if name is None else [AGGREGATORS[name]]
    leaves = [made for kind in AGGREGATORS.values() if not _nests(kind) for made in _variants(kind, inner=[])]
    return [aggregator for kind in kinds for aggregator in _variants(kind, inner=leaves)]


def representatives() -> list[Aggregator]:
    """Return one aggregator of every kind, every compressor among them, where all would take too long."""
    wires = [*(Compressed(made) for made in compressors()), PowerSGD()]
    forms: list[Aggregator] = [Hierarchical(form=form) for form in get_args(Form)]
    return [Flat(), *wires, *forms, *(Hierarchical(inter=wire) for wire in wires[::2])]


def uses_compression(aggregator: Any) -> list[Compressor]:
    """Return the compressors anywhere inside `aggregator`."""
    if isinstance(aggregator, Compressor):
        return [aggregator]
    if not dataclasses.is_dataclass(aggregator):
        return []
    parts = (getattr(aggregator, part.name) for part in dataclasses.fields(aggregator))
    return [compressor for part in parts for compressor in uses_compression(part)]


class Mean(NamedTuple):
    """The float64 mean of what the ranks hold, and how large the values were that went into it."""

    value: Tensor
    magnitude: Tensor
    world_size: int

    @classmethod
    def of(cls, inputs: Sequence[Tensor]) -> Mean:
        values = torch.stack([x.double() for x in inputs])
        return cls(values.mean(0), values.abs().mean(0), len(inputs))


def assert_average(got: Tensor, mean: Mean, aggregator: Aggregator, context: object = "") -> None:
    """Compare `got` with the mean, as exactly as `aggregator` promises.

    Lossless: one rounding of the buffer's dtype per addition and one for the scale. Cast: one rounding of the wire
    dtype going out, one coming back; by chance each may be twice as wrong. Sparse: each element lacks what some ranks
    did not send, and the rest is rounded. Every other compressor must be a contraction.
    """
    wires = uses_compression(aggregator)
    error = (got.double() - mean.value).abs()
    assert got.isfinite().all(), f"{aggregator} {context}: not finite"
    if any(wire.sparse for wire in wires):
        excess = error - (1 + 2**-7) * mean.magnitude
        assert not (excess > 0).any(), f"{aggregator} {context}: element {int(excess.argmax())} is another's"
        if got.numel() < 1000:
            return  # what ranks leave out need not cancel where the values do
    if not all(isinstance(wire, Cast) for wire in wires):
        if not mean.value.any():
            assert not got.any()
            return
        relative_error = error.norm() / mean.value.norm()
        assert relative_error <= 1, f"{aggregator} {context}: relative error {relative_error:.3g}"
        return
    info = torch.finfo(got.dtype)
    relative, absolute = (mean.world_size + 1) * info.eps, mean.world_size * info.smallest_normal * info.eps
    for wire in wires:
        assert isinstance(wire, Cast)
        wire_info, ulps = torch.finfo(wire.dtype), 2 if wire.stochastic else 1
        relative += ulps * wire_info.eps + mean.world_size * torch.finfo(torch.float32).eps  # sums are float32
        absolute += 2 * ulps * wire_info.smallest_normal * wire_info.eps
    excess = error - (relative * mean.magnitude + absolute)
    if got.numel() and excess.max() > 0:
        worst = int(excess.argmax())
        raise AssertionError(
            f"{aggregator} {context}: element {worst} is {got.flatten()[worst]!r}, the mean is "
            f"{mean.value.flatten()[worst]!r}; {int((excess > 0).sum())} of {got.numel()} elements are off"
        )


def _nests(kind: type) -> bool:
    return any(_is_kind(hint, Aggregator) for hint in get_type_hints(kind).values())


def _variants(kind: type, inner: list[Any]) -> Iterator[Any]:
    """Construct `kind` with every combination of the choices that its fields' types offer."""
    hints = get_type_hints(kind)
    choices = {part.name: _choices(hints[part.name], inner) for part in dataclasses.fields(kind)}
    tried = {name: values for name, values in choices.items() if values}
    for combination in product(*tried.values()):
        yield kind(**dict(zip(tried, combination, strict=True)))


def _choices(hint: Any, inner: list[Any]) -> list[Any]:
    if hint is Compressed:  # compression inside sites: tests/test_levels.py
        return []
    if _is_kind(hint, Compressor):
        return compressors()
    if _is_kind(hint, Aggregator):
        return inner
    if hint is torch.dtype:
        return [torch.bfloat16, torch.float16]
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    alternatives = get_args(hint)
    if type(None) in alternatives:  # Literal[...] | None
        rest = [choice for part in alternatives if part is not type(None) for choice in _choices(part, inner)]
        return [None, *rest] if rest else []
    return []


def _is_kind(hint: Any, base: type) -> bool:
    return isinstance(hint, type) and issubclass(hint, base)
