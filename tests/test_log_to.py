# SPDX-License-Identifier: Apache-2.0
"""Figures of a training for loggers: every kind of logger, as the state says, and no rank ever hangs."""

from __future__ import annotations

import csv
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt.attached.log import SCALARS
from commopt.errors import ConfigurationError, MismatchError
from tests.hook_training import SMALL_BUCKET, Tower, batch_of, loss_of, seeded
from tests.plan_changes import heard
from tests.ranks import run
from tests.sharded_training import Made, plain_steps

EVERY = 4
Written = dict[int, dict[str, float]]  # scalars by step


def fakes(written: Sequence[Written]) -> list[Any]:
    """Return loggers with the signatures of TensorBoard's, Lightning's, W&B's and transformers', and a function."""

    def note(place: int, step: int, scalars: dict[str, float]) -> None:
        known = {name: value for name, value in scalars.items() if name != "comm/step"}
        written[place].setdefault(step, {}).update(known)

    def add_scalar(tag, scalar_value, global_step=None, walltime=None, new_style=False, double_precision=False) -> None:
        note(0, global_step, {tag: scalar_value})

    def of_wandb(data, step=None, commit=None) -> None:
        assert step is None, "W&B takes no step that is lower than its own, which counts calls"
        note(2, data["comm/step"], data)

    defined = lambda name, step_metric=None, step_sync=None, hidden=None: None  # noqa: E731
    return [
        SimpleNamespace(add_scalar=add_scalar),
        SimpleNamespace(log_metrics=lambda metrics, step=None: note(1, step, metrics)),
        SimpleNamespace(log=of_wandb, define_metric=defined),
        SimpleNamespace(log=lambda logs, start_time=None: note(3, logs["comm/step"], logs)),
        written[4].__setitem__,
    ]


def rows_of(path: Path) -> list[tuple[int, dict[str, float]]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(tuple(row) == ("step", *SCALARS) for row in rows)
    return [(int(row.pop("step")), {name: float(text) for name, text in row.items() if text}) for row in rows]


# ------------------------------------------------------------------------------------------- what is written


def train(ddp: nn.Module, rank: int, *steps: int) -> None:
    for step in steps:
        loss_of(ddp, batch_of(rank, step)).backward()


def attached(choice: str = "hierarchical_quantized:bits=4", **options: Any) -> tuple[TorchDDP, commopt.HookState]:
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    return ddp, commopt.attach(ddp, choice, **options)


def log_everywhere(rank: int, world_size: int, folder: str) -> tuple[list[Written], Any, dict[str, Any], int]:
    ddp, state = attached()
    written, path = [Written() for _ in range(5)], Path(folder, "log.csv")
    train(ddp, rank, 0, 1)
    for target in (*fakes(written), path):
        state.log_to(target if rank == 0 else None, EVERY)
    train(ddp, rank, *range(2, 9))
    stats, messages = state.stats(), len(state._registration.step.buffers)
    ddp, state = attached()  # a run that goes on
    state.log_to(str(path), EVERY)
    train(ddp, rank, *range(5))
    return written, rows_of(path), stats, messages


def test_every_logger_gets_what_the_state_says(tmp_path: Path) -> None:
    (written, rows, stats, messages), (elsewhere, *_) = run(log_everywhere, 2, str(tmp_path), nodes=(1, 1))
    assert elsewhere == [{}] * 5
    assert [list(each) for each in written] == [[4, 8]] * 5
    assert [step for step, _ in rows] == [4, 8, 4]
    for scalars in [*(scalars for each in written for scalars in each.values()), *(scalars for _, scalars in rows)]:
        assert set(scalars) == set(SCALARS)
        assert scalars["comm/compute_ms"] + scalars["comm/exposed_ms"] == pytest.approx(scalars["comm/step_ms"])
        assert 0 <= scalars["comm/waiting_ms"] <= scalars["comm/exposed_ms"]
        assert 0 < scalars["comm/compression_error"] < 1
        assert scalars["comm/residual_norm"] > 0
        assert (scalars["comm/intra_bytes"], scalars["comm/plan_changes"]) == (0, 0)
        assert scalars["comm/messages"] == messages
    # Which elements rest is told once, in the first steps: before there was a logger, and in the run anew.
    (_, at_4), (_, at_8), (_, anew) = rows
    step_nbytes = at_4["comm/inter_bytes"]
    once = stats["inter_bytes"] - stats["steps"] * step_nbytes
    assert 0 < once < step_nbytes
    assert anew["comm/inter_bytes"] == pytest.approx(step_nbytes + once / 4)
    assert [at_8["comm/inter_bytes"], *(each[step]["comm/inter_bytes"] for each in written for step in (4, 8))] == [
        step_nbytes
    ] * 11


def write_with_the_real_one(rank: int, world_size: int, folder: str) -> None:
    from torch.utils.tensorboard import SummaryWriter as Real

    ddp, state = attached()
    with Real(folder) if rank == 0 else nullcontext() as writer:
        state.log_to(writer, 2)
        train(ddp, rank, 0, 1)


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    name = "tensorboard.backend.event_processing.event_accumulator"
    reader = pytest.importorskip(name, reason="tensorboard is not installed")
    run(write_with_the_real_one, 2, str(tmp_path))
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) <= set(SCALARS)
    assert [event.step for event in events.Scalars("comm/exposed_ms")] == [2]


def keep_recording(rank: int, world_size: int) -> Written:
    """Planning measures some steps and then records no more, but for a logger; ranks that have run out do not hang."""
    ddp, state = attached("hierarchical", plan="adaptive")
    written = Written()
    state.log_to(written.__setitem__, 2)
    state.freeze()
    with ddp.join():
        train(ddp, rank, *range(4 + 2 * rank))
    return written


def test_steps_are_recorded_whatever_planning_does() -> None:
    written, nothing = run(keep_recording, 2, nodes=(1, 1))
    assert nothing == {}
    assert list(written) == [2, 4, 6]
    assert all("comm/exposed_ms" in scalars and "comm/residual_norm" not in scalars for scalars in written.values())


def log_shards(rank: int, world_size: int, over_all_ranks: bool) -> Written:
    net = Made(shard=lambda net, **_: fully_shard(net))() if over_all_ranks else Made()()
    state, written = commopt.attach(net, "hierarchical_quantized"), Written()
    state.log_to(written.__setitem__, 3)
    plain_steps(net, 6)
    return written


@pytest.mark.parametrize("over_all_ranks", [False, True])
def test_shards_are_logged_too(over_all_ranks: bool) -> None:
    written, *others = run(log_shards, 4, over_all_ranks, nodes=(2, 2))
    assert others == [{}] * 3
    assert list(written) == [3, 6]
    for scalars in written.values():
        assert set(SCALARS) - set(scalars) <= {"comm/plan_changes"}
        assert scalars["comm/inter_bytes"] > 0
        assert scalars["comm/step_ms"] >= scalars["comm/exposed_ms"]


# ------------------------------------------------------------------------------------------- what is refused


def refuse(rank: int, world_size: int, folder: str) -> list[str]:
    ddp, state = attached(timeout=4)
    other = Path(folder, "other.csv")
    other.write_text("step,loss\n1,2\n")
    said = []
    for target in (
        3,
        logging.getLogger("mine"),
        SimpleNamespace(log=print, log_dict=print),
        other,
        Path(folder, "none", "log.csv"),
    ):
        with pytest.raises(ConfigurationError) as raised:
            state.log_to(target if rank == 0 else None)
        said.append(str(raised.value))
    for every in (0, 2.5):
        with pytest.raises(ConfigurationError, match="every"):
            state.log_to(print, every)  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match="every"):
        state.log_to(print, 1 + rank)
    if rank == 0:
        with pytest.raises(MismatchError, match="rank 1 did not reach log_to"):
            state.log_to(print)
    dist.barrier()
    train(ddp, rank, 0, 1)  # nothing was printed, and nobody is out of step
    state.close()
    with pytest.raises(ConfigurationError, match="closed"):
        state.log_to(print)
    return said


def test_a_mistake_is_an_error_on_every_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    at_first, elsewhere = run(refuse, 2, str(tmp_path))
    for words, own, other in zip(
        ("got 3", "Logger", "Namespace", "columns", "written"), at_first, elsewhere, strict=True
    ):
        assert words in own
        assert own in other
        assert "rank 0" in other


def fail(rank: int, world_size: int) -> tuple[list[int], list[str]]:
    def broken(step: int, scalars: dict[str, float]) -> None:
        calls.append(step)
        raise KeyError("disk full")

    calls: list[int] = []
    ddp, state = attached()
    with heard() as said:
        state.log_to(broken, 2)
        train(ddp, rank, *range(6))
    return calls, [line for _, line in said if "log_to" in line]  # others warn of loops without an optimizer


def test_a_logger_that_fails_ends_no_training() -> None:
    (calls, (line,)), (nothing, silent) = run(fail, 2)
    assert (calls, nothing, silent) == ([2], [], [])
    assert "writing failed after step 2" in line
