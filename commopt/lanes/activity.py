# SPDX-License-Identifier: Apache-2.0
"""What this process is doing now, as another thread sees it: phase of training, stacks, tasks under way.

Nothing is noted while training goes on but a reference and three integers. The rest is found when it is asked for.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

from commopt.lanes.registry import lanes

if TYPE_CHECKING:
    from commopt.lanes.client import LaneClient

# Replaced as a whole, so that nobody who reads it needs a lock.
_clients: tuple[ref[LaneClient], ...] = ()
_noting = threading.Lock()

_INNERMOST, _OUTERMOST = 8, 4
# By the ends of file names, inside torch or any package that is called alike, and by names of functions there.
_PHASES = (
    ("torch/_tensor.py", ("backward",), "backward"),
    ("torch/autograd/", ("backward", "grad", "_engine_run_backward"), "backward"),
    ("torch/optim/", ("step", "wrapper"), "optimizer step"),
    ("torch/utils/data/", ("__next__",), "loading data"),
    ("torch/serialization.py", ("save",), "saving"),
    ("torch/serialization.py", ("load",), "loading a checkpoint"),
    ("torch/distributed/checkpoint/", ("save", "async_save"), "saving"),
    ("torch/distributed/checkpoint/", ("load",), "loading a checkpoint"),
    ("torch/nn/modules/module.py", ("_call_impl",), "forward"),
)
_EVALUATES = re.compile(r"(?:^|_)(?:eval|valid)", re.IGNORECASE)
ELSEWHERE = "elsewhere"
_IN_EVALUATION = (ELSEWHERE, "forward", "loading data")


def note(client: LaneClient) -> None:
    """Show the tasks of a client from now on, as long as it is there."""
    global _clients
    with _noting:
        _clients = (*(each for each in _clients if each() is not None), ref(client))


def forget() -> None:
    """Show no client any more, in a forked child."""
    global _clients, _noting
    _clients, _noting = (), threading.Lock()


def beat() -> dict[str, Any]:
    """Return what this process does, as JSON values: short enough to be written every few seconds.

    clients: number of the latest task, step and bucket, by membership and client. lanes: the task under way by device.
    """
    phase, stack = _main_thread()
    clients = {
        f"{client.membership.name} {client.name}": [client.submitted, client.step, client.bucket]
        for client in _open_clients()
    }
    under_way = {str(lane.device): lane.under_way() for lane in lanes()}
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "phase": phase,
        "stack": stack,
        "clients": clients,
        "lanes": {device: _brief(place) for device, place in under_way.items() if place is not None},
    }


def members() -> dict[str, list[int]]:
    """Return the ranks of each membership that has a client."""
    return {client.membership.name: list(client.membership.ranks) for client in _open_clients()}


def _open_clients() -> Iterator[LaneClient]:
    for each in _clients:
        if (client := each()) is not None and not client.closed:
            yield client


def _brief(place: Any) -> dict[str, Any]:
    """Return a place without its ranks, which would be long."""
    return {name: value for name, value in place._asdict().items() if name != "ranks"}


def stacks() -> dict[str, list[str]]:
    """Return the stack of every Python thread, innermost call first, by name of the thread."""
    frames = sys._current_frames()
    threads = [each for each in threading.enumerate() if each.ident in frames]
    return {each.name: shown_stack(_calls(frames[each.ident or 0])) for each in threads}


def _main_thread() -> tuple[str, list[str]]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = [] if frame is None else list(_calls(frame))
    return phase_of(calls), shown_stack(calls)


Call = tuple[str, str, int]  # file, function, line


def _calls(frame: FrameType | None) -> Iterator[Call]:
    """Yield the calls of a stack, innermost first; keeps no frame, nor what its variables hold."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno or 0
        frame = frame.f_back


def phase_of(calls: Iterable[Call]) -> str:
    """Return the phase of training of a stack, innermost call first.

    The innermost call of torch tells it: under Lightning a whole step is inside that of an optimizer. A forward that
    recomputes activations belongs to its backward, and one in a function that is named after evaluation to that.
    """
    phase = ELSEWHERE
    for file, function, _ in calls:
        if phase in _IN_EVALUATION and "/torch/" not in file and _evaluates(function):
            return "evaluation"
        if phase in (ELSEWHERE, "forward"):
            found = next((name for part, names, name in _PHASES if part in file and function in names), None)
            if found is not None and (phase == ELSEWHERE or found == "backward"):
                phase = found
    return phase


def _evaluates(function: str) -> bool:
    """Return whether a function is named after evaluation alone: train_and_evaluate does more."""
    return _EVALUATES.search(function) is not None and "train" not in function.lower()


def shown_stack(calls: Iterable[Call]) -> list[str]:
    """Return lines as "evaluate (project/train.py:30)", innermost first; of long stacks the two ends."""
    lines = [
        f"{function} ({'/'.join(file.split('/')[-2:])}:{line})"
        for file, function, line in calls
        if not file.endswith("torch/nn/modules/module.py")
    ]
    if len(lines) > _INNERMOST + _OUTERMOST:
        lines = [*lines[:_INNERMOST], "...", *lines[-_OUTERMOST:]]
    return lines
