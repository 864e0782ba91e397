# SPDX-License-Identifier: Apache-2.0
"""The server: holds the parameters; for each worker it has a thread that listens and one that answers."""

from __future__ import annotations

import atexit
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from threading import Condition, Event, Lock, Thread
from typing import Any

import torch
from torch import Tensor

from commopt.errors import ConfigurationError, MismatchError, TransportError, UnsupportedTensorError
from commopt.server.door import Door
from commopt.server.facts import FACTS_NBYTES, Facts
from commopt.server.link import BEATS, SAY_S, EndedError, Link, plain, reason
from commopt.server.rounds import Rounds
from commopt.server.scheduler import Registration
from commopt.server.secret import LOOPBACK, given_secret, is_loopback
from commopt.server.shared import Delta, Shared, require_saved

_log = logging.getLogger("commopt")

_LOOK_S, _IDLE_LOOK_S = 0.01, 0.2
_STALLED = 10  # in the timeout: an upload that stands still for so short lets another worker try
_REQUEST_NBYTES = 4096
_MOST_WEIGHT = 1e15
_WILDCARDS = ("0.0.0.0", "::")


@dataclass(eq=False)
class _Peer:
    """A worker. wants: it has asked for the parameters; whole: for all of them. gone: why it is no longer there."""

    number: int
    link: Link
    wants: bool = False
    whole: bool = False
    gone: str = ""
    answers: Thread | None = None


@dataclass
class _Upload:
    """The worker that sends the first parameters, and when a part of them last came (time.monotonic)."""

    number: int
    last: float = field(default_factory=time.monotonic)


class Server:
    """Holds parameters and outer momentum for workers, in threads of this process.

    address: the scheduler's. workers: the first round begins when so many are there. host: the address to listen on;
    others than those of this machine alone want a secret. port: 0 takes any. secret: None takes that of COMMOPT_SECRET.
    The settings are the first worker's, and so are the parameters, unless `load_state_dict` was called. failure: why it
    has ended by itself. Raises TransportError when the scheduler does not answer, ConfigurationError when that has a
    server already or another secret, or when it cannot listen there.
    """

    def __init__(
        self, address: str, *, workers: int = 1, host: str = LOOPBACK, port: int = 0, secret: str | None = None
    ) -> None:
        self.failure = ""
        self._rounds = Rounds(workers)
        self._facts: Facts | None = None  # of the first worker
        self._saved: Mapping[str, Any] | None = None
        self._upload: _Upload | None = None
        self._peers: dict[int, _Peer] = {}
        self._numbers = count(1)
        self._changed = Condition()  # guards all above
        self._ending = Event()
        self._closing = Lock()
        self._timeout_s = 30.0
        shared_secret = given_secret(secret)
        self._door = Door(host, port, shared_secret, self._timeout_s, self._serve, self._hear)
        self.port = self._door.port
        advertised = "" if host in _WILDCARDS else LOOPBACK if is_loopback(host) else host
        try:
            self._me = Registration(address, shared_secret, advertised, self.port, self._hear)
        except BaseException:
            self._door.close()
            raise
        self._timeout_s = self._me.timeout_s
        self._me.listen()
        Thread(target=self._look_after, name="commopt-server", daemon=True).start()
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

    def stats(self) -> dict[str, Any]:
        """Return "rounds", "done", "workers", "refused" (late deltas), "waits_for" and "memory_nbytes".

        The latter are bytes of tensors, by what they are: "parameters", "momentum", "sent" (with a compressor: what
        workers have, and the last update), "earlier_rounds" (without one: those that workers still train from) and
        "deltas" (of the open round). While a round closes parameters and momentum are held twice.
        """
        with self._changed:
            shared, rounds = self._rounds.shared, self._rounds
            return {
                "rounds": 0 if shared is None else shared.round,
                "done": 0.0 if shared is None else shared.done,
                "workers": sorted(rounds.seats),
                "refused": rounds.refused,
                "waits_for": rounds.waits_for()[0] if rounds.seats else "",
                "memory_nbytes": rounds.memory(),
            }

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

        Raises ConfigurationError for what is damaged, and once a worker has joined.
        """
        require_saved(saved)
        with self._changed:
            if self._rounds.shared is not None:
                raise ConfigurationError("a worker has joined already; load a checkpoint into a new Server, at once")
            self._saved = saved

    def close(self, why: str = "") -> None:
        """End it; workers get an error when they next turn to it. why: what has failed."""
        with self._closing:
            if self._ending.is_set():
                return
            self.failure = why
            self._ending.set()
        atexit.unregister(self.close)
        if why:
            _log.error("the parameter server ends: %s", why)
        for peer in list(self._peers.values()):
            self._drop(peer, f"the server has ended{': ' * bool(why)}{why}")
        self._me.leave(why or "has ended")
        self._door.close()

    # ------------------------------------------------------------------------------------- who is there

    def _hear(self, why: str) -> None:
        """End, as the scheduler is gone, or nobody can connect any more: from another thread, as `close` waits."""
        Thread(target=self.close, args=(why,), name="commopt-server-end", daemon=True).start()

    def _look_after(self) -> None:
        """Close rounds whose time is over, and say who is waited for."""
        since, said_of = time.monotonic(), -1
        try:
            while not self._ending.is_set():
                with self._changed:
                    open_s = _LOOK_S if self._rounds.memory()["deltas"] else _IDLE_LOOK_S
                    self._changed.wait(open_s)
                    self._settle()
                    waiting = [peer.number for peer in self._peers.values() if peer.wants]
                    words, _ = self._rounds.waits_for()
                    now_round = -1 if self._rounds.shared is None else self._rounds.shared.round
                if not waiting or now_round != said_of:
                    since, said_of = time.monotonic(), now_round
                elif time.monotonic() > since + SAY_S:
                    since = time.monotonic()
                    _log.warning("waiting for %s", words)
        except Exception as error:
            self.close(f"its rounds have failed: {reason(error)}")

    def _settle(self) -> None:
        """Close the round if it is due. To be called with the lock; what fails ends the server, from outside of it."""
        try:
            if self._rounds.close_if_due():
                self._changed.notify_all()
        except Exception as error:
            why = (
                f"round {self._rounds.held().round} could not be closed: {reason(error)}; the parameters are as before"
            )
            self._hear(why)

    def _serve(self, link: Link, address: str) -> None:
        """Listen to a worker until it is gone; in a thread of its own."""
        with self._changed:
            peer = _Peer(next(self._numbers), link)
            self._peers[peer.number] = peer
        link.wait_at_most(self._timeout_s)
        why, kind = "has left", ""
        try:
            if self._ending.is_set():
                raise TransportError("the server has ended")
            self._admit(peer)
            peer.answers = Thread(target=self._answer, args=(peer,), name=f"commopt-worker-{peer.number}", daemon=True)
            peer.answers.start()
            while True:
                request = link.hear(_REQUEST_NBYTES)
                if request.get("kind") == "push":
                    self._take(peer, request)
                elif request.get("kind") == "pull":
                    self._want(peer, request)
                else:
                    raise MismatchError(f"it asked for {plain(request.get('kind'))!r}, which is neither push nor pull")
        except EndedError as error:
            why = str(error) or why
        except Exception as error:  # whatever it is, it ends this worker, which would else wait for ever, and no other
            why, kind = plain(reason(error)), type(error).__name__
        self._drop(peer, why, kind)
        link.drain()

    def _drop(self, peer: _Peer, why: str, kind: str = "") -> None:
        """Go on without a worker, and let it know."""
        with self._changed:
            if peer.gone:
                return
            peer.gone = why or "has left"
            self._peers.pop(peer.number, None)
            if self._upload is not None and self._upload.number == peer.number:
                self._upload = None
            joined = peer.number in self._rounds.seats
            self._rounds.leave(peer.number)
            self._settle()
            self._changed.notify_all()
        _log.info("worker %d is gone: %s", peer.number, peer.gone)
        peer.link.part(why, kind)
        if joined:
            self._me.tell(peer.number, peer.gone)

    # ------------------------------------------------------------------------------------- joining

    def _admit(self, peer: _Peer) -> None:
        """Compare a worker's settings and model with the first one's; take its parameters if there are none yet."""
        facts = Facts.read(peer.link.hear(FACTS_NBYTES))
        uploads = self._wait_for_turn(peer, facts)
        peer.link.say(number=peer.number, sends=uploads, timeout=self._timeout_s)
        if uploads:
            values = [torch.empty(layout.numel, device="cpu") for layout in facts.layouts()]
            for each in values:
                peer.link.fill(each, lambda: self._goes_on(peer))
            shared = Shared(facts.read_settings(), facts.layouts(), values)
            if not math.isfinite(shared.norm()):
                raise UnsupportedTensorError("its parameters are not finite")
        with self._changed:
            self._require_there(peer)
            if uploads and self._rounds.shared is None:
                self._rounds.shared = shared
                self._facts = facts
            self._require_like_firsts(facts)  # another one may have been faster
            self._upload = None
            self._rounds.join(peer.number)
            self._changed.notify_all()
        _log.info("worker %d has joined", peer.number)
        self._me.tell(peer.number)

    def _wait_for_turn(self, peer: _Peer, facts: Facts) -> bool:
        """Return whether a worker is to send the parameters: once nobody else does. False: there are some."""
        facts.read_settings()
        while True:
            with self._changed:
                self._require_there(peer)
                if self._rounds.shared is None and self._saved is not None:
                    self._rounds.shared = self._of_checkpoint(facts, self._saved)
                    self._facts = facts
                if self._rounds.shared is not None:
                    self._require_like_firsts(facts)
                    return False
                upload, stalled_s = self._upload, self._timeout_s / _STALLED
                if upload is None or time.monotonic() > upload.last + stalled_s:
                    self._upload = _Upload(peer.number)
                    return True
                self._changed.wait(stalled_s)
                words = {"waits_for": f"the parameters that worker {upload.number} sends"}
            peer.link.beat(**words)

    def _of_checkpoint(self, facts: Facts, saved: Mapping[str, Any]) -> Shared:
        layouts = facts.layouts()
        shared = Shared(facts.read_settings(), layouts, [torch.zeros(each.numel, device="cpu") for each in layouts])
        try:
            shared.load(saved)
        except ConfigurationError as error:
            raise MismatchError(str(error)) from None
        return shared

    def _require_like_firsts(self, facts: Facts) -> None:
        if self._facts is not None:
            facts.require_equal(self._facts)

    def _goes_on(self, peer: _Peer) -> None:
        with self._changed:
            if self._rounds.shared is not None:
                return
            if self._upload is None or self._upload.number != peer.number:
                self._upload = _Upload(peer.number)
            self._upload.last = time.monotonic()

    # ------------------------------------------------------------------------------------- what workers ask for

    def _take(self, peer: _Peer, request: Mapping[str, Any]) -> None:
        """Receive a delta, and look at it before it counts."""
        base, weight = request.get("base"), request.get("weight")
        if not isinstance(base, int) or isinstance(base, bool):
            raise MismatchError(f"the round that its delta is of is {plain(base)}, and must be a whole number")
        if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not 0 < weight <= _MOST_WEIGHT:
            raise MismatchError(
                f"its delta weighs {plain(weight)}, and must weigh more than 0, and {_MOST_WEIGHT:g} at most"
            )
        with self._changed:
            self._require_there(peer)
            self._rounds.require_base(peer.number, base)
            shared = self._rounds.held()
        rows: list[Tensor] = []
        for wire in shared.wires:
            rows.append(peer.link.fill(torch.empty(wire.rows(base).nbytes, dtype=torch.uint8, device="cpu")))
        delta = Delta(base, float(weight), rows)
        with self._changed:
            self._require_there(peer)
            begun = shared.begun_from(base) if self._rounds.counts(base) else None
        norm = 0.0 if begun is None else shared.learned(delta, begun)
        with self._changed:
            self._require_there(peer)
            if begun is not None:
                self._rounds.require_usual(norm)
            counted = self._rounds.add(peer.number, delta, norm)
            late = self._rounds.seats[peer.number].late
            self._settle()
            self._changed.notify_all()
        if not counted:
            _log.warning("a delta of worker %d was not counted: it was %d rounds late", peer.number, late)

    def _want(self, peer: _Peer, request: Mapping[str, Any]) -> None:
        """Take note that a worker wants the parameters."""
        with self._changed:
            self._require_there(peer)
            if peer.wants:
                raise MismatchError("it has asked for the parameters twice at a time")
            peer.wants = True
            peer.whole = request.get("whole") is not False
            self._changed.notify_all()

    def _answer(self, peer: _Peer) -> None:
        """Send the parameters, once the round that the worker's delta is in has closed, and signs of life till then."""

        def due() -> bool:
            return bool(peer.gone) or (peer.wants and self._rounds.may_pull(peer.number))

        try:
            while True:
                with self._changed:
                    if not self._changed.wait_for(due, self._timeout_s / BEATS):
                        words, numbers = self._rounds.waits_for()
                        told, tensors = {"waits_for": words, "numbers": numbers[:64]} if peer.wants else {}, None
                    elif peer.gone:
                        return
                    else:
                        peer.wants = False
                        told, tensors = self._rounds.pull(peer.number, peer.whole)
                if tensors is None:
                    peer.link.beat(**told)
                else:
                    peer.link.say(**told)
                    for tensor in tensors:
                        peer.link.send(tensor)
        except Exception as error:
            self._drop(peer, plain(reason(error)), type(error).__name__)
            peer.link.close()

    def _require_there(self, peer: _Peer) -> None:
        if peer.gone:
            raise TransportError(peer.gone)
