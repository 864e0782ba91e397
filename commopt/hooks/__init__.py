"""DDP communication hooks: presets, the state of a registration, and how to attach them.

A bucket's way: ddp (attach) registers a preset with a state (HookState, what users hold); DDP calls preset, which asks
registration (what is remembered), which puts messages on the lane through sending. Beside it: saving (checkpoints),
insight (timeline and report), periodic (averages of parameters), misuse and gradients (what is refused or warned of).
"""

from commopt.hooks.checkpointed import Checkpointed
from commopt.hooks.ddp import DistributedDataParallel, attach
from commopt.hooks.preset import Preset, hook
from commopt.hooks.presets import (
    PRESETS,
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
    onebit,
    powersgd,
    quantized,
)
from commopt.hooks.saving import merged_state
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
