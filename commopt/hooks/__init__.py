# SPDX-License-Identifier: Apache-2.0
"""DDP communication hooks: presets, the state of a registration, and how to attach them.

A bucket's way: ddp (attach) registers one of presets with a state (HookState, what users hold); DDP calls it, and
buckets (DDPRegistration) puts the bucket on the lane, where reduction averages it. For any model: registration (what is
remembered), comm_state (what users hold of it), checkpoint, insight (timeline and report), log (figures for loggers).
Below both: local_sgd (rounds of parameters, by parcels), checks (what is refused or warned of).
"""

from commopt.hooks.checkpoint import merged_state
from commopt.hooks.comm_state import Checkpointed, CommState, Gathered
from commopt.hooks.ddp import DistributedDataParallel, attach
from commopt.hooks.presets import PRESETS, Preset, build_preset, hook
from commopt.hooks.state import HookState

__all__ = [
    "PRESETS",
    "Checkpointed",
    "CommState",
    "DistributedDataParallel",
    "Gathered",
    "HookState",
    "Preset",
    "attach",
    "build_preset",
    "hook",
    "merged_state",
]
