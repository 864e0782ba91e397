# SPDX-License-Identifier: Apache-2.0
"""Whole trainings whose kernels run in the emulator: what the wrappers hand them is what DDP's buckets really are."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from commopt.kernels import sources
from commopt.kernels.loader import Arguments
from tests.emulator import Emulator, on_the_cpu
from tests.gpu_training import Learner, kept
from tests.ranks import run

STEPS = 4  # of which PowerSGD's first two are dense; DDP makes other buckets after the first

# What each must have launched, so that it was no training without kernels.
ENCODED = {
    "hierarchical_quantized": "encode_uniform8",
    "hierarchical_quantized:bits=4": "encode_companded4",
    "quantized:bits=2": "recode_centroids2",
    "hierarchical_onebit": "encode_sign_rms",
    "hierarchical_dgc:density=0.05": "sparse_accumulate",
    "dgc:density=0.05": "sparse_decode",
    "hierarchical_powersgd": "lowrank_subtract_all",
    "powersgd": "factor_solve",
}
# Sums in another order than torch's: of columns, and the means that are levels.
INEXACT = [name for name in ENCODED if "powersgd" in name or "onebit" in name or "bits=2" in name]


class Recorder(Emulator):
    """An emulator for a process of several threads, which notes what it launches and finds its files built."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.launched: set[str] = set()
        self._alone = threading.Lock()

    def launch(self, kernel: str, grid: int, block: int, stream: int, arguments: Arguments) -> None:
        with self._alone:
            self.launched.add(kernel)
            super().launch(kernel, grid, block, stream, arguments)


def train(strategy: str, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    learner = Learner("resnet", rank, "cpu", strategy)
    for _ in range(STEPS):
        learner.step()
    assert learner.state is not None
    return learner.parameters(), kept(learner.state)


Trained = tuple[Tensor, dict[str, Tensor]]


def train_twice(
    rank: int, world_size: int, folder: Path, strategies: Sequence[str]
) -> dict[str, tuple[Trained, Trained, set[str]]]:
    """Return, for each strategy, what training came to without kernels and with them, and which were launched."""
    results = {}
    for strategy in strategies:
        plain = train(strategy, rank)
        recorder = Recorder(folder)
        with on_the_cpu(recorder):
            results[strategy] = plain, train(strategy, rank), recorder.launched
    return results


def test_trainings_with_kernels_are_those_without(emulator: Emulator) -> None:
    for file in sorted(set(sources.file_of_kernel().values())):
        emulator.library(file)  # here, so that the ranks find it
    job = partial(train_twice, folder=emulator.folder, strategies=list(ENCODED))
    ranks = run(job, 4, nodes=(2, 2), timeout_s=300)
    for strategy, kernel in ENCODED.items():
        for rank, results in enumerate(ranks):
            plain, emulated, launched = results[strategy]
            assert kernel in launched, f"{strategy} launched {sorted(launched)}"
            assert torch.equal(emulated[0], ranks[0][strategy][1][0]), f"{strategy}: rank {rank} has other parameters"
            assert emulated[1].keys() == plain[1].keys()
            wanted, got = (torch.cat([found[0], *map(torch.flatten, found[1].values())]) for found in (plain, emulated))
            if strategy in INEXACT:
                close = 1e-3 if "powersgd" in strategy else 1e-4  # its factors are rounded to bfloat16
                assert (got - wanted).norm() < close * wanted.norm(), f"{strategy} on rank {rank}"
            else:
                assert torch.equal(got, wanted), f"{strategy} on rank {rank}"
