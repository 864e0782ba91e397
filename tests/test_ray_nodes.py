# SPDX-License-Identifier: Apache-2.0
"""examples/train_ray.py on a real Ray of two nodes: one is lost, the world shrinks and grows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.ray import EmulatedRay, last_metrics
from tests.speed import limit

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture(scope="module")
def ray() -> Iterator[EmulatedRay]:
    if missing := EmulatedRay.missing():
        pytest.skip(missing)
    with EmulatedRay() as running:
        yield running


class Training:
    """A run of the example, or of a script that does the same and more."""

    def __init__(self, ray: EmulatedRay, name: str, *options: str, script: Path | None = None) -> None:
        self.folder, self._output = ray.folder / name, ray.folder / f"{name}.out"
        words = ["--name", name, "--every", "10", *options]
        self.process = ray.start(ray.train(*words, **({} if script is None else {"script": script})), self._output)

    def said(self) -> str:
        return self._output.read_text()

    def wait_for(self, what: str, condition: Callable[[], bool], timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + limit(timeout_s)
        while not condition():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, f"no {what}: {self.said()}"
            time.sleep(0.1)

    def has_checkpoint(self, step: int) -> bool:
        """Whether Ray has taken note of a checkpoint of this step or a later one."""
        known = self.folder / "checkpoint_manager_snapshot.json"
        if not known.exists():
            return False
        noted = re.search(r'"latest_checkpoint_result":.*?"step": ?(\d+)', known.read_text())
        return noted is not None and int(noted[1]) >= step

    def metrics(self) -> dict[str, Any]:
        """Wait for the end and return the last metrics."""
        assert self.process.wait(limit(400)) == 0, self.said()
        return last_metrics(self.said().splitlines())

    def checkpoint(self, step: int) -> Path:
        """Return the file of the checkpoint that was taken after so many steps."""
        files = self.folder.glob("checkpoint_*/training.pt")
        return next(each for each in files if torch.load(each, weights_only=True)["step"] == step)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


@pytest.fixture
def started(ray: EmulatedRay) -> Iterator[Callable[..., Training]]:
    trainings: list[Training] = []

    def start(name: str, *options: str, **script: Path) -> Training:
        trainings.append(Training(ray, name, *options, **script))
        return trainings[-1]

    yield start
    for training in trainings:
        training.stop()


def test_a_lost_node_that_comes_back_changes_no_bit(ray: EmulatedRay, started: Callable[..., Training]) -> None:
    """Its two workers are gone without a word. Ray waits until it has four again."""
    flags = ["--workers", "4", "--steps", "80", "--strategy", "hierarchical_quantized:bits=2"]
    undisturbed = started("undisturbed", *flags).metrics()
    training = started("lost", *flags)
    training.wait_for("checkpoint", lambda: training.has_checkpoint(20))
    ray.lose(1)
    ray.wait_for(nodes=1)
    ray.bring_back(1)
    ended = training.metrics()
    assert (undisturbed["first"], undisturbed["step"], ended["step"]) == (0, 80, 80)
    assert ended["first"] in range(10, 80, 10)  # it was started again, from a checkpoint
    assert (undisturbed["workers"], ended["workers"]) == (4, 4)
    assert ended["bits"] == undisturbed["bits"]


RESIZED = """
import torch, torch.distributed as dist
import commopt
from examples import train_ray

def train_worker(config):
    whole = train_ray.restore
    def restore(model, optimizer, comm):
        first = whole(model, optimizer, comm)
        loaded = commopt.Gathered(comm).state_dict()
        if dist.get_rank() == 0:
            kept = {"comm": loaded, "model": model.module.state_dict()}
            torch.save(kept, f"{config['storage']}/from-{first}-with-{dist.get_world_size()}.pt")
        return first
    train_ray.restore = restore
    train_ray.train_worker(config)

train_ray.train_worker = train_worker
train_ray.main()
"""


def test_a_world_shrinks_and_grows_with_its_nodes(ray: EmulatedRay, started: Callable[..., Training]) -> None:
    """Workers that go on with another number have the residuals of those before, not one lost."""
    script = ray.folder / "resized.py"
    script.write_text(RESIZED)
    flags = ["--workers", "2-4", "--look", "5", "--steps", "1000000"]
    # Between all ranks: two workers on one node have residuals, too.
    training = started("resized", *flags, "--strategy", "quantized:bits=2", script=script)

    def begun() -> list[tuple[int, int]]:
        """Return the first step and the number of workers of each start."""
        names = (re.fullmatch(r"from-(\d+)-with-(\d+)\.pt", each.name) for each in ray.folder.iterdir())
        return sorted((int(name[1]), int(name[2])) for name in names if name)

    training.wait_for("checkpoint", lambda: training.has_checkpoint(20))
    ray.lose(1)
    training.wait_for("world of two", lambda: begun()[-1][1] == 2)
    shrunk = begun()[-1][0]
    training.wait_for("checkpoint of two", lambda: training.has_checkpoint(shrunk + 20))
    ray.bring_back(1)
    training.wait_for("world of four", lambda: begun()[-1][1] == 4)
    grown = begun()[-1][0]
    training.wait_for("checkpoint of four", lambda: training.has_checkpoint(grown + 20))
    assert begun()[0] == (0, 4)
    assert 20 <= shrunk < grown
    for first, workers in ((shrunk, 2), (grown, 4)):
        saved = torch.load(training.checkpoint(first), weights_only=True)
        loaded = torch.load(ray.folder / f"from-{first}-with-{workers}.pt", weights_only=True)
        before, after = residuals_in(saved), residuals_in(loaded)
        assert max(float(values.abs().max()) for values in before.values()) > 1e-6
        for name, values in before.items():
            torch.testing.assert_close(after[name], values, rtol=1e-5, atol=1e-7)


def residuals_in(saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the sum of all workers' residuals, by parameter."""
    sums = {name: torch.zeros(each.numel(), dtype=torch.float64) for name, each in saved["model"].items()}
    for rank in saved["comm"]["ranks"]:
        for pieces in rank["residuals"].values():
            for key, values in pieces.items():
                name, _, span = key.rpartition("[")
                begin, end = map(int, span.rstrip("]").split(":"))
                sums[name][begin:end] += values.double()
    return sums
