"""The kernels of sparse rows, run on the CPU: selection, order of entries, ties, tails, strides, alignment."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from commopt.kernels import sparse
from commopt.kernels.codec import Carry
from commopt.kernels.sparse_row import SparseRow
from tests.emulator import Emulator
from tests.sparse_cases import CARRYING, CONTENTS, VALUE_DTYPES, Carrying, Check


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("emulator"))


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


def test_more_tiles_than_one_scan_takes(check: Check) -> None:
    values = torch.zeros(257 * 4096)
    values[:: 4096 * 3] = torch.randn(values[:: 4096 * 3].numel())
    values[-1] = 5.0
    check.select(SparseRow(values.numel(), 80, torch.float32), values, 1)


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
        sparse.select(row, values, payload, 0.5, Carry(old, new))
        sparse.scatter(row, payload, decoded)
        sparse.accumulate(row, payload, total)
        results.append((payload, new, decoded, total))
    for wanted, got in zip(*results, strict=True):
        assert torch.equal(wanted, got)
