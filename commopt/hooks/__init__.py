"""DDP communication hooks: presets, the state of a registration, and how to attach them.

A bucket's way: ddp (attach) registers one of presets with a state (HookState, what users hold); DDP calls it, and path
puts the bucket on the lane. Beside it: registration (what is remembered), checkpoint, insight (timeline and report),
local_sgd (averages of parameters), checks (what is refused or warned of).
"""

from commopt.hooks.checkpoint import Checkpointed, merged_state
from commopt.hooks.ddp import DistributedDataParallel, attach
from commopt.hooks.presets import (
    PRESETS,
    Preset,
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
    onebit,
    powersgd,
    quantized,
)
from commopt.hooks.state import HookState

__all__ = [
    "PRESETS",
    "Checkpointed",
    "DistributedDataParallel",
    "HookState",
    "Preset",
    "attach",
    "auto",
    "build_preset",
    "dgc",
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
