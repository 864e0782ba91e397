# SPDX-License-Identifier: Apache-2.0
"""Collective calls of a state know which they are: one that not all ranks make, or in another order, fails on all."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import LocalSGD
from commopt.groups.agreement import exchange_facts
from commopt.groups.store import limited
from tests.hook_training import Tower, batch_of, digest_of, loss_of, seeded
from tests.ranks import run
from tests.test_groups import message_of

LOCAL = LocalSGD(period=2, compressor=commopt.OneBit())
LOSSY = "hierarchical_quantized"
CALLS = ("average_parameters", "gathered_state_dict", "report", "timeline")


def attached(choice: Any, timeout: float) -> tuple[TorchDDP, commopt.HookState, Any]:
    ddp = TorchDDP(seeded(Tower))
    state = commopt.attach(ddp, choice, timeout=timeout, record=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def train(rank: int, *steps: int) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(ddp, batch_of(rank, step)).backward()
            optimizer.step()

    return ddp, state, train


def call_alone(rank: int, world_size: int, choice: Any, call: str) -> str:
    _, state, train = attached(choice, timeout=3)
    train(rank, 0, 1, 2)
    return message_of(getattr(state, call) if rank == 0 else partial(train, rank, *range(3, 8)))


@pytest.mark.parametrize(
    ("choice", "call", "nodes"),
    [
        *((LOCAL, call, (1, 1)) for call in CALLS),
        *((LOSSY, call, (1, 1)) for call in CALLS[1:]),
        (LOCAL, "average_parameters", (2, 2)),
    ],
    ids=str,
)
def test_a_call_that_one_rank_makes_alone_fails_on_all_and_says_who_called_what(
    choice: Any, call: str, nodes: tuple[int, ...]
) -> None:
    messages = run(call_alone, sum(nodes), choice, call, nodes=nodes, fresh=True, timeout_s=60)
    for message in messages:
        assert message.startswith(("MismatchError", "LaneError")), messages
        assert f"{call} after 3 " in message, messages
        assert "died" not in message
    assert messages[0].startswith("MismatchError")


def call_in_another_order(rank: int, world_size: int, choice: Any) -> tuple[str, str, str]:
    ddp, state, train = attached(choice, timeout=30)
    train(rank, 0, 1, 2)
    calls = [state.report, state.gathered_state_dict]
    messages = [message_of(call) for call in (calls if rank else reversed(calls))]
    train(rank, 3)  # nothing was sent, so nothing is broken
    state.average_parameters()
    return messages[0], messages[1], digest_of(ddp)


@pytest.mark.parametrize("choice", [LOCAL, LOSSY], ids=str)
def test_calls_in_another_order_are_refused_at_once_and_training_goes_on(choice: Any) -> None:
    results = run(call_in_another_order, 2, choice, nodes=(1, 1))
    for *messages, _ in results:
        for message in messages:
            assert message.startswith("MismatchError: rank 1 came to ")
            assert "report after 3 steps" in message
            assert "gathered_state_dict after 3 steps" in message
    assert len({digest for *_, digest in results}) == 1


def die_after_a_refusal(rank: int, world_size: int) -> str:
    _, state, train = attached("flat", timeout=30)
    train(rank, 0, 1, 2)
    message_of(state.report if rank else state.gathered_state_dict)
    train(rank, 3)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return message_of(partial(train, rank, *range(4, 60)))


def test_a_call_that_was_refused_is_not_why_a_rank_dies_later() -> None:
    message = run(die_after_a_refusal, 2, fresh=True, dies=(1,))[0]
    assert "no sign of life from rank 1" in message
    assert "has called" not in message


def uneven(rank: int, world_size: int, delay: int) -> str:
    """Without join() the first rank has more batches: its last round finds the others at the end of theirs."""
    _, state, train = attached(LocalSGD(period=3, delay=delay), timeout=30)

    def train_and_average() -> None:
        train(rank, *range(13 + delay if rank == 0 else 12))
        state.average_parameters()

    return message_of(train_and_average)


@pytest.mark.parametrize("delay", [0, 2])
def test_a_round_is_never_taken_for_another_call(delay: int) -> None:
    for message in run(uneven, 2, delay, nodes=(1, 1), timeout_s=60):
        assert "average_parameters after 12 averaged backwards" in message
        assert "round 4 of the parameters, after 12 optimizer steps" in message


def another_kind_of_call(rank: int, world_size: int) -> str:
    """A standalone call where another rank sends a bucket, which is longer than a comparison and what is compared."""
    _, _, train = attached(LOSSY, timeout=3)
    train(rank, 0, 1, 2)
    alone = partial(commopt.Communicator(timeout=3).all_reduce, torch.ones(5))
    return message_of(alone if rank == 0 else partial(train, rank, 3))


def test_a_standalone_call_is_never_taken_for_a_bucket() -> None:
    for message in run(another_kind_of_call, 2, nodes=(1, 1), fresh=True, timeout_s=60):
        assert message.startswith("LaneError"), message
        assert "rank 0 in Communicator" in message
        assert "rank 1 in HookState" in message


# ------------------------------------------------------------------------------ while they wait


@pytest.mark.parametrize("late", [0, 1])
def test_whoever_waits_says_for_whom(late: int, caplog: pytest.LogCaptureFixture) -> None:
    store, ranks, ended = limited(dist.HashStore(), "keys", 30), [4, 5, 6], list[int]()

    def attend(place: int) -> None:
        exchange_facts(store, ranks, place, "gathered_state_dict", {}, 30.0, patience_s=0.05)
        ended.append(place)

    threads = [threading.Thread(target=attend, args=(place,)) for place in range(3)]
    for place, thread in enumerate(threads):
        if place != late:
            thread.start()
    said = f"waiting for rank {ranks[late]} in gathered_state_dict"
    deadline = time.monotonic() + 20
    while said not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert said in caplog.text
    assert not ended
    threads[late].start()
    for thread in threads:
        thread.join(30)
    assert sorted(ended) == [0, 1, 2]
