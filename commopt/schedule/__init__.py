# SPDX-License-Identifier: Apache-2.0
"""Which gradients travel together, and by which strategy: measured on live steps, decided on rank 0, followed by all.

A Controller follows a Plan, and gives DDP its buckets (reducer). Where plans are made, it measures a Window of steps
(measure). At the end of each the ranks synchronise (sync): their times become a Measurement, and a Search on rank 0
compares the Candidates, with the help of planner and Costs, and makes a Decision.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commopt.schedule.controller import Controller
from commopt.schedule.decision import Decision, Outcome, Tuned, Window
from commopt.schedule.measurement import Measurement
from commopt.schedule.plan import Plan, Unit
from commopt.schedule.simulation import simulate

if TYPE_CHECKING:
    from commopt.schedule.costs import Costs
    from commopt.schedule.explanation import explain
    from commopt.schedule.planner import SPARE, best_plan

# Loaded when they are first used: most trainings leave DDP's buckets alone.
_LATER = {
    "SPARE": "planner",
    "Costs": "costs",
    "best_plan": "planner",
    "explain": "explanation",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


__all__ = [
    "SPARE",
    "Controller",
    "Costs",
    "Decision",
    "Measurement",
    "Outcome",
    "Plan",
    "Tuned",
    "Unit",
    "Window",
    "best_plan",
    "explain",
    "simulate",
]
