# SPDX-License-Identifier: Apache-2.0
"""Reports of failures: a lane that fails tells every rank and frees the peers that wait for this one.

An exception that ends the process is reported too, and a peer that was lost elsewhere gets its name.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from types import TracebackType

import torch.distributed as dist

from commopt.errors import CommoptError, LaneError, TransportError
from commopt.groups import FAILURE_KEY, LimitedStore, Membership, close_together, joined

# An error that arrives through a socket is followed by its author's report, unless the author died.
_REPORT_WAIT_S = 2.0
# How much later the others look for what the first made of that.
_VERDICT_WAIT_S = 1.0
# For a process that ends, or lost a peer elsewhere, to find out why.
_WITHIN_S = 2.0
_POLL_S = 0.05

_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_hook_before: _ExceptHook | None = None
_process = 0

# ------------------------------------------------------------------------------------------- a lane fails


def fail(membership: Membership, operation: str, error: BaseException) -> LaneError:
    """Publish the failure, destroy every group of this process, and return the error all later callers get.

    The first report wins: a rank that fails only because another did repeats that one's words.
    """
    # In whichever a peer waits for this rank, it would wait in vain. Not in what came after destroy_process_group().
    affected = {membership, *(each for each in joined() if each.world == membership.world)}
    if isinstance(error, TransportError):
        broken: list[int] = []
        with suppress(RuntimeError, ValueError):  # the user destroys it at this very moment
            broken = membership.team.lost_ranks()  # only an open group knows
        _close(affected, error)  # first, so that the failure reaches ranks that wait for this one
        report = _find_out(membership, affected, operation, error, broken)
        for each in affected:
            each.publish_failure(report)
    else:
        trace = "".join(traceback.format_exception(error))
        report = f"{_me(membership)} failed in {operation}\n{trace}"
        if isinstance(error, LaneError):  # of another rank, whose words count
            report = _reported_in(affected) or report
        try:
            for each in affected:
                each.publish_failure(report)
        finally:  # whatever goes wrong, peers that wait for this rank are freed
            _close(affected, error)
    return LaneError(f"{report.rstrip()}\nThe lane takes no more work; destroy and initialize the process group.")


def _close(memberships: Iterable[Membership], error: BaseException) -> None:
    # The frames of the error hold the groups, and so do functions defined in them, which a cleared frame keeps. A group
    # that is still referenced keeps its sockets open, and peers wait for this rank.
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
    with suppress(RuntimeError, ValueError):  # the user destroys one at this very moment
        close_together(membership.team for membership in memberships)


def _reported_in(memberships: Iterable[Membership]) -> str | None:
    """Return what the first failing rank reported in one of the memberships, None where there is nothing."""
    return next(filter(None, (each.failure() for each in memberships)), None)


def _find_out(
    membership: Membership,
    affected: Collection[Membership],
    operation: str,
    error: TransportError,
    broken: Collection[int],
) -> str:
    """Return the author's report, or which ranks give no sign of life; of them, the connections to `broken` ended.

    The author may be in another of the `affected` memberships, as under HSDP a rank of another replica group.
    Ranks write themselves down one below the other, and the first of them reads the list for all: what the store is
    asked in all grows as the number of ranks, not as its square.
    """
    me = membership.global_rank
    lost = f"rank {me} lost a peer in {operation}"
    now = time.monotonic()
    answered_by = now + _REPORT_WAIT_S + _VERDICT_WAIT_S
    store = membership.store.until(answered_by)
    try:
        line = store.add("alive", 1)
        store.set(f"alive/{line}", json.dumps([me, operation]))
        deadline = now + _REPORT_WAIT_S + (0 if line == 1 else _VERDICT_WAIT_S)
        report = _await_report([each.store.until(answered_by) for each in affected], deadline)
        if report is not None:
            return report
        lines = store.read_all([f"alive/{line}" for line in range(1, store.add("alive", 0) + 1)])
        at = {int(rank): str(what) for rank, what in (json.loads(line) for line in lines if line is not None)}
        silent = [rank for rank in sorted(membership.ranks) if rank not in at]
        calls = {rank: call for rank in silent if (call := membership.unmet_call(rank)) is not None}
    except TransportError as silence:
        return f"{lost}: {silence}\n{error}"
    unexplained = [rank for rank in silent if rank not in calls]
    dead = [rank for rank in unexplained if rank in broken] or unexplained
    verdict = "a connection between ranks that are all alive broke"
    if not silent and len(set(at.values())) > 1:
        verdict += ", and they were in different operations, as where they make calls in another order: "
        verdict += "; ".join(f"rank {rank} in {what}" for rank, what in sorted(at.items()))
    elif calls and not dead:
        verdict = "; ".join(f"rank {rank} has called {call}" for rank, call in calls.items())
        verdict += ", to which not all ranks have come: every rank must make the same calls, in the same order"
    elif dead:
        verdict = (
            f"no sign of life from rank {', '.join(map(str, dead))} within {_REPORT_WAIT_S:g} s: its process has "
            f"probably died, is stuck outside communication, or is cut off from the network"
        )
    if late := [rank for rank in silent if rank not in dead]:
        verdict += f"; rank {', '.join(map(str, late))}, to which the connection holds, has not come to this operation"
    return membership.publish_failure(f"{lost}: {verdict}\n{error}")


def _await_report(stores: Collection[LimitedStore], deadline: float) -> str | None:
    """Look for the author's report ever more rarely."""
    pause_s = 0.01
    while (report := next(filter(None, (each.read(FAILURE_KEY) for each in stores)), None)) is None and (
        left_s := deadline - time.monotonic()
    ) > 0:
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, 0.3)
    return report


def _me(membership: Membership) -> str:
    return f"rank {membership.global_rank} ({socket.gethostname()})"


# ----------------------------------------------------------------------------------- outside of the lanes


def failure_of(error: BaseException) -> CommoptError | None:
    """Return the commopt error behind `error`, None when there is none.

    torch makes a RuntimeError of what a future raises. And in communication that is not commopt's own a peer that died
    shows as gloo's or NCCL's error; every rank that asks then learns what the dead one reported, or, over gloo, which
    ranks closed their connections. That takes up to 2 s.
    """
    for link in _chain(error):
        if isinstance(link, CommoptError):
            return link
        if f"{LaneError.__name__}: " in str(link):
            from commopt.lanes.registry import require_healthy  # which reports failures here

            try:
                require_healthy()
            except LaneError as failure:
                return failure
            return LaneError(str(link))
    return _lost_peer(error) if any(map(_is_transport, _chain(error))) else None


def publish_uncaught() -> None:
    """Let the exception that ends this process reach the other ranks, from now on.

    Chained to sys.excepthook: other threads may fail and the process go on. What multiprocessing catches in a child it
    started never comes here.
    """
    global _hook_before, _process
    _process = os.getpid()
    if _hook_before is None:
        _hook_before, sys.excepthook = sys.excepthook, _tell_and_pass_on


def _tell_and_pass_on(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    found: list[CommoptError] = []
    # Not in a forked child, which has the parent's connection to the store, nor in a session, which goes on.
    if os.getpid() == _process and not hasattr(sys, "ps1"):
        # In a thread of its own, since the store may not answer.
        telling = threading.Thread(target=_tell, args=(error, found), name="commopt-last-words", daemon=True)
        with suppress(RuntimeError):  # no more threads
            telling.start()
            telling.join(2 * _WITHIN_S)
    assert _hook_before is not None
    _hook_before(kind, error, trace)
    if found and found[0] not in _chain(error):
        print(f"{type(found[0]).__name__}: {found[0]}", file=sys.stderr)


def _tell(error: BaseException, found: list[CommoptError]) -> None:
    """Publish `error`, unless it is the echo of another rank's; what is known of that goes into `found`."""
    with suppress(Exception):  # whatever goes wrong here must not hide the error itself
        failure = failure_of(error)
        if failure is not None:
            found.append(failure)
        if isinstance(failure, LaneError):  # also to whom its author shares no group with
            for membership in joined():
                membership.publish_failure(str(failure))
            return
        if any(map(_is_transport, _chain(error))):
            return
        trace = "".join(traceback.format_exception(error))
        for membership in joined():
            membership.publish_failure(f"{_me(membership)} ended with an exception\n{trace}")


def _lost_peer(error: BaseException) -> LaneError | None:
    """Ask why a peer was lost; None when nobody knows."""
    memberships, deadline = joined(), time.monotonic() + _WITHIN_S
    while memberships:
        if report := next(filter(None, (membership.failure() for membership in memberships)), None):
            return LaneError(report)
        for membership in memberships:
            if lost := membership.team.lost_ranks():
                return _publish_lost(membership, lost, error)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    return None


def _publish_lost(membership: Membership, lost: list[int], error: BaseException) -> LaneError:
    report = (
        f"rank {membership.global_rank} lost rank {', '.join(map(str, lost))} outside of commopt's own communication: "
        f"the connection was closed, so it has ended or closed its groups\n{error}"
    )
    for each in joined():
        each.publish_failure(report)
    return LaneError(report)


def _is_transport(error: BaseException) -> bool:
    return isinstance(error, dist.DistBackendError) or "gloo/transport/" in str(error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those it came from."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
