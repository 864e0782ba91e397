"""Which gradients travel together: plans, the exact planner, and when to plan again."""

from commopt.plan.adapt import Adaptation
from commopt.plan.budgeted import best_plan_within
from commopt.plan.calendar import Calendar, Decision
from commopt.plan.evidence import Estimate
from commopt.plan.measured import Measured
from commopt.plan.order import first_needed_first, prioritized
from commopt.plan.plan import Bucket, Plan, Prediction, Unit
from commopt.plan.planner import best_plan
from commopt.plan.prices import Costs, Key, PriceTable
from commopt.plan.schedule import simulate
from commopt.plan.tuned import Tried, Tuned
from commopt.plan.window import Faithfulness, Observed, Window

__all__ = [
    "Adaptation",
    "Bucket",
    "Calendar",
    "Costs",
    "Decision",
    "Estimate",
    "Faithfulness",
    "Key",
    "Measured",
    "Observed",
    "Plan",
    "Prediction",
    "PriceTable",
    "Tried",
    "Tuned",
    "Unit",
    "Window",
    "best_plan",
    "best_plan_within",
    "first_needed_first",
    "prioritized",
    "simulate",
]
