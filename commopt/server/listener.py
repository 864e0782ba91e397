# SPDX-License-Identifier: Apache-2.0
"""The listening socket of scheduler and server, which admits only connections that prove knowledge of the secret.

All others learn nothing and delay nobody.
"""

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
from commopt.server.channel import GREETING, REFUSAL, WELCOME, SecureChannel, plain, reason
from commopt.server.secret import NONCE_NBYTES, PROOF_NBYTES, SecretHandshake, key_of, require_secret

_log = logging.getLogger("commopt")

MOST_PENDING = 128  # connections without proof so far
MOST_CHANNELS = 512
_POLL_S = 0.2
_BACKLOG = 128
_MOST_ACCEPTED = 32  # at a time; then open connections get their turn
_PROOF_MESSAGE_NBYTES = NONCE_NBYTES + PROOF_NBYTES


@dataclass(eq=False)
class _PendingConnection:
    """A connection without proof of the secret so far.

    deadline: end of its time limit (time.monotonic).
    received: bytes of the proof so far.
    """

    connection: socket.socket
    address: str
    deadline: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_NBYTES))
    received: bytes = b""


class SecureListener:
    """Listens from its construction on; `start` lets it accept, in a thread of its own that never blocks on a peer.

    Connections made before `start` wait until then. Raises ConfigurationError when it cannot listen at the address, or
    may not without a secret.

    silence_s: limit for silence on an admitted channel.
    on_channel: called with each admitted channel and its peer's address, in a thread of its own. The channel is closed
        when the call returns.
    on_failure: called with the reason when the listener itself fails.
    limit_s: time limit for the proof.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: str,
        silence_s: float,
        on_channel: Callable[[SecureChannel, str], None],
        on_failure: Callable[[str], None],
        limit_s: float = 10.0,
    ) -> None:
        require_secret(host, secret)
        self._listener = _listening(host, port)
        self.port = int(self._listener.getsockname()[1])
        self._key = key_of(secret)
        self._limit_s = limit_s
        self._silence_s = silence_s
        self._on_channel = on_channel
        self._on_failure = on_failure
        self._pending: dict[socket.socket, _PendingConnection] = {}
        self._channels: set[SecureChannel] = set()
        self._lock = Lock()  # guards _channels
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = Thread(target=self._run, name="commopt-door", daemon=True)

    def start(self) -> None:
        """Begin to accept connections. Whatever `on_channel` uses must be complete by now."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening and close all open channels."""
        self._closing = True
        if self._thread.ident is None:
            self._run()  # closes what the constructor opened, and accepts nothing
        else:
            self._thread.join()
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    # ------------------------------------------------------------------------------------- connections without proof

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(_POLL_S):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif (pending := self._pending.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                        self._receive_proof(pending)
                now = time.monotonic()
                for pending in [each for each in self._pending.values() if each.deadline < now]:
                    self._reject(pending)
        except Exception as error:
            _log.exception("no new connections can be accepted")
            self._on_failure(f"no new connections can be accepted: {reason(error)}")
        finally:
            for pending in list(self._pending.values()):
                self._reject(pending)
            self._selector.close()
            self._listener.close()

    def _accept(self) -> None:
        for _ in range(_MOST_ACCEPTED):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # too many open files, or gone before it was accepted
                if self._pending:
                    self._reject(next(iter(self._pending.values())))
                time.sleep(0.01)
                return
            if len(self._pending) >= MOST_PENDING:
                self._reject_oldest()
            connection.setblocking(False)
            pending = _PendingConnection(connection, str(address[0]), time.monotonic() + self._limit_s)
            self._pending[connection] = pending
            self._selector.register(connection, selectors.EVENT_READ)
            try:
                connection.send(GREETING + pending.nonce)  # a new connection has room for it
            except OSError:
                self._reject(pending)

    def _reject_oldest(self) -> None:
        """Reject the oldest connection of the address with most connections: other addresses are not delayed by it."""
        busiest = Counter(each.address for each in self._pending.values()).most_common(1)[0][0]
        self._reject(next(each for each in self._pending.values() if each.address == busiest))

    def _receive_proof(self, pending: _PendingConnection) -> None:
        try:
            more = pending.connection.recv(_PROOF_MESSAGE_NBYTES - len(pending.received))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        pending.received += more
        if not more:
            self._reject(pending)
        elif len(pending.received) == _PROOF_MESSAGE_NBYTES:
            handshake = SecretHandshake(self._key, pending.nonce, pending.received[:NONCE_NBYTES])
            correct = handshake.verify("client", pending.received[NONCE_NBYTES:])
            try:
                answer = WELCOME + handshake.proof("server") if correct else REFUSAL + bytes(PROOF_NBYTES)
                pending.connection.send(answer)
            except OSError:
                correct = False
            if correct:
                self._admit(pending, handshake)
            else:
                self._reject(pending)

    def _reject(self, pending: _PendingConnection) -> None:
        self._forget(pending)
        pending.connection.close()

    def _forget(self, pending: _PendingConnection) -> None:
        if self._pending.pop(pending.connection, None) is not None:
            self._selector.unregister(pending.connection)

    # ------------------------------------------------------------------------------------- admitted connections

    def _admit(self, pending: _PendingConnection, handshake: SecretHandshake) -> None:
        self._forget(pending)
        try:
            keys = handshake.keys()
            channel = SecureChannel(pending.connection, keys.of_server, keys.of_client, self._silence_s)
        except OSError:
            pending.connection.close()
            return
        with self._lock:
            full = len(self._channels) >= MOST_CHANNELS
            if not full:
                self._channels.add(channel)
        try:
            if full:
                raise RuntimeError(f"there are {MOST_CHANNELS} connections already")
            Thread(target=self._run_channel, args=(channel, pending.address), name="commopt-peer", daemon=True).start()
        except RuntimeError as error:  # also raised when this process can start no more threads
            _log.warning("a connection from %s was refused: %s", pending.address, error)
            channel.close()
            with self._lock:
                self._channels.discard(channel)

    def _run_channel(self, channel: SecureChannel, address: str) -> None:
        try:
            self._on_channel(channel, address)
        except Exception as error:  # ends this connection only
            _log.warning("a connection from %s has ended: %s", address, plain(reason(error)))
        finally:
            channel.close()
            with self._lock:
                self._channels.discard(channel)


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
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # "::" then accepts IPv4 too
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
