# SPDX-License-Identifier: Apache-2.0
"""Who is there: this rank's place in one commopt setup, and how ranks compare notes before a collective could hang.

They do so through the rendezvous store: a store exchange, unlike a collective, can say who is missing and carries text
of any length, also when the team fails.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Any
from weakref import WeakSet, ref

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from commopt.errors import CommoptError, ConfigurationError, LaneError, MismatchError, TransportError
from commopt.groups.store import LimitedStore
from commopt.groups.team import Team
from topology import Cluster

Facts = dict[str, Any]

_log = logging.getLogger("commopt")

# How much longer the others wait for rank 0's verdict than rank 0 waits for them.
_VERDICT_MARGIN_S = 5.0
# For a rank that leaves because of an error, to say so.
_LEAVING_S = 2.0
# After which a wait is told of: longer than ranks are usually apart, and soon enough for whoever watches.
PATIENCE_S = 20.0


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
    """
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
        told = "".join(f"; rank {rank} came to {other}" for rank, other in elsewhere.items() if other != purpose)
        raise MismatchError(
            f"rank {names} did not reach {purpose} within {timeout_s:g} s, or left it with an error{told}; it is a "
            f"collective call: every rank of the group must make it, in the same order"
        )
    if problem is not None:
        raise problem
    for rank, answer in zip(ranks, answers, strict=True):
        if answer["problem"] is not None:
            raise ConfigurationError(f"rank {rank} cannot take part in {answer['purpose']}: {answer['problem']}")
    for rank, answer in zip(ranks, answers, strict=True):
        if answer["purpose"] != answers[0]["purpose"]:
            raise MismatchError(
                f"rank {rank} came to {answer['purpose']} and rank {ranks[0]} to {answers[0]['purpose']}; every rank "
                f"must make the same commopt calls, in the same order and between the same steps"
            )
    return answers


class _Patience:
    """Says for whom this rank waits in `purpose`: after `first_s`, and then each time that the wait has doubled."""

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
        if len(answers) < size:
            patience.wait_for(place for place in range(size) if place not in answers)
        return len(answers) == size

    with _told_when_left(store, 0, meeting):
        poll(complete, deadline, interrupt)
    missing = [place for place in range(size) if place not in answers]
    if not missing:  # all are here, so all have left the meeting before
        store.set("meeting", meeting)
        if before is not None:
            store.delete_key(f"verdict/{before}")
    return _verdict(store, meeting, missing, [answers.get(place, {}) for place in range(size)])


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
    store.set(f"seat/{me}", json.dumps({"ticket": ticket}))

    def invited() -> Facts:
        patience.wait_for([0])  # for whom else, rank 0 says
        return _read(store, f"invitation/{ticket}")

    invitation = poll(invited, deadline, interrupt)
    if not invitation:
        return [], [0]
    store.delete_key(f"invitation/{ticket}")
    meeting = invitation["meeting"]
    store.set(f"seat/{me}", json.dumps({"meeting": meeting, "facts": mine}))
    with _told_when_left(store, me, meeting):
        verdict = poll(lambda: _read(store, f"verdict/{meeting}"), deadline, interrupt)
    if verdict:
        return _outcome(verdict)
    absent = [place for place in range(1, size) if _read(store, f"seat/{place}").get("meeting") != meeting]
    return _verdict(store, meeting, absent or [0])


def _verdict(
    store: LimitedStore, meeting: str, missing: list[int], answers: Sequence[Facts] = ()
) -> tuple[list[Facts], list[int]]:
    """Write how a meeting ended unless it has; return the answers of all, and who was missing, as it stands then."""
    mine = json.dumps({"missing": missing, "answers": answers})
    return _outcome(_parsed(store.compare_set(f"verdict/{meeting}", "", mine), "verdict"))


def _outcome(verdict: Facts) -> tuple[list[Facts], list[int]]:
    answers, missing = verdict.get("answers"), verdict.get("missing")
    if not isinstance(answers, list) or not isinstance(missing, list) or not all(isinstance(n, int) for n in missing):
        raise _foreign("verdict")
    for place, answer in enumerate(answers):  # who is missing may have told nothing
        if not isinstance(answer, dict) or not (place in missing or {"purpose", "problem"} <= answer.keys()):
            raise _foreign("verdict")
    return answers, missing


@contextmanager
def _told_when_left(store: LimitedStore, me: int, meeting: str) -> Iterator[None]:
    """Let a meeting that this rank leaves with an error fail for the others too."""
    try:
        yield
    except BaseException:
        with suppress(TransportError):
            _verdict(store.until(time.monotonic() + _LEAVING_S), meeting, [me])
        raise


def poll(look: Callable[[], Any], deadline: float, interrupt: Callable[[], None] = lambda: None) -> Any:
    """Call `look` until it returns something true or `deadline` (time.monotonic) is over; return what it said last.

    Polling instead of `store.wait`, because a blocked store client also blocks the threads that share it.
    """
    pause_s = 0.001
    while not (seen := look()) and time.monotonic() < deadline:
        interrupt()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
    return seen


def _read(store: LimitedStore, key: str) -> Facts:
    """Return what stands under a key: a seat, an invitation or a verdict; {} where there is nothing."""
    text = store.read(key)
    facts = {} if text is None else _parsed(text, key)
    answer = facts.get("facts", {"purpose": None, "problem": None})
    whole = {"meeting", "facts"} <= facts.keys() or "ticket" in facts or not key.startswith("seat")
    whole = whole and ("meeting" in facts or not key.startswith("invitation"))
    named = all(isinstance(facts.get(name, ""), str) for name in ("meeting", "ticket"))
    if facts and not (whole and named and isinstance(answer, dict) and {"purpose", "problem"} <= answer.keys()):
        raise _foreign(key)
    return facts


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


# ------------------------------------------------------------------------------------------- memberships

FAILURE_KEY = "failure"
# How often whoever waits in the store looks for broken connections, ever more rarely.
_LOOK_FOR_LOSS_S = 0.5
_LONGEST_PAUSE_S = 10.0


def _call_of(rank: int) -> str:
    """Return the key of the call that a rank is in, or that it left because others did not come."""
    return f"call/{rank}"


# For whoever has more to do than to wait for the store.
_ANSWER_S = 2.0


def checking() -> bool:
    """Return whether COMMOPT_CHECK asks for every operation to be compared over its ranks."""
    return os.environ.get("COMMOPT_CHECK", "") not in ("", "0")


@dataclass(eq=False)
class Order:
    """Counts, by lane, the operations of all memberships of the same ranks, which are to come in one order on each."""

    store: LimitedStore
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class Membership:
    """What `join` built over one process group; `name` and the keys of `store` are its own, equal on all its ranks."""

    name: str
    parent: ref[dist.ProcessGroup]
    world: ref[dist.ProcessGroup]  # of its time
    cluster: Cluster
    team: Team
    timeout_s: float
    store: LimitedStore
    # Host-side counters: they advance alike on every rank because all ranks make the same calls.
    owners: count[int] = field(default_factory=count)
    rounds: count[int] = field(default_factory=count)  # of standalone all_reduce, so that each has other random bits
    compared: set[bytes] = field(default_factory=set)  # digests of calls that were seen to be equal on all ranks
    order: Order | None = None  # under COMMOPT_CHECK, which is alike on all ranks, as setup has found
    _agreed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if checking():
            alike = (other.order for other in joined() if sorted(other.ranks) == sorted(self.ranks))
            self.order = next(alike, None) or Order(self.store)
        with _joined_lock:
            _joined.add(self)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the members."""
        return self.team.ranks

    @property
    def global_rank(self) -> int:
        """This process's global rank."""
        return self.team.ranks[self.team.rank]

    @property
    def alive(self) -> bool:
        """Whether the process group it was built over, and its own groups, still exist."""
        return self.parent() in c10d._world.pg_map and not self.team.closed

    def require_alive(self) -> None:
        """Raise ConfigurationError when a process group was destroyed since."""
        if not self.alive:
            raise ConfigurationError(
                f"the process group over ranks {self.ranks} was destroyed meanwhile; after init_process_group() make "
                f"a new HookState or Communicator (and register the hook on a new DistributedDataParallel)"
            )

    def agree(self, purpose: str, **facts: Any) -> None:
        """Compare `facts` over the ranks, the first time they are stated; collective.

        Raises MismatchError on every rank when they differ, ConfigurationError when the process group is gone,
        LaneError when another rank fails meanwhile, TransportError when the store does not answer.
        """
        self.require_alive()
        statement = repr((purpose, facts))
        if statement not in self._agreed:
            require_equal(self.ranks, self.exchange(purpose, None, **facts), facts)
            self._agreed.add(statement)

    def exchange(
        self,
        purpose: str,
        problem: Exception | None = None,
        room: str = "",
        patience_s: float = PATIENCE_S,
        **facts: Any,
    ) -> list[Facts]:
        """Return the facts of every rank, in their order; collective. Raises as `agree` does, but for differences.

        `problem` is why this rank cannot go on: it raises it, and the others a ConfigurationError. room: exchanges that
        may go on at the same time, in different threads, have different ones. patience_s: as in exchange_facts.
        """
        self.require_alive()
        hear, me = failures_among(self.ranks), self.team.rank
        if room:
            hear = self._or_notice_loss(hear, purpose)
        store = self.store.within(room) if room else self.store
        self.store.set(_call_of(self.global_rank), purpose)
        try:
            answers = exchange_facts(store, self.ranks, me, purpose, facts, self.timeout_s, hear, problem, patience_s)
        except MismatchError:  # who waits elsewhere for this rank is to find out why
            raise
        except CommoptError:
            self._forget_call()
            raise
        self._forget_call()
        return answers

    def _or_notice_loss(self, hear: Callable[[], None], purpose: str) -> Callable[[], None]:
        """Return `hear`, which then also raises TransportError when a connection to a peer has broken.

        The store does not tell of a process that was killed, and who waits in it is in no operation of the team.
        """
        pause_s = _LOOK_FOR_LOSS_S
        next_s = time.monotonic() + pause_s

        def notice() -> None:
            nonlocal pause_s, next_s
            hear()
            if time.monotonic() >= next_s:
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                next_s = time.monotonic() + pause_s
                if lost := self.team.lost_ranks():
                    raise TransportError(f"rank {', '.join(map(str, lost))} left before {purpose}")

        return notice

    def _forget_call(self) -> None:
        with suppress(TransportError):
            self._briefly().delete_key(_call_of(self.global_rank))

    def unmet_call(self, rank: int) -> str | None:
        """Return the collective call to which `rank` has come while others have not, None where there is none."""
        return self._briefly().read(_call_of(rank))

    def enroll(self, kind: str, problem: Exception | None = None, **facts: Any) -> str:
        """Return the name of a new owner of operations, equal on all ranks, which compare `facts`; collective.

        Raises as `agree` and `exchange` do. Ranks may have counted differently, where one failed before it came here.
        """
        answers = self.exchange(f"{kind} setup", problem, number=next(self.owners), **facts)
        require_equal(self.ranks, answers, facts)
        number = max(answer["number"] for answer in answers)
        self.owners = count(number + 1)
        return f"{kind} {number}"

    def publish_failure(self, report: str) -> str:
        """Tell all ranks that this one failed; return what stands: the first report stays. Takes 2 s at most."""
        try:
            return self._briefly().compare_set(FAILURE_KEY, "", report).decode()
        except TransportError:  # nobody can be told this way
            return report

    def failure(self) -> str | None:
        """Return what the first failing rank reported, None when there is nothing, or no store within 2 s."""
        try:
            return self._briefly().read(FAILURE_KEY)
        except TransportError:
            return None

    def _briefly(self) -> LimitedStore:
        return self.store.until(time.monotonic() + _ANSWER_S)


_joined: WeakSet[Membership] = WeakSet()
_joined_lock = Lock()


def memberships() -> list[Membership]:
    """Return this process's memberships, also those whose process groups were destroyed."""
    with _joined_lock:
        return list(_joined)


def joined() -> list[Membership]:
    """Return this process's memberships whose process groups still exist."""
    return [membership for membership in memberships() if membership.alive]


def failures_among(ranks: Collection[int]) -> Callable[[], None]:
    """Return what raises LaneError when a rank reports a failure to this one and to another of `ranks`.

    It asks the memberships of now: a lane that fails meanwhile closes them all.
    """
    shared = [each for each in joined() if len(set(ranks).intersection(each.ranks)) > 1]  # one of them is this rank

    def hear() -> None:
        for membership in shared:
            report = membership.failure()
            if report is not None:
                raise LaneError(report)

    return hear
