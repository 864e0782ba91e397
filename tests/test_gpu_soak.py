# SPDX-License-Identifier: Apache-2.0
"""Hundreds of steps: nothing hangs, nothing grows, and what is owed stays bounded."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.gpu_training import ON_GPU, Learner, on_ranks
from tests.hook_training import assert_identical

PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
LOSSLESS, LOSSY = "flat", "hierarchical_quantized:bits=4"


class Footprint(NamedTuple):
    """What one rank's process holds after some steps; `device_nbytes` is 0 on the CPU."""

    device_nbytes: int
    host_nbytes: int
    threads: int
    descriptors: int
    residual_norm: float

    @classmethod
    def of(cls, learner: Learner) -> Footprint:
        assert learner.state is not None
        norm = learner.state.stats().get("residual_norm", 0.0)  # waits for the device
        gc.collect()
        return cls(
            torch.cuda.memory_allocated() if learner.inputs.is_cuda else 0,
            int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_NBYTES,
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")),
            norm,
        )


# NCCL's flight recorder, of 2000 collectives with their stacks, would grow meanwhile.
_NO_TRACES = {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}


def soak(
    rank: int, world_size: int, device: str, strategies: list[str], stops: tuple[int, int]
) -> dict[str, tuple[str, list[Footprint]]]:
    """Train by each strategy; return a hash of the parameters, and the footprints after so many steps."""
    found = {}
    for strategy in strategies:
        learner, footprints, done = Learner("gpt", rank, device, strategy), [], 0
        for stop in stops:
            for _ in range(done, stop):
                learner.step()
            footprints.append(Footprint.of(learner))
            done = stop
        found[strategy] = learner.digest(), footprints
    return found


@pytest.mark.parametrize(
    ("device", "stops"), [("cpu", (15, 45)), pytest.param("cuda", (100, 500), marks=ON_GPU)], ids=["cpu", "cuda"]
)
def test_nothing_grows(device: str, stops: tuple[int, int]) -> None:
    strategies = [LOSSLESS, LOSSY]
    results = on_ranks(device, soak, 2, strategies, stops, nodes=(1, 1), timeout_s=90.0, env=_NO_TRACES)
    for strategy in strategies:
        assert_identical([found[strategy][0] for found in results])
        for rank, found in enumerate(results):
            early, late = found[strategy][1]
            grown = f"{strategy} on rank {rank}: {early} after {stops[0]} steps, {late} after {stops[1]}"
            assert abs(late.device_nbytes - early.device_nbytes) <= 2**20, grown
            assert late.host_nbytes - early.host_nbytes <= 16 * 2**20, grown
            assert late.threads <= early.threads, grown
            assert late.descriptors <= early.descriptors, grown
            assert (early.residual_norm > 0) == (strategy == LOSSY), grown
            assert late.residual_norm <= 4 * early.residual_norm, grown
