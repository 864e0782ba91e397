# SPDX-License-Identifier: Apache-2.0
"""The server: a thread for each worker takes deltas and gives parameters; another hands out what workers ask for."""

from __future__ import annotations

import atexit
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Condition, Event, Lock, Thread, current_thread
from typing import Any

import torch

from commopt.errors import CommoptError, ConfigurationError, MismatchError, TransportError
from commopt.feedback import Layout
from commopt.groups.membership import poll
from commopt.server.link import Link
from commopt.server.rounds import Rounds
from commopt.server.scheduler import SERVER, Participant
from commopt.server.settings import ParameterServer
from commopt.server.shared import Delta, Shared

_log = logging.getLogger("commopt")

_POLL_S = 0.01

Request = Mapping[str, Any]


@dataclass(eq=False)
class _Peer:
    """A worker, as its thread knows it. asked: how many requests it has made."""

    number: int
    requests: SimpleQueue[Request | None] = field(default_factory=SimpleQueue)
    asked: int = 0
    link: Link | None = None
    gone: str = ""
    thread: Thread = field(init=False)


class Server:
    """Holds parameters and outer momentum for workers, in threads of this process.

    address: the scheduler's. workers: the first round begins when so many have joined. The settings are the first
    worker's, and so are the parameters, unless `load_state_dict` was called. failure: why it has ended by itself.
    Raises TransportError when the scheduler does not answer, ConfigurationError when that has a server already.
    """

    def __init__(self, address: str, *, workers: int = 1) -> None:
        self.failure = ""
        self._rounds = Rounds(workers)
        self._facts: Request = {}  # of the first worker
        self._saved: Mapping[str, Any] | None = None
        self._changed = Condition()  # guards all above
        self._peers: dict[int, _Peer] = {}
        self._joining, self._ending = Lock(), Event()
        self._me = me = Participant(address, SERVER, self._hear)
        if not poll(self._claim, time.monotonic() + 1.5 * me.timeout_s):
            me.leave("is one too many")
            raise ConfigurationError(f"the scheduler at {address} has a server already; end that first")
        Thread(target=self._listen, name="commopt-server", daemon=True).start()
        atexit.register(self.close)

    @property
    def round(self) -> int:
        """How many rounds have closed; 0 before the first worker has come."""
        with self._changed:
            return 0 if self._rounds.shared is None else self._rounds.shared.round

    @property
    def done(self) -> float:
        """What workers have done in all, as deltas weigh: of those that have counted."""
        with self._changed:
            return 0.0 if self._rounds.shared is None else self._rounds.shared.done

    @property
    def workers(self) -> list[int]:
        """The numbers of those that rounds wait for."""
        with self._changed:
            return sorted(number for number, seat in self._rounds.seats.items() if seat.takes_part)

    def state_dict(self) -> dict[str, Any]:
        """Return "parameters" and "momentum" by name (float32, copies), "round", and what workers have "done" in all.

        Raises ConfigurationError before there are any.
        """
        with self._changed:
            if self._rounds.shared is None:
                raise ConfigurationError("no worker has joined yet, so the server has no parameters; save later")
            return self._rounds.shared.state()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; the first worker's model must fit.

        Raises ConfigurationError once a worker has joined.
        """
        with self._changed:
            if self._rounds.shared is not None:
                raise ConfigurationError("a worker has joined already; load a checkpoint into a new Server, at once")
            self._saved = saved

    def close(self, why: str = "") -> None:
        """End it; workers get an error when they next turn to it."""
        atexit.unregister(self.close)
        if not self._ending.is_set():
            self.failure = why
            self._ending.set()
            for peer in list(self._peers.values()):
                self._drop(peer, "the server has ended")
                if peer.thread is not current_thread():
                    peer.thread.join(self._me.timeout_s)
            self._me.leave(why or "has ended")

    # ------------------------------------------------------------------------------------- who is there

    def _claim(self) -> bool:
        """Become the scheduler's server, if there is none, or none any more; return whether this is it."""
        store, mine = self._me.store, str(self._me.number)
        there = store.compare_set(SERVER, "", mine).decode()
        if there in self._me.gone():
            there = store.compare_set(SERVER, there, mine).decode()
        return there == mine

    def _hear(self, number: int, why: str) -> None:
        """Take note that somebody is gone; in the thread that beats."""
        if number in (-1, self._me.number):
            _log.error("the parameter server ends: %s", why)
            self.close(why)
        elif peer := self._peers.get(number):
            self._drop(peer, why)

    def _listen(self) -> None:
        """Hand out what workers ask for, and close rounds whose time is over."""
        store, seen = self._me.store, 0
        others, known = set[int](), 0
        while not self._ending.wait(_POLL_S):
            with self._changed:
                if self._rounds.close_if_due():
                    self._changed.notify_all()
            try:
                if (asked := store.add("requests", 0)) == seen:
                    continue
                seen, count = asked, store.add("count", 0)
                others, known = others.union(range(known, count)) - set(map(int, self._me.gone())), count
                for number in [each for each in others if store.check([f"request/{each}/0"])]:
                    others.remove(number)
                    peer = self._peers[number] = _Peer(number)
                    name = f"commopt-worker-{number}"
                    peer.thread = Thread(target=self._serve, args=(peer,), name=name, daemon=True)
                    peer.thread.start()
                for peer in list(self._peers.values()):
                    while (request := store.read(f"request/{peer.number}/{peer.asked}")) is not None:
                        store.delete_key(f"request/{peer.number}/{peer.asked}")
                        peer.asked += 1
                        peer.requests.put(json.loads(request))
            except TransportError:  # the thread that beats says it
                return

    def _serve(self, peer: _Peer) -> None:
        """Do what a worker asks for, until it is gone; in its thread."""
        why = "has left"
        try:
            while (request := peer.requests.get()) is not None:
                {"join": self._admit, "push": self._take, "pull": self._give}[request["kind"]](peer, request)
        except Exception as error:  # whatever it is, it ends this worker, which would else wait for ever, and no other
            why = str(error) if isinstance(error, CommoptError) else f"{type(error).__name__}: {error}"
        self._drop(peer, why)

    def _drop(self, peer: _Peer, why: str) -> None:
        """Go on without a worker."""
        with self._changed:
            if peer.gone:
                return
            peer.gone = why
            self._peers.pop(peer.number, None)
            self._rounds.leave(peer.number)
            self._changed.notify_all()
        _log.info("worker %d is gone: %s", peer.number, why)
        peer.requests.put(None)
        if peer.link is not None:
            peer.link.close()

    # ------------------------------------------------------------------------------------- what workers ask for

    def _admit(self, peer: _Peer, facts: Request) -> None:
        """Compare a worker's settings and model with the first one's, and connect to it."""
        with self._joining:
            problem, shared = "", self._rounds.shared
            sends = shared is None and self._saved is None
            try:
                _require_equal(facts, self._facts)
                shared = shared or _made_of(facts, self._saved)
            except CommoptError as error:
                problem = str(error)
            self._answer(peer, problem=problem, sends=sends, server=self._me.number)
            if shared is None or problem:
                raise MismatchError(problem)
            peer.link = Link(self._me, self._me.number, peer.number, lambda why: self._drop(peer, why))
            for values in shared.exact if sends else ():
                peer.link.receive(values)
            with self._changed:
                self._require_there(peer)
                self._rounds.shared, self._facts = shared, self._facts or facts
                self._rounds.join(peer.number)
                self._changed.notify_all()
        _log.info("worker %d has joined", peer.number)

    def _take(self, peer: _Peer, request: Request) -> None:
        """Receive a delta."""
        assert peer.link is not None
        shared, base = self._rounds.held(), int(request["base"])
        rows = [torch.empty(wire.rows(base).nbytes, dtype=torch.uint8, device="cpu") for wire in shared.wires]
        delta = Delta(base, float(request["weight"]), list(map(peer.link.receive, rows)))
        with self._changed:
            self._require_there(peer)
            self._rounds.add(peer.number, delta)
            seat = self._rounds.seats[peer.number]
            self._changed.notify_all()
        if not seat.counted:
            _log.warning("a delta of worker %d was not counted: it was %d rounds late", peer.number, seat.late)

    def _give(self, peer: _Peer, request: Request) -> None:
        """Send the parameters, once the round that the worker's delta is in has closed."""
        with self._changed:
            self._changed.wait_for(lambda: peer.gone or self._rounds.may_pull(peer.number))
            self._require_there(peer)
            shared, seat = self._rounds.held(), self._rounds.seats[peer.number]
            updates = shared.update is not None and seat.base == shared.round - 1 and not request["whole"]
            tensors = (shared.update or []) if updates else list(shared.public)
            seat.base = shared.round
            answer = {"round": seat.base, "updates": updates, "counted": seat.counted, "late": seat.late}
        self._answer(peer, **answer)
        assert peer.link is not None
        for tensor in tensors:
            peer.link.send(tensor)

    def _require_there(self, peer: _Peer) -> None:
        if peer.gone:
            raise TransportError(peer.gone)

    def _answer(self, peer: _Peer, **answer: Any) -> None:
        self._me.store.set(f"answer/{peer.number}/{peer.asked - 1}", json.dumps(answer))


def _made_of(facts: Request, saved: Mapping[str, Any] | None) -> Shared:
    """Return the parameters that the first worker has told of, still without values unless some were loaded."""
    layouts = [Layout.of_parameters((name, shape) for name, shape, _ in parcel) for parcel in facts["parcels"]]
    values = [torch.zeros(layout.numel, device="cpu") for layout in layouts]
    shared = Shared(ParameterServer.read(facts["settings"]), layouts, values)
    if saved is not None:
        shared.load(saved)
    return shared


def _require_equal(facts: Request, firsts: Request) -> None:
    """Raise MismatchError, naming field and both values, unless a worker has what the first one had."""
    mine, theirs = _flat(facts), _flat(firsts or facts)
    for name in [*mine, *theirs]:
        if mine.get(name) != theirs.get(name):
            raise MismatchError(
                f"{name} differs: this worker has {mine.get(name, 'none')}, those of this parameter server have "
                f"{theirs.get(name, 'none')}; every worker must have the same model and the same ParameterServer(...)"
            )


def _flat(facts: Request) -> dict[str, str]:
    """Return facts by the names under which they are compared."""
    found = {"commopt version": facts["version"], **facts["settings"]}
    for place, parcel in enumerate(facts["parcels"]):
        found |= {f"parameter {name!r}": f"{dtype} {shape}, in part {place}" for name, shape, dtype in parcel}
    return found
