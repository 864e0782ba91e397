# SPDX-License-Identifier: Apache-2.0
"""Where scheduler and server listen: whoever shows the secret is let in, all others learn and hold up nothing."""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock, Thread

from commopt.errors import ConfigurationError
from commopt.server.link import GREETING, REFUSAL, WELCOME, Link, plain, reason
from commopt.server.secret import NONCE_NBYTES, PROOF_NBYTES, Handshake, key_of, require_secret

_log = logging.getLogger("commopt")

MOST_STRANGERS = 128  # connections whose secret is still to be shown
MOST_LET_IN = 512
_LOOK_S = 0.2
_BACKLOG = 128
_AT_A_TIME = 32  # that are accepted before those who are there already get their turn
_NEEDED = NONCE_NBYTES + PROOF_NBYTES


@dataclass(eq=False)
class _Stranger:
    """A connection whose secret is still to be shown, until `deadline` (time.monotonic)."""

    connection: socket.socket
    address: str
    deadline: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_NBYTES))
    said: bytes = b""


class Door:
    """Listens in a thread of its own, which blocks on no connection.

    enter: called with a link and the address it comes from, in a thread for each; the connection ends with it.
    on_failure: called with the reason if the door itself fails. limit_s: for showing the secret. silence_s: the link's.
    Raises ConfigurationError when it cannot listen there, or may not without a secret.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: str,
        silence_s: float,
        enter: Callable[[Link, str], None],
        on_failure: Callable[[str], None],
        limit_s: float = 10.0,
    ) -> None:
        require_secret(host, secret)
        self._listener = _listening(host, port)
        self.port = int(self._listener.getsockname()[1])
        self._key = key_of(secret)
        self._limit_s = limit_s
        self._silence_s = silence_s
        self._enter = enter
        self._on_failure = on_failure
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._inside: set[Link] = set()
        self._lock = Lock()  # guards what is inside
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = Thread(target=self._run, name="commopt-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and close all connections that are left."""
        self._closing = True
        self._thread.join()
        with self._lock:
            inside = list(self._inside)
        for link in inside:
            link.close()

    # ------------------------------------------------------------------------------------- strangers

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(_LOOK_S):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif (stranger := self._strangers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                        self._hear(stranger)
                now = time.monotonic()
                for stranger in [each for each in self._strangers.values() if each.deadline < now]:
                    self._turn_away(stranger)
        except Exception as error:
            _log.exception("nobody can connect any more")
            self._on_failure(f"nobody can connect any more: {reason(error)}")
        finally:
            for stranger in list(self._strangers.values()):
                self._turn_away(stranger)
            self._selector.close()
            self._listener.close()

    def _accept(self) -> None:
        for _ in range(_AT_A_TIME):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # too many open files, or gone before it was accepted
                if self._strangers:
                    self._turn_away(next(iter(self._strangers.values())))
                time.sleep(0.01)
                return
            if len(self._strangers) >= MOST_STRANGERS:
                self._make_room()
            connection.setblocking(False)
            stranger = _Stranger(connection, str(address[0]), time.monotonic() + self._limit_s)
            self._strangers[connection] = stranger
            self._selector.register(connection, selectors.EVENT_READ)
            try:
                connection.send(GREETING + stranger.nonce)  # a new connection has room for it
            except OSError:
                self._turn_away(stranger)

    def _make_room(self) -> None:
        """Turn away who has been here for longest of the address that most come from; others are not held up by it."""
        usual = Counter(each.address for each in self._strangers.values()).most_common(1)[0][0]
        self._turn_away(next(each for each in self._strangers.values() if each.address == usual))

    def _hear(self, stranger: _Stranger) -> None:
        try:
            more = stranger.connection.recv(_NEEDED - len(stranger.said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        stranger.said += more
        if not more:
            self._turn_away(stranger)
        elif len(stranger.said) == _NEEDED:
            shake = Handshake(self._key, stranger.nonce, stranger.said[:NONCE_NBYTES])
            right = shake.shown_by("client", stranger.said[NONCE_NBYTES:])
            try:
                answer = WELCOME + shake.proof("server") if right else REFUSAL + bytes(PROOF_NBYTES)
                stranger.connection.send(answer)
            except OSError:
                right = False
            if right:
                self._let_in(stranger, shake)
            else:
                self._turn_away(stranger)

    def _turn_away(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.connection.close()

    def _forget(self, stranger: _Stranger) -> None:
        if self._strangers.pop(stranger.connection, None) is not None:
            self._selector.unregister(stranger.connection)

    # ------------------------------------------------------------------------------------- who has the secret

    def _let_in(self, stranger: _Stranger, shake: Handshake) -> None:
        self._forget(stranger)
        try:
            keys = shake.keys()
            link = Link(stranger.connection, keys.of_server, keys.of_client, self._silence_s)
        except OSError:
            stranger.connection.close()
            return
        with self._lock:
            full = len(self._inside) >= MOST_LET_IN
            if not full:
                self._inside.add(link)
        try:
            if full:
                raise RuntimeError(f"there are {MOST_LET_IN} connections already")
            Thread(target=self._host, args=(link, stranger.address), name="commopt-peer", daemon=True).start()
        except RuntimeError as error:  # of this process, if it can have no more threads
            _log.warning("a connection from %s was refused: %s", stranger.address, error)
            link.close()
            with self._lock:
                self._inside.discard(link)

    def _host(self, link: Link, address: str) -> None:
        try:
            self._enter(link, address)
        except Exception as error:  # ends this connection, and no other
            _log.warning("a connection from %s has ended: %s", address, plain(reason(error)))
        finally:
            link.close()
            with self._lock:
                self._inside.discard(link)


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error}; pass another --host") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            with suppress(OSError):
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # "::" is of both kinds
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {why}; pass another --port, or an address of this machine as --host"
        ) from None
    return listener
