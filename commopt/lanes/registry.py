# SPDX-License-Identifier: Apache-2.0
"""The lanes of this process, one for each device, and their end: at exit, after a fork, with their world."""

from __future__ import annotations

import atexit
import os
import threading
from weakref import ref

import torch
import torch.distributed as dist

from commopt.groups import close_stores, keep_groups, memberships
from commopt.lanes.lane import Lane, WorkerLane

_lanes: dict[torch.device, Lane] = {}
_lock = threading.Lock()
_world: ref[dist.ProcessGroup] | None = None


def lane_for(device: torch.device) -> Lane:
    """Return the device's lane, new after every init_process_group()."""
    with _lock:
        _forget_old_world()
        if device not in _lanes:
            if device.type != "cuda":
                _lanes[device] = WorkerLane(device)
            else:
                from commopt.lanes.stream import StreamLane  # not to be loaded where there is no GPU

                _lanes[device] = StreamLane(device)
        return _lanes[device]


def require_healthy() -> None:
    """Raise the LaneError of a lane that failed since init_process_group(), if there is one."""
    with _lock:
        _forget_old_world()
        lanes = list(_lanes.values())
    for lane in lanes:
        lane.require_healthy()


def lanes() -> list[Lane]:
    """Return the lanes of now, without a lock: a thread that is lost in a fork must hold none."""
    return list(_lanes.values())


def finish() -> bool:
    """Return once all that was submitted before, on any lane, has ended; False at once inside a lane's own work."""
    with _lock:
        lanes = list(_lanes.values())
    return all([lane.finish() for lane in lanes])


def _forget_old_world() -> None:
    """Drop the lanes of a world that was destroyed: their groups, and their errors, are gone with it."""
    global _world
    world = dist.group.WORLD if dist.is_initialized() else None
    if _world is None or _world() is not world:
        _close_all()
        _world = None if world is None else ref(world)


def _close_all() -> bool:
    """Stop every lane; return whether all of them had done their work."""
    lanes = list(_lanes.values())
    _lanes.clear()
    return all([lane.close() for lane in lanes])


def _leave() -> None:
    """Finish, and end gloo's threads, before the interpreter goes.

    They free the tensors of an operation a moment after it has ended, and need the GIL for that: taking it from a
    finalizing interpreter ends in std::terminate. A group that still waits for its peers is left alone; so is NCCL,
    whose threads hold no Python objects.
    """
    try:
        if _close_all():
            for membership in memberships():  # also over a process group that the user destroyed
                membership.team.release()
    finally:
        close_stores()


def _disown() -> None:
    """Leave alone, in a forked child (a DataLoader worker), what the parent communicates with.

    The child has the lanes without their threads, and process groups without those of gloo, for which their end would
    wait: in the exit handler, and where the interpreter frees them.
    """
    _lanes.clear()
    atexit.unregister(_leave)
    keep_groups()


atexit.register(_leave)
os.register_at_fork(after_in_child=_disown)
