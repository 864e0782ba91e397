# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels of block quantization and sparse rows do what plain torch does, on every kind of processor."""

from __future__ import annotations

import itertools
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from commopt.kernels import loader, quantize, sparse
from commopt.kernels.codec import Codec, Encoding
from commopt.kernels.cpu import DTYPES, CpuKernels, copy_parts, parts_of
from commopt.kernels.sparse import SparseRow
from tests import quantize_cases, sparse_cases
from tests.payloads import ResidualUse
from tests.quantize_cases import codec_id, codecs, exact_values, random_values
from tests.sparse_cases import CONTENTS, RESIDUAL_USES

BAD = (nan, inf, -inf)
VALUE_DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def target(cpu_target: Any) -> Any:
    torch.manual_seed(0)
    return cpu_target


@pytest.mark.parametrize("codec", codecs(64, 512, 576, 4096), ids=codec_id)
def test_blocks_of_every_length(target: Any, codec: Codec) -> None:
    check = quantize_cases.Check(CpuKernels(target), "cpu")
    row_blocks = 4 if codec.block > 64 else 11
    full = 2 * row_blocks * codec.block
    for index, numel in enumerate((full, full - 3, full - row_blocks * codec.block - 36, 5, 0)):
        for dtype in DTYPES:
            exact = exact_values(codec, 2 * row_blocks, numel, dtype)
            check.encode(codec, exact, 2, row_blocks, scale=0.25, offset=index)
            values = random_values(codec, 2 * row_blocks, numel, dtype)
            use = RESIDUAL_USES[index]
            check.encode(codec, values, 2, row_blocks, scale=1 / 3, use=use, offset=index, fuzzy=True)
    for numel, (index, dtype) in itertools.product((full, full - 70, 0), enumerate(DTYPES)):
        check.decode(codec, 2, row_blocks, numel, dtype, offset=index)


@pytest.mark.parametrize("codec", codecs(64, 512, 4096), ids=codec_id)
def test_sums_of_rows(target: Any, codec: Codec) -> None:
    check = quantize_cases.Check(CpuKernels(target), "cpu")
    full = 3 * codec.block
    for peers in (1, 4, 9):
        check.accumulate(codec, peers, 3)
    for peers, use, numel in zip(
        (1, 2, 3, 6, 2), RESIDUAL_USES, (full, full - 5, full - codec.block, 3, full), strict=True
    ):
        check.recode(codec, peers, 3, numel, use, fuzzy=True)


@pytest.mark.parametrize("codec", codecs(128), ids=codec_id)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element_spoils_its_block(target: Any, codec: Codec, dtype: torch.dtype) -> None:
    check = quantize_cases.Check(CpuKernels(target), "cpu")
    for bad, where in itertools.product(BAD, (0, 77, -1)):
        check.not_finite(codec, dtype, bad, where)


@pytest.mark.parametrize("codec", codecs(512), ids=codec_id)
def test_threads_and_processors_change_no_bit(target: Any, codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    values, chunk_numel = torch.randn(2**20), 2**19
    made = []
    for name, threads in (("baseline", 1), (target.target(), 3)):
        target.use(name)
        monkeypatch.setattr(loader, "cpu_threads", lambda threads=threads: threads)
        rows = quantize_cases.rows_of(codec, 2, chunk_numel // codec.block)
        quantize.encode(codec, values, rows.payload, Encoding(chunk_numel, 0.5, None, quantize_cases.RNG))
        total = torch.empty(chunk_numel)
        quantize.accumulate(codec, rows.payload, total)
        made.append((rows.payload.clone(), total))
    assert all(torch.equal(*pair) for pair in zip(*made, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", codecs(64, 512), ids=codec_id)
def test_elements_in_parts_are_like_those_in_one_piece(
    target: Any, codec: Codec, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks inside a part, across several, and short ones."""
    for threads in (1, 3):
        monkeypatch.setattr(loader, "cpu_threads", lambda threads=threads: threads)
        check = quantize_cases.Check(CpuKernels(target), "cpu")
        check.in_parts(codec, dtype, (3, 64, 1, 600, 2**17 + 40, 512), (0, 5, 0, 64, 1, 7))


@pytest.mark.parametrize("threads", [1, 3])
def test_parts_are_copied_and_nothing_beside_them(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "cpu_threads", lambda: threads)
    source, target, long = torch.randn(2**19), torch.zeros(2**19), 2**18 + 37
    parts = [(0, 3, 5), (7, long + 20, 0), (11, 9, long), (long + 12, long + 9, 1)]
    expected = target.clone()
    for here, there, numel in parts:
        expected[there : there + numel] = source[here : here + numel]
    assert copy_parts(source, target, parts_of(parts))
    assert torch.equal(target, expected)
    assert not copy_parts(source.double(), target.double(), parts_of(parts))


@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("count", [1, 50, 700, 4999, 5000])
def test_what_is_selected(target: Any, contents: str, count: int) -> None:
    check = sparse_cases.Check(target, "cpu")
    for (index, use), dtype in itertools.product(enumerate(RESIDUAL_USES), DTYPES):
        for numel in (10_000, 8800, 5001, 4999, 3, 0):
            values = CONTENTS[contents](numel).to(dtype)
            row = SparseRow(5000, count, VALUE_DTYPES[index % 2])
            check.select(row, values, 2, scale=-1 / 3, use=use, offset=index)


@pytest.mark.parametrize("contents", CONTENTS)
def test_rows_of_several_index_blocks(target: Any, contents: str) -> None:
    check = sparse_cases.Check(target, "cpu")
    for count in (1, 600, 8000):
        row = SparseRow(2 * 65536 + 4500, count, torch.bfloat16)
        values = CONTENTS[contents](3 * row.chunk_numel - 70_000)
        values[65536 : 2 * 65536] = 0.0
        check.select(row, values, 3, use=ResidualUse(3.0, 0.7))


@pytest.mark.parametrize("value_dtype", VALUE_DTYPES)
def test_rows_are_read_and_added_up(target: Any, value_dtype: torch.dtype) -> None:
    check = sparse_cases.Check(target, "cpu")
    for row in (SparseRow(700, 33, value_dtype), SparseRow(70_000, 330, value_dtype)):
        for dtype, missing in itertools.product(DTYPES, (0, 90, 2 * row.chunk_numel - 5, 2 * row.chunk_numel)):
            check.scatter(row, 2, 2 * row.chunk_numel - missing, dtype, 1)
        for peers in (1, 2, 5):
            check.accumulate(row, peers)


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_finite_shows_in_its_row(target: Any, bad: float) -> None:
    for where in (0, 17, 4999):
        values: Tensor = torch.randn(15_000)
        values[5000 + where] = bad
        row = SparseRow(5000, 30, torch.bfloat16)
        sparse_cases.Check(target, "cpu").select(row, values, 3, use=ResidualUse(), spoilt=1)


@pytest.mark.parametrize("bad", ["too many", "too few", "backwards", "negative", "beyond"])
def test_a_row_that_makes_no_sense_is_refused(target: Any, bad: str) -> None:
    """A worker of a parameter server may send anything: no memory beyond the chunk is touched."""
    row = SparseRow(70_000, 300, torch.bfloat16)
    rows = sparse_cases.selected(row, 1)
    ends = rows.payload[0, : row.indices_begin].view(torch.int32)
    indices = rows.payload[0, row.indices_begin : row.indices_begin + 2 * row.count].view(torch.int16)
    first, last = ends.tolist()
    changed = {"too many": (first, 2**30), "too few": (first, last - 1), "backwards": (last, first)}
    ends.copy_(torch.tensor(changed.get(bad, (-5, last) if bad == "negative" else (first, last))))
    if bad == "beyond":
        indices[-1] = 70_000 - 65_536  # the first behind the chunk
    for read in (
        lambda: sparse.scatter(row, rows.payload, torch.zeros(70_000)),
        lambda: sparse.accumulate(row, rows.payload, torch.zeros(70_000)),
    ):
        with pytest.raises(IndexError, match="sparse row"):
            read()
