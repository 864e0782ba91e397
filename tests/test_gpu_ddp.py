# SPDX-License-Identifier: Apache-2.0
"""Every preset inside DDP models, with mixed precision and with what else DDP can do: over gloo, and over NCCL."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import commopt
from tests.feedback_training import Books, assert_conserved, assert_something_left
from tests.gpu_training import ON_GPU, SUBJECTS, Learner, every_device, kept, on_ranks
from tests.hook_training import Tower, assert_identical, attach_preset, batch_of, loss_of, seeded, train
from tests.ranks import Nodes
from tests.test_feedback_nonfinite import poison_buckets, skip_steps
from tests.test_hook_ddp_features import FEATURES

STEPS = 10
FLAT = [name for name in commopt.PRESETS if not name.startswith("hierarchical")]
ON_NODES = [name for name in commopt.PRESETS if name.startswith("hierarchical")]
WORLDS: dict[str, tuple[list[str], int, Nodes | None]] = {
    "flat": (FLAT, 2, None),
    "on nodes": (ON_NODES, 4, (2, 2)),
    "lone ranks": (ON_NODES, 2, (1, 1)),
}


class Learned(NamedTuple):
    """What became of one model: the loss on this rank before and after, and how far from stock DDP it went.

    strayed: the L2 norm of the difference over that of stock DDP's whole way.
    """

    before: float
    after: float
    digest: str
    strayed: float


def learn(rank: int, world_size: int, device: str, presets: list[str]) -> dict[tuple[str, str], Learned]:
    """Let every preset train every model, after stock DDP has shown the way."""
    found = {}
    for subject in SUBJECTS:
        stock = Learner(subject, rank, device, None)
        start = stock.parameters()
        for _ in range(STEPS):
            stock.step()
        way = stock.parameters() - start
        for preset in presets:
            learner = Learner(subject, rank, device, preset)
            losses = [learner.step() for _ in range(STEPS)]
            strayed = float((learner.parameters() - stock.parameters()).norm() / way.norm())
            found[subject, preset] = Learned(losses[0], losses[-1], learner.digest(), strayed)
    return found


@pytest.mark.parametrize(
    ("device", "world"),
    [
        ("cpu", "flat"),
        ("cpu", "on nodes"),
        *(pytest.param("cuda", world, marks=ON_GPU) for world in WORLDS),
    ],
)
def test_every_preset_trains(device: str, world: str) -> None:
    presets, world_size, nodes = WORLDS[world]
    results = on_ranks(device, learn, world_size, presets, nodes=nodes, timeout_s=150.0)
    for key in results[0]:
        ranks = [found[key] for found in results]
        assert_identical([learned.digest for learned in ranks])
        before, after = (sum(getattr(learned, when) for learned in ranks) for when in ("before", "after"))
        assert after < 0.95 * before, f"{key}: the loss went from {before:.3g} to {after:.3g}"
        if commopt.PRESETS[key[1]].build().lossless:
            assert ranks[0].strayed < 1e-3, f"{key} is {ranks[0].strayed:.3g} of the way from stock DDP"


# ------------------------------------------------------------------------------------- features of DDP


def features(rank: int, world_size: int, device: str, presets: list[str]) -> dict[str, str]:
    """Do what tests/test_hook_ddp_features.py does on the CPU; every gradient is compared with the mean."""
    with torch.device(device):
        return {
            f"{name} by {preset}": feature(rank, world_size, preset)
            for preset in presets
            for name, feature in FEATURES.items()
        }


@pytest.mark.parametrize(
    ("presets", "world_size", "nodes"),
    [
        (["flat", "powersgd"], 2, None),
        (["hierarchical", "hierarchical_quantized"], 4, (2, 2)),
    ],
    ids=["flat", "on nodes"],
)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_features_of_ddp(device: str, presets: list[str], world_size: int, nodes: Nodes | None) -> None:
    results = on_ranks(device, features, world_size, presets, nodes=nodes, timeout_s=120.0)
    for name in results[0]:
        assert_identical([digests[name] for digests in results])


# ------------------------------------------------------------------------------------- mixed precision

POISONED = 6  # the step; buckets have settled before


class Mixed(NamedTuple):
    """What one rank saw: losses, loss scales, whether the poisoned step left a trace, and stats() after all."""

    digest: str
    losses: list[float]
    scales: list[float]
    moved: bool
    stats: dict[str, Any]


def autocast(rank: int, world_size: int, device: str, strategy: str, dtype: torch.dtype) -> Mixed:
    """Train under autocast; in float16 with a GradScaler, and rank 1 finds an inf in one gradient of one step."""
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8) if dtype == torch.float16 else None
    learner = Learner("gpt", rank, device, strategy, scaler=scaler)
    state, parameter = learner.state, next(learner.module.parameters())
    assert state is not None
    armed = False

    def poison(gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, float("inf")) if armed else gradient

    parameter.register_hook(poison)
    losses, scales, moved = [], [], False
    for step in range(STEPS):
        armed = scaler is not None and step == POISONED and rank == 1
        before = kept(state) if step == POISONED else {}
        weights = learner.parameters()
        losses.append(learner.step(torch.autocast(device, dtype=dtype)))
        scales.append(learner.scaler.get_scale())
        if scaler is not None and step == POISONED:
            after = kept(state)
            moved = before.keys() != after.keys() or not all(torch.equal(before[key], after[key]) for key in before)
            moved |= not torch.equal(weights, learner.parameters())
    assert all(bool(values.isfinite().all()) for values in kept(state).values())
    return Mixed(learner.digest(), losses, scales, moved, state.stats())


@every_device
@pytest.mark.parametrize(
    ("strategy", "world_size", "nodes"),
    [("quantized", 2, None), ("powersgd:start_step=0", 2, None), ("hierarchical_onebit", 4, (2, 2))],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(device: str, strategy: str, world_size: int, nodes: Nodes | None, dtype: torch.dtype) -> None:
    results = on_ranks(device, autocast, world_size, strategy, dtype, nodes=nodes)
    assert_identical([mixed.digest for mixed in results])
    assert any(mixed.stats["residual_bytes"] for mixed in results)
    assert sum(mixed.losses[-1] for mixed in results) < 0.95 * sum(mixed.losses[0] for mixed in results)
    for mixed in results if dtype == torch.float16 else []:
        assert mixed.scales == [2.0**8] * POISONED + [2.0**7] * (STEPS - POISONED), "skipped by all, and only once"
        assert not mixed.moved, "the step that was skipped left a trace"
        assert mixed.stats["dropped_commits"] == 1 or not mixed.stats["residual_bytes"]


def drop_steps(rank: int, world_size: int, device: str, strategy: str, dtype: str) -> tuple[Books, str, float, str]:
    """Do what tests/test_feedback_nonfinite.py does on the CPU, with a GradScaler and without.

    With a GradScaler in float32 only: it has no kernel that would unscale bfloat16 on CUDA.
    """
    scaling = {"init_scale": 1024.0, "growth_interval": 2, "growth_factor": 2.0, "backoff_factor": 0.5}
    books, digest, _, dropped = skip_steps(rank, world_size, strategy, "float32", 25, 6, scaling, device)
    return books, digest, dropped, poison_buckets(rank, world_size, strategy, device, dtype)


@pytest.mark.parametrize(
    ("strategy", "world_size", "nodes", "dtype"),
    [
        ("8 bits", 2, None, "float32"),
        ("top 5%", 2, None, "bfloat16"),
        ("inter rank 2", 4, (2, 2), "bfloat16"),
        ("inter 4 bits", 4, (2, 2), "float32"),
    ],
)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_what_is_not_finite_leaves_no_trace(
    device: str, strategy: str, world_size: int, nodes: Nodes | None, dtype: str
) -> None:
    results = on_ranks(device, drop_steps, world_size, strategy, dtype, nodes=nodes)
    assert_identical([digest for _, digest, _, _ in results])
    assert_identical([digest for *_, digest in results])
    assert_conserved([books for books, *_ in results])
    assert_something_left([books for books, *_ in results])
    assert all(dropped > 0 or not books.residual_nbytes for books, _, dropped, _ in results)


# ------------------------------------------------------------------------------------- torch.compile


def compiled(rank: int, world_size: int, device: str, preset: str, what: str, backend: str) -> tuple[str, float]:
    """Train a compiled model; return a hash of it, and how far it strays from the same one that is not compiled."""
    options: dict[str, Any] = {"bucket_cap_mb": 25}  # the compiler refuses caps below 1 MiB
    plain, learner = (Learner("gpt", rank, device, preset, **options) for _ in range(2))
    start = plain.parameters()
    torch._dynamo.reset()
    if what == "the DDP model":
        learner.forward = torch.compile(learner.ddp, backend=backend)
    else:
        learner.module.compile(backend=backend)
    for _ in range(4):
        plain.step()
        learner.step()
    way = plain.parameters() - start
    return learner.digest(), float((learner.parameters() - plain.parameters()).norm() / way.norm())


@every_device
@pytest.mark.parametrize(
    ("preset", "what", "limit"),
    [
        ("flat", "the DDP model", 1e-3),
        ("hierarchical_quantized", "the model inside", 0.05),  # fused, a value may round to another level
    ],
)
def test_compiled_models_train_alike(device: str, preset: str, what: str, limit: float) -> None:
    backend = "inductor" if device == "cuda" else "eager"
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # a worker process may have no children
    results = on_ranks(device, compiled, 2, preset, what, backend, nodes=(1, 1), env=env, timeout_s=120.0)
    assert_identical([digest for digest, _ in results])
    assert all(strayed < limit for _, strayed in results), f"strayed by {results[0][1]:.3g} of the way"


def python_reducer(rank: int, world_size: int, device: str) -> tuple[str, str]:
    """Return a hash of what trains after torch.compile's python reducer was refused, and what it was told."""
    with torch.device(device):
        with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
            ddp = attach_preset(seeded(Tower), "flat")
            with pytest.raises(commopt.ConfigurationError) as refused:
                loss_of(ddp, batch_of(rank, 0)).backward()
        return train(attach_preset(seeded(Tower), "flat"), rank, world_size, commopt.Flat()), str(refused.value)


@every_device
def test_the_python_reducer_is_refused(device: str) -> None:
    results = on_ranks(device, python_reducer, 2)
    assert_identical([digest for digest, _ in results])
    for _, message in results:
        assert "got a tuple instead of a GradBucket" in message
        assert "torch._dynamo.config.optimize_ddp = 'ddp_optimizer'" in message
