"""Collectives out of sends and receives: the same sums whatever the segments."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

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
