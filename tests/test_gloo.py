"""Collectives out of sends and receives: the same sums whatever the segments."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from commopt.groups import gloo
from tests.ranks import run


def add_up(rank: int, world_size: int, numel: int, dtype: str, segment_nbytes: int) -> tuple[list[float], list[float]]:
    group = dist.group.WORLD
    assert group is not None
    values = torch.randn(world_size, numel * world_size, generator=torch.Generator().manual_seed(numel))
    rows = values.to(getattr(torch, dtype))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo, "_SEGMENT_NBYTES", segment_nbytes)
        whole = rows[rank][: numel + 1].clone()
        gloo.all_reduce(whole, group, 0.5)
        own = rows.new_empty(numel)
        gloo.reduce_scatter(own, rows[rank].clone(), group)
    expected = rows.float().sum(0).to(rows.dtype)
    assert torch.allclose(whole, 0.5 * expected[: numel + 1], rtol=1e-2, atol=1e-2)
    assert torch.allclose(own, expected[rank * numel : (rank + 1) * numel], rtol=1e-2, atol=1e-2)
    return whole.tolist(), own.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_segments_change_no_bit(dtype: str) -> None:
    for numel in (1, 1000, 5003):
        in_one = run(add_up, 3, numel, dtype, 2**30)
        assert run(add_up, 3, numel, dtype, 1024) == in_one
        assert len({tuple(whole) for whole, _ in in_one}) == 1


def add_up_both_ways(rank: int, world_size: int, dtype: torch.dtype) -> list[Tensor]:
    group = dist.group.WORLD
    assert group is not None
    values = torch.randn(world_size, 5003, generator=torch.Generator().manual_seed(1)).to(dtype)[rank]
    results = []
    for long_nbytes in (1, 2**30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gloo, "_LONG_NBYTES", long_nbytes)
            results.append(values.clone())
            gloo.all_reduce(results[-1], group, 1 / 3)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3])
def test_long_messages_have_the_same_bits(world_size: int, dtype: torch.dtype) -> None:
    results = [result for both in run(add_up_both_ways, world_size, dtype) for result in both]
    assert all(torch.equal(result, results[0]) for result in results)
