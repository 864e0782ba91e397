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
from tests.feedback_training import STRATEGIES, Training, Vectors, residual_of
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


def total(parts: Sequence[tuple[str, Vectors]]) -> dict[str, Tensor]:
    return {name: torch.stack([residual[name] for _, residual in parts]).sum(0) for name in parts[0][1]}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("strategy", "layout"), [("4 bits", "3"), ("inter 4 bits", "2x2"), ("momentum", "3"), ("inter rank 2", "2x2")]
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
