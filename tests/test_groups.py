"""Who shares a node in subgroups and under emulation, and calls that ranks make differently."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import commopt
from commopt.groups import join
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
    if difference == "numel":
        return message_of(lambda: comm.all_reduce(x[:3] if mine else x))
    return message_of(lambda: comm.broadcast(x, src=int(mine)))


@pytest.mark.parametrize(
    ("difference", "field", "theirs", "ours"),
    [
        ("dtype", "dtype", "torch.int32", "torch.float32"),
        ("op", "operation", "all_reduce (sum)", "all_reduce (avg)"),
        ("numel", "numel", "3", "6"),
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
