# SPDX-License-Identifier: Apache-2.0
"""Membership, this rank's place in one commopt setup, and all the ways in which its ranks compare what they do.

agree               facts, through the store: before a collective could hang
exchange, enroll    the same, where ranks need one another's answers, or a name
compare_call        the arguments of a standalone call, over the team
require_same_order  every task of a lane, with COMMOPT_CHECK=1
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from threading import Lock
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from commopt.errors import CommoptError, ConfigurationError, LaneError, MismatchError, TransportError
from commopt.groups.agreement import PATIENCE_S, Facts, meet, require_equal, require_same_purpose
from commopt.groups.connections import Connections
from commopt.groups.store import LimitedStore
from commopt.groups.team import Team
from topology import Cluster

FAILURE_KEY = "failure"
# How often a wait in the store looks for broken connections, ever more rarely.
_LOOK_FOR_LOSS_S = 0.5
_LONGEST_PAUSE_S = 10.0


def _call_of(rank: int) -> str:
    """Return the key of the call that a rank is in, or that it left because others did not come."""
    return f"call/{rank}"


# For callers that have more to do than to wait for the store.
_ANSWER_S = 2.0
_ORDER_POLL_S = 0.001
_CALLS_COMPARED = 512

HEARTBEAT_VARIABLE = "COMMOPT_HEARTBEAT"
_HEARTBEAT_S = 5.0  # named within six of them: 30 s
_SHORTEST_BEAT_S = 0.05
_LONGEST_BEAT_S = 600.0
# Of all ranks together; each makes three an interval. So the default interval holds up to 8,333 ranks.
_BEAT_REQUESTS_PER_S = 5000.0


def checking() -> bool:
    """Return whether COMMOPT_CHECK asks for every task of a lane to be compared over its ranks.

    Raises ConfigurationError for a value but 0 and 1.
    """
    value = os.environ.get("COMMOPT_CHECK", "") or "0"
    if value not in ("0", "1"):
        raise ConfigurationError(f"COMMOPT_CHECK={value!r} must be 1, or 0 (or unset) to compare nothing")
    return value == "1"


def heartbeat_interval_s() -> float:
    """Return the seconds between two beats, as COMMOPT_HEARTBEAT says; 0: none. Raises ConfigurationError."""
    text = os.environ.get(HEARTBEAT_VARIABLE, "").strip()
    try:
        seconds = float(text or _HEARTBEAT_S)
    except ValueError:
        seconds = -1.0
    if seconds != 0 and not _SHORTEST_BEAT_S <= seconds <= _LONGEST_BEAT_S:  # nor NaN
        raise ConfigurationError(
            f"{HEARTBEAT_VARIABLE}={text!r} is neither 0 (off) nor from {_SHORTEST_BEAT_S:g} to {_LONGEST_BEAT_S:g} "
            f"seconds; unset it for {_HEARTBEAT_S:g} seconds, or set for example {HEARTBEAT_VARIABLE}=5"
        )
    return seconds


def paced_interval_s(seconds: float, ranks: int) -> float:
    """Return the seconds between two beats in a world of `ranks`: more than asked for where that is too much."""
    return max(seconds, 3 * ranks / _BEAT_REQUESTS_PER_S) if seconds else 0.0


@dataclass(eq=False)
class Order:
    """Counts, by lane, the tasks of all memberships of the same ranks, which must come in one order on each."""

    store: LimitedStore
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class Membership:
    """This rank's place in the groups that `join` built over one process group.

    name, store: its own, with equal names and keys on all its ranks.
    world: the default process group of its time.
    owners, rounds: counters on the host. They advance alike on every rank, because all make the same calls.
    compared: digests of calls that were equal on all ranks.
    order: under COMMOPT_CHECK, which is alike on all ranks.
    heartbeat_s: seconds between two beats, alike on all ranks; 0: none.
    connections: of gloo between nodes, and who chose their number; alike on all ranks.
    """

    name: str
    parent: ref[dist.ProcessGroup]
    world: ref[dist.ProcessGroup]
    cluster: Cluster
    team: Team
    timeout_s: float
    store: LimitedStore
    owners: count[int] = field(default_factory=count)
    rounds: count[int] = field(default_factory=count)  # of standalone all_reduce, so that each has other random bits
    compared: set[bytes] = field(default_factory=set)
    order: Order | None = None
    heartbeat_s: float = 0.0
    connections: Connections = field(default_factory=Connections)
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
        interrupt, me = failures_among(self.ranks), self.team.rank
        if room:
            interrupt = self._or_notice_loss(interrupt, purpose)
        store = self.store.within(room) if room else self.store
        self.store.set(_call_of(self.global_rank), purpose)
        try:
            answers = meet(store, self.ranks, me, purpose, facts, self.timeout_s, interrupt, problem, patience_s)
        except MismatchError:  # a rank that waits elsewhere for this one must find out why
            raise
        except CommoptError:
            self._forget_call()
            raise
        self._forget_call()
        require_same_purpose(self.ranks, answers)  # where all have come, nobody waits elsewhere
        return answers

    def _or_notice_loss(self, interrupt: Callable[[], None], purpose: str) -> Callable[[], None]:
        """Return `interrupt`, which then also raises TransportError when a connection to a peer has broken.

        The store does not report a process that was killed, and a rank that waits in it is in no collective.
        """
        pause_s = _LOOK_FOR_LOSS_S
        next_s = time.monotonic() + pause_s

        def notice() -> None:
            nonlocal pause_s, next_s
            interrupt()
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

    def compare_call(self, facts: Mapping[str, str], call: str, device: torch.device) -> None:
        """Raise MismatchError on every rank when ranks make another `call`, or make it with other `facts`.

        Runs on the lane. A digest travels over the team, where a dead peer is noticed at once; only when digests differ
        do the facts follow. Over gloo before every call: tensors of different lengths would end the process, what one
        rank repeats may be new to another, and where one rank alone refused a call, its next one must not meet that of
        the others. Over NCCL, where the host would have to wait for the device, only the first time; after many
        different calls the rest is taken on trust there.
        """
        team, known = self.team, self.compared
        on_gloo = team.backend(device) == "gloo"
        if on_gloo:
            facts = {**facts, "call": call}
        text = json.dumps(facts).encode()
        digest = sha256(text).digest()[:7]
        if not on_gloo and (digest in known or len(known) >= _CALLS_COMPARED):
            return
        if team.all_equal(int.from_bytes(digest, "big"), device):
            if not on_gloo:
                known.add(digest)
            return
        lengths = torch.empty(team.size, dtype=torch.int64, device=device)
        team.all_gather(lengths, lengths.new_tensor([len(text)]))
        longest = int(lengths.max())
        texts = torch.empty(team.size, longest, dtype=torch.uint8, device=device)
        team.all_gather(texts.view(-1), texts.new_tensor(list(text.ljust(longest))))
        require_equal(team.ranks, [json.loads(bytes(row)) for row in texts.tolist()], facts)

    def require_same_order(self, lane: str, task: str) -> None:
        """Compare a task with what the other ranks run at this place of their lanes, under COMMOPT_CHECK.

        All memberships of the same ranks count together: waiting in another one is another order too. Raises
        MismatchError on every rank that differs, or waits for longer than the timeout for one that does.
        """
        assert self.order is not None
        store, me, index = self.order.store, self.global_rank, self.order.counts[lane]
        mine = f"{task}, over {self.name}"
        self.order.counts[lane] += 1
        store.set(f"operation/{lane}/{index}/{me}", mine)
        deadline = time.monotonic() + self.timeout_s
        waiting = [rank for rank in self.ranks if rank != me]
        while waiting:
            for rank in list(waiting):
                if (theirs := store.read(f"operation/{lane}/{index}/{rank}")) is None:
                    continue
                if theirs != mine:
                    raise MismatchError(
                        f"ranks run different operations at the same place: rank {rank} has [{theirs}], rank {me} has "
                        f"[{mine}]; every rank must make the same calls in the same order"
                    )
                waiting.remove(rank)
            if waiting and (report := self.failure()) is not None:
                raise LaneError(report)
            if waiting and time.monotonic() > deadline:
                raise MismatchError(f"rank {waiting} did not come to {mine} within {self.timeout_s:g} s")
            time.sleep(_ORDER_POLL_S if waiting else 0)
        if index:  # all ranks are here, so all have read the one before
            store.delete_key(f"operation/{lane}/{index - 1}/{me}")

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
    """Return a function that raises LaneError when a rank reports a failure to this one and to another of `ranks`.

    It asks the memberships of now: a lane that fails meanwhile closes them all.
    """
    shared = [each for each in joined() if len(set(ranks).intersection(each.ranks)) > 1]  # one of them is this rank

    def interrupt() -> None:
        for membership in shared:
            report = membership.failure()
            if report is not None:
                raise LaneError(report)

    return interrupt
