# SPDX-License-Identifier: Apache-2.0
"""Error feedback between the replicas of FSDP2: nothing is lost, ranges are owned once, and bytes are as promised."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from commopt import Quantize, Weights, WireBytes
from commopt.groups import Team
from tests.feedback_training import (
    NUMELS,
    STRATEGIES,
    Books,
    Vectors,
    assert_conserved,
    assert_something_left,
    gradients,
    residual_of,
    zeros,
)
from tests.hook_training import assert_identical
from tests.overheard import overheard
from tests.ranks import run
from tests.sharded_training import NODES, attached, hsdp_mesh, over_all_ranks

STEPS = 12
MANY_STEPS = 200
SETTLED = 4  # steps: then no residual moves any more
NAMES = (
    *("8 bits", "4 bits", "2 bits", "4 uniform", "stochastic", "onebit mean", "onebit rms", "bf16", "top 25%"),
    *("top 5%", "rank 2", "late 4 bits", "late rank 2", "inter 8 bits", "inter rank 2"),
)


class Block(nn.Module):
    """As in Controlled: the loss is every parameter times its coefficient, so the coefficients are the gradients."""

    def __init__(self, shape: tuple[int, ...], bias_numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.ones(bias_numel))

    def forward(self, weight: Tensor, bias: Tensor) -> Tensor:
        return (self.weight.flatten() * weight).sum() + (self.bias * bias).sum()


class Blocks(nn.Module):
    """Controlled with a forward for each layer, where FSDP gathers its parameters."""

    layers: tuple[str, ...] = ("second", "third", "first")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block((60, 50), 50), Block((4097,), 3), Block((7, 100), 65)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, values: Mapping[str, Tensor]) -> Tensor:
        total = (self.gain * values["gain"]).sum()
        for name in self.layers:
            total = total + self.get_submodule(name)(values[f"{name}.weight"], values[f"{name}.bias"])
        return total


class InHalves(Blocks):
    """Whose first layer, a part of a group, has two backwards of its own in a step, each with half of its gradients."""

    layers = ("second", "third")
    scaler: torch.amp.GradScaler  # of the job alone: later ones of this process look for what scales their loss

    def __call__(self, values: Mapping[str, Tensor]) -> Any:
        total = super().__call__(values)
        for _ in range(2):
            halves = [(values[f"first.{part}"] / 2).requires_grad_() for part in ("weight", "bias")]
            self.scaler.scale(self.first(*halves)).backward()
        return total


def in_halves(mesh: DeviceMesh) -> InHalves:
    model = InHalves()
    model.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for layers in (model.second, [model.third, model.first], model):
        fully_shard(layers, mesh=mesh)  # type: ignore[arg-type]  # one or several
    return model


def sharded(mesh: DeviceMesh, **options: Any) -> Blocks:
    model = Blocks()
    for layer in (model.first, model.second, model.third, model):
        fully_shard(layer, mesh=mesh, **options)
    return model


def replicated() -> Blocks:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    model = Blocks()
    for layer in (model.first, model.second, model.third, model):
        replicate(layer, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("replicate",)))
    return model


def results_of(model: nn.Module) -> Vectors:
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.full_tensor().flatten() for name, grad in grads.items() if isinstance(grad, DTensor)}


def keep_books(
    model: nn.Module,
    strategy: str,
    steps: int,
    micros: int = 1,
    divisor: float = 4.0,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    **options: Any,
) -> dict[str, Any]:
    """Train, and keep books of gradients, results and residuals; and of bytes, which `overheard` counts."""
    rank, digest, sent, wrong = dist.get_rank(), hashlib.sha256(), [], []
    owed, told, largest = zeros(), zeros(), 0.0

    def listen(team: Team, primitive: str, nbytes: int, roots: list[int]) -> None:
        price: Any = getattr(team.wire, primitive)
        sent.append(price(nbytes, *roots))

    with attached(model, STRATEGIES[strategy], **options) as state, overheard(listen):
        scaler = state.scaler
        for step in range(steps):
            model.zero_grad()
            before, told_bytes = len(sent), state.stats()
            for micro in range(micros):
                model.set_requires_all_reduce(micro == micros - 1)  # type: ignore[operator]
                own = gradients(rank, step * micros + micro)
                loss = model(own)
                (loss if scaler is None else scaler.scale(loss)).backward()
                for name, values in own.items():
                    owed[name] += values.double() / divisor
                    largest = max(largest, float(values.abs().max()))
            later, counted = state.stats(), sum(sent[before:], WireBytes())
            promised = (
                later["intra_bytes"] - told_bytes["intra_bytes"],
                later["inter_bytes"] - told_bytes["inter_bytes"],
            )
            if step >= SETTLED and promised != (counted.intra, counted.inter):
                wrong.append(f"step {step}: promised {promised}, sent {counted}")
            for name, values in results_of(model).items():
                unscaled = values.double() / (1.0 if scaler is None else scaler.get_scale())
                told[name] += unscaled
                largest = max(largest, float(unscaled.abs().max()))
                digest.update(values.numpy().tobytes())
            for optimizer in optimizers:
                optimizer.step()
        saved = state.state_dict()
    ranges = sorted(key for role in saved["residuals"].values() for key in role)
    books = Books(steps, owed, told, residual_of(saved), later["residual_bytes"], largest)
    return {"books": books, "digest": digest.hexdigest(), "wrong bytes": wrong, "ranges": ranges}


CASES: dict[str, Any] = {
    **{name: lambda name=name: keep_books(sharded(hsdp_mesh()), name, STEPS) for name in NAMES},
    "hundreds of steps": lambda: keep_books(sharded(hsdp_mesh()), "4 bits", MANY_STEPS),
    "partial sums": lambda: keep_books(sharded(hsdp_mesh()), "2 bits", STEPS, micros=3),
    "one shard": lambda: keep_books(sharded(hsdp_mesh(4, 1)), "inter 4 bits", STEPS),
    "replicate": lambda: keep_books(replicated(), "inter 4 bits", STEPS),
    "replicate, matrices": lambda: keep_books(replicated(), "inter rank 2", STEPS),
    "a GradScaler": lambda: keep_books(
        sharded(hsdp_mesh()), "4 bits", STEPS, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0)
    ),
    **{
        f"{where}, sent twice, a GradScaler": lambda mesh=mesh: keep_books(
            model := in_halves(mesh()), "inter 4 bits", STEPS, scaler=model.scaler
        )
        for where, mesh in {"replicas": hsdp_mesh, "over all ranks": over_all_ranks}.items()
    },
    "forced sums": lambda: keep_books(forced(sharded(hsdp_mesh()), None), "4 bits", STEPS),
    "forced sums, divided by 1": lambda: keep_books(forced(sharded(hsdp_mesh()), 1.0), "4 bits", STEPS, divisor=1.0),
    **{
        f"over all ranks, {name}": lambda name=name: keep_books(sharded(over_all_ranks()), name, STEPS)
        for name in ("inter 4 bits", "2 bits", "bf16", "late 4 bits", "onebit mean")
    },
    "over all ranks, a GradScaler": lambda: keep_books(
        sharded(over_all_ranks()), "inter 4 bits", STEPS, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0)
    ),
    "over all ranks, forced sums": lambda: keep_books(forced(sharded(over_all_ranks()), None), "inter 4 bits", STEPS),
    "over all ranks, divided by 1": lambda: keep_books(
        forced(sharded(over_all_ranks()), 1.0), "inter 4 bits", STEPS, divisor=1.0
    ),
    "over all ranks, divided in parts": lambda: keep_books(
        sharded(over_all_ranks(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64)), "4 bits", STEPS
    ),
    "over all ranks, weights too": lambda: keep_books(
        sharded(over_all_ranks()), "inter 4 bits", STEPS, weights=Weights(Quantize(4), difference=True)
    ),
    "divided in parts": lambda: keep_books(
        sharded(hsdp_mesh(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64)), "4 bits", STEPS
    ),
}


def forced(model: nn.Module, factor: float | None) -> Any:
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
            if factor is not None:
                module.set_gradient_divide_factor(factor)  # type: ignore[operator]
    return model


def one_case(rank: int, world_size: int, name: str) -> dict[str, Any]:
    found: dict[str, Any] = CASES[name]()
    return found


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_lost_and_promised_bytes_are_sent(case: str) -> None:
    found = run(one_case, 4, case, nodes=NODES)
    assert_identical([each["digest"] for each in found])
    assert_conserved([each["books"] for each in found])
    assert_something_left([each["books"] for each in found])
    assert [each["wrong bytes"] for each in found] == [[]] * 4


def test_ranks_keep_what_they_own() -> None:
    ranges = [each["ranges"] for each in run(one_case, 4, "4 bits", nodes=NODES)]
    assert ranges[0] == ranges[2]
    assert ranges[1] == ranges[3]
    for name in ("first.weight", "second.weight", "third.weight", "third.bias"):  # the others are sent exactly
        keys = [key for key in ranges[0] + ranges[1] if key.startswith(f"{name}[")]
        owned = sorted(tuple(map(int, key.rpartition("[")[2][:-1].split(":"))) for key in keys)
        assert owned == [(0, owned[0][1]), (owned[0][1], NUMELS[name])]
