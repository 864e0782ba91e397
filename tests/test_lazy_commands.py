# SPDX-License-Identifier: Apache-2.0
"""`import commopt` loads what training needs; commands, readers and pictures are loaded when they are used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from commopt.__main__ import COMMANDS

ROOT = Path(__file__).parent.parent
LATER = {"collectives", "command_line", "attached.insight", "simulate", "doctor", "integrations"}


def loaded_by(code: str) -> tuple[str, set[str]]:
    """Run `code` in a new Python; return what it printed, and all modules that are loaded then."""
    shown = "import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{shown}"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    printed, modules = done.stdout.strip().rpartition("\n")[::2]
    return printed, set(modules.split())


def commands_in(modules: set[str]) -> set[str]:
    return {name for name in COMMANDS if f"commopt.{name}" in modules}


def test_training_loads_no_command_and_every_public_name_is_there() -> None:
    absent = "import commopt; print([name for name in commopt.__all__ if not hasattr(commopt, name)])"
    _, modules = loaded_by("import commopt")
    assert commands_in(modules) == set()
    assert not {f"commopt.{name}" for name in LATER} & modules
    assert "matplotlib" not in modules
    assert loaded_by(absent)[0] == "[]"


def test_a_command_loads_no_other() -> None:
    start = "from contextlib import suppress\nfrom commopt.__main__ import main\nwith suppress(SystemExit): main({!r})"
    assert commands_in(loaded_by(start.format(["--help"]))[1]) == set()
    for name in ("cluster", "doctor"):
        assert commands_in(loaded_by(start.format([name, "--help"]))[1]) == {name}
