"""Which gradients travel together, and by which strategy: measured on live steps, decided on rank 0, followed by all.

Controller knows what averages DDP's buckets, and gives DDP those of a plan (reducer). Where plans are made it measures
steps (measure), the ranks meet (sync), and rank 0 decides (search, with planner and prices).
"""

from commopt.schedule.config import BucketConfig
from commopt.schedule.controller import Controller
from commopt.schedule.decision import Calendar, Decision, Tried, Tuned, explain
from commopt.schedule.layouts import Layouts, require_same_parameters
from commopt.schedule.nccl import tuner_rows, write_csv
from commopt.schedule.plan import Plan, Prediction, Unit, simulate
from commopt.schedule.planner import SPARE, best_plan
from commopt.schedule.prices import Costs, PriceTable
from commopt.schedule.sync import Meeting
from commopt.schedule.window import GradientQuality, Window

__all__ = [
    "SPARE",
    "BucketConfig",
    "Calendar",
    "Controller",
    "Costs",
    "Decision",
    "GradientQuality",
    "Layouts",
    "Meeting",
    "Plan",
    "Prediction",
    "PriceTable",
    "Tried",
    "Tuned",
    "Unit",
    "Window",
    "best_plan",
    "explain",
    "require_same_parameters",
    "simulate",
    "tuner_rows",
    "write_csv",
]
