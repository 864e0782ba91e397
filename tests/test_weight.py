# SPDX-License-Identifier: Apache-2.0
"""`comm.weight(n)`: the average counts what each rank had, and every rank hears of a weight that is none."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import Adam, Aggregator, Cast, CommoptError, Compressed, ConfigurationError, Flat, Hierarchical, OneBit
from commopt.hooks.presets import build_preset
from tests.catalogue import run_on
from tests.feedback_training import (
    NUMELS,
    STRATEGIES,
    Controlled,
    Records,
    Training,
    assert_conserved,
    assert_something_left,
    gradients,
)
from tests.gpu_training import ON_GPU, on_ranks
from tests.hook_training import assert_identical
from tests.ranks import run
from tests.sharded_training import same

EPS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
PACKED = Compressed(Cast(), feedback=None, packed=True)
LOSSLESS: dict[str, Aggregator] = {
    "flat": Flat(),
    "hierarchical": Hierarchical(),
    "leader": Hierarchical(form="leader"),
    "local": commopt.LocalSGD(period=2, start_step=1000),
}
EXACT = [(name, dtype) for name in LOSSLESS for dtype in EPS]


def ragged(rank: int, step: int) -> float:
    """Return weights of which some are zero, some equal, and some far apart."""
    return ((3, 0, 7.5, 3, 1000, 1), (1, 2, 3, 4, 5, 6), (0, 0.125, 0, 2e9, 0, 1))[step % 3][rank]


def averaged(rank: int, world_size: int, choice: Aggregator | str, dtype: torch.dtype, steps: int) -> list[Any]:
    """Return the averages of some steps, and what each rank had; a rank without samples has NaN."""
    ddp = TorchDDP(Controlled(dtype), bucket_cap_mb=0.002)
    comm, found = commopt.attach(ddp, choice), []
    for step in range(steps):
        own = gradients(rank, step, dtype)
        if ragged(rank, step) == 0:
            own = {name: torch.full_like(values, float("nan")) for name, values in own.items()}
        ddp.zero_grad()
        comm.weight(ragged(rank, step))
        ddp(own).backward()
        found.append({name: p.grad.flatten().clone() for name, p in ddp.module.named_parameters()})
    calls = comm._registration.sent._known["weights", "world"].before[0]
    comm.close()
    return [found, calls]


def weighted_mean(world_size: int, step: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return float64's weighted mean, and that of the magnitudes."""
    weights = [ragged(rank, step) for rank in range(world_size)]
    mean = {name: torch.zeros(numel, dtype=torch.float64) for name, numel in NUMELS.items()}
    magnitude = {name: values.clone() for name, values in mean.items()}
    for rank, weight in enumerate(weights):
        for name, values in gradients(rank, step, dtype).items():
            mean[name] += values.double() * (weight / sum(weights))
            magnitude[name] += values.double().abs() * (weight / sum(weights))
    return mean, magnitude


@pytest.mark.parametrize(("name", "dtype"), [*EXACT, ("packed", torch.bfloat16)], ids=str)
@pytest.mark.parametrize("layout", ["2x2", "3", "2+1", "3x2"])
def test_the_average_is_float64s_weighted_mean(name: str, layout: str, dtype: torch.dtype) -> None:
    """Up to the roundings of a plain average: of each rank's share, of its values times that, and of each sum."""
    steps = 3
    outcomes = run_on(layout, averaged, LOSSLESS.get(name, Hierarchical(PACKED)), dtype, steps)
    world_size = len(outcomes)
    for step in range(steps):
        mean, magnitude = weighted_mean(world_size, step, dtype)
        for found, calls in outcomes:
            assert calls == steps
            for key, values in found[step].items():
                assert torch.equal(values, outcomes[0][0][step][key]), "replicas differ"
                error, bound = (values.double() - mean[key]).abs(), 1.01 * (world_size + 3) * EPS[dtype]
                assert bool((error <= bound * magnitude[key]).all()), f"{key} of step {step}"


def whole(rank: int, step: int) -> float:
    return (1.0, 2.0, 4.0, 1.0)[rank]


def averaged_whole(
    rank: int, world_size: int, device: str, choice: Aggregator, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the average of integers whose weights are powers of two that add up to one."""
    ddp = TorchDDP(Controlled(dtype).to(device))
    comm = commopt.attach(ddp, choice)
    comm.weight(whole(rank, 0))
    ddp({name: values.to(device) for name, values in integers(rank, dtype).items()}).backward()
    found = {name: p.grad.flatten().cpu() for name, p in ddp.module.named_parameters()}
    comm.close()
    return found


def integers(rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: (8 * values).round().clamp(-15, 15).to(dtype) for name, values in gradients(rank, 0).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("device", "aggregator"),
    [
        *(("cpu", each) for each in (*LOSSLESS.values(), Hierarchical(PACKED))),
        *(pytest.param("cuda", each, marks=ON_GPU) for each in LOSSLESS.values()),
    ],
    ids=str,
)
def test_where_no_sum_rounds_the_average_is_float64s_rounded_once(
    device: str, aggregator: Aggregator, dtype: torch.dtype
) -> None:
    exact = {
        name: sum(integers(rank, dtype)[name].double() * whole(rank, 0) / 8 for rank in range(4)).to(dtype)  # type: ignore[union-attr]
        for name in NUMELS
    }
    for found in on_ranks(device, averaged_whole, 4, aggregator, dtype, nodes=(2, 2)):
        assert all(torch.equal(found[name], exact[name]) for name in NUMELS)


# ------------------------------------------------------------------------------------------- as without weights


def trained(rank: int, world_size: int, strategy: str, weight: float | None) -> str:
    given = None if weight is None else lambda rank, step: weight * 2.0**step
    training = Training(rank, world_size, STRATEGIES.get(strategy) or LOSSLESS[strategy], weight=given)
    for _ in range(6):
        training.step()
    return training.digest()


@pytest.mark.parametrize("strategy", ["hierarchical", "inter 4 bits", "top 5%", "inter rank 2", "inter onebit rms"])
@pytest.mark.parametrize("layout", ["2x2", "2+1"])
def test_equal_weights_leave_the_bits_of_a_plain_average(strategy: str, layout: str) -> None:
    plain = run_on(layout, trained, strategy, None)
    assert plain == run_on(layout, trained, strategy, 0.3) == run_on(layout, trained, strategy, 512.0)


def keep_books(rank: int, world_size: int, strategy: str, growth: float | None) -> tuple[Any, str]:
    scaler = None
    if growth is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=growth, growth_interval=3)
    training = Training(rank, world_size, STRATEGIES[strategy], scaler=scaler, weight=lambda r, s: 1 + (3 * r + s) % 5)
    for _ in range(20):
        training.step()
    return training.books(), training.digest()


@pytest.mark.parametrize(
    ("strategy", "layout", "growth"),
    [
        ("inter 4 bits", "2x2", None),
        ("4 bits", "3", None),
        ("inter onebit mean", "2+1", 2.0),
        ("inter rank 2", "2x2", None),
        ("rank 2", "3", 2.0),
        ("inter top 5%", "3x2", None),
        ("inter served top 5%", "3x2", None),
        ("late 4 bits", "2x2", None),
    ],
)
def test_what_was_applied_and_the_residuals_are_the_weighted_sums(
    strategy: str, layout: str, growth: float | None
) -> None:
    results = run_on(layout, keep_books, strategy, growth)
    assert_identical([digest for _, digest in results])
    books = [each for each, _ in results]
    assert_conserved(books)
    assert_something_left(books)


# ------------------------------------------------------------------------------------------- loops


def one_step(ddp: Any, comm: Any, rank: int, step: int, weight: Any = None) -> str:
    """Make one averaged backward, weighed unless `weight` is None; return the error that it raised."""
    try:
        if weight is not None:
            comm.weight(weight)
        ddp(gradients(rank, step)).backward()
    except CommoptError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def one_is_wrong(rank: int, world_size: int, weights: Sequence[Any], aggregator: Aggregator) -> list[str]:
    """Give the last rank's weight of each step from `weights`, where others have 3; None gives none."""
    ddp = TorchDDP(Controlled())
    comm, told = commopt.attach(ddp, aggregator, timeout=5), []
    for step, weight in enumerate(weights):
        text = one_step(ddp, comm, rank, step, weight if rank == world_size - 1 else 3)
        if text.startswith("ConfigurationError: weight("):  # a loop that goes on
            told.append(text)
            with contextlib.suppress(CommoptError):
                ddp(gradients(rank, step)).backward()
            break
        told.append(text)
        if text:
            break
    return told


WRONG: list[Any] = [-1, float("nan"), float("inf"), "8", None, True, torch.ones(2), [3]]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("first", [True, False])
def test_what_is_no_weight_is_an_error_on_every_rank(wrong: Any, first: bool) -> None:
    if wrong is None:
        pytest.skip("comm.weight(None) is below")
    weights = [wrong] if first else [2, 2, wrong]
    *others, culprit = run(one_is_wrong, 4, weights, Hierarchical(), nodes=(2, 2), fresh=True)
    assert culprit[:-1] == [""] * (len(weights) - 1)
    assert culprit[-1].startswith(f"ConfigurationError: weight({wrong!r}) must be a finite number, 0 or more"), culprit
    for told in others:
        assert told[:-1] == culprit[:-1]
        assert told[-1].startswith("ConfigurationError: rank 3 "), told
        assert "weight(" in told[-1]


@pytest.mark.parametrize("aggregator", [Hierarchical(), commopt.LocalSGD(period=8)], ids=str)
def test_a_rank_that_gives_no_weight_any_more_is_named_on_all_that_wait_for_it(aggregator: Aggregator) -> None:
    found = run(one_is_wrong, 4, [2, 2, None], aggregator, nodes=(2, 2), fresh=True)
    alone = found[:2] if isinstance(aggregator, commopt.LocalSGD) else []  # the other node hears of it in the round
    for told in found[len(alone) :]:
        assert told[:2] == ["", ""]
        assert told[2].startswith("ConfigurationError: rank 3 gave no weight() for the step after 2 "), told


def test_where_one_rank_never_gives_weights_nobody_hangs() -> None:
    """The rank that gives none is in its average, where it learns why nobody comes."""
    found = run(one_is_wrong, 2, [None], Flat(), nodes=(1, 1), fresh=True, timeout_s=25)
    assert "rank 1 did not reach the first weight()" in found[0][0], found
    assert found[1][0].startswith("LaneError"), found


def nothing(rank: int, world_size: int) -> tuple[list[str], dict[str, Tensor]]:
    ddp = TorchDDP(Controlled())
    comm = commopt.attach(ddp, Hierarchical())
    logging.getLogger("commopt").addHandler(records := Records())
    for step in range(3):
        ddp.zero_grad()
        comm.weight(0)
        ddp({name: values * float("nan") for name, values in gradients(rank, step).items()}).backward()
    logging.getLogger("commopt").removeHandler(records)
    return records.messages, {name: p.grad.clone() for name, p in ddp.module.named_parameters() if p.grad is not None}


def test_without_any_samples_the_average_is_zero_and_a_warning_says_so_once() -> None:
    for said, found in run(nothing, 2, nodes=(1, 1)):
        assert len([each for each in said if "weight(0) on every rank" in each]) == 1
        assert len(found) == len(NUMELS)
        assert all(not values.any() for values in found.values())


def accumulated(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    """Two backwards under no_sync, each with its weight, then the averaged one; and all of the weight at once."""
    found = []
    for at_once in (False, True):
        ddp = TorchDDP(Controlled())
        comm = commopt.attach(ddp, Hierarchical())
        weights = [1.0 + rank, 0.0, 4.0]
        if at_once:
            comm.weight(torch.tensor(sum(weights)))
        for micro, weight in enumerate(weights):
            if not at_once:
                comm.weight(weight)
            with ddp.no_sync() if micro < 2 else contextlib.nullcontext():
                ddp(gradients(rank, micro)).backward()
        found.append({name: p.grad.flatten().double() for name, p in ddp.module.named_parameters()})
        comm.close()
    total, mean = sum(5.0 + each for each in range(world_size)), {name: torch.zeros(n) for name, n in NUMELS.items()}
    for each in range(world_size):
        for micro in range(3):
            for name, values in gradients(each, micro).items():
                mean[name] = mean[name] + values.double() * (5.0 + each) / total
    return [*found, mean]


def test_weights_add_up_under_no_sync() -> None:
    for step_by_step, at_once, mean in run(accumulated, 3):
        for name in NUMELS:
            assert torch.equal(step_by_step[name], at_once[name])
            assert torch.allclose(at_once[name], mean[name], rtol=1e-5, atol=1e-5)


def uneven_inputs(rank: int, world_size: int, aggregator: Aggregator) -> list[Tensor]:
    """Return the first weight of the averages; rank r has 2 + r batches, with weights of 1 + r."""
    ddp = TorchDDP(Controlled())
    comm, found = commopt.attach(ddp, aggregator), []
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    with ddp.join():
        for step in range(2 + rank):
            optimizer.zero_grad()
            comm.weight(1 + rank)
            ddp(gradients(rank, step)).backward()
            found.append(ddp.module.first.weight.grad.clone())
            optimizer.step()
    return found


@pytest.mark.parametrize("choice", [Hierarchical(), STRATEGIES["inter 8 bits"]], ids=str)
def test_a_rank_without_further_data_counts_for_nothing_in_join(choice: Aggregator) -> None:
    exact = choice.lossless
    found = run(uneven_inputs, 3, choice, nodes=(2, 1))
    for step in range(4):
        there = [rank for rank in range(3) if step < 2 + rank]
        own = [gradients(rank, step)["first.weight"].view(60, 50) * (1 + rank) for rank in there]
        mean = torch.stack(own).sum(0) / sum(1 + rank for rank in there)
        for rank in there:
            assert torch.allclose(found[rank][step], mean, atol=1e-5 if exact else 0.3)


def with_adam(rank: int, world_size: int) -> str:
    ddp = TorchDDP(Controlled())
    comm = commopt.attach(ddp, Hierarchical(Compressed(OneBit(), adam=Adam())))
    with pytest.raises(ConfigurationError) as caught:
        comm.weight(3)
    return str(caught.value)


def test_directions_have_no_weights() -> None:
    for text in run(with_adam, 2, nodes=(1, 1)):
        assert "leave out adam=" in text


def abandoned(rank: int, world_size: int) -> bool:
    """A forward that no backward follows, as where a loop skips a batch, leaves nothing behind."""
    ddp = TorchDDP(Controlled())
    comm = commopt.attach(ddp, Flat())
    comm.weight(100 * rank)
    ddp(gradients(rank, 0))
    comm.weight(1)
    ddp(gradients(rank, 1)).backward()
    found = {name: p.grad.flatten() for name, p in ddp.module.named_parameters()}
    own = [gradients(each, 1) for each in range(world_size)]
    mean = {name: torch.stack([each[name] for each in own]).mean(0) for name in NUMELS}
    return all(torch.allclose(found[name], mean[name], atol=1e-6) for name in NUMELS)


def test_weights_of_a_forward_without_a_backward_are_forgotten() -> None:
    assert run(abandoned, 2) == [True, True]


def looked_at(rank: int, world_size: int) -> tuple[str, list[int]]:
    """The first rank looks at the model between two steps, in a forward with gradients that it makes alone."""
    training = Training(rank, world_size, Flat(), weight=lambda rank, step: rank + step + 1.0)
    training.ddp.broadcast_buffers = False
    for _ in range(4):
        training.step()
        if rank == 0:
            training.ddp(gradients(0, 100))
    found = training.comm._registration.sent._known.items()
    calls = [alike.before[0] for key, alike in found if isinstance(key, tuple) and key[0] == "weights"]
    return training.digest(), calls


def test_a_forward_that_one_rank_makes_alone_exchanges_no_weights() -> None:
    digests, calls = zip(*run(looked_at, 3), strict=True)
    assert_identical(list(digests))
    assert calls == ([4], [4], [4])


# ------------------------------------------------------------------------------------------- rounds


def local_sgd(rank: int, world_size: int, average: commopt.LocalSGD, steps: int, weigh: bool) -> list[Tensor]:
    """Return the parameters after SGD's steps: before the last round lands, and after it."""
    torch.manual_seed(0)
    module = nn.Linear(40, 30)
    ddp = TorchDDP(module)
    comm = commopt.attach(ddp, average)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.5)
    data = [torch.randn(5, 40, generator=torch.Generator().manual_seed(10 * step + rank)) for step in range(steps + 1)]
    for step in range(steps):
        optimizer.zero_grad()
        if weigh:
            comm.weight(work(rank, step))
        ddp(data[step]).square().mean().backward()
        optimizer.step()
    before = module.weight.detach().clone()
    if weigh:
        comm.weight(1)
    ddp(data[steps])
    return [before, module.weight.detach().clone()]


def work(rank: int, step: int) -> float:
    return ((1, 3, 0, 6), (2, 2, 1, 0), (5, 0, 1, 1))[step][rank]


@pytest.mark.parametrize("nodes", [(2, 2), (3, 1), (1, 1)], ids=str)
@pytest.mark.parametrize(
    "average",
    [
        commopt.LocalSGD(period=3),
        commopt.LocalSGD(period=3, outer=commopt.Outer(lr=0.999999)),  # by way of deltas
        commopt.LocalSGD(period=3, compressor=Cast(torch.float16)),
    ],
    ids=str,
)
def test_a_round_weighs_nodes_by_what_their_gradients_counted_for(
    average: commopt.LocalSGD, nodes: tuple[int, ...]
) -> None:
    found = run(local_sgd, sum(nodes), average, 3, True, nodes=nodes)
    places = [list(range(sum(nodes[:k]), sum(nodes[: k + 1]))) for k in range(len(nodes))]
    totals = [sum(work(rank, step) for rank in place for step in range(3)) for place in places]
    parts = [found[place[0]][0].double() * total for place, total in zip(places, totals, strict=True)]
    mean = torch.stack(parts).sum(0) / sum(totals)
    assert not torch.equal(found[0][0], found[-1][0]), "nodes learned nothing by themselves"
    for _, after in found:
        assert torch.equal(after, found[0][1])
        assert torch.allclose(after.double(), mean, rtol=0, atol=2e-3 if average.compressor else 1e-6)


def equal_rounds(rank: int, world_size: int, average: commopt.LocalSGD, weight: float | None) -> list[Tensor]:
    torch.manual_seed(0)
    ddp = TorchDDP(nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20)))
    comm = commopt.attach(ddp, average)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(13):
        optimizer.zero_grad()
        if weight is not None:
            comm.weight(weight)
        torch.manual_seed(10 * step + rank)
        ddp(torch.randn(5, 40)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


@pytest.mark.parametrize("nodes", [(2, 2), (2, 1)], ids=str)
@pytest.mark.parametrize(
    "text",
    ["diloco:period=4", "onebit_local:period=4:delay=2:fragments=2", "LocalSGD", "onebit_local:period=3:merge=0.5"],
)
def test_equal_weights_leave_the_bits_of_local_sgd(text: str, nodes: tuple[int, ...]) -> None:
    average = commopt.LocalSGD(period=3) if text == "LocalSGD" else build_preset(text)
    plain, weighted = (run(equal_rounds, sum(nodes), average, weight, nodes=nodes) for weight in (None, 8.0))
    assert all(same(one, other) for one, other in zip(plain, weighted, strict=True))


def resumed_rounds(rank: int, world_size: int, average: commopt.LocalSGD) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters of a run, and of one that goes on from its checkpoint in the middle of a round."""
    found, saved = [], dict[str, Any]()
    for resumes in (False, True):
        torch.manual_seed(0)
        ddp = TorchDDP(nn.Linear(40, 30))
        comm = commopt.attach(ddp, average)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.5)
        if resumes:
            ddp.module.load_state_dict(saved["model"])
            comm.load_state_dict(saved["comm"])
        for step in range(2 * resumes, 5):
            optimizer.zero_grad()
            comm.weight(1 + rank * step % 4)
            torch.manual_seed(10 * step + rank)
            ddp(torch.randn(5, 40)).square().mean().backward()
            optimizer.step()
            if step == 1 and not resumes:
                model = {name: each.clone() for name, each in ddp.module.state_dict().items()}
                saved = {"model": model, "comm": comm.state_dict()}
        found.append([p.detach().clone() for p in ddp.parameters()])
    with pytest.raises(ConfigurationError, match=r"rounds\['weights'\]"):
        comm.load_state_dict({**saved["comm"], "rounds": {**saved["comm"]["rounds"], "weights": [-1.0]}})
    return found[0], found[1]


def test_the_weights_of_a_round_under_way_are_in_checkpoints() -> None:
    for went_on, resumed in run(resumed_rounds, 2, commopt.LocalSGD(period=3), nodes=(1, 1)):
        assert same(went_on, resumed)
