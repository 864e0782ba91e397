"""The kernels of sparse rows, run on the CPU: selection, order of entries, ties, tails, strides, alignment."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from commopt.kernels import sparse
from commopt.kernels.codec import ErrorFeedback, Momentum
from commopt.kernels.sparse import SparseRow
from tests.emulator import Emulator
from tests.sparse_cases import (
    CAPACITY,
    CARRYING,
    CONTENTS,
    TILE_NUMEL,
    VALUE_DTYPES,
    Carrying,
    Check,
    large_in_tiles,
)


@pytest.fixture
def check(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Check:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    torch.manual_seed(0)
    return Check(emulator, "cpu")


@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("count", [1, 41, 1500, 5000])
def test_what_is_selected(check: Check, contents: str, count: int) -> None:
    """Two tiles, of which the second is partly past the end; one row of several has too few elements."""
    values = CONTENTS[contents](2 * 5000 - 1200)
    check.select(SparseRow(5000, count, torch.float32), values, 2, carrying=Carrying())


@pytest.mark.parametrize("numel", [3 * 999, 3 * 999 - 1, 2 * 999, 1000, 1, 0])
@pytest.mark.parametrize("count", [1, 30, 999])
def test_padding_is_taken_last(check: Check, numel: int, count: int) -> None:
    values = CONTENTS["mostly zero"](numel)
    check.select(SparseRow(999, count, torch.bfloat16), values, 3, carrying=Carrying(2.0))


@pytest.mark.parametrize("carrying", CARRYING, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_kept(check: Check, carrying: Carrying | None, dtype: torch.dtype) -> None:
    for offset, value_dtype in enumerate(VALUE_DTYPES):
        values = torch.randn(2 * 700 - offset).to(dtype)
        check.select(SparseRow(700, 33, value_dtype), values, 2, scale=-1 / 3, carrying=carrying, offset=offset)


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("contents", ["normal", "ties"])
def test_indices_of_several_regions(
    check: Check, emulator: Emulator, monkeypatch: pytest.MonkeyPatch, contents: str, last_first: bool
) -> None:
    """No region need have an entry, and no warp may get too far ahead."""
    monkeypatch.setattr(emulator, "last_first", last_first)
    row = SparseRow(2 * 65536 + 4500, 500, torch.bfloat16)
    values = CONTENTS[contents](row.chunk_numel)
    values[65536 : 2 * 65536] = 0.0
    check.select(row, values, 1, carrying=Carrying())
    check.scatter(row, 1, row.chunk_numel, torch.float32)
    check.accumulate(row, 3)


@pytest.mark.parametrize("tiles", [1, 8, 2048, 2049, 5003])
def test_offsets(emulator: Emulator, tiles: int) -> None:
    """More tiles than one scan takes, and fewer; the second row has fewer ties than are wanted in its last tiles."""
    counts = torch.randint(0, 3, (2, tiles, 2), dtype=torch.int32)
    row = SparseRow(tiles * TILE_NUMEL, int(counts[..., 0].sum(1).max()) + 7, torch.float32)
    thresholds = torch.tensor([[0, 7, 0, 0], [0, 10**6, 0, 0]], dtype=torch.int32)
    payload = torch.full((2, row.nbytes), 0xAB, dtype=torch.uint8)
    begins = counts.cumsum(1).sub(counts)
    ends = (counts[..., 0].cumsum(1) + counts[..., 1].cumsum(1).minimum(thresholds[:, 1:2])).tolist()
    target = (payload.data_ptr(), payload.stride(0), row.count, 0)
    emulator.launch("sparse_offsets", 2, 256, 0, (counts.data_ptr(), row.chunk_numel, thresholds.data_ptr(), *target))
    assert torch.equal(counts.long(), begins)
    last_tiles = [*range(15, tiles, 16), tiles - 1][: row.blocks]
    for part, wanted in zip(payload, ends, strict=True):
        assert part[: row.indices_begin].view(torch.int32).tolist() == [wanted[tile] for tile in last_tiles]


@pytest.mark.parametrize("last_first", [False, True])
def test_collected_candidates(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, last_first: bool) -> None:
    """Two rows of ten tiles, so two groups each, of which the last is not full."""
    monkeypatch.setattr(emulator, "last_first", last_first)
    larges = [[0, 1, 40, CAPACITY - 1, CAPACITY, CAPACITY + 1, 300, 4096, 3, 17], [2] * 10]
    p = torch.stack([large_in_tiles(numbers, ties=False) for numbers in larges])
    p[0, 9 * TILE_NUMEL - 1] = float("nan")
    larges[0][8] += 1
    keys = torch.tensor([[1.0, 0, 0, 0], [1.0, 0, 0, 0]]).view(torch.int32)
    candidates = torch.full((20, 385), -1, dtype=torch.int32)
    bins = torch.zeros(2, 2048, dtype=torch.int32)
    pointers = (keys.data_ptr(), candidates.data_ptr(), bins.data_ptr())
    emulator.launch("sparse_collect", 4, 256, 0, (p.data_ptr(), p.numel(), p.shape[1], *pointers))
    numbers = [number for row in larges for number in row]
    assert candidates[:, -1].tolist() == numbers
    for number, tile, own in zip(numbers, p.view(20, TILE_NUMEL), candidates, strict=True):
        if number <= CAPACITY:
            elements = (~(tile.abs() < 1.0)).nonzero().flatten()
            assert torch.equal(own[:number], tile[elements].view(torch.int32))
            assert own[CAPACITY:].view(torch.int16)[:number].tolist() == elements.tolist()
    assert bins.sum(1).tolist() == [sum(larges[0]) - 1, sum(larges[1])]


@pytest.mark.parametrize("carrying", [None, *CARRYING[1::2]], ids=str)
@pytest.mark.parametrize("ties", [False, True])
def test_tiles_that_fit_their_slots_and_others(check: Check, ties: bool, carrying: Carrying | None) -> None:
    numbers = (CAPACITY, CAPACITY + 1, 0, 5, 2000, CAPACITY - 1, 33, 1, CAPACITY + 1, 70, 400)
    values = large_in_tiles(numbers, ties=ties)
    for count in (1, 600, sum(numbers) - 1):
        check.select(SparseRow(values.numel(), count, torch.bfloat16), values, 1, carrying=carrying)


@pytest.mark.parametrize("number", [CAPACITY, CAPACITY + 1, 4096])
@pytest.mark.parametrize("ties", [False, True])
def test_all_tiles_alike(check: Check, number: int, ties: bool) -> None:
    values = large_in_tiles([number] * 9, ties=ties)
    check.select(SparseRow(values.numel(), 5 * number, torch.float32), values, 1, carrying=Carrying())


@pytest.mark.parametrize("numel", [3 * 37_000, 3 * 37_000 - 5, 3 * 37_000 - 4500])
@pytest.mark.parametrize("carrying", [None, Carrying(1024.0), Carrying(momentum=Momentum(0.9))], ids=str)
def test_rows_of_different_thresholds(check: Check, numel: int, carrying: Carrying | None) -> None:
    """Rows of ten tiles, the last of them short. In the second row most is zero, the third is small."""
    values = torch.randn(3, 37_000) * torch.tensor([100.0, 1.0, 1e-6])[:, None]
    values[1, 700:] = 0.0
    for count in (37, 800, 9000):
        check.select(SparseRow(37_000, count, torch.bfloat16), values.flatten()[:numel], 3, carrying=carrying)


@pytest.mark.parametrize("crowded", [False, True])
def test_not_finite_among_candidates(check: Check, crowded: bool) -> None:
    values = large_in_tiles([300 if crowded else 30] * 10, ties=False)
    for where in (0, 3 * TILE_NUMEL + 17, values.numel() - 1):
        spoilt = torch.cat((values, values))
        spoilt[where] = float("nan")
        check.select(SparseRow(values.numel(), 50, torch.float32), spoilt, 2, carrying=Carrying(), spoilt=0)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan"), -float("nan")])
@pytest.mark.parametrize("value_dtype", VALUE_DTYPES)
def test_not_finite(check: Check, value_dtype: torch.dtype, bad: float) -> None:
    for where in (0, 4321, 4999):
        values = torch.randn(3 * 5000)
        values[5000 + where] = bad
        for count in (1, 50):
            check.select(SparseRow(5000, count, value_dtype), values, 3, carrying=Carrying(), spoilt=1)


@pytest.mark.parametrize("value_dtype", VALUE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scatter(check: Check, value_dtype: torch.dtype, dtype: torch.dtype) -> None:
    row = SparseRow(1111, 77, value_dtype)
    for offset, numel in enumerate((3 * 1111, 3 * 1111 - 5, 2 * 1111 + 1, 9, 0)):
        check.scatter(row, 3, numel, dtype, offset)


@pytest.mark.parametrize("peers", [1, 2, 5])
@pytest.mark.parametrize("value_dtype", VALUE_DTYPES)
def test_accumulate(check: Check, value_dtype: torch.dtype, peers: int) -> None:
    for count in (1, 300, 1111):
        check.accumulate(SparseRow(1111, count, value_dtype), peers)


@pytest.mark.usefixtures("check")
def test_wrapper_hands_everything_on(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    row = SparseRow(700, 33, torch.bfloat16)
    values, old = torch.randn(2, 1400)
    results = []
    for loader in (None, emulator):
        monkeypatch.setattr(sparse, "_loader", lambda *_, loader=loader: loader)
        payload = torch.empty(2, row.nbytes, dtype=torch.uint8)
        new, decoded, total = torch.empty(1400), torch.empty(1400), torch.empty(700)
        sparse.select(row, values, payload, 0.5, ErrorFeedback(old, new))
        sparse.scatter(row, payload, decoded)
        sparse.accumulate(row, payload, total)
        results.append((payload, new, decoded, total))
    for wanted, got in zip(*results, strict=True):
        assert torch.equal(wanted, got)
