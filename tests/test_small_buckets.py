# SPDX-License-Identifier: Apache-2.0
"""Buckets of few elements, or with nothing of a kind: the kernels of a GPU do with them what plain torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bench.compute_only import LoneRank, SilentTeam
from commopt import DGC, Aggregator, Cast, Compressed, Flat, Hierarchical, OneBit, PowerSGD, Quantize
from commopt.feedback import Layout
from tests.emulator import Emulator, on_the_cpu

NODES = (2, 2)
CLOSE = 1e-2  # where a last bit of a bfloat16 differs
Shapes = list[tuple[int, ...]]
BUCKETS: dict[str, list[Shapes]] = {
    "one element": [[(1,)]],
    "no matrix": [[(7,)], [(40, 30), (3,)], [(5,), (2,)]],
    "one matrix of one element": [[(1, 1)]],
    "matrices alone": [[(40, 30)], [(30, 40), (30, 40)]],
    "matrices of one half": [[(40, 30), (1300,)], [(1300,), (30, 40)]],
    "a scalar": [[()], [(30, 20), ()]],
    "fewer elements than ranks": [[(3,)], [(1, 2)]],
}
COMPRESSORS: dict[str, Any] = {
    "bf16": Compressed(Cast(torch.bfloat16), feedback=None),
    "8 bits": Compressed(Quantize(8)),
    "2 bits": Compressed(Quantize(2)),
    "one bit": Compressed(OneBit(start_step=0)),
    "dgc": Compressed(DGC(density=0.3, warmup=())),
    "rank 2": PowerSGD(matrix_rank=2, start_step=0),
    "flat": Flat(),
}


def averages(aggregator: Aggregator, buckets: list[Shapes], rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Return what a rank whose peers all have its values gets in three steps."""
    layouts = [
        Layout.of_parameters([(f"p{bucket}.{place}", shape) for place, shape in enumerate(shapes)])
        for bucket, shapes in enumerate(buckets)
    ]
    alone, found = LoneRank(aggregator, layouts, NODES, rank), []
    alone.team = SilentTeam.of(
        NODES, rank, {"cpu": "nccl"}
    )  # ranks of a node share a bucket, which is not so over gloo
    for step in range(3):
        for number, layout in enumerate(layouts):
            drawn = torch.randn(layout.numel, generator=torch.Generator().manual_seed(10 * step + number))
            buffer = drawn.to(dtype)
            alone.reduce(number, buffer)
            found.append(buffer)
    return found


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("between_nodes", [False, True], ids=["all", "between nodes"])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_small_buckets(
    name: str, between_nodes: bool, dtype: torch.dtype, rank: int, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    aggregator = Hierarchical(COMPRESSORS[name]) if between_nodes else COMPRESSORS[name]
    for text, buckets in BUCKETS.items():
        with monkeypatch.context() as patched:
            patched.setenv("COMMOPT_KERNELS", "torch")
            expected = averages(aggregator, buckets, rank, dtype)
        with on_the_cpu(emulator):
            found = averages(aggregator, buckets, rank, dtype)
        for got, wanted in zip(found, expected, strict=True):
            assert float((got - wanted).norm()) <= CLOSE * float(wanted.norm()), text
