# SPDX-License-Identifier: Apache-2.0
"""Bfloat16 gradients in fewer bytes, exactly: `python -m bench.evidence.packing --json FILE`, a minute.

Trains the demo's GPT (4.9 million parameters) and a ResNet-18 of width 16 in this process, and packs gradients of
several steps, rounded to bfloat16: as commopt does, and by codecs of bytes, which are given exponents and the rest
apart: zlib, and zstd where the package zstandard is there. Times are one thread's; a rate counts bfloat16.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.command_line import measure_or_report
from bench.document import table
from bench.evidence.compression_error import BATCH, flat_gradients
from bench.evidence.resnet18 import draw_images, resnet18, textures
from commopt.document import parse, read_text
from commopt.kernels.packing import BLOCK, pack, packed_nbytes, spare_nbytes, unpack

STEPS = (0, 5, 20, 50)
_TIMES = 5
_WIDTH, _IMAGES = 16, 32

Coder = Callable[[Tensor], tuple[int, float, float]]
"""Turns bfloat16 values into the bytes that they take, and the seconds of packing and of unpacking."""


@dataclass(frozen=True)
class Packed:
    """What one codec makes of one gradient. share: of bfloat16's bytes; rates in MB/s of these.

    elsewhere: of all exponents, those that are not within 6 below the largest of their block.
    """

    codec: str
    gradient: str
    share: float
    pack_mb_per_s: float
    unpack_mb_per_s: float
    elsewhere: float


def resnet_gradients() -> Iterator[Tensor]:
    """Yield the flat gradient of one step after the other."""
    torch.manual_seed(0)
    model, draws, known = resnet18(_WIDTH), torch.Generator().manual_seed(0), textures()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    while True:
        images, labels = draw_images(known, _IMAGES, draws)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        yield torch.cat([p.grad.flatten() for p in reversed(list(model.parameters())) if p.grad is not None])
        optimizer.step()


def _own(values: Tensor) -> tuple[int, float, float]:
    packed, beyond = (torch.empty(f(values.numel()), dtype=torch.uint8) for f in (packed_nbytes, spare_nbytes))
    found, more = torch.empty_like(values), pack(values, packed, beyond)
    times = _seconds(lambda: pack(values, packed, beyond)), _seconds(lambda: unpack(packed, beyond[:more], found))
    assert torch.equal(found.view(torch.int16), values.view(torch.int16))
    return len(packed) + more, *times


def _by_bytes(compress: Callable[[bytes], bytes], decompress: Callable[[bytes], bytes]) -> Coder:
    """Code exponents; mantissas and signs, which are noise, travel as they are."""

    def code(values: Tensor) -> tuple[int, float, float]:
        bits = values.view(torch.int16)
        exponents = bits.bitwise_right_shift(7).to(torch.uint8).numpy().tobytes()
        packed = compress(exponents)
        assert decompress(packed) == exponents
        times = _seconds(lambda: compress(exponents)), _seconds(lambda: decompress(packed))
        return values.numel() + len(packed), *times

    return code


def _elsewhere(values: Tensor) -> float:
    exponents = values[: values.numel() // BLOCK * BLOCK].view(torch.int16).bitwise_right_shift(7) & 0xFF
    blocks = exponents.view(-1, BLOCK)
    return float((blocks < blocks.amax(1, keepdim=True) - 6).double().mean())


def _huffman(data: bytes) -> bytes:
    coder = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    return coder.compress(data) + coder.flush()


def codecs() -> dict[str, Coder]:
    """Return all that there are."""
    found = {"commopt": _own, "exponents by zlib, Huffman only": _by_bytes(_huffman, zlib.decompress)}
    if find_spec("zstandard") is not None:
        zstd: Any = import_module("zstandard")
        coder, decoder = zstd.ZstdCompressor(level=1), zstd.ZstdDecompressor()
        found["exponents by zstd, level 1"] = _by_bytes(coder.compress, decoder.decompress)
    return found


def _seconds(call: Callable[[], object]) -> float:
    """Return what a call takes of the processor."""
    times = []
    for _ in range(_TIMES):
        begin = thread_time()
        call()
        times.append(thread_time() - begin)
    return median(times)


def measure() -> list[Packed]:
    """Train and pack."""
    torch.set_num_threads(1)
    found = []
    for model, gradients in (("GPT", flat_gradients(BATCH)), ("ResNet-18", resnet_gradients())):
        for step, gradient in enumerate(islice(gradients, max(STEPS) + 1)):
            for name, code in codecs().items() if step in STEPS else ():
                values = gradient.to(torch.bfloat16)
                nbytes, packing_s, unpacking_s = code(values)
                rates = (values.nbytes / 1e6 / packing_s, values.nbytes / 1e6 / unpacking_s)
                found.append(
                    Packed(name, f"{model}, step {step}", nbytes / values.nbytes, *rates, elsewhere=_elsewhere(values))
                )
    return found


def markdown(path: Path) -> str:
    """Return a row for each codec: the largest share of all gradients, median rates."""
    found = [Packed(**row) for row in parse(read_text(path), str(path))["rows"]]
    rows = []
    for codec in dict.fromkeys(each.codec for each in found):
        mine = [each for each in found if each.codec == codec]
        shares = [each.share for each in mine]
        rates = (median(each.pack_mb_per_s for each in mine), median(each.unpack_mb_per_s for each in mine))
        rows.append([codec, f"{min(shares):.3f} to {max(shares):.3f}", *(f"{rate:.0f}" for rate in rates)])
    made = table(["codec", "of bfloat16's bytes", "packs MB/s", "unpacks MB/s"], rows)
    most = max(each.elsewhere for each in found)
    caption = f"commopt's list has room for {12 / BLOCK:.1%} of the exponents; gradients need {most:.1%} at most."
    return f"{made}\n\n{caption}"


if __name__ == "__main__":
    measure_or_report("bench.evidence.packing", __doc__ or "", markdown, measure)
