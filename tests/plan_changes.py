# SPDX-License-Identifier: Apache-2.0
"""A search that has another plan at every synchronisation point, for trainings in which plans change."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch.distributed import Reducer
from torch.nn.parallel import distributed

import commopt
from commopt.schedule import Costs, Decision, Measurement, Plan, Window, controller, sync
from commopt.schedule.calibration import LARGEST_NBYTES
from tests.hook_training import Tower

needs_caps = pytest.mark.skipif(
    not hasattr(distributed, "_BucketCapacityConfig") or not hasattr(Reducer, "_update_process_group"),
    reason="this torch has no caps for single buckets",
)


class Changing:
    """Cuts the parameters in two, elsewhere at every synchronisation point, three steps apart.

    shown: the units of the last one. costs: those it was made with.
    """

    first = Window(2, 3)
    shown: tuple[tuple[str, ...], ...] = ()
    costs: Costs

    def __init__(self, options: Sequence[Any], costs: Costs, max_bytes: int, *_: object, **__: object) -> None:
        assert max_bytes == LARGEST_NBYTES
        Changing.shown, Changing.costs = (), costs

    def decide(self, window: Measurement, step: int) -> Decision:
        Changing.shown = tuple(unit.names for unit in window.units)
        names = [name for unit in window.units for name in unit.names]
        assert len(names) == len(set(names)), "a parameter is in two units"
        cut = 1 + step % (len(names) - 1)
        plan = Plan((tuple(names[:cut]), tuple(names[cut:])), repr(commopt.Flat()))
        return Decision(plan, Window(step + 2, step + 3), f"cut at {cut}")


def plan_of(*parts: list[str], strategy: str = repr(commopt.Flat())) -> Plan:
    """Return a plan for a Tower."""
    return Plan(tuple(map(tuple, parts)), strategy)


def tower_names() -> list[str]:
    """The parameters of a Tower in about the order of backward."""
    return [name for name, _ in reversed(list(Tower().named_parameters()))]


@contextmanager
def changing(kind: Any = Changing) -> Iterator[None]:
    """Let `kind` decide on rank 0, in registrations made meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync, "Search", kind)
        patch.setattr(controller, "FIRST_LOOK", kind.first)
        patch.setattr(controller, "FIRST_WINDOW", kind.first)
        yield


@contextmanager
def heard(level: int = logging.WARNING) -> Iterator[list[tuple[str, str]]]:
    """Take down what commopt logs meanwhile: levels and messages."""
    said: list[tuple[str, str]] = []
    handler, logger = logging.Handler(level), logging.getLogger("commopt")
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    yield said
    logger.removeHandler(handler)
    logger.setLevel(before)
