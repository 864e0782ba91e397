# SPDX-License-Identifier: Apache-2.0
"""Where workers learn who the server is, and everybody learns who takes part. It holds no parameters."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread, current_thread
from typing import Any

from commopt.errors import ConfigurationError, TransportError
from commopt.groups.build import require_timeout
from commopt.server.door import Door
from commopt.server.link import EndedError, Link, NobodyError, connect, plain, reason
from commopt.server.secret import LOOPBACK, given_secret, is_loopback

_log = logging.getLogger("commopt")

SERVER, WORKER = "server", "worker"
SERVER_NUMBER = 0  # workers count from 1, as the server numbers them
_CONNECT_S = 10.0
_ASK_S = 0.1
_TRY_S = 5.0  # to connect to a server, before the scheduler is asked again
_REQUEST_NBYTES = 4096
_MOST_PRESENT = 4096


class Scheduler:
    """Tells workers where the server is, in threads of this process.

    host: the address to listen on; others than those of this machine alone want a secret. port: 0 takes any.
    timeout: seconds without a sign of life after which somebody is gone; server and workers go by it. secret: None
    takes that of COMMOPT_SECRET. Raises ConfigurationError when it cannot listen there, or may not without a secret.
    """

    def __init__(
        self, port: int = 0, host: str = LOOPBACK, timeout: float = 30.0, *, secret: str | None = None
    ) -> None:
        require_timeout(timeout)
        self.failure = ""  # why it has ended by itself
        self.present: dict[int, str] = {}  # roles by number
        self._timeout_s = timeout
        self._lock = Lock()  # guards all around it
        self._server: Link | None = None
        self._at: tuple[str, int] = ("", 0)  # where the server listens
        self._host = host
        self._door = Door(host, port, given_secret(secret), _CONNECT_S, self._serve, self._fail)
        self.port = self._door.port

    @property
    def address(self) -> str:
        """Where processes of this machine find it."""
        host = self._host if is_loopback(self._host) else LOOPBACK
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def close(self) -> None:
        """Stop; the server ends too, and says that the scheduler is gone."""
        with self._lock:
            server = self._server
        if server is not None:
            server.part("the scheduler has ended")
        self._door.close()

    def _fail(self, why: str) -> None:
        self.failure = why

    def _serve(self, link: Link, address: str) -> None:
        """Do what somebody asks for; in a thread for each."""
        try:
            while True:
                request = link.hear(_REQUEST_NBYTES)
                if request.get("role") == SERVER:
                    self._host_server(link, request, address)
                    return
                if request.get("role") != WORKER:
                    raise TransportError(f"the role {plain(request.get('role'))!r} is neither {SERVER} nor {WORKER}")
                with self._lock:
                    at = None if self._server is None else self._at
                link.say(timeout=self._timeout_s, server=at)
        except EndedError:
            link.drain()
        except TransportError as error:
            link.part(str(error))
            link.drain()
            raise

    def _host_server(self, link: Link, request: dict[str, Any], address: str) -> None:
        """Have a server, if there is none, until it is gone; it says which workers come and go."""
        host, port = request.get("host"), request.get("port")
        if not isinstance(host, str) or not isinstance(port, int) or not 0 < port < 65536:
            raise TransportError(f"a server cannot be at {plain(host)}:{plain(port)}")
        with self._lock:
            taken = self._server is not None
            if not taken:
                # A server that has come from this machine is where the scheduler is.
                self._at = (host or ("" if is_loopback(address) else address), port)
                self._server = link
        link.say(timeout=self._timeout_s, taken=taken)
        if taken:
            return
        link.wait_at_most(self._timeout_s)
        link.beat_regularly()
        self._came(SERVER, SERVER_NUMBER)
        why = "has ended"
        try:
            while True:
                words = link.hear(_REQUEST_NBYTES)
                number = words.get("number")
                if not isinstance(number, int) or not 0 < number < 2**62 or len(self.present) > _MOST_PRESENT:
                    raise TransportError(f"a worker cannot have the number {plain(number)}")
                if words.get("gone") is None:
                    self._came(WORKER, number)
                else:
                    self._went(number, plain(words["gone"]))
        except EndedError as error:
            why = str(error)
            link.drain()
        except Exception as error:  # whatever it is, the next server finds the place free
            why = reason(error)
        finally:
            link.part(why)
            with self._lock:
                self._server = None
            for number in sorted(self.present, reverse=True):
                self._went(number, why if number == SERVER_NUMBER else f"so is its server: {why}")

    def _came(self, role: str, number: int) -> None:
        self.present[number] = role
        _log.info("%s %d is here", role, number)

    def _went(self, number: int, why: str) -> None:
        role = self.present.pop(number, None)
        if role is not None:
            _log.info("%s %d is gone: %s", role, number, why)


class Registration:
    """A server at its scheduler. `timeout_s` is the scheduler's.

    on_loss: called in a thread, with the reason, when the scheduler is gone. Raises TransportError when there is none
    at `address`, ConfigurationError when that is none, has another secret, or has a server already.
    """

    def __init__(self, address: str, secret: str, host: str, port: int, on_loss: Callable[[str], None]) -> None:
        self._address = address
        self._on_loss = on_loss
        asked_s, timeout_s = time.monotonic(), _CONNECT_S
        while True:
            link = connect_to_scheduler(address, secret)
            link.say(role=SERVER, host=host, port=port)
            answer = link.hear()
            timeout_s = _timeout_of(answer)
            if not answer.get("taken"):
                break
            link.close()
            if time.monotonic() > asked_s + 1.5 * timeout_s:  # one that has fallen silent is gone by now
                raise ConfigurationError(f"the scheduler at {address} has a server already; end that first")
            time.sleep(_ASK_S)
        self.timeout_s = timeout_s
        self._link = link
        link.wait_at_most(timeout_s)
        link.beat_regularly()
        self._parting = Event()
        self._thread = Thread(target=self._listen, name="commopt-server-registration", daemon=True)

    def listen(self) -> None:
        """Have a thread notice when the scheduler is gone."""
        self._thread.start()

    def tell(self, number: int, gone: str | None = None) -> None:
        """Say that a worker has come, or why it has gone."""
        with suppress(TransportError):  # whoever listens learns of it too
            self._link.say(number=number, gone=gone)

    def leave(self, why: str) -> None:
        """Let the scheduler know, and stop."""
        self._parting.set()
        self._link.part(why)
        if self._thread.is_alive() and self._thread is not current_thread():
            self._thread.join(1.0)
        self._link.close()

    def _listen(self) -> None:
        try:
            while True:
                self._link.hear()
        except TransportError as error:
            if not self._parting.is_set():
                self._on_loss(f"the scheduler at {self._address} does not answer any more ({error})")


def find_server(address: str, secret: str) -> tuple[Link, float]:
    """Return a link to the server that a scheduler knows, and the scheduler's timeout, in seconds.

    Raises TransportError when there is no scheduler at `address`, or no server for two timeouts, ConfigurationError
    when that is no scheduler, or has another secret.
    """
    link = connect_to_scheduler(address, secret)
    link.beat_regularly()
    try:
        begin, why = time.monotonic(), ""
        while True:
            link.say(role=WORKER)
            answer = link.hear()
            timeout_s, at = _timeout_of(answer), answer.get("server")
            left_s = begin + 2 * timeout_s - time.monotonic()  # of which one for a server that has died
            if at is not None:
                host, port = str(at[0]) or host_and_port(address)[0], int(at[1])
                try:
                    return connect(host, port, secret, timeout_s, min(max(left_s, 0.5), _TRY_S)), timeout_s
                except NobodyError as error:
                    near = "it listens for its own machine alone: start it with --host" if is_loopback(host) else ""
                    why = f"; the one that the scheduler knows, at {host}:{port}, cannot be reached: {error}; {near}"
            if left_s < 0:
                raise TransportError(
                    f"no parameter server has answered for {2 * timeout_s:g} s{why.rstrip('; ')}; look at its log, or "
                    f"start one: python -m commopt server --scheduler {address}"
                )
            time.sleep(_ASK_S)
    finally:
        link.part("")
        link.close()


def connect_to_scheduler(address: str, secret: str) -> Link:
    """Return a link to a scheduler. Raises TransportError when there is none, ConfigurationError when that is none."""
    host, port = host_and_port(address)
    try:
        return connect(host, port, secret, _CONNECT_S, _CONNECT_S)
    except NobodyError as error:
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
    """Return the parts of host:port; raises ConfigurationError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"the scheduler's address {address!r} is no host:port, as node0:29400")
    return host.strip("[]"), int(port)
