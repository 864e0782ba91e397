# SPDX-License-Identifier: Apache-2.0
"""The recordings of all ranks on one clock, with report, page and Perfetto trace. Loaded when first used."""

from commopt.timeline.analysis import Analysis, BucketTimes, MessageTimes, RankTimes, StepBreakdown, Straggler, analyse
from commopt.timeline.perfetto import trace, write_trace
from commopt.timeline.recordings import Offsets, Timeline, gather, measure_offsets
from commopt.timeline.text import Report, Subject, TrafficOutside, report

__all__ = [
    "Analysis",
    "BucketTimes",
    "MessageTimes",
    "Offsets",
    "RankTimes",
    "Report",
    "StepBreakdown",
    "Straggler",
    "Subject",
    "Timeline",
    "TrafficOutside",
    "analyse",
    "gather",
    "measure_offsets",
    "report",
    "trace",
    "write_trace",
]
