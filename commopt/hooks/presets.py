"""The names users type."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, Literal

import torch

from commopt.aggregate import Aggregator, Auto, Compressed, Flat, Hierarchical, PowerSGD
from commopt.command_line import option_value
from commopt.compress import DGC, Cast, OneBit, Quantize
from commopt.errors import ConfigurationError
from commopt.feedback import Feedback
from commopt.hooks.preset import Preset

# 4 KiB with bfloat16 values: on 10 Gb/s 3 us, less than a message takes that has nothing in it.
_FREE_ELEMENTS = 1024


PRESETS: dict[str, Preset] = {}


def preset(recipe: Callable[..., Aggregator]) -> Preset:
    """Make a preset of `recipe` and enter it under its name."""
    return PRESETS.setdefault(recipe.__name__, Preset(recipe))


def build_preset(text: str, **options: Any) -> Aggregator:
    """Return the aggregator that "name" or "name:option=value:option=value" describes, as a command line can.

    Raises ConfigurationError that lists the known presets or the preset's options.
    """
    name, *settings = text.split(":")
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigurationError(f"preset {name!r} is unknown; {meant}known presets: {', '.join(sorted(PRESETS))}")
    for setting in settings:
        option, equals, value = setting.partition("=")
        if not equals:
            raise ConfigurationError(f"{setting!r} in {text!r} is no option=value, for example {name}:block=256")
        options[option] = option_value(value)
    return PRESETS[name].build(**options)


@preset
def flat() -> Aggregator:
    """One all_reduce over all ranks, as stock DDP does, but in node-contiguous order on commopt's lane."""
    return Flat()


@preset
def hierarchical() -> Aggregator:
    """Exact average; only 2 (N-1)/N of the gradient crosses between N nodes."""
    return Hierarchical()


@preset
def hierarchical_bf16() -> Aggregator:
    """As hierarchical, with bfloat16 between the nodes and float32 sums: half the bytes on the slow network."""
    return Hierarchical(inter=Compressed(Cast(torch.bfloat16), feedback=None))


@preset
def quantized(
    bits: Literal[8, 4, 2] = 8,
    block: int = 512,
    levels: Literal["uniform", "nonuniform"] | None = None,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    start_step: int = 0,
    dense: tuple[str, ...] = (),
    feedback: Feedback | None = Feedback(),
) -> Aggregator:
    """8, 4 or 2 bits per element between all ranks, with error feedback."""
    return Compressed(Quantize(bits, block, levels, rounding, start_step), feedback, dense)


@preset
def onebit(
    block: int = 512,
    scale: Literal["mean", "rms"] = "mean",
    start_step: int = 0,
    dense: tuple[str, ...] = (),
    feedback: Feedback | None = Feedback(),
) -> Aggregator:
    """Signs and a scale per block between all ranks, with error feedback; advised after a dense start."""
    return Compressed(OneBit(block, scale, start_step), feedback, dense)


@preset
def hierarchical_quantized(
    bits: Literal[8, 4, 2] = 8,
    block: int = 512,
    levels: Literal["uniform", "nonuniform"] | None = None,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    start_step: int = 0,
    dense: tuple[str, ...] = (),
    feedback: Feedback | None = Feedback(),
    intra: Flat | Compressed = Flat(),
) -> Aggregator:
    """As hierarchical, with 8, 4 or 2 bits per element between the nodes and error feedback."""
    return Hierarchical(Compressed(Quantize(bits, block, levels, rounding, start_step), feedback, dense), intra)


@preset
def hierarchical_onebit(
    block: int = 512,
    scale: Literal["mean", "rms"] = "mean",
    start_step: int = 0,
    dense: tuple[str, ...] = (),
    feedback: Feedback | None = Feedback(),
    intra: Flat | Compressed = Flat(),
) -> Aggregator:
    """As hierarchical, with one bit per element between the nodes and error feedback."""
    return Hierarchical(Compressed(OneBit(block, scale, start_step), feedback, dense), intra)


@preset
def powersgd(
    matrix_rank: int = 4,
    min_compression_rate: float = 2,
    start_step: int = 2,
    warm_start: bool = True,
    alternating: bool = False,
    feedback: Feedback | None = Feedback(),
    dense: tuple[str, ...] = (),
) -> Aggregator:
    """Low-rank factors of the gradients' matrices between all ranks, with error feedback."""
    return PowerSGD(matrix_rank, min_compression_rate, start_step, warm_start, alternating, feedback, dense)


@preset
def hierarchical_powersgd(
    matrix_rank: int = 4,
    min_compression_rate: float = 2,
    start_step: int = 2,
    warm_start: bool = True,
    alternating: bool = False,
    feedback: Feedback | None = Feedback(),
    dense: tuple[str, ...] = (),
    intra: Flat | Compressed = Flat(),
) -> Aggregator:
    """As hierarchical, with low-rank factors of the gradients' matrices between the nodes and error feedback."""
    inter = PowerSGD(matrix_rank, min_compression_rate, start_step, warm_start, alternating, feedback, dense)
    return Hierarchical(inter, intra)


@preset
def dgc(
    density: float = 0.001,
    momentum: float = 0.0,
    nesterov: bool = False,
    momentum_masking: bool = True,
    clip_norm: float | None = None,
    warmup: tuple[tuple[int, float], ...] = (),
    value_dtype: torch.dtype = torch.bfloat16,
    min_elements: int = _FREE_ELEMENTS,
    dense: tuple[str, ...] = (),
    feedback: Feedback | None = Feedback(),
) -> Aggregator:
    """The largest elements between all ranks, with error feedback; `momentum` replaces the optimizer's."""
    compressor = DGC(density, momentum, nesterov, momentum_masking, clip_norm, warmup, value_dtype, min_elements)
    return Compressed(compressor, feedback, dense)


@preset
def hierarchical_dgc(
    density: float = 0.001,
    momentum: float = 0.0,
    nesterov: bool = False,
    momentum_masking: bool = True,
    clip_norm: float | None = None,
    warmup: tuple[tuple[int, float], ...] = (),
    value_dtype: torch.dtype = torch.bfloat16,
    min_elements: int = _FREE_ELEMENTS,
    dense: tuple[str, ...] = (),
    feedback: Feedback | None = Feedback(),
    intra: Flat | Compressed = Flat(),
) -> Aggregator:
    """As hierarchical, with the largest elements between the nodes and error feedback."""
    compressor = DGC(density, momentum, nesterov, momentum_masking, clip_norm, warmup, value_dtype, min_elements)
    return Hierarchical(Compressed(compressor, feedback, dense), intra)


@preset
def auto(
    allow: tuple[str, ...] | str = ("lossless",),
    max_trials: int = 4,
    max_error: float | None = None,
    dense: tuple[str, ...] = (),
) -> Aggregator:
    """Whatever pays here, of what is allowed: predicted, tried on live steps, and watched afterwards."""
    return Auto(allow, max_trials, max_error, dense)
