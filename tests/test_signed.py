# SPDX-License-Identifier: Apache-2.0
"""With COMMOPT_SECRET what commopt writes to the rendezvous store is signed, and what others write is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from commopt.errors import MismatchError, TransportError
from commopt.groups.agreement import exchange_facts
from commopt.groups.signed import own_secret, seal, unseal
from commopt.groups.store import LimitedStore, limited
from tests.ranks import run


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server
    del server


def test_a_value_bears_its_key_and_its_writer() -> None:
    sealed = seal(b"one", "a/b", "value").encode()
    assert unseal(b"one", "a/b", sealed) == b"value"
    assert unseal(None, "a/b", seal(None, "a/b", "value").encode()) == b"value"
    for secret, key, written in (
        (b"two", "a/b", sealed),
        (b"one", "a/c", sealed),
        (b"one", "a/b", sealed + b"!"),
        (b"one", "a/b", b"value"),
        (b"one", "a/b", b""),
        (None, "a/b", sealed),
    ):
        with pytest.raises(TransportError, match="COMMOPT_SECRET"):
            unseal(secret, key, written)


def test_a_stranger_can_neither_write_nor_move_a_value(store: dist.TCPStore) -> None:
    mine = limited(store, "commopt", 5.0, b"secret")
    mine.set("key", "value")
    assert mine.read("key") == "value"
    assert mine.compare_set("once", "", "first") == b"first"
    assert mine.compare_set("once", "", "second") == b"first"
    assert mine.compare_set("once", "first", "third") == b"third"
    assert mine.add("count", 2) == 2
    store.set("commopt/other", store.get("commopt/key").decode())
    store.set("commopt/key", "forged")
    for key in ("key", "other"):
        with pytest.raises(TransportError, match=f"'commopt/{key}' in the rendezvous store is not signed"):
            mine.read(key)
    with pytest.raises(TransportError, match="this rank has no COMMOPT_SECRET"):
        limited(store, "commopt", 5.0).read("once")


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"meeting": 5}', '{"meeting": "m"}', '{"facts": {}}'])
@pytest.mark.parametrize("key", ["seat/1", "verdict"])
def test_what_is_not_of_commopt_ends_a_meeting_in_one_line(store: dist.TCPStore, key: str, text: str) -> None:
    mine = limited(store, "commopt", 5.0)
    if key == "seat/1":
        mine.set(key, text)
    else:  # the verdict of a meeting whose name is drawn when it begins

        def foreign(key: str, expected: str, desired: str) -> bytes:
            return text.encode()

        mine = _With(mine, foreign)  # type: ignore[assignment]
    with pytest.raises(MismatchError, match="is not what commopt writes"):
        exchange_facts(mine, (0, 1), 0, "a test", {}, 0.2)


class _With:
    """A store whose verdict somebody else has written."""

    def __init__(self, store: LimitedStore, compare_set: Any) -> None:
        self._store, self.compare_set = store, compare_set

    def until(self, deadline: float) -> _With:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _agree(rank: int, world_size: int) -> list[Any]:
    from commopt.groups import joined  # noqa: F401 - loads what a setup needs
    from commopt.groups.store import limited_store

    store = limited_store("commopt/test", 10.0)
    answers = exchange_facts(store, range(world_size), rank, "a test", {"rank": rank}, 20.0)
    raw = dist.distributed_c10d._get_default_store()
    deadline = time.monotonic() + 10
    while not raw.check([f"commopt/test/seat/{1}"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [[answer["rank"] for answer in answers], raw.get("commopt/test/seat/1").startswith(b"commopt-hmac-sha256:")]


def test_ranks_with_one_secret_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_secret() is None
    for secret, signed in ((None, False), ("of this job", True)):
        env = {"COMMOPT_SECRET": secret}
        assert run(_agree, 2, env=env) == [[[0, 1], signed]] * 2
