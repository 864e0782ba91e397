# SPDX-License-Identifier: Apache-2.0
"""What `commopt run --report` records of real trainings of every kind, and the verdict on each: on gloo, in seconds.

And what `commopt doctor --script` records of scripts, however they end.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import SGD

from commopt.doctor.verdict.facts import Measurements
from commopt.doctor.verdict.judge import Verdict
from commopt.doctor.verdict.measure import Found
from commopt.doctor.verdict.recording import verdict_on
from commopt.doctor.verdict.script import LEAST_STEPS, MOST_STEPS, record
from commopt.doctor.verdict.show import MOST_LINES, lines_of
from commopt.errors import ConfigurationError
from commopt.run.models import Models, watching
from commopt.run.script import Choice
from tests.plan_changes import heard
from tests.ranks import run
from tests.sharded_training import NODES, Made, batch, over_all_ranks

STEPS = 8
WIDTH = 64


class Blocks(nn.Sequential):
    """Three layers, each in a message of its own."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def train(kind: str, rank: int) -> None:
    if kind in ("1-D", "2-D"):
        net: nn.Module = Made(mesh=over_all_ranks())() if kind == "1-D" else Made()()
        samples: Any = batch
    else:
        net = TorchDDP(Blocks(), bucket_cap_mb=0.01)
        samples = lambda number: torch.full((2, WIDTH), number + 1.0)  # noqa: E731
    optimizer = SGD(net.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        if kind == "accumulated":
            with net.no_sync():  # type: ignore[operator]
                net(samples(rank)).square().mean().backward()
        net(samples(10 * step + rank)).square().mean().backward()
        optimizer.step()


def judged(rank: int, world_size: int, kind: str, strategy: str) -> tuple[Verdict, list[str]] | None:
    models = Models(Choice(strategy), records=True)
    with watching(models):
        train(kind, rank)
        models.end()
    models.close()
    (record,) = models.trained
    assert record.recorded is not None
    assert len(record.recorded.timeline.steps) >= STEPS - 2  # DDP rebuilds its buckets after the first
    verdict = verdict_on(record.recorded)
    return (verdict, lines_of(verdict)) if rank == 0 else None


@pytest.mark.parametrize(
    ("kind", "strategy", "forms"),
    [
        ("plain", "flat", {"all ranks": "float32"}),
        ("accumulated", "hierarchical_bf16", {"inside a node": "float32", "between nodes": "bfloat16"}),
        ("plain", "hierarchical_quantized:bits=4", {"inside a node": "float32", "between nodes": "4 bits"}),
        ("plain", "onebit_local", {"inside a node": "float32"}),
        ("2-D", "hierarchical_quantized", {"between nodes": "8 bits"}),
        ("1-D", "hierarchical_quantized", {"inside a node": "float32", "between nodes": "8 bits"}),
    ],
)
def test_a_training_of_every_kind_ends_in_a_verdict(kind: str, strategy: str, forms: dict[str, str]) -> None:
    found = run(judged, 4, kind, strategy, nodes=NODES)[0]
    assert found is not None
    verdict, lines = found
    assert verdict.training is not None
    assert verdict.overlap is not None
    assert {row.link: row.sent.rsplit(" ", 2)[0] for row in verdict.rows} == forms
    assert 0 < verdict.training.exposed_ms <= verdict.training.step_ms
    assert verdict.training.strategy == strategy
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= 80
    unrecorded = {"onebit_local": "what nodes send each other", "1-D": "the weights that FSDP2 gathers"}
    for what, said in unrecorded.items():
        assert (said in " ".join(verdict.notes)) == (what in (kind, strategy))


def gone(rank: int, world_size: int) -> tuple[bool, list[str]]:
    """A function made the model, and has returned before the script ends."""
    models = Models(Choice("hierarchical_bf16"), records=True)
    with watching(models):
        train("plain", rank)
        gc.collect()
        (record,) = models.trained
        was_gone = record.stats.get("steps") == STEPS
        models.end()
    assert record.recorded is not None
    return was_gone, lines_of(verdict_on(record.recorded))


def test_a_model_that_is_gone_is_judged_all_the_same() -> None:
    was_gone, lines = run(gone, 4, nodes=NODES)[0]
    assert was_gone
    text = " ".join(lines)
    assert "with hierarchical_bf16" in text
    assert "bfloat16" in text


def unrecorded(rank: int, world_size: int) -> bool:
    models = Models(Choice("flat"))
    with watching(models):
        train("plain", rank)
        models.end()
    return models.trained[0].recorded is None


def test_nothing_is_recorded_where_nobody_asks() -> None:
    assert run(unrecorded, 2) == [True, True]


def failing(rank: int, world_size: int) -> tuple[bool, list[str]]:
    """Whatever goes wrong while recordings are brought together, the training has ended well."""
    models = Models(Choice("flat"), records=True)
    with watching(models), heard() as said:
        train("plain", rank)
        (record,) = models.trained
        assert record.recording is not None
        record.recording._recorder = None  # type: ignore[assignment]
        models.end()
    models.close()
    return record.recorded is None, [line for _, line in said if "no verdict" in line]


def test_an_error_while_recordings_are_gathered_is_one_line_of_the_first_rank() -> None:
    (nothing, first), (nothing_either, other) = run(failing, 2)
    assert nothing
    assert nothing_either
    assert len(first) == 1
    assert first[0].startswith("commopt run: no verdict on Blocks: ")
    assert other == []


# ----------------------------------------------------------------------------------------- doctor --script

SCRIPT = f"""
import sys
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FEW, ENOUGH, MANY = 2, {LEAST_STEPS}, {MOST_STEPS + 9}

class Early(nn.Linear):
    pass

class Late(nn.Linear):
    pass

def train(steps, kind):
    ddp = DistributedDataParallel(kind(8, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    return ddp

def main(steps, kind=Early):
    train(steps, kind)

def failing(steps):
    ddp = train(steps, Early)
    try:
        raise ValueError("broken")
    finally:
        torch.distributed.destroy_process_group()

"""
SHORT = f"ended before a model of DistributedDataParallel had taken {LEAST_STEPS} steps"
ENDS = {
    "main(MANY)": "Early",
    "main(ENOUGH)": "Early",
    "sys.exit(main(ENOUGH))": "Early",
    "main(ENOUGH); torch.distributed.destroy_process_group()": "Early",
    "main(FEW); main(ENOUGH, Late); sys.exit(0)": "Late",
    "main(ENOUGH); main(FEW, Late)": "Early",
    "sys.exit(main(FEW))": SHORT,
    "sys.exit(0)": SHORT,
    "main(ENOUGH); sys.exit(3)": "SystemExit: 3",
    "failing(ENOUGH)": "ValueError: broken",
}


def recorded_script(rank: int, world_size: int, ending: str, folder: str) -> str:
    """Return the model that was recorded, or what was raised."""
    script = Path(folder, f"train{rank}.py")
    script.write_text(SCRIPT + ending)
    found = Found(Measurements(("here",), (world_size,)))
    try:
        record([str(script)], found, 60.0, lambda text: None)
    except ConfigurationError as error:
        return str(error)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    assert found.workload is not None
    assert found.measurements.training is not None
    assert found.measurements.training.step_ms > 0
    assert torch.distributed.is_initialized(), "links are measured after it"
    return found.workload.name


@pytest.mark.parametrize("ending", ENDS)
def test_a_script_is_recorded_however_it_ends(ending: str, tmp_path: Path) -> None:
    for outcome in run(recorded_script, 2, ending, str(tmp_path)):
        assert ENDS[ending] in outcome
