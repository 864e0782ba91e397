# SPDX-License-Identifier: Apache-2.0
"""A checksum tells every flipped bit and every other order, of any dtype and length; strides do not count."""

from __future__ import annotations

import pytest
import torch

from commopt.attached import checksum as checksums
from commopt.attached.checksum import checksum

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
