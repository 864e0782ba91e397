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
from threading import Event

ROOT = Path(__file__).parents[2]
GRACE_S = 25.0  # for pytest to write its results, for launchers to end their ranks
MARK = "BENCH_GPU_STEP"
_QUIET_LOOKS = 3
_KILL_S = 10.0
_LOOK_S = 0.5
_SOON_S = 5.0
_NUMBERS = count()


@dataclass(frozen=True)
class Ended:
    """How a command came to its end; a status of None: it was stopped at the limit."""

    status: int | None
    seconds: float


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    limit_s: float,
    grace_s: float = GRACE_S,
    told: Event | None = None,
) -> Ended:
    """Run `command` in the project's folder until it ends or the limit is over; what it prints goes to `log`.

    At the limit it is interrupted as by Ctrl-C first, and has `grace_s` from then on to end by itself. In the end
    everything that it started is killed, in sessions of their own too: torchrun gives one to every rank.

    told: may be set by another thread, when everything has to end soon.
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
            status = _status_within(process, limit_s, told)
            if status is None:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(min(grace_s, _SOON_S) if told and told.is_set() else grace_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            _kill_marked(mark)
            process.wait()
    return Ended(status, time.monotonic() - started)


def _status_within(process: subprocess.Popen[bytes], limit_s: float, told: Event | None) -> int | None:
    """Return the exit status; None when the limit is over, or when told to end."""
    deadline = time.monotonic() + limit_s
    while (left_s := deadline - time.monotonic()) > 0 and not (told and told.is_set()):
        with suppress(subprocess.TimeoutExpired):
            return process.wait(min(left_s, _LOOK_S))
    return process.poll()


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
    """Where a session is: `out` has all that steps write and print, in `build` commopt is installed.

    archive: a file with everything in `out`; None for one that is there too.
    """

    out: Path
    build: Path | None = None
    archive: Path | None = None

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
