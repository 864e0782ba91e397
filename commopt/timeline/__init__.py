"""The recordings of all ranks on one clock: report, Perfetto trace and picture."""

from commopt.timeline.analysis import analyse
from commopt.timeline.clocks import Offsets, measure_offsets
from commopt.timeline.findings import Analysis, BucketTimes, MessageTimes, RankTimes, StepTimes
from commopt.timeline.gantt import draw
from commopt.timeline.gather import Timeline, gather
from commopt.timeline.lateness import Straggler
from commopt.timeline.report import Report, TrafficOutside, report
from commopt.timeline.trace import trace, write_trace

__all__ = [
    "Analysis",
    "BucketTimes",
    "MessageTimes",
    "Offsets",
    "RankTimes",
    "Report",
    "StepTimes",
    "Straggler",
    "Timeline",
    "TrafficOutside",
    "analyse",
    "draw",
    "gather",
    "measure_offsets",
    "report",
    "trace",
    "write_trace",
]
