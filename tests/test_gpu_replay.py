# SPDX-License-Identifier: Apache-2.0
"""Kernels of a bucket that are replayed as CUDA graphs compute the bits that they compute when launched one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from bench.replay import replay
from commopt import Flat
from commopt.feedback import BufferContext
from commopt.groups import Team
from tests.gpu_training import ON_GPU, kept, on_ranks
from tests.hook_training import SMALL_BUCKET, Tower, batch_of, seeded
from tests.ranks import Nodes
from tests.sharded_training import local

STEPS = 12  # some of which are like those before
ROWS = ["flat", "hierarchical_bf16", "hierarchical_quantized", "hierarchical_quantized:bits=4", "hierarchical_onebit"]
ROWS += ["hierarchical_dgc:density=0.05", "hierarchical_powersgd"]


class Trained(NamedTuple):
    """What a training came to on one rank; replayed: how many buckets were, None where nobody counts."""

    losses: list[float]
    parameters: list[Tensor]
    kept: dict[str, Tensor]
    replayed: int | None


def train(rank: int, device: str, strategy: str, model: str, micros: int) -> Trained:
    """Train for some steps, which accumulate `micros` backwards each."""
    module = seeded(Tower).to(device)
    wrapped: Any = module
    if model == "ddp":
        wrapped = TorchDDP(module, **SMALL_BUCKET)
    else:
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(module, mesh=mesh)  # one group: ranks that take turns on a GPU need long for a message
    state = commopt.attach(wrapped, strategy, timeout=60)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
    inputs = [batch_of(rank, 0, micro)[0].to(device) for micro in range(micros)]  # is learned by heart
    losses = [step(wrapped, optimizer, inputs) for _ in range(STEPS)]
    found = kept(state) if isinstance(state, commopt.HookState) else {}
    replayed = state.stats().get("replayed")
    parameters = [values.cpu() for values in local(wrapped)]
    state.close()
    return Trained(losses, parameters, found, replayed)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: list[Tensor]) -> float:
    """Take an optimizer step; return the loss of the last batch."""
    optimizer.zero_grad(set_to_none=True)
    for index, batch in enumerate(inputs):
        with no_sync_unless(model, index == len(inputs) - 1):
            loss = model(batch).square().mean()
            loss.backward()
    optimizer.step()
    return float(loss)


def no_sync_unless(model: Any, last: bool) -> Any:
    if isinstance(model, TorchDDP):
        return torch.enable_grad() if last else model.no_sync()
    model.set_requires_gradient_sync(last)
    return torch.enable_grad()


def both_ways(
    rank: int, world_size: int, device: str, strategies: list[str], model: str, micros: int
) -> dict[str, tuple[Trained, Trained]]:
    """Train by each strategy without replay and with it."""

    def ways(strategy: str) -> Iterator[Trained]:
        for wanted in (False, True):
            with replay(wanted):
                yield train(rank, device, strategy, model, micros)

    return {strategy: tuple(ways(strategy)) for strategy in strategies}  # type: ignore[misc]  # of two


@dataclass(frozen=True, repr=False)
class Looking(Flat):
    """Lets the host look at the result, which it cannot while a stream is captured."""

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        super().all_reduce(buffer, team, scale, context)
        float(buffer.sum())


def fail_to_capture(rank: int, world_size: int, device: str) -> tuple[list[float], list[float], int]:
    """Train by an average that cannot be captured, then draw random numbers and train by one that can."""
    found = []
    for aggregator in (Looking(), Flat(), commopt.build_preset("quantized")):
        module = TorchDDP(seeded(Tower).to(device), **SMALL_BUCKET)
        state = commopt.attach(module, aggregator, timeout=60)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        inputs = [batch_of(rank, 0)[0].to(device)]
        found.append([step(module, optimizer, inputs) for _ in range(STEPS)])
        assert torch.randn(1000, device=device).isfinite().all()
        replayed = int(state.stats()["replayed"])
        state.close()
    return found[0], found[1], replayed


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_a_capture_that_fails_does_no_harm(device: str) -> None:
    for looked, flat, replayed in on_ranks(device, fail_to_capture, 2, nodes=(1, 1), fresh=True, timeout_s=60.0):
        assert looked == flat
        assert replayed > 0


@pytest.mark.parametrize(
    ("model", "world_size", "nodes", "micros"),
    [("ddp", 2, (1, 1), 1), ("ddp", 2, (1, 1), 2), ("hsdp", 4, (2, 2), 1)],
    ids=["DDP", "DDP, accumulated", "HSDP"],
)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_a_replayed_training_has_the_bits_of_another(
    device: str, model: str, world_size: int, nodes: Nodes, micros: int
) -> None:
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # one order of sums, whatever the stream
    results = on_ranks(
        device, both_ways, world_size, ROWS, model, micros, nodes=nodes, env=env, fresh=True, timeout_s=140.0
    )
    for found in results:
        for strategy, (plain, replayed) in found.items():
            assert replayed.losses == plain.losses, strategy
            assert plain.losses[-1] < plain.losses[0], strategy
            assert all(map(torch.equal, replayed.parameters, plain.parameters)), strategy
            assert replayed.kept.keys() == plain.kept.keys(), strategy
            assert all(torch.equal(replayed.kept[key], plain.kept[key]) for key in plain.kept), strategy
            assert not plain.replayed, strategy
            assert replayed.replayed is None or replayed.replayed > 0, f"{strategy}: nothing was replayed"
