"""COMMOPT_CHECK=1: before every operation all its ranks show what they are about to run.

A debugging aid: it costs a few store round trips per operation, and turns a swapped order or a different length, which
would otherwise hang or silently mix two tensors, into an error that names both.
"""

from __future__ import annotations

import json
import time
from typing import Any

from commopt.errors import LaneError, MismatchError
from commopt.groups import joined, was_joined
from commopt.lanes.operation import Operation

_POLL_S = 0.001


def check_order(operation: Operation) -> None:
    """Compare `operation` with what the other ranks run at this place.

    Raises MismatchError on every rank that differs or waits for one that does.
    """
    membership = operation.membership
    store, me, lane = membership.store, membership.global_rank, operation.device_type
    index = membership.checked[lane]
    mine = str(operation)
    # First seen, then counted: whoever sees it and has come this far knows that it will go through.
    store.set(f"operation/{lane}/{index}/{me}", mine)
    membership.checked[lane] += 1
    membership.announce(lane, index, mine, meeting=False)
    deadline = time.monotonic() + membership.timeout_s
    waiting = [rank for rank in membership.ranks if rank != me]
    while waiting:
        for rank in list(waiting):
            if store.check([f"operation/{lane}/{index}/{rank}"]):
                _require_same(rank, store.get(f"operation/{lane}/{index}/{rank}").decode(), me, mine)
                waiting.remove(rank)
            else:
                _require_coming(operation, index, rank)
        if waiting and (report := membership.failure()) is not None:
            raise LaneError(report)
        if waiting and time.monotonic() > deadline:
            raise MismatchError(f"rank {waiting} did not come to {mine} within {membership.timeout_s:g} s")
        time.sleep(_POLL_S if waiting else 0)
    if index:  # all ranks announced this operation, so all have read the one before
        store.delete_key(f"operation/{lane}/{index - 1}/{me}")


def _require_same(rank: int, theirs: str, me: int, mine: str) -> None:
    if theirs != mine:
        raise MismatchError(
            f"ranks run different operations at the same place: rank {rank} has [{theirs}], rank {me} has [{mine}]; "
            f"every rank must make the same calls in the same order"
        )


def _require_coming(operation: Operation, index: int, rank: int) -> None:
    """Raise when `rank`, without having submitted this operation, waits for this rank somewhere it never was."""
    membership = operation.membership
    if not membership.store.check([f"now/{rank}"]):
        return
    sight: dict[str, Any] = json.loads(membership.store.get(f"now/{rank}"))
    me = membership.global_rank
    place, times, meeting = sight["place"], sight["times"], sight["meeting"]
    there = next((other for other in joined() if other.name == sight["membership"]), None)
    if meeting:  # its main thread waits; its lane may still come here by itself
        coming = sight["submitted"].get(membership.name, {}).get(operation.device_type, 0) > index
    else:  # its lane waits; in this very sequence, where places are compared, or on another device's lane
        coming = there is membership or place != operation.device_type
    if coming or me not in sight["ranks"]:
        return
    # What this rank has closed since, it has been through.
    been_there = was_joined(sight["membership"]) if there is None else there.has_reached(place, times, meeting=meeting)
    if not been_there:
        raise MismatchError(
            f"ranks wait for each other in different groups: rank {rank} is at [{sight['what']}], "
            f"rank {me} at [{operation}]; every rank must make the same calls in the same order"
        )
