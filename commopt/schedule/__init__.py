# SPDX-License-Identifier: Apache-2.0
"""Which gradients travel together, and by which strategy: measured on live steps, decided on rank 0, followed by all.

Controller knows what averages DDP's buckets, and gives DDP those of a plan (reducer). Where plans are made it measures
steps (measure), the ranks meet (sync), and rank 0 decides (search, with planner and prices).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commopt.schedule.config import BucketConfig
from commopt.schedule.controller import Controller
from commopt.schedule.decision import Calendar, Decision, Tried, Tuned
from commopt.schedule.layouts import Layouts, require_same_parameters
from commopt.schedule.plan import Plan, Unit, simulate

if TYPE_CHECKING:
    from commopt.schedule.explanation import explain
    from commopt.schedule.planner import SPARE, best_plan
    from commopt.schedule.prices import Costs, PriceTable
    from commopt.schedule.window import Window

# Loaded when they are first used: most trainings leave DDP's buckets alone.
_LATER = {
    "SPARE": "planner",
    "Costs": "prices",
    "PriceTable": "prices",
    "Window": "window",
    "best_plan": "planner",
    "explain": "explanation",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


__all__ = [
    "SPARE",
    "BucketConfig",
    "Calendar",
    "Controller",
    "Costs",
    "Decision",
    "Layouts",
    "Plan",
    "PriceTable",
    "Tried",
    "Tuned",
    "Unit",
    "Window",
    "best_plan",
    "explain",
    "require_same_parameters",
    "simulate",
]
