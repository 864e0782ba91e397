"""The recordings of all ranks on one clock: report, Perfetto trace and picture. Each part is loaded when it is used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commopt.timeline.analysis import (
        Analysis,
        BucketTimes,
        MessageTimes,
        RankTimes,
        StepTimes,
        Straggler,
        analyse,
    )
    from commopt.timeline.gantt import draw
    from commopt.timeline.perfetto import trace, write_trace
    from commopt.timeline.recordings import Offsets, Timeline, gather, measure_offsets
    from commopt.timeline.text import Report, TrafficOutside, report

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

_HOME = {
    "draw": "gantt",
    "Offsets": "recordings",
    "Timeline": "recordings",
    "gather": "recordings",
    "measure_offsets": "recordings",
    "Report": "text",
    "TrafficOutside": "text",
    "report": "text",
    "trace": "perfetto",
    "write_trace": "perfetto",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOME.get(name, 'analysis')}"), name)
    globals()[name] = found
    return found
