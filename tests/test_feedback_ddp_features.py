# SPDX-License-Identifier: Apache-2.0
"""Error feedback under DDP's features: every gradient counts once, and misuse is noticed."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

import commopt
from bench import compat
from commopt.attached.checks import enabled_scalers, warn_of_untested_torch
from commopt.version import NEWEST_TESTED_TORCH
from tests.feedback_training import (
    SMALL_BUCKETS,
    STRATEGIES,
    Books,
    Controlled,
    Records,
    Tied,
    Training,
    Vectors,
    assert_conserved,
    assert_something_left,
    gradients,
)
from tests.hook_training import assert_identical
from tests.ranks import run

STEPS = 12
EIGHT_BITS = STRATEGIES["8 bits"]
FIND_UNUSED = {**SMALL_BUCKETS, "find_unused_parameters": True}


Options = dict[str, Any]


def leaving_out(*names: str, when: Callable[[int, int], bool] = lambda rank, step: True) -> Options:
    """Return the option of a training that does not use some parameters, in some steps of some ranks."""

    def chosen(rank: int, step: int, dtype: torch.dtype) -> Vectors:
        unused = names if when(rank, step) else ()
        return {name: values for name, values in gradients(rank, step, dtype).items() if name not in unused}

    return {"chosen": chosen}


def frozen_model(dtype: torch.dtype) -> Controlled:
    module = Controlled(dtype)
    module.first.weight.requires_grad_(False)
    module.second.bias.requires_grad_(False)
    return module


def tied_gradients(rank: int, step: int, dtype: torch.dtype) -> Vectors:
    values = gradients(rank, step, dtype)
    return {**values, "tied.weight": values["third.weight"].flip(0)}


FEATURES: dict[str, Options] = {
    "frozen": {"make": frozen_model, **leaving_out("first.weight", "second.bias")},
    "unused_on_a_rank": {
        "options": FIND_UNUSED,
        **leaving_out("second.weight", "third.weight", when=lambda rank, step: bool((rank + step) % 2)),
    },
    "unused_for_ever": {"options": FIND_UNUSED, **leaving_out("third.weight")},
    # By no rank in every third step; DDP drops what the hook returns for it then, so it is dense.
    "unused_in_some_steps": {
        "options": FIND_UNUSED,
        **leaving_out("third.weight", when=lambda rank, step: step % 3 == 1),
    },
    "tied": {"make": Tied, "chosen": tied_gradients},
    "accumulated": {"micros": 2},
}


def use(rank: int, world_size: int, feature: str, strategy: str) -> tuple[Books, str]:
    aggregator = STRATEGIES[strategy]
    if feature == "unused_in_some_steps":
        aggregator = aggregator.with_dense(("third.weight",))
    training = Training(rank, world_size, aggregator, **FEATURES[feature])
    for _ in range(STEPS):
        training.step()
    return training.books(), training.digest()


@pytest.mark.parametrize(
    ("feature", "strategy"),
    [
        *((feature, "inter rank 2") for feature in FEATURES),
        ("frozen", "inter top 5%"),
        ("unused_on_a_rank", "inter 4 bits"),
        ("unused_in_some_steps", "inter onebit mean"),
        ("tied", "8 bits"),
        ("accumulated", "inter top 5%"),
    ],
)
def test_every_gradient_counts_once(feature: str, strategy: str) -> None:
    results = run(use, 4, feature, strategy, nodes=(2, 2))
    assert_identical([digest for _, digest in results])
    assert_conserved([books for books, _ in results], feature)
    assert_something_left([books for books, _ in results])


def attached(aggregator: commopt.Aggregator, scaler: torch.amp.GradScaler | None = None) -> TorchDDP:
    ddp = TorchDDP(Controlled(), **SMALL_BUCKETS)
    commopt.attach(ddp, aggregator, scaler=scaler)
    return ddp


def sgd(ddp: TorchDDP) -> torch.optim.Optimizer:
    return torch.optim.SGD(ddp.parameters(), lr=0.01)


def accumulate(rank: int, aggregator: commopt.Aggregator, *, in_no_sync: bool) -> None:
    ddp = attached(aggregator)
    optimizer = sgd(ddp)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step != 1)
        with ddp.no_sync() if in_no_sync else contextlib.nullcontext():
            ddp(gradients(rank, 2 * step)).backward()
        ddp(gradients(rank, 2 * step + 1)).backward()
        optimizer.step()


def accumulate_wrongly(rank: int) -> None:
    accumulate(rank, EIGHT_BITS, in_no_sync=False)


def accumulate_rightly(rank: int) -> None:
    accumulate(rank, EIGHT_BITS, in_no_sync=True)


def accumulate_losslessly(rank: int) -> None:
    accumulate(rank, commopt.Hierarchical(), in_no_sync=False)


def update_by_hand(rank: int) -> None:
    ddp = attached(EIGHT_BITS)
    for step in range(4):
        ddp.zero_grad(set_to_none=step != 1)
        ddp(gradients(rank, step)).backward()
        with torch.no_grad():
            for parameter in ddp.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.01)


def run_out_of_data(rank: int) -> None:
    ddp = attached(EIGHT_BITS)
    optimizer = sgd(ddp)
    with ddp.join():
        for step in range(2 if rank else 6):
            optimizer.zero_grad()
            ddp(gradients(rank, step)).backward()
            optimizer.step()


def scale(ddp: TorchDDP, scaler: torch.amp.GradScaler, rank: int, infinite: tuple[int, ...] = ()) -> None:
    optimizer = sgd(ddp)
    for step in range(5):
        optimizer.zero_grad()
        loss = ddp(gradients(rank, step))
        scaler.scale(loss * float("inf") if step in infinite else loss).backward()
        scaler.step(optimizer)
        scaler.update()


def scaler_of(enabled: bool = True) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)


def forget_the_scaler(rank: int) -> None:
    scaler = scaler_of()
    scale(attached(STRATEGIES["inter 4 bits"]), scaler, rank)


def forget_a_later_scaler(rank: int) -> None:
    ddp = attached(EIGHT_BITS)
    scale(ddp, scaler_of(), rank)


def forget_the_scaler_after_resuming(rank: int) -> None:
    ddp = TorchDDP(Controlled(), **SMALL_BUCKETS)
    state = commopt.attach(ddp, EIGHT_BITS)
    state.load_state_dict({**state.state_dict(), "steps": 1000})
    scale(ddp, scaler_of(), rank)


def pass_the_scaler(rank: int) -> None:
    scaler = scaler_of()
    scale(attached(EIGHT_BITS, scaler), scaler, rank, infinite=(1, 2))


def scaler_without_feedback(rank: int) -> None:
    scale(attached(commopt.Hierarchical()), scaler_of(), rank)


def disabled_scaler(rank: int) -> None:
    scale(attached(EIGHT_BITS), scaler_of(enabled=False), rank)


def messages_of(rank: int, world_size: int, training: Callable[[int], None]) -> list[str]:
    records = Records()
    logging.getLogger("commopt").addHandler(records)
    training(rank)
    return records.messages


@pytest.mark.parametrize(
    ("training", "fix"),
    [
        (accumulate_wrongly, "no_sync"),
        (forget_the_scaler, "scaler="),
        (forget_a_later_scaler, "scaler="),
        (forget_the_scaler_after_resuming, "scaler="),
    ],
)
def test_misuse_is_logged_with_the_fix(training: Callable[[int], None], fix: str) -> None:
    # New processes: a warning comes once per process, and a GradScaler of an earlier job may still exist.
    for messages in run(messages_of, 2, training, fresh=True):
        assert len([message for message in messages if fix in message]) == 1, messages


@pytest.mark.parametrize(
    "training",
    [
        accumulate_rightly,
        accumulate_losslessly,
        update_by_hand,
        run_out_of_data,
        pass_the_scaler,
        scaler_without_feedback,
        disabled_scaler,
    ],
)
def test_right_use_is_silent(training: Callable[[int], None]) -> None:
    assert run(messages_of, 2, training, fresh=True) == [[], []]


def put_on_what_is_the_users(rank: int, world_size: int, aggregator: commopt.Aggregator) -> tuple[int, int, int, bool]:
    """Return hooks on the module and on all optimizers, attached and after; and whether the module can be scripted."""
    model, of_optimizers = torch.nn.Linear(64, 64), _global_optimizer_post_hooks
    held, dying = [TorchDDP(model)], list[TorchDDP]()
    register_optimizer_step_post_hook(lambda *_: dying.clear())
    commopt.attach(held[0], aggregator)
    optimizer = sgd(held[0])
    for _ in range(2):
        held[0](torch.ones(1, 64)).sum().backward()
        optimizer.step()
    if not isinstance(aggregator, commopt.LocalSGD):
        torch.jit.script(held[0].module)
    attached_ones = len(of_optimizers) - 1
    dying.append(held.pop())
    optimizer.step()
    return attached_ones, len(of_optimizers) - 1, len(model._forward_pre_hooks), bool(torch.jit.script(model))


@pytest.mark.parametrize("aggregator", [commopt.Hierarchical(), STRATEGIES["8 bits"], commopt.LocalSGD(2)], ids=str)
def test_nothing_stays_on_a_model_and_one_hook_on_all_optimizers(aggregator: commopt.Aggregator) -> None:
    sees_steps = bool(aggregator.residual_paths) or aggregator.node_local
    expected = (of_optimizers := int(sees_steps), of_optimizers, 0, True)
    assert run(put_on_what_is_the_users, 2, aggregator, fresh=True) == [expected] * 2


def attach_in_new_torch(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0a0+cu130")
        for _ in range(2):
            attached(commopt.Hierarchical())


def test_a_torch_that_was_not_tested_is_named_once() -> None:
    said, silent = run(messages_of, 2, attach_in_new_torch, fresh=True)
    assert (len(said), silent) == (1, [])
    assert re.search(r"torch 2\.99\.0a0\+cu130 is newer than 2\.\d+, .* pip install 'torch==2\.\d+\.\*'", said[0])


def test_the_newest_tested_torch_is_the_newest_that_was_recorded(caplog: pytest.LogCaptureFixture) -> None:
    recorded = compat.read(Path(__file__).parent.parent / "bench" / "results" / "compat.json")
    newest = [each.torch for each in recorded if each.passed and not each.failed][-1]
    assert newest.startswith(f"{NEWEST_TESTED_TORCH}.")
    for version in ("2.7.0", f"{NEWEST_TESTED_TORCH}.9+cpu"):
        warn_of_untested_torch(version)
    assert not caplog.messages


def test_looking_for_scalers_disturbs_no_other_thread() -> None:
    """A tuple that is being built must be held by nobody else: gc.get_objects() would hold it."""
    scaler, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    over, raised = threading.Event(), []

    def build() -> None:
        try:
            while not over.is_set():
                tuple(number for number in range(200))
        except SystemError as error:
            raised.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    builder = threading.Thread(target=build)
    builder.start()
    try:
        found = [enabled_scalers() for _ in range(30)]
    finally:
        over.set()
        builder.join()
        sys.setswitchinterval(interval)
    assert not raised
    assert all(scaler in each and off not in each for each in found)
