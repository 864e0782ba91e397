# SPDX-License-Identifier: Apache-2.0
"""The standalone API: five collectives on torch and NumPy arrays, in place, against a naive reference."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import commopt
from commopt import Communicator
from tests.catalogue import LAYOUTS, run_on
from tests.ranks import run

Shape = tuple[int, ...]
SHAPES: list[Shape] = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (4, 3, 2), (30_001,)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32]


def whole(rank: int, shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Return small whole numbers: their sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randint(-8, 9, shape, generator=generator).to(device, dtype)


def total(world_size: int, shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    values = (whole(peer, shape, dtype, device) for peer in range(1, world_size))
    return sum(values, whole(0, shape, dtype, device))


# ------------------------------------------------------------------------------ the five primitives


def all_reduce(rank: int, world_size: int, device: str = "cpu", shapes: Sequence[Shape] = SHAPES) -> None:
    comm = Communicator()
    for shape in shapes:
        for dtype in DTYPES:
            x = whole(rank, shape, dtype, device)
            data_ptr = x.data_ptr()
            assert comm.all_reduce(x, op="sum") is x
            assert x.data_ptr() == data_ptr
            assert torch.equal(x, total(world_size, shape, dtype, device)), (shape, dtype)
        x = whole(rank, shape, device=device) * world_size
        comm.all_reduce(x)
        assert torch.allclose(x, total(world_size, shape, device=device), rtol=1e-6), shape
        x = whole(rank, shape, device=device)
        assert commopt.all_reduce(x, op="sum") is x
        assert torch.equal(x, total(world_size, shape, device=device))


def reduce_scatter(rank: int, world_size: int, device: str = "cpu", shapes: Sequence[Shape] = SHAPES) -> None:
    comm = Communicator()
    for shape in shapes:
        many = (world_size, *shape)
        for dtype in DTYPES:
            source, output = whole(rank, many, dtype, device), torch.full(shape, 99, dtype=dtype, device=device)
            before = source.clone()
            assert comm.reduce_scatter(output, source, op="sum") is output
            assert torch.equal(output, total(world_size, many, dtype, device)[rank]), (shape, dtype)
            assert torch.equal(source, before), "the input was changed"
        source, output = whole(rank, many, device=device), torch.empty(shape, device=device)
        comm.reduce_scatter(output, source)
        want = total(world_size, many, device=device)[rank] / world_size
        assert torch.allclose(output, want, rtol=1e-6, atol=1e-6), shape


def all_gather(rank: int, world_size: int, device: str = "cpu", shapes: Sequence[Shape] = SHAPES) -> None:
    comm = Communicator()
    for shape in shapes:
        for dtype in [*DTYPES, torch.bool, torch.complex64, torch.uint8]:
            source = whole(rank, shape, dtype, device)
            output = torch.empty((world_size, *shape), dtype=dtype, device=device)
            assert comm.all_gather(output, source) is output
            want = torch.stack([whole(peer, shape, dtype, device) for peer in range(world_size)])
            assert torch.equal(output, want), (shape, dtype)


def broadcast(rank: int, world_size: int, device: str = "cpu", shapes: Sequence[Shape] = SHAPES) -> None:
    comm = Communicator()
    for src in range(world_size):
        for shape in shapes:
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
                x = whole(rank, shape, dtype, device)
                assert comm.broadcast(x, src) is x
                assert torch.equal(x, whole(src, shape, dtype, device)), (src, shape, dtype)
    x = torch.full((3,), float(rank), device=device)
    comm.broadcast(x)
    assert x.tolist() == [0, 0, 0]


def all_to_all(rank: int, world_size: int, device: str = "cpu", shapes: Sequence[Shape] = SHAPES) -> None:
    comm = Communicator()
    for shape in shapes:
        many = (world_size, *shape)
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            source, output = whole(rank, many, dtype, device), torch.empty(many, dtype=dtype, device=device)
            assert comm.all_to_all(output, source) is output
            want = torch.stack([whole(peer, many, dtype, device)[rank] for peer in range(world_size)])
            assert torch.equal(output, want), (shape, dtype)


@pytest.mark.parametrize("collective", [all_reduce, reduce_scatter, all_gather, broadcast, all_to_all])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_collectives(layout: str, collective: Callable[..., None]) -> None:
    run_on(layout, collective)


def test_a_broadcast_from_every_rank_reaches_uneven_nodes() -> None:
    run_on("2+1", broadcast, "cpu", [(5,)])


# ------------------------------------------------------------------------------ memory layouts

VIEWS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda base: base,
    "transposed": lambda base: base.T,
    "strided": lambda base: base[::2, 1::3],
    "column": lambda base: base[:, 3],
    "middle": lambda base: base[2:5, 4:9],
    "element": lambda base: base[1, 1:2],
}
NUMPY_VIEWS: dict[str, Callable[[Any], Any]] = {
    **VIEWS,
    "reversed both": lambda base: base[::-2, ::-1],
    "0-dim": lambda base: base[1, 2, ...],
}


def reduce_views(rank: int, world_size: int) -> None:
    """A view is reduced in place: the memory around it stays as it was."""
    comm = Communicator()
    for name, view in VIEWS.items():
        base, want = whole(rank, (8, 12)), whole(rank, (8, 12))
        view(want).copy_(view(total(world_size, (8, 12))))
        x = view(base)
        assert comm.all_reduce(x, op="sum") is x
        assert torch.equal(base, want), name
    for name, view in NUMPY_VIEWS.items():
        array, expected = whole(rank, (8, 12)).numpy(), whole(rank, (8, 12)).numpy()
        view(expected)[...] = view(total(world_size, (8, 12)).numpy())
        of_array = view(array)
        assert comm.all_reduce(of_array, op="sum") is of_array, name
        assert np.array_equal(array, expected), f"NumPy {name}"
    fortran = np.asfortranarray(whole(rank, (8, 12)).numpy())
    assert np.array_equal(comm.all_reduce(fortran, op="sum"), total(world_size, (8, 12)).numpy())


@pytest.mark.parametrize("layout", ["3", "2x2"])
def test_views_are_reduced_in_place(layout: str) -> None:
    run_on(layout, reduce_views)


def move_views(rank: int, world_size: int) -> None:
    """The four other collectives read and write views too, torch and NumPy mixed."""
    comm = Communicator()
    rows = world_size
    every = [whole(peer, (6, rows)) for peer in range(world_size)]  # used transposed: block j is column j

    base = torch.zeros(3, 12)
    comm.reduce_scatter(base[1, ::2], every[rank].T, op="sum")
    assert torch.equal(base[1, ::2], torch.stack(every).sum(0)[:, rank])
    assert base.count_nonzero() == base[1, ::2].count_nonzero()

    array = np.zeros((6, rows), dtype=np.float32)
    source = whole(rank, (6, 2))
    assert comm.all_gather(array.T, source[:, 1]) is not None
    assert np.array_equal(array.T, torch.stack([whole(peer, (6, 2))[:, 1] for peer in range(world_size)]).numpy())

    array = np.full((5, 4), rank, dtype=np.int64)
    comm.broadcast(array[::-1, 1], src=world_size - 1)
    assert (array[:, 1] == world_size - 1).all()
    assert (array[:, [0, 2, 3]] == rank).all()

    lone = whole(rank, (1, 6))[:, 2]  # a single element, at a stride that matters to views of its bytes only
    assert lone.stride() == (6,)
    comm.broadcast(lone, src=1)
    assert torch.equal(lone, whole(1, (1, 6))[:, 2])
    comm.all_gather(base[0, :rows], lone)
    assert torch.equal(base[0, :rows], lone.expand(rows))

    out = np.zeros((rows, 6), dtype=np.float32)[::-1]
    comm.all_to_all(out, every[rank].T)
    assert np.array_equal(out, torch.stack([matrix[:, rank] for matrix in every]).numpy())

    values = [torch.complex(whole(peer, (4,)), whole(peer, (4,)) + 1) for peer in range(world_size)]
    conjugate = values[rank].clone().conj()
    comm.broadcast(conjugate, src=1)
    assert torch.equal(conjugate, values[1].conj())
    negative = values[rank].clone().conj().imag
    gathered = torch.empty(world_size, 4)
    comm.all_gather(gathered, negative)
    assert torch.equal(gathered, torch.stack([-each.imag for each in values]))


@pytest.mark.parametrize("layout", ["3", "2x2", "2x2 interleaved"])
def test_views_move(layout: str) -> None:
    run_on(layout, move_views)


def move_conjugates(rank: int, world_size: int) -> None:
    """A conjugate or negative of torch's is a view with a bit set: it is read as it is, and written as it is."""
    comm = Communicator()
    values = [torch.complex(*whole(peer, (2, world_size)).double()) for peer in range(world_size)]
    mine = values[rank]
    negatives = [-each.imag for each in values]
    # Only some ranks have the bit: what is sent must not depend on it.
    imaginary = mine.clone().conj().imag if rank == 0 else negatives[rank].clone()
    assert imaginary.is_neg() == (rank == 0)
    total = torch.stack(negatives).sum(0)
    assert torch.equal(comm.all_reduce(imaginary, op="sum"), total)
    part = torch.ones(1, 2).to(torch.complex128).conj().imag[0, :1]
    comm.reduce_scatter(part, mine.conj().imag, op="sum")
    assert torch.equal(part, total[rank : rank + 1])
    for view, expected in ((mine.conj(), [each.conj() for each in values]), (mine.conj().imag, negatives)):
        gathered = torch.empty((world_size, world_size), dtype=mine.dtype).conj()
        gathered = gathered if view.is_complex() else gathered.imag
        comm.all_gather(gathered, view)
        assert torch.equal(gathered, torch.stack(expected))
        comm.all_to_all(gathered[0], view)
        assert torch.equal(gathered[0], torch.stack(expected)[:, rank])
        source = view.clone() if rank else view
        comm.broadcast(source)
        assert torch.equal(source, expected[0])
        comm.broadcast(source[:1], src=np.int64(0))
    matrix = torch.complex(*whole(rank, (2, 3, 4)))
    adjoint = matrix.clone().H
    comm.broadcast(adjoint, world_size - 1)
    assert torch.equal(adjoint, torch.complex(*whole(world_size - 1, (2, 3, 4))).H)


@pytest.mark.parametrize("layout", ["2", "2+1"])
def test_conjugates_and_negatives(layout: str) -> None:
    run_on(layout, move_conjugates)


def reduce_numpy(rank: int, world_size: int) -> None:
    comm = Communicator()
    for shape in SHAPES:
        for dtype in (np.float32, np.float64, np.float16, np.int64, np.int32):
            x = np.array(whole(rank, shape).numpy(), dtype=dtype)
            address = x.__array_interface__["data"]
            assert comm.all_reduce(x, op="sum") is x
            assert x.__array_interface__["data"] == address
            assert x.dtype == dtype
            assert np.array_equal(x, total(world_size, shape).numpy().astype(dtype)), (shape, dtype)
    assert isinstance(commopt.all_reduce(np.ones(3)), np.ndarray)


@pytest.mark.parametrize("layout", ["2", "2+1"])
def test_numpy_arrays(layout: str) -> None:
    run_on(layout, reduce_numpy)


def reduce_special_tensors(rank: int, world_size: int) -> None:
    comm = Communicator()
    leaf = torch.ones(5, requires_grad=True)
    with torch.no_grad():
        assert comm.all_reduce(leaf, op="sum") is leaf
    assert leaf.tolist() == [world_size] * 5
    assert leaf.requires_grad
    with torch.inference_mode():
        x = torch.ones(5)
        comm.all_reduce(x, op="sum")
    assert x.tolist() == [world_size] * 5
    channels_last = whole(rank, (2, 3, 4, 5)).to(memory_format=torch.channels_last)
    comm.all_reduce(channels_last, op="sum")
    assert torch.equal(channels_last, total(world_size, (2, 3, 4, 5)))
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    comm.broadcast(parameter.data, 1)
    assert parameter.tolist() == [1, 1, 1]


def test_parameters_inference_tensors_and_channels_last() -> None:
    run(reduce_special_tensors, 2)


# ------------------------------------------------------------------------------ asynchronous


def keep_many_in_flight(rank: int, world_size: int) -> None:
    comm = Communicator()
    xs = [whole(rank, (n,)) for n in (1, 10, 100_000, 0, 1000)]
    works = [comm.all_reduce(x, op="sum", async_op=True) for x in xs]
    for x, work in reversed(list(zip(xs, works, strict=True))):
        assert isinstance(work, commopt.Work)
        assert work.wait() is x
        assert work.is_completed()
        assert torch.equal(x, total(world_size, tuple(x.shape)))
        work.wait()  # again: harmless

    array = np.full(4, rank, dtype=np.float32)
    work = comm.broadcast(array, 1, async_op=True)
    assert work.wait() is array
    assert (array == 1).all()

    x = whole(rank, (100,))
    future = comm.all_reduce(x, op="sum", async_op=True).get_future()
    doubled = future.then(lambda done: done.value() * 2)
    future.wait()
    assert torch.equal(x, total(world_size, (100,)))
    assert torch.equal(torch.as_tensor(doubled.wait()).reshape(100), 2 * x)

    # One lane, one order: each operation sees what the one before left in the tensor.
    x = torch.full((3,), float(rank))
    works = [
        comm.all_reduce(x, op="sum", async_op=True),
        comm.broadcast(x, 0, async_op=True),
        comm.all_reduce(x, op="sum", async_op=True),
        commopt.all_reduce(x, op="avg", async_op=True),
    ]
    works[-1].wait()
    assert all(work.is_completed() for work in works)
    assert x.tolist() == [world_size * sum(range(world_size))] * 3

    everything = torch.empty(world_size, 2)
    block = torch.full((2,), float(rank))
    gather = comm.all_gather(everything, block, async_op=True)
    scatter = comm.reduce_scatter(block, everything, op="sum", async_op=True)
    exchanged = torch.empty(world_size, 2)
    exchange = comm.all_to_all(exchanged, everything, async_op=True)
    assert exchange.wait() is exchanged
    assert scatter.wait() is block
    assert gather.wait() is everything
    assert everything[:, 0].tolist() == list(range(world_size))
    assert block.tolist() == [world_size * rank] * 2
    assert exchanged[:, 0].tolist() == [rank] * world_size


@pytest.mark.parametrize("layout", ["3", "2x2"])
def test_asynchronous_operations(layout: str) -> None:
    run_on(layout, keep_many_in_flight)


def abandon_handles(rank: int, world_size: int) -> None:
    """Handles may be dropped; the lane finishes what was submitted, in order."""
    comm = Communicator()
    xs = [torch.ones(50_000) for _ in range(10)]
    for x in xs:
        comm.all_reduce(x, op="sum", async_op=True)
    comm.all_reduce(torch.ones(1))
    assert all((x == world_size).all() for x in xs)


def test_handles_may_be_dropped() -> None:
    run(abandon_handles, 3)


# ------------------------------------------------------------------------------ groups


def use_subgroups(rank: int, world_size: int) -> None:
    odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
    mine, members = (odd, [1, 3]) if rank % 2 else (even, [0, 2])
    comm = Communicator(mine)
    assert commopt.all_reduce(torch.full((3,), float(rank)), op="sum", group=mine).tolist() == [sum(members)] * 3
    gathered = torch.empty(2)
    comm.all_gather(gathered, torch.tensor([float(rank)]))
    assert gathered.tolist() == members
    x = torch.tensor([float(rank)])
    comm.broadcast(x, src=1)  # rank 1 of the group
    assert x.item() == members[1]
    out = torch.empty(2)
    comm.all_to_all(out, torch.tensor([10.0 * rank, 10.0 * rank + 1]))
    assert out.tolist() == [10 * member + members.index(rank) for member in members]
    shard = torch.empty(1)
    comm.reduce_scatter(shard, torch.tensor([1.0, 2.0]), op="sum")
    assert shard.item() == 2 * (1 + members.index(rank))

    world = Communicator()  # beside the subgroups, in between their operations
    pending = comm.all_reduce(torch.ones(1000), async_op=True)
    assert world.all_reduce(torch.tensor([float(rank)]), op="sum").item() == 6
    pending.wait()

    alone = dist.new_group([2])
    if rank == 2:
        assert Communicator(alone).all_reduce(torch.tensor([5.0])).item() == 5
    dist.barrier()


@pytest.mark.parametrize("nodes", [None, (2, 2), ((0, 2), (1, 3))], ids=str)
def test_subgroups(nodes: Any) -> None:
    run(use_subgroups, 4, nodes=nodes)


def make_and_destroy(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return how many descriptors and threads this process has after each of several groups was made and destroyed."""
    used, pending = [], []
    for number in range(12):
        group = dist.new_group(list(range(world_size)))
        assert commopt.all_reduce(torch.ones(5), op="sum", group=group).tolist() == [world_size] * 5
        pending.append(commopt.all_reduce(torch.ones(2**16 + number), op="sum", group=group, async_op=True))
        dist.destroy_process_group(group)  # the next all_reduce closes what commopt made over it
        used.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    for number, work in enumerate(pending):
        assert work.wait().tolist() == [world_size] * (2**16 + number)
    return used


def test_what_was_built_over_a_destroyed_group_is_closed() -> None:
    for used in run(make_and_destroy, 3, nodes=(2, 1), fresh=True):
        (fds_before, threads_before), (fds, threads) = used[1], used[-1]
        assert fds - fds_before <= 10, used  # torch itself keeps one now and then
        assert threads - threads_before <= 5, used


def close_them(rank: int, world_size: int) -> None:
    one, two, state = Communicator(), Communicator(), commopt.HookState()
    before = len(os.listdir("/proc/self/task"))
    pending = one.all_reduce(torch.ones(2**16), op="sum", async_op=True)
    one.close()
    one.close()
    assert pending.wait()[0] == world_size
    with pytest.raises(commopt.ConfigurationError, match="closed"):
        one.all_reduce(torch.ones(3))
    state.close()
    assert two.all_reduce(torch.ones(3), op="sum").tolist() == [world_size] * 3  # shares the groups
    assert commopt.all_reduce(torch.ones(3), op="sum").tolist() == [world_size] * 3
    two.close()
    assert len(os.listdir("/proc/self/task")) < before
    with pytest.raises(commopt.ConfigurationError, match="closed"):
        two.broadcast(torch.ones(3))
    assert commopt.all_reduce(torch.ones(3), op="sum").tolist() == [world_size] * 3  # over new ones


def test_close() -> None:
    run(close_them, 3, nodes=(2, 1), fresh=True)


def count_nodes(rank: int, world_size: int, ranks_per_node: int | None = None) -> int:
    return len(Communicator(ranks_per_node=ranks_per_node).cluster.nodes)


def test_nodes_come_from_hosts_environment_or_argument() -> None:
    assert run(count_nodes, 4) == [1] * 4
    assert run(count_nodes, 4, nodes=(2, 2)) == [2] * 4
    assert run(count_nodes, 3, nodes=((0, 2), (1,))) == [2] * 3
    assert run(count_nodes, 4, env={"COMMOPT_RANKS_PER_NODE": "2"}) == run(count_nodes, 4, 2) == [2] * 4
    assert run(count_nodes, 4, env={"COMMOPT_RANKS_PER_NODE": "1"}) == [4] * 4


def only_set_up(rank: int, world_size: int) -> None:
    for _ in range(10):
        Communicator()
        commopt.HookState()


def test_a_rank_may_leave_right_after_setup() -> None:
    for _ in range(5):
        run(only_set_up, 4, nodes=(2, 2))


# ------------------------------------------------------------------------------ memory that cannot be written


def refuse_memory(rank: int, world_size: int) -> None:
    comm = Communicator()
    readonly = np.ones(4, dtype=np.float32)
    readonly.setflags(write=False)
    overlapping = np.lib.stride_tricks.as_strided(np.ones(6, np.float32), (4, 3), (4, 4))
    outputs = np.broadcast_to(np.float32(0), (4 * world_size,))
    refused: list[tuple[str, Callable[[], object]]] = [
        (r"read-only.*copy\(\)", lambda: comm.all_reduce(readonly)),
        (r"read-only.*copy\(\)", lambda: comm.all_gather(outputs, np.ones(4))),
        (r"share memory.*contiguous\(\)", lambda: comm.all_reduce(torch.ones(1).expand(5))),
        (r"share memory.*contiguous\(\)", lambda: comm.all_gather(torch.ones(1).expand(world_size), torch.ones(1))),
        (r"share memory.*contiguous\(\)", lambda: comm.all_reduce(overlapping)),
        (r"share memory.*contiguous\(\)", lambda: comm.broadcast(torch.ones(6).as_strided((4, 3), (1, 1)))),
    ]
    for message, call in refused:
        with pytest.raises(commopt.UnsupportedTensorError, match=message):
            call()
    comm.all_gather(torch.empty(world_size * 4), torch.ones(1).expand(4))  # reading is another matter
    comm.all_gather(np.empty(world_size * 4, np.float32), readonly)


def test_memory_that_cannot_hold_a_result() -> None:
    run(refuse_memory, 2)
