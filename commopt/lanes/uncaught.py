"""Errors outside of the lanes: what ends this process reaches the other ranks, and a lost peer gets its name."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType

import torch.distributed as dist

from commopt import lanes
from commopt.errors import CommoptError, LaneError
from commopt.groups import Membership, joined

_WITHIN_S = 2.0
_POLL_S = 0.05

_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_hook_before: _ExceptHook | None = None
_process = 0


def failure_of(error: BaseException) -> CommoptError | None:
    """Return the commopt error behind `error`, None when there is none.

    torch makes a RuntimeError of what a future raises. And while DDP averages by itself, as "auto" lets it, a peer that
    died shows as gloo's or NCCL's own error; every rank that asks then learns what the dead one reported, or, over
    gloo, which ranks closed their connections. That takes up to 2 s.
    """
    for link in _chain(error):
        if isinstance(link, CommoptError):
            return link
        if f"{LaneError.__name__}: " in str(link):
            try:
                lanes.require_healthy()
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
        if isinstance(failure, LaneError) or any(map(_is_transport, _chain(error))):
            return
        trace = "".join(traceback.format_exception(error))
        for membership in joined():
            who = f"rank {membership.global_rank} ({socket.gethostname()})"
            membership.publish_failure(f"{who} ended with an exception\n{trace}")


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
