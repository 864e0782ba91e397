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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import commopt
from commopt import Compressed, Flat, Hierarchical, LocalSGD, Quantize
from commopt.aggregate import Aggregator
from commopt.errors import CommoptError, ConfigurationError, LaneError
from commopt.sharded import OneDimensionState, Weights
from tests import test_sharded_modes as modes
from tests.ranks import run
from tests.sharded_training import (
    NODES,
    Made,
    batch,
    differences,
    local,
    modules_of,
    over_all_ranks,
    plain_steps,
    policy,
)
from tests.speed import limit

pytestmark = pytest.mark.skipif(torch.__version__ < "2.9", reason="FSDP2 lets its collectives be replaced since 2.9")

WORLD, WIDE = 4, (96, 193, 96, 5)
EIGHT = Hierarchical(Compressed(Quantize(bits=8)))
FOUR = Hierarchical(Compressed(Quantize(bits=4)))
TWO = Hierarchical(Compressed(Quantize(bits=2)))
COPIED = Weights(Quantize(bits=8))
DIFFERING = Weights(Quantize(bits=4), difference=True)


def made(sizes: tuple[int, ...] = WIDE, **how: Any) -> Any:
    return Made(sizes, mesh=over_all_ranks(), **how)()


def build(
    aggregator: Aggregator,
    weights: Weights | None = None,
    *,
    rate: float = 1e-2,
    scaler: Any = None,
    timeout: float = 60,
    **how: Any,
) -> tuple[Any, Any, torch.optim.Optimizer]:
    model = made(**how)
    state = commopt.attach(model, aggregator, weights=weights, scaler=scaler, timeout=timeout)
    assert isinstance(state, OneDimensionState)
    return model, state, torch.optim.AdamW(model.parameters(), rate)


def train(
    model: Any, optimizer: Any, steps: Sequence[int], side: Callable[[int], bool] = lambda step: False
) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = (model(batch(step, width=model.width), side=side(step)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compressed(rank: int, world: int, steps: int = 40) -> dict[str, Any]:
    model = made()
    stock = train(model, torch.optim.AdamW(model.parameters(), 1e-3), range(steps))
    found: dict[str, Any] = {"stock": stock, "numel": sum(parameter.numel() for parameter in model.parameters())}
    for name, aggregator, weights in [
        ("gradients", EIGHT, None),
        ("weights too", EIGHT, COPIED),
        ("differences", FOUR, DIFFERING),
    ]:
        model, state, optimizer = build(aggregator, weights, rate=1e-3)
        found[name] = (train(model, optimizer, range(steps)), state.stats())
    return found


def test_compressed_training_is_close_to_stock() -> None:
    for found in run(compressed, WORLD, nodes=NODES, timeout_s=300):
        numel, stock = found.pop("numel"), found.pop("stock")
        for name, (losses, stats) in found.items():
            assert sum(losses[-10:]) == pytest.approx(sum(stock[-10:]), rel=0.05), name
            assert stats["dropped_commits"] == 0
        weighty, differing = found["weights too"][1], found["differences"][1]
        assert found["gradients"][1]["residual_bytes"] <= 4 * numel / 2  # of all elements, over the ranks of a node
        assert weighty["second_copy_bytes"] <= 4 * numel / 2 * 1.03  # with padding
        assert weighty["weight_crossings"] == 40 * 4  # every forward, no backward
        assert differing["inter_bytes"] < 0.65 * weighty["inter_bytes"]
        assert weighty["inter_bytes"] == pytest.approx(2 * found["gradients"][1]["inter_bytes"], rel=0.1)


# ------------------------------------------------------------------------------------------- weights


class Seen:
    """What a layer computes with, in each forward and each backward."""

    def __init__(self, model: Any, number: int = 1) -> None:
        self.forward: list[Tensor] = []
        self.backward: list[Tensor] = []
        self.layer: Any = [module for module in model.modules() if isinstance(module, nn.Linear)][number]
        self.layer.register_forward_hook(lambda *_: self.forward.append(self.layer.weight.detach().clone()))
        self.layer.register_full_backward_pre_hook(lambda *_: self.backward.append(self.layer.weight.detach().clone()))

    def exact(self) -> Tensor:
        """Return the weight that the optimizer steps; collective."""
        weight: Tensor = self.layer.weight.full_tensor().detach()
        return weight


def everywhere_equal(values: Tensor) -> bool:
    all_values = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(all_values, values)
    return all(torch.equal(each, values) for each in all_values)


COMPUTED: dict[str, tuple[Weights, dict[str, Any]]] = {
    "copied": (COPIED, {}),
    "differing": (DIFFERING, {}),
    "not copied": (Weights(Quantize(bits=8), second_copy=False), {}),
    "recomputed": (DIFFERING, {"adjust": modes.checkpointed}),
    "together": (DIFFERING, {"shard": modes.two_layers_together}),
    "kept after forward": (DIFFERING, {"options": {"reshard_after_forward": False}}),
    "fewer ranks": (DIFFERING, {"options": {"reshard_after_forward": 2}}),
    "bf16": (DIFFERING, {"options": policy(torch.bfloat16, None)}),
}


def recomputed_together(net: Any) -> None:
    """Let backward repeat the forward of all layers at once: of the first one before anybody has gathered it."""
    net.layers = nn.ModuleList([checkpoint_wrapper(nn.Sequential(*net.layers))])


TOGETHER: tuple[Weights, dict[str, Any]] = (DIFFERING, {"adjust": recomputed_together})


def computing(rank: int, world: int, case: str) -> tuple[bool, bool, int]:
    """Return whether ranks compute alike, whether backward does as forward, and how often weights crossed."""
    weights, how = COMPUTED.get(case, TOGETHER)
    model, state, optimizer = build(EIGHT, weights, **how)
    seen = Seen(model, 1 if case in COMPUTED else 0)
    train(model, optimizer, range(4))
    repeats = case == "recomputed" or case not in COMPUTED
    forwards = seen.forward[::2] if repeats else seen.forward
    again = seen.forward[1::2] if repeats else seen.backward
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


def test_a_forward_that_backward_repeats_gathers_nothing_anew() -> None:
    for found in run(computing, WORLD, "recomputed together", nodes=NODES):
        assert found == (True, True, 4 * 4)


def stale(rank: int, world: int, difference: bool) -> dict[str, tuple[float, bool]]:
    """Return how far what a forward computed with is from the weights, after every way to change these."""
    model, state, optimizer = build(EIGHT, DIFFERING if difference else COPIED)
    other = made(seed=1)
    train(model, optimizer, range(3))
    seen, found = Seen(model), {}

    def look(name: str) -> None:
        with torch.no_grad():
            model(batch(99, width=model.width))
        model.reshard()  # which FSDP leaves to backward
        used, exact = seen.forward[-1], seen.exact()
        found[name] = (float((used - exact).abs().max() / exact.abs().max()), everywhere_equal(used))

    def multiply(by: float) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().mul_(by)

    look("trained")
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(other.state_dict())
    look("load_state_dict")
    for parameter in model.parameters():
        parameter.data = parameter.data * -3.0
    state.invalidate()
    look("param.data")
    multiply(-0.5)
    state.invalidate()
    look("local writes")
    model.load_state_dict(saved)
    loss = model(batch(5, width=model.width)).square().mean()
    with torch.no_grad():
        model.layers[1](batch(6, width=WIDE[1]))  # an evaluation between forward and backward
    loss.backward()
    look("a step that was skipped")
    optimizer.step()
    look("a step")
    model.eval()
    look("eval")
    multiply(5.0)
    for number in range(4):
        look(f"{number} after a change that nobody told")
    return found


@pytest.mark.parametrize("difference", [False, True])
def test_no_forward_computes_with_weights_of_before(difference: bool) -> None:
    for found in run(stale, WORLD, difference, nodes=NODES, timeout_s=300):
        for name, (error, alike) in found.items():
            assert alike, name
            told = "nobody told" not in name
            limit = (0.02 if difference else 0.004) if told or not difference else 0.5 * 0.2 ** int(name[0])
            assert error < limit, (name, found)


def by_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None


def left_dense(rank: int, world: int) -> list[tuple[bool, int, float]]:
    """Return whether a parameter keeps residuals, what crosses in a step, and how far its weights are from exact."""
    found = []
    for dense in ((), ("layers.0.0.weight",)):
        aggregator = Hierarchical(Compressed(Quantize(bits=8), dense=dense))
        model, state, _ = build(
            aggregator, Weights(Quantize(bits=8), dense=dense), options={"shard_placement_fn": by_columns}
        )
        exact = (seen := Seen(model, 0)).exact()
        model(batch(0, width=model.width)).square().mean().backward()
        named = any(name.startswith("layers.0.0.weight ") for name in residuals(state))
        found.append((named, state.stats()["inter_bytes"], float((seen.forward[0] - exact).abs().max())))
        state.close()
    return found


def test_dense_is_of_parameters_that_are_cut_along_another_dimension_too() -> None:
    numel = WIDE[0] * WIDE[1] / WORLD
    for (named, usual, off), (still_named, more, none) in run(left_dense, WORLD, nodes=NODES):
        assert (named, still_named) == (True, False)
        assert off > 0 == none
        assert more - usual > 2 * 2.5 * numel  # gradients and weights, of which 4 bytes travel for about 1


class Frozen(nn.Module):
    """Groups of several dtypes, which FSDP gathers as bytes."""

    width = 96

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(self.width, self.width)
        self.scale = nn.Parameter(torch.ones(self.width, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x) * self.scale.float()
        return y


def mixed(rank: int, world: int) -> tuple[float, int]:
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(fully_shard(Frozen(), mesh=over_all_ranks()))
    state = commopt.attach(models[1], Hierarchical(), weights=COPIED)
    for model in models:
        plain_steps(model, 3)
    return differences(*models), state.stats()["weight_crossings"]


def test_groups_of_several_dtypes_are_left_to_torch() -> None:
    for difference, crossings in run(mixed, WORLD, nodes=NODES):
        assert difference < 1e-4
        assert crossings == 0


# ------------------------------------------------------------------------------------------- steps that are dropped


def residuals(state: Any) -> dict[str, Tensor]:
    """Return what this rank still owes, by element range."""
    return {key: values for role in state.state_dict()["residuals"].values() for key, values in role.items()}


def overflowing(rank: int, world: int, scales: bool) -> tuple[bool, bool, float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scales else None
    model, state, optimizer = build(FOUR, COPIED, scaler=scaler)

    def step(number: int, spoilt: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
        optimizer.zero_grad()
        x = batch(number, width=model.width)
        if spoilt and rank == 1:
            x[0, 0] = torch.inf
        loss = model(x).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        return residuals(state), local(model)

    (owed, weights), (after, still), _ = step(0, False), step(1, True), step(2, False)
    kept = owed.keys() == after.keys() and all(torch.equal(owed[each], after[each]) for each in owed)
    unchanged = all(torch.equal(a, b) for a, b in zip(weights, still, strict=True))
    return kept, unchanged, state.stats()["residual_norm"]


def test_a_step_that_the_scaler_drops_changes_no_residual_on_any_rank() -> None:
    for kept, still, norm in run(overflowing, WORLD, True, nodes=NODES):
        assert kept
        assert still
        assert 0 < norm < 50  # unscaled, though losses were multiplied by 1024


def test_without_a_scaler_a_rank_keeps_nothing_that_is_no_number() -> None:
    results = run(overflowing, WORLD, False, nodes=NODES)
    assert all(0 < norm < 50 for *_, norm in results)  # finite, that is
    assert results[1][0]


def odd_steps(rank: int, world: int) -> dict[str, Any]:
    """Return what becomes of steps that are not as usual."""
    found: dict[str, Any] = {}
    model, state, optimizer = build(FOUR, DIFFERING)
    modes.raises_once(model, 4)
    found["steps after a backward that raised"] = state.stats()["steps"]
    found["finite"] = all(bool(each.isfinite().all()) for each in local(model))
    state.close()

    model, state, optimizer = build(FOUR, DIFFERING)
    train(model, optimizer, range(1))
    state.invalidate()
    with torch.inference_mode():  # before any training FSDP itself cannot
        model(batch(0, width=model.width))
    model.reshard()
    train(model, optimizer, range(1, 3))
    state.close()

    both = []
    for factor in (world, 1.0):  # gloo alone has no premultiplied sum
        model, state, _ = build(Flat())
        for part in modules_of(model) if factor == 1.0 else ():
            part.set_gradient_divide_factor(factor)
        (model(batch(0, width=model.width)).square().mean() * (1.0 if factor == 1.0 else world)).backward()
        both.append([each.grad.to_local().clone() for each in model.parameters() if each.grad is not None])
        state.close()
    found["divide factor"] = max(float((a - b).abs().max()) for a, b in zip(*both, strict=True) if a.numel())
    return found


def test_steps_that_are_not_as_usual() -> None:
    for found in run(odd_steps, WORLD, nodes=NODES):
        assert found["steps after a backward that raised"] == 4
        assert found["finite"]
        assert found["divide factor"] < 1e-5


# ------------------------------------------------------------------------------------------- checkpoints


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
    for found in run(resuming, WORLD, nodes=NODES, timeout_s=300):
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
    world = 2 if nodes in ((1, 1), (2,)) else WORLD
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
    model, said = made(), []
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
    commopt.attach(model, EIGHT)
    with pytest.raises(ConfigurationError) as caught:
        commopt.attach(model, EIGHT)
    said.append(str(caught.value))
    model(batch(0, width=WIDE[0])).sum().backward()
    model.set_all_reduce_hook(lambda gradients: None)
    with pytest.raises(ConfigurationError) as caught:
        model(batch(0, width=WIDE[0])).sum().backward()
    said.append(str(caught.value))
    return said


def test_what_cannot_work_is_named_on_every_rank() -> None:
    words = [
        "use commopt.Hierarchical",
        "equally long",
        "for DDP models only",
        "on a 1-D mesh",
        "plan='adaptive'",
        "is no commopt.Weights",
        "disagree about weights",
        "is no commopt.Weights",
        "were replaced by",
        "all_reduce_hook after commopt.attach",
    ]
    for said in run(refused, WORLD, nodes=NODES):
        for text, word in zip(said, words, strict=True):
            assert word in text


def unequal(rank: int, world: int) -> list[str]:
    model, said = made(), []
    for choice, options in ((Hierarchical(), {}), (Flat(), {"weights": COPIED})):
        with pytest.raises(ConfigurationError) as caught:
            commopt.attach(model, choice, **options)
        said.append(str(caught.value))
    state = commopt.attach(model, Compressed(Quantize(bits=8)))
    model(batch(0, width=WIDE[0])).sum().backward()
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

        collectives = {"gradients": state._registration._scatter}
        type(collectives.get(where) or next(iter(state._registration.gathers.values()))).__call__ = breaks
    began = time.monotonic()
    with pytest.raises(LaneError) as caught:
        train(model, optimizer, range(2, 4))
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("where", ["gradients", "weights"])
def test_a_rank_that_fails_in_a_collective_frees_the_others(where: str) -> None:
    for text, seconds in run(failing, WORLD, where, nodes=NODES, fresh=True):
        assert "rank 1" in text
        assert "out of something" in text
        assert seconds < limit(20)


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
    model = made()
    state: Any = commopt.attach(model, EIGHT, weights=COPIED, record=True)
    train(model, torch.optim.AdamW(model.parameters(), 1e-2), range(4))
    return len(state.timeline().steps), str(state.report())


def test_what_was_recorded_can_be_seen() -> None:
    for steps, report in run(reporting, WORLD, nodes=NODES):
        assert steps >= 3
        assert "all_to_all" in report or "step" in report
