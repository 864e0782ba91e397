# SPDX-License-Identifier: Apache-2.0
"""Processes that a script starts: with multiprocessing, and as programs that are the script once more."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from multiprocessing.process import BaseProcess
from typing import Any

Run = Callable[..., object]


@contextmanager
def following(run: Run, again: Callable[[Any], Any]) -> Iterator[None]:
    """Let every process that is started with multiprocessing do `run(target, *its arguments)`, for its target alone.

    That is also how torch's spawn and start_processes, and launchers of frameworks, start theirs. Spawned ones unpickle
    `run`. again: returns for the arguments of a program the ones it shall be started with.
    """
    start, popen = BaseProcess.start, subprocess.Popen.__init__
    if hasattr(start, "__wrapped__"):  # a forked child is followed as its parent was
        yield
        return

    @wraps(start)
    def followed_start(process: Any) -> None:
        if process._target is not None:  # else it has a method for it
            process._target = partial(run, process._target)
        start(process)

    @wraps(popen)
    def followed_popen(process: Any, args: Any, *more: Any, **kwargs: Any) -> None:
        popen(process, again(args), *more, **kwargs)

    classes: Any = BaseProcess, subprocess.Popen
    classes[0].start = followed_start
    classes[1].__init__ = followed_popen
    try:
        yield
    finally:
        classes[0].start = start
        classes[1].__init__ = popen
