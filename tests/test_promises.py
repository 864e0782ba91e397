# SPDX-License-Identifier: Apache-2.0
"""Every promise of docs/design.md is held by a test of `make test`, for a strategy of every kind."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from tests.hook_training import SMALL_BUCKET, Tower, batch_of, loss_of, seeded
from tests.promises import KINDS, PROMISES, WITHOUT, gate, promised
from tests.ranks import run
from tests.selection import CHOSEN, IN_GATE
from tests.speed import limit

ROOT = Path(__file__).parents[1]
WITHIN_S = limit(20.0)


def test_the_table_is_that_of_the_page() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    table = page[page.index("## Promises") :].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == list(PROMISES)
    files = {name for row in rows for name in re.findall(r"`(test_\w+)`", row[-1])}
    assert files
    assert {name for name in files if not (ROOT / "tests" / f"{name}.py").exists()} == set()


@pytest.mark.parametrize("promise", PROMISES)
def test_every_kind_has_a_test_or_a_reason_why_not(promise: str) -> None:
    held, without = PROMISES[promise], WITHOUT.get(promise, {})
    assert held.keys() | without.keys() == KINDS.keys()
    assert not held.keys() & without.keys()
    assert all(held.values())


def test_what_the_readme_promises_is_in_the_gate(request: pytest.FixtureRequest) -> None:
    """Looks at the files that this run has collected, as the next test does."""
    chosen, added = request.config.stash[CHOSEN], request.config.stash[IN_GATE]
    files = {test.partition("::")[0] for test in chosen | added}
    names = {name for test in chosen | added for name in (test, test.partition("[")[0])}
    assert {test for test in gate() if test.partition("::")[0] in files} - names == set()
    assert {test for test in gate() if not (ROOT / "tests" / test.partition("::")[0]).exists()} == set()


def test_all_of_them_run_in_make_test(request: pytest.FixtureRequest) -> None:
    """Looks at the files that this run has collected: with the whole suite, at all."""
    chosen: set[str] = request.config.stash[CHOSEN]
    files = {test.partition("::")[0] for test in chosen}
    names = chosen | {test.partition("[")[0] for test in chosen}
    assert {test for test in promised() if test.partition("::")[0] in files} - names == set()
    missing = {test.partition("::")[0] for test in promised()} - files
    assert {file for file in missing if not (ROOT / "tests" / file).exists()} == set()


def lose_a_rank(rank: int, world_size: int, preset: str) -> tuple[str, float]:
    """Train; in step 3 rank 1 dies. Return what this rank hears of it, and after how long."""
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    state = commopt.attach(ddp, preset or commopt.LocalSGD(period=1))
    started = time.monotonic()
    try:
        for step in range(100):
            if rank == 1 and step == 3:  # DDP makes its buckets after step 0, over its own group
                os.kill(os.getpid(), signal.SIGKILL)
            loss_of(ddp, batch_of(rank, step)).backward()
            ddp.zero_grad()
        state.average_parameters()
    except commopt.LaneError as error:
        return str(error), time.monotonic() - started
    return "no error", time.monotonic() - started


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_is_an_error_on_all_others(kind: str) -> None:
    first, _, third = run(lose_a_rank, 3, KINDS[kind], nodes=(2, 1), dies=(1,), fresh=True)
    for message, seconds in (first, third):
        assert "from rank 1 " in message, message
        assert seconds < WITHIN_S
