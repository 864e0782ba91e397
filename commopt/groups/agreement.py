"""Ranks compare notes through the rendezvous store before the first collective could hang.

A store exchange, unlike a collective, can say who is missing and carries text of any length.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from commopt.errors import ConfigurationError, MismatchError
from commopt.groups.store import LimitedStore

Facts = dict[str, Any]

# How much longer the others wait for rank 0's verdict than rank 0 waits for them.
_VERDICT_MARGIN_S = 5.0


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
    and only what bears this name counts.
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
        names = ", ".join(str(ranks[place]) for place in missing)
        raise MismatchError(
            f"rank {names} did not reach {purpose} within {timeout_s:g} s; it is a collective call: "
            f"every rank of the group must make it, in the same order"
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

    _poll(complete, deadline, interrupt)
    missing = [place for place in range(size) if place not in answers]
    in_order = [] if missing else [answers[place] for place in range(size)]
    store.set(f"verdict/{meeting}", json.dumps({"missing": missing, "answers": in_order}))
    return in_order, missing


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
    verdict = _poll(lambda: _read(store, f"verdict/{meeting}"), deadline, interrupt)
    if verdict:
        return verdict["answers"], verdict["missing"]
    absent = [place for place in range(1, size) if _read(store, f"seat/{place}").get("meeting") != meeting]
    return [], absent or [0]


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
