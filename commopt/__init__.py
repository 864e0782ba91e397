"""Data-parallel training that stays fast on slow networks: DDP communication hooks and a standalone allreduce."""

import warnings
from typing import TYPE_CHECKING, Any

from commopt.aggregate import AGGREGATORS, Aggregator, Auto, Compressed, Flat, Hierarchical, LocalSGD, PowerSGD
from commopt.collectives import Communicator, Work, all_reduce
from commopt.compress import COMPRESSORS, DGC, Cast, Compressor, OneBit, Quantize
from commopt.cost import Links
from commopt.errors import (
    CommoptError,
    ConfigurationError,
    LaneError,
    MismatchError,
    TransportError,
    UnsupportedTensorError,
)
from commopt.feedback import Account, Feedback, Layout
from commopt.groups import NcclOptions, WireBytes
from commopt.hooks import (
    PRESETS,
    Checkpointed,
    DistributedDataParallel,
    HookState,
    Preset,
    attach,
    auto,
    build_preset,
    dgc,
    flat,
    hierarchical,
    hierarchical_bf16,
    hierarchical_dgc,
    hierarchical_onebit,
    hierarchical_powersgd,
    hierarchical_quantized,
    hook,
    merged_state,
    onebit,
    powersgd,
    quantized,
)
from commopt.lanes.uncaught import failure_of
from commopt.schedule import Plan
from commopt.version import __version__

if TYPE_CHECKING:
    from commopt.timeline import Report, Timeline

__all__ = [
    "AGGREGATORS",
    "COMPRESSORS",
    "DGC",
    "PRESETS",
    "Account",
    "Aggregator",
    "Auto",
    "Cast",
    "Checkpointed",
    "CommoptError",
    "Communicator",
    "Compressed",
    "Compressor",
    "ConfigurationError",
    "DistributedDataParallel",
    "Feedback",
    "Flat",
    "Hierarchical",
    "HookState",
    "LaneError",
    "Layout",
    "Links",
    "LocalSGD",
    "MismatchError",
    "NcclOptions",
    "OneBit",
    "Plan",
    "PowerSGD",
    "Preset",
    "Quantize",
    "Report",
    "Timeline",
    "TransportError",
    "UnsupportedTensorError",
    "WireBytes",
    "Work",
    "__version__",
    "all_reduce",
    "attach",
    "auto",
    "build_preset",
    "dgc",
    "failure_of",
    "flat",
    "hierarchical",
    "hierarchical_bf16",
    "hierarchical_dgc",
    "hierarchical_onebit",
    "hierarchical_powersgd",
    "hierarchical_quantized",
    "hook",
    "merged_state",
    "onebit",
    "powersgd",
    "quantized",
]


_FORMERLY = {"PeriodicAverage": LocalSGD}


def __getattr__(name: str) -> Any:
    """Load the timeline when somebody asks for it; warn of names that are no more."""
    if name in ("Report", "Timeline"):
        from commopt import timeline

        return getattr(timeline, name)
    if name in _FORMERLY:
        now = _FORMERLY[name]
        warnings.warn(f"commopt.{name} is now commopt.{now.__name__}", DeprecationWarning, stacklevel=2)
        return now
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
