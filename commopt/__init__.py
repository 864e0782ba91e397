"""Data-parallel training that stays fast on slow networks: DDP communication hooks and a standalone allreduce."""

import warnings

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
from commopt.plan import Plan
from commopt.timeline import Report, Timeline
from commopt.version import __version__


def __getattr__(name: str) -> object:
    if name == "PeriodicAverage":  # what LocalSGD was called at first
        warnings.warn("commopt.PeriodicAverage is now commopt.LocalSGD", DeprecationWarning, stacklevel=2)
        return LocalSGD
    raise AttributeError(f"module 'commopt' has no attribute {name!r}")


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
