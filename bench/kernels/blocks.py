"""Block quantization: what a rank does with its gradient, and what an owner does with the rows of its peers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import ceil

import torch

from bench.kernels.alternatives import bitsandbytes_int8, compiled_int8_blocks
from bench.kernels.asked import Asked, of_copy
from bench.kernels.case import SCALE, Case, rows
from bench.kernels.family import Family, Setting
from commopt.compress import Quantize
from commopt.kernels import quantize
from commopt.kernels import quantize_reference as reference
from commopt.kernels.codec import Codec, Dice

_INT8 = Quantize(8).codec
_DICE = Dice(seed=1)


def of_codec(codec: Codec) -> Family:
    """Return the cases of one codec."""
    stochastic = ", stochastic" if codec.stochastic else ""
    title = f"{codec.name}, {codec.bits} bit{'s' if codec.bits > 1 else ''}{stochastic}"
    return Family(title, ("encode", "decode", "accumulate", "recode"), partial(_cases, codec, title))


def _cases(codec: Codec, variant: str, setting: Setting) -> Iterator[Case]:
    yield from _of_a_rank(codec, variant, setting)
    yield from _of_an_owner(codec, variant, setting)


def _of_a_rank(codec: Codec, variant: str, setting: Setting) -> Iterator[Case]:
    """Yield cases of a gradient that is cut into a chunk for each peer."""
    values, carry = setting.values, setting.carry
    chunk_numel = ceil(setting.numel / (setting.peers * codec.block)) * codec.block
    payload = rows(setting.peers, codec.payload_nbytes(chunk_numel), setting.device)
    quantize.encode(codec, values, payload, chunk_numel, SCALE, None, _DICE)
    sent, decoded = torch.empty_like(payload), torch.empty_like(values)
    on_gpu = codec == _INT8 and setting.device.type == "cuda"
    yield Case(
        "encode",
        variant,
        quantize.encode,
        reference.encode,
        (codec, values, sent, chunk_numel, SCALE, carry, _DICE),
        (values, carry.old),
        (sent, carry.new),
        others=(compiled_int8_blocks(values, carry.old, SCALE, codec.block),) if on_gpu else (),
        asked=_asked(codec, "encode"),
    )
    if codec == _INT8:
        yield Case(
            "encode",
            f"{variant}, no residual",
            quantize.encode,
            reference.encode,
            (codec, values, sent, chunk_numel, SCALE, None, _DICE),
            (values,),
            (sent,),
            others=(bitsandbytes_int8(values, codec.block),),
        )
    yield Case(
        "decode",
        variant,
        quantize.decode,
        reference.decode,
        (codec, payload, decoded, chunk_numel),
        (payload,),
        (decoded,),
        asked=_asked(codec, "decode"),
    )


def _of_an_owner(codec: Codec, variant: str, setting: Setting) -> Iterator[Case]:
    """Yield cases of rows that hold as many elements as the gradient: with fewer, caches would be measured."""
    carry, chunk_numel = setting.carry, ceil(setting.numel / codec.block) * codec.block
    payloads = rows(setting.peers, codec.payload_nbytes(chunk_numel), setting.device)
    for peer in range(setting.peers):
        own = setting.values.roll(peer)
        quantize.encode(codec, own, payloads[peer : peer + 1], chunk_numel, SCALE, None, _DICE)
    total, sent = torch.empty(chunk_numel, device=setting.device), torch.empty_like(payloads[:1])
    variant = f"{variant}, {setting.peers} peers"
    yield Case(
        "accumulate",
        variant,
        quantize.accumulate,
        reference.accumulate,
        (codec, payloads, total),
        (payloads,),
        (total,),
        asked=_asked(codec, "accumulate"),
    )
    yield Case(
        "recode",
        variant,
        quantize.recode,
        reference.recode,
        (codec, payloads, sent, chunk_numel, setting.numel, carry, _DICE),
        (payloads, carry.old),
        (sent, carry.new),
        asked=_asked(codec, "recode"),
    )


def _asked(codec: Codec, name: str) -> tuple[Asked, ...]:
    if codec.bits == 1:
        return (of_copy(0.8),)
    if codec == _INT8 and name in ("encode", "recode"):
        return (of_copy(0.85 if name == "encode" else 0.8),)
    return ()
