"""A planner that has another plan at every meeting, for trainings in which plans change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import pytest
from torch.distributed import Reducer
from torch.nn.parallel import distributed

import commopt
from commopt.bucketing.calibration import LARGEST_NBYTES
from commopt.plan import Bucket, Calendar, Costs, Decision, Plan, Window
from tests.hook_training import Tower

needs_caps = pytest.mark.skipif(
    not hasattr(distributed, "_BucketCapacityConfig") or not hasattr(Reducer, "_update_process_group"),
    reason="this torch has no caps for single buckets",
)


class Changing:
    """Cuts the parameters in two, elsewhere at every meeting, three steps apart.

    shown: the units of the last meeting. costs: those it was made with.
    """

    first = Calendar(2, 3)
    shown: tuple[tuple[str, ...], ...] = ()
    costs: Costs

    def __init__(self, costs: Costs, max_bytes: int, needed_first: bool) -> None:
        assert max_bytes == LARGEST_NBYTES
        Changing.shown, Changing.costs = (), costs

    def decide(self, window: Window, step: int) -> Decision:
        Changing.shown = tuple(unit.names for unit in window.units)
        sizes = {name: unit.nbytes // len(unit.names) for unit in window.units for name in unit.names}
        names = list(sizes)
        assert len(names) == sum(len(unit.names) for unit in window.units), "a parameter is in two units"
        cut = 1 + step % (len(names) - 1)
        parts = (names[:cut], names[cut:])
        buckets = (Bucket(tuple(part), sum(map(sizes.__getitem__, part)), repr(commopt.Flat())) for part in parts)
        return Decision(Plan(tuple(buckets)), Calendar(step + 2, step + 3), f"cut at {cut}")


def plan_of(*parts: list[str], strategy: str = repr(commopt.Flat())) -> Plan:
    """Return a plan for a Tower."""
    sizes = {name: parameter.nbytes for name, parameter in Tower().named_parameters()}
    return Plan(tuple(Bucket(tuple(part), sum(map(sizes.__getitem__, part)), strategy) for part in parts))


@contextmanager
def changing(kind: type = Changing) -> Iterator[None]:
    """Let `kind` decide on rank 0, in registrations made meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("methods", "planning"):
            patch.setattr(import_module(f"commopt.bucketing.{name}"), "Adaptation", kind)
        yield
