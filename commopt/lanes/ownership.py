"""What every owner of operations, a HookState or a Communicator, goes through: joining the other ranks, and leaving."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from commopt import lanes
from commopt.errors import CommoptError
from commopt.groups import Membership, NcclByLevel, join
from commopt.lanes.uncaught import publish_uncaught

_lock = threading.Lock()
# How many owners have not left. Strong: when a process group is destroyed and forgotten, commopt's own groups over it
# are still there, and this is how they are found.
_owners: dict[Membership, int] = {}


def enter(
    group: Any,
    ranks_per_node: int | None,
    timeout: float | timedelta | None,
    nccl: NcclByLevel | None,
    problem: Exception | None = None,
) -> Membership:
    """Return the membership of `group` for one more owner; collective as `groups.join`, and raises what that raises.

    `problem` is as for that. Raises LaneError when a lane has failed.
    """
    lanes.require_healthy()
    _close_orphans()
    membership = join(group, ranks_per_node, timeout, nccl, problem)
    publish_uncaught()
    with _lock:
        _owners[membership] = _owners.get(membership, 0) + 1
    return membership


def leave(membership: Membership, *, close: bool = True) -> None:
    """Count one owner less; close the process groups after the last one, once all that was submitted has ended.

    close: False keeps them for the next owner. Raises CommoptError when called from a lane's work, which would wait for
    its own end.
    """
    if close and not lanes.finish():
        raise CommoptError("close() was called inside lane work and would wait for its own end; call it from outside")
    with _lock:
        _owners[membership] = _owners.get(membership, 1) - 1
        if _owners[membership] or not close:
            return
        del _owners[membership]
    membership.team.close()


def _close_orphans() -> None:
    """Close what was built over process groups that were destroyed since: threads and sockets on either side.

    Not collective: nobody can use them any more.
    """
    with _lock:
        gone = [membership for membership in _owners if not membership.alive]
    # What was submitted before its group was destroyed may still be under way.
    if any(not membership.team.closed for membership in gone) and not lanes.finish():
        return
    for membership in gone:
        membership.team.close()
        with _lock:
            _owners.pop(membership, None)
