"""Where communication runs: one lane per device and process, shared by every hook and every standalone call."""

from commopt.lanes.failure import failure_of
from commopt.lanes.lane import Lane, Operation, Work, WorkerLane
from commopt.lanes.registry import LaneClient, finish, lane_for, require_healthy
from commopt.lanes.stream import StreamLane

__all__ = [
    "Lane",
    "LaneClient",
    "Operation",
    "StreamLane",
    "Work",
    "WorkerLane",
    "failure_of",
    "finish",
    "lane_for",
    "require_healthy",
]
