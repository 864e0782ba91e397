# SPDX-License-Identifier: Apache-2.0
"""On a GPU a flipped bit is named as on a CPU, and the host waits for nothing that checks launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import MismatchError
from commopt.attached.checksum import checksum
from tests.gpu_training import ON_GPU, on_ranks
from tests.hook_training import SMALL_BUCKET, Tower, batch_of, loss_of, seeded

EVERY = 2
FLIPPED_BEFORE = 15


def found_by(rank: int, world_size: int, device: str) -> tuple[int, str]:
    module: Any = seeded(Tower).to(device)
    ddp = TorchDDP(module, **SMALL_BUCKET)
    state = commopt.attach(ddp, "flat", check_every=EVERY, on_divergence="raise")
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    for step in range(20):
        if step == FLIPPED_BEFORE and rank == 1:
            module.layers[2].weight.data.view(torch.int32)[3, 4] ^= 1
        optimizer.zero_grad()
        loss = loss_of(ddp, tuple(each.to(device) for each in batch_of(rank, step)))
        settled = device == "cuda" and 8 < step < FLIPPED_BEFORE  # DDP's buckets, and their graphs
        try:
            with _no_sync_of_the_host() if settled else nullcontext():
                loss.backward()
        except MismatchError as error:
            return step, str(error)
        optimizer.step()
    raise AssertionError(f"nothing was found: {state.stats()}")


@contextmanager
def _no_sync_of_the_host() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_a_flipped_bit_is_named(device: str) -> None:
    ((step, text),) = set(on_ranks(device, found_by, 3))
    assert step == FLIPPED_BEFORE + EVERY
    assert "rank 1 holds other parameters than rank 0, 2, in 'layers.2.weight'" in text
    assert "it began between step 14 and step 16" in text


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.alone
def test_a_checksum_reads_memory_once(device: str) -> None:
    """Of 2 GB it takes less than 20 ms, six times as long as to read them: copies in 64 bits would be slower."""
    tensors = [torch.randn(50_000_000, device=device) for _ in range(10)]
    checksum(tensors, tensors[0].device)
    times_ms = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        checksum(tensors, tensors[0].device)
        end.record()
        end.synchronize()
        times_ms.append(begin.elapsed_time(end))
    assert min(times_ms) < 20
