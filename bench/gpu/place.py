"""Where a session on a GPU runs: its folders, its Python, its environment."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.runner import ROOT

CUDA_TOOLS = Path("/usr/local/cuda/bin")  # where nvcc and compute-sanitizer are when they are not on PATH


@dataclass(frozen=True)
class Place:
    """Folders of a session, and how many GPUs there are.

    out: what the user named, for the records and the archive. files: what steps write and print, all in the archive.
    build: where commopt is installed.
    """

    out: Path
    files: Path
    build: Path | None = None
    gpus: int = 1

    @property
    def python(self) -> Path:
        """What runs the steps: the Python of the build once there is one."""
        built = None if self.build is None else self.build.resolve() / "bin" / "python"
        return built if built and built.exists() else Path(sys.executable)

    @property
    def mps(self) -> Path:
        """Where the pipes of NVIDIA's MPS daemon are, while one runs for this session."""
        return self.files / "mps"

    def takes_turns(self, ranks: int) -> bool:
        """Whether so many ranks are given the GPU one after the other: every small collective then takes 25 ms or more.

        Two ranks take turns too, in 2 to 6 ms, with which all limits can be kept.
        """
        return ranks > 2 * self.gpus and not self.mps.exists()

    def filled(self, words: Sequence[str]) -> list[str]:
        """Return a step's command for this place."""
        return self._replaced(
            words,
            {
                "{python}": str(self.python),
                "{first python}": sys.executable,
                "{out}": str(self.files),
                "{build}": "" if self.build is None else str(self.build.absolute()),
            },
        )

    def shown(self, words: Sequence[str]) -> str:
        """Return a step's command as a reader can repeat it in the project's folder."""
        names = {"{python}": "python", "{first python}": "python", "{out}": str(self.out), "{build}": str(self.build)}
        return shlex.join(self._replaced(words, names))

    @staticmethod
    def _replaced(words: Sequence[str], values: dict[str, str]) -> list[str]:
        found = []
        for word in words:
            for name, value in values.items():
                word = word.replace(name, value)
            found.append(word)
        return found


def environment() -> dict[str, str]:
    """Return what every step finds in its environment: this project on the path, and CUDA's tools."""
    path = [os.environ.get("PATH", os.defpath), *([str(CUDA_TOOLS)] if CUDA_TOOLS.is_dir() else [])]
    python_path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join(python_path),
        "PYTHONUNBUFFERED": "1",  # the log of a step that is stopped holds all it has said
    }
