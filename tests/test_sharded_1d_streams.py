# SPDX-License-Identifier: Apache-2.0
"""FSDP2 over all ranks on a made-up GPU: what its streams and commopt's share is neither late nor gone."""

from __future__ import annotations

import inspect
import textwrap
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commopt import Aggregator, Compressed, Flat, Hierarchical, Quantize
from commopt.attached.options import AttachOptions
from commopt.lanes import LaneClient
from commopt.sharded import Weights
from commopt.sharded import one_dimension as module
from commopt.sharded.all_gather import AllGather
from commopt.sharded.backwards import MessageOrder, Request
from commopt.sharded.layouts import Part
from commopt.sharded.reduce_scatter import ReduceScatter
from tests.fake_cuda import DEVICE
from tests.test_cuda_streams import Setup, device, plain_torch, setup

__all__ = ["plain_torch"]  # for every test here

NAMES, SHAPE, WORLD = ("first", "second"), (94, 64), 4  # with padding


class Group:
    """Stands for a ParameterGroup."""

    replicas = shards = None
    shard_rank, shard_count, device = 0, WORLD, DEVICE

    def __init__(self, name: str) -> None:
        self.parts = self.parts_with_gradient = [Part(name, SHAPE, (24, 64), 0, 24 * 64)]
        self._raw = SimpleNamespace(_training_state=None)

    def divided_later(self, dtype: torch.dtype) -> float:
        return 1.0

    def may_wait(self, output: torch.Tensor) -> bool:
        return False


def faults(aggregator: Aggregator, weights: Weights | None = None) -> list[str]:
    """Do what FSDP does around its collectives, in memory that it lets go and hands out again."""
    with device() as gpu, patch.object(Setup, "agree", lambda *_, **__: None):
        groups: list[Any] = [Group(name) for name in NAMES]
        model = nn.ParameterDict({name: nn.Parameter(torch.zeros(SHAPE)) for name in NAMES})
        made = module.OneDimension(Request(AttachOptions(weights=weights), aggregator, model, groups))
        made.joined = client = LaneClient(setup(), "test")
        made._order, order = MessageOrder(client), tuple(range(WORLD))
        made._scatter = ReduceScatter(aggregator, client.team, order)
        if weights is not None:
            made.gathers = {group: AllGather(weights, client.team, order, tuple(group.parts)) for group in groups}
        current, numel = torch.cuda.current_stream(), 24 * 64
        copying, gathering, scattering = (torch.cuda.Stream() for _ in range(3))
        shard = torch.ones(numel, device=DEVICE)
        for step in range(4):
            for group in groups if weights is not None else ():
                copying.wait_stream(current)
                with torch.cuda.stream(copying):
                    output = torch.zeros(numel * WORLD, device=DEVICE)
                    source = output[:numel]
                    source.copy_(shard)
                gathering.wait_stream(copying)
                with torch.cuda.stream(gathering):
                    made.gather(group, output, source)
                current.wait_stream(gathering)
                output.clone()
                copying.wait_stream(current)
                del output, source
                with torch.cuda.stream(copying):
                    torch.zeros(numel * WORLD, device=DEVICE)
            inputs, grads = [], []
            for group in groups:
                drawn = torch.randn(numel * WORLD, generator=torch.Generator().manual_seed(step))
                inputs.append(drawn.to(DEVICE))  # which FSDP keeps
                scattering.wait_stream(current)
                with torch.cuda.stream(scattering):
                    output = torch.zeros(numel, device=DEVICE)
                    made.reduce(group, output, inputs[-1], dist.ReduceOp.AVG)
                    grads.append(output.double())  # to the parameter's dtype
                    del output
                    torch.zeros(numel, device=DEVICE)
            made.end()
            current.wait_stream(scattering)
            for grad in grads:
                shard.add_(grad.mul_(2).float())  # the optimizer
        assert bool(shard.isfinite().all())
    return gpu.faults


CASES: dict[str, tuple[Any, ...]] = {
    "exact": (Flat(),),
    "two levels": (Hierarchical(),),
    "residuals": (Hierarchical(Compressed(Quantize(4))),),
    "second copies": (Hierarchical(Compressed(Quantize(8))), Weights()),
    "differences": (Hierarchical(Compressed(Quantize(8))), Weights(Quantize(4), difference=True)),
    "no copies": (Flat(), Weights(second_copy=False)),
}
MUTANTS = {
    "nobody waits for the gradients": ("reduce", "pending.wait()", "pass"),
    "nobody waits for the weights": ("gather", "numel=output.numel()).wait()", "numel=output.numel())"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_streams_share_is_neither_late_nor_gone(case: str) -> None:
    assert not faults(*CASES[case])


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_would_be_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, before, after = MUTANTS[mutant]
    source = textwrap.dedent(inspect.getsource(getattr(module.OneDimension, method)))
    assert before in source
    changed: dict[str, Any] = {}
    exec(source.replace(before, after), vars(module) | {"__name__": "changed"}, changed)
    monkeypatch.setattr(module.OneDimension, method, changed[method])
    assert any(faults(*options) for options in CASES.values())
