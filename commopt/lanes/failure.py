"""When a lane fails: tell every rank who failed and why, and free the peers that wait for this one."""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Collection, Iterable
from contextlib import suppress

from commopt.errors import LaneError, TransportError
from commopt.groups import FAILURE_KEY, LimitedStore, Membership, close_together, joined
from commopt.lanes.operation import Operation

# An error that arrives through a socket is followed by its author's report, unless the author died.
_REPORT_WAIT_S = 2.0
# How much later the others look for what the first made of that.
_VERDICT_WAIT_S = 1.0


def fail(operation: Operation, error: BaseException) -> LaneError:
    """Publish the failure, destroy every group of this process, and return the error all later callers get.

    The first report wins: a rank that fails only because another did repeats that one's words.
    """
    affected = {operation.membership, *joined()}  # in whichever a peer waits for this rank, it would wait in vain
    if isinstance(error, TransportError):
        broken: list[int] = []
        with suppress(RuntimeError, ValueError):  # the user destroys it at this very moment
            broken = operation.membership.team.lost_ranks()  # only an open group knows
        _close(affected, error)  # first, so that the failure reaches ranks that wait for this one
        report = _find_out(operation, error, broken)
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


def _find_out(operation: Operation, error: TransportError, broken: Collection[int]) -> str:
    """Return the author's report, or which ranks give no sign of life; of them, the connections to `broken` ended.

    Ranks write themselves down one below the other, and the first of them reads the list for all: what the store is
    asked in all grows as the number of ranks, not as its square.
    """
    membership, me = operation.membership, operation.membership.global_rank
    lost = f"rank {me} lost a peer in {operation}"
    now = time.monotonic()
    store = membership.store.until(now + _REPORT_WAIT_S + _VERDICT_WAIT_S)
    try:
        line = store.add("alive", 1)
        store.set(f"alive/{line}", str(me))
        report = _await_report(store, now + _REPORT_WAIT_S + (0 if line == 1 else _VERDICT_WAIT_S))
        if report is not None:
            return report
        lines = [store.read(f"alive/{line}") for line in range(1, store.add("alive", 0) + 1)]
    except TransportError as silence:
        return f"{lost}: {silence}\n{error}"
    silent = [rank for rank in sorted(membership.ranks) if str(rank) not in lines]
    dead = [rank for rank in silent if rank in broken] or silent
    verdict = "a connection between ranks that are all alive broke"
    if dead:
        verdict = (
            f"no sign of life from rank {', '.join(map(str, dead))} within {_REPORT_WAIT_S:g} s: its process has "
            f"probably died, is stuck outside communication, or is cut off from the network"
        )
    if late := [rank for rank in silent if rank not in dead]:
        verdict += f"; rank {', '.join(map(str, late))}, to which the connection holds, has not come to this operation"
    return membership.publish_failure(f"{lost}: {verdict}\n{error}")


def _await_report(store: LimitedStore, deadline: float) -> str | None:
    """Look for the author's report ever more rarely."""
    pause_s = 0.01
    while (report := store.read(FAILURE_KEY)) is None and (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, 0.3)
    return report
