# SPDX-License-Identifier: Apache-2.0
"""A state is input: whatever is wrong with it is one error on every rank, and what was there before stays."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from commopt import Aggregator, Cast, CommoptError, Compressed, ConfigurationError, Feedback, Layout, MismatchError
from commopt.feedback import Piece, ResidualStore, restore, save, spread
from commopt.feedback.factors import RightFactor
from tests.catalogue import run_on
from tests.feedback_training import STRATEGIES, Training, alike, flat
from tests.ranks import run

State = dict[str, Any]

# For each of the cases below; COMMOPT_FUZZ_EXAMPLES=4000 is a thorough run.
EXAMPLES = int(os.environ.get("COMMOPT_FUZZ_EXAMPLES", "25"))


def refused(training: Training, state: object) -> CommoptError | None:
    """Return the error that loading raises, if any; then nothing may have changed."""
    before, stats = training.comm.state_dict(), training.comm.stats()
    try:
        training.comm.load_state_dict(state)  # type: ignore[arg-type]
    except CommoptError as error:
        after, stats_after = training.comm.state_dict(), training.comm.stats()
        assert alike(before, after)
        assert {key: stats[key] for key in ("steps", "residual_norm", "dropped_commits")} == {
            key: stats_after[key] for key in ("steps", "residual_norm", "dropped_commits")
        }
        return error
    return None


# ------------------------------------------------------------------------------------------- one by one


def setting(role: str, **values: object) -> Callable[[State], None]:
    """Return what puts a value over the second element of the residual of first.weight, or of what is told instead."""

    def damage(state: State) -> None:
        by_range = state["residuals"][role]
        key = next(key for key in by_range if key.startswith("first.weight"))
        if "tensor" in values:
            by_range[key] = values["tensor"](by_range[key])  # type: ignore[operator]
        else:
            by_range[key][1] = values["element"]

    return damage


def factor(change: Callable[[Tensor], object]) -> Callable[[State], None]:
    def damage(state: State) -> None:
        state["factors"][0]["right"] = change(state["factors"][0]["right"])

    return damage


def put(value: object, *keys: str | int) -> Callable[[State], None]:
    """Return what puts `value` under the last of the keys that lead through a state, or removes it if it is `...`."""

    def damage(state: Any) -> None:
        for key in keys[:-1]:
            state = state[key]
        if value is ...:
            del state[keys[-1]]
        else:
            state[keys[-1]] = value

    return damage


def repeat_bucket(state: State) -> None:
    state["buckets"].append(state["buckets"][0])


def as_complex(values: Tensor) -> Tensor:
    return values.to(torch.complex64)


def longer(values: Tensor) -> Tensor:
    return torch.cat([values, values[:1]])


# What is wrong, and what the message must name: parameter, value, rule.
Cases = dict[str, tuple[Callable[[State], None], tuple[str, ...]]]
WORKER: Cases = {
    "NaN": (setting("/worker", element=float("nan")), ("first.weight", "element 1", "nan", "finite")),
    "infinite": (setting("/worker", element=float("-inf")), ("first.weight", "-inf", "finite")),
    "absurd": (setting("/worker", element=1e38), ("first.weight", "e+37", "magnitude 1e+30")),
    "too long": (setting("/worker", tensor=longer), ("first.weight", "float32 [3001]", "shape [3000]")),
    "too short": (setting("/worker", tensor=lambda v: v[1:]), ("first.weight", "float32 [2999]", "shape [3000]")),
    "a matrix": (setting("/worker", tensor=lambda v: v.view(60, 50)), ("first.weight", "[60, 50]", "shape [3000]")),
    "bool": (setting("/worker", tensor=Tensor.bool), ("first.weight", "bool", "float32 or bfloat16")),
    "int": (setting("/worker", tensor=Tensor.long), ("first.weight", "int64", "float32 or bfloat16")),
    "complex": (setting("/worker", tensor=as_complex), ("first.weight", "complex64", "float32 or bfloat16")),
    "half": (setting("/worker", tensor=Tensor.half), ("first.weight", "float16", "float32 or bfloat16")),
    "sparse": (setting("/worker", tensor=Tensor.to_sparse), ("first.weight", "sparse", "float32 or bfloat16")),
    "meta": (setting("/worker", tensor=lambda v: v.to("meta")), ("first.weight", "meta", "float32 or bfloat16")),
    "a list": (setting("/worker", tensor=Tensor.tolist), ("first.weight", "[", "float32 or bfloat16")),
    "steps as text": (put("7", "steps"), ("steps", "'7'", "int")),
    "steps below zero": (put(-1, "steps"), ("steps", "-1", "0")),
    "steps beyond all": (put(1 << 63, "steps"), ("steps", "9223372036854775808")),
    "no steps": (put(..., "steps"), ("steps", "state_dict()")),
    "no residuals": (put(..., "residuals"), ("residuals", "state_dict()")),
    "no layouts": (put(..., "layouts"), ("layouts", "state_dict()")),
    "no buckets": (put(..., "buckets"), ("buckets", "state_dict()")),
    "no place": (put(..., "place"), ("place", "state_dict()")),
    "no such place": (put(2, "place"), ("place", "2", "below 2")),
    "no residual of a layout": (put({}, "residuals", "/worker"), ("residuals['/worker']", "[]", "first.weight")),
    "another kind": (put({}, "residuals", "/chief"), ("residuals", "/chief")),
    "unknown name": (put("fourth", "layouts", "/worker", 0, 0, 0), ("layouts['/worker']", "fourth", "parameters")),
    "beyond the end": (put(3001, "layouts", "/worker", 0, 0, 2), ("layouts['/worker']", "3001", "elements")),
    "a shape of another size": (put([60, 51], "layouts", "/worker", 0, 0, 3), ("layouts['/worker']", "51", "elements")),
    "part of a parameter": (put(1, "buckets", 0, 0, 1), ("buckets", "[1:", "whole parameter")),
    "a bucket twice": (repeat_bucket, ("buckets", "[0:", "no other bucket")),
    "buckets as text": (put("all", "buckets"), ("buckets", "'all'", "list")),
    "plan that is none": (put("{", "plan"), ("plan", "JSON")),
    "plan as a number": (put(7, "plan"), ("plan", "JSON")),
    "tuned that is none": (put("[]", "tuned"), ("tuned", "list")),
    "factors as a dict": (put({}, "factors"), ("factors", "{}", "list")),
}
FACTORS: Cases = {
    "NaN": (factor(lambda v: v * float("nan")), ("factors[0]['right']", "nan", "above 1")),
    "absurd": (factor(lambda v: v * 1e3), ("factors[0]['right']", "norm", "above 1")),
    "too long": (factor(lambda v: torch.cat([v, 0 * v[:1]])), ("factors[0]", "first.weight", "elements")),
    "vector": (factor(lambda v: v[0]), ("factors[0]['right']", "[2]", "matrix")),
    "double": (factor(Tensor.double), ("factors[0]['right']", "float64", "float32")),
    "nothing": (factor(lambda v: None), ("factors[0]['right']", "None", "Tensor")),
    "unknown name": (put("fourth", "factors", 0, "piece", 0), ("factors[0]", "fourth", "parameters")),
    "no path": (put(..., "factors", 0, "path"), ("factors[0]['path']", "state_dict()")),
}
CASES: dict[str, Cases] = {"8 bits": WORKER, "rank 2": FACTORS, "top 5%": {"NaN": WORKER["NaN"]}}


def load_damaged(rank: int, world_size: int, strategy: str) -> dict[str, str]:
    """Return the message for each way in which the state of rank 1 is damaged."""
    training = Training(rank, world_size, STRATEGIES[strategy])
    for _ in range(3):
        training.step()
    good, messages = training.comm.state_dict(), {}
    for name, (damage, _) in CASES[strategy].items():
        state = deepcopy(good)
        if rank == 1:
            damage(state)
        error = refused(training, state)
        assert type(error) is ConfigurationError, (name, error)
        messages[name] = str(error)
    assert training.step()
    return messages


@pytest.mark.parametrize("strategy", CASES)
def test_what_is_wrong_is_named_on_every_rank(strategy: str) -> None:
    first, second = run(load_damaged, 2, strategy, timeout_s=300)
    assert first == second
    failures = []
    for name, (_, words) in CASES[strategy].items():
        message = first[name]
        if any(word not in message for word in ("rank 1", *words)) or len(message) > 600:
            failures.append(f"{name}: {message!r} should name {words}")
        if not any(fix in message for fix in ("start without", "to_json()")):
            failures.append(f"{name}: {message!r} should say what to do")
    assert not failures, "\n".join(failures)


def load_for_16_bits(rank: int, world_size: int, aggregator: Aggregator, dtype: torch.dtype) -> str:
    training = Training(rank, world_size, aggregator, dtype)
    training.step()
    state = training.comm.state_dict()
    for values in state["residuals"]["/worker"].values():
        values.fill_(65504)
    assert refused(training, state) is None
    for values in state["residuals"]["/worker"].values():
        values.fill_(65520)
    return str(refused(training, state))


@pytest.mark.parametrize(
    ("aggregator", "dtype"),
    [(flat("8 bits"), torch.float16), (Compressed(Cast(torch.float16)), torch.float32)],
    ids=["gradients", "messages"],
)
def test_what_16_bits_cannot_hold_is_refused(aggregator: Aggregator, dtype: torch.dtype) -> None:
    for message in run(load_for_16_bits, 2, aggregator, dtype):
        assert "magnitude 65504 or less" in message
        assert "weight" in message


# ------------------------------------------------------------------------------------------- sound ones


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("whole_world", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def test_what_is_loaded_is_a_copy_in_host_memory(device: str, whole_world: bool) -> None:
    """The lane reads it later, on a stream of its own: memory of another stream could be given away meanwhile."""
    layout, numels = Layout.of_parameters([("a", (6, 4)), ("b", 3)]), {"a": 24, "b": 3}
    store, factor = ResidualStore(), torch.eye(4)[:, :2]
    store.residual("", "worker", layout, torch.device("cpu"), torch.float32, layout).values.copy_(torch.arange(27.0))
    store.factors.add("", RightFactor(Piece("a", 0, 24), factor))
    good = save(store)
    tensors = [*good["residuals"]["/worker"].values(), good["factors"][0]["right"]]
    wanted = [values.clone() for values in tensors]
    given = {id(values): values.to(device) for values in tensors}
    good["residuals"]["/worker"] = {key: given[id(v)] for key, v in good["residuals"]["/worker"].items()}
    good["factors"][0]["right"] = given[id(good["factors"][0]["right"])]
    loaded = ResidualStore()
    if whole_world:
        restore(loaded, good, numels, lambda name: 1e30)
    else:
        spread(loaded, [good], numels, lambda name: 1e30, 1)
    for values in given.values():
        values.fill_(float("nan"))
    assert {slot.values.device.type for slot in loaded.residuals()} == {"cpu"}
    kept = save(loaded)
    found = [*kept["residuals"]["/worker"].values(), kept["factors"][0]["right"]]
    assert all(map(torch.equal, found, wanted))


# ------------------------------------------------------------------------------------------- at random

ANYTHING: list[Callable[[], object]] = [
    *(lambda: None, lambda: "7", lambda: "", lambda: -1, lambda: 0, lambda: 1, lambda: 2.5, lambda: 10**30),
    *(lambda: float("nan"), lambda: True, list, dict, lambda: "inter/worker", lambda: [["gain", 0, 1, []]]),
    *(lambda: torch.ones(3), lambda: torch.full((3000,), float("nan")), lambda: [7], lambda: {"7": 7}),
]
TENSORS: list[Callable[[Tensor], object]] = [
    *(lambda v: v * float("nan"), lambda v: v + float("inf"), lambda v: torch.full_like(v, 1e38)),
    *(lambda v: torch.full_like(v, 1e30), lambda v: torch.full_like(v, -1.01e30), lambda v: v * 0),
    *(longer, lambda v: v[1:], lambda v: v[:0], lambda v: v.sum(), lambda v: v[None], lambda v: v.t()),
    *(Tensor.bool, Tensor.int, as_complex, Tensor.half, Tensor.double, Tensor.bfloat16, Tensor.tolist),
    *(Tensor.to_sparse, lambda v: v.to("meta"), lambda v: v.clone().requires_grad_(), lambda v: v.flip(0)),
    *(lambda v: torch.stack([v, v], -1)[..., 0], lambda v: -v, lambda v: v * 1e-40),
]


def damage_somewhere(state: Any, dice: random.Random) -> None:
    """Change one thing in a state: remove it, double it, or put another one there."""
    while True:
        if not state:
            return
        key = dice.choice(list(state) if isinstance(state, dict) else range(len(state)))
        inside = state[key]
        if not isinstance(inside, (dict, list)) or not inside or dice.random() < 0.2:
            break
        state = inside
    action = dice.randrange(8)
    if action == 0:
        del state[key]
    elif action == 1 and isinstance(state, list):
        state.insert(key, deepcopy(inside))
    elif action == 2 and isinstance(state, dict):
        state[dice.choice(("7", 7, f"{key}x", "inter/worker", "/server"))] = state.pop(key)
    elif isinstance(inside, Tensor) and action < 7:
        state[key] = dice.choice(TENSORS)(inside)
    elif isinstance(inside, int) and action < 6:
        state[key] = inside + dice.choice((-1, 1))
    elif isinstance(inside, list) and action < 5:
        dice.shuffle(inside)
    else:
        state[key] = dice.choice(ANYTHING)()


def survive(
    rank: int, world_size: int, aggregator: Aggregator, dtype: torch.dtype, gathered: bool, seeds: range
) -> list[str]:
    """Load states damaged on one rank or on all; return what came of each."""
    training = Training(rank, world_size, aggregator, dtype)
    for _ in range(3):
        training.step()
    if gathered:
        box = [training.comm.gathered_state_dict()]
        dist.broadcast_object_list(box)
        good: Any = box[0]
    else:
        good = training.comm.state_dict()
    outcomes = []
    for seed in seeds:
        victim = random.Random(seed).randrange(-1, world_size)
        state = deepcopy(good)
        if victim in (-1, rank):
            damage_somewhere(state, random.Random(seed))
        error = refused(training, state)
        assert error is None or type(error) in (ConfigurationError, MismatchError), (seed, error)
        assert "cannot be read" not in str(error), (seed, error)
        assert training.step(), (seed, "a state was loaded that makes steps which are not finite")
        outcomes.append(f"{seed}: {type(error).__name__} {error}")
        training.comm.load_state_dict(good)
    return outcomes


FUZZED: dict[str, tuple[Aggregator, torch.dtype, str, bool]] = {
    "8 bits": (STRATEGIES["8 bits"], torch.float32, "2", False),
    "8 bits of three": (STRATEGIES["8 bits"], torch.float32, "3", True),
    "2 bits": (STRATEGIES["2 bits"], torch.float16, "2", False),
    "float16": (Compressed(Cast(torch.float16)), torch.float32, "2", False),
    "bfloat16": (flat("onebit rms", feedback=Feedback(dtype=torch.bfloat16)), torch.bfloat16, "2", False),
    "top 5%": (STRATEGIES["top 5%"], torch.float32, "2", False),
    "rank 2": (STRATEGIES["rank 2"], torch.float32, "2", False),
    "inter 4 bits": (STRATEGIES["inter 4 bits"], torch.float32, "2x2", False),
    "inter rank 2": (STRATEGIES["inter rank 2"], torch.float32, "2x2", True),
}


@pytest.mark.parametrize("case", FUZZED)
def test_damaged_states_are_refused_or_train_finitely(case: str) -> None:
    aggregator, dtype, layout, gathered = FUZZED[case]
    timeout_s = 60 + EXAMPLES
    first, *others = run_on(layout, survive, aggregator, dtype, gathered, range(EXAMPLES), timeout_s=timeout_s)
    for outcomes in others:
        assert outcomes == first
    refusals = sum("NoneType" not in outcome for outcome in first)
    assert EXAMPLES / 4 < refusals < EXAMPLES
