"""Figures of a training for loggers: every kind of logger, as the state says, and no rank ever hangs."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt.errors import ConfigurationError, MismatchError
from commopt.hooks.log import SCALARS
from tests.hook_training import SMALL_BUCKET, Tower, batch_of, loss_of, seeded
from tests.plan_changes import heard
from tests.ranks import run
from tests.sharded_training import Made, plain_steps

EVERY = 4
Written = list[tuple[int, dict[str, float]]]


class Fake:
    """A logger with the signature of a real one."""

    def __init__(self) -> None:
        self.written: Written = []

    def found(self) -> Written:
        """Return what was written, by step."""
        by_step: dict[int, dict[str, float]] = {}
        for step, scalars in self.written:
            by_step.setdefault(step, {}).update(scalars)
        return list(by_step.items())


class SummaryWriter(Fake):
    """Torch's, of TensorBoard."""

    def add_scalar(
        self, tag, scalar_value, global_step=None, walltime=None, new_style=False, double_precision=False
    ) -> None:
        self.written.append((global_step, {tag: scalar_value}))


class LightningLogger(Fake):
    def log_metrics(self, metrics, step=None) -> None:
        self.written.append((step, metrics))


class WandbRun(Fake):
    def define_metric(self, name, step_metric=None, step_sync=None, hidden=None) -> None:
        assert (name, step_metric) == ("comm/*", "comm/step")

    def log(self, data, step=None, commit=None) -> None:
        assert step is None, "W&B takes no step that is lower than its own, which counts calls"
        self.written.append((data.pop("comm/step"), data))


class Trainer(Fake):
    """Of transformers."""

    def log(self, logs, start_time=None) -> None:
        assert start_time is None
        self.written.append((logs.pop("comm/step"), logs))


class Function(Fake):
    def __call__(self, step: int, scalars: dict[str, float]) -> None:
        self.written.append((step, scalars))


def rows_of(path: Path) -> Written:
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


def log_everywhere(rank: int, world_size: int, folder: str) -> tuple[list[Written], dict[str, Any], int]:
    ddp, state = attached()
    loggers = [SummaryWriter(), LightningLogger(), WandbRun(), Trainer(), Function()]
    path = Path(folder, "log.csv")
    train(ddp, rank, 0, 1)
    for target in (*loggers, path):
        state.log_to(target if rank == 0 else None, EVERY)
    train(ddp, rank, *range(2, 9))
    written, stats, messages = (
        [logger.found() for logger in loggers],
        state.stats(),
        len(state._registration.step.buffers),
    )
    ddp, state = attached()  # a run that goes on
    state.log_to(str(path), EVERY)
    train(ddp, rank, *range(5))
    return [*written, rows_of(path)], stats, messages


def test_every_logger_gets_what_the_state_says(tmp_path: Path) -> None:
    (written, stats, messages), (of_rank_1, *_) = run(log_everywhere, 2, str(tmp_path), nodes=(1, 1))
    assert of_rank_1 == [[]] * 5 + written[-1:]
    assert [[step for step, _ in each] for each in written] == [[4, 8]] * 5 + [[4, 8, 4]]
    for each in written:
        for _, scalars in each:
            assert set(scalars) == set(SCALARS)
            assert scalars["comm/compute_ms"] + scalars["comm/exposed_ms"] == pytest.approx(scalars["comm/step_ms"])
            assert 0 <= scalars["comm/waiting_ms"] <= scalars["comm/exposed_ms"]
            assert 0 < scalars["comm/compression_error"] < 1
            assert scalars["comm/inter_bytes"] == stats["inter_bytes"] / stats["steps"]
            assert (scalars["comm/intra_bytes"], scalars["comm/plan_changes"]) == (0, 0)
            assert scalars["comm/messages"] == messages
    assert written[0][-1][1]["comm/residual_norm"] == pytest.approx(stats["residual_norm"], rel=0.5)  # a step later


def write_with_the_real_one(rank: int, world_size: int, folder: str) -> None:
    from torch.utils.tensorboard import SummaryWriter as Real

    ddp, state = attached()
    writer = Real(folder) if rank == 0 else None
    state.log_to(writer, 2)
    train(ddp, rank, 0, 1)
    if writer is not None:
        writer.close()


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
    function = Function()
    state.log_to(function, 2)
    state.freeze()
    with ddp.join():
        train(ddp, rank, *range(4 + 2 * rank))
    return function.found()


def test_steps_are_recorded_whatever_planning_does() -> None:
    written, nothing = run(keep_recording, 2, nodes=(1, 1))
    assert nothing == []
    assert [step for step, _ in written] == [2, 4, 6]
    assert all("comm/exposed_ms" in scalars and "comm/residual_norm" not in scalars for _, scalars in written)


def log_shards(rank: int, world_size: int, flat: bool) -> Written:
    net = Made(shard=None if not flat else over_all)()
    state, function = commopt.attach(net, "hierarchical_quantized"), Function()
    state.log_to(function, 3)
    plain_steps(net, 6)
    return function.found()


def over_all(net: nn.Module, **_: Any) -> None:
    fully_shard(net)


@pytest.mark.parametrize("flat", [False, True])
def test_shards_are_logged_too(flat: bool) -> None:
    written, *others = run(log_shards, 4, flat, nodes=(2, 2))
    assert others == [[]] * 3
    assert [step for step, _ in written] == [3, 6]
    for _, scalars in written:
        assert set(SCALARS) - set(scalars) <= {"comm/plan_changes"}
        assert scalars["comm/inter_bytes"] > 0
        assert scalars["comm/step_ms"] >= scalars["comm/exposed_ms"]


# ------------------------------------------------------------------------------------------- what is refused


class Module(nn.Module):
    def log(self, name: str, value: float) -> None: ...
    def log_dict(self, metrics: dict[str, float]) -> None: ...


def refuse(rank: int, world_size: int, folder: str) -> list[str]:
    ddp, state = attached(timeout=2)
    other = Path(folder, "other.csv")
    other.write_text("step,loss\n1,2\n")
    said = []
    for target in (3, logging.getLogger("mine"), Module(), other, Path(folder, "none", "log.csv")):
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
    for words, own, other in zip(("got 3", "Logger", "Module", "columns", "written"), at_first, elsewhere, strict=True):
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
    return calls, [line for _, line in said]


def test_a_logger_that_fails_ends_no_training() -> None:
    (calls, (line,)), (nothing, silent) = run(fail, 2)
    assert (calls, nothing, silent) == ([2], [], [])
    assert "writing failed after step 2" in line
