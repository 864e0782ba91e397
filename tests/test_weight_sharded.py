# SPDX-License-Identifier: Apache-2.0
"""`comm.weight(n)` under FSDP2: weights count within the shards and between the replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import commopt
from commopt import Aggregator, CommoptError, Hierarchical
from tests.feedback_training import STRATEGIES
from tests.ranks import run
from tests.sharded_training import Made, Net, attached, batch, hsdp_mesh, local, modules_of, over_all_ranks, same
from tests.test_weight import ragged, work

EVEN = (32, 16, 28, 6)


def own_gradients(rank: int, step: int, micros: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the gradients of one rank's own batches, of the model that all ranks begin with."""
    torch.manual_seed(0)
    net = Net(EVEN).to(dtype)
    for micro in range(micros):
        (net(batch(step, micro, EVEN[0]).to(dtype)).square().mean() / micros).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]


def sharded_gradients(
    rank: int, world_size: int, meshed: str, choice: Aggregator | str, accumulate: str, weigh: bool
) -> dict[str, Any]:
    """Return the largest error of averaged gradients against float64's weighted mean, and of magnitudes the largest."""
    meshes = {"2x2": hsdp_mesh, "1-D": over_all_ranks, "replicate": lambda: hsdp_mesh(4, 1)}
    net: Any = Made(EVEN, mesh=meshes[meshed]())()
    found, micros = [], 1 if accumulate == "no" else 3
    with attached(net, choice) as comm:
        for step in range(3):
            net.zero_grad()
            weights = [ragged(each, step) for each in range(world_size)]
            if weigh:
                comm.weight(weights[rank])
            for micro in range(micros):
                if accumulate == "shards":
                    net.set_requires_all_reduce(micro == micros - 1)
                if accumulate == "all":
                    net.set_requires_gradient_sync(micro == micros - 1)
                data = batch(step, micro, EVEN[0])
                loss = net(data * float("nan") if weigh and weights[rank] == 0 else data).square().mean() / micros
                loss.backward()
            own = own_gradients(rank, step, micros, torch.float64)
            errors, magnitudes = [], []
            for p, mine in zip(net.parameters(), own, strict=True):
                share = weights[rank] / sum(weights) if weigh else 1 / world_size
                mean, magnitude = mine * share, mine.abs() * share
                dist.all_reduce(mean)
                dist.all_reduce(magnitude)
                full = torch.zeros_like(mine) if p.grad is None else p.grad.full_tensor()
                errors.append(float((full.double() - mean).abs().max()))
                magnitudes.append(float(magnitude.max()))
            found.append(max(errors) / max(magnitudes))
        calls = [
            n.before[0]
            for key, n in comm._registration.sent._known.items()
            if isinstance(key, tuple) and key[0] == "weights"
        ]
    return {"errors": found, "calls": calls}


@pytest.mark.parametrize("accumulate", ["no", "shards", "all"])
@pytest.mark.parametrize("meshed", ["2x2", "1-D", "replicate"])
def test_fsdp2s_average_is_the_weighted_mean(meshed: str, accumulate: str) -> None:
    if (meshed, accumulate) == ("1-D", "shards"):
        pytest.skip("there are no replicas")
    for found in run(sharded_gradients, 4, meshed, Hierarchical(), accumulate, True, nodes=(2, 2)):
        assert max(found["errors"]) < 3e-6  # float32's roundings in forward and backward
        assert found["calls"] == [3]


def sharded_training(rank: int, world_size: int, choice: Aggregator, meshed: str, weight: float | None) -> list[Tensor]:
    net = Made(EVEN, mesh=hsdp_mesh() if meshed == "2x2" else over_all_ranks())()
    with attached(net, choice) as comm:
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        for step in range(4):
            optimizer.zero_grad()
            if weight is not None:
                comm.weight(weight)
            net(batch(step, width=EVEN[0])).square().mean().backward()
            optimizer.step()
    return local(net)


@pytest.mark.parametrize("choice", [Hierarchical(), STRATEGIES["inter 4 bits"]], ids=str)
@pytest.mark.parametrize("meshed", ["2x2", "1-D"])
def test_equal_weights_leave_the_bits_of_fsdp2(meshed: str, choice: Aggregator) -> None:
    plain, weighted = (run(sharded_training, 4, choice, meshed, weight, nodes=(2, 2)) for weight in (None, 0.7))
    assert all(same(one, other) for one, other in zip(plain, weighted, strict=True))


def sharded_rounds(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return this rank's shards before and after a round of nodes that are sharded inside."""
    net = Made(EVEN)()
    with attached(net, commopt.LocalSGD(period=3)) as comm:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            comm.weight(work(rank, step))
            net(batch(step, width=EVEN[0])).square().mean().backward()
            optimizer.step()
        before = local(net)
        net(batch(3, width=EVEN[0]))
        for module in modules_of(net):  # of which the root stays whole until its backward
            module.reshard()
        return before, local(net)


def test_a_round_of_sharded_nodes_weighs_them_too() -> None:
    found = run(sharded_rounds, 4, nodes=(2, 2))
    totals = [sum(work(rank, step) for rank in node for step in range(3)) for node in ((0, 1), (2, 3))]
    assert totals[0] != totals[1]
    for shard in (0, 1):
        (ours, after), (theirs, other) = found[shard], found[2 + shard]
        assert same(after, other)
        assert not same(ours, theirs)
        for one, two, result in zip(ours, theirs, after, strict=True):
            mean = (one.double() * totals[0] + two.double() * totals[1]) / sum(totals)
            assert torch.allclose(result.double(), mean, rtol=0, atol=1e-6)


def missing_in_fsdp2(rank: int, world_size: int, meshed: str) -> str:
    net = Made(EVEN, mesh=hsdp_mesh() if meshed == "2x2" else over_all_ranks())()
    comm = commopt.attach(net, Hierarchical(), timeout=20)
    for step in range(2):
        if step == 0 or rank != 2:
            comm.weight(3)
        try:
            net(batch(step, width=EVEN[0])).square().mean().backward()
        except CommoptError as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("meshed", ["2x2", "1-D"])
def test_a_rank_of_fsdp2_without_a_weight_is_named_on_all(meshed: str) -> None:
    for text in run(missing_in_fsdp2, 4, meshed, nodes=(2, 2), fresh=True):
        assert text.startswith("ConfigurationError: rank 2 gave no weight()"), text
