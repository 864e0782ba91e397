# SPDX-License-Identifier: Apache-2.0
"""What is exactly zero on all ranks stays exactly zero, with every preset: rows, columns, matrices, single elements."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt.hooks.presets import LOCAL_PRESETS, PRESETS
from tests.catalogue import run_on
from tests.ranks import run

SHAPES = {"rows": (48, 40), "columns": (40, 48), "elements": (56, 40), "nothing": (64, 24), "matrix": (40, 40)}
STEPS = 12
FROM = 7  # the step from which some more is touched
VARIANTS = (
    "hierarchical_bf16:rounding=stochastic",
    "hierarchical_bf16:lossless=True",
    "quantized:bits=4",
    "quantized:bits=2",
    "hierarchical_quantized:bits=4",
    "hierarchical_quantized:bits=2",
    "hierarchical_quantized:bits=2:levels=uniform",
    "hierarchical_quantized:rounding=stochastic",
    "onebit:scale=mean",
    "onebit:block=64:adam=True",
    "hierarchical_onebit:adam=True",
    "hierarchical_onebit:feedback=None",
    "hierarchical_dgc:density=0.9",
    "hierarchical_dgc:density=0.9:adam=True",
    "hierarchical_powersgd:start_step=0:matrix_rank=1",
    "hierarchical_powersgd:min_compression_rate=1:start_step=3",
    "powersgd:start_step=0",
)


class Given(nn.Module):
    """The loss is every parameter times its coefficient, which is the gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        parts = {name: nn.Parameter(torch.ones(shape, dtype=dtype)) for name, shape in SHAPES.items()}
        self.parts = nn.ParameterDict(parts)

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(self.parts[name] * values).float().sum() for name, values in gradients.items()]).sum()


def touched(step: int, preset: str = "") -> dict[str, Tensor]:
    """Return what may be other than zero on any rank in `step`.

    Single elements that stay zero in a row which is touched later than others are too much for PowerSGD.
    """
    rows, columns, elements, nothing, matrix = (torch.ones(shape, dtype=torch.bool) for shape in SHAPES.values())
    rows[5:9] = rows[40:] = False
    columns[:, 3] = columns[:, 30:] = False
    elements[torch.rand(elements.shape, generator=torch.Generator().manual_seed(1)) < 0.3] = False
    elements[7, 7] = elements[8] = True
    nothing[:] = False
    if step >= FROM:
        rows[6] = rows[44] = columns[:, 31] = elements[0] = True
        rows[44, ::3] = "powersgd" in preset
    else:
        matrix[:] = False
        elements[7, 7] = False
    return dict(zip(SHAPES, (rows, columns, elements, nothing, matrix), strict=True))


def gradients(rank: int, step: int, dtype: torch.dtype, preset: str = "") -> dict[str, Tensor]:
    """Return gradients of very different sizes, of which each rank touches parts."""
    chance = torch.Generator().manual_seed(100 * step + rank)
    found = {}
    for name, may in touched(step, preset).items():
        values = torch.randn(may.shape, generator=chance) * 10 ** torch.randn(may.shape, generator=chance)
        mine = torch.rand(may.shape, generator=chance) < 0.8
        found[name] = torch.where(may & mine, values, 0.0).to(dtype)
    return found


class Result(NamedTuple):
    """How many elements moved that were never touched; what is owed and not told; what is left on this rank."""

    wrong: dict[str, int]
    owed: dict[str, Tensor]
    left: dict[str, Tensor]
    largest: float


def train(rank: int, world_size: int, preset: str, dtype: torch.dtype, scaled: bool) -> Result:
    """Train with chosen gradients."""
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=64.0)
    ddp = TorchDDP(Given(dtype), bucket_cap_mb=0.01)
    comm = commopt.attach(ddp, preset, scaler=scaler if scaled else None)
    adam = "adam=" in preset
    optimizer = comm.optimizer(ddp.parameters(), 0.1, 0.0) if adam else torch.optim.SGD(ddp.parameters(), lr=1.0)
    wrong, largest = dict.fromkeys(SHAPES, 0), 0.0
    before = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in SHAPES.items()}
    told = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    owed = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(STEPS):
        optimizer.zero_grad()
        own = gradients(rank, step, dtype, preset)
        largest = max(largest, *(float(each.abs().max()) for each in own.values()))
        scaler.scale(ddp(own)).backward()
        for name, parameter in ddp.module.parts.items():
            before[name] |= touched(step, preset)[name]
            assert parameter.grad is not None
            wrong[name] += int((parameter.grad[~before[name]] != 0).sum())
            told[name] += parameter.grad.double() / (scaler.get_scale() if scaled else 1.0)
            owed[name] += (
                sum(gradients(each, step, dtype, preset)[name].double() for each in range(world_size)) / world_size
            )
        scaler.step(optimizer)
        scaler.update()
    for name, parameter in ddp.module.parts.items():
        wrong[name] += int((parameter.detach()[~before[name]] != 1).sum())
    left = {name: torch.zeros(shape, dtype=torch.float64).view(-1) for name, shape in SHAPES.items()}
    for role, pieces in comm.state_dict()["residuals"].items():
        for key, values in pieces.items() if "exp_avg" not in role else ():
            name, _, span = key.removeprefix("parts.").rpartition("[")
            begin, end = map(int, span.rstrip("]").split(":"))
            left[name][begin:end] += values.double()
    comm.close()
    return Result(wrong, {name: (owed[name] - told[name]).view(-1) for name in SHAPES}, left, largest)


ALL = (*(name for name in PRESETS if name != "auto"), *VARIANTS)


def train_all(rank: int, world_size: int) -> dict[str, Result]:
    return {preset: train(rank, world_size, preset, torch.float32, False) for preset in ALL}


@pytest.mark.parametrize("layout", ["1+1", pytest.param("2x2", marks=pytest.mark.slow), "3"])
def test_what_nobody_touches_stays_zero(layout: str) -> None:
    """And of what is touched nothing is lost, also where it is held back for a step."""
    ranks = run_on(layout, train_all)
    for preset in ALL:
        results = [each[preset] for each in ranks]
        for result in results:
            assert not any(result.wrong.values()), (preset, result.wrong)
        if "adam=" in preset or "bf16" in preset or "feedback=None" in preset:
            continue
        for name, owed in results[0].owed.items():
            left = torch.stack([each.left[name] for each in results]).sum(0)
            roundings = 4 * torch.finfo(torch.float32).eps * STEPS * max(each.largest for each in results)
            assert float((owed - left).abs().max()) <= roundings, (preset, name)


@pytest.mark.parametrize("preset", ["hierarchical_onebit", "quantized:bits=4", "powersgd:start_step=0"])
@pytest.mark.parametrize(
    ("layout", "dtype", "scaled"),
    [("3x2", torch.float32, True), ("3", torch.bfloat16, False), ("2+1", torch.float32, True)],
)
def test_it_stays_zero_through_servers_leaders_scalers_and_rounding(
    preset: str, layout: str, dtype: torch.dtype, scaled: bool
) -> None:
    for result in run_on(layout, train, preset, dtype, scaled):
        assert not any(result.wrong.values()), result.wrong


def train_locally(rank: int, world_size: int, preset: str) -> int:
    """Return how many parameters that nobody touches are moved by rounds of a LocalSGD, without weight decay."""
    model = Given(torch.float32)
    for parameter in model.parameters():  # of any number: a third of it is rounded
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    before = {name: parameter.detach().clone() for name, parameter in model.parts.items()}
    ddp = TorchDDP(model)
    commopt.attach(ddp, preset, period=2, fragments=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(FROM - 1):
        optimizer.zero_grad()
        ddp(gradients(rank, step, torch.float32)).backward()
        optimizer.step()
    ddp(gradients(rank, FROM, torch.float32))  # the last round
    parts: Any = ddp.module.parts
    moved = {name: parts[name].detach() != values for name, values in before.items()}
    return sum(int(moved[name][~may].sum()) for name, may in touched(0).items())


@pytest.mark.parametrize("nodes", [(1, 1), (1, 1, 1), (2, 2, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("preset", list(LOCAL_PRESETS))
def test_rounds_of_local_sgd_move_nothing_that_nobody_touches(preset: str, nodes: tuple[int, ...]) -> None:
    assert not any(run(train_locally, sum(nodes), preset, nodes=nodes))


def train_sharded(rank: int, world_size: int, preset: str, over_all: bool) -> int:
    """Return how many elements of FSDP2's gradients and parameters moved that were never touched."""
    model = Given(torch.float32)
    shape = (world_size,) if over_all else (2, world_size // 2)
    names = ("shard",) if over_all else ("replicate", "shard")
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    comm = commopt.attach(model, preset)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: torch.zeros(each, dtype=torch.bool) for name, each in SHAPES.items()}
    wrong, parts = 0, cast(Any, model).parts
    for step in range(STEPS):
        optimizer.zero_grad()
        model(gradients(rank, step, torch.float32, preset)).backward()
        for name, may in touched(step, preset).items():
            before[name] |= may
            wrong += int((parts[name].grad.full_tensor()[~before[name]] != 0).sum())
        optimizer.step()
    for name, moved in before.items():
        wrong += int((parts[name].detach().full_tensor()[~moved] != 1).sum())
    comm.close()
    return wrong


@pytest.mark.parametrize(
    ("preset", "over_all"),
    [
        ("hierarchical_onebit", False),
        ("hierarchical_powersgd:start_step=0", False),
        ("hierarchical_onebit", True),
        ("quantized:bits=4", True),
        ("hierarchical_quantized:bits=2:feedback=None", True),
    ],
)
def test_what_nobody_touches_stays_zero_under_fsdp2(preset: str, over_all: bool) -> None:
    assert run_on("2x2", train_sharded, preset, over_all) == [0] * 4


class Rows(nn.Module):
    """Its gradient is one in some rows, and in single columns of others; zero elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, step: int, rank: int) -> Tensor:
        used = torch.zeros_like(self.weight)
        used[0], used[:, 0] = 1.0, 1.0
        used[4 * step + 3 + rank] = 1.0
        return (self.weight * used).sum()


def first_touches(rank: int, world_size: int, preset: str, meshed: bool) -> list[float]:
    """Return, for each step, the least share of its gradient that a row gets in the step that first touches it."""
    module: Any = Rows()
    model = fully_shard(module, mesh=init_device_mesh("cpu", (world_size,))) if meshed else TorchDDP(module)
    comm = commopt.attach(model, preset)
    found = []
    for step in range(6):
        model.zero_grad()
        model(step, rank).backward()
        gradient = module.weight.grad.full_tensor() if meshed else module.weight.grad
        first = 4 * step + 3
        found.append(world_size * float(gradient[first : first + world_size, 1:].mean(1).min()))
    comm.close()
    return found


@pytest.mark.parametrize(
    ("preset", "layout", "meshed"),
    [
        ("onebit:block=64:feedback=None", "2", False),
        ("quantized:bits=4:block=64:feedback=None", "3", False),
        ("hierarchical_onebit:block=64:feedback=None", "2x2", False),
        ("powersgd:matrix_rank=2:start_step=0:feedback=None", "2", False),
        ("quantized:bits=4:block=64:feedback=None", "3", True),
    ],
)
def test_without_residuals_what_is_touched_first_is_sent_at_once(preset: str, layout: str, meshed: bool) -> None:
    for shares in run_on(layout, first_touches, preset, meshed):
        assert min(shares) > 0.5, shares
