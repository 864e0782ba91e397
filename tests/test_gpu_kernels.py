"""The kernels of compression on a GPU, with both loaders, compared with the reference on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from commopt.kernels import loader
from commopt.kernels.codec import Codec
from commopt.kernels.loader import Loader
from commopt.kernels.sparse import SparseRow
from tests import lowrank_cases, quantize_cases, sparse_cases
from tests.lowrank_cases import SHAPES, orthonormal, spread
from tests.quantize_cases import DTYPES, codec_id, codecs, exact_values, random_values
from tests.sparse_cases import CAPACITY, CARRYING, CONTENTS, VALUE_DTYPES, Carrying, large_in_tiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_With = quantize_cases.Carrying
BLOCK_CARRYING = (None, _With(), _With(1024.0, 0.9), _With(3.0, 0.5, old_offset=1, new_offset=2))


@pytest.fixture(params=["native", "nvrtc"])
def kernels(request: pytest.FixtureRequest) -> Loader:
    """Use one loader, or skip where it is not installed."""
    name: str = request.param
    torch.manual_seed(0)
    try:
        return loader._load(name)
    except ImportError as error:
        pytest.skip(f"{name}: {error}")


@pytest.mark.parametrize("codec", codecs(64, 192, 512, 1088, 4096), ids=codec_id)
class TestBlocks:
    @pytest.fixture
    def check(self, kernels: Loader) -> quantize_cases.Check:
        return quantize_cases.Check(kernels, "cuda")

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_encode(self, check: quantize_cases.Check, codec: Codec, dtype: torch.dtype) -> None:
        row_blocks = 100
        full = 3 * row_blocks * codec.block
        for offset, numel in enumerate((full, full - 3, full - row_blocks * codec.block - 36, 5, 0)):
            exact = exact_values(codec, 3 * row_blocks, numel, dtype)
            check.encode(codec, exact, 3, row_blocks, scale=0.25, offset=offset)
            for carrying in BLOCK_CARRYING:
                values = random_values(codec, 3 * row_blocks, numel, dtype)
                check.encode(codec, values, 3, row_blocks, scale=1 / 3, carrying=carrying, offset=offset, fuzzy=True)

    def test_decode(self, check: quantize_cases.Check, codec: Codec) -> None:
        full = 3 * 100 * codec.block
        for numel, (offset, dtype) in itertools.product((full, full - 70, 0), enumerate(DTYPES)):
            check.decode(codec, 3, 100, numel, dtype, offset)

    @pytest.mark.parametrize("peers", [1, 2, 8])
    def test_sums(self, check: quantize_cases.Check, codec: Codec, peers: int) -> None:
        full = 50 * codec.block
        check.accumulate(codec, peers, 50)
        for carrying, numel in itertools.product(BLOCK_CARRYING, (full, full - 5, full - codec.block, 3)):
            check.recode(codec, peers, 50, numel, carrying, fuzzy=True)

    @pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
    def test_not_finite(self, check: quantize_cases.Check, codec: Codec, bad: float) -> None:
        for dtype, where in itertools.product(DTYPES, (0, 77, -1)):
            check.not_finite(codec, dtype, bad, where)


class TestSparse:
    @pytest.fixture
    def check(self, kernels: Loader) -> sparse_cases.Check:
        return sparse_cases.Check(kernels, "cuda")

    @pytest.mark.parametrize("contents", CONTENTS)
    @pytest.mark.parametrize("density", [1e-5, 0.001, 0.25, 1.0])
    def test_what_is_selected(self, check: sparse_cases.Check, contents: str, density: float) -> None:
        for chunk_numel in (1000, 65536, 300_001):
            row = SparseRow.of(chunk_numel, density, torch.bfloat16)
            for numel in (3 * chunk_numel, 3 * chunk_numel - 5, chunk_numel + 1, 0):
                check.select(row, CONTENTS[contents](numel), 3, carrying=Carrying())

    @pytest.mark.parametrize("carrying", CARRYING, ids=str)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_what_is_kept(self, check: sparse_cases.Check, carrying: Carrying | None, dtype: torch.dtype) -> None:
        for offset, value_dtype in enumerate(VALUE_DTYPES):
            values = torch.randn(2 * 70_001 - offset).to(dtype)
            row = SparseRow(70_001, 701, value_dtype)
            check.select(row, values, 2, scale=-1 / 3, carrying=carrying, offset=offset)

    @pytest.mark.parametrize("carrying", [None, Carrying(), Carrying(1024.0)], ids=str)
    @pytest.mark.parametrize("ties", [False, True])
    def test_tiles_that_fit_their_slots_and_others(
        self, check: sparse_cases.Check, ties: bool, carrying: Carrying | None
    ) -> None:
        choices = torch.tensor([0, 1, 9, 70, CAPACITY - 1, CAPACITY, CAPACITY + 1, 900, 4096])
        numbers = choices[torch.randint(0, len(choices), (1003,))].tolist()
        values = large_in_tiles(numbers, ties=ties)
        for count in (1, 5000, sum(numbers) - 1):
            check.select(SparseRow(values.numel(), count, torch.bfloat16), values, 1, carrying=carrying)

    @pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
    def test_not_finite(self, check: sparse_cases.Check, bad: float) -> None:
        for where in (0, 4321, 69_999):
            values = torch.randn(3 * 70_000)
            values[70_000 + where] = bad
            for value_dtype in VALUE_DTYPES:
                row = SparseRow(70_000, 500, value_dtype)
                check.select(row, values, 3, carrying=Carrying(), spoilt=1)

    @pytest.mark.parametrize("value_dtype", VALUE_DTYPES)
    def test_back(self, check: sparse_cases.Check, value_dtype: torch.dtype) -> None:
        row = SparseRow(200_001, 3001, value_dtype)
        for dtype in DTYPES:
            for offset, numel in enumerate((3 * row.chunk_numel, 2 * row.chunk_numel + 77, 9, 0)):
                check.scatter(row, 3, numel, dtype, offset)
        for peers in (1, 2, 8):
            check.accumulate(row, peers)


class TestLowrank:
    @pytest.fixture
    def check(self, kernels: Loader) -> lowrank_cases.Check:
        return lowrank_cases.Check(kernels, "cuda")

    @pytest.mark.parametrize("scale", [1e-44, 1e-30, 1.0, 1e30, 3e38])
    @pytest.mark.parametrize("shape", [*SHAPES, (8, 50_000, 4), (2, 50_000, 32)], ids=str)
    def test_orthogonalize(self, check: lowrank_cases.Check, shape: tuple[int, int, int], scale: float) -> None:
        factors = spread(*shape, smallest=0.1)
        factors *= scale / factors.abs().amax((1, 2), keepdim=True)
        check.like_the_reference(factors, orthonormal(*shape))
        assert torch.equal(check.orthogonalize(factors, in_place=True), check.orthogonalize(factors))

    @pytest.mark.parametrize("smallest", [1e-2, 1e-4, 1e-10])
    @pytest.mark.parametrize("shape", [(4, 50, 4), (2, 3500, 8), (3, 3000, 32)], ids=str)
    def test_nearly_singular(self, check: lowrank_cases.Check, shape: tuple[int, int, int], smallest: float) -> None:
        factors = spread(*shape, smallest=smallest)
        for initial in (None, orthonormal(*shape)):
            assert check.orthogonalize(factors, initial).isfinite().all()

    def test_zeros_and_not_finite(self, check: lowrank_cases.Check) -> None:
        factors = spread(3, 3500, 4, smallest=0.1)
        factors[0] = 0.0
        factors[1, 2000, 2] = float("nan")
        result = check.orthogonalize(factors)
        assert (result[0] == 0).all()
        assert not result[1].isfinite().all()
        assert result[2].isfinite().all()

    @pytest.mark.parametrize("allow_tf32", [False, True])
    @pytest.mark.parametrize(
        ("count", "rows", "cols", "matrix_rank"),
        [(1, 1, 1, 1), (3, 65, 129, 4), (2, 1000, 3000, 32), (1, 130, 300, 33), (1, 50_000, 64, 8)],
    )
    def test_multiply(
        self,
        check: lowrank_cases.Check,
        monkeypatch: pytest.MonkeyPatch,
        count: int,
        rows: int,
        cols: int,
        matrix_rank: int,
        allow_tf32: bool,
    ) -> None:
        """Every bit of float32 counts, whatever the user allows matrix units to do."""
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allow_tf32)
        check.multiply(count, rows, cols, matrix_rank)
