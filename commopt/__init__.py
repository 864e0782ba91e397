"""Data-parallel training that stays fast on slow networks: DDP communication hooks and a standalone allreduce."""

from commopt.aggregate import AGGREGATORS, Aggregator, Compressed, Flat, Hierarchical
from commopt.collectives import Communicator, Work, all_reduce
from commopt.compress import COMPRESSORS, Cast, Compressor, OneBit, Quantize
from commopt.errors import CommoptError, ConfigurationError, LaneError, MismatchError, UnsupportedTensorError
from commopt.feedback import Account, Feedback, Layout
from commopt.groups import WireBytes
from commopt.hooks import (
    PRESETS,
    Checkpointed,
    DistributedDataParallel,
    HookState,
    Preset,
    attach,
    build_preset,
    flat,
    hierarchical,
    hierarchical_bf16,
    hierarchical_onebit,
    hierarchical_quantized,
    hook,
    onebit,
    quantized,
)
from commopt.version import __version__

__all__ = [
    "AGGREGATORS",
    "COMPRESSORS",
    "PRESETS",
    "Account",
    "Aggregator",
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
    "MismatchError",
    "OneBit",
    "Preset",
    "Quantize",
    "UnsupportedTensorError",
    "WireBytes",
    "Work",
    "__version__",
    "all_reduce",
    "attach",
    "build_preset",
    "flat",
    "hierarchical",
    "hierarchical_bf16",
    "hierarchical_onebit",
    "hierarchical_quantized",
    "hook",
    "onebit",
    "quantized",
]
