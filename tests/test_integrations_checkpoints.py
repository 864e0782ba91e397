# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the Transformers callback that several runs wrote, or one that was killed; and the best one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commopt
from commopt import LocalSGD, OneBit
from tests.plan_changes import heard
from tests.ranks import run
from tests.test_groups import message_of
from tests.trainer_stub import Trainer, callback_class

Left = tuple[float, str, list[str]]


def train(rank: int, world_size: int, folder: str, first: int, last: int, *, own_disk: bool = False) -> Left:
    """Train from a checkpoint, if any; return the sum of this rank's residuals, its error, and what was logged."""
    where = Path(folder, str(rank)) if own_disk else Path(folder)
    with callback_class() as made, heard() as said:
        trainer = Trainer(where, last, own_disk=own_disk)
        trainer.add_callback(averaging := made(trainer, "quantized", bits=2, check_every=0))
        torch.manual_seed(100 * first + 10 * world_size + rank)
        error = message_of(lambda: trainer.train(str(where / f"checkpoint-{first}") if first else None))
        dist.barrier()  # all files are there
        residuals = averaging.comm.state_dict()["residuals"].values()
        kept = sum(float(value.double().sum()) for role in residuals for value in role.values())
        return kept, error, [text for _, text in said if "samples" not in text]


def train_apart(rank: int, world_size: int, folder: str, first: int, last: int) -> Left:
    return train(rank, world_size, folder, first, last, own_disk=True)


def left_by(found: list[Left]) -> float:
    assert {error for _, error, _ in found} == {"no error"}
    return sum(kept for kept, _, _ in found)


def alike(kept: float) -> Any:
    assert abs(kept) > 1e-3
    return pytest.approx(kept, rel=1e-4)


def names_in(folder: Path) -> set[str]:
    return {file.name for file in folder.glob("commopt_*.pt")}


@pytest.mark.parametrize("killed", [False, True], ids=["whole", "killed before it deleted"])
def test_files_of_the_run_that_wrote_the_checkpoint_last_count(tmp_path: Path, killed: bool) -> None:
    """Three ranks write two checkpoints, two go on from the first and write the second again."""
    saved, kept_aside = tmp_path / "checkpoint-4", tmp_path / "aside"
    before = left_by(run(train, 3, str(tmp_path), 0, 4, nodes=(1, 1, 1)))
    shutil.copytree(saved, kept_aside)
    last = left_by(run(train, 2, str(tmp_path), 2, 4, nodes=(1, 1)))
    assert last != alike(before)
    assert names_in(saved) == {"commopt_0_of_2.pt", "commopt_1_of_2.pt"}
    if killed:
        for name in names_in(kept_aside):
            shutil.copy(kept_aside / name, saved / name)
    for ranks in (2, 3, 4):
        found = run(train, ranks, str(tmp_path), 4, 4, nodes=(1,) * ranks)
        assert left_by(found) == alike(last)
        assert not any(said for _, _, said in found)


def test_a_file_of_another_run_of_as_many_ranks_does_not_count(tmp_path: Path) -> None:
    saved, kept_aside = tmp_path / "checkpoint-4", tmp_path / "aside"
    run(train, 2, str(tmp_path), 0, 4, nodes=(1, 1))
    shutil.copytree(saved, kept_aside)
    found = run(train, 2, str(tmp_path), 2, 4, nodes=(1, 1))
    shutil.copy(kept_aside / "commopt_1_of_2.pt", saved)  # as if rank 1 had been killed before it wrote its own
    resumed = run(train, 2, str(tmp_path), 4, 4, nodes=(1, 1))
    assert left_by(resumed) == alike(found[0][0])
    assert [text for text in resumed[0][2] if "checkpoint-4 has no commopt_1_of_2.pt" in text]


def test_ranks_that_were_killed_before_they_had_written_are_named(tmp_path: Path) -> None:
    found = run(train, 2, str(tmp_path), 0, 2, nodes=(1, 1))
    (tmp_path / "checkpoint-2" / "commopt_1_of_2.pt").unlink()
    for ranks in (2, 1 + 2):
        resumed = run(train, ranks, str(tmp_path), 2, 2, nodes=(1,) * ranks)
        assert left_by(resumed) == alike(found[0][0])
        assert [text for text in resumed[0][2] if "checkpoint-2 has no commopt_1_of_2.pt" in text]
        assert [text for text in resumed[1][2] if "1 of 2 ranks are missing: rank 1 (node 1)" in text]
    (tmp_path / "checkpoint-2" / "commopt_0_of_2.pt").unlink()
    resumed = run(train, 2, str(tmp_path), 2, 2, nodes=(1, 1))
    assert left_by(resumed) == 0
    assert [text for text in resumed[0][2] if "error feedback starts with nothing" in text]


def test_as_many_ranks_on_other_nodes_merge_the_files(tmp_path: Path) -> None:
    last = left_by(run(train, 2, str(tmp_path), 0, 2, nodes=(1, 1)))
    assert left_by(run(train, 2, str(tmp_path), 2, 2, nodes=(2,))) == alike(last)


def test_a_damaged_file_is_named_on_every_rank(tmp_path: Path) -> None:
    run(train, 2, str(tmp_path), 0, 2, nodes=(1, 1))
    file = tmp_path / "checkpoint-2" / "commopt_1_of_2.pt"
    file.write_bytes(file.read_bytes()[:-100])
    for _, error, _ in run(train, 2, str(tmp_path), 2, 2, nodes=(1, 1)):
        assert f"{file} cannot be read" in error


def test_nodes_with_disks_of_their_own(tmp_path: Path) -> None:
    last = left_by(run(train_apart, 2, str(tmp_path), 0, 2, nodes=(1, 1)))
    assert left_by(run(train_apart, 2, str(tmp_path), 2, 2, nodes=(1, 1))) == alike(last)
    (tmp_path / "1" / "checkpoint-2" / "commopt_1_of_2.pt").unlink()
    for _, error, _ in run(train_apart, 2, str(tmp_path), 2, 2, nodes=(1, 1)):
        assert error.startswith("ConfigurationError: rank 1 has no file of its own in ")
        assert "ranks see different files there, 0 to 1, which cannot be merged: copy commopt_*_of_*.pt" in error
    (tmp_path / "0" / "checkpoint-2" / "commopt_0_of_2.pt").unlink()  # one of the ways out
    assert left_by(run(train_apart, 2, str(tmp_path), 2, 2, nodes=(1, 1))) == 0


# ------------------------------------------------------------------------------ load_best_model_at_end


def end_with_the_best(rank: int, world_size: int, folder: str, average: LocalSGD) -> list[bool]:
    """Return whether the model is the best checkpoint's at the end of training, and when its last round arrives."""
    with callback_class() as made:
        trainer = Trainer(Path(folder), 5, best=True)  # a round leaves after step 4
        trainer.add_callback(made(trainer, average))
        torch.manual_seed(rank)
        trainer.train()
        best, same = torch.load(Path(folder, "checkpoint-2", "model.pt")), []
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
        for _ in range(average.delay + 1):
            same.append(all(torch.equal(best[name], value) for name, value in trainer.model.state_dict().items()))
            trainer.model_wrapped(torch.ones(1, 8)).sum().backward()
            optimizer.step()
        return same


@pytest.mark.parametrize(
    "average",
    [LocalSGD(period=4, delay=3), LocalSGD(period=4, delay=3, compressor=OneBit()), commopt.diloco(period=4, delay=3)],
    ids=["mean", "signs", "diloco"],
)
def test_the_model_in_the_end_is_the_best_one(tmp_path: Path, average: LocalSGD) -> None:
    assert run(end_with_the_best, 3, str(tmp_path), average, nodes=(1, 1, 1)) == [[True] * 4] * 3
