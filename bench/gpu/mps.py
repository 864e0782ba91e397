# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's Multi-Process Service: processes that share a GPU use it at the same time, and do not take turns."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
_START_S, _QUIT_S = 30, 15


@contextmanager
def mps(folder: Path) -> Iterator[dict[str, str]]:
    """Run an MPS daemon; yield the variables by which processes find it. It ends with the block, whatever happens.

    Raises OSError where the program is missing, CalledProcessError when it does not start.
    """
    if not shutil.which(CONTROL):
        raise OSError(f"{CONTROL} is not on PATH; it comes with NVIDIA's driver, and lets ranks share a GPU")
    variables = {}
    for name in ("PIPE", "LOG"):
        (folder / name.lower()).mkdir()
        variables[f"CUDA_MPS_{name}_DIRECTORY"] = str(folder / name.lower())
    environment = {**os.environ, **variables}
    # Its output would keep a pipe open as long as it lives.
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    subprocess.run([CONTROL, "-d"], env=environment, check=True, timeout=_START_S, **quiet)  # type: ignore[call-overload]
    try:
        yield variables
    finally:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run([CONTROL], input=b"quit\n", env=environment, timeout=_QUIT_S, check=False)
