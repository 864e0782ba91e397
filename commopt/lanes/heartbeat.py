# SPDX-License-Identifier: Apache-2.0
"""The heartbeat: ranks that are silent, or missing in a task, are named long before the timeout, which ends the wait.

One thread a process writes beats into the rendezvous store and reads those of one neighbour. Nothing here is an error.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import Any
from weakref import ref

from commopt.errors import CommoptError, TransportError
from commopt.groups import LimitedStore, Membership
from commopt.lanes import activity, flight
from commopt.lanes.alarms import Beat, silent_text, waits_text
from commopt.lanes.lane import Place
from commopt.lanes.registry import lanes

_log = logging.getLogger("commopt")

SILENT_AFTER = 3
"""Intervals without a beat, or in one task, before anything is said: with two more to be heard, and one to spare."""
_STALE_AFTER = 1.5  # intervals, after which the next neighbour is watched too
_ANSWER_S = 2.0
_MOST_SHOWN = 8
_PAST = 12
_LEFT = {"left": True}


@dataclass
class _Peer:
    """What is known of another rank: its last beat, and when (time.monotonic) it was first seen."""

    beat: Beat = field(default_factory=dict)
    since_s: float = field(default_factory=time.monotonic)
    told: bool = False

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.since_s


class _Watch:
    """The beats and alarms of the ranks of one membership.

    me: this global rank.
    ring: the others in the order in which this rank looks at them: those on other nodes first.
    peers: what this rank has seen of them.
    store: None when this rank has left.
    alarms: how many of the log it has read.
    """

    def __init__(self, membership: Membership) -> None:
        self.membership = ref(membership)
        self.name, self.ranks, self.me = membership.name, frozenset(membership.ranks), membership.global_rank
        self.store: LimitedStore | None = membership.store.within("heartbeat")
        self.interval_s, self.ring = membership.heartbeat_s, _ring(membership)
        self.peers: dict[int, _Peer] = {}
        self.beats = self.alarms = 0
        self.claimed: set[str] = set()
        self.cut = False

    def brief_store(self) -> LimitedStore:
        """Return the store for a request that may take two seconds."""
        assert self.store is not None
        return self.store.until(time.monotonic() + _ANSWER_S)


def _ring(membership: Membership) -> list[int]:
    """Return the other ranks, from the next one on: of each node the first ranks, then the second ones, and so on.

    So a rank is watched from another node, and ranks of a node that is gone are all missed at the same time.
    """
    team = membership.team
    seen: dict[int, int] = {}
    places = []
    for rank, node in zip(team.ranks, team.wire.nodes, strict=True):
        places.append((seen.get(node, 0), node, rank))
        seen[node] = seen.get(node, 0) + 1
    order = [rank for _, _, rank in sorted(places)]
    me = order.index(membership.global_rank)
    return order[me + 1 :] + order[:me]


class Heartbeat:
    """The thread. It ends when no membership is left, and a new one begins with the next."""

    def __init__(self) -> None:
        self._watches: tuple[_Watch, ...] = ()
        self._gone: deque[_Watch] = deque(maxlen=_PAST)  # a lane that fails closes its groups first
        self._changing = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopping = self._ends_with_process = False
        self._waits: dict[str, tuple[Place, float, int]] = {}  # by device: since when, and how often it was told
        self._told: set[str] = set()  # tasks in which ranks wait or waited
        self._past: deque[Beat] = deque(maxlen=_PAST)
        self._record: flight.FlightFile | None = None

    # ------------------------------------------------------------------------------------- begin and end

    def watch(self, membership: Membership) -> None:
        """Beat for a membership from now on, until its groups are gone."""
        if membership.heartbeat_s == 0 or len(membership.ranks) == 1:
            return
        with self._changing:
            if any(each.name == membership.name for each in self._watches) or self._stopping:
                return
            self._watches = (*self._watches, _Watch(membership))
            if self._record is None or self._record.rank != membership.global_rank:  # of another world
                self._record = flight.FlightFile(membership.global_rank, flight.folder())
            if self._thread is None:
                # A daemon: a store that never answers must not keep this process from exiting.
                self._thread = threading.Thread(target=self._run, name="commopt-heartbeat", daemon=True)
                self._thread.start()
            if not self._ends_with_process:  # one of multiprocessing ends without atexit
                self._ends_with_process = True
                Finalize(None, self.stop, exitpriority=0)
        self._wake.set()  # the first beat at once

    def stop(self) -> None:
        """End the thread and leave word, so that nobody misses this rank: the process is about to exit."""
        with self._changing:
            self._stopping, thread = True, self._thread
        self._wake.set()
        if thread is not None:
            thread.join(2 * _ANSWER_S)
            if not thread.is_alive():
                self._leave(self._watches)
        waiting = {_key(place) for lane in lanes() if (place := lane.under_way()) is not None}
        for key in self._told - waiting:
            self._over(key)

    def _run(self) -> None:
        while True:
            interval_s = min((each.interval_s for each in self._watches), default=0.0)
            self._wake.wait(interval_s)
            self._wake.clear()
            with self._changing:
                gone = [each for each in self._watches if not _is_alive(each)]
                self._watches = tuple(each for each in self._watches if each not in gone)
                if self._stopping or not self._watches:
                    self._thread = None
            self._leave(gone)
            if self._thread is not threading.current_thread():
                return
            try:
                self._beat()
            except Exception as error:  # a mistake here must not be told in place of what it looks at
                _log.debug("heartbeat: %s: %s", type(error).__name__, error)

    def _leave(self, watches: Any) -> None:
        for each in watches:
            with suppress(CommoptError):
                each.brief_store().set(f"beat/{each.me}", json.dumps(_LEFT))
            each.store = None
            self._gone.append(each)

    # ------------------------------------------------------------------------------------- a beat

    def _beat(self) -> None:
        """Write a beat for every membership that is not inside a larger one, and look at what the others wrote."""
        mine = activity.beat()
        largest = [each for each in self._watches if not any(_holds(other, each) for other in self._watches)]
        for watch in self._watches:
            if watch not in largest:
                watch.peers.clear()  # seen anew, should it beat again
        for watch in largest:
            try:
                self._exchange(watch, mine)
            except TransportError as silence:
                self._cut_off(watch, silence)
                continue
            if watch.cut:
                watch.cut = False
                self._over("store")
        self._past.append({"at": round(time.time(), 3), **{name: mine[name] for name in ("phase", "clients", "lanes")}})
        self._look_at_lanes(largest)

    def _exchange(self, watch: _Watch, mine: Beat) -> None:
        watch.beats += 1
        watch.brief_store().set(f"beat/{watch.me}", json.dumps({"number": watch.beats, **mine}))
        for rank in watch.ring:
            peer = self._look_at(watch, rank)
            left = peer.beat.get("left", False)
            if not left and peer.silent_s >= SILENT_AFTER * watch.interval_s and not peer.told:
                peer.told = True
                self._publish(watch, kind="silent", rank=rank, silent_s=peer.silent_s, beat=peer.beat)
            if not left and peer.silent_s < _STALE_AFTER * watch.interval_s:
                break
        while watch.brief_store().check([f"alarm/{watch.alarms + 1}"]):
            watch.alarms += 1
            self._hear(watch, json.loads(watch.brief_store().get(f"alarm/{watch.alarms}")))

    def _look_at(self, watch: _Watch, rank: int) -> _Peer:
        """Read the beat of a rank; take note of when it changed."""
        peer = watch.peers.setdefault(rank, _Peer())
        store = watch.brief_store()
        if not peer.beat and not store.check([f"beat/{rank}"]):
            return peer
        beat = json.loads(store.get(f"beat/{rank}"))
        if beat.get("number") != peer.beat.get("number") or "left" in beat:
            if peer.told:
                self._publish(watch, kind="over", key=f"silent {rank}")
            watch.peers[rank] = peer = _Peer(beat if "left" not in beat else {**peer.beat, **beat})
        return peer

    # ------------------------------------------------------------------------------------- alarms

    def _publish(self, watch: _Watch, **alarm: Any) -> None:
        """Write an alarm into the log of the membership, which all ranks read, this one too."""
        store, number = watch.brief_store(), watch.alarms + 1
        text = json.dumps({**alarm, "by": [watch.me, watch.beats]})  # like no other
        # A number that was drawn before could remain without its alarm, and nobody would read on behind it.
        while store.compare_set(f"alarm/{number}", "", text).decode() != text:
            number += 1

    def _hear(self, watch: _Watch, alarm: Beat) -> None:
        if alarm["kind"] == "over":
            self._over(alarm["key"])
            return
        if alarm["kind"] == "silent":
            rank, beat = alarm["rank"], alarm["beat"]
            if rank == watch.me:
                return
            peer = watch.peers.setdefault(rank, _Peer(beat))
            if beat.get("number", 0) >= peer.beat.get("number", 0):
                peer.beat = beat
            reason, key = silent_text(rank, beat, alarm["silent_s"]), f"silent {rank}"
        else:
            for rank, beat in alarm["missing"].items():
                watch.peers.setdefault(int(rank), _Peer()).beat = beat
            reason, key = waits_text(alarm), alarm["key"]
            self._told.add(key)
        self._tell(watch, key, reason)

    def _tell(self, watch: _Watch, key: str, reason: str) -> None:
        path = self._write(watch, key, reason)
        where = "" if path is None else f"; flight record: {path}"
        _log.warning("%s; nothing has failed yet, the timeout ends the wait%s", reason, where)

    def _write(self, watch: _Watch, key: str, reason: str) -> Any:
        if self._record is None:
            return None
        peers = {rank: {**peer.beat, "silent_s": round(peer.silent_s, 1)} for rank, peer in watch.peers.items()}
        return self._record.add(key, reason, sorted(watch.ranks), peers, list(self._past))

    def _over(self, key: str) -> None:
        self._told.discard(key)
        if self._record is not None and (reason := self._record.end(key)) is not None:
            _log.warning("over: %s", reason.partition(",")[0])

    def _cut_off(self, watch: _Watch, silence: TransportError) -> None:
        """Tell that the store does not answer; a connection that has ended is what collectives notice themselves."""
        if not watch.cut and watch.brief_store().silent_s >= SILENT_AFTER * watch.interval_s:
            watch.cut = True
            holder = "torchrun's agent" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
            self._tell(watch, "store", f"rank {watch.me} gets no answer from the store of {holder}: {silence}")

    # ------------------------------------------------------------------------------------- waits

    def _look_at_lanes(self, watches: list[_Watch]) -> None:
        """Find lanes that are in one task for long; ask, ever more rarely, who is missing in it."""
        now_s, before, self._waits = time.monotonic(), self._waits, {}
        for lane in lanes():
            place, device = lane.under_way(), str(lane.device)
            if place is None:
                continue
            known = before.get(device)
            since_s, times = (known[1], known[2]) if known is not None and known[0] == place else (now_s, 0)
            watch = next((each for each in watches if each.ranks.issuperset(place.ranks)), None)
            if watch is not None and now_s - since_s >= SILENT_AFTER * watch.interval_s * 2**times:
                with suppress(TransportError):
                    self._ask_who_is_missing(watch, place, now_s - since_s, times)
                times += 1
            self._waits[device] = place, since_s, times
        waiting = {_key(place) for place, _, _ in self._waits.values()}
        for watch in watches:
            for key in watch.claimed - waiting:
                watch.claimed.discard(key)
                with suppress(TransportError):
                    self._publish(watch, kind="over", key=key)

    def _ask_who_is_missing(self, watch: _Watch, place: Place, waited_s: float, times: int) -> None:
        """Read all beats and publish who has not come to `place`, unless another rank does."""
        key = _key(place)
        claim = watch.brief_store().compare_set(f"wait/{key}/{times}", "", str(watch.me))
        if claim.decode() != str(watch.me):
            return
        watch.claimed.add(key)
        beats = {rank: self._look_at(watch, rank).beat for rank in place.ranks if rank != watch.me}
        missing = {rank: beat for rank, beat in beats.items() if _submitted(beat, place) < place.sequence}
        others = {
            rank: f"{other['title']} ({other['owner']}, operation {other['sequence']})"
            for rank, beat in beats.items()
            for other in beat.get("lanes", {}).values()
            if rank not in missing and (other["owner"], other["sequence"]) != (place.owner, place.sequence)
        }
        self._publish(
            watch,
            kind="waits",
            key=key,
            task=str(place),
            waiting=len(place.ranks) - len(missing),
            waited_s=waited_s,
            missing=dict(list(missing.items())[:_MOST_SHOWN]),
            more=max(0, len(missing) - _MOST_SHOWN),
            others=dict(list(others.items())[:_MOST_SHOWN]),
        )

    # ------------------------------------------------------------------------------------- failures

    def record_failure(self, place: Place, report: str) -> None:
        """Write the record of a lane that failed, for good."""
        record = self._record
        known = (*self._watches, *reversed(self._gone))
        watch = next((each for each in known if each.ranks.issuperset(place.ranks)), None)
        if record is None or watch is None:
            return
        path = self._write(watch, "failed", f"in {place}: {report}")
        self._record = flight.FlightFile(watch.me, flight.folder())
        if path is not None:
            _log.warning("flight record: %s (python -m commopt doctor --flight with those of all ranks)", path)


def _is_alive(watch: _Watch) -> bool:
    membership = watch.membership()
    return membership is not None and membership.alive


def _holds(larger: _Watch, smaller: _Watch) -> bool:
    """Return whether the beats of one membership serve another one; of equal ones the first name's do."""
    if larger is smaller or not larger.ranks.issuperset(smaller.ranks):
        return False
    return larger.ranks != smaller.ranks or larger.name < smaller.name


def _key(place: Place) -> str:
    return f"{place.membership} {place.owner} {place.sequence}"


def _submitted(beat: Mapping[str, Any], place: Place) -> int:
    """Return the number of the latest task of the same client; -1 for a client that is not there."""
    found = beat.get("clients", {}).get(f"{place.membership} {place.owner}")
    return -1 if found is None else int(found[0])


# ------------------------------------------------------------------------------------- of this process

_heartbeat = Heartbeat()


def watch(membership: Membership) -> None:
    """Beat for a membership, as Heartbeat.watch."""
    _heartbeat.watch(membership)


def record_failure(place: Place, report: str) -> None:
    """Write the flight record of a failure, as Heartbeat.record_failure."""
    with suppress(Exception):  # which must reach its callers whatever happens here
        _heartbeat.record_failure(place, report)


def _stop() -> None:
    _heartbeat.stop()


def _forget() -> None:
    """Beat no more in a forked child, whose parent does."""
    global _heartbeat
    atexit.unregister(_stop)
    activity.forget()
    _heartbeat = Heartbeat()


atexit.register(_stop)  # after the lanes' handler, and so called before it
os.register_at_fork(after_in_child=_forget)
