# SPDX-License-Identifier: Apache-2.0
"""DDP communication hooks: presets, the state of a registration, and how to attach them.

`ddp` (attach) registers one of `presets` with a `state` (HookState, which users hold). DDP calls it for every
bucket, and `buckets` (DDPRegistration) puts the bucket on the lane. What models of DDP and FSDP2 have in
common is in `attached`.
"""

from commopt.attached.checkpoint import merged_state
from commopt.attached.comm_state import Checkpointed, CommState, Gathered
from commopt.hooks.ddp import DistributedDataParallel, attach
from commopt.hooks.presets import PRESETS, Preset, build_preset, hook
from commopt.hooks.rebuild import rebuild
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
    "rebuild",
]
