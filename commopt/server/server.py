# SPDX-License-Identifier: Apache-2.0
"""The server: holds the parameters, with one receiving and one answering thread for each worker."""

from __future__ import annotations

import atexit
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from threading import Condition, Event, Lock, Thread
from typing import Any

import torch
from torch import Tensor

from commopt.document import require_whole
from commopt.errors import ConfigurationError, MismatchError, TransportError, UnsupportedTensorError
from commopt.server.channel import HEARTBEATS_PER_TIMEOUT, LOG_EVERY_S, EndedError, SecureChannel, plain, reason
from commopt.server.join_request import JOIN_REQUEST_NBYTES, JoinRequest
from commopt.server.listener import SecureListener
from commopt.server.rounds import Rounds
from commopt.server.scheduler import ServerRegistration
from commopt.server.secret import LOOPBACK, given_secret, is_loopback
from commopt.server.shared import Delta, SharedParameters, require_saved

_log = logging.getLogger("commopt")

_POLL_S, _IDLE_POLL_S = 0.01, 0.2
_STALLS_PER_TIMEOUT = 10  # an upload without progress for this part of the timeout lets another worker try
_REQUEST_NBYTES = 4096
_MOST_WEIGHT = 1e15
_WILDCARDS = ("0.0.0.0", "::")


@dataclass(eq=False)
class _ConnectedWorker:
    """A connected worker.

    pull_requested: whether it waits for the parameters.
    wants_all: whether it asks for the full parameters, not for an update.
    gone: reason why it is no longer there; "" while it is.
    answering: the thread that answers its pulls.
    """

    number: int
    channel: SecureChannel
    pull_requested: bool = False
    wants_all: bool = False
    gone: str = ""
    answering: Thread | None = None


@dataclass
class _InitialUpload:
    """The worker that sends the first parameters.

    last: time of the last part received (time.monotonic).
    """

    number: int
    last: float = field(default_factory=time.monotonic)


class Server:
    """Holds parameters and outer momentum for workers, in threads of this process.

    The first worker determines the settings. It also supplies the parameters, unless there is a `state_dict`.
    Raises TransportError when the scheduler does not answer, ConfigurationError when that has a server already, when
    the secrets differ, when the server cannot listen at the address, or for a damaged `state_dict`.

    address: host:port of the scheduler.
    workers: number of workers that must be present for the first round to begin.
    host: address to listen on. Any but a loopback address needs a secret.
    port: port to listen on; 0: any free port.
    secret: secret shared with scheduler and workers; None: the value of COMMOPT_SECRET.
    state_dict: result of `state_dict` to resume from; the first worker's model must match it. A function that returns
        one, or None, is called once no other server is there, which may save until it has ended.
    on_end: called when the server ends, by `close` or by itself. Its state is final, and no other server can take its
        place before the call returns.
    failure: reason why the server ended by itself; "" while it runs.
    """

    def __init__(
        self,
        address: str,
        *,
        workers: int = 1,
        host: str = LOOPBACK,
        port: int = 0,
        secret: str | None = None,
        state_dict: Mapping[str, Any] | Callable[[], Mapping[str, Any] | None] | None = None,
    ) -> None:
        require_whole(workers, 1, "Server(workers=)")
        if state_dict is not None and not callable(state_dict):
            require_saved(state_dict)
        self.failure = ""
        self.on_end: Callable[[], None] = lambda: None
        self._rounds = Rounds(workers)
        self._first_request: JoinRequest | None = None  # from the first worker
        self._saved: Mapping[str, Any] | None = None
        self._upload: _InitialUpload | None = None
        self._peers: dict[int, _ConnectedWorker] = {}
        self._numbers = count(1)
        self._changed = Condition()  # guards the attributes above; a worker is added to _peers without it
        self._ending = Event()
        self._closing = Lock()
        self._timeout_s = 30.0
        shared_secret = given_secret(secret)
        self._listener = SecureListener(
            host, port, shared_secret, self._timeout_s, self._handle_worker, self._close_soon
        )
        self.port = self._listener.port
        advertised = "" if host in _WILDCARDS else LOOPBACK if is_loopback(host) else host
        try:
            self._registration = ServerRegistration(address, shared_secret, advertised, self.port, self._close_soon)
            try:
                self._saved = _state_from(state_dict)
            except BaseException:
                self._registration.leave("could not begin")
                raise
        except BaseException:
            self._listener.close()
            raise
        self._timeout_s = self._registration.timeout_s
        self._registration.listen()
        self._listener.start()  # not before: a worker that waits for a server joins at once
        Thread(target=self._run_rounds, name="commopt-server", daemon=True).start()
        atexit.register(self.close)

    @property
    def round(self) -> int:
        """Number of rounds closed; 0 before the first worker has joined."""
        with self._changed:
            return 0 if self._rounds.shared is None else self._rounds.shared.round

    @property
    def done(self) -> float:
        """Sum of the weights of all deltas that counted: the work done by all workers."""
        with self._changed:
            return 0.0 if self._rounds.shared is None else self._rounds.shared.done

    @property
    def workers(self) -> list[int]:
        """The numbers of the workers that rounds wait for."""
        with self._changed:
            return sorted(number for number, worker in self._rounds.workers.items() if worker.takes_part)

    def stats(self) -> dict[str, Any]:
        """Return "rounds", "done", "workers", "refused" (late deltas), "waits_for" and "memory_nbytes".

        "memory_nbytes" holds the bytes of tensors by kind: "parameters", "momentum", "sent" (with a compressor: the
        workers' parameters and the last update), "earlier_rounds" (without one: rounds that workers still train from)
        and "deltas" (of the open round). Parameters and momentum are held twice while a round closes.
        """
        with self._changed:
            shared, rounds = self._rounds.shared, self._rounds
            return {
                "rounds": 0 if shared is None else shared.round,
                "done": 0.0 if shared is None else shared.done,
                "workers": sorted(rounds.workers),
                "refused": rounds.refused,
                "waits_for": rounds.waits_for()[0] if rounds.workers else "",
                "memory_nbytes": rounds.memory(),
            }

    def state_dict(self) -> dict[str, Any]:
        """Return "parameters" and "momentum" by name (float32 copies), "round", and "done", the work of all workers.

        Raises ConfigurationError before the first worker has joined.
        """
        with self._changed:
            if self._rounds.shared is None:
                raise ConfigurationError("no worker has joined yet, so the server has no parameters; save later")
            return self._rounds.shared.state()

    def close(self, why: str = "") -> None:
        """End the server. Workers get an error at their next push or pull.

        why: the failure that ends it, if any.
        """
        with self._closing:  # until the end: whoever calls this too may end the process then
            if self._ending.is_set():
                return
            self.failure = why
            self._ending.set()
            atexit.unregister(self.close)
            if why:
                _log.error("the parameter server ends: %s", why)
            try:
                self.on_end()
            finally:
                for peer in list(self._peers.values()):
                    self._disconnect(peer, f"the server has ended{': ' * bool(why)}{why}")
                self._registration.leave(why or "has ended")
                self._listener.close()

    # ------------------------------------------------------------------------------------- connected workers

    def _close_soon(self, why: str) -> None:
        """End the server after a failure, from another thread, as `close` waits for this one."""
        Thread(target=self.close, args=(why,), name="commopt-server-end", daemon=True).start()

    def _run_rounds(self) -> None:
        """Close rounds that are due, and log which workers are waited for."""
        since, logged_round = time.monotonic(), -1
        try:
            while not self._ending.is_set():
                with self._changed:
                    open_s = _POLL_S if self._rounds.memory()["deltas"] else _IDLE_POLL_S
                    self._changed.wait(open_s)
                    self._close_due_round()
                    waiting = [peer.number for peer in list(self._peers.values()) if peer.pull_requested]
                    words, _ = self._rounds.waits_for()
                    now_round = -1 if self._rounds.shared is None else self._rounds.shared.round
                if not waiting or now_round != logged_round:
                    since, logged_round = time.monotonic(), now_round
                elif time.monotonic() > since + LOG_EVERY_S:
                    since = time.monotonic()
                    _log.warning("waiting for %s", words)
        except Exception as error:
            self.close(f"its rounds have failed: {reason(error)}")

    def _close_due_round(self) -> None:
        """Close the round if it is due. The caller holds the lock. A failure ends the server, from another thread."""
        if self._ending.is_set():  # what a worker hears to have counted is in the last checkpoint
            return
        try:
            if self._rounds.close_if_due():
                self._changed.notify_all()
        except Exception as error:
            number = self._rounds.parameters().round
            self._close_soon(f"round {number} could not be closed: {reason(error)}; the parameters are as before")

    def _handle_worker(self, channel: SecureChannel, address: str) -> None:
        """Receive the requests of a worker until it is gone, in a thread of its own.

        A round may close for longer than the timeout, under the lock. Meanwhile the worker must hear heartbeats, and
        what it sends must be received, so neither waits for the lock.
        """
        peer = _ConnectedWorker(next(self._numbers), channel)
        self._peers[peer.number] = peer
        why, kind = "has left", ""
        try:
            channel.set_timeout(self._timeout_s)
            channel.start_heartbeat()
            if self._ending.is_set():
                raise TransportError("the server has ended")
            self._admit(peer)
            peer.answering = Thread(
                target=self._answer_pulls, args=(peer,), name=f"commopt-worker-{peer.number}", daemon=True
            )
            peer.answering.start()
            while True:
                request = channel.receive_json(_REQUEST_NBYTES)
                if request.get("kind") == "push":
                    self._receive_delta(peer, request)
                elif request.get("kind") == "pull":
                    self._note_pull_request(peer, request)
                else:
                    raise MismatchError(f"it asked for {plain(request.get('kind'))!r}, which is neither push nor pull")
        except EndedError as error:
            why = str(error) or why
        except Exception as error:  # any error ends the connection to this worker, and no other
            why, kind = plain(reason(error)), type(error).__name__
        self._disconnect(peer, why, kind)
        channel.drain()

    def _disconnect(self, peer: _ConnectedWorker, why: str, kind: str = "") -> None:
        """Continue without a worker, and tell it the reason."""
        with self._changed:
            if peer.gone:
                return
            peer.gone = why or "has left"
            self._peers.pop(peer.number, None)
            if self._upload is not None and self._upload.number == peer.number:
                self._upload = None
            joined = peer.number in self._rounds.workers
            self._rounds.leave(peer.number)
            self._close_due_round()
            self._changed.notify_all()
        _log.info("worker %d is gone: %s", peer.number, peer.gone)
        peer.channel.end(why, kind)
        if joined:
            self._registration.report(peer.number, peer.gone)

    # ------------------------------------------------------------------------------------- joining

    def _admit(self, peer: _ConnectedWorker) -> None:
        """Compare a worker's settings and model with the first worker's; receive its parameters if there are none."""
        joining = JoinRequest.read(peer.channel.receive_json(JOIN_REQUEST_NBYTES))
        uploads = self._wait_for_turn(peer, joining)
        peer.channel.send_json(number=peer.number, sends=uploads, timeout=self._timeout_s)
        if uploads:
            values = [torch.empty(layout.numel, device="cpu") for layout in joining.layouts()]
            for each in values:
                peer.channel.receive_into(each, lambda: self._note_upload_progress(peer))
            shared = SharedParameters(joining.parse_settings(), joining.layouts(), values)
            if not math.isfinite(shared.norm()):
                raise UnsupportedTensorError("its parameters are not finite")
        with self._changed:
            self._require_connected(peer)
            if uploads and self._rounds.shared is None:
                self._rounds.shared = shared
                self._first_request = joining
            self._require_same_model(joining)  # another worker may have been faster
            self._upload = None
            self._rounds.join(peer.number)
            self._changed.notify_all()
        _log.info("worker %d has joined", peer.number)
        self._registration.report(peer.number)

    def _wait_for_turn(self, peer: _ConnectedWorker, joining: JoinRequest) -> bool:
        """Wait while another worker uploads. Return whether this worker must send its parameters."""
        joining.parse_settings()
        while True:
            with self._changed:
                self._require_connected(peer)
                if self._rounds.shared is None and self._saved is not None:
                    self._rounds.shared = self._from_checkpoint(joining, self._saved)
                    self._saved = None
                    self._first_request = joining
                if self._rounds.shared is not None:
                    self._require_same_model(joining)
                    return False
                upload, stalled_s = self._upload, self._timeout_s / _STALLS_PER_TIMEOUT
                if upload is None or time.monotonic() > upload.last + stalled_s:
                    self._upload = _InitialUpload(peer.number)
                    return True
                self._changed.wait(stalled_s)
                words = {"waits_for": f"the parameters that worker {upload.number} sends"}
            peer.channel.send_heartbeat(**words)

    def _from_checkpoint(self, joining: JoinRequest, saved: Mapping[str, Any]) -> SharedParameters:
        layouts = joining.layouts()
        shared = SharedParameters(
            joining.parse_settings(), layouts, [torch.zeros(each.numel, device="cpu") for each in layouts]
        )
        try:
            shared.load(saved)
        except ConfigurationError as error:
            raise MismatchError(str(error)) from None
        return shared

    def _require_same_model(self, joining: JoinRequest) -> None:
        if self._first_request is not None:
            joining.require_equal(self._first_request)

    def _note_upload_progress(self, peer: _ConnectedWorker) -> None:
        if self._rounds.shared is not None:  # without the lock: another one was faster, and its rounds close already
            return
        with self._changed:
            if self._upload is None or self._upload.number != peer.number:
                self._upload = _InitialUpload(peer.number)
            self._upload.last = time.monotonic()

    # ------------------------------------------------------------------------------------- requests of workers

    def _receive_delta(self, peer: _ConnectedWorker, request: Mapping[str, Any]) -> None:
        """Receive a delta, and check it before it counts."""
        base, weight = request.get("base"), request.get("weight")
        if not isinstance(base, int) or isinstance(base, bool):
            raise MismatchError(f"the base round of its delta is {plain(base)}, and must be a whole number")
        if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not 0 < weight <= _MOST_WEIGHT:
            raise MismatchError(
                f"its delta weighs {plain(weight)}, and must weigh more than 0 and at most {_MOST_WEIGHT:g}"
            )
        self._require_connected(peer)
        self._rounds.require_base(peer.number, base)  # without the lock: only this worker changes what is read
        shared = self._rounds.parameters()
        rows: list[Tensor] = []
        for wire in shared.wires:
            rows.append(peer.channel.receive_into(torch.empty(wire.rows(base).nbytes, dtype=torch.uint8, device="cpu")))
        delta = Delta(base, float(weight), rows)
        with self._changed:
            self._require_connected(peer)
            start = shared.parameters_of_round(base) if self._rounds.is_recent(base) else None
        norm = 0.0 if start is None else shared.delta_norm(delta, start)
        with self._changed:
            self._require_connected(peer)
            if start is not None:
                self._rounds.require_usual(norm)
            counted = self._rounds.add(peer.number, delta, norm)
            late = self._rounds.workers[peer.number].late
            self._close_due_round()
            self._changed.notify_all()
        if not counted:
            _log.warning("a delta of worker %d was not counted: it was %d rounds late", peer.number, late)

    def _note_pull_request(self, peer: _ConnectedWorker, request: Mapping[str, Any]) -> None:
        """Note that a worker asks for the parameters."""
        with self._changed:
            self._require_connected(peer)
            if peer.pull_requested:
                raise MismatchError("it asked for the parameters twice at the same time")
            peer.pull_requested = True
            peer.wants_all = request.get("whole") is not False
            self._changed.notify_all()

    def _answer_pulls(self, peer: _ConnectedWorker) -> None:
        """Answer pulls: tell for whom, until the round of the worker's delta has closed, then send the parameters."""

        def due() -> bool:
            return bool(peer.gone) or (peer.pull_requested and self._rounds.may_pull(peer.number))

        try:
            while True:
                with self._changed:
                    if not self._changed.wait_for(due, self._timeout_s / HEARTBEATS_PER_TIMEOUT):
                        if not peer.pull_requested:
                            continue
                        words, numbers = self._rounds.waits_for()
                        header, tensors = {"waits_for": words, "numbers": numbers[:64]}, None
                    elif peer.gone:
                        return
                    else:
                        peer.pull_requested = False
                        header, tensors = self._rounds.pull(peer.number, peer.wants_all)
                if tensors is None:
                    peer.channel.send_heartbeat(**header)
                else:
                    peer.channel.send_json(**header)
                    for tensor in tensors:
                        peer.channel.send_tensor(tensor)
        except Exception as error:
            self._disconnect(peer, plain(reason(error)), type(error).__name__)
            peer.channel.close()

    def _require_connected(self, peer: _ConnectedWorker) -> None:
        if peer.gone:
            raise TransportError(peer.gone)


def _state_from(given: Mapping[str, Any] | Callable[[], Mapping[str, Any] | None] | None) -> Mapping[str, Any] | None:
    if not callable(given):
        return given
    found = given()
    if found is not None:
        require_saved(found)
    return found
