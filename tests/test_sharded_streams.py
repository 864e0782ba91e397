# SPDX-License-Identifier: Apache-2.0
"""FSDP's hook on a made-up GPU: what the streams of FSDP, commopt and the optimizer share is neither late nor gone."""

from __future__ import annotations

import inspect
import textwrap
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from commopt import Aggregator, Compressed, Flat, PowerSGD, Quantize
from commopt.attached.options import AttachOptions
from commopt.lanes import LaneClient
from commopt.sharded import registration as module
from commopt.sharded.backwards import MessageOrder, Request
from commopt.sharded.layouts import Part
from tests.fake_cuda import DEVICE
from tests.test_cuda_streams import Setup, device, plain_torch, setup

__all__ = ["plain_torch"]  # for every test here

NAMES = ("first", "second")
SHAPE = (96, 64)


class Group:
    """Stands for a ParameterGroup: shard 0 of 2, whose last row is padding where `padded`."""

    replicas = shards = None
    shard_rank, shard_count, sums, device = 0, 2, False, DEVICE

    def __init__(self, name: str, padded: bool) -> None:
        self.parts = self.parts_with_gradient = [Part(name, SHAPE, SHAPE, 0, (SHAPE[0] + padded) * SHAPE[1])]
        self.key = (id(self),)
        self.partial: Tensor | None = None

    def divided_later(self, dtype: torch.dtype) -> float:
        return 1.0

    def may_wait(self, buffer: Tensor) -> bool:
        return False

    def take_partial(self, buffer: Tensor) -> Tensor | None:
        partial, self.partial = self.partial, None
        if partial is not None:
            partial.record_stream(torch.cuda.current_stream(partial.device))
        return partial


def faults(aggregator: Aggregator, *, padded: bool = False, partial: bool = False, scaler: bool = False) -> list[str]:
    """Do what FSDP does around the hook, in memory that it lets go and hands out again."""
    with device() as gpu, patch.object(Setup, "agree", lambda *_, **__: None):
        groups: list[Any] = [Group(name, padded) for name in NAMES]
        model = nn.ParameterDict({name: nn.Parameter(torch.zeros(SHAPE)) for name in NAMES})
        scales: Any = SimpleNamespace(is_enabled=lambda: True, _scale=torch.full((), 4.0, device=DEVICE))
        made = module.ShardedRegistration(
            Request(AttachOptions(scaler=scales if scaler else None), aggregator, model, [])
        )
        made.groups, client = groups, LaneClient(setup(), "test")
        made.replicas, made._clients, made.joined = {None: MessageOrder(client)}, [client], client
        made._drops_with, made._resolved, made.device = client if scaler else None, aggregator, DEVICE
        current, scattering, reducing = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
        for step in range(4):
            inputs, grads = [], []
            for group in groups:
                numel = group.parts[0].padded
                inputs.append(torch.randn(numel, generator=torch.Generator().manual_seed(step)).to(DEVICE))  # are kept
                scattering.wait_stream(current)
                with torch.cuda.stream(scattering):
                    buffer = torch.zeros(numel, device=DEVICE).add_(inputs[-1])
                    group.partial = buffer.clone() if partial else None
                reducing.wait_stream(scattering)
                with torch.cuda.stream(reducing):
                    made.reduce(group, buffer)
                    grads.append(buffer.double())  # to the parameter's dtype; FSDP keeps the buffer no longer
                del buffer
                with torch.cuda.stream(scattering):
                    torch.zeros(numel, device=DEVICE)
            made.end()
            current.wait_stream(reducing)
            for grad in grads:
                grad.mul_(2)  # the optimizer
        assert all(bool(grad.isfinite().all()) for grad in grads)
    return gpu.faults


CASES: dict[str, dict[str, Any]] = {
    "exact": {"aggregator": Flat()},
    "padded": {"aggregator": Flat(), "padded": True},
    "partial sums": {"aggregator": Flat(), "partial": True},
    "residuals": {"aggregator": Compressed(Quantize(4)), "padded": True, "partial": True},
    "a GradScaler": {"aggregator": Compressed(Quantize(4)), "scaler": True},
    "factors": {"aggregator": PowerSGD(start_step=0), "padded": True, "scaler": True},
}
MUTANTS = {
    "the buffer is not recorded": ("buffer.record_stream(torch.cuda.current_stream(buffer.device))", "pass"),
    "nobody waits for the average": ("pending.wait()", "pass"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_streams_share_is_neither_late_nor_gone(case: str) -> None:
    assert not faults(**CASES[case])


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_would_be_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = MUTANTS[mutant]
    source = textwrap.dedent(inspect.getsource(module.ShardedRegistration._reduce))
    assert before in source
    changed: dict[str, Any] = {}
    exec(source.replace(before, after), vars(module) | {"__name__": "changed"}, changed)
    monkeypatch.setattr(module.ShardedRegistration, "_reduce", changed["_reduce"])
    assert any(faults(**options) for options in CASES.values())
