# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of residuals: exact in the same world, complete in another one, refused where they do not fit."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import CommoptError, ConfigurationError
from commopt.attached import checkpoint as saving
from commopt.feedback import ResidualStore, restore
from tests.catalogue import LAYOUTS, run_on
from tests.feedback_training import (
    NUMELS,
    SMALL_BUCKETS,
    STRATEGIES,
    Books,
    Controlled,
    Training,
    Vectors,
    alike,
    gradients,
    residual_of,
    residuals_of,
    total,
    zero_gradients,
)
from tests.hook_training import BUCKETS_CAN_BE_GIVEN
from tests.ranks import run

State = dict[str, Any]
Saved = Callable[[str, str, int, bool], str]
STEPS = 8


def now_and_then(share: float, rank: int, step: int, dtype: torch.dtype = torch.float32) -> Vectors:
    """Return gradients as behind a ReLU, of which only a share is not zero: in one of ten steps, or in most."""
    drawn = torch.Generator().manual_seed(100 * step + rank)
    found = gradients(rank, step, dtype)
    return {name: values * (torch.rand(values.shape, generator=drawn) < share) for name, values in found.items()}


RESTS = {"some rest": 0.1, "none rests": 0.6}


def start(rank: int, world_size: int, strategy: str, option: str = "") -> Training:
    """Make a training; `option` is "scaler", how many elements are not zero, or one of DDP's."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=3) if option == "scaler" else None
    options = {**SMALL_BUCKETS, option: True} if option not in ("", "scaler", *RESTS) else SMALL_BUCKETS
    chosen = partial(now_and_then, RESTS[option]) if option in RESTS else gradients
    return Training(rank, world_size, STRATEGIES[strategy], scaler=scaler, options=options, chosen=chosen)


def save(training: Training, folder: str, gathered: bool) -> None:
    state = training.comm.gathered_state_dict() if gathered else training.comm.state_dict()
    assert (state is None) == (gathered and training.rank > 0)
    scaling = training.scaler.state_dict() if training.scaler else {}
    everything = {"model": training.module.state_dict(), "scaler": scaling, "step": training.steps}
    torch.save(everything, os.path.join(folder, f"training-{training.rank}.pt"))
    if state is not None:
        torch.save(state, os.path.join(folder, f"comm-{training.rank}.pt"))


def saved_state(folder: str, rank: int) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(os.path.join(folder, f"comm-{rank}.pt"), weights_only=True)
    return state


def load(training: Training, folder: str, gathered: bool) -> None:
    everything = torch.load(os.path.join(folder, f"training-{training.rank}.pt"), weights_only=True)
    training.module.load_state_dict(everything["model"])
    training.steps = everything["step"]
    if training.scaler:
        training.scaler.load_state_dict(everything["scaler"])
    training.comm.load_state_dict(saved_state(folder, 0 if gathered else training.rank))


def finish(training: Training) -> tuple[str, dict[str, Vectors]]:
    training.forget()
    while training.steps < STEPS:
        training.step()
    return training.digest(), residuals_of(training.comm.state_dict())


def go_on(
    rank: int, world_size: int, strategy: str, folder: str, saved_after: int, gathered: bool, option: str, way: str
) -> tuple[str, dict[str, Vectors]]:
    """Train to the end: saving on the way ("whole"), from what was saved ("resumed"), or back to it ("rolled back")."""
    training = start(rank, world_size, strategy, option)
    for _ in range({"whole": saved_after, "resumed": 0, "rolled back": STEPS}[way]):
        training.step()
    if way == "whole":
        save(training, folder, gathered)
    else:
        load(training, folder, gathered)
    return finish(training)


def assert_same(first: list[tuple[str, dict[str, Vectors]]], second: list[tuple[str, dict[str, Vectors]]]) -> None:
    for rank, ((digest, residuals), (again, residuals_again)) in enumerate(zip(first, second, strict=True)):
        assert digest == again, f"rank {rank}: results differ"
        assert residuals.keys() == residuals_again.keys()
        for role in residuals:
            for name in residuals[role]:
                assert torch.equal(residuals[role][name], residuals_again[role][name]), (rank, role, name)


@pytest.mark.skipif(not BUCKETS_CAN_BE_GIVEN, reason="before torch 2.12 the first step of a run has buckets of its own")
@pytest.mark.parametrize(
    ("strategy", "layout", "gathered", "option"),
    [
        ("stochastic", "3", True, "find_unused_parameters"),
        ("onebit mean", "2", False, "scaler"),
        ("late 4 bits", "2", False, ""),
        ("inter stochastic", "2x2", True, "scaler"),
        ("inter onebit rms", "2+1", False, ""),
        ("inter top 5%", "2x2", False, ""),
        ("inter adam", "2x2", True, "scaler"),
        ("inter adam", "2+1", False, ""),
        ("rank 2", "3", False, "scaler"),
        ("late rank 2", "2", False, ""),
        ("inter rank 2", "2x2", True, ""),
        ("inter rank 1", "2+1", False, ""),
        ("4 bits", "3", True, "some rest"),
        ("inter 2 bits", "2x2", False, "some rest"),
        ("inter onebit rms", "2+1", False, "some rest"),
        ("inter 4 bits", "2x2", False, "none rests"),
    ],
)
def test_resuming_changes_no_bit(tmp_path: Path, strategy: str, layout: str, gathered: bool, option: str) -> None:
    arguments = (go_on, strategy, str(tmp_path), 4, gathered, option)
    whole = run_on(layout, *arguments, "whole")
    assert len({digest for digest, _ in whole}) == 1
    assert_same(whole, run_on(layout, *arguments, "resumed", fresh=gathered))
    assert_same(whole, run_on(layout, *arguments, "rolled back"))


def load_and_save(rank: int, world_size: int, strategy: str) -> tuple[str, str]:
    """Go on from a state, and from one that was taken right after that was loaded."""
    training = start(rank, world_size, strategy, "some rest")
    for _ in range(4):
        training.step()
    model, state = copy.deepcopy(training.module.state_dict()), training.comm.state_dict()
    digests = [finish(training)[0]]
    for _ in range(2):
        training = start(rank, world_size, strategy, "some rest")
        training.module.load_state_dict(model)
        training.steps = 4
        training.comm.load_state_dict(state)
        state = training.comm.state_dict()
    digests.append(finish(training)[0])
    return digests[0], digests[1]


@pytest.mark.skipif(not BUCKETS_CAN_BE_GIVEN, reason="before torch 2.12 the first step of a run has buckets of its own")
@pytest.mark.parametrize(
    ("strategy", "layout"),
    [("4 bits", "2"), ("inter onebit rms", "2x2"), ("inter rank 2", "1+1"), ("inter adam", "1+1")],
)
def test_a_state_that_is_loaded_and_saved_has_all_that_it_had(strategy: str, layout: str) -> None:
    for whole, resumed in run_on(layout, load_and_save, strategy):
        assert whole == resumed


class Alternating(nn.Module):
    """Layers of two dtypes in turn: DDP fills two buckets at the same time."""

    def __init__(self, first: torch.dtype) -> None:
        super().__init__()
        other = torch.bfloat16 if first == torch.float32 else torch.float32
        dtypes = [first, other, other, first, other, first, first]
        self.layers = nn.ModuleList(nn.Linear(40, 40, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(next(layer.parameters()).dtype)))
        return x.float()


def resume_dtypes(
    rank: int, world_size: int, aggregator: commopt.Aggregator, first: torch.dtype, cap: float, options: dict[str, Any]
) -> tuple[bool, list[list[str]]]:
    def made() -> tuple[nn.Module, TorchDDP, commopt.HookState, torch.optim.Optimizer]:
        torch.manual_seed(1)
        module = Alternating(first)
        ddp = TorchDDP(module, bucket_cap_mb=cap, **options)
        return module, ddp, commopt.attach(ddp, aggregator), torch.optim.SGD(module.parameters(), lr=0.1)

    def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            ddp(x).square().sum().backward()
            optimizer.step()

    module, ddp, state, optimizer = made()
    train(ddp, optimizer, range(4))
    model, saved = copy.deepcopy(module.state_dict()), state.state_dict()
    train(ddp, optimizer, range(4, 8))
    resumed, ddp, state, optimizer = made()
    resumed.load_state_dict(model)
    state.load_state_dict(saved)
    train(ddp, optimizer, range(4, 8))
    pairs = zip(module.parameters(), resumed.parameters(), strict=True)
    buckets = [[piece[0] for piece in bucket] for bucket in saved["buckets"]]
    return all(torch.equal(one, other) for one, other in pairs), buckets


@pytest.mark.skipif(not BUCKETS_CAN_BE_GIVEN, reason="before torch 2.12 the first step of a run has buckets of its own")
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["default", "unused"])
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16], ids=str)
def test_resuming_changes_no_bit_of_models_of_several_dtypes(first: torch.dtype, options: dict[str, Any]) -> None:
    aggregators = (commopt.Compressed(commopt.Quantize(4)), commopt.Compressed(commopt.OneBit()))
    for aggregator, cap in zip((*aggregators, *aggregators), (0.01, 0.01, 0.004, 25.0), strict=True):
        for same, buckets in run(resume_dtypes, 2, aggregator, first, cap, options):
            assert len(buckets) > (1 if cap == 25 else 2)
            assert same, (aggregator, cap)


@pytest.mark.parametrize(
    "bits", [torch.zeros(3, dtype=torch.uint8), torch.zeros(2), torch.zeros(2, 1, dtype=torch.uint8), None], ids=str
)
def test_what_is_no_bit_for_each_element_is_refused(bits: Any) -> None:
    whole: dict[str, Any] = {"residuals": {}, "layouts": {}, "placed": {}, "factors": [], "adam_steps": None}
    pieces = [["w", 0, 10, [10]]]
    restored = ResidualStore()
    good = torch.tensor([0b10000001, 0b01000000], dtype=torch.uint8)
    restore(restored, {**whole, "untouched": [["inter", pieces, {"bits": good}]]}, {"w": 10}, lambda name: 1.0)
    ((path, _), touched), *_ = restored.touched_before.items()
    assert (path, (~touched).nonzero().view(-1).tolist()) == ("inter", [0, 7, 9])
    damaged = {**whole, "untouched": [["inter", pieces, {"bits": bits}]]}
    with pytest.raises(ConfigurationError, match="untouched"):
        restore(ResidualStore(), damaged, {"w": 10}, lambda name: 1.0)


def books_after(rank: int, world_size: int, strategy: str, folder: str) -> Books:
    training = start(rank, world_size, strategy)
    for _ in range(4):
        training.step()
    save(training, folder, gathered=True)
    return training.books()


def move(rank: int, world_size: int, strategy: str, folder: str) -> tuple[Vectors, Books, Books]:
    training = start(rank, world_size, strategy)
    training.comm.load_state_dict(saved_state(folder, 0))
    at_once = residual_of(training.comm.state_dict())
    training.step()
    first = training.books()
    for _ in range(3):
        training.step()
    return at_once, first, training.books()


@pytest.mark.parametrize(
    ("strategy", "old", "new"),
    [
        ("8 bits", "4", "2"),
        ("inter 4 bits", "2x2", "2x2 interleaved"),
        ("inter onebit mean", "2+1", "2x2"),
        ("inter 8 bits", "2x2", "3"),
        ("inter 4 bits", "2x2", "3x2"),
        ("inter top 5%", "2x2", "3x2"),
        ("rank 2", "2", "3"),
        ("inter rank 2", "3x2", "2+1"),
    ],
)
def test_another_world_takes_over_every_residual(tmp_path: Path, strategy: str, old: str, new: str) -> None:
    left = total([books.residual for books in run_on(old, books_after, strategy, str(tmp_path))])
    assert max(float(values.abs().max()) for values in left.values()) > 1e-3
    results = run_on(new, move, strategy, str(tmp_path))
    loaded = total([at_once for at_once, _, _ in results])
    for name in NUMELS:
        torch.testing.assert_close(loaded[name], left[name], rtol=1e-5, atol=1e-5)
    for books in ([first for _, first, _ in results], [last for _, _, last in results]):
        owed, residual = total([each.owed for each in books]), total([each.residual for each in books])
        for name in NUMELS:
            torch.testing.assert_close(
                left[name] + owed[name], books[0].told[name] + residual[name], rtol=1e-5, atol=5e-5
            )


@pytest.mark.parametrize(
    ("strategy", "old"),
    [
        ("top 5%", "2"),
        ("rank 2", "2"),
        ("inter rank 2", "2+1"),
        ("inter 4 bits", "2x2"),
    ],
)
def test_one_rank_alone_applies_every_residual_once(tmp_path: Path, strategy: str, old: str) -> None:
    left = total([books.residual for books in run_on(old, books_after, strategy, str(tmp_path))])
    [(told, rest)] = run(move_to_one_rank, 1, strategy, str(tmp_path))
    for name in NUMELS:
        assert not rest[name].any(), name
        torch.testing.assert_close(told[name], left[name], rtol=1e-5, atol=1e-5)
    assert max(float(values.abs().max()) for values in left.values()) > 1e-3


def move_to_one_rank(rank: int, world_size: int, strategy: str, folder: str) -> tuple[Vectors, Vectors]:
    """Return the results of three steps with gradients of zero, added up, and what is still kept."""
    training = Training(rank, world_size, STRATEGIES[strategy], chosen=zero_gradients)
    training.comm.load_state_dict(saved_state(folder, 0))
    for _ in range(3):
        training.step()
    return training.told, residual_of(training.comm.state_dict())


class Wider(Controlled):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.third.weight = nn.Parameter(torch.ones(7, 101, dtype=dtype))


class Shorter(Controlled):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        del self.third


def error_of(training: Training, state: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(CommoptError) as caught:
        training.comm.load_state_dict(state)
    return type(caught.value).__name__, str(caught.value)


def load_into(
    rank: int, world_size: int, strategy: str, folder: str, part: int | None, make: type[Controlled] = Controlled
) -> tuple[str, str]:
    """Load what rank `part` saved, or this one."""
    training = Training(rank, world_size, STRATEGIES[strategy], make=make)
    return error_of(training, saved_state(folder, rank if part is None else part))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a function that gives the folder of a checkpoint of (strategy, layout, steps, gathered), made once."""
    folders: dict[tuple[str, str, int, bool], str] = {}

    def folder_of(strategy: str, layout: str, steps: int, gathered: bool) -> str:
        wanted = (strategy, layout, steps, gathered)
        if wanted not in folders:
            folders[wanted] = str(tmp_path_factory.mktemp("saved"))
            run_on(layout, go_on, strategy, folders[wanted], steps, gathered, "", "whole")
        return folders[wanted]

    return folder_of


def freeze_late(rank: int, world_size: int, aggregator: str, named: bool) -> list[str]:
    """DDP shows a layer that was frozen after it was made; states from before the first bucket, and after it."""

    def made() -> tuple[TorchDDP, commopt.HookState]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
        ddp = TorchDDP(net, find_unused_parameters=True)
        net[0].requires_grad_(False)
        if named:
            return ddp, commopt.attach(ddp, aggregator)
        state = commopt.HookState(commopt.build_preset(aggregator))
        ddp.register_comm_hook(state, commopt.hook)
        return ddp, state

    def steps(ddp: TorchDDP) -> None:
        for step in range(2):
            ddp.zero_grad()
            ddp(torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))).sum().backward()

    said, (ddp, state) = list[str](), made()
    early = state.state_dict()
    steps(ddp)
    late, parameters = state.state_dict(), len(state.state_dict()["parameters"])
    assert parameters == 4
    state.load_state_dict(early)
    steps(ddp)
    for saved in (late, early):
        ddp, state = made()
        state.load_state_dict(saved)
        state.load_state_dict(state.state_dict())  # as a run does that ends before its first step
        assert len(state.state_dict()["parameters"]) == len(saved["parameters"])
        steps(ddp)
        assert len(state.state_dict()["parameters"]) == parameters
        said += sorted(state.state_dict()["parameters"])
    return said


@pytest.mark.parametrize("aggregator", ["quantized", "hierarchical"])
@pytest.mark.parametrize("named", [True, False])
def test_what_ddp_has_shown_yet_does_not_count(aggregator: str, named: bool) -> None:
    names = ["0.bias", "0.weight", "1.bias", "1.weight"] if named else [f"parameter {number}" for number in range(4)]
    assert run(freeze_late, 2, aggregator, named) == [names * 2] * 2


@pytest.mark.parametrize(("make", "name", "gathered"), [(Wider, "third.weight", True), (Shorter, "third.bias", False)])
def test_a_changed_model_is_refused(saved: Saved, make: type[Controlled], name: str, gathered: bool) -> None:
    folder = saved("8 bits", "2", 4, gathered)
    for kind, message in run(load_into, 2, "8 bits", folder, 0 if gathered else None, make):
        assert kind == ConfigurationError.__name__
        assert name in message


def load_wrongly(rank: int, world_size: int, strategy: str, folder: str, later: str) -> dict[str, str]:
    """Return the error that each mistake leads to."""
    one = rank == 1
    swapped = saved_state(folder, 1 - rank if rank < 2 else rank)
    own, other = saved_state(folder, rank), saved_state(folder, rank)
    other["parameters"]["gain"] = 2
    mistakes = {
        "later on one rank": saved_state(later, rank) if one else own,
        "rank 0's everywhere": saved_state(folder, 0),
        "ranks swapped": swapped,
        "another model on one rank": other if one else own,
        "empty on one rank": {} if one else own,
        "another format": {**own, "format": 999},
    }
    training = start(rank, world_size, strategy)
    errors = {}
    for mistake, state in mistakes.items():
        _, errors[mistake] = error_of(training, state)
        left = residual_of(training.comm.state_dict())
        assert not any(values.any() for values in left.values()), f"{mistake}: half a state was loaded"
    return errors


@pytest.mark.parametrize(("strategy", "layout"), [("8 bits", "3"), ("inter 4 bits", "2x2")])
def test_a_mistake_of_one_rank_is_an_error_on_all(saved: Saved, strategy: str, layout: str) -> None:
    folder, later = saved(strategy, layout, 3, False), saved(strategy, layout, 4, False)
    for errors in run_on(layout, load_wrongly, strategy, folder, later, timeout_s=30):
        assert len(errors) == 6
        assert "steps" in errors["later on one rank"]
        assert "place" in errors["rank 0's everywhere"]
        assert "gain" in errors["another model on one rank"]
        assert "999" in errors["another format"]


@pytest.mark.parametrize(
    ("old", "layout", "new", "world_size", "named"),
    [
        ("8 bits", "2x2", "inter 8 bits", 4, ("inter",)),
        ("inter 8 bits", "2x2", "8 bits", 4, ("inter",)),
        ("8 bits", "3", "8 bits", 2, ("gathered_state_dict", "commopt.merged_state")),
    ],
)
def test_another_aggregators_or_worlds_part_is_refused(
    saved: Saved, old: str, layout: str, new: str, world_size: int, named: tuple[str, ...]
) -> None:
    nodes = (2, 2) if world_size == 4 else None
    for kind, message in run(load_into, world_size, new, saved(old, layout, 4, False), None, nodes=nodes):
        assert kind == ConfigurationError.__name__
        assert all(name in message for name in named)


def describe(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    training = start(rank, world_size, "8 bits")
    for _ in range(3):
        training.step()
    state = training.comm.state_dict()
    copy = {key: values.clone() for key, values in state["residuals"]["/worker"].items()}
    training.step()
    for key, values in copy.items():
        assert torch.equal(values, state["residuals"]["/worker"][key]), "a saved state changed later"
    return state, training.comm.gathered_state_dict()


def test_what_a_state_holds() -> None:
    results = run(describe, 2)
    for state, _ in results:
        assert state["steps"] == 3
        assert state["parameters"] == NUMELS
        assert {piece[0] for bucket in state["buckets"] for piece in bucket} == set(NUMELS)
        assert set(state["residuals"]) == {"/worker"}
        assert not state["factors"]
        assert set(state) == {
            *("format", "aggregator", "steps", "nodes", "place", "members", "parameters", "buckets", "residuals"),
            *(
                "layouts",
                "placed",
                "untouched",
                "factors",
                "plan",
                "tuned",
                "sharding",
                "dropped",
                "expected_square",
                "adam_steps",
            ),
        }
    gathered, none = (gathered for _, gathered in results)
    assert none is None
    assert gathered is not None
    assert len(gathered["ranks"]) == 2


# ------------------------------------------------------------------------------------------- all ranks' states


def gather_in_pieces(rank: int, world_size: int, strategy: str) -> tuple[State, State | None, list[int], int]:
    """Return this rank's state, the gathered one, the bytes of each message, and of a message at most."""
    training = start(rank, world_size, strategy)
    training.step()
    sent, limit = list[int](), 5000

    def listening(operations: list[Any]) -> Any:
        sent.extend(each.tensor.nbytes for each in operations)
        return pass_on(operations)

    pass_on = dist.batch_isend_irecv
    with patch.object(dist, "batch_isend_irecv", listening), patch.object(saving, "MESSAGE_NBYTES", limit):
        gathered = training.comm.gathered_state_dict()
    return training.comm.state_dict(), gathered, sent, limit


@pytest.mark.parametrize(("strategy", "layout"), [("8 bits", "3"), ("inter rank 2", "2x2 interleaved")])
def test_states_are_gathered_in_bounded_messages(strategy: str, layout: str) -> None:
    results = run_on(layout, gather_in_pieces, strategy)
    (_, gathered, received, limit), *others = results
    assert all(none is None for _, none, _, _ in others)
    assert gathered is not None
    assert alike(gathered, commopt.merged_state([state for state, _, _, _ in results]))
    for _, _, sent, _ in others:
        assert len(sent) > 1
        assert max(sent) <= limit
    assert sorted(received) == sorted(nbytes for _, _, sent, _ in others for nbytes in sent)


def load_merged(rank: int, world_size: int, strategy: str, path: str) -> tuple[Vectors, str]:
    training = start(rank, world_size, strategy)
    training.comm.load_state_dict(torch.load(path, weights_only=True))
    at_once = residual_of(training.comm.state_dict())
    for _ in range(3):
        assert training.step()
    return at_once, training.digest()


@pytest.mark.parametrize(
    ("strategy", "old", "left", "new", "lost"),
    [
        ("8 bits", "3", (0, 2), "2", "rank 1 (node 0)"),
        ("inter 4 bits", "2x2 interleaved", (0, 2), "2x2", "rank 1 (node 1), 3 (node 1)"),
        ("inter rank 2", "2x2", (0, 1, 3), "2x2", "rank 2 (node 1)"),
        ("inter rank 2", "2x2", (3,), "1", "rank 0 (node 0), 1 (node 0), 2 (node 1)"),
    ],
)
def test_what_is_left_of_a_checkpoint_is_loaded(
    saved: Saved,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    strategy: str,
    old: str,
    left: tuple[int, ...],
    new: str,
    lost: str,
) -> None:
    folder = saved(strategy, old, 4, False)
    states = [saved_state(folder, rank) for rank in left]
    merged = commopt.merged_state(states)
    [warning] = caplog.messages
    assert lost in warning
    assert f"{LAYOUTS[old][0] - len(left)} of {LAYOUTS[old][0]}" in warning
    torch.save(merged, tmp_path / "merged.pt")
    results = run_on(new, load_merged, strategy, str(tmp_path / "merged.pt"))
    assert len({digest for _, digest in results}) == 1
    loaded, wanted = total([at_once for at_once, _ in results]), total([residual_of(state) for state in states])
    assert max(float(values.abs().max()) for values in wanted.values()) > 1e-3
    for name in NUMELS:
        torch.testing.assert_close(loaded[name], wanted[name], rtol=1e-5, atol=1e-5)


def load_what_is_here(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    """Merge the files of one's own node only."""
    return error_of(start(rank, world_size, "8 bits"), commopt.merged_state([saved_state(folder, rank)]))


def test_ranks_must_merge_the_same_states(saved: Saved) -> None:
    for kind, message in run(load_what_is_here, 2, saved("8 bits", "3", 4, False)):
        assert kind == "MismatchError"
        assert "parts [0] of 3" in message
        assert "parts [1] of 3" in message


def test_states_of_several_checkpoints_are_not_merged(saved: Saved) -> None:
    folder, later = saved("8 bits", "3", 3, False), saved("8 bits", "3", 4, False)
    one, two = saved_state(folder, 0), saved_state(folder, 1)
    mistakes: list[tuple[Any, tuple[str, ...]]] = [
        ([], ("empty", "one rank or more")),
        (None, ("NoneType", "merged_state([state])")),
        ([one, saved_state(later, 1)], ("places 0 and 1", "steps", "same step")),
        ([one, two, one], ("[0, 1, 0]", "once")),
        ([one, None], ("None", "state_dict()")),
        ([one, commopt.merged_state([two])], ("ranks", "state_dict()")),
        ([{**one, "steps": "3"}], ("steps", "'3'", "int")),
    ]
    for parts, words in mistakes:
        with pytest.raises(ConfigurationError) as caught:
            commopt.merged_state(parts)
        assert all(word in str(caught.value) for word in words), str(caught.value)
