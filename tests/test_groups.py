# SPDX-License-Identifier: Apache-2.0
"""Who shares a node, calls that ranks make differently, and gloo's collectives out of sends and receives."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import commopt
from commopt.groups import gloo, join
from tests.ranks import run


def message_of(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except commopt.CommoptError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def subgroup_shapes(rank: int, world_size: int) -> list[str]:
    pair = dist.new_group([0, 2])
    trio = dist.new_group([0, 1, 2])
    shapes = []
    for group, members in ((pair, (0, 2)), (trio, (0, 1, 2))):
        if rank in members:
            x = torch.full((3,), float(rank))
            comm = commopt.Communicator(group)
            comm.all_reduce(x)
            assert torch.allclose(x, torch.tensor(sum(members) / len(members)))
            shapes.append(str(comm.cluster))
    return shapes


def test_environment_declares_blocks_of_global_ranks() -> None:
    results = run(subgroup_shapes, 4, env={"COMMOPT_RANKS_PER_NODE": "2"})
    assert results[0] == ["2 nodes x 1 rank(s) (emulated)", "2 nodes x 2+1 rank(s) (emulated)"]


def wrong_group(rank: int, world_size: int) -> list[str]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    state = commopt.HookState()
    ddp = commopt.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=mine)
    return [
        message_of(lambda: ddp.register_comm_hook(state, commopt.flat)),
        message_of(lambda: commopt.attach(ddp, "flat", process_group=dist.group.WORLD)),
        message_of(lambda: ddp.register_comm_hook(commopt.HookState(process_group=mine), commopt.flat)),
    ]


def test_a_state_over_other_ranks_than_ddp_is_refused() -> None:
    for rank, (by_state, by_attach, right) in enumerate(run(wrong_group, 4)):
        own = [rank % 2, rank % 2 + 2]
        for message in (by_state, by_attach):
            assert f"HookState spans ranks [0, 1, 2, 3] and the DDP model ranks {own}" in message
            assert "HookState(process_group=ddp.process_group)" in message
        assert right == "no error"


def different_calls(rank: int, world_size: int, difference: str) -> str:
    comm = commopt.Communicator()
    mine = rank == 1
    x = torch.ones(6, dtype=torch.int32 if mine and difference == "dtype" else torch.float32)
    if difference == "dtype":
        return message_of(lambda: comm.all_reduce(x, op="sum"))
    if difference == "op":
        return message_of(lambda: comm.all_reduce(x, op="sum" if mine else "avg"))
    return message_of(lambda: comm.broadcast(x, src=int(mine)))


@pytest.mark.parametrize(
    ("difference", "field", "theirs", "ours"),
    [
        ("dtype", "dtype", "torch.int32", "torch.float32"),
        ("op", "operation", "all_reduce (sum)", "all_reduce (avg)"),
        ("src", "operation", "broadcast from 1", "broadcast from 0"),
    ],
)
def test_a_call_with_other_arguments_on_one_rank_is_named(difference: str, field: str, theirs: str, ours: str) -> None:
    for message in run(different_calls, 3, difference, fresh=True):
        assert message.startswith("MismatchError")
        assert f"disagree about {field}: rank 1 has {theirs}, rank 0 has {ours}" in message


def group_order(rank: int, world_size: int) -> tuple[int, ...]:
    return join().ranks


def test_groups_are_ordered_by_node_whatever_the_launcher_did() -> None:
    assert run(group_order, 4, nodes=((0, 2), (1, 3))) == [(0, 2, 1, 3)] * 4


def levels_groups(rank: int, world_size: int) -> None:
    team = join(timeout_s=50).team
    assert team.intra is not None
    assert team.inter is not None
    names = ("world", f"intra{rank // 2 * 2}", f"inter{rank % 2}")
    for level, name in zip((team, team.intra, team.inter), names, strict=True):
        group = level._live_group()
        assert group is not None
        assert group.group_desc.startswith("commopt/")
        assert group.group_desc.endswith(f"/{name}")
        backend: Any = group._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == 50


def test_each_level_has_a_telling_name_and_the_timeout_that_was_asked_for() -> None:
    run(levels_groups, 4, nodes=(2, 2))


def share_memberships(rank: int, world_size: int) -> None:
    plain, other = join(), join(timeout_s=50)
    assert other is not plain
    state = commopt.HookState(commopt.Flat(), timeout=50)
    assert state.membership is other
    assert pickle.loads(pickle.dumps(state)).membership is other
    with pytest.raises(commopt.MismatchError, match=r"timeout in seconds: rank 1 .*41.*rank 0 .*40"):
        commopt.Communicator(timeout=40 + rank)


def test_equal_options_share_their_groups_and_ranks_must_agree() -> None:
    run(share_memberships, 2)


# ------------------------------------------------------------------ gloo: the same sums whatever the segments


def add_up(
    rank: int, world_size: int, numel: int, dtype: str, segment_nbytes: int, paced_from: int = 0
) -> tuple[list[float], list[float]]:
    group = dist.group.WORLD
    assert group is not None
    values = torch.randn(world_size, numel * world_size, generator=torch.Generator().manual_seed(numel))
    rows = values.to(getattr(torch, dtype))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo, "_SEGMENT_NBYTES", segment_nbytes)
        patch.setattr(gloo, "_PACED_FROM_NBYTES", paced_from)
        patch.setattr(gloo, "uses_gloo_ring", lambda *_: False)
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
        in_one = run(add_up, 3, numel, dtype, 2**30, 2**30)
        assert run(add_up, 3, numel, dtype, 1024) == in_one
        assert run(add_up, 3, numel, dtype, 1024, 2**30) == in_one
        assert len({tuple(whole) for whole, _ in in_one}) == 1


def test_chunks_on_both_sides_of_a_segments_length_hang_nobody() -> None:
    """One chunk of 1023 elements among those of 1024 would be one segment, and the others two."""
    assert len({tuple(whole) for whole, _ in run(add_up, 8, 8 * 1024 - 2, "bfloat16", 1024)}) == 1


def add_up_as_torch(rank: int, world_size: int, numel: int) -> tuple[Tensor, Tensor]:
    group = dist.group.WORLD
    assert group is not None
    values = torch.randn(world_size, numel, generator=torch.Generator().manual_seed(2))[rank]
    ours, torchs = values.clone(), values.clone()
    gloo.all_reduce(ours, group, 0.5)
    dist.all_reduce(torchs.mul_(0.5))
    return ours, torchs


@pytest.mark.parametrize("world_size", [3, 5])
def test_more_than_two_ranks_add_up_as_stock_ddp_does(world_size: int) -> None:
    """Also short messages: what crosses a border between sites is what crosses it with stock DDP."""
    for numel in (1, 1000, 100_003):
        for ours, torchs in run(add_up_as_torch, world_size, numel):
            assert torch.equal(ours, torchs)


def add_up_both_ways(rank: int, world_size: int, dtype: torch.dtype) -> list[Tensor]:
    group = dist.group.WORLD
    assert group is not None
    results = torch.randn(world_size, 5003, generator=torch.Generator().manual_seed(1)).to(dtype)[rank].repeat(2, 1)
    for result, long_chunk_nbytes in zip(results, (1, 2**30), strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gloo, "_LONG_CHUNK_NBYTES", long_chunk_nbytes)
            gloo.all_reduce(result, group, 1 / 3)
    return list(results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3])
def test_long_messages_have_the_same_bits(world_size: int, dtype: torch.dtype) -> None:
    first, *others = run(add_up_both_ways, world_size, dtype)
    assert all(torch.equal(*pair) for both in others for pair in zip(both, first, strict=True))
    assert torch.equal(*first)
