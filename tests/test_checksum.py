# SPDX-License-Identifier: Apache-2.0
"""A checksum tells every flipped bit and every other order, of any dtype and length; strides do not count."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from commopt.attached import checksum as checksums
from commopt.attached.checksum import as_bytes, checksum, comparable
from commopt.attached.rounds import digest_of

CPU = torch.device("cpu")

TENSORS = {
    "float32": torch.arange(1.0, 61.0).view(6, 10),
    "bfloat16, odd": torch.arange(1.0, 36.0).bfloat16(),
    "float64": torch.arange(1.0, 12.0, dtype=torch.float64),
    "a scalar": torch.tensor(2.5),
    "bytes": torch.arange(13, dtype=torch.uint8),
    "zeros": torch.zeros(33),
}


@pytest.fixture(params=[({"cpu": 2**19}, 2**14), ({"cpu": 4}, 3)], ids=["joined", "in chunks"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(("_CHUNKS", "_SMALL"), request.param, strict=True):
        monkeypatch.setattr(checksums, name, value)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("name", TENSORS)
def test_every_flipped_bit_changes_the_checksum(name: str) -> None:
    tensor = TENSORS[name].clone()
    beside = [torch.ones(3), torch.arange(40.0)]
    before, flat = int(checksum([*beside, tensor], CPU)), tensor.view(-1).view(torch.uint8)
    assert before != 0
    for place in range(len(flat)):
        for bit in range(8):
            flat[place] ^= 1 << bit
            assert int(checksum([*beside, tensor], CPU)) != before, (place, bit)
            flat[place] ^= 1 << bit
    assert int(checksum([*beside, tensor], CPU)) == before


@pytest.mark.usefixtures("chunked")
def test_an_order_has_its_checksum() -> None:
    values = torch.arange(1.0, 41.0)
    seen = {int(checksum([values], CPU))}
    for first in range(40):
        for second in range(first):
            swapped = values.clone()
            swapped[[first, second]] = values[[second, first]]
            seen.add(int(checksum([swapped], CPU)))
    assert len(seen) == 1 + 40 * 39 // 2
    assert int(checksum([values[:20], values[20:]], CPU)) != int(checksum([values[20:], values[:20]], CPU))


@pytest.mark.usefixtures("chunked")
def test_strides_do_not_count() -> None:
    image = torch.randn(4, 3, 5, 5)
    assert int(checksum([image], CPU)) == int(checksum([image.to(memory_format=torch.channels_last)], CPU))
    shifted = torch.zeros(image.numel() + 1)[1:].view(image.shape).copy_(image)  # at no multiple of 8 bytes
    assert int(checksum([image], CPU)) == int(checksum([shifted], CPU))


def freed() -> Tensor:
    tensor = torch.ones(5)
    tensor.untyped_storage().resize_(0)
    return tensor


# By what PyTorch calls them, tensors whose values are not what lies in their memory.
WITHOUT_BITS: dict[str, Callable[[], Tensor]] = {
    "meta": lambda: torch.empty(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse by rows": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "MKL-DNN": lambda: torch.ones(3).to_mkldnn(),
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(3)),
    "uninitialized": nn.UninitializedBuffer,
    "freed": freed,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", WITHOUT_BITS)
def test_what_has_no_bits_is_left_out(kind: str) -> None:
    plain = torch.ones(3)
    assert list(comparable({"plain": plain, kind: WITHOUT_BITS[kind](), "none": plain[:0]})) == ["plain", "none"]


def test_views_that_conjugate_or_negate_have_the_bits_of_their_values() -> None:
    values = torch.randn(4, 4, dtype=torch.complex64)
    with torch.inference_mode():
        made_there = torch.randn(4)
    for view in (values.conj(), values.conj().imag, values.mT.conj(), torch.randn(1, 4).expand(3, 4), made_there):
        assert list(comparable({"view": view})) == ["view"]
        assert int(checksum([view], CPU)) == int(checksum([torch.empty_like(view).copy_(view)], CPU))
        assert digest_of({"view": view}) == digest_of({"view": torch.empty_like(view).copy_(view)})
    assert int(checksum([values.conj()], CPU)) != int(checksum([values], CPU))


def test_every_dtype_has_bits() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dtypes = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
        for dtype in {each for each in dtypes if not str(each).startswith("torch.q")}:
            for tensor in (torch.empty(8, dtype=dtype), torch.empty(2, 5, dtype=dtype)[:1, 2]):
                assert len(as_bytes(comparable({"held": tensor})["held"])) == tensor.nbytes, dtype
                checksum([tensor], CPU)
