# SPDX-License-Identifier: Apache-2.0
"""An authenticated connection of two processes: signed and numbered frames of bounded length, and heartbeats.

A frame has a kind (1 byte), a length (4 bytes), a body, and 16 bytes of HMAC-SHA256 over these and the frame's number.
Nobody without the keys can add, change, repeat or drop a frame. Frames are not encrypted.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Any

import torch
from torch import Tensor

from commopt.errors import CommoptError, ConfigurationError, TransportError
from commopt.server.secret import NONCE_NBYTES, PROOF_NBYTES, SecretHandshake, key_of

GREETING = b"commopt server 1"  # 16 bytes; the number is the protocol's version
# Kinds of frames. TEXT: a request or an answer in JSON. DATA: a part of a tensor. END: the last frame.
HEARTBEAT, TEXT, DATA, END = range(4)
DATA_NBYTES = 2**18  # the longest body of DATA: each frame has the time limit, and 30 s are enough at 70 kbit/s
TEXT_NBYTES = 2**16
LOG_EVERY_S = 30.0  # between two log lines about a wait
HEARTBEATS_PER_TIMEOUT = 5
_READS_PER_TIMEOUT = 10
_CLOSE_TIMEOUT_S = 2.0
_RETRY_S = 0.1
WELCOME, REFUSAL = b"\x01", b"\x00"  # first byte of the answer to a proof
_HEAD, _COUNT, _TAG_NBYTES = struct.Struct("!BI"), struct.Struct("!Q"), 16
_LONGEST_TEXT = 500  # of a peer, in a message or a log


class EndedError(TransportError):
    """The peer has closed the connection in order.

    kind: name of the peer's error class that was the reason; "" for none.
    """

    def __init__(self, why: str, kind: str = "") -> None:
        super().__init__(why)
        self.kind = kind


class SecureChannel:
    """One end of a connection whose two sides have proved that they know the secret.

    One thread may receive; any thread may send. Methods raise TransportError once the connection is broken or closed.

    send_key: signs the frames of this end.
    receive_key: checks the peer's frames.
    silence_s: seconds without a byte after which the peer counts as gone; also the time limit of each frame.
    """

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes, silence_s: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._in = connection
        self._out = connection.dup()  # their time limits differ
        self._signs, self._checks = (hmac.new(key, digestmod="sha256") for key in (send_key, receive_key))
        self._sent = self._received = 0
        self._sending = Lock()
        self._receiving = Lock()
        self._closing = Event()
        self._ended = False
        self._broken: TransportError | None = None  # why nothing more can be sent
        self._process = os.getpid()
        self.peer = connection.getpeername()
        self.set_timeout(silence_s)

    def set_timeout(self, silence_s: float) -> None:
        """Set the limit for silence, and for each frame."""
        self._silence_s = silence_s
        self._in.settimeout(silence_s / _READS_PER_TIMEOUT)
        self._out.settimeout(silence_s)

    @property
    def closed(self) -> bool:
        """Whether this end is closed."""
        return self._closing.is_set()

    # ------------------------------------------------------------------------------------- sending

    def send_json(self, **fields: Any) -> None:
        """Send a request or an answer as JSON."""
        with self._sending:
            self._send(TEXT, json.dumps(fields).encode())

    def send_tensor(self, tensor: Tensor) -> None:
        """Send the bytes of a contiguous CPU tensor."""
        values = bytes_of(tensor)
        for begin in range(0, len(values), DATA_NBYTES):
            with self._sending:
                self._send(DATA, values[begin : begin + DATA_NBYTES])

    def send_heartbeat(self, **fields: Any) -> None:
        """Send a heartbeat, unless another frame is being sent, which serves as one."""
        if self._sending.acquire(blocking=False):
            try:
                self._send(HEARTBEAT, json.dumps(fields).encode() if fields else b"")
            finally:
                self._sending.release()

    def start_heartbeat(self, before: Callable[[], None] = lambda: None) -> None:
        """Start a thread that sends heartbeats until the connection is closed.

        before: called before each heartbeat.
        """

        def beat() -> None:
            with suppress(TransportError):  # whoever sends or receives next gets it too
                while not self._closing.wait(self._silence_s / HEARTBEATS_PER_TIMEOUT):
                    before()
                    self.send_heartbeat()

        Thread(target=beat, name="commopt-beat", daemon=True).start()

    def _send(self, kind: int, body: bytes | memoryview) -> None:
        if self._broken is not None:  # a part of a frame may be on its way, which nothing can follow
            raise TransportError(str(self._broken))
        head = _HEAD.pack(kind, len(body))
        signed = self._signs.copy()
        signed.update(_COUNT.pack(self._sent) + head)
        signed.update(body)
        self._sent += 1
        try:
            self._out.sendall(b"".join((head, body, signed.digest()[:_TAG_NBYTES])))
        except OSError as error:
            self._broken = _broken(error)
            raise self._broken from None

    # ------------------------------------------------------------------------------------- receiving

    def receive(self, most: int = DATA_NBYTES, into: memoryview | None = None) -> tuple[int, memoryview]:
        """Return kind and body of the next frame.

        Raises TransportError for a body of more than `most` bytes, EndedError when the peer has ended the connection.

        into: memory for the body of a DATA frame, which may be as long as this memory.
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
            raise TransportError(f"a frame of kind {kind} and {nbytes} bytes is not accepted here")
        body = into[:nbytes] if kind == DATA and into is not None else memoryview(bytearray(nbytes))
        self._read(body, deadline)
        self._read(memoryview(tag), deadline)
        signed = self._checks.copy()
        signed.update(_COUNT.pack(self._received) + head)
        signed.update(body)
        if not hmac.compare_digest(signed.digest()[:_TAG_NBYTES], tag):
            raise TransportError("a frame does not have the peer's signature")
        self._received += 1
        if kind == END:
            fields = parse_json(body)
            raise EndedError(plain(fields.get("why", "")), plain(fields.get("kind", "")))
        return kind, body

    def receive_json(self, most: int = TEXT_NBYTES) -> dict[str, Any]:
        """Return the next request or answer; heartbeats before it are skipped."""
        while True:
            kind, body = self.receive(most)
            if kind == TEXT:
                return parse_json(body)
            if kind == DATA:
                raise TransportError("data arrived where a request was expected")

    def receive_into(self, tensor: Tensor, arrived: Callable[[], None] = lambda: None) -> Tensor:
        """Fill a contiguous CPU tensor with received data and return it; `arrived` is called after each part."""
        values = bytes_of(tensor)
        place = 0
        while place < len(values):
            kind, body = self.receive(TEXT_NBYTES, values[place:])
            if kind == HEARTBEAT:
                continue
            if kind != DATA or not len(body):
                raise TransportError(f"{len(values) - place} bytes of data were expected, and something else arrived")
            place += len(body)
            arrived()
        return tensor

    def _read(self, view: memoryview, deadline: float | None) -> None:
        """Fill memory with received bytes.

        deadline: of time.monotonic(); None: `silence_s` after the first byte.
        """
        found = timeouts = 0
        while found < len(view):
            try:
                more = self._in.recv_into(view[found:])
                if not more and self._closing.is_set():
                    raise TransportError("the connection is closed")
                if not more:
                    raise TransportError("the connection broke: the other side closed it")
                found, timeouts = found + more, 0
                deadline = deadline or (time.monotonic() + self._silence_s)
            except TimeoutError:
                # Timeouts are counted, not seconds: a pause of this process itself must not count against the peer.
                timeouts += 1
                if timeouts >= _READS_PER_TIMEOUT:
                    raise TransportError(f"gave no sign of life for {self._silence_s:g} s") from None
            except OSError as error:
                raise _broken(error) from None
            if found < len(view) and deadline is not None and time.monotonic() > deadline:
                raise TransportError(f"a frame was not complete within {self._silence_s:g} s")

    # ------------------------------------------------------------------------------------- the end

    def end(self, why: str, kind: str = "") -> None:
        """Send the last frame, with the reason. A second call does nothing. The caller must still call `close`."""
        if self._ended or os.getpid() != self._process or not self._sending.acquire(timeout=_CLOSE_TIMEOUT_S):
            return
        try:
            if not self._ended:
                self._ended = True
                with suppress(TransportError, OSError):
                    self._out.settimeout(_CLOSE_TIMEOUT_S)
                    self._send(END, json.dumps({"why": why, "kind": kind}).encode())
                    self._out.shutdown(socket.SHUT_WR)
        finally:
            self._sending.release()

    def drain(self) -> None:
        """Wait up to 2 s until the peer has closed too: closing earlier could destroy the last bytes sent."""
        until = time.monotonic() + _CLOSE_TIMEOUT_S
        with suppress(OSError), self._receiving:
            self._in.settimeout(_CLOSE_TIMEOUT_S)
            while time.monotonic() < until and self._in.recv(DATA_NBYTES):
                pass

    def close(self) -> None:
        """Close the connection and wake threads that wait in it. A second call does nothing."""
        if not self._closing.is_set():
            self._closing.set()
            with suppress(OSError):
                if os.getpid() == self._process:  # a forked child leaves its parent's connection alone
                    self._in.shutdown(socket.SHUT_RDWR)
            # Only when the other threads have left: their next call could hit another file with the same number.
            for lock, end in ((self._receiving, self._in), (self._sending, self._out)):
                if lock.acquire(timeout=_CLOSE_TIMEOUT_S):
                    end.close()
                    lock.release()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    data: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(data)


def parse_json(body: bytes | memoryview) -> dict[str, Any]:
    """Return the fields of a request or an answer. Raises TransportError for anything but a JSON object."""
    try:
        found = json.loads(bytes(body)) if len(body) else {}
    except (ValueError, RecursionError) as error:
        raise TransportError(f"a request is not JSON: {plain(error)}") from None
    if not isinstance(found, dict):
        raise TransportError(f"a request is a JSON {type(found).__name__}, and must be an object")
    return found


def plain(text: object) -> str:
    """Return a peer's text as one printable line of bounded length, for a message or a log."""
    line = " ".join(str(text)[: 2 * _LONGEST_TEXT].split())
    return "".join(each if each.isprintable() else "?" for each in line)[:_LONGEST_TEXT]


def reason(error: Exception) -> str:
    """Return the text of an error that ends a connection."""
    return str(error) if isinstance(error, CommoptError) else f"{type(error).__name__}: {error}"


def _broken(error: OSError) -> TransportError:
    if isinstance(error, TimeoutError):
        return TransportError("the connection broke: the other side accepted no data within the time limit")
    return TransportError(f"the connection broke: {error.strerror or error}")


# ------------------------------------------------------------------------------------------- connecting


class UnreachableError(TransportError):
    """No process listens at an address, or none answered in time."""


def connect(host: str, port: int, secret: str, silence_s: float, limit_s: float) -> SecureChannel:
    """Connect to a scheduler or a server, and prove knowledge of the secret.

    Raises UnreachableError when no process answers in time, ConfigurationError when another kind of program answers or
    the secrets differ.

    limit_s: seconds to keep trying.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return _connect(host, port, key_of(secret), silence_s, deadline)
        except (UnicodeError, socket.gaierror) as error:
            raise UnreachableError(f"{host!r} has no address: {error}") from None
        except OSError as error:  # such as a connection that was closed to make room for another
            if time.monotonic() + _RETRY_S > deadline:
                raise UnreachableError(str(error.strerror or error or "no answer")) from None
            time.sleep(_RETRY_S)


def _connect(host: str, port: int, key: bytes, silence_s: float, deadline: float) -> SecureChannel:
    """Try once. An OSError may be temporary."""
    connection = socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), _RETRY_S))
    try:
        found = _receive_exactly(connection, len(GREETING) + NONCE_NBYTES, deadline)
        if not found.startswith(GREETING):
            raise ConfigurationError(
                f"{host}:{port} is not a scheduler or server of this version of commopt: its greeting differs; check "
                f"the address, and use one version of commopt everywhere"
            )
        nonce = secrets.token_bytes(NONCE_NBYTES)
        handshake = SecretHandshake(key, found[len(GREETING) :], nonce)
        connection.sendall(nonce + handshake.proof("client"))
        answer = _receive_exactly(connection, 1 + PROOF_NBYTES, deadline)
        if answer[:1] != WELCOME or not handshake.verify("server", answer[1:]):
            raise ConfigurationError(
                f"{host}:{port} does not have the secret of this process; set the same COMMOPT_SECRET, or pass the "
                f"same --secret-file FILE, for the scheduler, the server and the workers"
            )
        keys = handshake.keys()
        return SecureChannel(connection, keys.of_client, keys.of_server, silence_s)
    except BaseException:
        connection.close()
        raise


def _receive_exactly(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    found = b""
    while len(found) < nbytes:
        connection.settimeout(max(deadline - time.monotonic(), 0.01))
        more = connection.recv(nbytes - len(found))
        if not more:
            raise ConnectionResetError("the connection was closed before it began")
        found += more
        if not GREETING.startswith(found[: len(GREETING)]) and nbytes > 1 + PROOF_NBYTES:
            break  # another protocol, which may send nothing more
    return found
