# SPDX-License-Identifier: Apache-2.0
"""FSDP2, Adam before the average, and LocalSGD over NCCL: jobs that other files run on CPUs, with the same results."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from commopt import LocalSGD, OneBit, Quantize
from tests import test_adam as adam
from tests import test_local_sgd_deltas as deltas
from tests import test_local_sgd_steps as rounds
from tests import test_local_sgd_training as meetings
from tests import test_sharded_1d as one_dimension
from tests import test_sharded_local_sgd as sharded_local_sgd
from tests import test_sharded_modes as modes
from tests.gpu_training import ON_GPU, as_default, on_ranks
from tests.ranks import Nodes

NODES = (2, 2)
ADAM_STEPS = 40
FAR = 1e-4  # of sums in another order, over these steps

# Models that name no device. Few, since ranks that take turns on a GPU need long for a message.
HSDP = ["accumulated over the shards", "clip_grad_norm_", "bfloat16, reduced in float32", "float16"]
HSDP += ["activation checkpointing", "optimizer in backward", "parameters without gradient now and then"]
OVER_ALL_RANKS = ["plain", "accumulation", "bf16", "fp16"]
COMPRESSED_STEPS = 12

on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])


def several(rank: int, world_size: int, names: Sequence[str]) -> dict[str, modes.Outcome]:
    return {name: modes.one_mode(rank, world_size, name) for name in names}


def several_over_all_ranks(rank: int, world_size: int, names: Sequence[str]) -> dict[str, list[float]]:
    return {name: modes.exactly(rank, world_size, name) for name in names}


@on_gpu
def test_modes_of_hsdp(device: str) -> None:
    for found in on_ranks(device, as_default, 4, several, HSDP, nodes=NODES, timeout_s=160.0):
        for name, outcome in found.items():
            assert outcome["equal"], name
            assert outcome["moved"], name


@on_gpu
@pytest.mark.parametrize("nodes", [(1, 1), NODES], ids=["1+1", "2x2"])
def test_exact_averages_over_all_ranks(device: str, nodes: tuple[int, ...]) -> None:
    """Between two ranks the order of a sum does not matter: the same bits."""
    results = on_ranks(
        device, as_default, sum(nodes), several_over_all_ranks, OVER_ALL_RANKS, nodes=nodes, timeout_s=160.0
    )
    for name, differences in results[0].items():
        limit = 0.0 if len(nodes) == sum(nodes) else 5e-2 if "16" in name else FAR
        assert max(differences) <= limit, name


@on_gpu
def test_compressed_weights_and_gradients_over_all_ranks(device: str) -> None:
    job = one_dimension.compressed
    results = on_ranks(device, as_default, 4, job, COMPRESSED_STEPS, nodes=NODES, timeout_s=160.0)
    for found in results:
        stock = sum(found.pop("stock")[-10:])
        del found["numel"]
        for name, (losses, stats) in found.items():
            assert sum(losses[-10:]) == pytest.approx(stock, rel=0.05), name
            assert stats["dropped_commits"] == 0


def beside_adamw(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Return weights trained by all ranks, and by one replica on the same device, whose seed draws the same model."""
    return adam.train_exactly(rank, world_size, True, ADAM_STEPS, 1), adam.by_adamw([0], ADAM_STEPS)


@on_gpu
@pytest.mark.parametrize("nodes", [(1, 1), NODES], ids=["1+1", "2x2"])
def test_adam_without_compression_is_adamw(device: str, nodes: tuple[int, ...]) -> None:
    world_size = sum(nodes)
    results = on_ranks(device, as_default, world_size, beside_adamw, nodes=nodes)
    for weights, expected in results:
        assert weights.equal(results[0][0])
        assert float((weights - expected).norm() / expected.norm()) < FAR


@on_gpu
def test_adam_of_replicas_of_fsdp2(device: str) -> None:
    assert max(on_ranks(device, as_default, 4, adam.train_replicas, nodes=NODES)) < FAR


@on_gpu
@pytest.mark.parametrize(
    ("average", "nodes"),
    [
        (LocalSGD(period=3, outer=deltas.NESTEROV, delay=2, merge=0.5), NODES),
        (LocalSGD(period=4, compressor=Quantize(bits=8), outer=deltas.NESTEROV, delay=1), (1, 1)),
        (LocalSGD(period=3, compressor=OneBit(), decay=0.9), (1, 1)),
        (LocalSGD(period=3, compressor=OneBit(), outer=deltas.NESTEROV, delay=1, offload=True), (1, 1)),
    ],
    ids=str,
)
def test_local_sgd_is_diloco(device: str, average: LocalSGD, nodes: Nodes) -> None:
    world_size = sum(each for each in nodes if isinstance(each, int))
    found = on_ranks(device, as_default, world_size, deltas.beside_reference, average, nodes, nodes=nodes)
    assert max(off for off, _ in found) < 10 * FAR


@on_gpu
def test_local_sgd_of_fsdp2_is_diloco(device: str) -> None:
    average = LocalSGD(period=3, outer=deltas.NESTEROV, delay=2, merge=0.5)
    job = sharded_local_sgd.beside_reference
    assert max(on_ranks(device, as_default, 4, job, average, nodes=NODES)) < 10 * FAR


@on_gpu
@pytest.mark.parametrize("kind", ["ddp", "no_sync", "hsdp"])
def test_rounds_come_every_so_many_optimizer_steps(device: str, kind: str) -> None:
    expected = [step // rounds.PERIOD for step in range(rounds.STEPS) for _ in range(rounds.MICROS)]
    results = on_ranks(device, as_default, 4, rounds.accumulate, kind, nodes=NODES)
    assert [seen for seen, _ in results] == [expected] * 4


@on_gpu
def test_nodes_learn_by_themselves_and_meet(device: str) -> None:
    """The job compares every forward's parameters with those of a reference."""
    results = on_ranks(device, as_default, 4, meetings.beside_reference, NODES, 1, nodes=NODES)
    for steps, held in enumerate(zip(*(seen for seen, _ in results), strict=True)):
        assert held[0] == held[1], f"after {steps} steps"
        assert held[2] == held[3], f"after {steps} steps"
        together = steps in meetings.TOGETHER or steps == meetings.STEPS
        assert (held[0] == held[2]) == together, f"after {steps} steps"
