# SPDX-License-Identifier: Apache-2.0
"""Models of fully_shard and replicate on 2x2 emulated ranks, trained with torch's own all-reduce and with commopt's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import commopt
from commopt import Aggregator

NODES = (2, 2)
SIZES = (33, 17, 29, 5)  # nothing that two shards divide evenly
MICROS = 3


class Net(nn.Module):
    """Three blocks, a head with a scalar, and a side branch for some steps; its sizes make shards padded."""

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        super().__init__()
        self.width = sizes[0]
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], 3)
        self.gain = nn.Parameter(torch.ones(1))
        self.side = nn.Linear(sizes[-1], 2)

    def forward(self, x: Tensor, side: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = (self.head(x) * self.gain).sum(-1)
        return y + self.side(x).sum(-1) if side else y


_meshes: dict[tuple[object, int, int], DeviceMesh] = {}


def hsdp_mesh(replicas: int = 2, shards: int = 2) -> DeviceMesh:
    """Return a mesh over all ranks, one for each job: then all models of a job share their process groups."""
    key = (dist.group.WORLD, replicas, shards)
    if key not in _meshes:
        _meshes.clear()
        device = torch.get_default_device().type
        _meshes[key] = init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))
    return _meshes[key]


def over_all_ranks() -> DeviceMesh:
    return init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),), mesh_dim_names=("shard",))


@dataclass
class Made:
    """How a model is made: `shard` wraps its parts, `change` alters it before and `adjust` after that."""

    sizes: tuple[int, ...] = SIZES
    options: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Net], None] = lambda net: None
    shard: Callable[..., None] | None = None
    adjust: Callable[[Net], None] = lambda net: None
    mesh: DeviceMesh | None = None
    dtype: torch.dtype = torch.float32
    model: type[Net] = Net
    seed: int = 0

    def __call__(self) -> Net:
        torch.manual_seed(self.seed)
        net = self.model(self.sizes).to(self.dtype)
        self.change(net)
        options = {"mesh": self.mesh or hsdp_mesh(), **self.options}
        (self.shard or each_layer)(net, **options)
        self.adjust(net)
        return net


def each_layer(net: Net, **options: Any) -> None:
    for layer in dict.fromkeys(net.layers):
        fully_shard(layer, **options)
    fully_shard(net, **options)


def policy(param: torch.dtype | None, reduce: torch.dtype | None) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)}


def modules_of(net: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in net.modules() if isinstance(module, FSDPModule))


def batch(step: int, micro: int = 0, width: int = SIZES[0]) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + 7 * dist.get_rank())
    return torch.randn(6, width, generator=generator, device="cpu").to(torch.get_default_device())


def local(net: nn.Module) -> list[Tensor]:
    """Return copies of what this rank has of the parameters."""
    return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in net.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def differences(one: Any, other: Any) -> float:
    """Return the largest difference between any two parameters, over all ranks."""
    largest = torch.stack([(a - b).abs().max() for a, b in zip(local(one), local(other), strict=True) if a.numel()])
    dist.all_reduce(largest := largest.max(), op=dist.ReduceOp.MAX)
    return float(largest)


def plain_steps(net: Net, steps: int, first: int = 0, **forward: Any) -> None:
    """Train with AdamW, one backward each."""
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        net(batch(step, width=net.width), **forward).square().mean().backward()
        optimizer.step()


@contextlib.contextmanager
def attached(net: nn.Module, choice: Aggregator | str, **options: Any) -> Iterator[Any]:
    state = commopt.attach(net, choice, timeout=60, **options)
    yield state
    state.close()
