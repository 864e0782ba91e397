# SPDX-License-Identifier: Apache-2.0
"""The rendezvous store, asked with a limit.

A call of torch's client waits for its answer without one, and a network that is cut gives no error for many minutes.
Every call is therefore made by a thread of its own, over a connection of its own, and whoever asked waits only so long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime  # another class than the built-in one before Python 3.11
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from commopt.errors import TransportError
from commopt.groups.signed import own_secret, seal, unseal

_T = TypeVar("_T")

# A call that begins when the time for a whole exchange is over: enough for an answer, if there will be one.
_LAST_CALL_S = 0.5


class LimitedStore:
    """Keys under `prefix` in the store of the world; no call outlasts `limit_s`, nor the `deadline` by more than 0.5 s.

    Methods are those of torch's stores. All of them raise TransportError when there is no answer in time, and when the
    connection is lost. With a secret values are signed, and `get`, `read` and `compare_set` also raise it for one that
    somebody else wrote; the numbers of `add` are not.
    """

    def __init__(
        self, connection: _StoreConnection, prefix: str, limit_s: float, deadline: float = float("inf")
    ) -> None:
        self._connection = connection
        self._prefix = prefix
        self._limit_s = limit_s
        self._deadline = deadline

    def under(self, prefix: str, limit_s: float) -> LimitedStore:
        """Return the keys under another prefix."""
        return LimitedStore(self._connection, f"{prefix}/", limit_s)

    def within(self, room: str) -> LimitedStore:
        """Return the keys under `room` among these."""
        return LimitedStore(self._connection, f"{self._prefix}{room}/", self._limit_s, self._deadline)

    def until(self, deadline: float) -> LimitedStore:
        """Return the same keys, for an exchange that must be over at `deadline` (time.monotonic)."""
        return LimitedStore(self._connection, self._prefix, self._limit_s, min(deadline, self._deadline))

    @property
    def silent_s(self) -> float:
        """For how long a call has been waiting for its answer; 0 when none is."""
        return self._connection.silent_s

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._call("set", self._prefix + key, self._sealed(key, value))

    def get(self, key: str) -> bytes:
        """Return a value that is there: to be called after `check` has said so."""
        return self._unsealed(key, self._call("get", self._prefix + key))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self._call("check", [self._prefix + key for key in keys]))

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Return values that are all there, as `get` does: in one request, if the store can."""
        if not (keys and self._connection.extended):
            return [self.get(key) for key in keys]
        values = self._call("multi_get", [self._prefix + key for key in keys])
        return [self._unsealed(key, value) for key, value in zip(keys, values, strict=True)]

    def set_all(self, values: Mapping[str, str]) -> None:
        """Write values, in one request if the store can."""
        if not self._connection.extended:
            for key, value in values.items():
                self.set(key, value)
            return
        sealed = [self._sealed(key, value) for key, value in values.items()]
        self._call("multi_set", [self._prefix + key for key in values], sealed)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins at 0; return the sum."""
        return int(self._call("add", self._prefix + key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write `desired` where `expected` stands ("": nothing); return what stands there then."""
        before = self._sealed(key, expected) if expected else ""
        return self._unsealed(key, self._call("compare_set", self._prefix + key, before, self._sealed(key, desired)))

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        return bool(self._call("delete_key", self._prefix + key))

    def read(self, key: str) -> str | None:
        """Return a value, None while there is none."""
        return self.get(key).decode() if self.check([key]) else None

    def read_all(self, keys: Sequence[str]) -> list[str | None]:
        """Return values, None for each that is not there; in two requests, if all are and the store can."""
        if keys and self.check([*keys]):
            return [value.decode() for value in self.get_all(keys)]
        return [self.read(key) for key in keys]

    def close(self) -> None:
        """End the connection, for all prefixes; whoever asks from now on gets a TransportError."""
        self._connection.close()

    def _sealed(self, key: str, value: str) -> str:
        # What Python makes of a name of a file that is not UTF-8, as tracebacks have it, is no text for torch's store.
        value = value.encode(errors="backslashreplace").decode()
        return seal(self._connection.secret, self._prefix + key, value)

    def _unsealed(self, key: str, value: bytes) -> bytes:
        return unseal(self._connection.secret, self._prefix + key, value)

    def _call(self, method: str, *arguments: Any) -> Any:
        limit_s = min(self._limit_s, max(self._deadline - time.monotonic(), _LAST_CALL_S))
        return self._connection.call(method, arguments, limit_s)


class _StoreConnection:
    """One client and its thread, for all of this process's keys in one store."""

    def __init__(self, store: dist.Store, limit_s: float, secret: bytes | None = None) -> None:
        self.secret = secret
        self._requests: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._under_way: list[tuple[Future[Any], float]] = []  # at most one: the call the thread is in, since when
        self._stuck: Future[Any] | None = None
        self._closing = threading.Lock()
        self._closed = False
        # A daemon, which holds nothing of this: once nobody can ask any more, it ends. Not at exit, where others ask.
        work = (self._requests, self._under_way)
        self._thread = threading.Thread(target=_serve, args=work, name="commopt-store", daemon=True)
        self._thread.start()
        finalize(self, self._requests.put, None).atexit = False
        _all.add(self)
        clone = getattr(store, "clone", None)  # older torch has none
        # Not `store` itself: that would keep the server alive after its process group.
        try:
            self._client: dist.Store = store if clone is None else self._ask(clone, limit_s)
        except TransportError as error:
            raise TransportError(f"{error}; or it may open no more files: two for each rank (ulimit -n)") from error
        # FileStore has no multi_get and multi_set.
        self.extended = bool(getattr(self._client, "has_extended_api", lambda: False)())

    def call(self, method: str, arguments: tuple[Any, ...], limit_s: float) -> Any:
        """Call a method of the client."""
        bound = getattr(self._client, method)
        return self._ask(lambda: bound(*arguments), limit_s)

    def close(self) -> None:
        """Let the thread end after the calls it has; whoever asks from now on gets a TransportError."""
        with self._closing:
            self._closed = True
            self._requests.put(None)
        self._thread.join(_LAST_CALL_S)

    @property
    def silent_s(self) -> float:
        """See LimitedStore."""
        under_way = self._under_way[:]
        return time.monotonic() - under_way[0][1] if under_way else 0.0

    def _ask(self, call: Callable[[], _T], limit_s: float) -> _T:
        left_s = limit_s
        if self._stuck is not None and not self._stuck.done():
            left_s -= self.silent_s  # that long this caller has waited, though another one did it
            if left_s <= 0:
                raise _silence(self.silent_s)
        answer: Future[_T] = Future()
        with self._closing:
            if self._closed:
                raise TransportError("the rendezvous store is closed: this process is about to exit")
            self._requests.put((answer, call))
        try:
            return answer.result(left_s)
        except NotInTime:
            under_way = self._under_way[:]
            self._stuck = under_way[0][0] if under_way else None
            answer.cancel()
            raise _silence(limit_s) from None
        except (RuntimeError, ValueError, OSError) as error:
            cause = str(error).partition("\n")[0]
            raise TransportError(
                f"the process that holds the rendezvous store (that of rank 0, unless torchrun's does) has probably "
                f"died: {cause}"
            ) from error


def _serve(
    requests: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None], under_way: list[tuple[Future[Any], float]]
) -> None:
    while (request := requests.get()) is not None:
        answer, call = request
        if answer.set_running_or_notify_cancel():
            under_way.append((answer, time.monotonic()))
            try:
                answer.set_result(call())
            except BaseException as error:  # the caller's, whatever it is
                answer.set_exception(error)
            under_way.clear()
        del request, answer, call  # keep no client alive while idle


def _silence(seconds: float) -> TransportError:
    return TransportError(
        f"the rendezvous store has not answered for {seconds:.1f} s: the host that holds it is down, or the network "
        f"between it and this host is cut"
    )


# One for each world, as torch has one store for each.
_connections: WeakKeyDictionary[dist.ProcessGroup, _StoreConnection] = WeakKeyDictionary()
_connecting = threading.Lock()
_all: WeakSet[_StoreConnection] = WeakSet()


def limited(store: dist.Store, prefix: str, limit_s: float, secret: bytes | None = None) -> LimitedStore:
    """Return the keys under `prefix` in any store, over a connection of its own; values are signed with `secret`.

    Raises as `limited_store`.
    """
    return LimitedStore(_StoreConnection(store, limit_s, secret), f"{prefix}/", limit_s)


def limited_store(prefix: str, limit_s: float) -> LimitedStore:
    """Return the keys under `prefix` in the store of the world that is initialized now.

    Values are signed where COMMOPT_SECRET is set, which has to be on all ranks. Raises TransportError when no
    connection to it can be had within `limit_s`.
    """
    world = c10d._get_default_group()
    with _connecting:
        connection = _connections.get(world)
        if connection is None:
            connection = _connections[world] = _StoreConnection(c10d._get_default_store(), limit_s, own_secret())
    return LimitedStore(connection, f"{prefix}/", limit_s)


def close_stores() -> None:
    """Ask no store any more: a call of torch's client that returns to an interpreter that goes ends the process."""
    for connection in list(_all):
        connection.close()
