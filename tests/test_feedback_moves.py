# SPDX-License-Identifier: Apache-2.0
"""Whatever else changes with a checkpoint's world or recipe, what it had not sent yet is sent: nothing gets stuck."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import commopt
from commopt import DGC, Aggregator, Compressed, Feedback, Hierarchical, PowerSGD, Quantize
from tests.catalogue import LAYOUTS
from tests.feedback_training import Records, Training, Vectors, residual_of, zero_gradients, zeros
from tests.ranks import run

STEPS = 14  # of zero gradients: at 4 bits little is left of a residual after each

FOUR = Compressed(Quantize(4, 64))
INTER = Hierarchical(inter=FOUR)
TOP = Compressed(DGC(0.25))
INTER_TOP = Hierarchical(inter=TOP)
RANK = PowerSGD(16, min_compression_rate=1, start_step=0)  # removes 16 directions of a residual in each step
INTER_RANK = Hierarchical(inter=RANK)
LATE = replace(FOUR, compressor=Quantize(4, 64, start_step=100))


def save(rank: int, world_size: int, aggregator: Aggregator) -> dict[str, Any] | None:
    training = Training(rank, world_size, aggregator)
    for _ in range(4):
        training.step()
    return training.comm.gathered_state_dict()


def drain(rank: int, world_size: int, aggregator: Aggregator, saved: dict[str, Any]) -> tuple[Vectors, float]:
    """Return what was sent without any gradient, and the residual left on this rank."""
    training = Training(rank, world_size, aggregator, chosen=zero_gradients)
    training.comm.load_state_dict(saved)
    low_rank = "PowerSGD" in repr(aggregator)  # what ranks owe in opposite directions is in no sum, and goes slowly
    for _ in range(5 * STEPS if low_rank else STEPS):
        training.step()
    return training.told, training.comm.stats()["residual_norm"]


@pytest.mark.parametrize(
    ("old", "old_layout", "new", "new_layout"),
    [
        pytest.param(INTER, "2x2", INTER, "3", id="one node has no inter level"),
        pytest.param(Hierarchical(inter=FOUR, form="leader"), "2x2", INTER, "2x2", id="leader to shards"),
        pytest.param(INTER, "2x2", Hierarchical(inter=FOUR, form="leader"), "2x2", id="shards to leader"),
        pytest.param(INTER, "2x2", Hierarchical(inter=replace(FOUR, dense=("*",))), "2x2", id="all dense now"),
        pytest.param(FOUR, "3", replace(FOUR, dense=("first.*", "gain")), "3", id="some dense now"),
        pytest.param(FOUR, "3", LATE, "3", id="a later start"),
        pytest.param(INTER_TOP, "2x2", INTER_TOP, "3", id="sparse, one node has no inter level"),
        pytest.param(INTER_TOP, "2x2", INTER, "2x2", id="sparse to 4 bits"),
        pytest.param(TOP, "3", replace(TOP, dense=("*",)), "2", id="sparse, all dense now"),
        pytest.param(INTER_RANK, "2x2", INTER_RANK, "3", id="low rank, one node has no inter level"),
        pytest.param(INTER_RANK, "2x2", INTER_RANK, "1+1", id="low rank, whole matrices again"),
        pytest.param(
            INTER_RANK, "2x2", Hierarchical(inter=RANK, form="leader"), "2x2", id="low rank, shards to leader"
        ),
        pytest.param(RANK, "3", replace(RANK, dense=("first.*",)), "3", id="low rank, dense now"),
        pytest.param(RANK, "3", replace(RANK, start_step=100), "2", id="low rank, a later start"),
        pytest.param(RANK, "2", FOUR, "2", id="low rank to 4 bits"),
    ],
)
def test_residuals_are_sent_in_the_end(old: Aggregator, old_layout: str, new: Aggregator, new_layout: str) -> None:
    world_size, nodes = LAYOUTS[old_layout]
    saved = next(state for state in run(save, world_size, old, nodes=nodes) if state is not None)
    owed: dict[str, Tensor] = zeros()
    for part in saved["ranks"]:
        for name, values in residual_of(part).items():
            owed[name] += values
    largest = max(float(values.abs().max()) for values in owed.values())
    assert largest > 0.01

    world_size, nodes = LAYOUTS[new_layout]
    for told, left in run(drain, world_size, new, saved, nodes=nodes):
        assert left < 1e-4 * largest
        for name, values in owed.items():
            torch.testing.assert_close(told[name], values, rtol=0, atol=1e-5)


def load_quietly(rank: int, world_size: int, saved: dict[str, Any]) -> list[str]:
    logging.getLogger("commopt").addHandler(records := Records())
    Training(rank, world_size, FOUR).comm.load_state_dict(saved)
    return records.messages


def test_the_rules_for_the_learning_rate_are_told_in_another_world() -> None:
    saved = next(state for state in run(save, 2, FOUR) if state is not None)
    first, *others = run(load_quietly, 3, saved)
    assert len(first) == 1
    assert "of 2 ranks and here are 3" in first[0]
    assert "by 1.5 for SGD" in first[0]
    assert "by 1.22 for Adam" in first[0]
    assert others == [[], []]
    assert run(load_quietly, 2, saved) == [[], []]


def resume_twice(rank: int, world_size: int, aggregator: Aggregator) -> list[str]:
    """Return the digests of going on, of a resumed run, and of one resumed from a checkpoint of a checkpoint."""
    training = Training(rank, world_size, aggregator)
    for _ in range(4):
        training.step()
    saved = training.comm.state_dict()
    digests = []
    for again in (False, True, True):
        if again:
            training = Training(rank, world_size, aggregator)
            training.comm.load_state_dict(saved)
            saved = training.comm.state_dict()
            training.steps = 4
        training.forget()
        for _ in range(4):
            training.step()
        digests.append("".join(str(values.sum().item()) for values in training.results().values()))
    return digests


@pytest.mark.parametrize("layout", ["3", "2x2"])
def test_16_bit_residuals_resume_exactly_too(layout: str) -> None:
    aggregator = Hierarchical(inter=Compressed(Quantize(4, 64), Feedback(dtype=torch.bfloat16)))
    world_size, nodes = LAYOUTS[layout]
    for digests in run(resume_twice, world_size, aggregator if nodes else aggregator.inter, nodes=nodes):
        assert len(set(digests)) == 1


def load_nothing(rank: int, world_size: int) -> str:
    training = Training(rank, world_size, FOUR)
    training.step()
    with pytest.raises(commopt.ConfigurationError) as caught:
        training.comm.load_state_dict(training.comm.gathered_state_dict())  # type: ignore[arg-type]  # None on rank 1
    return str(caught.value)


def test_the_gathered_state_must_be_given_to_all() -> None:
    for message in run(load_nothing, 2):
        assert "NoneType" in message
        assert "gathered_state_dict" in message
