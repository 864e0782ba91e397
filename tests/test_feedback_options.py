# SPDX-License-Identifier: Apache-2.0
"""What the presets' options promise: warm-up, dense parameters, memory, and errors that say what to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import (
    DGC,
    Compressed,
    ConfigurationError,
    Feedback,
    Hierarchical,
    OneBit,
    PowerSGD,
    Quantize,
)
from tests.catalogue import LAYOUTS
from tests.feedback_training import (
    MATRICES,
    NUMELS,
    SMALL_BUCKETS,
    Books,
    Controlled,
    Training,
    assert_conserved,
    gradients,
)
from tests.hook_training import assert_identical
from tests.ranks import run

EPS = torch.finfo(torch.float32).eps


def test_presets_are_these_aggregators() -> None:
    quantize = Quantize(4, 128, "uniform", "stochastic", 3)
    options = {"bits": 4, "block": 128, "levels": "uniform", "rounding": "stochastic", "start_step": 3}
    bf16 = Feedback(0.9, torch.bfloat16)
    assert commopt.quantized.build() == Compressed(Quantize(8), Feedback())
    assert commopt.quantized.build(**options, dense=("*.bias",), feedback=bf16) == Compressed(
        quantize, bf16, ("*.bias",)
    )
    assert commopt.hierarchical_quantized.build(**options) == Hierarchical(Compressed(quantize))
    assert commopt.onebit.build(scale="mean", feedback=None) == Compressed(OneBit(scale="mean"), None)
    assert commopt.hierarchical_onebit.build(start_step=2, block=64) == Hierarchical(
        Compressed(OneBit(64, start_step=2))
    )
    sparse: dict[str, Any] = {"density": 0.01, "warmup": ((10, 0.25), (5, 0.1))}
    sparse |= {"value_dtype": torch.float32, "min_elements": 7}
    assert commopt.dgc.build() == Compressed(DGC(0.001, min_elements=1024), Feedback())
    assert commopt.dgc.build(**sparse, dense=("*.bias",), feedback=bf16) == Compressed(DGC(**sparse), bf16, ("*.bias",))
    assert commopt.hierarchical_dgc.build(**sparse) == Hierarchical(Compressed(DGC(**sparse)))
    low_rank: dict[str, Any] = {"matrix_rank": 2, "min_compression_rate": 3, "start_step": 5}
    low_rank |= {"feedback": bf16, "dense": ("*.bias",)}
    assert commopt.powersgd.build() == PowerSGD(4, 2, 2, Feedback(), ())
    assert commopt.powersgd.build(**low_rank) == PowerSGD(**low_rank)
    assert commopt.hierarchical_powersgd.build(**low_rank) == Hierarchical(PowerSGD(**low_rank))


def errors_per_step(
    rank: int, world_size: int, preset: str, options: dict[str, Any], steps: int
) -> tuple[list[dict[str, float]], list[float], Books, str]:
    """Return each step's errors, relative to the mean magnitude, by parameter, and this rank's residual norms."""
    training = Training(rank, world_size, commopt.PRESETS[preset].build(**options))
    errors, norms = [], []
    for step in range(steps):
        training.step()
        peers = [gradients(peer, step) for peer in range(world_size)]
        means = {name: torch.stack([peer[name].double() for peer in peers]).mean(0) for name in NUMELS}
        magnitudes = {name: torch.stack([peer[name].double().abs() for peer in peers]).mean(0) for name in NUMELS}
        results = training.results()
        errors.append({name: float(((results[name] - means[name]).abs() / magnitudes[name]).max()) for name in NUMELS})
        norms.append(training.comm.stats()["residual_norm"])
    return errors, norms, training.books(), training.digest()


BLOCKS = {"block": 64}
WARMING: list[tuple[str, str, dict[str, Any]]] = [
    ("quantized", "3", {"bits": 8, **BLOCKS}),
    ("onebit", "2", BLOCKS),
    ("hierarchical_quantized", "2x2", {"bits": 4, **BLOCKS}),
    ("powersgd", "3", {}),
    ("hierarchical_powersgd", "2+1", {}),
]


@pytest.mark.parametrize(("preset", "layout", "options"), WARMING, ids=str)
def test_steps_before_start_step_are_exact(preset: str, layout: str, options: dict[str, Any]) -> None:
    world_size, nodes = LAYOUTS[layout]
    results = run(errors_per_step, world_size, preset, {"start_step": 3, **options}, 6, nodes=nodes)
    assert_identical([digest for *_, digest in results])
    assert_conserved([books for _, _, books, _ in results])
    for errors, norms, _, _ in results:
        for step in range(3):
            assert max(errors[step].values()) <= (world_size + 1) * EPS, f"step {step} is not dense"
            assert norms[step] == 0
        assert all(errors[step]["first.weight"] > 1e-3 for step in range(3, 6)), "never compressed"
    assert all(sum(norms[step] for _, norms, _, _ in results) > 0 for step in range(3, 6))


DENSE: list[tuple[str, str, dict[str, Any]]] = [
    ("quantized", "3", {"bits": 4, **BLOCKS}),
    ("onebit", "2", BLOCKS),
    ("hierarchical_quantized", "2x2", {"bits": 2, **BLOCKS}),
    ("dgc", "3", {}),
    ("hierarchical_dgc", "2x2", {"density": 0.1}),
    ("powersgd", "2", {"start_step": 0}),
    ("hierarchical_powersgd", "2x2", {"start_step": 0}),
]


@pytest.mark.parametrize(("preset", "layout", "options"), DENSE, ids=str)
def test_dense_and_tiny_parameters_are_exact(preset: str, layout: str, options: dict[str, Any]) -> None:
    world_size, nodes = LAYOUTS[layout]
    options = {"dense": ("*.bias", "third.*"), **options}
    vectors_too = "bits" in options
    results = run(errors_per_step, world_size, preset, options, 4, nodes=nodes)
    assert_identical([digest for *_, digest in results])
    assert_conserved([books for _, _, books, _ in results])
    for errors, _, books, _ in results:
        for name in ("first.bias", "second.bias", "third.bias", "third.weight", "gain"):
            assert max(error[name] for error in errors) <= (world_size + 1) * EPS, name
            assert not books.residual[name].any(), name
        for name in ("first.weight", "second.weight") if vectors_too else ("first.weight",):
            assert min(error[name] for error in errors) > 1e-3, name


@pytest.mark.parametrize(
    ("preset", "options", "names"),
    [
        ("quantized", {}, ("second.bias", "gain")),  # a block of 512 costs more than these
        ("onebit", BLOCKS, ("first.bias", "second.weight", "third.bias")),
        ("dgc", {"min_elements": 1}, ("first.bias", "second.weight", "third.bias")),
    ],
)
def test_tiny_parameters_and_vectors_are_exact_unasked(
    preset: str, options: dict[str, Any], names: tuple[str, ...]
) -> None:
    for errors, _, _, _ in run(errors_per_step, 2, preset, options, 4):
        for name in names:
            assert max(error[name] for error in errors) <= 4 * EPS, name
        assert min(error["first.weight"] for error in errors) > 1e-3


def count_residual_bytes(rank: int, world_size: int, preset: str, options: dict[str, Any], scaled: bool) -> int:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    training = Training(rank, world_size, commopt.PRESETS[preset].build(**options), scaler=scaler)
    for _ in range(3):
        training.step()
    nbytes: int = training.comm.stats()["residual_bytes"]
    return nbytes


BF16 = {"feedback": Feedback(dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("preset", "options", "layout", "scaled", "nbytes"),
    [
        ("quantized", {"bits": 8}, "2", True, 8),
        ("onebit", {}, "2", False, 4),
        ("quantized", {"bits": 4, **BF16}, "2", False, 2),
        ("hierarchical_quantized", {"bits": 4}, "2x2", False, 2),
        ("hierarchical_onebit", {}, "2x2", True, 4),
        ("hierarchical_quantized", BF16, "2x2", False, 1),
    ],
    ids=str,
)
def test_residual_bytes_per_parameter(
    preset: str, options: dict[str, Any], layout: str, scaled: bool, nbytes: float
) -> None:
    world_size, nodes = LAYOUTS[layout]
    compressed = MATRICES if "onebit" in preset else tuple(NUMELS)
    numel = sum(NUMELS[name] for name in compressed)
    for got in run(count_residual_bytes, world_size, preset, {"block": 64, **options}, scaled, nodes=nodes):
        assert got == pytest.approx(nbytes * numel, rel=0.15 if nodes else 0.01)


def collect_errors(rank: int, world_size: int, attempts: Sequence[tuple[str, dict[str, Any]]]) -> list[str | None]:
    messages: list[str | None] = []
    for preset, options in attempts:
        try:
            commopt.attach(TorchDDP(Controlled(), **SMALL_BUCKETS), commopt.PRESETS[preset], **options)
            messages.append(None)
        except ConfigurationError as error:
            messages.append(str(error))
    return messages


# One case of every rule: what is wrong, and what the message must name: the value and something that works.
BAD: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("quantized", {"bits": 3}, ("bits", "3", "8", "4", "2")),
    ("quantized", {"bits": "8"}, ("bits", "'8'", "4")),
    ("quantized", {"block": 100}, ("block", "100", "64")),
    ("onebit", {"block": 8192}, ("block", "8192", "4096")),
    ("onebit", {"block": 512.0}, ("block", "512.0", "64")),
    ("quantized", {"levels": "log"}, ("levels", "log", "uniform")),
    ("quantized", {"rounding": "up"}, ("rounding", "up", "nearest", "stochastic")),
    ("quantized", {"levels": "nonuniform"}, ("nonuniform", "uniform")),
    (
        "quantized",
        {"bits": 4, "levels": "nonuniform", "rounding": "stochastic"},
        ("nonuniform", "stochastic", "uniform"),
    ),
    ("onebit", {"scale": "median"}, ("scale", "median", "mean", "rms")),
    ("onebit", {"bits": 1}, ("bits", "block", "scale")),
    ("quantized", {"start_step": -1}, ("start_step", "-1", "0")),
    ("quantized", {"dense": "*.bias"}, ("dense", "*.bias", "(")),
    ("quantized", {"feedback": True}, ("feedback", "True", "Feedback")),
    ("hierarchical_quantized", {"intra": Compressed(Quantize(8))}, ("intra", "bits", "dense")),
    ("quantized", {"scaler": 1024.0}, ("scaler", "float", "GradScaler")),
    ("dgc", {"density": 1.5}, ("density", "1.5", "1")),
    ("dgc", {"warmup": ((0, 0.25),)}, ("warmup", "0")),
    ("dgc", {"warmup": ((100, 2.0),)}, ("warmup", "2.0")),
    ("dgc", {"warmup": ((2.5, 0.25),)}, ("warmup", "2.5")),
    ("dgc", {"value_dtype": torch.int8}, ("value_dtype", "int8", "bfloat16")),
    ("dgc", {"min_elements": 0}, ("min_elements", "0", "1")),
    ("dgc", {"warmup": 100}, ("warmup", "100")),
    ("dgc", {"warmup": ((1, 0.1, 0.2),)}, ("warmup", "0.2")),
    ("powersgd", {"matrix_rank": 0}, ("matrix_rank", "0", "1")),
    ("powersgd", {"matrix_rank": "4"}, ("matrix_rank", "'4'")),
    ("powersgd", {"min_compression_rate": float("nan")}, ("min_compression_rate", "nan")),
    ("powersgd", {"start_step": -1}, ("start_step", "-1", "0")),
]


def test_bad_options_name_value_and_fix() -> None:
    attempts = [(preset, options) for preset, options, _ in BAD]
    failures = []
    for messages in run(collect_errors, 2, attempts):
        for (preset, options, words), message in zip(BAD, messages, strict=True):
            if message is None or any(word not in message for word in words):
                failures.append(f"{preset}({options}): {message!r} should name {words}")
    assert not failures, "\n".join(sorted(set(failures)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"decay": decay}, rf"decay={decay}.*1") for decay in (0.0, 1.5, float("nan"))),
        *(
            ({"dtype": dtype}, rf"{dtype}.*torch\.float32.*torch\.bfloat16")
            for dtype in (torch.float16, torch.float64, torch.int32)
        ),
    ],
)
def test_feedback_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Feedback(**options)
