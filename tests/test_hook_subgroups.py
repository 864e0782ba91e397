# SPDX-License-Identifier: Apache-2.0
"""Every preset on a data-parallel subgroup, with tensor parallelism beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from tests.hook_training import REPRESENTATIVES, SMALL_BUCKET, Tower, assert_identical, train
from tests.ranks import run


class SumOverGroup(torch.autograd.Function):
    """Tensor parallelism's all_reduce, in forward and backward, on the user's own process group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class TensorParallel(Tower):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.groups = [group]

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        twin = TensorParallel(self.groups[0])
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(SumOverGroup.apply(layer(x), self.groups[0]) / 2)
        return x


def train_beside_tensor_parallelism(rank: int, world_size: int, preset: str, kind: str) -> tuple[int, str]:
    """Data-parallel pairs (0, 2) and (1, 3), tensor-parallel pairs (0, 1) and (2, 3)."""
    aggregator = commopt.PRESETS[preset].build()
    options: dict[str, Any]
    if kind == "mesh":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        data_group, tensor_group = mesh["data"].get_group(), mesh["tensor"].get_group()
        options = {"device_mesh": mesh["data"]}
    else:
        pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
        data_group, tensor_group = pairs[rank % 2], pairs[2 + rank // 2]
        options = {"process_group": data_group}
    torch.manual_seed(rank % 2)  # each tensor-parallel rank holds its own weights
    ddp = TorchDDP(TensorParallel(tensor_group), **options, **SMALL_BUCKET)
    commopt.attach(ddp, preset)
    digest = train(ddp, rank // 2, 2, aggregator)

    ddp = TorchDDP(TensorParallel(tensor_group), **options, **SMALL_BUCKET)
    group = mesh["data"] if kind == "mesh" else data_group
    ddp.register_comm_hook(commopt.HookState(process_group=group), commopt.PRESETS[preset])
    return rank % 2, digest + train(ddp, rank // 2, 2, aggregator, steps=2)


@pytest.mark.parametrize("preset", REPRESENTATIVES)
@pytest.mark.parametrize("kind", ["groups", "mesh"])
def test_data_parallel_subgroups(kind: str, preset: str) -> None:
    results = run(train_beside_tensor_parallelism, 4, preset, kind, nodes=(2, 2))
    for column in range(2):
        assert_identical([digest for place, digest in results if place == column])
    assert results[0][1] != results[1][1]
