"""DDP's own buckets, as torch itself computes them."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from commopt.errors import ConfigurationError
from commopt.schedule import Unit
from commopt.simulate import ddp_buckets, gpu, model, of_model

DTYPES = (torch.float32, torch.float16)


def units_of(rows: list[tuple[int, torch.dtype]]) -> list[Unit]:
    return [
        Unit((f"p{number}",), numel * dtype.itemsize, float(number), str(dtype))
        for number, (numel, dtype) in enumerate(rows)
    ]


def by_torch(rows: list[tuple[int, torch.dtype]], first_nbytes: int, cap_nbytes: int) -> set[tuple[str, ...]]:
    tensors = [torch.empty(numel, dtype=dtype, device="meta") for numel, dtype in rows]
    groups, _ = dist._compute_bucket_assignment_by_size(
        tensors, [first_nbytes, cap_nbytes], [False] * len(rows), list(range(len(rows)))
    )
    return {tuple(f"p{number}" for number in group) for group in groups}


@given(st.lists(st.tuples(st.integers(0, 200_000), st.sampled_from(DTYPES)), min_size=1, max_size=40))
def test_buckets_are_those_of_torch(rows: list[tuple[int, torch.dtype]]) -> None:
    found = ddp_buckets(units_of(rows), cap_mb=0.5, first_mb=0.125)
    assert {tuple(unit.names[0] for unit in members) for members in found} == by_torch(rows, 2**17, 2**19)


@pytest.mark.parametrize("name", ["resnet50", "vgg16", "bert-base"])
def test_published_models_get_the_buckets_torch_makes_of_them(name: str) -> None:
    units = of_model(model(name), gpu("a100"), 1).units
    rows = [(unit.nbytes // 4, torch.float32) for unit in units]
    expected = by_torch(rows, dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20)
    place = {unit.names[0]: number for number, unit in enumerate(units)}
    assert {tuple(f"p{place[unit.names[0]]}" for unit in members) for members in ddp_buckets(units)} == expected


def test_buckets_close_with_the_gradient_that_reaches_the_limit() -> None:
    units = units_of([(2**18, torch.float32), (2**18 - 1, torch.float32), (1, torch.float32), (5, torch.float32)])
    assert [len(members) for members in ddp_buckets(units, cap_mb=1)] == [1, 2, 1]
    assert [len(members) for members in ddp_buckets(units, cap_mb=100)] == [1, 3]


@pytest.mark.parametrize("limit", [0, -1, float("inf"), float("nan")])
def test_limits_are_checked(limit: float) -> None:
    with pytest.raises(ConfigurationError, match=r"ddp_buckets\(cap_mb=.* must be a finite number above 0"):
        ddp_buckets(units_of([(1, torch.float32)]), cap_mb=limit)
    with pytest.raises(ConfigurationError, match="first_mb"):
        ddp_buckets(units_of([(1, torch.float32)]), first_mb=limit)


def test_a_huge_limit_makes_one_bucket_after_the_first() -> None:
    units = units_of([(10, torch.float32)] * 5)
    assert [len(members) for members in ddp_buckets(units, cap_mb=sys.maxsize / 2**20, first_mb=40 / 2**20)] == [1, 4]
