# SPDX-License-Identifier: Apache-2.0
"""Whether commopt replays a bucket's kernels as CUDA graphs: on and off in one run, so that the two can be compared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "COMMOPT_REPLAY"


@contextmanager
def replay(wanted: bool) -> Iterator[None]:
    """Let models that are attached inside replay graphs, as is the default, or not."""
    before = os.environ.pop(VARIABLE, None)
    if not wanted:
        os.environ[VARIABLE] = "0"
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before
