"""This rank's place in one commopt setup: the cluster, the team, and a store to speak through when the team fails."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Any
from weakref import WeakSet, ref

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from commopt.errors import ConfigurationError, LaneError, TransportError
from commopt.groups.agreement import Facts, exchange_facts, require_equal
from commopt.groups.store import LimitedStore
from commopt.groups.team import Team
from topology import Cluster

FAILURE_KEY = "failure"
# For whoever has more to do than to wait for the store.
_ANSWER_S = 2.0


@dataclass(eq=False)
class Membership:
    """What `join` built over one process group; `name` and the keys of `store` are its own, equal on all its ranks."""

    name: str
    parent: ref[dist.ProcessGroup]
    cluster: Cluster
    team: Team
    timeout_s: float
    store: LimitedStore
    # Host-side counters: they advance alike on every rank because all ranks make the same calls.
    owners: count[int] = field(default_factory=count)
    rounds: count[int] = field(default_factory=count)  # of standalone all_reduce, so that dice fall anew each time
    # Per device type, since each has a lane of its own.
    submitted: Counter[str] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)
    compared: set[bytes] = field(default_factory=set)  # digests of calls that were seen to be equal on all ranks
    _met: Counter[str] = field(default_factory=Counter)  # how often for each purpose; of agreements: for each statement

    def __post_init__(self) -> None:
        with _joined_lock:
            _joined.add(self)
            _names.add(self.name)

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

    def agree(self, purpose: str, **facts: str) -> None:
        """Compare `facts` over the ranks, the first time they are stated; collective.

        Raises MismatchError on every rank when they differ, ConfigurationError when the process group is gone,
        LaneError when another rank fails meanwhile, TransportError when the store does not answer.
        """
        self.require_alive()
        statement = repr((purpose, facts))
        if self._met[statement]:
            return
        try:
            require_equal(self.ranks, self._meet(statement, purpose, None, facts), facts)
        except BaseException:
            self._met[statement] = 0
            raise

    def exchange(self, purpose: str, problem: Exception | None = None, **facts: Any) -> list[Facts]:
        """Return the facts of every rank, in their order; collective. Raises as `agree` does, but for differences.

        `problem` is why this rank cannot go on: it raises it, and the others a ConfigurationError.
        """
        return self._meet(purpose, purpose, problem, facts)

    def _meet(self, place: str, purpose: str, problem: Exception | None, facts: Facts) -> list[Facts]:
        """Exchange facts; `place` is what the ranks that come here call it alike, whatever their facts are."""
        self.require_alive()
        times = self._met[place]
        self._met[place] += 1  # who goes on first must know that the others, still here, will follow
        hear = failures_among(self.ranks)
        try:
            if checking():
                self.announce(place, times, f"{purpose} with {facts}", meeting=True)
            return exchange_facts(self.store, self.ranks, self.team.rank, purpose, facts, self.timeout_s, hear, problem)
        except BaseException:
            self._met[place] = times  # as on a rank that never came
            raise

    def enroll(self, kind: str, problem: Exception | None = None, **facts: str) -> str:
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

    def announce(self, place: str, times: int, what: str, *, meeting: bool) -> None:
        """Show, in every store this rank shares with others, what it now waits for (COMMOPT_CHECK).

        place: what all ranks call it, the type of the device of an operation or what a `meeting` is about. times: how
        often this rank was there before.
        """
        sight = {
            "membership": self.name,
            "place": place,
            "times": times,
            "meeting": meeting,
            "what": what,
            "ranks": self.ranks,
            "submitted": {membership.name: membership.submitted for membership in joined()},
        }
        for membership in joined():
            membership.store.set(f"now/{self.global_rank}", json.dumps(sight))

    def has_reached(self, place: str, times: int, *, meeting: bool) -> bool:
        """Return whether this rank came to a place more than `times`, as `announce` has it."""
        return (self._met if meeting else self.checked)[place] > times


_joined: WeakSet[Membership] = WeakSet()
_names: set[str] = set()  # also of those that are gone
_joined_lock = Lock()


def memberships() -> list[Membership]:
    """Return this process's memberships, also those whose process groups were destroyed."""
    with _joined_lock:
        return list(_joined)


def joined() -> list[Membership]:
    """Return this process's memberships whose process groups still exist."""
    return [membership for membership in memberships() if membership.alive]


def was_joined(name: str) -> bool:
    """Return whether this process ever had the membership of this name."""
    with _joined_lock:
        return name in _names


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


def checking() -> bool:
    """Return whether COMMOPT_CHECK asks for every operation to be compared over its ranks."""
    return os.environ.get("COMMOPT_CHECK", "") not in ("", "0")
