# SPDX-License-Identifier: Apache-2.0
"""A copy of this checkout that can be changed and tested: a folder, and an environment that imports from it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.build import make_environment

ROOT = Path(__file__).parents[1]
GATE = "not slow or gate"  # what .ci/run runs, for `pytest -m`
_FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*?\])?)(?= - |$)", re.M)


@dataclass(frozen=True)
class Outcome:
    """How a run of tests ended: "passed", "failed" or "no tests", the tests that failed, and all that it printed."""

    verdict: str
    failed: tuple[str, ...]
    output: str


class Copy:
    """A copy of what git knows of this checkout, or of one of its revisions, with an environment of its own."""

    def __init__(self, folder: Path, revision: str | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        if revision is None:
            listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
            done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
            for name in filter(None, done.stdout.split("\0")):
                if (ROOT / name).is_file():  # not deleted since
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, folder / name)
        else:
            archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
        # Tests ask for the revision of the checkout they run in.
        git = ["git", "-C", str(folder), "-c", "user.name=copy", "-c", "user.email=copy@example.org"]
        for command in (["init", "-q"], ["add", "--all"], ["commit", "-q", "-m", "copy"]):
            subprocess.run([*git, *command], check=True)
        self.python = make_environment(folder / ".venv")
        self.install()

    def install(self) -> None:
        """Compile the CPU's kernels and let the environment import from the folder; again after a change of them."""
        install = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-deps"]
        options = ["--no-build-isolation", "--no-index", "--editable", str(self.folder)]
        subprocess.run(
            [*install, *options], env={**os.environ, "COMMOPT_CUDA": "OFF", "PIP_CONSTRAINT": ""}, check=True
        )

    def run(self, *arguments: str) -> None:
        """Run the copy's Python, and raise CalledProcessError with its output when that fails."""
        subprocess.run([str(self.python), *arguments], cwd=self.folder, capture_output=True, text=True, check=True)

    def test(self, *arguments: str, processes: int = 2) -> Outcome:
        """Run pytest in the copy, with `arguments`."""
        options = [
            "-q",
            "--color=no",
            "--tb=line",
            "-p",
            "no:cacheprovider",
            "--dist",
            "worksteal",
            "-n",
            str(processes),
        ]
        command = [str(self.python), "-m", "pytest", *options, *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV"))}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        verdicts = {0: "passed", 1: "failed", 5: "no tests"}
        if done.returncode not in verdicts and not _FAILED.search(output):
            raise RuntimeError(f"pytest ended with {done.returncode}:\n{output[-4000:]}")
        return Outcome(verdicts.get(done.returncode, "failed"), tuple(_FAILED.findall(output)), output)
