# SPDX-License-Identifier: Apache-2.0
"""How slow this machine is now: limits that end a hang are multiples of it, so that no verdict depends on the clock."""

from __future__ import annotations

import os
import time

_VARIABLE = "COMMOPT_TEST_SLOWNESS"
_USUAL_S = 0.05  # of `_work`, on the machine for which the limits were written
_MOST = 20.0


def _work() -> float:
    """Return the seconds of a fixed computation, the machine's other work included."""
    begun = time.monotonic()
    total = 0
    for number in range(2_000_000):
        total += number & 7
    return time.monotonic() - begun


def measure() -> float:
    """Measure how many times longer this machine takes than the usual one, at least once; kept for other processes."""
    slowness = min(max(sorted(_work() for _ in range(3))[1] / _USUAL_S, 1.0), _MOST)
    os.environ[_VARIABLE] = f"{slowness:.2f}"
    return slowness


def limit(seconds: float) -> float:
    """Return after how long something hangs that usually takes a small part of so many seconds."""
    return seconds * float(os.environ.get(_VARIABLE, "1"))
