# SPDX-License-Identifier: Apache-2.0
"""The server: a thread for each worker takes deltas and gives parameters; one decides when a round is over."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from statistics import median
from threading import Condition, Event, Lock, Thread
from typing import Any

import torch
from torch import Tensor

from commopt.errors import CommoptError, ConfigurationError, MismatchError, TransportError
from commopt.feedback import Layout
from commopt.server.link import Link
from commopt.server.scheduler import SERVER, Participant
from commopt.server.settings import ParameterServer
from commopt.server.shared import Delta, Shared

_log = logging.getLogger("commopt")

_POLL_S = 0.01
_ARRIVALS = 64  # that are looked back on
_LEAST_DEVIATION = 0.01  # of the median: arrivals may be alike to the clock's last digit


@dataclass(eq=False)
class _Peer:
    """A worker that has joined. base: the round that it trains from, None before it has pulled.

    takes_part: rounds wait for it; one that comes in the middle of a round begins with the next.
    counted, late: what became of its last delta.
    """

    number: int
    requests: SimpleQueue[dict[str, Any] | None] = field(default_factory=SimpleQueue)
    asked: int = 0
    link: Link | None = None
    base: int | None = None
    takes_part: bool = False
    counted: bool = True
    late: int = 0
    gone: str = ""


class Server:
    """Holds parameters and outer momentum for workers, in threads of this process.

    address: the scheduler's. workers: the first round begins when so many have joined. The settings are the first
    worker's, and so are the parameters, unless `load_state_dict` was called. Raises TransportError when the scheduler
    does not answer, ConfigurationError when there is a server already.
    """

    def __init__(self, address: str, *, workers: int = 1) -> None:
        self.failure = ""  # why it has ended
        self._workers, self._joined = workers, 0
        self._peers: dict[int, _Peer] = {}
        self._deltas: dict[int, Delta] = {}  # of this round
        self._arrivals: deque[float] = deque(maxlen=_ARRIVALS)  # seconds after a round's beginning
        self._opened = time.monotonic()
        self._facts: dict[str, Any] = {}  # of the first worker
        self._shared: Shared | None = None
        self._saved: Mapping[str, Any] | None = None
        self._changed = Condition()  # guards all above
        self._joining = Lock()
        self._ending = Event()
        self._me = me = Participant(address, SERVER, self._hear)
        before = me.store.compare_set(SERVER, "", str(me.number)).decode()
        if before != str(me.number):
            if before not in json.loads(me.store.read("gone") or "{}"):
                me.leave()
                raise ConfigurationError(
                    f"the scheduler at {address} has a server already; end that, or wait until it is gone"
                )
            me.store.set(SERVER, str(me.number))
        self._listener = Thread(target=self._listen, name="commopt-server", daemon=True)
        self._listener.start()

    @property
    def round(self) -> int:
        """How many rounds have closed; 0 before the first worker has come."""
        with self._changed:
            return self._shared.round if self._shared is not None else 0

    @property
    def workers(self) -> list[int]:
        """The numbers of those that rounds wait for."""
        with self._changed:
            return sorted(number for number, peer in self._peers.items() if peer.takes_part)

    def state_dict(self) -> dict[str, Any]:
        """Return "parameters" and "momentum" by name (float32, copies) and "round".

        Raises ConfigurationError before there are any.
        """
        with self._changed:
            if self._shared is None and self._saved is None:
                raise ConfigurationError("no worker has joined yet, so the server has no parameters; save later")
            return self._shared.state() if self._shared is not None else dict(self._saved or {})

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; the first worker's model must fit. Before any worker has joined.

        Raises ConfigurationError after that.
        """
        with self._changed:
            if self._shared is not None:
                raise ConfigurationError("a worker has joined already; load a checkpoint into a new Server, at once")
            self._saved = saved

    def close(self, why: str = "") -> None:
        """End it; workers get an error when they next turn to it."""
        with self._changed:
            if self._ending.is_set():
                return
            self.failure = why
            self._ending.set()
            peers = list(self._peers.values())
        for peer in peers:
            self._drop(peer, "the server has ended")
        self._me.leave(why or "has ended")

    # ------------------------------------------------------------------------------------- who is there

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
        try:
            while not self._ending.wait(_POLL_S):
                with self._changed:
                    self._close_if_due()
                if (asked := store.add("requests", 0)) == seen:
                    continue
                seen = asked
                count = store.add("count", 0)
                others, known = others.union(range(known, count)), count
                for number in [each for each in others if store.check([f"request/{each}/0"])]:
                    others.remove(number)
                    peer = self._peers[number] = _Peer(number)
                    Thread(target=self._serve, args=(peer,), name=f"commopt-worker-{number}", daemon=True).start()
                for peer in list(self._peers.values()):
                    while (request := store.read(f"request/{peer.number}/{peer.asked}")) is not None:
                        store.delete_key(f"request/{peer.number}/{peer.asked}")
                        peer.asked += 1
                        peer.requests.put(json.loads(request))
        except TransportError as error:
            self.close(str(error))

    def _serve(self, peer: _Peer) -> None:
        """Do what a worker asks for, until it is gone; in its thread."""
        why = "has left"
        try:
            while (request := peer.requests.get()) is not None:
                {"join": self._admit, "push": self._take, "pull": self._give}[request["kind"]](peer, request)
        except (CommoptError, RuntimeError) as error:
            why = str(error)
        self._drop(peer, why)

    def _drop(self, peer: _Peer, why: str) -> None:
        """Go on without a worker; what it has sent counts."""
        with self._changed:
            if peer.gone:
                return
            peer.gone = why
            self._peers.pop(peer.number, None)
            self._release()
            self._close_if_due()
            self._changed.notify_all()
        _log.info("worker %d is gone: %s", peer.number, why)
        peer.requests.put(None)
        if peer.link is not None:
            peer.link.close()

    # ------------------------------------------------------------------------------------- joining

    def _admit(self, peer: _Peer, facts: dict[str, Any]) -> None:
        """Compare a worker's settings and model with the first one's, and connect to it."""
        with self._joining:
            problem, sends = "", self._shared is None and self._saved is None
            try:
                self._compare(facts)
                shared = self._shared or self._made_of(facts)
            except CommoptError as error:
                problem = str(error)
            self._answer(peer, {"problem": problem, "sends": sends})
            if problem:
                raise MismatchError(problem)
            peer.link = Link(self._me, self._me.number, peer.number, lambda why: self._drop(peer, why))
            if sends:
                for values in shared.exact:
                    peer.link.receive(values)
            with self._changed:
                self._shared, self._facts = shared, self._facts or facts
                self._joined += 1
                self._release()
                self._changed.notify_all()
        _log.info("worker %d has joined", peer.number)

    def _compare(self, facts: dict[str, Any]) -> None:
        """Raise MismatchError, naming field and both values, unless a worker has what the first one had."""
        if not self._facts:
            return
        theirs = _flat(self._facts)
        for name, value in _flat(facts).items():
            if value != theirs.pop(name, None):
                raise MismatchError(_difference(name, value, _flat(self._facts).get(name)))
        for name, value in theirs.items():
            raise MismatchError(_difference(name, None, value))

    def _made_of(self, facts: dict[str, Any]) -> Shared:
        """Return the parameters that the first worker has told of, still without values unless any were loaded."""
        layouts = [Layout.of_parameters((name, shape) for name, shape, _ in parcel) for parcel in facts["parcels"]]
        values = [torch.zeros(layout.numel, device="cpu") for layout in layouts]
        shared = Shared(ParameterServer.read(facts["settings"]), layouts, values)
        if self._saved is not None:
            shared.load(self._saved)
        return shared

    def _release(self) -> None:
        """Let those that wait for a round take part, when there is none that others are in."""
        if self._joined >= self._workers and not any(peer.takes_part for peer in self._peers.values()):
            self._begin()

    def _begin(self) -> None:
        self._opened = time.monotonic()
        for peer in self._peers.values():
            peer.takes_part = peer.link is not None

    # ------------------------------------------------------------------------------------- rounds

    def _take(self, peer: _Peer, request: dict[str, Any]) -> None:
        """Receive a delta: it counts in the round that is open, unless it is too old."""
        shared, base = self._held(), int(request["base"])
        assert peer.link is not None
        payloads: list[Tensor] = []
        for wire in shared.wires:
            payloads.append(peer.link.receive(torch.empty(wire.rows(base).nbytes, dtype=torch.uint8, device="cpu")))
        with self._changed:
            peer.late = shared.round - base
            peer.counted = peer.late <= shared.settings.staleness
            if peer.counted:
                self._deltas[peer.number] = Delta(base, float(request["weight"]), payloads)
                if peer.late == 0:
                    self._arrivals.append(time.monotonic() - self._opened)
            else:
                _log.warning(
                    "a delta of worker %d is %d rounds old, more than staleness=%d, and was not counted",
                    *(peer.number, peer.late, shared.settings.staleness),
                )
            self._close_if_due()

    def _give(self, peer: _Peer, request: dict[str, Any]) -> None:
        """Send the parameters, once the round that the worker's delta is in has closed."""
        shared = self._held()
        with self._changed:
            self._changed.wait_for(lambda: peer.gone or (peer.takes_part and peer.number not in self._deltas))
            if peer.gone:
                raise TransportError(peer.gone)
            updates = shared.update is not None and peer.base == shared.round - 1 and not request["whole"]
            tensors = (shared.update or []) if updates else [each.view(torch.uint8) for each in shared.public]
            answer = {"round": shared.round, "updates": updates, "counted": peer.counted, "late": peer.late}
            peer.base = shared.round
        self._answer(peer, answer)
        assert peer.link is not None
        for tensor in tensors:
            peer.link.send(tensor)

    def _close_if_due(self) -> None:
        """Close the round if it is time; `_changed` is held."""
        if not self._deltas or self._shared is None:
            return
        shared, settings = self._shared, self._shared.settings
        missing = {number: peer.base for number, peer in self._peers.items() if peer.takes_part}
        for number in self._deltas:
            missing.pop(number, None)
        if missing:
            if settings.quorum is None or len(self._deltas) < settings.quorum:
                return
            in_step = any(base == shared.round for base in missing.values())  # others come late whatever is done
            if in_step and time.monotonic() < self._opened + window_s(self._arrivals, settings.grace):
                return
        shared.close([self._deltas[number] for number in sorted(self._deltas)])
        self._deltas.clear()
        self._begin()
        self._changed.notify_all()

    def _held(self) -> Shared:
        if self._shared is None:
            raise ConfigurationError("a worker asked for parameters before it had joined")
        return self._shared

    def _answer(self, peer: _Peer, answer: dict[str, Any]) -> None:
        self._me.store.set(f"answer/{peer.number}/{peer.asked - 1}", json.dumps(answer))


def window_s(arrivals: Collection[float], grace: float) -> float:
    """Return how long a round waits for those that are usually there: median + grace * median absolute deviation."""
    if not arrivals:
        return 0.0
    usual = median(arrivals)
    deviation = median(abs(each - usual) for each in arrivals)
    return usual + grace * max(deviation, _LEAST_DEVIATION * usual)


def _flat(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return facts by the names under which they are compared."""
    parcels: Sequence[Sequence[tuple[str, list[int], str]]] = facts["parcels"]
    found = {"commopt version": facts["version"], **facts["settings"]}
    for place, parcel in enumerate(parcels):
        found |= {f"parameter {name!r}": f"{dtype} {shape}, in part {place}" for name, shape, dtype in parcel}
    return found


def _difference(name: str, value: str | None, theirs: str | None) -> str:
    return (
        f"{name} differs: this worker has {value or 'none'}, those of this parameter server have {theirs or 'none'}; "
        f"every worker must have the same model and the same ParameterServer(...)"
    )
