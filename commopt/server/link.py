# SPDX-License-Identifier: Apache-2.0
"""A connection of two processes: frames of bounded length, signed and counted, and signs of life between them.

A frame is its kind (1 byte), its length (4 bytes), its body, and 16 bytes of HMAC-SHA256 over these and its number. So
whoever does not have the keys can add, change, repeat or leave out nothing; what is sent can be read, though.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Any

import torch
from torch import Tensor

from commopt.errors import CommoptError, ConfigurationError, TransportError
from commopt.server.secret import NONCE_NBYTES, PROOF_NBYTES, Handshake, key_of

GREETING = b"commopt server 1"  # 16 bytes; another number is another protocol
BEAT, TEXT, DATA, END = range(4)  # kinds: a sign of life, a request or an answer, a part of a tensor, the last frame
DATA_NBYTES = 2**18  # of a frame: each has the time limit, and 30 s are enough at 70 kbit/s
TEXT_NBYTES = 2**16
SAY_S = 30.0  # after which it is said who is waited for, and again after as long
BEATS = 5  # in the time after which somebody without a sign of life is gone
_LOOKS = 10
_PARTING_S = 2.0
_RETRY_S = 0.1
WELCOME, REFUSAL = b"\x01", b"\x00"  # begin the answer to a proof
_HEAD, _COUNT, _TAG_NBYTES = struct.Struct("!BI"), struct.Struct("!Q"), 16
_LONGEST_WORDS = 500  # of a peer, in a message or a log

Words = Mapping[str, Any]


class EndedError(TransportError):
    """The other side has ended the connection in order. kind: the name of the error that it says was the reason."""

    def __init__(self, why: str, kind: str = "") -> None:
        super().__init__(why)
        self.kind = kind


class Link:
    """One end of a connection that both sides have shown the secret for. One thread may receive, any may send.

    keys: of what this end sends and receives. silence_s: after so many seconds without a byte the other is gone; also
    the time limit of each frame. Methods raise TransportError once the connection is broken or closed.
    """

    def __init__(self, connection: socket.socket, sends: bytes, receives: bytes, silence_s: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._in = connection
        self._out = connection.dup()  # their time limits differ
        self._signs, self._checks = (hmac.new(key, digestmod="sha256") for key in (sends, receives))
        self._sent = self._received = 0
        self._sending = Lock()
        self._receiving = Lock()
        self._closing = Event()
        self._parted = False
        self._process = os.getpid()
        self.peer = connection.getpeername()
        self.wait_at_most(silence_s)

    def wait_at_most(self, silence_s: float) -> None:
        """Set how long silence, or a frame, may last."""
        self._silence_s = silence_s
        self._in.settimeout(silence_s / _LOOKS)
        self._out.settimeout(silence_s)

    @property
    def closed(self) -> bool:
        """Whether this end has closed it."""
        return self._closing.is_set()

    # ------------------------------------------------------------------------------------- sending

    def say(self, **words: Any) -> None:
        """Send a request or an answer, as JSON."""
        with self._sending:
            self._send(TEXT, json.dumps(words).encode())

    def send(self, tensor: Tensor) -> None:
        """Send the bytes of a contiguous tensor of the CPU."""
        values = bytes_of(tensor)
        for begin in range(0, len(values), DATA_NBYTES):
            with self._sending:
                self._send(DATA, values[begin : begin + DATA_NBYTES])

    def beat(self, **words: Any) -> None:
        """Give a sign of life, unless a frame is just being sent, which is one."""
        if self._sending.acquire(blocking=False):
            try:
                self._send(BEAT, json.dumps(words).encode() if words else b"")
            finally:
                self._sending.release()

    def beat_regularly(self, before: Callable[[], None] = lambda: None) -> None:
        """Have a thread give signs of life, until the connection is closed. before: called ahead of each."""

        def beat() -> None:
            with suppress(TransportError):  # whoever receives learns of it too
                while not self._closing.wait(self._silence_s / BEATS):
                    before()
                    self.beat()

        Thread(target=beat, name="commopt-beat", daemon=True).start()

    def _send(self, kind: int, body: bytes | memoryview) -> None:
        head = _HEAD.pack(kind, len(body))
        signed = self._signs.copy()
        signed.update(_COUNT.pack(self._sent) + head)
        signed.update(body)
        self._sent += 1
        try:
            self._out.sendall(b"".join((head, body, signed.digest()[:_TAG_NBYTES])))
        except OSError as error:
            raise _broken(error) from None

    # ------------------------------------------------------------------------------------- receiving

    def receive(self, most: int = DATA_NBYTES, into: memoryview | None = None) -> tuple[int, memoryview]:
        """Return kind and body of the next frame; raises TransportError for one of more than `most` bytes.

        into: where data goes, of which a frame may be as long. Raises EndedError when the other side has ended the
        connection.
        """
        with self._receiving:
            return self._receive(most, into)

    def _receive(self, most: int, into: memoryview | None) -> tuple[int, memoryview]:
        head, tag = bytearray(_HEAD.size), bytearray(_TAG_NBYTES)
        self._read(memoryview(head), None)
        deadline = time.monotonic() + self._silence_s
        kind, nbytes = _HEAD.unpack(head)
        if kind == DATA:
            most = min(DATA_NBYTES, most if into is None else len(into))
        if kind > END or nbytes > most:
            raise TransportError(f"a frame of kind {kind} and {nbytes} bytes is none that is taken here")
        body = into[:nbytes] if kind == DATA and into is not None else memoryview(bytearray(nbytes))
        self._read(body, deadline)
        self._read(memoryview(tag), deadline)
        signed = self._checks.copy()
        signed.update(_COUNT.pack(self._received) + head)
        signed.update(body)
        if not hmac.compare_digest(signed.digest()[:_TAG_NBYTES], tag):
            raise TransportError("a frame is not what the other side has signed")
        self._received += 1
        if kind == END:
            words = words_of(body)
            raise EndedError(plain(words.get("why", "")), plain(words.get("kind", "")))
        return kind, body

    def hear(self, most: int = TEXT_NBYTES) -> dict[str, Any]:
        """Return the next request or answer; signs of life before it are passed over."""
        while True:
            kind, body = self.receive(most)
            if kind == TEXT:
                return words_of(body)
            if kind == DATA:
                raise TransportError("data came where a request was due")

    def fill(self, tensor: Tensor, arrived: Callable[[], None] = lambda: None) -> Tensor:
        """Fill a contiguous tensor of the CPU with the data that comes; call `arrived` after each part; return it."""
        values = bytes_of(tensor)
        place = 0
        while place < len(values):
            kind, body = self.receive(TEXT_NBYTES, values[place:])
            if kind == BEAT:
                continue
            if kind != DATA or not len(body):
                raise TransportError(f"{len(values) - place} bytes of data were due, and something else came")
            place += len(body)
            arrived()
        return tensor

    def _read(self, view: memoryview, deadline: float | None) -> None:
        """Fill memory. deadline: of time.monotonic(); None: so long after the first byte as silence may last."""
        found = looks = 0
        while found < len(view):
            try:
                more = self._in.recv_into(view[found:])
                if not more and self._closing.is_set():
                    raise TransportError("the connection is closed")
                if not more:
                    raise TransportError("the connection broke: the other side closed it")
                found, looks = found + more, 0
                deadline = deadline or (time.monotonic() + self._silence_s)
            except TimeoutError:
                # Looks are counted, not seconds: while this process is held up, nobody is to blame.
                looks += 1
                if looks >= _LOOKS:
                    raise TransportError(f"gave no sign of life for {self._silence_s:g} s") from None
            except OSError as error:
                raise _broken(error) from None
            if found < len(view) and deadline is not None and time.monotonic() > deadline:
                raise TransportError(f"a frame was not complete within {self._silence_s:g} s")

    # ------------------------------------------------------------------------------------- the end

    def part(self, why: str, kind: str = "") -> None:
        """End the connection in order, and say why; a second time nothing happens. `close` is still to be called."""
        if self._parted or os.getpid() != self._process or not self._sending.acquire(timeout=_PARTING_S):
            return
        try:
            if not self._parted:
                self._parted = True
                with suppress(TransportError, OSError):
                    self._out.settimeout(_PARTING_S)
                    self._send(END, json.dumps({"why": why, "kind": kind}).encode())
                    self._out.shutdown(socket.SHUT_WR)
        finally:
            self._sending.release()

    def drain(self) -> None:
        """Wait, not for long, until the other side has closed too: to close before would destroy what was sent last."""
        until = time.monotonic() + _PARTING_S
        with suppress(OSError), self._receiving:
            self._in.settimeout(_PARTING_S)
            while time.monotonic() < until and self._in.recv(DATA_NBYTES):
                pass

    def close(self) -> None:
        """Close it, also for those who wait in it; a second time nothing happens."""
        if not self._closing.is_set():
            self._closing.set()
            with suppress(OSError):
                if os.getpid() == self._process:  # a forked child is to leave the parent's alone
                    self._in.shutdown(socket.SHUT_RDWR)
            # Not before the others have left: their next call could be of another file with the same number.
            for lock, end in ((self._receiving, self._in), (self._sending, self._out)):
                if lock.acquire(timeout=_PARTING_S):
                    end.close()
                    lock.release()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of the CPU."""
    data: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(data)


def words_of(body: bytes | memoryview) -> dict[str, Any]:
    """Return a request or an answer. Raises TransportError for anything but a JSON object."""
    try:
        found = json.loads(bytes(body)) if len(body) else {}
    except (ValueError, RecursionError) as error:
        raise TransportError(f"a request is not JSON: {plain(error)}") from None
    if not isinstance(found, dict):
        raise TransportError(f"a request is a JSON {type(found).__name__}, and must be an object")
    return found


def plain(text: object) -> str:
    """Return a peer's words as one line of bounded length, for a message or a log."""
    line = " ".join(str(text)[: 2 * _LONGEST_WORDS].split())
    return "".join(each if each.isprintable() else "?" for each in line)[:_LONGEST_WORDS]


def reason(error: Exception) -> str:
    """Return what a thread says of an error that ends its peer."""
    return str(error) if isinstance(error, CommoptError) else f"{type(error).__name__}: {error}"


def _broken(error: OSError) -> TransportError:
    if isinstance(error, TimeoutError):
        return TransportError("the connection broke: the other side took nothing within the time limit")
    return TransportError(f"the connection broke: {error.strerror or error}")


# ------------------------------------------------------------------------------------------- connecting


class NobodyError(TransportError):
    """Nobody listens at an address, or has answered in time."""


def connect(host: str, port: int, secret: str, silence_s: float, limit_s: float) -> Link:
    """Connect to a scheduler or a server, and show the secret.

    limit_s: so many seconds are tried. Raises NobodyError when nobody answers within it, ConfigurationError when what
    answers is something else, or has another secret.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return _connect(host, port, key_of(secret), silence_s, deadline)
        except (UnicodeError, socket.gaierror) as error:
            raise NobodyError(f"{host!r} has no address: {error}") from None
        except OSError as error:  # such as a connection that was closed to make room for another
            if time.monotonic() + _RETRY_S > deadline:
                raise NobodyError(str(error.strerror or error or "no answer")) from None
            time.sleep(_RETRY_S)


def _connect(host: str, port: int, key: bytes, silence_s: float, deadline: float) -> Link:
    """Try once; an OSError may be over the next time."""
    connection = socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), _RETRY_S))
    try:
        found = _exactly(connection, len(GREETING) + NONCE_NBYTES, deadline)
        if not found.startswith(GREETING):
            raise ConfigurationError(
                f"{host}:{port} is no scheduler or server of this version of commopt: it does not greet as one; check "
                f"the address, and that all have the same version"
            )
        nonce = secrets.token_bytes(NONCE_NBYTES)
        shake = Handshake(key, found[len(GREETING) :], nonce)
        connection.sendall(nonce + shake.proof("client"))
        answer = _exactly(connection, 1 + PROOF_NBYTES, deadline)
        if answer[:1] != WELCOME or not shake.shown_by("server", answer[1:]):
            raise ConfigurationError(
                f"{host}:{port} does not have the secret that this process has; set COMMOPT_SECRET, or pass "
                f"--secret-file FILE, alike to the scheduler, the server and the workers"
            )
        keys = shake.keys()
        return Link(connection, keys.of_client, keys.of_server, silence_s)
    except BaseException:
        connection.close()
        raise


def _exactly(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    found = b""
    while len(found) < nbytes:
        connection.settimeout(max(deadline - time.monotonic(), 0.01))
        more = connection.recv(nbytes - len(found))
        if not more:
            raise ConnectionResetError("the connection was closed before it began")
        found += more
        if not GREETING.startswith(found[: len(GREETING)]) and nbytes > 1 + PROOF_NBYTES:
            break  # something else, which may say nothing more
    return found
