# SPDX-License-Identifier: Apache-2.0
"""How ranks agree before a collective could hang: each shows, in the rendezvous store, what it is about to do.

An exchange through the store, unlike a collective, can name the rank that is missing, carries text of any length, and
works when the team has failed. Membership.agree and the other comparisons of ranks build on it.
"""

from __future__ import annotations

import base64
import json
import logging
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from commopt.errors import ConfigurationError, MismatchError, TransportError
from commopt.groups.store import LimitedStore

Facts = dict[str, Any]

_log = logging.getLogger("commopt")

# How much longer the others wait for rank 0's verdict than rank 0 waits for them.
_VERDICT_MARGIN_S = 5.0
# For a rank that leaves because of an error, to say so.
_LEAVING_S = 2.0
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.1
# After which a warning names the ranks that are waited for: longer than ranks are usually apart.
PATIENCE_S = 20.0
# Looks of all ranks together, at first and when they wait for long: what bounds the work of the store.
_FIRST_LOOKS_PER_S = 20000.0
_LOOKS_PER_S = 5000.0
# A scan of seats, one request each, is followed by so many times its time without one.
_SCAN_PAUSE = 9
_MOST_VERDICT_NBYTES = 2**28  # of its text, which is packed


def exchange_facts(
    store: LimitedStore,
    ranks: Sequence[int],
    me: int,
    purpose: str,
    facts: Mapping[str, Any],
    timeout_s: float,
    interrupt: Callable[[], None] = lambda: None,
    problem: Exception | None = None,
    patience_s: float = PATIENCE_S,
) -> list[Facts]:
    """Return the `facts` (JSON values) of all `ranks`, in their order; every one of them must call it.

    `me` is this process's place in `ranks`, which are global ranks; `store` must be private to them. `interrupt` is
    called while waiting and may raise. `problem` is why this rank cannot go on: it raises it, and all others a
    ConfigurationError. Raises MismatchError on every rank when one does not call within `timeout_s` or states another
    `purpose`, TransportError when the store does not answer. After `patience_s` a warning
    names the ranks that are waited for.

    What stands in the store may be older than this process: torchrun keeps one store through all its attempts, and a
    call that failed, or that some ranks never made, leaves its keys behind. So nothing is named by counting. Every
    rank shows a ticket it has just drawn; rank 0 answers each with the name of the meeting, which it has just drawn;
    and only what bears this name counts. A meeting has one verdict, the first that is written: by rank 0, or by a rank
    that leaves before there is one. So it ends alike on all of them.

    Each rank makes as many requests, however many ranks there are, and rank 0 reads and invites all others in one each
    where the store can. The verdict, which all of them read, is packed, since most facts are alike.
    """
    answers = meet(store, ranks, me, purpose, facts, timeout_s, interrupt, problem, patience_s)
    require_same_purpose(ranks, answers)
    return answers


def meet(
    store: LimitedStore,
    ranks: Sequence[int],
    me: int,
    purpose: str,
    facts: Mapping[str, Any],
    timeout_s: float,
    interrupt: Callable[[], None],
    problem: Exception | None,
    patience_s: float,
) -> list[Facts]:
    """Return what `exchange_facts` does, also where ranks have come to different purposes."""
    trouble = None if problem is None else f"{type(problem).__name__}: {problem}"
    mine = {"purpose": purpose, "problem": trouble, **facts}
    patience = _Patience(ranks, purpose, patience_s)
    if me == 0:
        deadline = time.monotonic() + timeout_s
        answers, missing = _preside(store.until(deadline), len(ranks), mine, deadline, interrupt, patience)
    else:  # rank 0 may wait for somebody itself
        deadline = time.monotonic() + timeout_s + _VERDICT_MARGIN_S
        answers, missing = _attend(store.until(deadline), len(ranks), me, mine, deadline, interrupt, patience)
    if missing:
        interrupt()  # why a rank is missing says more than that it is
        names = ", ".join(str(ranks[place]) for place in missing)
        elsewhere = {rank: each["purpose"] for rank, each in zip(ranks, answers, strict=False) if each}
        others = "".join(f"; rank {rank} came to {other}" for rank, other in elsewhere.items() if other != purpose)
        raise MismatchError(
            f"rank {names} did not reach {purpose} within {timeout_s:g} s, or left it with an error{others}; it is a "
            f"collective call: every rank of the group must make it, in the same order"
        ) from problem
    if problem is not None:
        raise problem
    for rank, answer in zip(ranks, answers, strict=True):
        if answer["problem"] is not None:
            raise ConfigurationError(f"rank {rank} cannot take part in {answer['purpose']}: {answer['problem']}")
    return answers


def require_same_purpose(ranks: Sequence[int], answers: Sequence[Facts]) -> None:
    """Raise MismatchError unless all ranks have come to the same meeting."""
    for rank, answer in zip(ranks, answers, strict=True):
        if answer["purpose"] != answers[0]["purpose"]:
            raise MismatchError(
                f"rank {rank} came to {answer['purpose']} and rank {ranks[0]} to {answers[0]['purpose']}; every rank "
                f"must make the same commopt calls, in the same order and between the same steps"
            )


class _Patience:
    """Warns of ranks that are missing in `purpose`: after `first_s`, and then whenever the wait has doubled."""

    def __init__(self, ranks: Sequence[int], purpose: str, first_s: float) -> None:
        self._ranks = ranks
        self._purpose = purpose
        self._begun_s = time.monotonic()
        self._next_s = first_s

    def wait_for(self, places: Iterable[int]) -> None:
        """Take note that the ranks at `places` have not come yet."""
        waited_s = time.monotonic() - self._begun_s
        if waited_s < self._next_s:
            return
        self._next_s = 2 * waited_s
        names = ", ".join(str(self._ranks[place]) for place in places)
        _log.warning(
            "waiting for rank %s in %s, for %.0f s now: every rank must call it", names, self._purpose, waited_s
        )


def require_equal(ranks: Sequence[int], answers: Sequence[Facts], fields: Iterable[str]) -> None:
    """Raise MismatchError, naming rank, field and both values, unless all ranks gave equal `fields`."""
    for rank, answer in zip(ranks, answers, strict=True):
        for name in fields:
            if answer[name] != answers[0][name]:
                raise MismatchError(
                    f"ranks disagree about {name}: rank {rank} has {answer[name]}, rank {ranks[0]} has "
                    f"{answers[0][name]}; every rank must make the same commopt calls with the same settings"
                )


def _preside(
    store: LimitedStore,
    size: int,
    mine: Facts,
    deadline: float,
    interrupt: Callable[[], None],
    patience: _Patience,
) -> tuple[list[Facts], list[int]]:
    """Rank 0's part: return the answers of all, or the places of the ranks that gave none in time."""
    meeting = secrets.token_hex(8)
    before = store.read("meeting")
    answers = {0: mine}
    invited: set[str] = set()
    seats = _Seats(store)

    def complete() -> bool:
        tickets = []
        for place, seat in seats.read([place for place in range(1, size) if place not in answers]):
            if seat.get("meeting") == meeting:
                answers[place] = seat["facts"]
            elif "ticket" in seat and seat["ticket"] not in invited:
                tickets.append(seat["ticket"])
        if tickets:
            store.set_all({f"invitation/{ticket}": json.dumps({"meeting": meeting}) for ticket in tickets})
            invited.update(tickets)
        if len(answers) < size:
            patience.wait_for(place for place in range(size) if place not in answers)
        return len(answers) == size

    with _fails_when_left(store, 0, meeting):
        poll(complete, deadline, interrupt)
    missing = [place for place in range(size) if place not in answers]
    if not missing:  # all are here, so all have left the meeting before
        store.set("meeting", meeting)
        if before is not None:
            store.delete_key(f"verdict/{before}")
    return _verdict(store, meeting, missing, [answers.get(place, {}) for place in range(size)])


class _Seats:
    """The seats of the others as rank 0 reads them: in two requests, once each has been taken before."""

    def __init__(self, store: LimitedStore) -> None:
        self._store = store
        self._taken: set[int] = set()
        self._next_scan_s = 0.0

    def read(self, places: Sequence[int]) -> list[tuple[int, Facts]]:
        """Return what stands at those of `places` that are known to be taken."""
        free = [place for place in places if place not in self._taken]
        if free and self._store.check([_seat(place) for place in free]):
            self._taken.update(free)
        elif free and (begun_s := time.monotonic()) >= self._next_scan_s:
            self._taken.update(place for place in free if self._store.check([_seat(place)]))
            self._next_scan_s = time.monotonic() + _SCAN_PAUSE * (time.monotonic() - begun_s)
        taken = [place for place in places if place in self._taken]
        texts = self._store.get_all([_seat(place) for place in taken])
        return [(place, _facts_in(_seat(place), text)) for place, text in zip(taken, texts, strict=True)]


def _attend(
    store: LimitedStore,
    size: int,
    me: int,
    mine: Facts,
    deadline: float,
    interrupt: Callable[[], None],
    patience: _Patience,
) -> tuple[list[Facts], list[int]]:
    """Every other rank's part: return the answers of all, or the places of those that are missing."""
    ticket = secrets.token_hex(8)
    store.set(_seat(me), json.dumps({"ticket": ticket}))

    def invited() -> Facts:
        patience.wait_for([0])  # for whom else, rank 0 says
        return _read(store, f"invitation/{ticket}")

    invitation = poll(invited, deadline, interrupt, size)
    if not invitation:
        return [], [0]
    store.delete_key(f"invitation/{ticket}")
    meeting = invitation["meeting"]
    store.set(_seat(me), json.dumps({"meeting": meeting, "facts": mine}))
    with _fails_when_left(store, me, meeting):
        verdict = poll(lambda: _read(store, f"verdict/{meeting}"), deadline, interrupt, size)
    if verdict:
        return _outcome(verdict)
    # Rank 0 is gone. One of the others looks for all, or the store would be asked as the square of their number.
    if store.compare_set(f"inquiry/{meeting}", "", str(me)) != str(me).encode():
        verdict = poll(lambda: _read(store, f"verdict/{meeting}"), deadline + _VERDICT_MARGIN_S, interrupt, size)
        return _outcome(verdict) if verdict else _verdict(store, meeting, [0])
    came = {place for place, seat in _Seats(store).read(range(1, size)) if seat.get("meeting") == meeting}
    return _verdict(store, meeting, [place for place in range(1, size) if place not in came] or [0])


def _verdict(
    store: LimitedStore, meeting: str, missing: list[int], answers: Sequence[Facts] = ()
) -> tuple[list[Facts], list[int]]:
    """Write the verdict of a meeting unless there is one; return the answers and the missing ranks that it has."""
    mine = _packed({"missing": missing, "answers": answers})
    return _outcome(_facts_in(f"verdict/{meeting}", store.compare_set(f"verdict/{meeting}", "", mine)))


def _outcome(verdict: Facts) -> tuple[list[Facts], list[int]]:
    answers, missing = verdict.get("answers"), verdict.get("missing")
    if not isinstance(answers, list) or not isinstance(missing, list) or not all(isinstance(n, int) for n in missing):
        raise _foreign("verdict")
    for place, answer in enumerate(answers):  # who is missing may have told nothing
        if not isinstance(answer, dict) or not (place in missing or {"purpose", "problem"} <= answer.keys()):
            raise _foreign("verdict")
    return answers, missing


@contextmanager
def _fails_when_left(store: LimitedStore, me: int, meeting: str) -> Iterator[None]:
    """Let a meeting that this rank leaves with an error fail for the others too."""
    try:
        yield
    except BaseException:
        with suppress(TransportError):
            _verdict(store.until(time.monotonic() + _LEAVING_S), meeting, [me])
        raise


def poll(look: Callable[[], Any], deadline: float, interrupt: Callable[[], None] = lambda: None, ranks: int = 1) -> Any:
    """Call `look` until it returns something true or `deadline` (time.monotonic) is over; return what it said last.

    Polling instead of `store.wait`, because a blocked store client also blocks the threads that share it. ranks: how
    many of them do so at the same time. A look is late by a quarter of the wait at most, but for the first pause.
    """
    first_pause_s = max(_FIRST_PAUSE_S, ranks / _FIRST_LOOKS_PER_S)
    longest_pause_s = max(_LONGEST_PAUSE_S, ranks / _LOOKS_PER_S)
    begun_s = asked_s = time.monotonic()
    while not (seen := look()) and (now_s := time.monotonic()) < deadline:
        if now_s - asked_s >= longest_pause_s:
            interrupt()
            asked_s = now_s
        time.sleep(min(max(first_pause_s, (now_s - begun_s) / 4), longest_pause_s))
    return seen


def _seat(place: int) -> str:
    return f"seat/{place}"


def _read(store: LimitedStore, key: str) -> Facts:
    """Return what stands under a key, {} where there is nothing."""
    text = store.read(key)
    return {} if text is None else _facts_in(key, text)


def _facts_in(key: str, text: str | bytes) -> Facts:
    """Return a seat, an invitation or a verdict. Raises MismatchError for anything else."""
    facts = _parsed(_unpacked(text, key) if key.startswith("verdict") else text, key)
    answer = facts.get("facts", {"purpose": None, "problem": None})
    whole = {"meeting", "facts"} <= facts.keys() or "ticket" in facts or not key.startswith("seat")
    whole = whole and ("meeting" in facts or not key.startswith("invitation"))
    named = all(isinstance(facts.get(name, ""), str) for name in ("meeting", "ticket"))
    if facts and not (whole and named and isinstance(answer, dict) and {"purpose", "problem"} <= answer.keys()):
        raise _foreign(key)
    return facts


def _packed(verdict: Facts) -> str:
    """Return a verdict in few bytes: the facts of most ranks are alike, and every rank reads those of all."""
    return base64.b85encode(zlib.compress(json.dumps(verdict).encode())).decode()


def _unpacked(text: str | bytes, key: str) -> bytes:
    try:
        unpacking = zlib.decompressobj()
        unpacked = unpacking.decompress(base64.b85decode(text), _MOST_VERDICT_NBYTES)
    except (ValueError, zlib.error):
        raise _foreign(key) from None
    if not unpacking.eof:
        raise _foreign(key)
    return unpacked


def _parsed(text: str | bytes, key: str) -> Facts:
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise _foreign(key)
    return facts


def _foreign(key: str) -> MismatchError:
    return MismatchError(
        f"what stands under {key!r} in the rendezvous store is not what commopt writes: another program uses this "
        f"store, or other versions of commopt run on some ranks; give the job a store, and the ranks a version, of one"
    )
