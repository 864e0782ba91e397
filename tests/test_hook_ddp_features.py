# SPDX-License-Identifier: Apache-2.0
"""Every preset under every feature of DDP: right gradients and bit-identical replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from tests.hook_training import (
    REPRESENTATIVES,
    SMALL_BUCKET,
    STEPS,
    WIDTH,
    Branches,
    ManyDtypes,
    Owed,
    Tower,
    assert_gradients,
    assert_identical,
    attach_preset,
    batch_of,
    branching,
    digest_of,
    expected_gradients,
    loss_of,
    seeded,
    train,
)
from tests.ranks import run


def default(rank: int, world_size: int, preset: str) -> str:
    return train(attach_preset(seeded(Tower), preset), rank, world_size, commopt.PRESETS[preset].build())


def several_buckets(rank: int, world_size: int, preset: str) -> str:
    """Several buckets, rebuilt after the first step."""
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    state = commopt.attach(ddp, preset)
    digest = train(ddp, rank, world_size, commopt.PRESETS[preset].build())
    assert state.stats()["buckets"] >= 1 + 3 * (STEPS - 1), "one bucket only tests little"
    return digest


def accumulation(rank: int, world_size: int, preset: str) -> str:
    ddp = attach_preset(seeded(Tower), preset, **SMALL_BUCKET)
    return train(ddp, rank, world_size, commopt.PRESETS[preset].build(), micros=3)


def unused_parameters(rank: int, world_size: int, preset: str) -> str:
    ddp = attach_preset(seeded(Branches), preset, find_unused_parameters=True, **SMALL_BUCKET)
    return train(ddp, rank, world_size, commopt.PRESETS[preset].build(), batch=branching)


def static_graph(rank: int, world_size: int, preset: str) -> str:
    ddp = attach_preset(seeded(Tower), preset, static_graph=True, **SMALL_BUCKET)
    return train(ddp, rank, world_size, commopt.PRESETS[preset].build())


def bucket_view(rank: int, world_size: int, preset: str) -> str:
    ddp = attach_preset(seeded(Tower), preset, gradient_as_bucket_view=True, **SMALL_BUCKET)
    return train(ddp, rank, world_size, commopt.PRESETS[preset].build(), micros=2)


def checkpointing(rank: int, world_size: int, preset: str) -> str:
    ddp = attach_preset(seeded(Tower, WIDTH, "non-reentrant"), preset, **SMALL_BUCKET)
    train(ddp, rank, world_size, commopt.PRESETS[preset].build())
    ddp = attach_preset(seeded(Tower, WIDTH, "reentrant"), preset, static_graph=True, **SMALL_BUCKET)
    return train(ddp, rank, world_size, commopt.PRESETS[preset].build())


def many_dtypes(rank: int, world_size: int, preset: str) -> str:
    ddp = attach_preset(seeded(ManyDtypes), preset)
    return train(ddp, rank, world_size, commopt.PRESETS[preset].build())


def uneven_inputs(rank: int, world_size: int, preset: str) -> str:
    """Rank r has 2 + r batches; ranks that ran out contribute zeros to the mean over all."""
    aggregator = commopt.PRESETS[preset].build()
    ddp = attach_preset(seeded(Tower), preset, **SMALL_BUCKET)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    owed = Owed()
    with ddp.join():
        for step in range(2 + rank):
            batches = [[batch_of(peer, step)] if step < 2 + peer else [] for peer in range(world_size)]
            expected = expected_gradients(ddp.module, batches)
            optimizer.zero_grad()
            loss_of(ddp, batches[rank][0]).backward()
            assert_gradients(ddp.module, expected, aggregator, f"step {step}", owed)
            optimizer.step()
    return digest_of(ddp.module)


def two_models(rank: int, world_size: int, preset: str) -> str:
    aggregator = commopt.PRESETS[preset].build()
    first = attach_preset(seeded(Tower), preset, **SMALL_BUCKET)
    second = attach_preset(seeded(Tower, WIDTH), preset)
    owes = (Owed(), Owed())
    for step in range(STEPS):
        batches = [[batch_of(peer, step)] for peer in range(world_size)]
        wants = [expected_gradients(ddp.module, batches) for ddp in (first, second)]
        losses = []
        for ddp in (first, second):
            ddp.zero_grad()
            losses.append(loss_of(ddp, batches[rank][0]))
        for loss in losses:
            loss.backward()
        for ddp, want, owed in zip((first, second), wants, owes, strict=True):
            assert_gradients(ddp.module, want, aggregator, f"step {step}", owed)
            with torch.no_grad():
                for parameter in ddp.module.parameters():
                    parameter -= 0.01 * parameter.grad
    return digest_of(first.module) + digest_of(second.module)


def loss_scaling(rank: int, world_size: int, preset: str) -> str:
    """A GradScaler sees the same gradients on all ranks: it skips a step everywhere, and scales alike."""
    aggregator = commopt.PRESETS[preset].build()
    module = seeded(Tower)
    ddp = TorchDDP(module, **SMALL_BUCKET)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    commopt.attach(ddp, preset, scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    scales = []
    owed = Owed()
    for step in range(6):
        batches = [[batch_of(peer, step)] for peer in range(world_size)]
        expected = expected_gradients(module, batches)
        before = digest_of(module)
        poisoned = step == 2
        if poisoned and rank == 1:
            batches[rank] = [(torch.full((4, WIDTH), float("nan")),)]
        optimizer.zero_grad()
        scaler.scale(loss_of(ddp, batches[rank][0])).backward()
        scaler.unscale_(optimizer)
        if not poisoned:
            assert_gradients(module, expected, aggregator, f"step {step}", owed)
        scaler.step(optimizer)
        scaler.update()
        assert (digest_of(module) == before) == poisoned, f"step {step}"
        scales.append(scaler.get_scale())
    assert scales == [1024, 2048, 1024, 1024, 2048, 2048], scales
    return digest_of(module)


FEATURES = {
    function.__name__: function
    for function in (
        default,
        several_buckets,
        accumulation,
        unused_parameters,
        static_graph,
        bucket_view,
        checkpointing,
        many_dtypes,
        uneven_inputs,
        two_models,
        loss_scaling,
    )
}


def all_features(rank: int, world_size: int, preset: str) -> dict[str, str]:
    return {name: feature(rank, world_size, preset) for name, feature in FEATURES.items()}


@pytest.mark.parametrize("preset", REPRESENTATIVES)
@pytest.mark.parametrize("feature", FEATURES)
def test_feature_of_ddp(feature: str, preset: str) -> None:
    assert_identical(run(FEATURES[feature], 4, preset, nodes=(2, 2)))


def other_clusters() -> Iterator[tuple[str, int, Any]]:
    for preset in commopt.PRESETS:
        yield (preset, 3, (2, 1)) if preset in REPRESENTATIVES else (preset, 2, (1, 1))
    for preset in ("hierarchical", "hierarchical_quantized"):
        yield preset, 4, ((0, 2), (1, 3))


@pytest.mark.parametrize(("preset", "world_size", "nodes"), list(other_clusters()), ids=str)
def test_other_clusters(preset: str, world_size: int, nodes: Any) -> None:
    results = run(all_features, world_size, preset, nodes=nodes)
    for name in FEATURES:
        assert_identical([digests[name] for digests in results])
