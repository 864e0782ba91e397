# SPDX-License-Identifier: Apache-2.0
"""`import commopt` loads what a hook needs and nothing else; pictures, readers and reports come when they are used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_LINES = 13_100

LATER = (
    *("commopt.collectives", "commopt.command_line", "commopt.hooks.insight", "commopt.simulate", "commopt.doctor"),
    "commopt.integrations",
)

_COUNT = """
import sys
import commopt
own = [module for name, module in sys.modules.items() if name.split(".")[0] in ("commopt", "topology")]
files = {module.__file__ for module in own if module.__file__ and module.__file__.endswith(".py")}
print(sum(len(open(file, encoding="utf-8").read().splitlines()) for file in files))
print(*sys.modules)
"""


def test_what_an_import_loads() -> None:
    done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=True, cwd=ROOT)
    lines, modules = done.stdout.splitlines()
    assert int(lines) <= MOST_LINES
    assert not set(LATER).intersection(modules.split())
    assert "matplotlib" not in modules.split()


def test_every_public_name_is_there() -> None:
    names = "import commopt; print([name for name in commopt.__all__ if not hasattr(commopt, name)])"
    done = subprocess.run([sys.executable, "-c", names], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
