# SPDX-License-Identifier: Apache-2.0
"""A store that counts what it is asked: exact numbers, which do not depend on how busy a machine is."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

POLL = "poll"
"""The kind of a request that found nothing yet; how many there are depends on time, and on the pause between them."""


class Counts:
    """Requests by who asked ("torch" or "commopt") and kind, and the bytes of their keys and values."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def add(self, owner: str, kind: str, keys: Iterable[str], values: Iterable[str | bytes] = ()) -> None:
        """Count one request."""
        nbytes = sum(map(len, keys)) + sum(map(len, values))
        with self._lock:
            self.requests[f"{owner} {kind}"] += 1
            self.nbytes[owner] += nbytes

    def take(self) -> dict[str, Any]:
        """Return what was counted since the last call."""
        with self._lock:
            taken = {"requests": dict(self.requests), "nbytes": dict(self.nbytes)}
            self.requests.clear()
            self.nbytes.clear()
        return taken


class CountingStore(dist.Store):
    """Passes each request on to `inner`. commopt asks a clone of a world's store; beats are counted apart."""

    def __init__(self, inner: Any, counts: Counts, owner: str = "torch") -> None:
        super().__init__()
        self._inner, self._counts, self._owner = inner, counts, owner
        _kept.append(self)  # torch holds the part of it that is in C++ only

    def _count(self, kind: str, keys: Sequence[str], values: Iterable[str | bytes] = ()) -> None:
        owner = "heartbeat" if self._owner == "commopt" and "/heartbeat/" in keys[0] else self._owner
        self._counts.add(owner, kind, keys, values)

    def set(self, key: str, value: Any) -> None:
        """Count a set."""
        self._count("set", [key], [value])
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Count a get, of which torch's client makes two: it waits for the key first."""
        value: bytes = self._inner.get(key)
        self._count("get", [key], [value])
        return value

    def add(self, key: str, amount: int) -> int:
        """Count an add."""
        self._count("add", [key])
        return int(self._inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        """Count a check, as a poll if it finds nothing."""
        found = bool(self._inner.check(keys))
        self._count("check" if found else POLL, keys)
        return found

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Count a compare_set."""
        value: bytes = self._inner.compare_set(key, expected, desired)
        self._count("compare_set", [key], [expected, desired, value])
        return value

    def delete_key(self, key: str) -> bool:
        """Count a delete_key."""
        self._count("delete_key", [key])
        return bool(self._inner.delete_key(key))

    deleteKey = delete_key  # by which name torch calls it from C++

    def wait(self, keys: list[str], *timeout: Any) -> None:
        """Count a wait."""
        self._count("wait", keys)
        self._inner.wait(keys, *timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Count a multi_get."""
        values: list[bytes] = self._inner.multi_get(keys)
        self._count("multi_get", keys, values)
        return values

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Count a multi_set."""
        self._count("multi_set", keys, values)
        self._inner.multi_set(keys, values)

    def append(self, key: str, value: Any) -> None:
        """Count an append."""
        self._count("append", [key], [value])
        self._inner.append(key, value)

    def has_extended_api(self) -> bool:
        """Return whether there are multi_get, multi_set and append."""
        return bool(self._inner.has_extended_api())

    def clone(self) -> CountingStore:
        """Return commopt's connection to the same store."""
        return CountingStore(self._inner.clone(), self._counts, "commopt")


_kept: list[CountingStore] = []
