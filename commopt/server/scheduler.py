# SPDX-License-Identifier: Apache-2.0
"""The scheduler: tells workers the server's address, and logs joins and leaves. It holds no parameters."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread, current_thread
from typing import Any

from commopt.errors import ConfigurationError, TransportError
from commopt.groups.build import require_timeout
from commopt.server.channel import EndedError, SecureChannel, UnreachableError, connect, plain, reason
from commopt.server.listener import SecureListener
from commopt.server.secret import LOOPBACK, given_secret, is_loopback

_log = logging.getLogger("commopt")

SERVER, WORKER = "server", "worker"
SERVER_NUMBER = 0  # the server numbers workers from 1 on
_CONNECT_S = 10.0
_ASK_S = 0.1
_TRY_S = 5.0  # limit for a connection to the server, before the scheduler is asked again
_REQUEST_NBYTES = 4096
_MOST_PRESENT = 4096


class Scheduler:
    """Tells workers the server's address, in threads of this process.

    Raises ConfigurationError when it cannot listen at the address, or may not without a secret.

    port: port to listen on; 0: any free port.
    host: address to listen on. Any but a loopback address needs a secret.
    timeout: seconds without a heartbeat after which a process counts as gone, also for the server and the workers.
    secret: secret shared with server and workers; None: the value of COMMOPT_SECRET.
    failure: reason why the scheduler ended by itself; "" while it runs.
    present: roles of the processes present, by number.
    """

    def __init__(
        self, port: int = 0, host: str = LOOPBACK, timeout: float = 30.0, *, secret: str | None = None
    ) -> None:
        require_timeout(timeout)
        self.failure = ""
        self.present: dict[int, str] = {}
        self._timeout_s = timeout
        self._lock = Lock()  # guards _server and _at
        self._server: SecureChannel | None = None
        self._at: tuple[str, int] = ("", 0)  # host and port of the server
        self._host = host
        self._listener = SecureListener(host, port, given_secret(secret), _CONNECT_S, self._handle, self._fail)
        self.port = self._listener.port
        self._listener.start()

    @property
    def address(self) -> str:
        """Its host:port for processes of this machine."""
        host = self._host if is_loopback(self._host) else LOOPBACK
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def close(self) -> None:
        """Stop. The server ends too, and reports that the scheduler is gone."""
        with self._lock:
            server = self._server
        if server is not None:
            server.end("the scheduler has ended")
        self._listener.close()

    def _fail(self, why: str) -> None:
        self.failure = why

    def _handle(self, channel: SecureChannel, address: str) -> None:
        """Answer the requests of one process, in a thread of its own."""
        try:
            while True:
                request = channel.receive_json(_REQUEST_NBYTES)
                if request.get("role") == SERVER:
                    self._handle_server(channel, request, address)
                    return
                if request.get("role") != WORKER:
                    raise TransportError(f"the role {plain(request.get('role'))!r} is neither {SERVER} nor {WORKER}")
                with self._lock:
                    at = None if self._server is None else self._at
                channel.send_json(timeout=self._timeout_s, server=at)
        except EndedError:
            channel.drain()
        except TransportError as error:
            channel.end(str(error))
            channel.drain()
            raise

    def _handle_server(self, channel: SecureChannel, request: dict[str, Any], address: str) -> None:
        """Register a server, unless there is one, until it is gone. It reports the workers that come and go."""
        host, port = request.get("host"), request.get("port")
        if not isinstance(host, str) or not isinstance(port, int) or not 0 < port < 65536:
            raise TransportError(f"a server cannot have the address {plain(host)}:{plain(port)}")
        with self._lock:
            taken = self._server is not None
            if not taken:
                # A server on this machine has the scheduler's own address for others.
                self._at = (host or ("" if is_loopback(address) else address), port)
                self._server = channel
        if taken:
            channel.send_json(timeout=self._timeout_s, taken=True)
            return
        why = "has ended"
        try:
            channel.send_json(timeout=self._timeout_s, taken=False)
            channel.set_timeout(self._timeout_s)
            channel.start_heartbeat()
            self._add(SERVER, SERVER_NUMBER)
            while True:
                words = channel.receive_json(_REQUEST_NBYTES)
                number = words.get("number")
                if not isinstance(number, int) or not 0 < number < 2**62 or len(self.present) > _MOST_PRESENT:
                    raise TransportError(f"a worker cannot have the number {plain(number)}")
                if words.get("gone") is None:
                    self._add(WORKER, number)
                else:
                    self._remove(number, plain(words["gone"]))
        except EndedError as error:
            why = str(error)
            channel.drain()
        except Exception as error:  # after any error the next server can register
            why = reason(error)
        finally:
            channel.end(why)
            with self._lock:  # whoever registers next comes to an empty list
                for number in sorted(self.present, reverse=True):
                    self._remove(number, why if number == SERVER_NUMBER else f"so is its server: {why}")
                self._server = None

    def _add(self, role: str, number: int) -> None:
        self.present[number] = role
        _log.info("%s %d is present", role, number)

    def _remove(self, number: int, why: str) -> None:
        role = self.present.pop(number, None)
        if role is not None:
            _log.info("%s %d is gone: %s", role, number, why)


class ServerRegistration:
    """The registration of a server with its scheduler.

    Raises TransportError when no scheduler answers at `address`, ConfigurationError when another kind of program
    answers, when the secrets differ, or when the scheduler has a server already.

    on_loss: called in a thread, with the reason, when the scheduler is gone.
    timeout_s: the scheduler's timeout.
    """

    def __init__(self, address: str, secret: str, host: str, port: int, on_loss: Callable[[str], None]) -> None:
        self._address = address
        self._on_loss = on_loss
        asked_s, timeout_s = time.monotonic(), _CONNECT_S
        while True:
            channel = connect_to_scheduler(address, secret)
            channel.send_json(role=SERVER, host=host, port=port)
            answer = channel.receive_json()
            timeout_s = _timeout_of(answer)
            if not answer.get("taken"):
                break
            channel.close()
            if time.monotonic() > asked_s + 1.5 * timeout_s:  # a silent server counts as gone by now
                raise ConfigurationError(f"the scheduler at {address} has a server already; end that first")
            time.sleep(_ASK_S)
        self.timeout_s = timeout_s
        self._channel = channel
        channel.set_timeout(timeout_s)
        channel.start_heartbeat()
        self._leaving = Event()
        self._thread = Thread(target=self._listen, name="commopt-server-registration", daemon=True)

    def listen(self) -> None:
        """Start the thread that notices when the scheduler is gone."""
        self._thread.start()

    def report(self, number: int, gone: str | None = None) -> None:
        """Report that a worker has joined, or the reason why it is gone."""
        with suppress(TransportError):  # the listening thread gets the same error
            self._channel.send_json(number=number, gone=gone)

    def leave(self, why: str) -> None:
        """Tell the scheduler the reason, and stop."""
        self._leaving.set()
        self._channel.end(why)
        if self._thread.is_alive() and self._thread is not current_thread():
            self._thread.join(1.0)
        self._channel.close()

    def _listen(self) -> None:
        try:
            while True:
                self._channel.receive_json()
        except TransportError as error:
            if not self._leaving.is_set():
                self._on_loss(f"the scheduler at {self._address} does not answer any more ({error})")


def find_server(address: str, secret: str) -> tuple[SecureChannel, float]:
    """Return a channel to the scheduler's server, and the scheduler's timeout in seconds.

    Raises TransportError when no scheduler answers at `address`, or no server for two timeouts; ConfigurationError when
    another kind of program answers, or the secrets differ.
    """
    channel = connect_to_scheduler(address, secret)
    channel.start_heartbeat()
    try:
        begin, why = time.monotonic(), ""
        while True:
            channel.send_json(role=WORKER)
            answer = channel.receive_json()
            timeout_s, at = _timeout_of(answer), answer.get("server")
            left_s = begin + 2 * timeout_s - time.monotonic()  # one timeout is for a server that has died
            if at is not None:
                host, port = str(at[0]) or host_and_port(address)[0], int(at[1])
                try:
                    return connect(host, port, secret, timeout_s, min(max(left_s, 0.5), _TRY_S)), timeout_s
                except UnreachableError as error:
                    near = "it accepts only its own machine: start it with --host" if is_loopback(host) else ""
                    why = f"; the scheduler names one at {host}:{port}, which cannot be reached: {error}; {near}"
            if left_s < 0:
                raise TransportError(
                    f"no parameter server has answered for {2 * timeout_s:g} s{why.rstrip('; ')}; look at its log, or "
                    f"start one: python -m commopt server --scheduler {address}"
                )
            time.sleep(_ASK_S)
    finally:
        channel.end("")
        channel.close()


def connect_to_scheduler(address: str, secret: str) -> SecureChannel:
    """Return a channel to a scheduler.

    Raises TransportError when no scheduler answers, ConfigurationError when another kind of program does.
    """
    host, port = host_and_port(address)
    try:
        return connect(host, port, secret, _CONNECT_S, _CONNECT_S)
    except UnreachableError as error:
        raise TransportError(
            f"no scheduler answers at {address} within {_CONNECT_S:g} s ({error}); start one there: "
            f"python -m commopt scheduler --port {port}"
        ) from None


def _timeout_of(answer: dict[str, Any]) -> float:
    found = answer.get("timeout")
    if not isinstance(found, (int, float)) or not 0 < found < math.inf:
        raise TransportError(f"the scheduler's timeout cannot be {plain(found)}")
    return float(found)


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of "host:port". Raises ConfigurationError for any other text."""
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ConfigurationError(f"the scheduler's address {address!r} is not host:port; write for example node0:29400")
    return host.strip("[]"), int(port)
