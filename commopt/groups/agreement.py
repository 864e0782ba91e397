"""Ranks compare notes through the rendezvous store before the first collective could hang.

A store exchange, unlike a collective, can say who is missing and carries text of any length.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from commopt.errors import ConfigurationError, MismatchError, TransportError
from commopt.groups.store import LimitedStore

Facts = dict[str, Any]

# How much longer the others wait for rank 0's verdict than rank 0 waits for them.
_VERDICT_MARGIN_S = 5.0
# For a rank that leaves because of an error, to say so.
_LEAVING_S = 2.0


def exchange_facts(
    store: LimitedStore,
    ranks: Sequence[int],
    me: int,
    purpose: str,
    facts: Mapping[str, Any],
    timeout_s: float,
    interrupt: Callable[[], None] = lambda: None,
    problem: Exception | None = None,
) -> list[Facts]:
    """Return the `facts` (JSON values) of all `ranks`, in their order; every one of them must call it.

    `me` is this process's place in `ranks`, which are global ranks; `store` must be private to them. `interrupt` is
    called while waiting and may raise. `problem` is why this rank cannot go on: it raises it, and all others a
    ConfigurationError. Raises MismatchError on every rank when one does not call within `timeout_s`, TransportError
    when the store does not answer.

    What stands in the store may be older than this process: torchrun keeps one store through all its attempts, and a
    call that failed, or that some ranks never made, leaves its keys behind. So nothing is named by counting. Every
    rank shows a ticket it has just drawn; rank 0 answers each with the name of the meeting, which it has just drawn;
    and only what bears this name counts. A meeting has one verdict, the first that is written: by rank 0, or by a rank
    that leaves before there is one. So it ends alike on all of them.
    """
    trouble = None if problem is None else f"{type(problem).__name__}: {problem}"
    mine = {"purpose": purpose, "problem": trouble, **facts}
    if me == 0:
        deadline = time.monotonic() + timeout_s
        answers, missing = _preside(store.until(deadline), len(ranks), mine, deadline, interrupt)
    else:  # rank 0 may wait for somebody itself
        deadline = time.monotonic() + timeout_s + _VERDICT_MARGIN_S
        answers, missing = _attend(store.until(deadline), len(ranks), me, mine, deadline, interrupt)
    if missing:
        interrupt()  # why a rank is missing says more than that it is
        names = ", ".join(str(ranks[place]) for place in missing)
        raise MismatchError(
            f"rank {names} did not reach {purpose} within {timeout_s:g} s, or left it with an error; it is a "
            f"collective call: every rank of the group must make it, in the same order"
        )
    if problem is not None:
        raise problem
    for rank, answer in zip(ranks, answers, strict=True):
        if answer["problem"] is not None:
            raise ConfigurationError(f"rank {rank} cannot take part in {answer['purpose']}: {answer['problem']}")
    require_equal(ranks, answers, ("purpose",))
    return answers


def require_equal(ranks: Sequence[int], answers: Sequence[Facts], fields: Iterable[str]) -> None:
    """Raise MismatchError, naming rank, field and both values, unless all ranks gave equal `fields`."""
    for rank, answer in zip(ranks, answers, strict=True):
        for field in fields:
            if answer[field] != answers[0][field]:
                raise MismatchError(
                    f"ranks disagree about {field}: rank {rank} has {answer[field]}, rank {ranks[0]} has "
                    f"{answers[0][field]}; every rank must make the same commopt calls with the same settings"
                )


def _preside(
    store: LimitedStore, size: int, mine: Facts, deadline: float, interrupt: Callable[[], None]
) -> tuple[list[Facts], list[int]]:
    """Rank 0's part: return the answers of all, or the places of those who gave none in time."""
    meeting = secrets.token_hex(8)
    before = store.read("meeting")
    answers = {0: mine}
    invited: set[str] = set()

    def complete() -> bool:
        for place in range(1, size):
            seat = {} if place in answers else _read(store, f"seat/{place}")
            if seat.get("meeting") == meeting:
                answers[place] = seat["facts"]
            elif "ticket" in seat and seat["ticket"] not in invited:
                store.set(f"invitation/{seat['ticket']}", json.dumps({"meeting": meeting}))
                invited.add(seat["ticket"])
        return len(answers) == size

    with _told_when_left(store, 0, meeting):
        _poll(complete, deadline, interrupt)
    missing = [place for place in range(size) if place not in answers]
    if not missing:  # all are here, so all have left the meeting before
        store.set("meeting", meeting)
        if before is not None:
            store.delete_key(f"verdict/{before}")
    return _verdict(store, meeting, missing, [] if missing else [answers[place] for place in range(size)])


def _attend(
    store: LimitedStore, size: int, me: int, mine: Facts, deadline: float, interrupt: Callable[[], None]
) -> tuple[list[Facts], list[int]]:
    """Every other rank's part: return the answers of all, or the places of those that are missing."""
    ticket = secrets.token_hex(8)
    store.set(f"seat/{me}", json.dumps({"ticket": ticket}))
    invitation = _poll(lambda: _read(store, f"invitation/{ticket}"), deadline, interrupt)
    if not invitation:
        return [], [0]
    store.delete_key(f"invitation/{ticket}")
    meeting = invitation["meeting"]
    store.set(f"seat/{me}", json.dumps({"meeting": meeting, "facts": mine}))
    with _told_when_left(store, me, meeting):
        verdict = _poll(lambda: _read(store, f"verdict/{meeting}"), deadline, interrupt)
    if verdict:
        return verdict["answers"], verdict["missing"]
    absent = [place for place in range(1, size) if _read(store, f"seat/{place}").get("meeting") != meeting]
    return _verdict(store, meeting, absent or [0])


def _verdict(
    store: LimitedStore, meeting: str, missing: list[int], answers: Sequence[Facts] = ()
) -> tuple[list[Facts], list[int]]:
    """Write how a meeting ended unless it has; return the answers of all, and who was missing, as it stands then."""
    mine = json.dumps({"missing": missing, "answers": answers})
    verdict = json.loads(store.compare_set(f"verdict/{meeting}", "", mine))
    return verdict["answers"], verdict["missing"]


@contextmanager
def _told_when_left(store: LimitedStore, me: int, meeting: str) -> Iterator[None]:
    """Let a meeting that this rank leaves with an error fail for the others too."""
    try:
        yield
    except BaseException:
        with suppress(TransportError):
            _verdict(store.until(time.monotonic() + _LEAVING_S), meeting, [me])
        raise


def _poll(look: Callable[[], Any], deadline: float, interrupt: Callable[[], None]) -> Any:
    """Call `look` until it returns something true or the time is over; return what it said last.

    Polling instead of `store.wait`, because a blocked store client also blocks the threads that share it.
    """
    pause_s = 0.001
    while not (seen := look()) and time.monotonic() < deadline:
        interrupt()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
    return seen


def _read(store: LimitedStore, key: str) -> Facts:
    text = store.read(key)
    facts: Facts = {} if text is None else json.loads(text)
    return facts
