"""The kernels of block quantization, run on the CPU: launch code, shuffles, barriers, tails, strides, alignment."""

from __future__ import annotations

import ctypes
import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from commopt.kernels.codec import Codec
from commopt.kernels.quantize_reference import uniform
from tests.emulator import Emulator
from tests.quantize_cases import (
    DICE,
    DTYPES,
    Carrying,
    Check,
    codec_id,
    codecs,
    exact_values,
    random_values,
)

# Part of a warp, a whole one, all warps of a CUDA block with idle threads in the last.
BLOCKS = (64, 192, 512, 1088)
CARRYING = (None, Carrying(), Carrying(1024.0, 0.9), Carrying(3.0, 0.5, old_offset=1, new_offset=2))


@pytest.fixture
def check(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Check:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    torch.manual_seed(0)
    return Check(emulator, "cpu")


@pytest.mark.parametrize("codec", codecs(*BLOCKS), ids=codec_id)
class TestEveryBlock:
    def test_encode(self, check: Check, codec: Codec) -> None:
        row_blocks = 4 if codec.block > 64 else 11
        full = 2 * row_blocks * codec.block
        for index, numel in enumerate((full, full - 3, full - row_blocks * codec.block - 36, 5, 0)):
            carrying = CARRYING[index % len(CARRYING)]
            exact = exact_values(codec, 2 * row_blocks, numel, torch.float32)
            check.encode(codec, exact, 2, row_blocks, scale=0.25, carrying=None, offset=index)
            values = random_values(codec, 2 * row_blocks, numel, torch.float32)
            check.encode(codec, values, 2, row_blocks, scale=1 / 3, carrying=carrying, offset=index, fuzzy=True)

    def test_decode(self, check: Check, codec: Codec) -> None:
        full = 2 * 3 * codec.block
        for numel, (index, dtype) in itertools.product((full, full - 70, 0), enumerate(DTYPES)):
            check.decode(codec, 2, 3, numel, dtype, offset=index)

    def test_accumulate(self, check: Check, codec: Codec) -> None:
        for peers in (1, 4, 9):
            check.accumulate(codec, peers, 3)

    def test_recode(self, check: Check, codec: Codec) -> None:
        full = 3 * codec.block
        for peers, carrying, numel in zip((1, 2, 3, 6), CARRYING, (full, full - 5, full - codec.block, 3), strict=True):
            check.recode(codec, peers, 3, numel, carrying, fuzzy=True)


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("codec", codecs(1536, 4096), ids=codec_id)
def test_no_warp_gets_too_far_ahead(
    check: Check, emulator: Emulator, monkeypatch: pytest.MonkeyPatch, codec: Codec, last_first: bool
) -> None:
    monkeypatch.setattr(emulator, "last_first", last_first)
    check.encode(codec, random_values(codec, 2, 2 * codec.block, torch.float32), 1, 2, fuzzy=True)
    check.recode(codec, 2, 2, 2 * codec.block, None, fuzzy=True)


@pytest.mark.parametrize("codec", codecs(128, 576), ids=codec_id)
@pytest.mark.parametrize("dtype", DTYPES)
class TestEveryDtype:
    @pytest.mark.parametrize("offset", range(4))
    def test_encode_at_every_alignment(self, check: Check, codec: Codec, dtype: torch.dtype, offset: int) -> None:
        carrying = Carrying(2.0, 0.5, old_offset=(offset + 1) % 4, new_offset=(offset + 2) % 4)
        exact = exact_values(codec, 3, 3 * codec.block - offset, dtype)
        check.encode(codec, exact, 1, 3, scale=-0.5, offset=offset)
        values = random_values(codec, 3, 3 * codec.block - offset, dtype)
        check.encode(codec, values, 1, 3, scale=-0.1, carrying=carrying, offset=offset, fuzzy=True)

    @pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
    def test_not_finite(self, check: Check, codec: Codec, dtype: torch.dtype, bad: float) -> None:
        for where in (0, 77, -1):
            check.not_finite(codec, dtype, bad, where)


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
            *(ctypes.c_ulonglong(DICE.seed), ctypes.c_uint(DICE.step), ctypes.c_uint(DICE.stream)),
            *(ctypes.c_ulonglong(element), ctypes.c_void_p(got.data_ptr())),
        )
        assert torch.equal(got, uniform(element, 4, DICE, got.device))
