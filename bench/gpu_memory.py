# SPDX-License-Identifier: Apache-2.0
"""The most memory of a GPU that something takes, whatever was measured before it in the same process."""

from __future__ import annotations

import gc
import time

import torch

_QUIET_S, _PATIENCE_S, _LOOK_S = 0.3, 5.0, 0.05


def start_counting(device: torch.device) -> int | None:
    """Begin to count the peak; return the bytes in use now, which are to be subtracted. None where nobody counts.

    It waits until nothing more is let go of: torch's watchdog keeps the buffers of collectives that have ended for a
    while, and what goes after the count has begun would be missing in it.
    """
    if device.type != "cuda":
        return None
    nbytes, since, until = -1, 0.0, time.monotonic() + _PATIENCE_S
    while (now := time.monotonic()) < until and (nbytes < 0 or now - since < _QUIET_S):
        torch.cuda.synchronize(device)
        gc.collect()
        if (found := torch.cuda.memory_allocated(device)) != nbytes:
            nbytes, since = found, now
        time.sleep(_LOOK_S)
    torch.cuda.reset_peak_memory_stats(device)
    return nbytes


def peak_nbytes(device: torch.device, before: int | None) -> int | None:
    """Return the most bytes in use since, beyond those of `before`, which `start_counting` returned."""
    return None if before is None else torch.cuda.max_memory_allocated(device) - before
