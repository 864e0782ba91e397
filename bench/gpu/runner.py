# SPDX-License-Identifier: Apache-2.0
"""Where a session on a GPU runs, and how: one command in processes of its own, under a time limit."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

ROOT = Path(__file__).parents[2]
GRACE_S = 25.0  # for pytest to write its results, for launchers to end their ranks
MARK = "BENCH_GPU_STEP"
_QUIET_LOOKS = 3
_KILL_S = 10.0
_NUMBERS = count()


@dataclass(frozen=True)
class Ended:
    """How a command came to its end; a status of None: it was stopped at the limit."""

    status: int | None
    seconds: float


def run(
    command: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float, grace_s: float = GRACE_S
) -> Ended:
    """Run `command` in the project's folder until it ends or the limit is over; what it prints goes to `log`.

    At the limit it is interrupted as by Ctrl-C first, and has `grace_s` from then on to end by itself. In the end
    everything that it started is killed, in sessions of their own too: torchrun gives one to every rank.
    """
    mark = f"{os.getpid()}-{next(_NUMBERS)}"
    started = time.monotonic()
    status: int | None = None
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_heed_interrupts,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            _kill_marked(mark)
            process.wait()
    return Ended(status, time.monotonic() - started)


def _heed_interrupts() -> None:
    """Let the process be interrupted: a shell makes programs in the background ignore that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _kill_marked(mark: str) -> None:
    """Kill every process that has the mark in its environment, whatever session it is in.

    It looks until it has found none in several looks: one may fork meanwhile, and has no environment while it starts.
    """
    deadline, quiet = time.monotonic() + _KILL_S, 0
    while quiet < _QUIET_LOOKS and time.monotonic() < deadline:
        pids = _marked(mark)
        quiet = 0 if pids else quiet + 1
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _marked(mark: str) -> list[int]:
    entry, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or belongs to somebody else
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


CUDA_TOOLS = Path("/usr/local/cuda/bin")  # where nvcc and compute-sanitizer are when they are not on PATH


@dataclass(frozen=True)
class Place:
    """Folders of a session: `out` has all that steps write and print, in `build` commopt is installed."""

    out: Path
    build: Path | None = None

    @property
    def python(self) -> Path:
        """What runs the steps: the Python of the build once there is one."""
        built = None if self.build is None else self.build.resolve() / "bin" / "python"
        return built if built and built.exists() else Path(sys.executable)

    def filled(self, words: Sequence[str]) -> list[str]:
        """Return a step's command for this place."""
        values = {"{python}": str(self.python), "{first python}": sys.executable, "{out}": str(self.out.absolute())}
        return self._replaced(words, {**values, "{build}": str(self.build and self.build.absolute())})

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
    """Return the environment of every step: this project and CUDA's tools are on the path."""
    path = [os.environ.get("PATH", os.defpath), *([str(CUDA_TOOLS)] if CUDA_TOOLS.is_dir() else [])]
    python_path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join(python_path),
        "PYTHONUNBUFFERED": "1",  # the log of a step that is stopped holds all it has said
    }
