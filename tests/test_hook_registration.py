"""Every way to put a preset on a DDP model trains alike, and the hook tells what it did."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt.feedback import Layout
from commopt.feedback.policy import split
from tests.hook_training import HOOKS, SMALL_BUCKET, WAYS, Tower, seeded, train
from tests.ranks import run


def train_each_way(rank: int, world_size: int, preset: str) -> dict[str, str]:
    aggregator = commopt.PRESETS[preset].build()
    digests = {}
    for name, register in WAYS.items():
        ddp = register(seeded(Tower), preset, **SMALL_BUCKET)
        digests[name] = train(ddp, rank, world_size, aggregator, steps=3)
    return digests


@pytest.mark.parametrize("preset", HOOKS)
def test_every_way_to_register_trains_alike(preset: str) -> None:
    digests = run(train_each_way, 4, preset, nodes=(2, 2))
    assert len({digest for mine in digests for digest in mine.values()}) == 1, digests


@pytest.mark.parametrize("preset", ["quantized", "onebit", "dgc"])
def test_the_model_of_these_tests_is_large_enough_to_be_compressed(preset: str) -> None:
    aggregator = commopt.PRESETS[preset].build()
    assert isinstance(aggregator, commopt.Compressed)
    parameters = {name: tuple(parameter.shape) for name, parameter in Tower().named_parameters()}
    spans, _ = split(Layout.of_parameters(list(parameters.items())), aggregator.compressor, torch.float32, ())
    assert sum(end - begin for begin, end in spans) >= sum(prod(s) for s in parameters.values() if len(s) == 2)


def look_at_statistics(rank: int, world_size: int) -> dict[str, Any]:
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    state = commopt.attach(ddp, "hierarchical")
    train(ddp, rank, world_size, commopt.Hierarchical(), steps=3)
    return state.stats()


def test_statistics_count_steps_buckets_and_bytes() -> None:
    stats = run(look_at_statistics, 4, nodes=(2, 2))
    numel = sum(parameter.numel() for parameter in Tower().parameters())
    for mine in stats:
        assert mine["steps"] == 3
        assert mine["buckets"] >= 1 + 3 * 2, "the first step is one bucket, later ones have several"
    # 2 (N-1)/N of the gradient leaves each of two nodes
    assert sum(mine["inter_bytes"] for mine in stats) == 3 * 2 * numel * 4
