# SPDX-License-Identifier: Apache-2.0
"""Buckets replayed as CUDA graphs, on a made-up GPU: the bits of a training without, and nothing launched beside."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import commopt
from commopt import (
    DGC,
    Aggregator,
    Compressed,
    ConfigurationError,
    Feedback,
    Flat,
    Hierarchical,
    OneBit,
    PowerSGD,
    Quantize,
)
from commopt.attached import replay
from commopt.attached.options import AttachOptions
from commopt.feedback import SAMPLE_EVERY_STEPS, ResidualStore, restore, save
from commopt.feedback.checkpoint import MAX_MAGNITUDE
from tests.fake_cuda import DEVICE, Gpu
from tests.test_cuda_streams import BUCKETS, NUMEL, Training, device

STEPS = max(3 * SAMPLE_EVERY_STEPS + 3, 20) if SAMPLE_EVERY_STEPS < 10 else 20


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMOPT_KERNELS", "torch")


def trained(
    aggregator: Aggregator,
    *,
    replays: bool,
    scaler: bool = False,
    between: Callable[[Training, int], None] = lambda training, number: None,
    steps: int = STEPS,
) -> tuple[list[Tensor], dict[str, Any], Gpu]:
    """Return all averages and residuals of a training, its figures, and the device."""
    with pytest.MonkeyPatch.context() as patched, device() as gpu:
        patched.setenv(replay.VARIABLE, "1" if replays else "0")
        of_loss: Any = SimpleNamespace(is_enabled=lambda: True, _scale=torch.full((), 4.0, device=DEVICE))
        training = Training(aggregator, of_loss if scaler else None)
        averages: list[Tensor] = []
        for number in range(steps):
            between(training, number)
            averages += [each.cpu() for each in training.step(number)]
        registration = training.registration
        kept = [each.values.cpu() for each in registration.store.residuals()]
        figures = {"replayed": registration.replayed, "steps": registration.steps, **registration.store.stats()}
        assert not gpu.faults
        return averages + kept, figures, gpu


AGGREGATORS: list[Aggregator] = [
    Flat(),
    Hierarchical(),
    commopt.build_preset("hierarchical_bf16"),
    Hierarchical(Compressed(Quantize(8))),
    Compressed(Quantize(4), Feedback(decay=0.9)),
    Compressed(Quantize(2)),
    Compressed(OneBit()),
    Hierarchical(Compressed(OneBit(start_step=4))),
    PowerSGD(start_step=0),
    Hierarchical(PowerSGD(matrix_rank=2, start_step=1)),
]


def assert_alike(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    for number, (this, that) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(this.view(torch.uint8), that.view(torch.uint8)), f"tensor {number} differs"


FEWEST = (STEPS - 10) * len(BUCKETS)  # replayed, after a start and two times the plain way


@pytest.mark.parametrize("scaler", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=str)
def test_a_replayed_training_has_the_bits_of_a_plain_one(aggregator: Aggregator, scaler: bool) -> None:
    plain, figures, _ = trained(aggregator, replays=False, scaler=scaler)
    again, replayed, _ = trained(aggregator, replays=True, scaler=scaler)
    assert figures.pop("replayed") == 0
    assert replayed.pop("replayed") >= FEWEST
    assert_alike(plain, again)
    assert replayed == figures


def broken(training: Training, number: int) -> None:
    """Let some gradients be no numbers: of a bucket in the middle, long after it was captured, and of another."""
    filled = training.fill

    def fill(place: int, values: Tensor) -> Tensor:
        values = filled(place, values)
        if (number, place) in ((9, 1), (10, 2)):
            values[7] = float("nan")
        return values

    training.fill = fill  # type: ignore[method-assign]


def loaded(training: Training, number: int) -> None:
    """Go on from a checkpoint of the step before: residuals and factors are other tensors then."""
    if number == 10:
        registration = training.registration
        saved, old = save(registration.store), registration.store
        registration.store = ResidualStore(per_step=old.transaction.per_step)
        restore(registration.store, saved, registration.layouts.numels, lambda name: MAX_MAGNITUDE)
        registration.store.transaction.steps = old.transaction.steps


def moved(training: Training, number: int) -> None:
    """Let a residual and a bucket be other memory."""
    if number == 9:
        for each in training.registration.store.residuals()[:1]:
            each.values = each.values.clone()
        training.buckets[1] = training.buckets[1].clone()


CHANGES = [broken, loaded, moved]


@pytest.mark.parametrize("scaler", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize("between", CHANGES)
@pytest.mark.parametrize("aggregator", [Compressed(Quantize(4)), PowerSGD(start_step=0)], ids=str)
def test_what_changes_between_steps(
    aggregator: Aggregator, between: Callable[[Training, int], None], scaler: bool
) -> None:
    plain, figures, _ = trained(aggregator, replays=False, scaler=scaler, between=between, steps=16)
    again, replayed, _ = trained(aggregator, replays=True, scaler=scaler, between=between, steps=16)
    figures.pop("replayed")
    assert replayed.pop("replayed") >= 12
    assert_alike(plain, again)
    assert replayed == figures


def test_a_replayed_bucket_launches_nothing_beside_its_graphs_and_collectives() -> None:
    with device() as gpu:
        training = Training(Compressed(Quantize(4), feedback=Feedback()))
        team: Any = training.registration.client.team
        for number in range(6):
            training.step(number)
        for number in (6, 7):
            before, used = gpu.replays, team.used
            training.step(number)
            assert gpu.replays - before == 3 * len(BUCKETS), "before, between and behind two collectives"
            assert team.used - used == 2 * len(BUCKETS)


def test_buckets_that_are_gone_are_not_kept() -> None:
    with device():
        training = Training(Flat())
        for number in range(6):
            training.step(number)
        gone = [StorageWeakRef(each.untyped_storage()) for each in training.buckets]
        training.buckets = [torch.zeros(NUMEL, device=DEVICE) for _ in BUCKETS]
        training.step(6)
        assert all(each.expired() for each in gone)


def test_graphs_that_would_outlive_their_memory_are_not_used() -> None:
    with device():
        training = Training(Compressed(Quantize(4)))
        registration = training.registration
        number = 0
        while not registration.replayed:
            training.step(number)
            number += 1
        before = registration.replayed
        registration.store.scratch.clear()  # what is taken now comes in several blocks, which end with the bucket
        training.step(number)
        assert registration.replayed < before + len(BUCKETS)
        for later in range(number + 1, number + 4):
            training.step(later)
        assert registration.replayed >= before + 2 * len(BUCKETS)


def test_what_no_graph_can_hold_is_launched_kernel_by_kernel(caplog: pytest.LogCaptureFixture) -> None:
    aggregator = Compressed(DGC(0.05))  # in plain torch, where the host asks how much was selected
    plain, figures, _ = trained(aggregator, replays=False, steps=8)
    again, replayed, _ = trained(aggregator, replays=True, steps=8)
    assert_alike(plain, again)
    assert replayed == figures
    said = [each for each in caplog.messages if "cannot be replayed as a CUDA graph" in each]
    assert len(said) == 1, "not for every bucket"


def test_a_capture_that_fails_leaves_later_ones_possible() -> None:
    with device():
        for aggregator, replayed in ((Compressed(DGC(0.05)), 0), (Compressed(Quantize(4)), 4 * len(BUCKETS))):
            training = Training(aggregator)
            for number in range(10):
                training.step(number)
            assert training.registration.replayed >= replayed


@pytest.mark.parametrize(
    "aggregator", [Compressed(Quantize(8, rounding="stochastic")), Compressed(OneBit(start_step=90))]
)
def test_steps_that_differ_are_not_captured(aggregator: Aggregator, caplog: pytest.LogCaptureFixture) -> None:
    _, figures, gpu = trained(aggregator, replays=True, steps=8)
    assert figures["replayed"] == gpu.replays == 0
    assert not caplog.messages


def test_the_switch_is_checked_where_a_model_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(replay.VARIABLE, "no")
    with pytest.raises(ConfigurationError, match=r"COMMOPT_REPLAY=no must be 1 .*, or 0"):
        AttachOptions().checked("ddp")
