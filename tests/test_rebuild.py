# SPDX-License-Identifier: Apache-2.0
"""Survivors of a killed rank go on in a new process group, with what they had not sent yet."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from tests.hook_training import SMALL_BUCKET, Tower, digest_of, seeded
from tests.ranks import run
from tests.speed import limit

WITHIN_S = limit(5.0)
LOST_AT = 6  # steps, with checks of the replicas after 2 and 4
WIDTH = 64


class Heard(logging.Handler):
    """Keeps what commopt warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("commopt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def batch_of(rank: int, step: int) -> Tensor:
    """Return inputs, which are to be reproduced."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, data: int, first: int, last: int) -> float:
    """Train with the data of one of the first world's ranks; return the last loss."""
    loss = torch.zeros(())
    for step in range(first, last):
        x = batch_of(data, step)
        loss = (ddp(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def init_anew(folder: str, rank: int, survivors: Sequence[int]) -> None:
    """Leave the old world, whose dead no longer answer, and make one of the survivors."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/next", len(survivors))
    dist.init_process_group("gloo", store=store, rank=survivors.index(rank), world_size=len(survivors))


def kept(state: Any) -> dict[str, Tensor]:
    """Return the sum of a rank's residuals by parameter, float64."""
    sums: dict[str, Tensor] = {}
    for role, pieces in state.state_dict()["residuals"].items():
        if any(name in role for name in ("exp_avg", "anchor", "momentum")):
            continue
        for key, values in pieces.items():
            name, _, span = key.rpartition("[")
            begin, end = map(int, span[:-1].split(":"))
            numel = state._registration.numels[name]
            sums.setdefault(name, torch.zeros(numel, dtype=torch.float64))[begin:end] += values.double()
    return sums


@dataclass
class Gone:
    """What a survivor found. before, after: its residuals."""

    error: str
    seconds: float
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    steps: tuple[int, int]
    digest: str
    losses: tuple[float, float]
    heard: list[str]
    cluster: str


def lose_some(rank: int, world_size: int, folder: str, victims: Sequence[int], choice: Any, options: Any) -> Gone:
    """Train, lose ranks in the middle of a backward, go on with the others."""
    heard, module = Heard(), seeded(Tower)
    adam = getattr(choice, "adam", None)
    ddp = TorchDDP(module, **SMALL_BUCKET)
    state = commopt.attach(ddp, choice, check_every=2, **options)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), 0.2, momentum=0.9)
    if state.aggregator is not None and state.aggregator.adam is not None:
        optimizer = state.optimizer(module.parameters(), 0.01)
    first_loss = train(ddp, optimizer, rank, 0, LOST_AT)
    if rank in victims:
        module.layers[2].weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    error = ""
    try:
        train(ddp, optimizer, rank, LOST_AT, LOST_AT + 50)
    except Exception as failure:
        error = str(failure)
    begun = time.monotonic()
    before = kept(state)
    survivors = [each for each in range(world_size) if each not in victims]
    init_anew(folder, rank, survivors)
    ddp = TorchDDP(module, init_sync=not isinstance(state.aggregator, commopt.LocalSGD), **SMALL_BUCKET)
    state = commopt.rebuild(state, ddp)
    steps, after = state.stats()["steps"], kept(state)
    train(ddp, optimizer, rank, steps, steps + 1)
    seconds = time.monotonic() - begun
    last_loss = train(ddp, optimizer, rank, steps + 1, steps + 12)
    state.average_parameters()
    dist.barrier()
    end = state.stats()["steps"]
    return Gone(
        error, seconds, before, after, (steps, end), digest_of(module), (first_loss, last_loss), heard.texts, str(state.cluster)
    )


def total(each: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = {name for sums in each for name in sums}
    return {name: sum((sums[name] for sums in each if name in sums), torch.zeros((), dtype=torch.float64)) for name in names}


def check(results: Sequence[Any], victims: Sequence[int], residuals: bool = True) -> list[Gone]:
    survivors = [each for rank, each in enumerate(results) if rank not in victims]
    for each in survivors:
        assert f"rank {victims[0]}" in each.error
        assert each.seconds < WITHIN_S
        assert each.steps == (LOST_AT, LOST_AT + 12)
        assert each.losses[1] < each.losses[0]
    assert len({each.digest for each in survivors}) == 1
    before, after = total([each.before for each in survivors]), total([each.after for each in survivors])
    assert before.keys() == after.keys()
    assert bool(before) == residuals
    for name, values in before.items():
        torch.testing.assert_close(after[name], values, rtol=1e-6, atol=1e-9)
    return survivors


ADAM = commopt.Hierarchical(commopt.Compressed(commopt.OneBit(64), adam=commopt.Adam()))
FLAT_ADAM = commopt.Compressed(commopt.OneBit(64), adam=commopt.Adam())

STRATEGIES: dict[str, Any] = {
    "flat": "flat",
    "8 bits": "quantized:bits=8",
    "4 bits": "quantized:bits=4",
    "one bit": "onebit",
    "dgc": "dgc",
    "powersgd": "powersgd:start_step=0",
    "adam": FLAT_ADAM,
    "hierarchical": "hierarchical",
    "hierarchical 4 bits": "hierarchical_quantized:bits=4",
    "hierarchical one bit": "hierarchical_onebit",
    "hierarchical dgc": "hierarchical_dgc",
    "hierarchical powersgd": "hierarchical_powersgd:start_step=0",
    "hierarchical adam": ADAM,
    "auto": "auto",
}
# Where nothing is left out, or what was is not there after a few steps.
WITHOUT_RESIDUALS = ("flat", "hierarchical", "auto")
QUICK = ("8 bits", "hierarchical adam", "hierarchical powersgd")


@pytest.mark.parametrize("victims", [(3,), (2, 3), (0,)], ids=["a rank", "a node", "the first rank"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_survivors_go_on(name: str, victims: tuple[int, ...], tmp_path: Path) -> None:
    nodes = (2, 2) if name.startswith("hierarchical") else None
    env = {"COMMOPT_PLAN": None} if name == "auto" else {}
    results = run(
        lose_some, 4, str(tmp_path), victims, STRATEGIES[name], {}, nodes=nodes, dies=victims, fresh=True, env=env
    )
    survivors = check(results, victims, residuals=name not in WITHOUT_RESIDUALS)
    print(survivors[0].heard, survivors[0].cluster)
