# SPDX-License-Identifier: Apache-2.0
"""Where communication runs: one lane per device and process, shared by every hook and every standalone call."""

from commopt.lanes.client import Agreement, LaneClient
from commopt.lanes.failure import failure_of
from commopt.lanes.lane import Pending, Task, WorkerLane
from commopt.lanes.registry import lane_for, require_healthy

__all__ = [
    "Agreement",
    "LaneClient",
    "Pending",
    "Task",
    "WorkerLane",
    "failure_of",
    "lane_for",
    "require_healthy",
]
