# SPDX-License-Identifier: Apache-2.0
"""The one place that states the version; the build reads it from here. Beside it, what that was tested with."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

__version__ = "0.1.0"

NEWEST_TESTED_TORCH = "2.15"  # of bench/results/compat.json

_CODE = ("commopt", "topology", "csrc", "bench", "examples", ":!bench/results")


@cache
def revision() -> str | None:
    """Return the git revision this runs from, "7fb5530", or "7fb5530-dirty" where code was changed since.

    None where it cannot be known: of an installed package, or without git.
    """
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():  # a repository further up is somebody else's
        return None

    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", "-C", str(root), *arguments], stderr=subprocess.DEVNULL, text=True)

    try:
        return git("rev-parse", "--short=10", "HEAD").strip() + ("-dirty" if git("status", "-s", "--", *_CODE) else "")
    except (OSError, subprocess.CalledProcessError):
        return None
