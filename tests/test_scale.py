# SPDX-License-Identifier: Apache-2.0
"""What ranks ask of the rendezvous store: as much of each, however many there are, and a bounded number a second."""

from __future__ import annotations

import base64
import json
import threading
import zlib
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from bench.evidence.scale.counting import POLL, CountingStore, Counts
from bench.evidence.scale.crowd import facts_of
from bench.evidence.scale.law import Law
from commopt.errors import MismatchError, TransportError
from commopt.groups import agreement, join, membership
from commopt.groups.agreement import exchange_facts, poll
from commopt.groups.membership import paced_interval_s
from commopt.groups.store import limited
from tests.ranks import run
from tests.speed import limit

Meeting = tuple[dict[int, Counts], dict[int, str]]


def meet(server: Any, size: int, attend: Callable[[Any, int], None], ranks: range) -> Meeting:
    """Let `ranks` of `size` attend in threads of their own; return what each asked, and how it ended."""
    counts, outcomes = {rank: Counts() for rank in ranks}, dict[int, str]()

    def take_part(rank: int) -> None:
        store = limited(CountingStore(server, counts[rank], "commopt"), "keys", 30)
        try:
            attend(store, rank)
            outcomes[rank] = "no error"
        except Exception as error:
            outcomes[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return counts, outcomes


class Host:
    """The store of a world, whose clones are new connections."""

    def __init__(self) -> None:
        self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def clone(self) -> Any:
        return dist.TCPStore("127.0.0.1", self._server.port, is_master=False)


def agree(size: int) -> tuple[dict[int, dict[str, int]], int]:
    """Let ranks agree twice; return what each asked the second time, without looks in vain, and the bytes of all but 0.

    Rank 0 reads seats again while it waits for a thread that the machine holds up.
    """
    host = Host()

    def attend(store: Any, rank: int) -> None:
        answers = exchange_facts(store, range(size), rank, "an agreement", facts_of(rank), 30)
        assert [answer["host"] for answer in answers] == [facts_of(rank)["host"] for rank in range(size)]

    for _ in range(2):
        counts, outcomes = meet(host, size, attend, range(size))
        assert set(outcomes.values()) == {"no error"}, outcomes
    taken = {rank: each.take() for rank, each in counts.items()}
    requests = {
        rank: {kind.removeprefix("commopt "): count for kind, count in each["requests"].items() if POLL not in kind}
        for rank, each in taken.items()
    }
    return requests, sum(each["nbytes"]["commopt"] for rank, each in taken.items() if rank)


def test_each_rank_asks_as_much_in_an_agreement_however_many_there_are() -> None:
    found = {size: agree(size) for size in (8, 16)}
    for size, (requests, _) in found.items():
        for rank in range(1, size):
            assert requests[rank] == {"set": 2, "check": 2, "get": 2, "delete_key": 1}, f"rank {rank} of {size}"
        assert "set" not in requests[0] or requests[0]["set"] == 1
        # It reads while the others arrive, in one request each time: a clock decides how often.
        serial = {kind: count for kind, count in requests[0].items() if kind not in ("multi_get", "multi_set", "check")}
        assert sum(serial.values()) <= 5, f"rank 0 of {size}: {requests[0]}"
    assert found[16][1] < 3 * found[8][1], "bytes grow as the ranks, not as their square"


@pytest.mark.parametrize("ranks", [2, 64, 1024, 4096])
def test_ranks_that_wait_look_so_often_in_all_and_see_the_answer_soon(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, looks, asked = [0.0], list[float](), list[float]()

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr("commopt.groups.agreement.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr("commopt.groups.agreement.time.sleep", sleep)
    poll(lambda: looks.append(now_s[0]), 60.0, lambda: asked.append(now_s[0]), ranks)
    shortest_s = min(after - before for before, after in pairwise(looks))
    assert ranks / shortest_s <= 20000 or ranks < 20
    late = [look for look in looks if look > 30]
    for requests in (late, [each for each in asked if each > 30]):
        assert len(requests) * ranks / 30 <= max(5001, 11 * ranks)
    for before, after in pairwise(looks):
        assert after - before <= max(0.001, ranks / 20000, before / 4) * 1.001


@pytest.mark.parametrize("interval_s", [0.05, 5.0])
@pytest.mark.parametrize("ranks", [2, 64, 1024, 4096, 100_000])
def test_beats_ask_a_bounded_number_of_requests_a_second(ranks: int, interval_s: float) -> None:
    paced_s = paced_interval_s(interval_s, ranks)
    assert 3 * ranks / paced_s <= 5000.001
    assert paced_s == interval_s or 3 * ranks / interval_s > 5000, "no rarer than it has to be"
    assert paced_interval_s(0.0, ranks) == 0.0


def beat_of_two(rank: int, world_size: int) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "_BEAT_REQUESTS_PER_S", 0.5)
        return join(timeout_s=20).heartbeat_s


def test_the_interval_of_a_world_is_the_paced_one() -> None:
    assert run(beat_of_two, 2, env={"COMMOPT_HEARTBEAT": None}) == [12.0, 12.0]


def test_answers_that_are_mostly_alike_are_few_bytes() -> None:
    answers = [{"purpose": "setup", "problem": None, **facts_of(rank)} for rank in range(1024)]
    verdict = {"missing": [], "answers": answers}
    packed = agreement._packed(verdict)
    assert len(packed) < len(json.dumps(verdict)) / 40
    assert agreement._facts_in("verdict/1", packed) == verdict


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "not base 85: \u00e9",
        base64.b85encode(b"not packed").decode(),
        base64.b85encode(zlib.compress(b"{" * 1000)[:-8]).decode(),
        base64.b85encode(zlib.compress(b"not JSON")).decode(),
    ],
)
def test_a_verdict_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(MismatchError, match="is not what commopt writes"):
        agreement._facts_in("verdict/1", text)


def test_a_verdict_longer_than_any_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_MOST_VERDICT_NBYTES", 1000)
    with pytest.raises(MismatchError, match="is not what commopt writes"):
        agreement._facts_in("verdict/1", agreement._packed({"missing": [], "answers": [{"a": "b" * 2000}]}))


def test_without_rank_0_one_of_the_others_looks_who_is_missing() -> None:
    """Were it each of them, the store would be asked as the square of their number, when many time out at once."""
    size, host = 12, Host()
    mine = limited(cast(Any, host), "keys", 30)

    def invite() -> None:
        """Be rank 0 until all but the last one have their invitation."""
        tickets = [poll(partial(mine.read, f"seat/{rank}"), float("inf")) for rank in range(1, size - 1)]
        for ticket in tickets:
            mine.set(f"invitation/{json.loads(ticket)['ticket']}", json.dumps({"meeting": "a meeting"}))

    def attend(store: Any, rank: int) -> None:
        exchange_facts(store, range(size), rank, "an agreement", {}, limit(3.0))

    inviting = threading.Thread(target=invite)
    inviting.start()
    counts, outcomes = meet(host, size, attend, range(1, size - 1))
    inviting.join(30)
    assert len(outcomes) == size - 2
    for message in outcomes.values():
        assert message.startswith(f"MismatchError: rank {size - 1} did not reach an agreement"), outcomes
    reads = [each.take()["requests"] for each in counts.values()]
    assert sum(each.get("commopt check", 0) + each.get("commopt get", 0) for each in reads) < 7 * size


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_many_values_are_read_and_written_at_once_by_any_store(kind: str, tmp_path: Path) -> None:
    inner: Any = dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"), 1)
    store = limited(inner, "keys", 30, secret=b"a secret")
    values = {f"key {number}": f"value {number}" for number in range(5)}
    store.set_all(values)
    assert store.read_all([*values]) == [*values.values()]
    assert store.read_all(["key 1", "none", "key 0"]) == ["value 1", None, "value 0"]
    assert store.get_all([]) == []
    assert store.read_all([]) == []
    inner.set("keys/key 3", "of another program")
    with pytest.raises(TransportError, match="key 3"):
        store.get_all([*values])


def test_a_store_whose_process_can_open_no_more_files_says_so() -> None:
    class Full:
        def clone(self) -> Any:
            raise RuntimeError("Connection reset by peer")

    full: Any = Full()
    with pytest.raises(TransportError, match="ulimit -n"):
        limited(full, "keys", 5)


def test_a_law_is_of_the_first_degree_unless_the_second_is_needed() -> None:
    assert Law({n: 9 - 4 / n for n in (8, 16, 32, 64)})(4096) == pytest.approx(9 * 4096 - 4)
    assert Law({n: 2 * n + 1 for n in (8, 16, 32, 64)})(4096) == pytest.approx(2 * 4096**2 + 4096)
    assert str(Law({n: 2 * n + 1 for n in (8, 16, 32, 64)})) == "2 n\u00b2 + 1 n"
