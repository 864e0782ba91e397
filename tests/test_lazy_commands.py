# SPDX-License-Identifier: Apache-2.0
"""Commands are imported by the command line only, each when it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from commopt.__main__ import COMMANDS

ROOT = Path(__file__).parent.parent


def loaded_by(code: str) -> set[str]:
    """Return the packages of commopt that a new Python has loaded after `code`."""
    shown = "import sys; print(*sorted({name.split('.')[1] for name in sys.modules if name.startswith('commopt.')}))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{shown}"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    return set(done.stdout.splitlines()[-1].split())


def test_training_loads_no_command() -> None:
    assert loaded_by("import commopt").isdisjoint(COMMANDS)


def test_a_command_loads_no_other() -> None:
    start = "from contextlib import suppress\nfrom commopt.__main__ import main\nwith suppress(SystemExit): main({!r})"
    assert loaded_by(start.format(["--help"])).isdisjoint(COMMANDS)
    for name in ("cluster", "doctor"):
        assert loaded_by(start.format([name, "--help"])) & set(COMMANDS) == {name}
