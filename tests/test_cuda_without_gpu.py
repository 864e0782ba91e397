# SPDX-License-Identifier: Apache-2.0
"""Tensors of a GPU over gloo, and products where TF32 is allowed: on a made-up GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from commopt import Aggregator, Communicator, Compressed, Flat, Hierarchical, PowerSGD, Quantize
from commopt.kernels import lowrank
from commopt.lanes import registry
from tests.fake_cuda import DEVICE, Gpu
from tests.ranks import run

AGGREGATORS: list[Aggregator] = [
    Flat(),
    Hierarchical(form="reduce_scatter"),
    Hierarchical(form="leader"),
    Compressed(Quantize(8)),
    Hierarchical(PowerSGD(start_step=0)),
]


@contextmanager
def gpu() -> Iterator[Gpu]:
    """A GPU with a lane of its own."""
    registry._close_all()
    with Gpu() as device:
        try:
            yield device
        finally:
            device.finish()
            registry._close_all()


# ------------------------------------------------------------------------------ gloo


def everything(rank: int, world_size: int, device: Any) -> list[Tensor]:
    """Return, in host memory, what all collectives make of tensors on a device."""
    comm = Communicator()
    made = [torch.randn(3000, generator=torch.Generator().manual_seed(10 * rank + i)).to(device) for i in range(3)]
    found = [comm.all_reduce(made[0].clone(), aggregator=aggregator) for aggregator in AGGREGATORS]
    found.append(comm.all_reduce(made[0].bfloat16(), op="sum"))
    found.append(comm.broadcast(made[1].clone(), src=1))
    found.append(comm.all_gather(torch.zeros(3000 * world_size, device=device), made[1]))
    found.append(comm.reduce_scatter(torch.zeros(3000 // world_size, device=device), made[2]))
    found.append(comm.all_to_all(torch.zeros(3000, device=device), made[2]))
    return [each.cpu() for each in found]


def both(rank: int, world_size: int) -> tuple[list[bool], list[str]]:
    """Return whether a GPU's tensors come out as those of the CPU, and what is wrong with the order."""
    wanted = everything(rank, world_size, torch.device("cpu"))
    with gpu() as device:
        got = everything(rank, world_size, DEVICE)
    return [torch.equal(mine, theirs) for mine, theirs in zip(wanted, got, strict=True)], device.faults


@pytest.mark.parametrize("nodes", [(2, 2), (1, 1)], ids=str)
def test_tensors_of_a_gpu_travel_over_gloo(nodes: tuple[int, ...]) -> None:
    """The made-up device fails where gloo is handed its memory."""
    for same, faults in run(both, sum(nodes), nodes=nodes, env={"COMMOPT_KERNELS": "torch"}):
        assert all(same)
        assert not faults


# ------------------------------------------------------------------------------ TF32


def to_tf32(values: Tensor) -> Tensor:
    """Round float32 to the ten bits of TF32's mantissa."""
    with torch._C._DisableTorchDispatch():
        return (values.view(torch.int32).add(0x1000) & ~0x1FFF).view(torch.float32)


@contextmanager
def cublas() -> Iterator[None]:
    """Multiply as cuBLAS does where TF32 is allowed."""
    bmm, baddbmm_ = torch.bmm, Tensor.baddbmm_

    def rounded(*factors: Tensor) -> list[Tensor]:
        return [gpu_like(to_tf32(each)) if each.dtype == torch.float32 else each for each in factors]

    def gpu_like(values: Tensor) -> Tensor:
        return Gpu.now().upload(values)

    def multiply(one: Tensor, other: Tensor, **options: Any) -> Tensor:
        return bmm(*rounded(one, other), **options)

    def add(self: Tensor, one: Tensor, other: Tensor, **options: Any) -> Tensor:
        return baddbmm_(self, *rounded(one, other), **options)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with patch.object(torch, "bmm", multiply), patch.object(Tensor, "baddbmm_", add):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def strays(got: Tensor, wanted: Tensor) -> float:
    return float((got.cpu().double() - wanted).norm() / wanted.norm())


def test_products_of_factors_are_float32_where_tf32_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMOPT_KERNELS", "torch")
    torch.manual_seed(0)
    matrices, left, right = torch.randn(2, 96, 64), torch.randn(2, 96, 4), torch.randn(2, 64, 4)
    with gpu() as device, cublas():
        on_gpu = [each.to(DEVICE) for each in (matrices, left, right)]
        assert strays(torch.bmm(on_gpu[0], on_gpu[2]), matrices.double() @ right.double()) > 1e-4, "no TF32 here"
        out = torch.zeros(2, 96, 4, device=DEVICE)
        lowrank.project(on_gpu[0], on_gpu[2], out)
        assert strays(out, matrices.double() @ right.double()) < 1e-6
        out = torch.zeros(2, 64, 4, device=DEVICE)
        lowrank.refresh(on_gpu[0].clone(), on_gpu[1], out)
        assert strays(out, matrices.double().mT @ left.double()) < 1e-6
        out = torch.zeros(2, 96, 64, device=DEVICE)
        lowrank.decode(on_gpu[1], on_gpu[2], out)
        assert strays(out, left.double() @ right.double().mT) < 1e-6
        lowrank.subtract(on_gpu[0], on_gpu[1], on_gpu[2])
        assert strays(on_gpu[0], matrices.double() - left.double() @ right.double().mT) < 1e-6
    assert not device.faults
