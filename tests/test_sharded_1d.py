# SPDX-License-Identifier: Apache-2.0
"""FSDP2 over all ranks: gradients and weights between nodes as commopt sends them, beside stock FSDP2."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import commopt
from commopt import Compressed, Flat, Hierarchical, LocalSGD, Quantize
from commopt.aggregate import Aggregator
from commopt.errors import CommoptError, ConfigurationError, LaneError
from commopt.sharded import OneDimensionState, Weights
from tests.ranks import run

WORLD, NODES, WIDTH = 4, (2, 2), 96
EIGHT = Hierarchical(Compressed(Quantize(bits=8)))
FOUR = Hierarchical(Compressed(Quantize(bits=4)))
COPIED = Weights(Quantize(bits=8))
DIFFERING = Weights(Quantize(bits=4), difference=True)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + y


class Net(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)
        self.side = nn.Linear(WIDTH, 3)
        self.recompute = recompute

    def forward(self, x: Tensor, side: bool = False) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        out: Tensor = self.head(x)
        return out.sum(-1) + (self.side(x).sum(-1) if side else 0)


def attach(model: Any, aggregator: Aggregator, **options: Any) -> OneDimensionState:
    state = commopt.attach(model, aggregator, **options)
    assert isinstance(state, OneDimensionState)
    return state


def build(
    aggregator: Aggregator | None,
    weights: Weights | None = None,
    *,
    seed: int = 0,
    recompute: bool = False,
    together: bool = False,
    scaler: Any = None,
    rate: float = 1e-2,
    timeout: float = 60,
    **sharding: Any,
) -> tuple[Any, Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: Any
    model, mesh = Net(recompute), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    if together:
        fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh, **sharding)
    for block in model.blocks[2 if together else 0 :]:
        fully_shard(block, mesh=mesh, **sharding)
    fully_shard(model, mesh=mesh, **sharding)
    state = None if aggregator is None else attach(model, aggregator, weights=weights, scaler=scaler, timeout=timeout)
    return model, state, torch.optim.AdamW(model.parameters(), rate)


def batch(rank: int, step: int, micro: int = 0) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + 7 * rank))


def train(
    model: Any, optimizer: Any, steps: Sequence[int], *, micro: int = 1, side: Callable[[int], bool] | None = None
) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        for number in range(micro):
            if micro > 1 and isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(number == micro - 1)
            out = model(batch(dist.get_rank(), step, number), side(step) if side else False)
            loss = (out - 1).square().mean() / micro
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def shards(model: Any) -> dict[str, Tensor]:
    return {name: parameter.to_local().detach().clone() for name, parameter in model.named_parameters()}


def differences(one: Any, other: Any) -> float:
    """Return the largest difference between any two parameters, over all ranks."""
    a, b = shards(one), shards(other)
    largest = torch.tensor(max(float((a[name] - b[name]).abs().max()) if a[name].numel() else 0.0 for name in a))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


# ------------------------------------------------------------------------------------------- beside stock FSDP2


def policy(param: torch.dtype, reduce: torch.dtype | None = None) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)}


# How a model is made, and how it is trained.
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulation": ({}, {"micro": 3}),
    "now and then without gradients": ({}, {"side": lambda step: step % 2 == 0}),
    "bf16": (policy(torch.bfloat16, torch.float32), {}),
    "bf16 reduced": (policy(torch.bfloat16), {}),
    "fp16": (policy(torch.float16, torch.float16), {}),
    "kept after forward": ({"reshard_after_forward": False}, {}),
    "fewer ranks after forward": ({"reshard_after_forward": 2}, {}),
    "two modules in a group": ({"together": True}, {}),
    "recomputed": ({"recompute": True}, {}),
    "forced sum": ({}, {}),
}


def exactly(rank: int, world: int, mode: str) -> list[float]:
    """Return how far exact averages are from stock FSDP2 after some steps."""
    found, (how, training) = [], MODES[mode]
    for aggregator in (Flat(), Hierarchical()):
        models = []
        for choice in (None, aggregator):
            model, state, optimizer = build(choice, **how)
            if mode == "forced sum":
                for part in (each for each in model.modules() if isinstance(each, FSDPModule)):
                    part.set_force_sum_reduction_for_comms(True)
            train(model, optimizer, range(3), **training)
            models.append(model)
        found.append(differences(*models))
        assert state.stats()["buckets"] == (9 if mode.startswith("two modules") else 12)
        state.close()
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nodes", [(1, 1), NODES])
def test_exact_averages_are_those_of_stock_fsdp(nodes: tuple[int, ...], mode: str) -> None:
    # Between two ranks the order of a sum does not matter: the same bits. Four are added up in other orders.
    limit = 0.0 if len(nodes) == sum(nodes) else 5e-2 if "16" in mode else 1e-4
    assert max(run(exactly, sum(nodes), mode, nodes=nodes)[0]) <= limit


def compressed(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, aggregator, weights in [
        ("stock", None, None),
        ("gradients", EIGHT, None),
        ("weights too", EIGHT, COPIED),
        ("differences", FOUR, DIFFERING),
    ]:
        model, state, optimizer = build(aggregator, weights, rate=1e-3)
        losses = train(model, optimizer, range(40))
        found[name] = (losses, None if state is None else state.stats())
    found["numel"] = sum(parameter.numel() for parameter in model.parameters())
    return found


def test_compressed_training_is_close_to_stock() -> None:
    for found in run(compressed, WORLD, nodes=NODES, timeout_s=120):
        numel, (stock, _) = found.pop("numel"), found.pop("stock")
        for name, (losses, stats) in found.items():
            print(name, sum(losses[-10:]), sum(stock[-10:]))
            assert sum(losses[-10:]) == pytest.approx(sum(stock[-10:]), rel=0.05), name
            assert stats["dropped_commits"] == 0
        weighty, differing = found["weights too"][1], found["differences"][1]
        assert found["gradients"][1]["residual_bytes"] <= 4 * numel / 2  # of all elements, over the ranks of a node
        assert weighty["second_copy_bytes"] <= 4 * numel / 2 * 1.02  # with padding
        assert weighty["weight_crossings"] == 40 * 4  # every forward, no backward
        assert differing["inter_bytes"] < 0.65 * weighty["inter_bytes"]
        assert weighty["inter_bytes"] == pytest.approx(2 * found["gradients"][1]["inter_bytes"], rel=0.1)


# ------------------------------------------------------------------------------------------- weights


class Seen:
    """What the layers of a model compute with: of blocks.1.up.weight, in each forward and each backward."""

    def __init__(self, model: Any) -> None:
        self.forward: list[Tensor] = []
        self.backward: list[Tensor] = []
        layer = model.blocks[1].up
        layer.register_forward_hook(lambda module, *_: self.forward.append(module.weight.detach().clone()))
        layer.register_full_backward_pre_hook(lambda module, *_: self.backward.append(module.weight.detach().clone()))


def everywhere_equal(values: Tensor) -> bool:
    all_values = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(all_values, values)
    return all(torch.equal(each, values) for each in all_values)


def exact_weight(model: Any) -> Tensor:
    weight: Tensor = model.blocks[1].up.weight.full_tensor().detach()
    return weight


COMPUTED: dict[str, tuple[Weights, dict[str, Any]]] = {
    "copied": (COPIED, {}),
    "differing": (DIFFERING, {}),
    "not copied": (Weights(Quantize(bits=8), second_copy=False), {}),
    "recomputed": (DIFFERING, {"recompute": True}),
    "together": (DIFFERING, {"together": True}),
    "kept after forward": (DIFFERING, {"reshard_after_forward": False}),
    "fewer ranks": (DIFFERING, {"reshard_after_forward": 2}),
    "bf16": (DIFFERING, policy(torch.bfloat16)),
}


def computing(rank: int, world: int, case: str) -> tuple[bool, bool, int]:
    """Return whether ranks compute alike, whether backward does as forward, and how often weights crossed."""
    weights, how = COMPUTED[case]
    model, state, optimizer = build(EIGHT, weights, **how)
    seen = Seen(model)
    train(model, optimizer, range(4))
    forwards = seen.forward[::2] if case == "recomputed" else seen.forward
    again = seen.forward[1::2] if case == "recomputed" else seen.backward
    same = all(torch.equal(*pair) for pair in zip(forwards, seen.backward, strict=True))
    same &= all(torch.equal(*pair) for pair in zip(forwards, again, strict=True))
    return all(map(everywhere_equal, seen.forward + seen.backward)), same, state.stats()["weight_crossings"]


@pytest.mark.parametrize(
    ("case", "nodes"),
    [*((case, NODES) for case in COMPUTED), ("differing", (1, 1, 1, 1)), ("differing", ((0, 2), (1, 3)))],
)
def test_all_ranks_compute_with_equal_weights_in_forward_and_backward(case: str, nodes: Any) -> None:
    # The root's weights stay after forward; each other group crosses in backward only without a copy.
    crossings = 4 * ((3 if case == "together" else 4) + 3 * (case == "not copied"))
    for found in run(computing, WORLD, case, nodes=nodes):
        assert found == (True, True, crossings)


def stale(rank: int, world: int, difference: bool) -> dict[str, tuple[float, bool]]:
    """Return how far what a forward computed with is from the weights, after every way to change these."""
    model, state, optimizer = build(EIGHT, DIFFERING if difference else COPIED)
    assert state is not None
    other, _, _ = build(None, seed=1)
    train(model, optimizer, range(3))
    seen, found = Seen(model), {}

    def look(name: str) -> None:
        with torch.no_grad():
            model(batch(rank, 99))
        model.reshard()  # which FSDP leaves to backward
        used, exact = seen.forward[-1], exact_weight(model)
        found[name] = (float((used - exact).abs().max() / exact.abs().max()), everywhere_equal(used))

    look("trained")
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(other.state_dict())
    look("load_state_dict")
    for parameter in model.parameters():
        parameter.data = parameter.data * -3.0
    state.invalidate()
    look("param.data")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(-0.5)
    state.invalidate()
    look("local writes")
    model.load_state_dict(saved)
    loss = model(batch(rank, 5)).square().mean()
    with torch.no_grad():
        model.blocks[1](batch(rank, 6))  # an evaluation between forward and backward
    loss.backward()
    look("a step that was skipped")
    optimizer.step()
    look("a step")
    model.eval()
    look("eval")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(5.0)
    for number in range(4):
        look(f"{number} after a change that nobody told")
    return found


@pytest.mark.parametrize("difference", [False, True])
def test_no_forward_computes_with_weights_of_before(difference: bool) -> None:
    for found in run(stale, WORLD, difference, nodes=NODES, timeout_s=120):
        for name, (error, alike) in found.items():
            assert alike, name
            told = "nobody told" not in name
            limit = (0.02 if difference else 0.004) if told or not difference else 0.5 * 0.2 ** int(name[0])
            assert error < limit, (name, found)


def left_dense(rank: int, world: int) -> list[tuple[bool, int, float]]:
    """Return whether a parameter keeps residuals, what crosses in a step, and how far its weights are from exact."""
    found = []
    for dense in ((), ("blocks.1.up.weight",)):
        torch.manual_seed(0)
        model: Any = Net()
        mesh = init_device_mesh("cpu", (world,))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, shard_placement_fn=by_columns)
        aggregator = Hierarchical(Compressed(Quantize(bits=8), dense=dense))
        state = attach(model, aggregator, weights=Weights(Quantize(bits=8), dense=dense))
        seen, exact = Seen(model), exact_weight(model)
        model(batch(rank, 0)).square().mean().backward()
        named = any(name.startswith("blocks.1.up.weight ") for name in residuals(state))
        found.append((named, state.stats()["inter_bytes"], float((seen.forward[0] - exact).abs().max())))
        state.close()
    return found


def by_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None


def test_dense_is_of_parameters_that_are_cut_along_another_dimension_too() -> None:
    numel = WIDTH * (2 * WIDTH + 1) / WORLD
    for (named, usual, off), (still_named, more, none) in run(left_dense, WORLD, nodes=NODES):
        assert (named, still_named) == (True, False)
        assert off > 0 == none
        assert more - usual > 2 * 2.5 * numel  # gradients and weights, of which 4 bytes travel for about 1


class Frozen(nn.Module):
    """Groups of several dtypes, which FSDP gathers as bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x) * self.scale.float()
        return y


def mixed(rank: int, world: int) -> tuple[float, int]:
    models = []
    for aggregator in (None, Hierarchical()):
        torch.manual_seed(0)
        model: Any = fully_shard(Frozen(), mesh=init_device_mesh("cpu", (world,)))
        state = None if aggregator is None else attach(model, aggregator, weights=COPIED)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 1e-2)
        train_plainly(model, optimizer, 3)
        models.append(model)
    assert state is not None
    return differences(*models), state.stats()["weight_crossings"]


def train_plainly(model: Any, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()


def test_groups_of_several_dtypes_are_left_to_torch() -> None:
    for difference, crossings in run(mixed, WORLD, nodes=NODES):
        assert difference < 1e-4
        assert crossings == 0


# ------------------------------------------------------------------------------------------- steps that are dropped


def residuals(state: Any) -> dict[str, Tensor]:
    """Return what this rank still owes, by element range."""
    found: dict[str, Tensor] = {}
    for by_range in state.state_dict()["residuals"].values():
        found |= by_range
    return found


def unchanged(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return before.keys() == after.keys() and all(torch.equal(before[each], after[each]) for each in before)


def overflowing(rank: int, world: int, scales: bool) -> tuple[bool, bool, float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scales else None
    model, state, optimizer = build(FOUR, COPIED, scaler=scaler)

    def step(number: int, spoilt: bool) -> None:
        optimizer.zero_grad()
        x = batch(rank, number)
        if spoilt and rank == 1:
            x[0, 0] = torch.inf
        loss = model(x).square().mean()
        if scaler is None:
            loss.backward()
            return
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    step(0, False)
    first, weights = residuals(state), shards(model)
    step(1, True)
    kept = unchanged(first, residuals(state))
    still = unchanged(weights, shards(model))
    step(2, False)
    return kept, still, state.stats()["residual_norm"]


def test_a_step_that_the_scaler_drops_changes_no_residual_on_any_rank() -> None:
    for kept, still, norm in run(overflowing, WORLD, True, nodes=NODES):
        assert kept
        assert still
        assert 0 < norm < 50  # unscaled, though losses were multiplied by 1024


def test_without_a_scaler_a_rank_keeps_nothing_that_is_no_number() -> None:
    results = run(overflowing, WORLD, False, nodes=NODES)
    assert all(0 < norm < 50 for *_, norm in results)  # finite, that is
    assert results[1][0]


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ValueError("a layer of the user's")


def odd_steps(rank: int, world: int) -> dict[str, Any]:
    """Return what becomes of steps that are not as usual."""
    found: dict[str, Any] = {}
    model, state, optimizer = build(FOUR, DIFFERING)
    train(model, optimizer, range(2))
    handle = model.blocks[1].register_forward_hook(lambda module, args, out: Breaks.apply(out))
    with pytest.raises(ValueError, match="of the user's"):
        model(batch(rank, 5)).square().mean().backward()
    handle.remove()
    model.reset_iter_state()
    train(model, optimizer, range(2, 4))
    found["steps after a backward that raised"] = state.stats()["steps"]
    found["finite"] = all(bool(each.isfinite().all()) for each in shards(model).values())
    state.close()

    model, state, optimizer = build(FOUR, DIFFERING)
    train(model, optimizer, range(1))
    state.invalidate()
    with torch.inference_mode():  # before any training FSDP itself cannot
        model(batch(rank, 0))
    model.reshard()
    train(model, optimizer, range(1, 3))
    state.close()

    both = []
    for aggregator in (None, Flat()):
        model, state, _ = build(aggregator)
        optimizers = {each: torch.optim.AdamW([each], 1e-2) for each in model.parameters()}

        def step(parameter: Any, optimizers: Any = optimizers) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for number in range(3):
            model(batch(rank, number)).square().mean().backward()
        both.append(model)
    found["optimizer in backward"] = (differences(*both), state.stats()["buckets_overlapped"])
    state.close()

    both = []
    for factor, aggregator in [(world, Flat()), (1.0, Flat())]:  # gloo alone has no premultiplied sum
        model, state, _ = build(aggregator)
        for part in model.modules():
            if isinstance(part, FSDPModule) and factor == 1.0:
                part.set_gradient_divide_factor(factor)
        (model(batch(rank, 0)).square().mean() * (1.0 if factor == 1.0 else world)).backward()
        both.append([each.grad.to_local().clone() for each in model.parameters() if each.grad is not None])
        state.close()
    found["divide factor"] = max(float((a - b).abs().max()) for a, b in zip(*both, strict=True) if a.numel())
    return found


def test_steps_that_are_not_as_usual() -> None:
    for found in run(odd_steps, WORLD, nodes=NODES):
        assert found["steps after a backward that raised"] == 4
        assert found["finite"]
        difference, deferred = found["optimizer in backward"]
        assert difference < 1e-4
        assert deferred == 0
        assert found["divide factor"] < 1e-5


# ------------------------------------------------------------------------------------------- checkpoints

TWO = Hierarchical(Compressed(Quantize(bits=2)))


def resuming(rank: int, world: int) -> list[tuple[float, bool]]:
    found = []
    for weights in (COPIED, DIFFERING):
        model, state, optimizer = build(TWO, weights)
        train(model, optimizer, range(3))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), state.state_dict()))
        train(model, optimizer, range(3, 6))
        for loads_state in (True, False):
            again, other, anew = build(TWO, weights, seed=1)
            other.load_state_dict(saved[2]) if loads_state else None
            again.load_state_dict(copy.deepcopy(saved[0]))
            anew.load_state_dict(copy.deepcopy(saved[1]))
            train(again, anew, range(3, 6))
            found.append((differences(model, again), loads_state))
    return found


def test_in_the_same_world_every_bit_is_as_if_training_had_never_stopped() -> None:
    for found in run(resuming, WORLD, nodes=NODES, timeout_s=120):
        for difference, loads_state in found:
            assert (difference == 0) == loads_state


def saving(rank: int, world: int) -> Any:
    model, state, optimizer = build(TWO, DIFFERING)
    train(model, optimizer, range(3))
    return state.gathered_state_dict()


def loading(rank: int, world: int, saved: Any) -> tuple[dict[str, Tensor], int, list[float], int]:
    model, state, optimizer = build(TWO, DIFFERING)
    state.load_state_dict(saved)
    owed = residuals(state)
    numel, losses = sum(each.numel() for each in owed.values()), train(model, optimizer, range(3, 5))
    return owed, numel, losses, sum(int(each.count_nonzero()) for each in residuals(state).values())


def totals(parts: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Return the sum of what ranks owe of each parameter."""
    sums: dict[str, float] = {}
    for part in parts:
        for piece, values in part.items():
            name = piece.split("[")[0]
            sums[name] = sums.get(name, 0.0) + float(values.double().sum())
    return sums


@pytest.mark.parametrize("nodes", [(1, 1), (2,), (2, 2), ((0, 2), (1, 3)), (1, 1, 1, 1)])
def test_in_another_world_nothing_is_lost(nodes: Any) -> None:
    saved = run(saving, WORLD, nodes=NODES)[0]
    before = totals([part["residuals"].get("inter/worker", {}) for part in saved["ranks"]])
    world = 2 if (len(nodes) == 2 and nodes == (1, 1)) or nodes == (2,) else WORLD
    results = run(loading, world, saved, nodes=nodes)
    after = totals([owed for owed, *_ in results])
    assert {name: after.get(name, 0.0) for name in before} == pytest.approx(before, abs=1e-4)
    per_node = 2 if nodes in ((2, 2), ((0, 2), (1, 3))) else 1
    numel = sum(saved["ranks"][0]["parameters"].values())
    per_node = world if nodes == (2,) else per_node  # one node compresses nothing: owners add what is still owed
    assert all(kept <= 1.05 * numel / per_node for _, kept, *_ in results)
    assert nodes != (2,) or not any(left for *_, left in results)
    assert all(loss == loss for _, _, losses, _ in results for loss in losses)


# ------------------------------------------------------------------------------------------- refusals and failures


def refused(rank: int, world: int) -> list[str]:
    """Return what every mistake is answered with, and that the model can be attached after it."""
    mesh, said = init_device_mesh("cpu", (world,)), []
    model: Any = fully_shard(Net(), mesh=mesh)
    cases: list[tuple[Any, dict[str, Any]]] = [
        ("powersgd", {}),
        ("hierarchical_dgc", {}),
        ("auto", {}),
        (LocalSGD(4), {}),
        ("flat", {"plan": "adaptive"}),
        ("flat", {"weights": 8}),
        ("flat", {"weights": COPIED if rank else DIFFERING}),
        ("flat", {"weights": 8 if rank == 2 else COPIED}),
    ]
    for choice, options in cases:
        with pytest.raises(CommoptError) as caught:
            commopt.attach(model, choice, **options)
        said.append(str(caught.value))
    attach(model, EIGHT)
    with pytest.raises(ConfigurationError) as caught:
        commopt.attach(model, EIGHT)
    said.append(str(caught.value))
    model(batch(rank, 0)).sum().backward()
    return said


def test_what_cannot_work_is_named_at_attach_on_every_rank() -> None:
    words = [
        "use commopt.Hierarchical",
        "equally long",
        "for DDP models only",
        "for DDP models only",
        "plan='adaptive'",
        "is no commopt.Weights",
        "disagree about weights",
        "is no commopt.Weights",
        "were replaced by",
    ]
    for said in run(refused, WORLD, nodes=NODES):
        for text, word in zip(said, words, strict=True):
            assert word in text


def unequal(rank: int, world: int) -> list[str]:
    model: Any = fully_shard(Net(), mesh=init_device_mesh("cpu", (world,)))
    said = []
    for options in ({}, {"weights": COPIED}):
        with pytest.raises(ConfigurationError) as caught:
            commopt.attach(model, Hierarchical() if not options else Flat(), **options)
        said.append(str(caught.value))
    state = attach(model, Compressed(Quantize(bits=8)))
    model(batch(rank, 0)).sum().backward()
    said.append(state.explain())
    return said


def test_nodes_of_unequal_length() -> None:
    for said in run(unequal, 3, nodes=(2, 1)):
        assert all("equally many ranks" in text for text in said[:2])
        assert "weights between nodes: exact" in said[2]


def failing(rank: int, world: int, where: str) -> tuple[str, float]:
    model, state, optimizer = build(EIGHT, COPIED)
    train(model, optimizer, range(2))
    if rank == 1:

        def breaks(*_: Any, **__: Any) -> None:
            raise RuntimeError("out of something")

        collective = state._registration._scatter if where == "gradients" else state._registration.gathers
        target = type(collective) if where == "gradients" else type(next(iter(collective.values())))
        target.__call__ = breaks
    began = time.monotonic()
    with pytest.raises(LaneError) as caught:
        train(model, optimizer, range(2, 4))
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("where", ["gradients", "weights"])
def test_a_rank_that_fails_in_a_collective_frees_the_others(where: str) -> None:
    for text, seconds in run(failing, WORLD, where, nodes=NODES, fresh=True):
        assert "rank 1" in text
        assert "out of something" in text
        assert seconds < 20


def at_odds(rank: int, world: int) -> str:
    model, _, optimizer = build(EIGHT, timeout=5)
    train(model, optimizer, range(1))
    with pytest.raises(CommoptError) as caught:
        train(model, optimizer, range(1, 3), side=lambda step: rank == 0)
    return str(caught.value)


def test_ranks_whose_parameters_got_gradients_differ_hear_of_it() -> None:
    for text in run(at_odds, WORLD, nodes=NODES, fresh=True):
        assert "set_reduce_scatter_unused_params" in text


def reporting(rank: int, world: int) -> tuple[int, str]:
    model: Any = fully_shard(Net(), mesh=init_device_mesh("cpu", (world,)))
    state = attach(model, EIGHT, weights=COPIED, record=True)
    train(model, torch.optim.AdamW(model.parameters(), 1e-2), range(4))
    return len(state.timeline().steps), str(state.report())


def test_what_was_recorded_can_be_seen() -> None:
    for steps, report in run(reporting, WORLD, nodes=NODES):
        assert steps >= 3
        assert "all_to_all" in report or "step" in report
