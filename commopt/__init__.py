# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training that stays fast on slow networks: with DDP, with FSDP2, and a standalone all_reduce."""

from typing import TYPE_CHECKING, Any

from commopt.aggregate import (
    AGGREGATORS,
    Adam,
    Aggregator,
    Auto,
    Compressed,
    Flat,
    Hierarchical,
    LocalSGD,
    Outer,
    PowerSGD,
)
from commopt.checkpoint_files import load_checkpoint, save_checkpoint
from commopt.compress import COMPRESSORS, DGC, Cast, Compressor, OneBit, Quantize
from commopt.errors import (
    CommoptError,
    ConfigurationError,
    LaneError,
    MismatchError,
    TransportError,
    UnsupportedTensorError,
)
from commopt.feedback import BufferContext, Feedback, Layout
from commopt.groups import WireBytes
from commopt.hooks import (
    PRESETS,
    Checkpointed,
    CommState,
    DistributedDataParallel,
    Gathered,
    HookState,
    Preset,
    attach,
    build_preset,
    hook,
    merged_state,
    rebuild,
)
from commopt.hooks.presets import (
    auto,
    dgc,
    diloco,
    flat,
    hierarchical,
    hierarchical_bf16,
    hierarchical_dgc,
    hierarchical_onebit,
    hierarchical_powersgd,
    hierarchical_quantized,
    onebit,
    onebit_local,
    powersgd,
    quantized,
)
from commopt.lanes import failure_of
from commopt.launcher import take_ranks
from commopt.schedule import Plan
from commopt.version import __version__

if TYPE_CHECKING:
    from commopt.collectives import Communicator, Work, all_reduce
    from commopt.cost import Links
    from commopt.server import ParameterServer
    from commopt.sharded import Weights
    from commopt.timeline import Report, Timeline

# Loaded when they are first used: no hook needs them.
_LATER = {
    "Communicator": "commopt.collectives",
    "Links": "commopt.cost",
    "ParameterServer": "commopt.server",
    "Report": "commopt.timeline",
    "Timeline": "commopt.timeline",
    "Weights": "commopt.sharded",
    "Work": "commopt.collectives",
    "all_reduce": "commopt.collectives",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = found = getattr(import_module(_LATER[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AGGREGATORS",
    "COMPRESSORS",
    "DGC",
    "PRESETS",
    "Adam",
    "Aggregator",
    "Auto",
    "BufferContext",
    "Cast",
    "Checkpointed",
    "CommState",
    "CommoptError",
    "Communicator",
    "Compressed",
    "Compressor",
    "ConfigurationError",
    "DistributedDataParallel",
    "Feedback",
    "Flat",
    "Gathered",
    "Hierarchical",
    "HookState",
    "LaneError",
    "Layout",
    "Links",
    "LocalSGD",
    "MismatchError",
    "OneBit",
    "Outer",
    "ParameterServer",
    "Plan",
    "PowerSGD",
    "Preset",
    "Quantize",
    "Report",
    "Timeline",
    "TransportError",
    "UnsupportedTensorError",
    "Weights",
    "WireBytes",
    "Work",
    "__version__",
    "all_reduce",
    "attach",
    "auto",
    "build_preset",
    "dgc",
    "diloco",
    "failure_of",
    "flat",
    "hierarchical",
    "hierarchical_bf16",
    "hierarchical_dgc",
    "hierarchical_onebit",
    "hierarchical_powersgd",
    "hierarchical_quantized",
    "hook",
    "load_checkpoint",
    "merged_state",
    "onebit",
    "onebit_local",
    "powersgd",
    "quantized",
    "rebuild",
    "save_checkpoint",
    "take_ranks",
]
