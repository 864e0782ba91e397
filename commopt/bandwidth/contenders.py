"""Who is measured: commopt with one aggregator each, and the backend's own collectives as the yardstick."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.aggregate import AGGREGATORS, Aggregator, Compressed, Hierarchical
from commopt.collectives import Communicator
from commopt.collectives.communicator import Op
from commopt.compress import COMPRESSORS
from commopt.groups import WireBytes, all_gather_single, reduce_scatter_single
from commopt.hooks import PRESETS, build_preset

TORCH = "torch"


class Contender(ABC):
    """One implementation of the collectives."""

    name: str
    error_bound: float = 0.0

    @abstractmethod
    def bind(self, collective: str, recv: Tensor, send: Tensor, root: int) -> Callable[[], object]:
        """Return a call that runs `collective` once; those in place (all_reduce, broadcast) work on `recv`."""

    def wire_bytes(self, collective: str, numel: int, dtype: torch.dtype) -> WireBytes | None:
        """Return the bytes this rank sends in one call, None where no formula says."""
        return None


class Commopt(Contender):
    """A Communicator's methods; `aggregator` is used by all_reduce."""

    def __init__(self, name: str, communicator: Communicator, op: Op, aggregator: Aggregator | None) -> None:
        self.name = name
        self.error_bound = 0.0 if aggregator is None else aggregator.error_bound
        self._communicator = communicator
        self._op = op
        self._aggregator = aggregator

    def bind(self, collective: str, recv: Tensor, send: Tensor, root: int) -> Callable[[], object]:
        """See Contender."""
        comm = self._communicator
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": partial(comm.all_reduce, recv, op=self._op, aggregator=self._aggregator),
            "reduce_scatter": partial(comm.reduce_scatter, recv, send, op=self._op),
            "all_gather": partial(comm.all_gather, recv, send),
            "broadcast": partial(comm.broadcast, recv, src=root),
            "all_to_all": partial(comm.all_to_all, recv, send),
        }
        return calls[collective]

    def wire_bytes(self, collective: str, numel: int, dtype: torch.dtype) -> WireBytes | None:
        """See Contender."""
        if collective != "all_reduce":
            return None
        return self._communicator.wire_bytes(numel, dtype, self._aggregator)


class Torch(Contender):
    """torch.distributed on the default process group."""

    name = TORCH

    def __init__(self, op: Op, device: torch.device) -> None:
        # Only NCCL divides by itself; elsewhere an average is a sum and a division, as in stock DDP.
        native_avg = op == "avg" and device.type == "cuda"
        self._op = dist.ReduceOp.AVG if native_avg else dist.ReduceOp.SUM
        self._divisor = dist.get_world_size() if op == "avg" and not native_avg else 1

    def bind(self, collective: str, recv: Tensor, send: Tensor, root: int) -> Callable[[], object]:
        """See Contender."""
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": self._averaged(partial(dist.all_reduce, recv, op=self._op), recv),
            "reduce_scatter": self._averaged(partial(reduce_scatter_single, recv, send, op=self._op), recv),
            "all_gather": partial(all_gather_single, recv, send),
            "broadcast": partial(dist.broadcast, recv, src=root),
            "all_to_all": partial(dist.all_to_all_single, recv, send),
        }
        return calls[collective]

    def _averaged(self, reduce: Callable[[], object], recv: Tensor) -> Callable[[], object]:
        if self._divisor == 1:
            return reduce

        def reduce_and_divide() -> None:
            reduce()
            recv.div_(self._divisor)

        return reduce_and_divide


def find_aggregator(name: str) -> Aggregator | None:
    """Return what a name stands for, or a preset's name with options ("quantized:bits=4"); None if nothing.

    Raises ConfigurationError for options that a preset does not have.
    """
    known = known_aggregators()
    if name in known or "=" not in name:
        return known.get(name)
    return build_preset(name)


def known_aggregators() -> dict[str, Aggregator]:
    """Return every aggregator that has a name: what the registries and presets hold, and variants of those.

    `NAME:FORM` fixes the form of a hierarchical one, `NAME:COMPRESSOR` fills in what an aggregator compresses with, on
    its way between the nodes where it is hierarchical.
    """
    known: dict[str, Aggregator] = {}
    for name, kind in AGGREGATORS.items():
        make: Any = kind
        needed = [field.name for field in fields(make) if field.default is field.default_factory is MISSING]
        if not needed:
            known[name] = make()
        elif needed == ["compressor"]:
            known |= {f"{name}:{compressor}": make(COMPRESSORS[compressor]()) for compressor in COMPRESSORS}
    known |= {name: preset.build() for name, preset in PRESETS.items()}
    for name, aggregator in list(known.items()):
        known |= {f"{name}:{variant}": made for variant, made in aggregator.variants().items()}
    inters = {name: Compressed(kind()) for name, kind in COMPRESSORS.items()}
    return known | {f"hierarchical:{name}": Hierarchical(inter=inter) for name, inter in inters.items()}
