# SPDX-License-Identifier: Apache-2.0
"""Residuals through torch.distributed.checkpoint: each rank writes its own, any world can read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import commopt
from tests.catalogue import LAYOUTS
from tests.feedback_training import STRATEGIES, Training, Vectors, alike, residual_of
from tests.ranks import run


def write(rank: int, world_size: int, strategy: str, folder: str) -> tuple[str, Vectors]:
    training = Training(rank, world_size, STRATEGIES[strategy])
    for _ in range(4):
        training.step()
    dcp.save({"model": training.module.state_dict(), "comm": commopt.Checkpointed(training.comm)}, checkpoint_id=folder)
    residual = residual_of(training.comm.state_dict())
    training.forget()
    for _ in range(4):
        training.step()
    return training.digest(), residual


def read(rank: int, world_size: int, strategy: str, folder: str, writers: int) -> tuple[str, Vectors]:
    training = Training(rank, world_size, STRATEGIES[strategy])
    comm = commopt.Checkpointed(training.comm, saved_world_size=writers)
    dcp.load({"model": training.module.state_dict(), "comm": comm}, checkpoint_id=folder)
    residual = residual_of(training.comm.state_dict())
    training.steps = 4
    for _ in range(4):
        training.step()
    return training.digest(), residual


def read_damaged(rank: int, world_size: int) -> list[str]:
    training = Training(rank, world_size, STRATEGIES["4 bits"])
    training.step()
    comm = commopt.Checkpointed(training.comm)
    good, messages = comm.state_dict(), []
    [(name, part)] = good.items()
    content = bytes(part)
    for damaged in ({name: b""}, {name: content[: len(content) // 2]}, {name: None}, {}, {"place": content[1:]}):
        before = training.comm.state_dict()
        with pytest.raises(commopt.ConfigurationError) as caught:
            comm.load_state_dict(damaged if rank == 1 else good)  # type: ignore[arg-type]
        assert alike(before, training.comm.state_dict())
        messages.append(str(caught.value))
    comm.load_state_dict(good)
    assert training.step()
    return messages


def test_what_one_rank_cannot_read_is_an_error_on_all() -> None:
    first, second = run(read_damaged, 2, timeout_s=30)
    assert first == second
    for message in first:
        assert "rank 1 cannot load its state" in message
        assert "start without" in message or "one rank or more" in message


def number_of_writers(rank: int, world_size: int, value: object) -> str:
    training = Training(rank, world_size, STRATEGIES["4 bits"])
    with pytest.raises(commopt.ConfigurationError) as caught:
        commopt.Checkpointed(training.comm, saved_world_size=value)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("value", [0, "4", True])
def test_the_number_of_writers_is_checked(value: object) -> None:
    [message] = run(number_of_writers, 1, value)
    assert f"saved_world_size={value!r}" in message


def total(parts: Sequence[tuple[str, Vectors]]) -> dict[str, Tensor]:
    return {name: torch.stack([residual[name] for _, residual in parts]).sum(0) for name in parts[0][1]}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("strategy", "layout"), [("4 bits", "3"), ("inter 4 bits", "2x2"), ("top 5%", "3"), ("inter rank 2", "2x2")]
)
def test_distributed_checkpoint(tmp_path: Path, strategy: str, layout: str) -> None:
    world_size, nodes = LAYOUTS[layout]
    written = run(write, world_size, strategy, str(tmp_path), nodes=nodes)
    again = run(read, world_size, strategy, str(tmp_path), world_size, nodes=nodes)
    assert [digest for digest, _ in again] == [digest for digest, _ in written]

    other = run(read, 2, strategy, str(tmp_path), world_size, nodes=(1, 1))
    kept, wanted = total(other), total(written)
    assert max(float(values.abs().max()) for values in wanted.values()) > 0
    for name, values in wanted.items():
        torch.testing.assert_close(kept[name], values, rtol=1e-5, atol=1e-6)
