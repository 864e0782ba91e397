# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels for CPUs: the reference's bits where ranks must agree, on every kind of processor."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from commopt import Aggregator, Cast, Compressed, Hierarchical, OneBit, PowerSGD, Quantize
from commopt.compress import Compressor
from commopt.kernels import loader, lowrank, packing, quantize
from commopt.kernels import lowrank_reference as reference
from commopt.kernels.codec import Scattered
from tests.catalogue import run_on
from tests.chosen import Chooser
from tests.hook_training import assert_identical
from tests.ranks import run
from tests.test_packed import NUMELS
from tests.test_powersgd import SHAPES, fresh

kernels = loader.cpu_kernels()
pytestmark = pytest.mark.usefixtures("cpu_target")

EVERY_SHAPE = ((1, 1, 1), (3, 7, 1), (5, 40, 4), (2, 17, 17), (1, 9000, 3), (2, 600, 32), (4, 3, 7), (1, 20_000, 5))
SIZES = (
    (1, 1, 1, 1),
    (2, 30, 41, 4),
    (1, 5, 300, 7),
    (3, 64, 8, 2),
    (1, 301, 1030, 3),
    (1, 2, 9, 33),
    (1, 700, 900, 16),
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_torch() -> Any:
    return patch.dict(os.environ, {loader.VARIABLE: "torch"})


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


# ----------------------------------------------------------------------------- what all ranks have alike


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", EVERY_SHAPE)
def test_orthogonal_factors_have_the_bits_of_the_reference(shape: tuple[int, int, int], threads: int) -> None:
    initial = torch.linalg.qr(random(*shape, seed=1))[0] if shape[1] >= shape[2] else random(*shape, seed=1)
    initial = initial[..., : shape[2]].contiguous()
    some = random(*shape)
    dependent, zero = some.clone(), torch.zeros(shape)
    dependent[..., -1] = dependent[..., 0]
    with patch.object(loader, "cpu_threads", lambda: threads):
        for factors in (some, 1e30 * some, 1e-30 * some, some.exp(), dependent, zero, some.clamp(min=0.5)):
            for begin in (None, initial):
                found = lowrank.orthogonalize(factors, initial=begin)
                wanted = torch.empty(shape)
                reference.orthogonalize_each([(factors, wanted, begin)])
                assert torch.equal(found, wanted)  # zeros may differ in their signs


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_products_are_decoded_to_the_bits_of_the_reference(size: tuple[int, int, int, int], threads: int) -> None:
    count, rows, cols, r = size
    left, right = random(count, rows, r), random(count, cols, r, seed=1)
    found, wanted = torch.empty(2, count, rows, cols)
    with patch.object(loader, "cpu_threads", lambda: threads):
        lowrank.decode(left, right, found)
    reference.decode(left, right, wanted)
    assert same(found, wanted)


def train_unlike(rank: int, world_size: int, aggregator: PowerSGD) -> str:
    """Some ranks have no compiled kernels."""
    if rank % 2:
        os.environ[loader.VARIABLE] = "torch"
    try:
        return Chooser(aggregator, SHAPES, lambda step: fresh(rank, step)).run(6).digest()
    finally:
        os.environ.pop(loader.VARIABLE, None)


@pytest.mark.parametrize(("layout", "form"), [("3", None), ("2x2", None), ("2x2", "reduce_scatter"), ("1+1", None)])
def test_replicas_are_alike_where_some_ranks_have_no_compiler(layout: str, form: Any) -> None:
    assert_identical(run_on(layout, train_unlike, Hierarchical(PowerSGD(3, start_step=0), form=form)))


@pytest.mark.parametrize("numel", NUMELS)
def test_packed_messages_are_the_same_bytes(numel: int) -> None:
    scales = torch.logspace(-4, 4, 9).repeat_interleave(numel // 9 + 1)[:numel]
    contents = [random(numel), random(numel) * scales, random(numel).exp() ** 20, torch.zeros(numel)]
    contents.append(torch.full((numel,), float("-inf")))
    for values in (each.bfloat16() for each in contents):
        nbytes = packing.packed_nbytes(numel), packing.spare_nbytes(numel)
        ours, theirs = torch.full((2, sum(nbytes)), 0xA5, dtype=torch.uint8)
        more = packing.pack(values, *ours.split(nbytes))
        with in_torch():
            assert packing.pack(values, *theirs.split(nbytes)) == more
        assert torch.equal(ours, theirs)
        found = torch.empty(numel, dtype=torch.bfloat16)
        packing.unpack(theirs[: nbytes[0]], theirs[nbytes[0] :][:more], found)
        assert torch.equal(found.view(torch.int16), values.view(torch.int16))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_sums_of_bfloat16_have_the_bits_of_torch(count: int) -> None:
    rows = random(count, 5004).bfloat16()[:, 1:-1].view(torch.uint8)
    found, wanted = torch.empty(2, 5002)
    Cast().accumulate(rows, found)
    with in_torch():
        Cast().accumulate(rows, wanted)
    assert same(found, wanted)


# -------------------------------------------------------------------------------------- one rank's own


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_products_of_matrices(size: tuple[int, int, int, int], threads: int) -> None:
    count, rows, cols, r = size
    matrices, left, right = random(count, rows, cols), random(count, rows, r, seed=1), random(count, cols, r, seed=2)
    exact = matrices.double()
    close = {"rtol": 1e-5, "atol": 1e-5 * (rows + cols) ** 0.5 * 4}
    with patch.object(loader, "cpu_threads", lambda: threads):
        out = torch.empty_like(left)
        lowrank.project(matrices, right, out)
        torch.testing.assert_close(out.double(), exact @ right.double(), **close)
        found = torch.empty_like(right)
        lowrank.refresh(matrices, left, found)
    torch.testing.assert_close(found.double(), exact.mT @ left.double(), **close)
    rest = exact - left.double() @ found.double().mT
    torch.testing.assert_close(matrices.double(), rest, rtol=1e-5, atol=2**-22 * float(rest.abs().max()) * r)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("r", [1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("kept", [True, False])
def test_matrices_in_a_buffer(cpu_target: Any, r: int, kept: bool, threads: int) -> None:
    """Begin, back and finish, one step of PowerSGD, with matrices of several shapes between other elements."""
    shapes = ((7, 30), (30, 7), (300, 517), (64, 2000), (1, 9))
    table, place, first, tops, sides = [], 3, 0, 0, 0
    for rows, cols in shapes:
        table.append((place, first, rows, cols, tops, sides))
        place, first, tops, sides = place + rows * cols + 2, first + rows * cols, tops + rows, sides + cols
    buffer, old = random(place), random(first, seed=1)
    before, residual = buffer.double(), old.double()
    right, left, own = random(sides, r, seed=2), torch.empty(tops, r), torch.empty(sides, r)
    mean = random(sides, r, seed=4)
    entries = torch.tensor(table)
    where = entries.data_ptr(), len(table)
    old_pointer = old.data_ptr() if kept else 0
    begun = right.data_ptr(), left.data_ptr(), r, threads
    cpu_target.lowrank_begin(buffer.data_ptr(), old_pointer, 0.25, 0.5, *where, *begun)
    cpu_target.lowrank_back(buffer.data_ptr(), *where, left.data_ptr(), own.data_ptr(), r, threads)
    made = buffer.clone()
    finished = left.data_ptr(), own.data_ptr(), mean.data_ptr(), r, threads
    cpu_target.lowrank_finish(buffer.data_ptr(), old_pointer, *where, *finished)
    touched = torch.zeros(place, dtype=torch.bool)
    for place_of, first_of, rows, cols, top, side in table:
        here, there = slice(place_of, place_of + rows * cols), slice(first_of, first_of + rows * cols)
        touched[here] = True
        matrix = (0.25 * before[here] + (0.5 * residual[there] if kept else 0)).view(rows, cols)
        torch.testing.assert_close(made[here].double().view(rows, cols), matrix, rtol=1e-6, atol=1e-6)
        tops_here, sides_here = left[top : top + rows].double(), own[side : side + cols].double()
        product = matrix @ right[side : side + cols].double()
        torch.testing.assert_close(tops_here, product, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(sides_here, matrix.mT @ tops_here, rtol=1e-4, atol=1e-4 * float(tops_here.norm()))
        rest = matrix - tops_here @ sides_here.mT
        if kept:
            torch.testing.assert_close(
                old[there].double().view(rows, cols), rest, rtol=1e-4, atol=1e-5 * float(rest.norm())
            )
        wanted = torch.empty(1, rows, cols)
        reference.decode(left[None, top : top + rows], mean[None, side : side + cols], wanted)
        assert same(buffer[here], wanted.flatten())
    assert torch.equal(buffer[~touched].double(), before[~touched])
    assert kept or torch.equal(old.double(), residual)


def test_a_rank_takes_its_share_of_the_processors() -> None:
    with (
        patch.object(os, "sched_getaffinity", lambda _: set(range(16))),
        patch.object(torch, "get_num_threads", lambda: 6),
    ):
        for ranks, threads in (("1", 6), ("4", 4), ("8", 2), ("32", 1), ("", 6), ("0", 6), ("two", 6)):
            with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": ranks}):
                assert loader.cpu_threads() == threads


MATRICES_AMONG_VECTORS = {"a": (30, 41), "a_bias": (7,), "b": (5, 300), "b_bias": (41,), "c": (64, 8)}


def train_in_place(rank: int, world_size: int, aggregator: Aggregator, dtype: torch.dtype, where: str) -> str:
    """Elements are compressed where they are in the bucket, or copied to one place before and back behind."""
    used: set[str] = set()

    def gradients(step: int) -> dict[str, Tensor]:
        seed = 100 * step + rank
        return {name: random(*shape, seed=seed).to(dtype) for name, shape in MATRICES_AMONG_VECTORS.items()}

    def noted(operation: str, place: int) -> Any:
        real = getattr(quantize, operation)

        def call(*arguments: Any) -> None:
            if isinstance(arguments[place], Scattered):
                used.add(operation)
            real(*arguments)

        return patch.object(quantize, operation, call)

    with (
        patch("commopt.aggregate.rows.takes_scattered", lambda device, dtype: where == "in place"),
        noted("encode", 1),
        noted("decode", 2),
        noted("accumulate", 2),
    ):
        trace = Chooser(aggregator, MATRICES_AMONG_VECTORS, gradients, dtype).run(6)
    expected = {"encode", "accumulate" if world_size == 2 else "decode"}
    if dtype != torch.float32 and world_size == 2:
        expected = {"encode"}  # between two a 16-bit sum is rounded
    if isinstance(aggregator, Hierarchical):
        used.discard("accumulate")  # of the ranks that exchange a shard with the other site
    assert used == (expected if where == "in place" else set())
    return trace.digest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compressor", [Quantize(8, block=64), Quantize(4, block=64), OneBit(64)], ids=repr)
@pytest.mark.parametrize("layout", ["2", "3"])
def test_compression_in_place_has_the_same_bits(layout: str, compressor: Compressor, dtype: torch.dtype) -> None:
    aggregator = Compressed(compressor, dense=("*bias*",))
    digests = [
        digest for where in ("in place", "") for digest in run_on(layout, train_in_place, aggregator, dtype, where)
    ]
    assert_identical(digests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sites", ["aabb", "aabbb"])
def test_rows_inside_a_site_are_compressed_in_place_with_the_same_bits(sites: str, dtype: torch.dtype) -> None:
    nodes = (1,) * len(sites)
    aggregator = Hierarchical(inter=Compressed(Quantize(8, block=64), dense=("*bias*",)))
    digests = [
        digest
        for where in ("in place", "")
        for digest in run(train_in_place, len(nodes), aggregator, dtype, where, nodes=nodes, sites=tuple(sites))
    ]
    assert_identical(digests)
