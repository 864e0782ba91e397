"""DDP communication hooks: presets, the state of a registration, and how to attach them."""

from commopt.hooks.checkpointed import Checkpointed
from commopt.hooks.ddp import DistributedDataParallel, attach
from commopt.hooks.presets import (
    PRESETS,
    Preset,
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
    "onebit",
    "powersgd",
    "quantized",
]
