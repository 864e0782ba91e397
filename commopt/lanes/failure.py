"""When a lane fails: tell every rank who failed and why, and free the peers that wait for this one."""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress

from commopt.errors import LaneError, TransportError
from commopt.groups import Membership, close_together, joined
from commopt.lanes.operation import Operation

# An error that arrives through a socket is followed by its author's report, unless the author died.
_REPORT_WAIT_S = 2.0
_POLL_S = 0.02


def fail(operation: Operation, error: BaseException) -> LaneError:
    """Publish the failure, destroy every group of this process, and return the error all later callers get.

    The first report wins: a rank that fails only because another did repeats that one's words.
    """
    affected = {operation.membership, *joined()}  # in whichever a peer waits for this rank, it would wait in vain
    if isinstance(error, TransportError):
        _close(affected, error)  # first, so that the failure reaches ranks that wait for this one
        report = _await_report(operation.membership) or _lost_connection(operation, error)
        for membership in affected:
            membership.publish_failure(report)
    else:
        rank = operation.membership.global_rank
        trace = "".join(traceback.format_exception(error))
        report = f"rank {rank} ({socket.gethostname()}) failed in {operation}\n{trace}"
        for membership in affected:
            membership.publish_failure(report)
        _close(affected, error)
    return LaneError(f"{report.rstrip()}\nThe lane takes no more work; destroy and initialize the process group.")


def _close(memberships: Iterable[Membership], error: BaseException) -> None:
    # The frames of the error hold the groups; a group that is still referenced keeps its sockets open.
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
    with suppress(RuntimeError, ValueError):  # the user destroys one at this very moment
        close_together(membership.team for membership in memberships)


def _await_report(membership: Membership) -> str | None:
    """Wait for the author's report; leave a sign of life meanwhile."""
    deadline = time.monotonic() + _REPORT_WAIT_S
    try:
        membership.store.set(f"alive/{membership.global_rank}", "")
    except RuntimeError:
        return None
    while time.monotonic() < deadline:
        report = membership.failure()
        if report is not None:
            return report
        time.sleep(_POLL_S)
    return None


def _lost_connection(operation: Operation, error: TransportError) -> str:
    """Describe a failure that no rank confessed to: name those that gave no sign of life."""
    membership = operation.membership
    try:
        silent = [rank for rank in membership.ranks if not membership.store.check([f"alive/{rank}"])]
    except RuntimeError:
        silent = []
    verdict = (
        f"no sign of life from rank {', '.join(map(str, silent))} within {_REPORT_WAIT_S:g} s: its process has "
        f"probably died, or is stuck outside communication"
        if silent
        else "the process that holds the rendezvous store has probably died"
    )
    return f"rank {membership.global_rank} lost a peer in {operation}: {verdict}\n{error}"
