"""This rank's place in one commopt setup: the cluster, the team, and a store to speak through when the team fails."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from weakref import WeakSet, ref

import torch.distributed as dist

from commopt.errors import ConfigurationError, LaneError
from commopt.groups.agreement import Facts, exchange_facts, require_equal
from commopt.groups.team import Team, is_alive
from topology import Cluster

# A place in a program that ranks reach alike: the statement of an agreement, or the device type and number of an
# operation on one membership.
Place = str | tuple[str, int]

_FAILURE_KEY = "failure"


@dataclass(eq=False)
class Membership:
    """What `join` built over one process group; `name` and `store` are its own, and equal on all its ranks."""

    name: str
    parent: ref[dist.ProcessGroup]
    cluster: Cluster
    team: Team
    timeout_s: float
    store: dist.Store
    # Host-side counters: they advance alike on every rank because all ranks make the same calls.
    owners: count[int] = field(default_factory=count)
    rounds: count[int] = field(default_factory=count)  # of standalone all_reduce, so that dice fall anew each time
    # Per device type, since each has a lane of its own.
    submitted: Counter[str] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)
    compared: set[bytes] = field(default_factory=set)  # digests of calls that were seen to be equal on all ranks
    _agreed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
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
        parent = self.parent()
        return parent is not None and is_alive(parent) and not self.team.closed

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
        LaneError when another rank fails meanwhile.
        """
        self.require_alive()
        statement = repr((purpose, facts))
        if statement in self._agreed:
            return
        self._agreed.add(statement)
        try:
            require_equal(self.ranks, self.exchange(purpose, **facts), facts)
        except BaseException:
            self._agreed.discard(statement)
            raise

    def exchange(self, purpose: str, **facts: str) -> list[Facts]:
        """Return the facts of every rank, in their order; collective. Raises as `agree` does, but for differences."""
        self.require_alive()
        if checking():
            self.announce(repr((purpose, facts)), f"{purpose} with {facts}")
        return exchange_facts(
            self.store, self.ranks, self.team.rank, purpose, facts, self.timeout_s, self._raise_failure
        )

    def publish_failure(self, report: str) -> None:
        """Tell all ranks that this one failed; the first report stays."""
        try:
            self.store.compare_set(_FAILURE_KEY, "", report)
        except RuntimeError:  # the process that held the store is gone: nobody is left to tell this way
            return

    def failure(self) -> str | None:
        """Return what the first failing rank reported, or None when there is nothing (or no store)."""
        try:
            return self.store.get(_FAILURE_KEY).decode() if self.store.check([_FAILURE_KEY]) else None
        except RuntimeError:
            return None

    def _raise_failure(self) -> None:
        report = self.failure()
        if report is not None:
            raise LaneError(report)

    def announce(self, place: Place, what: str) -> None:
        """Show, in every store this rank shares with others, what it now waits for (COMMOPT_CHECK)."""
        sight = {
            "membership": self.name,
            "place": place,
            "what": what,
            "ranks": self.ranks,
            "submitted": {membership.name: membership.submitted for membership in joined()},
        }
        for membership in joined():
            membership.store.set(f"now/{self.global_rank}", json.dumps(sight))

    def has_reached(self, place: Place) -> bool:
        """Return whether this rank came to `place`, as `announce` has it."""
        if isinstance(place, str):
            return place in self._agreed
        device_type, index = place
        return self.checked[device_type] > index


_joined: WeakSet[Membership] = WeakSet()
_joined_lock = Lock()


def joined() -> list[Membership]:
    """Return this process's memberships whose process groups still exist."""
    with _joined_lock:
        memberships = list(_joined)
    return [membership for membership in memberships if membership.alive]


def checking() -> bool:
    """Return whether COMMOPT_CHECK asks for every operation to be compared over its ranks."""
    return os.environ.get("COMMOPT_CHECK", "") not in ("", "0")
