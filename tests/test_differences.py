# SPDX-License-Identifier: Apache-2.0
"""Differences of 16-bit floats: every bit comes back, never longer than the numbers, nothing damaged is taken."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from commopt.kernels.differences import HEAD_NBYTES, largest_nbytes, memory_nbytes, pack_difference, unpack_difference
from commopt.kernels.loader import VARIABLE, cpu_kernels

NUMELS = (1, 7, 8, 63, 64, 65, 1023, 1024, 1025, 5000, 2**16 + 9)
DTYPES = (torch.bfloat16, torch.float16)
EVERY = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
GUARD = 0xA5


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int16)


def packed(values: Tensor, base: Tensor) -> Tensor:
    """Return the message, which the kernel and numpy make alike, and of which both make the values again."""
    made = []
    for kernels in ("", "torch"):
        with patch.dict(os.environ, {VARIABLE: kernels}):
            memory = torch.full((memory_nbytes(values.numel()) + 16,), GUARD, dtype=torch.uint8)
            nbytes = pack_difference(values, base, memory[:-16])
            assert HEAD_NBYTES <= nbytes <= largest_nbytes(values.numel())
            assert (memory[-16:] == GUARD).all()
            made.append(memory[:nbytes].clone())
    assert torch.equal(*made)
    for kernels in ("", "torch"):
        with patch.dict(os.environ, {VARIABLE: kernels}):
            found = torch.cat([base, base[:1]])
            unpack_difference(made[0], found[:-1])
            assert torch.equal(bits(found[:-1]), bits(values))
            assert torch.equal(bits(found[-1:]), bits(base[:1]))
    return made[0]


def some(numel: int, dtype: torch.dtype, seed: int = 0, scale: float = 0.05) -> Tensor:
    return (scale * torch.randn(numel, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.skipif(cpu_kernels() is None, reason="there is no kernel to compare with")
@pytest.mark.usefixtures("cpu_target")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", NUMELS)
def test_kernel_and_reference_make_one_message(numel: int, dtype: torch.dtype) -> None:
    base = some(numel, dtype)
    for rate in (0.0, 1e-5, 1e-3, 1.0, 1e4):
        packed((base.float() + rate * some(numel, torch.float32, 1, 1.0)).to(dtype), base)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pattern_of_bits_comes_back(dtype: torch.dtype) -> None:
    """Zeros of both signs, denormal numbers, infinities and every NaN, to and from each other."""
    every = EVERY.view(dtype)
    shuffled = EVERY[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))].view(dtype)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 6e-8, 1.0]).to(dtype)
    for base in (every, shuffled, every.flip(0), *(each.repeat(2**16) for each in special.split(1))):
        for values in (every, shuffled, torch.roll(every, 1)):
            packed(values, base)


@settings(max_examples=150, deadline=None)
@given(
    numel=st.integers(1, 3000),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    jumps=st.floats(0, 1),
    far=st.integers(0, 2**15),
)
def test_any_bits_come_back(numel: int, seed: int, dtype: torch.dtype, jumps: float, far: int) -> None:
    """A share of the numbers jumps anywhere, others by at most `far` units."""
    draws = torch.Generator().manual_seed(seed)
    base = torch.randint(-(2**15), 2**15, (numel,), generator=draws)
    near = base + torch.randint(-far, far + 1, (numel,), generator=draws)
    anywhere = torch.randint(-(2**15), 2**15, (numel,), generator=draws)
    values = torch.where(torch.rand(numel, generator=draws) < jumps, anywhere, near)
    wrapped = ((values + 2**15) % 2**16 - 2**15).to(torch.int16)
    packed(wrapped.view(dtype), base.to(torch.int16).view(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_jump_is_sent_as_it_is(dtype: torch.dtype) -> None:
    base = some(5000, dtype)
    jump = EVERY[torch.randperm(2**16, generator=torch.Generator().manual_seed(1))[:5000]].view(dtype)
    message = packed(jump, base)
    assert len(message) == HEAD_NBYTES + 2 * 5000
    assert torch.equal(message[HEAD_NBYTES:].view(torch.int16), bits(jump))


def test_numbers_that_stay_cost_an_octet_s_bit() -> None:
    base = some(2**16, torch.bfloat16)
    assert len(packed(base.clone(), base)) == HEAD_NBYTES + 2 * 64 + 2**16 // 64
    one = base.clone()
    one[777] += 1.0
    assert len(packed(one, base)) < HEAD_NBYTES + 2 * 64 + 2**16 // 64 + 17


@pytest.mark.parametrize(("step", "share"), [(1e-3, 0.27), (1e-4, 0.13), (1e-5, 0.06)])
def test_an_adam_step_is_short(step: float, share: float) -> None:
    """Weights that move by a quarter of the learning rate, as most do."""
    weights = some(2**18, torch.float32, scale=0.05)
    moved = weights - step * some(2**18, torch.float32, 1, 0.25)
    assert len(packed(moved.bfloat16(), weights.bfloat16())) < share * 2 * 2**18


@pytest.mark.parametrize("kernels", ["", "torch"])
@pytest.mark.parametrize("jump", [False, True])
def test_damaged_messages_raise_or_stay_within_their_numbers(kernels: str, jump: bool) -> None:
    base = some(3000, torch.bfloat16)
    moved = (base.float() + 1e-3 * some(3000, torch.float32, 1, 1.0)).bfloat16()
    message = packed(base.flip(0).nextafter(-base) if jump else moved, base)
    with patch.dict(os.environ, {VARIABLE: kernels}):
        for length in (*range(0, len(message), 97), len(message) - 1):
            with pytest.raises(ValueError, match="no difference of 3000 numbers"):
                unpack_difference(message[:length].clone(), base.clone())
        with pytest.raises(ValueError, match="it was damaged"):
            unpack_difference(torch.cat([message, message[:1]]), base.clone())
        with pytest.raises(ValueError, match="no difference of 3001 numbers"):
            unpack_difference(message, torch.cat([base, base[:1]]))
        draws, raised = torch.Generator().manual_seed(0), 0
        for _ in range(300):
            damaged = message.clone()
            places = torch.randint(0, len(message), (3,), generator=draws)
            damaged[places] = torch.randint(0, 256, (3,), generator=draws).to(torch.uint8)
            found = torch.cat([base, torch.zeros(64, dtype=torch.bfloat16)])
            try:
                unpack_difference(damaged, found[:3000])
            except ValueError:
                raised += 1
            assert not bits(found[3000:]).any()
        assert raised > (0 if jump else 30)
