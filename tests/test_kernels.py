# SPDX-License-Identifier: Apache-2.0
"""Every kernel does what its reference does: in the emulator, and on a GPU with both loaders.

Launch code, shuffles, barriers, tails, strides, alignment; selection and its order, ties; orthogonality and extremes.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from commopt.kernels import loader
from commopt.kernels.codec import Codec
from commopt.kernels.loader import Loader
from commopt.kernels.philox import uniform
from commopt.kernels.residual import commit
from commopt.kernels.sparse import SparseRow
from tests import lowrank_cases, quantize_cases, sparse_cases
from tests.emulator import Emulator, launched_by, on_the_cpu
from tests.lowrank_cases import SHAPES, orthonormal, spread
from tests.payloads import ResidualUse
from tests.quantize_cases import DTYPES, RNG, codec_id, codecs, exact_values, random_values
from tests.sparse_cases import CAPACITY, CONTENTS, RESIDUAL_USES, TILE_NUMEL, VALUE_DTYPES, large_in_tiles

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LOADERS = ["emulator", *(pytest.param(name, marks=ON_GPU) for name in ("native", "nvrtc"))]
BAD = [float("inf"), -float("inf"), float("nan")]

BLOCK_RESIDUAL_USES = (None, ResidualUse(), ResidualUse(1024.0, 0.9), ResidualUse(3.0, 0.5, old_offset=1, new_offset=2))
BLOCKS = (64, 192, 512, 1088)  # part of a warp, a whole one, all warps of a CUDA block with idle threads in the last


class Kernels(NamedTuple):
    """Where they run."""

    loader: Loader
    device: str


@pytest.fixture(params=LOADERS)
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    torch.manual_seed(0)
    if request.param == "emulator":
        emulator = request.getfixturevalue("emulator")
        with on_the_cpu(emulator):
            yield Kernels(emulator, "cpu")
        return
    try:
        yield Kernels(loader._load(request.param), "cuda")
    except ImportError as error:
        pytest.skip(f"{request.param}: {error}")


@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 9001])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_commit_overwrites_or_leaves(kernels: Kernels, numel: int, offset: int) -> None:
    staged, before = torch.randn(numel), torch.randn(numel + 8)
    for committed in (True, False):
        values, flag = before.to(kernels.device), torch.tensor(committed, device=kernels.device)
        with launched_by(kernels.loader):
            commit(flag, staged.to(kernels.device), values[offset : offset + numel])
        wanted = before.clone()
        if committed:
            wanted[offset : offset + numel] = staged
        assert torch.equal(values.cpu(), wanted)


@pytest.fixture(params=[False, True])
def either_first(request: pytest.FixtureRequest, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """The emulator, with the first or the last of blocks, warps and lanes ahead of the others."""
    monkeypatch.setattr(emulator, "last_first", request.param)
    return emulator


class TestBlocks:
    @pytest.fixture
    def check(self, kernels: Kernels) -> quantize_cases.Check:
        return quantize_cases.Check(*kernels)

    @pytest.mark.parametrize("codec", codecs(*BLOCKS), ids=codec_id)
    def test_every_length(self, check: quantize_cases.Check, codec: Codec) -> None:
        row_blocks = 4 if codec.block > 64 else 11
        full = 2 * row_blocks * codec.block
        for index, numel in enumerate((full, full - 3, full - row_blocks * codec.block - 36, 5, 0)):
            use = BLOCK_RESIDUAL_USES[index % len(BLOCK_RESIDUAL_USES)]
            exact = exact_values(codec, 2 * row_blocks, numel, torch.float32)
            check.encode(codec, exact, 2, row_blocks, scale=0.25, offset=index)
            values = random_values(codec, 2 * row_blocks, numel, torch.float32)
            check.encode(codec, values, 2, row_blocks, scale=1 / 3, use=use, offset=index, fuzzy=True)
        full = 2 * 3 * codec.block
        for numel, (index, dtype) in itertools.product((full, full - 70, 0), enumerate(DTYPES)):
            check.decode(codec, 2, 3, numel, dtype, offset=index)

    @pytest.mark.parametrize("codec", codecs(*BLOCKS), ids=codec_id)
    def test_sums(self, check: quantize_cases.Check, codec: Codec) -> None:
        full = 3 * codec.block
        for peers in (1, 4, 9):
            check.accumulate(codec, peers, 3)
        numels = (full, full - 5, full - codec.block, 3)
        for peers, use, numel in zip((1, 2, 3, 6), BLOCK_RESIDUAL_USES, numels, strict=True):
            check.recode(codec, peers, 3, numel, use, fuzzy=True)

    @pytest.mark.parametrize("codec", codecs(1536, 4096), ids=codec_id)
    def test_no_warp_gets_too_far_ahead(self, either_first: Emulator, codec: Codec) -> None:
        with on_the_cpu(either_first):
            check = quantize_cases.Check(either_first, "cpu")
            check.encode(codec, random_values(codec, 2, 2 * codec.block, torch.float32), 1, 2, fuzzy=True)
            check.recode(codec, 2, 2, 2 * codec.block, None, fuzzy=True)

    @pytest.mark.parametrize("codec", codecs(128, 576), ids=codec_id)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_dtype_and_alignment(self, check: quantize_cases.Check, codec: Codec, dtype: torch.dtype) -> None:
        for offset in range(4):
            use = ResidualUse(2.0, 0.5, old_offset=(offset + 1) % 4, new_offset=(offset + 2) % 4)
            exact = exact_values(codec, 3, 3 * codec.block - offset, dtype)
            check.encode(codec, exact, 1, 3, scale=-0.5, offset=offset)
            values = random_values(codec, 3, 3 * codec.block - offset, dtype)
            check.encode(codec, values, 1, 3, scale=-0.1, use=use, offset=offset, fuzzy=True)
        for bad, where in itertools.product(BAD, (0, 77, -1)):
            check.not_finite(codec, dtype, bad, where)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("codec", codecs(64, 128, 576), ids=codec_id)
    def test_elements_in_parts(self, check: quantize_cases.Check, codec: Codec, dtype: torch.dtype) -> None:
        """Blocks inside a part, at every alignment, across two parts and across many."""
        check.in_parts(codec, dtype, (3, 64, 1, 600, 5, 2, 2048, 1, 700), (0, 5, 0, 64, 1, 2, 3, 1, 2))
        check.in_parts(codec, dtype, (701,), (5,))


def test_philox_counts_past_32_bits(emulator: Emulator) -> None:
    library = emulator.build(
        "philox.cuh",
        """extern "C" void fall(unsigned long long seed, unsigned step, unsigned stream, unsigned long long element,
                                float* result) {
            unsigned words[4];
            philox({seed, step, stream}, element, words);
            for (int k = 0; k < 4; ++k) result[k] = unit_interval(words[k]);
        }""",
    )
    for element in (0, 4, 2**32 - 4, 2**32, 2**34 - 4, 2**34, 2**40 + 8):
        got = torch.empty(4)
        library.fall(
            *(ctypes.c_ulonglong(RNG.seed), ctypes.c_uint(RNG.step), ctypes.c_uint(RNG.stream)),
            *(ctypes.c_ulonglong(element), ctypes.c_void_p(got.data_ptr())),
        )
        assert torch.equal(got, uniform(element, 4, RNG, got.device))


class TestSparse:
    @pytest.fixture
    def check(self, kernels: Kernels) -> sparse_cases.Check:
        return sparse_cases.Check(*kernels)

    @pytest.mark.parametrize("contents", CONTENTS)
    @pytest.mark.parametrize("count", [1, 41, 1500, 5000])
    def test_what_is_selected(self, check: sparse_cases.Check, contents: str, count: int) -> None:
        """Two tiles, of which the second is partly past the end; one row of several has too few elements."""
        values = CONTENTS[contents](2 * 5000 - 1200)
        check.select(SparseRow(5000, count, torch.float32), values, 2, use=ResidualUse())

    @pytest.mark.parametrize("numel", [3 * 999, 3 * 999 - 1, 2 * 999, 1000, 1, 0])
    def test_padding_is_taken_last(self, check: sparse_cases.Check, numel: int) -> None:
        for count in (1, 30, 999):
            values = CONTENTS["mostly zero"](numel)
            check.select(SparseRow(999, count, torch.bfloat16), values, 3, use=ResidualUse(2.0))

    @pytest.mark.parametrize("use", RESIDUAL_USES, ids=str)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_what_is_kept(self, check: sparse_cases.Check, use: ResidualUse | None, dtype: torch.dtype) -> None:
        for offset, value_dtype in enumerate(VALUE_DTYPES):
            values = torch.randn(2 * 700 - offset).to(dtype)
            check.select(SparseRow(700, 33, value_dtype), values, 2, scale=-1 / 3, use=use, offset=offset)

    @pytest.mark.parametrize("contents", ["normal", "ties"])
    def test_indices_of_several_regions(self, either_first: Emulator, contents: str) -> None:
        """No region need have an entry, and no warp may get too far ahead."""
        row = SparseRow(2 * 65536 + 4500, 500, torch.bfloat16)
        values = CONTENTS[contents](row.chunk_numel)
        values[65536 : 2 * 65536] = 0.0
        with on_the_cpu(either_first):
            check = sparse_cases.Check(either_first, "cpu")
            check.select(row, values, 1, use=ResidualUse())
            check.scatter(row, 1, row.chunk_numel, torch.float32)
            check.accumulate(row, 3)

    @pytest.mark.parametrize("tiles", [1, 8, 2048, 2049, 5003])
    def test_offsets(self, emulator: Emulator, tiles: int) -> None:
        """More tiles than one scan takes, and fewer; the second row has fewer ties than wanted in its last tiles."""
        counts = torch.randint(0, 3, (2, tiles, 2), dtype=torch.int32)
        row = SparseRow(tiles * TILE_NUMEL, int(counts[..., 0].sum(1).max()) + 7, torch.float32)
        thresholds = torch.tensor([[0, 7, 0, 0], [0, 10**6, 0, 0]], dtype=torch.int32)
        payload = torch.full((2, row.nbytes), 0xAB, dtype=torch.uint8)
        begins = counts.cumsum(1).sub(counts)
        ends = (counts[..., 0].cumsum(1) + counts[..., 1].cumsum(1).minimum(thresholds[:, 1:2])).tolist()
        source = (counts.data_ptr(), row.chunk_numel, thresholds.data_ptr())
        target = (payload.data_ptr(), payload.stride(0), row.count, 0)
        emulator.launch("sparse_offsets", 2, 256, 0, (*source, *target))
        assert torch.equal(counts.long(), begins)
        last_tiles = [*range(15, tiles, 16), tiles - 1][: row.blocks]
        for part, wanted in zip(payload, ends, strict=True):
            assert part[: row.indices_begin].view(torch.int32).tolist() == [wanted[tile] for tile in last_tiles]

    def test_collected_candidates(self, either_first: Emulator) -> None:
        """Two rows of ten tiles, so two groups each, of which the last is not full."""
        larges = [[0, 1, 40, CAPACITY - 1, CAPACITY, CAPACITY + 1, 300, 4096, 3, 17], [2] * 10]
        p = torch.stack([large_in_tiles(numbers, ties=False) for numbers in larges])
        p[0, 9 * TILE_NUMEL - 1] = float("nan")
        larges[0][8] += 1
        keys = torch.tensor([[1.0, 0, 0, 0], [1.0, 0, 0, 0]]).view(torch.int32)
        candidates = torch.full((20, 386), -1, dtype=torch.int32)
        first_bins, bins = torch.zeros(2, 2, 2048, dtype=torch.int32)
        values, p = p, torch.empty_like(p)
        written = (p.data_ptr(), first_bins.data_ptr(), candidates.data_ptr())
        source = (values.data_ptr(), 0, values.numel(), 1.0, values.shape[1], 0, 1.0, 0)
        either_first.launch("sparse_accumulate", 20, 256, 0, (*source, *written))
        pointers = (keys.data_ptr(), candidates.data_ptr(), bins.data_ptr())
        either_first.launch("sparse_collect", 4, 256, 0, (p.data_ptr(), p.numel(), p.shape[1], *pointers))
        numbers = [number for row in larges for number in row]
        found = candidates[:, -2].tolist()
        assert [min(number, CAPACITY + 1) for number in numbers] == found
        for number, tile, own in zip(numbers, p.view(20, TILE_NUMEL), candidates, strict=True):
            if number <= CAPACITY:
                elements = (~(tile.abs() < 1.0)).nonzero().flatten()
                assert torch.equal(own[:number], tile[elements].view(torch.int32))
                assert own[CAPACITY:].view(torch.int16)[:number].tolist() == elements.tolist()
        assert bins.sum(1).tolist() == [sum(larges[0]) - 1, sum(larges[1])]

    @pytest.mark.parametrize("use", [None, *RESIDUAL_USES[1::2]], ids=str)
    @pytest.mark.parametrize("ties", [False, True])
    def test_tiles_that_fit_their_slots_and_others(
        self, check: sparse_cases.Check, ties: bool, use: ResidualUse | None
    ) -> None:
        for numbers in ((CAPACITY, CAPACITY + 1, 0, 5, 2000, CAPACITY - 1, 33, 1, 70, 400), (CAPACITY + 1,) * 9):
            values = large_in_tiles(numbers, ties=ties)
            for count in (1, 600, sum(numbers) - 1):
                check.select(SparseRow(values.numel(), count, torch.bfloat16), values, 1, use=use)

    @pytest.mark.parametrize("use", [None, ResidualUse(1024.0), ResidualUse(decay=0.9)], ids=str)
    def test_rows_of_different_thresholds(self, check: sparse_cases.Check, use: ResidualUse | None) -> None:
        """Rows of ten tiles, the last of them short. In the second row most is zero, the third is small."""
        values = torch.randn(3, 37_000) * torch.tensor([100.0, 1.0, 1e-6])[:, None]
        values[1, 700:] = 0.0
        for missing, count in itertools.product((0, 5, 4500), (37, 800, 9000)):
            row = SparseRow(37_000, count, torch.bfloat16)
            check.select(row, values.flatten()[: 3 * 37_000 - missing], 3, use=use)

    @pytest.mark.parametrize("crowded", [False, True])
    def test_not_finite_among_candidates(self, check: sparse_cases.Check, crowded: bool) -> None:
        values = large_in_tiles([300 if crowded else 30] * 10, ties=False)
        for where in (0, 3 * TILE_NUMEL + 17, values.numel() - 1):
            spoilt = torch.cat((values, values))
            spoilt[where] = float("nan")
            check.select(SparseRow(values.numel(), 50, torch.float32), spoilt, 2, use=ResidualUse(), spoilt=0)

    @pytest.mark.parametrize("bad", [*BAD, -float("nan")])
    @pytest.mark.parametrize("value_dtype", VALUE_DTYPES)
    def test_not_finite(self, check: sparse_cases.Check, value_dtype: torch.dtype, bad: float) -> None:
        for where, count in itertools.product((0, 4321, 4999), (1, 50)):
            values = torch.randn(3 * 5000)
            values[5000 + where] = bad
            check.select(SparseRow(5000, count, value_dtype), values, 3, use=ResidualUse(), spoilt=1)

    @pytest.mark.parametrize("value_dtype", VALUE_DTYPES)
    def test_back(self, check: sparse_cases.Check, value_dtype: torch.dtype) -> None:
        row = SparseRow(1111, 77, value_dtype)
        for dtype, (offset, missing) in itertools.product(DTYPES, enumerate((0, 5, 1110, 3 * 1111 - 9, 3 * 1111))):
            check.scatter(row, 3, 3 * 1111 - missing, dtype, offset)
        for peers, count in itertools.product((1, 2, 5), (1, 300, 1111)):
            check.accumulate(SparseRow(1111, count, value_dtype), peers)


class TestLowrank:
    @pytest.fixture
    def check(self, kernels: Kernels) -> lowrank_cases.Check:
        return lowrank_cases.Check(*kernels)

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_orthogonalize(self, either_first: Emulator, shape: tuple[int, int, int]) -> None:
        with on_the_cpu(either_first):
            self.orthogonalize(lowrank_cases.Check(either_first, "cpu"), shape)

    @pytest.mark.parametrize("shape", [*SHAPES, (2, 9000, 32)], ids=str)
    @pytest.mark.parametrize("kernels", LOADERS[1:], indirect=True)
    def test_orthogonalize_on_a_gpu(self, check: lowrank_cases.Check, shape: tuple[int, int, int]) -> None:
        self.orthogonalize(check, shape)

    def orthogonalize(self, check: lowrank_cases.Check, shape: tuple[int, int, int]) -> None:
        factors = spread(*shape, smallest=0.1)
        check.like_the_reference(factors, None)
        check.like_the_reference(factors, orthonormal(*shape))
        result = check.orthogonalize(factors)
        assert torch.equal(check.orthogonalize(factors, in_place=True), result)
        gram = result.double().mT @ result.double()
        torch.testing.assert_close(gram, torch.eye(shape[2], dtype=torch.float64).expand_as(gram), rtol=0.0, atol=1e-4)
        values = factors.double()
        spanned = result.double() @ (result.double().mT @ values)
        torch.testing.assert_close(spanned, values, rtol=0.0, atol=1e-4 * values.abs().max().item())

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e30, 3e38])
    def test_the_scale_is_of_no_consequence(
        self, check: lowrank_cases.Check, shape: tuple[int, int, int], scale: float
    ) -> None:
        """One factor is large or small, the others are not."""
        factors = spread(*shape, smallest=0.1)
        factors /= factors.abs().amax((1, 2), keepdim=True)
        factors[0] *= scale
        check.like_the_reference(factors, orthonormal(*shape))

    @pytest.mark.parametrize("smallest", [1e-2, 1e-4, 1e-10])
    @pytest.mark.parametrize("shape", [(4, 50, 4), (2, 3500, 8), (3, 300, 32)], ids=str)
    def test_nearly_singular(self, check: lowrank_cases.Check, shape: tuple[int, int, int], smallest: float) -> None:
        """No singular value exceeds 1 (checked in every call), the largest is kept, noise fills up what is missing."""
        factors = spread(*shape, smallest=smallest)
        for initial in (None, orthonormal(*shape)):
            result = check.orthogonalize(factors, initial)
            assert result.isfinite().all()
            largest = torch.linalg.svd(factors).U[..., :1]
            assert (result.mT @ largest).norm(dim=1).min() > 0.999
        rank_one = torch.randn(5, 60, 1) * torch.randn(5, 1, 4)
        assert check.orthogonalize(rank_one).isfinite().all()

    @pytest.mark.parametrize("scale", [1e-30, 1e30])
    def test_the_largest_may_be_in_any_slice(self, check: lowrank_cases.Check, scale: float) -> None:
        factors = spread(2, 5000, 4, smallest=0.1)
        factors[1, :2000] = 0.0
        factors[1, -1000:] *= scale
        factors[1, 2000:-1000] = 0.0
        check.like_the_reference(factors, None)

    def test_zeros(self, check: lowrank_cases.Check) -> None:
        """Zeros stay zero, whatever their neighbours are; or become the initial factor."""
        factors = spread(3, 3500, 4, smallest=0.1)
        factors[1] = -0.0
        assert (check.orthogonalize(factors)[1] == 0).all()
        initial = orthonormal(3, 3500, 4)
        torch.testing.assert_close(check.orthogonalize(factors, initial)[1], initial[1], rtol=0.0, atol=1e-4)

    @pytest.mark.parametrize("bad", BAD)
    def test_not_finite(self, check: lowrank_cases.Check, bad: float) -> None:
        factors = spread(3, 3500, 4, smallest=0.1)
        factors[1, 2000, 2] = bad
        finite = check.orthogonalize(factors, orthonormal(3, 3500, 4)).isfinite()
        assert finite[[0, 2]].all()
        assert not finite[1].all()

    @pytest.mark.parametrize(
        "shape",
        [(1, 1, 1, 1), (3, 5, 7, 2), (2, 64, 128, 4), (2, 65, 129, 32), (1, 130, 300, 33), (1, 20, 30, 70)],
    )
    @pytest.mark.parametrize("precision", ["highest", "high"])
    def test_multiply(self, check: lowrank_cases.Check, shape: tuple[int, int, int, int], precision: str) -> None:
        """Every bit of float32 counts, whatever the user allows matrix units to do."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            check.multiply(*shape)
        finally:
            torch.set_float32_matmul_precision(before)

    @pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 5, 7, 2), (2, 8, 130, 3), (2, 65, 300, 4), (1, 30, 20, 5)])
    def test_project(self, check: lowrank_cases.Check, shape: tuple[int, int, int, int]) -> None:
        check.project(*shape)

    @pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
    @pytest.mark.parametrize("matrix_rank", [1, 3, 4, 7, 40])
    def test_matrices_of_many_shapes(
        self, check: lowrank_cases.Check, kernels: Kernels, matrix_rank: int, factor: Tensor | float
    ) -> None:
        factor = factor.to(kernels.device) if isinstance(factor, Tensor) else factor
        check.all_at_once(((70, 150), (5, 7), (9, 130), (70, 150), (64, 128), (130, 20)), matrix_rank, factor)

    def test_a_gram_matrix_that_roundings_made_indefinite(self, emulator: Emulator) -> None:
        """Exact arithmetic knows no such matrix; the root of a negative pivot would be NaN."""
        factors: Tensor = torch.randn(1, 5, 2)
        gram = torch.tensor([[1.0, 1.0], [1.0, 1.0 - 2.0**-10]])
        emulator.launch("factor_solve", 1, 256, 0, (factors.data_ptr(), 5, 2, gram.data_ptr(), 1, 1e-6, 0))
        assert factors.isfinite().all()
