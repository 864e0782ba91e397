# SPDX-License-Identifier: Apache-2.0
"""What wire_bytes and stats promise is what the collectives carry, step by step, with matrices and with 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from commopt import WireBytes
from commopt.groups import Team
from tests.catalogue import run_on
from tests.feedback_training import STRATEGIES, Training
from tests.overheard import overheard

SETTLED = 4  # steps: then buckets change no more, and no residual moves to another rank
STEPS = 6  # one of each kind
ALONE = ["top 5%", "rank 2", "late rank 2"]
BETWEEN = ["inter 4 bits", "inter top 5%", "inter rank 2", "inter rank 1"]


@contextmanager
def counting() -> Iterator[list[WireBytes]]:
    """Record what every collective of this process sends."""
    sent: list[WireBytes] = []

    def listen(team: Team, primitive: str, nbytes: int, roots: list[int]) -> None:
        price: Callable[..., WireBytes] = getattr(team.wire, primitive)
        sent.append(price(nbytes, *roots))

    with overheard(listen):
        yield sent


def compare(rank: int, world_size: int, names: Sequence[str], dtype: str) -> list[str]:
    differences = []
    for name in names:
        with counting() as sent:
            training = Training(rank, world_size, STRATEGIES[name], getattr(torch, dtype))
            for step in range(STEPS):
                stats = training.comm.stats()
                sent.clear()
                training.step()
                if step < SETTLED:
                    continue
                later = training.comm.stats()
                promised = tuple(later[key] - stats[key] for key in ("intra_bytes", "inter_bytes"))
                counted = (sum(each.intra for each in sent), sum(each.inter for each in sent))
                if promised != counted:
                    differences.append(f"{name} in {dtype}, step {step}: promised {promised}, sent {counted}")
    return differences


@pytest.mark.parametrize(
    ("layout", "names", "dtype"),
    [
        ("3", ALONE, "bfloat16"),
        ("4", ["served top 5%"], "float32"),
        ("2x2", BETWEEN, "bfloat16"),
        ("2+1", BETWEEN[2:], "float32"),
    ],
)
def test_promised_bytes_are_sent(layout: str, names: Sequence[str], dtype: str) -> None:
    differences = [each for mine in run_on(layout, compare, names, dtype) for each in mine]
    assert not differences, "\n".join(differences)
