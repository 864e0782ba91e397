"""The kernels of block quantization on a GPU, with both loaders, compared with the reference on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from commopt.kernels import loader
from commopt.kernels.codec import Codec
from tests.quantize_cases import DTYPES, Carrying, Check, codec_id, codecs, exact_values, random_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CARRYING = (None, Carrying(), Carrying(1024.0, 0.9), Carrying(3.0, 0.5, old_offset=1, new_offset=2))


@pytest.fixture(params=["native", "nvrtc"])
def check(request: pytest.FixtureRequest) -> Check:
    """Use one loader, or skip where it is not installed."""
    name: str = request.param
    torch.manual_seed(0)
    try:
        return Check(loader._load(name), "cuda")
    except ImportError as error:
        pytest.skip(f"{name}: {error}")


@pytest.mark.parametrize("codec", codecs(64, 192, 512, 1088, 4096), ids=codec_id)
class TestGpu:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_encode(self, check: Check, codec: Codec, dtype: torch.dtype) -> None:
        row_blocks = 100
        full = 3 * row_blocks * codec.block
        for offset, numel in enumerate((full, full - 3, full - row_blocks * codec.block - 36, 5, 0)):
            exact = exact_values(codec, 3 * row_blocks, numel, dtype)
            check.encode(codec, exact, 3, row_blocks, scale=0.25, offset=offset)
            for carrying in CARRYING:
                values = random_values(codec, 3 * row_blocks, numel, dtype)
                check.encode(codec, values, 3, row_blocks, scale=1 / 3, carrying=carrying, offset=offset, fuzzy=True)

    def test_decode(self, check: Check, codec: Codec) -> None:
        full = 3 * 100 * codec.block
        for numel, (offset, dtype) in itertools.product((full, full - 70, 0), enumerate(DTYPES)):
            check.decode(codec, 3, 100, numel, dtype, offset)

    @pytest.mark.parametrize("peers", [1, 2, 8])
    def test_sums(self, check: Check, codec: Codec, peers: int) -> None:
        full = 50 * codec.block
        check.accumulate(codec, peers, 50)
        for carrying, numel in itertools.product(CARRYING, (full, full - 5, full - codec.block, 3)):
            check.recode(codec, peers, 50, numel, carrying, fuzzy=True)

    @pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
    def test_not_finite(self, check: Check, codec: Codec, bad: float) -> None:
        for dtype, where in itertools.product(DTYPES, (0, 77, -1)):
            check.not_finite(codec, dtype, bad, where)
