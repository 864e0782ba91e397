# SPDX-License-Identifier: Apache-2.0
"""The parameter server among strangers and lying workers: model, checkpoint and the other workers are untouched."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commopt
from commopt import DGC, CommoptError, ConfigurationError, OneBit, ParameterServer, TransportError
from commopt.compress import Compressor
from commopt.server import Scheduler, Server, Worker
from commopt.server import listener as listener_module
from commopt.server.channel import DATA, END, GREETING, HEARTBEAT, TEXT, SecureChannel, connect
from commopt.server.listener import SecureListener
from commopt.server.scheduler import find_server
from commopt.server.secret import SecretHandshake, key_of
from commopt.version import __version__
from tests.speed import limit

HTTP = b"GET / HTTP/1.0\r\n\r\n"
SECRET = "known to the good ones"
WIDTH = 24
NUMEL = WIDTH * WIDTH + WIDTH
BY_HAND = 10**6  # a period that never ends by itself


# ------------------------------------------------------------------------------------- the good ones


class Good:
    """Scheduler, server and one worker, that makes rounds; what they hold is compared before and after."""

    def __init__(self, timeout: float = limit(10.0), **settings: Any) -> None:
        self.scheduler = Scheduler(timeout=timeout)
        self.server = Server(self.scheduler.address)
        self.settings = ParameterServer(self.scheduler.address, **{"period": BY_HAND, "quorum": 1, **settings})
        torch.manual_seed(0)
        self.model = nn.Linear(WIDTH, WIDTH)
        self.worker: Worker = commopt.attach(self.model, self.settings)

    def round(self) -> None:
        """Learn something, and exchange."""
        before = self.server.round
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1e-3)
        self.worker.weight(1)
        self.worker.push()
        self.worker.pull()
        assert self.server.round == before + 1

    def flat(self) -> torch.Tensor:
        return torch.cat([each.detach().reshape(-1) for each in self.model.parameters()])

    def state(self) -> dict[str, Any]:
        return self.server.state_dict()

    def close(self) -> None:
        with suppress(CommoptError):
            self.worker.close()
        self.server.close()
        self.scheduler.close()


@contextmanager
def good(**options: Any) -> Iterator[Good]:
    ones = Good(**options)
    try:
        yield ones
    finally:
        ones.close()


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    both = [(one[where], other[where]) for where in ("parameters", "momentum")]
    return one["round"] == other["round"] and all(torch.equal(a[name], b[name]) for a, b in both for name in a)


def own_threads() -> int:
    return sum(each.name.startswith("commopt") for each in threading.enumerate())


def until(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit(limit_s)
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ------------------------------------------------------------------------------------- who lies


class Liar:
    """A worker that has the secret, and says what it wants to."""

    def __init__(self, ones: Good, joins: bool = True, **changed: Any) -> None:
        self.link, _ = find_server(ones.scheduler.address, os.environ.get("COMMOPT_SECRET", ""))
        self.facts = {
            "kind": "join",
            "version": __version__,
            "settings": ones.settings.as_text(),
            "buckets": [[["weight", [WIDTH, WIDTH], "torch.float32"], ["bias", [WIDTH], "torch.float32"]]],
            **changed,
        }
        self.round = self.number = 0
        if joins:
            self.link.send_json(**self.facts)
            self.number = self.link.receive_json()["number"]

    def pull(self, ones: Good | None = None) -> None:
        """Get the parameters; who has just joined gets them at the end of a round, which `ones` make."""
        if ones is None:
            self.link.send_json(kind="pull", whole=True)
        else:
            self.ask(ones)
            ones.round()
        self.round = self.link.receive_json()["round"]
        self.link.receive_into(torch.empty(NUMEL))

    def ask(self, ones: Good) -> None:
        """Ask for the parameters, and wait until the server knows.

        What is asked for after a round has closed is due at the end of the next one, which perhaps nobody makes.
        """
        self.link.send_json(kind="pull", whole=True)
        until(lambda: (peer := ones.server._peers.get(self.number)) is None or peer.pull_requested)

    def push(self, payload: torch.Tensor, base: Any = None, weight: Any = 1.0) -> None:
        self.link.send_json(kind="push", base=self.round if base is None else base, weight=weight)
        self.link.send_tensor(payload)

    def begin(self) -> SecureChannel:
        """Announce a delta."""
        self.link.send_json(kind="push", base=self.round, weight=1.0)
        return self.link

    def frame(self, kind: int, body: bytes) -> bool:
        with self.link._sending:
            self.link._send(kind, body)
        return True

    def raw(self, body: bytes) -> None:
        self.link._out.sendall(body)

    def ended(self) -> str:
        """Return how the server ends it."""
        try:
            while True:
                self.link.receive()
        except TransportError as error:
            return str(error)
        finally:
            self.link.close()


def values(fill: float = 0.0) -> torch.Tensor:
    return torch.full((NUMEL,), fill)


LIES: dict[str, tuple[Callable[[Liar], Any], str]] = {
    "NaN": (lambda liar: liar.push(values(float("nan"))), "delta of parameter 'weight' is not finite"),
    "infinite": (lambda liar: liar.push(values(float("inf"))), "is not finite"),
    "huge": (lambda liar: liar.push(values(1e30)), "more than 100 times that of the parameters"),
    "weight NaN": (lambda liar: liar.push(values(), weight=float("nan")), "weighs nan"),
    "weight infinite": (lambda liar: liar.push(values(), weight=float("inf")), "weighs inf"),
    "weight 0": (lambda liar: liar.push(values(), weight=0), "weighs 0"),
    "weight below 0": (lambda liar: liar.push(values(), weight=-1), "weighs -1"),
    "weight too large": (lambda liar: liar.push(values(), weight=1e300), "weighs 1e[+]300"),
    "weight text": (lambda liar: liar.push(values(), weight="1"), "weighs 1, and must weigh more than 0"),
    "weight true": (lambda liar: liar.push(values(), weight=True), "weighs True"),
    "base to come": (lambda liar: liar.push(values(), base=10**6), "said to start from round 1000000; it pulled round"),
    "base below 0": (lambda liar: liar.push(values(), base=-1), "said to start from round -1"),
    "base before": (lambda liar: liar.push(values(), base=liar.round - 1), "it pulled round"),
    "base true": (lambda liar: liar.push(values(), base=True), "is True, and must be a whole number"),
    "base text": (lambda liar: liar.push(values(), base="1"), "must be a whole number"),
    "no JSON": (lambda liar: liar.frame(TEXT, b"{no json"), "a request is not JSON"),
    "no UTF-8": (lambda liar: liar.frame(TEXT, b"\xff\xfe"), "a request is not JSON"),
    "deep JSON": (lambda liar: liar.frame(TEXT, b"[" * 4000), "a request is"),
    "a list": (lambda liar: liar.frame(TEXT, b"[1]"), "a request is a JSON list"),
    "another kind": (lambda liar: liar.link.send_json(kind="knock"), "asked for 'knock'"),
    "a kind that is none": (lambda liar: liar.link.send_json(kind={"a": [1]}), "neither push nor pull"),
    "no kind": (lambda liar: liar.link.send_json(), "neither push nor pull"),
    "data unasked": (lambda liar: liar.frame(DATA, bytes(8)), "data arrived where a request was expected"),
    "text for data": (lambda liar: liar.begin().send_json(), "something else"),
    "data that is empty": (lambda liar: liar.begin() and liar.frame(DATA, b""), "something else arrived"),
    "data too long": (lambda liar: liar.begin().send_tensor(torch.zeros(NUMEL + 1)), "is not accepted here"),
    "a long request": (lambda liar: liar.frame(TEXT, b" " * 5000), "5000 bytes is not accepted here"),
    "a huge frame": (lambda liar: liar.raw(struct.pack("!BI", TEXT, 2**32 - 1)), "is not accepted here"),
    "an unknown frame": (lambda liar: liar.frame(77, b""), "a frame of kind 77"),
    "not signed": (
        lambda liar: liar.raw(struct.pack("!BI", HEARTBEAT, 0) + bytes(16)),
        "does not have the peer's signature",
    ),
    "joined twice": (lambda liar: liar.link.send_json(**liar.facts), "neither push nor pull"),
}


@pytest.fixture(scope="module")
def ones() -> Iterator[Good]:
    with good() as found:
        yield found


@pytest.mark.parametrize("lie", LIES)
def test_who_lies_is_dropped_by_name(ones: Good, lie: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "commopt")
    tell, why = LIES[lie]
    liar = Liar(ones)
    liar.pull(ones)
    before = ones.state()
    with suppress(TransportError, OSError):  # as the server may be faster
        tell(liar)
    assert re.search(why, liar.ended())
    until(lambda: liar.number not in ones.server.workers)
    assert re.search(f"worker {liar.number} is gone: .*{why}", caplog.text)
    assert same(before, ones.state())
    ones.round()


def test_two_deltas_or_two_pulls_at_a_time_are_refused() -> None:
    with good(quorum=None) as ones:  # so that the round stays open
        first, second = Liar(ones), Liar(ones)
        with ThreadPoolExecutor() as pool:
            both = [pool.submit(each.pull) for each in (first, second)]
            ones.round()
            for each in both:
                each.result()
        first.push(values(0.01))
        first.push(values(0.01))
        assert "sent two deltas without a pull between them" in first.ended()
        second.push(values(0.01))
        second.link.send_json(kind="pull")
        second.link.send_json(kind="pull")
        assert "asked for the parameters twice" in second.ended()
        ones.round()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("compressor", [DGC(density=0.05), OneBit()], ids=str)
def test_random_bytes_are_no_delta_that_loses_the_model(compressor: Compressor, seed: int) -> None:
    with good(compressor=compressor) as ones:
        liar = Liar(ones)
        liar.pull(ones)
        nbytes = ones.worker._wires[0].rows(liar.round).nbytes
        generator = torch.Generator().manual_seed(seed)
        with suppress(TransportError):
            liar.push(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator))
            liar.link.send_json(kind="pull", whole=True)
        liar.ended() if seed == 0 else liar.link.close()
        until(lambda: liar.number not in ones.server.workers)
        ones.round()
        assert all(bool(each.isfinite().all()) for each in ones.state()["parameters"].values())
        assert not ones.server.failure


def bad_facts() -> Iterator[dict[str, Any]]:
    good_settings = ParameterServer().as_text()
    for name in ("settings", "buckets", "version"):
        values: tuple[Any, ...] = (None, 1, "x", [], {}, [[]], [1], [[["weight", [1], "torch.float32"]] * 2])
        yield from ({name: value} for value in values)
    odd = ("exit(3)", "[" * 1500, "9" * 1900, "OneBit(block=0)", "OneBit(**{'a': 1})", "None()", "", "x" * 3000)
    for value in (*odd, "lambda: 0"):
        yield {"settings": {**good_settings, "compressor": value}}
    yield {"settings": {**good_settings, "period": "10**10**10"}}
    for shape in ([-1], [True], [1.5], ["1"], [2**60], [2**30, 2**30], [1] * 100, None, [WIDTH + 1, WIDTH]):
        yield {"buckets": [[["weight", shape, "torch.float32"]]]}
    float32 = "torch.float32"
    for entry in (["weight", [1]], ["weight", [1], "torch.float64"], [1, [1], float32], ["", [1], float32], 5):
        yield {"buckets": [[entry]]}
    yield {"buckets": [[["x" * 5000, [1], "torch.float32"]]]}


def test_who_joins_with_nonsense_is_refused(ones: Good) -> None:
    for changed in bad_facts():
        liar = Liar(ones, joins=False, **changed)
        liar.link.send_json(**liar.facts)
        assert liar.ended(), changed
    ones.round()
    assert not ones.server.failure


@contextmanager
def without_a_model(timeout: float) -> Iterator[Any]:
    """Have scheduler and server, and nobody that has joined."""
    ones: Any = Good.__new__(Good)
    ones.scheduler = Scheduler(timeout=timeout)
    ones.server = Server(ones.scheduler.address)
    ones.settings = ParameterServer(ones.scheduler.address, period=BY_HAND, quorum=1)
    try:
        yield ones
    finally:
        ones.server.close()
        ones.scheduler.close()


def test_nonsense_before_there_is_a_model() -> None:
    with without_a_model(limit(10.0)) as ones:
        for changed in bad_facts():
            liar = Liar(ones, joins=False, **changed)
            liar.link.send_json(**liar.facts)
            with suppress(TransportError):
                liar.link.receive_json()  # to send a model of its own, if an odd one; it does not
            liar.link.close()
        liar = Liar(ones)
        liar.link.send_tensor(values(float("nan")))
        assert "its parameters are not finite" in liar.ended()
        model = nn.Linear(3, 3)
        worker = commopt.attach(model, ones.settings)
        assert torch.equal(ones.state()["parameters"]["weight"], model.weight)
        assert ones.server.workers == [worker.number]


# ------------------------------------------------------------------------------------- who stops in the middle


def until_message(ones: Good, number: int) -> Liar:
    """Be a worker up to a message of the protocol, and end without a word."""
    liar = Liar(ones, joins=False)

    def messages() -> Iterator[None]:
        yield
        liar.link.send_json(**liar.facts)
        yield
        liar.number = liar.link.receive_json()["number"]
        yield
        liar.ask(ones)
        yield
        ones.round()
        liar.round = liar.link.receive_json()["round"]
        yield
        liar.link.receive()
        liar.link.send_json(kind="push", base=liar.round, weight=1e-9)
        yield
        liar.link.send_tensor(values()[: NUMEL // 2])
        yield
        liar.link.send_tensor(values(0.5)[NUMEL // 2 :])
        yield
        liar.link.send_json(kind="pull", whole=False)
        yield
        liar.raw(struct.pack("!BI", TEXT, 100))
        yield

    for place, _ in enumerate(messages()):
        if place == number:
            break
    return liar


@pytest.mark.parametrize("number", range(10))
def test_a_worker_that_ends_at_any_message_holds_up_nobody(ones: Good, number: int) -> None:
    liar = until_message(ones, number)
    liar.link.close()
    ones.round()
    until(lambda: len(ones.server.workers) == 1)
    ones.round()
    assert not ones.server.failure
    assert all(bool(each.isfinite().all()) for each in ones.state()["parameters"].values())


def test_workers_that_stand_still_do_not_keep_others_out() -> None:
    """Before there is a model they are asked for theirs, and send nothing; some say nothing at all."""
    with without_a_model(8.0) as ones:
        still = [Liar(ones, joins=False) for _ in range(6)]
        for each in still[:3]:
            each.link.start_heartbeat()
            each.link.send_json(**each.facts)
        until(lambda: ones.server._upload is not None)
        model = nn.Linear(WIDTH, WIDTH)
        begin = time.monotonic()
        worker = commopt.attach(model, ones.settings)
        assert time.monotonic() - begin < 6  # one of them would be waited for longer
        for each in still[:3]:
            with suppress(TransportError):
                each.link.send_tensor(values(7.0))  # too late
        until(lambda: len(ones.server.stats()["workers"]) > 1)
        for each in still:
            each.link.close()
        assert torch.equal(ones.state()["parameters"]["weight"], model.weight)
        assert ones.server.workers == [worker.number]


# ------------------------------------------------------------------------------------- while the server is busy


def received(ones: Good, liar: Liar) -> int:
    """Return the number of frames that the server has received from a worker."""
    peer = ones.server._peers.get(liar.number)
    return 0 if peer is None else peer.channel._received


def test_while_a_round_closes_workers_hear_heartbeats_and_are_received() -> None:
    """However long it takes: one that trains, one that waits for the parameters, and one that comes only now."""
    with good(timeout=limit(1.0)) as ones:
        trains = Liar(ones)
        trains.link.start_heartbeat()
        trains.pull(ones)
        waits = Liar(ones)  # for the next round
        waits.link.start_heartbeat()
        waits.ask(ones)
        channels = ones.server._listener._channels
        with ones.server._changed:  # as who closes a round
            sent = {each: each._sent for each in list(channels)}
            comes = Liar(ones, joins=False)
            comes.link.send_json(**comes.facts)
            until(lambda: len(channels) == 4 and all(each._sent > sent.get(each, 0) + 1 for each in list(channels)))
            assert all(each._received for each in channels)
            before = received(ones, trains)
            trains.push(values())
            until(lambda: received(ones, trains) >= before + 2)
        assert "number" in comes.link.receive_json()
        for each in (trains, waits, comes):
            each.link.close()


def test_a_worker_that_sends_its_parameters_for_long_hears_heartbeats_and_is_received() -> None:
    """Also when another one has been faster, and its rounds close."""
    with without_a_model(limit(1.0)) as ones:
        slow = Liar(ones)
        slow.link.start_heartbeat()
        assert slow.link.receive()[0] == HEARTBEAT
        until(lambda: ones.server._upload is None or ones.server._upload.number == slow.number)
        worker = commopt.attach(nn.Linear(WIDTH, WIDTH), ones.settings)
        with ones.server._changed:
            before = received(ones, slow)
            for half in values().split(NUMEL // 2):
                slow.link.send_tensor(half)
            until(lambda: received(ones, slow) >= before + 2)
        slow.link.close()
        worker.close()


def test_nothing_follows_a_part_of_a_frame() -> None:
    """Who sends next, a heartbeat or a tensor, gets the error of the one before."""
    sent: list[bytes] = []

    def breaks(body: bytes) -> None:
        sent.append(body)
        raise TimeoutError

    with good() as ones:
        liar = Liar(ones)
        liar.link._out = Tap(breaks)  # type: ignore[assignment]
        for send in (liar.link.send_heartbeat, liar.link.send_json):
            with pytest.raises(TransportError, match="accepted no data within the time limit"):
                send()
        assert len(sent) == 1
        liar.link.close()


class Reset(SecureChannel):
    """A connection that is reset before the first answer."""

    def __init__(self) -> None:
        """Without a socket."""

    def send_json(self, **_: Any) -> None:
        raise TransportError("reset")

    def end(self, why: str, kind: str = "") -> None:
        """Tell nobody."""


def test_a_registration_that_is_reset_at_once_keeps_nobody_out() -> None:
    scheduler = Scheduler()
    scheduler._handle_server(Reset(), {"host": "", "port": 1}, "127.0.0.1")
    assert scheduler._server is None
    Server(scheduler.address).close()
    scheduler.close()


def test_the_list_is_empty_before_another_server_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, seen = Scheduler(), list[bool]()
    remove = scheduler._remove

    def look(number: int, why: str) -> None:
        seen.append(scheduler._server is not None)
        remove(number, why)

    monkeypatch.setattr(scheduler, "_remove", look)
    Server(scheduler.address).close()
    until(lambda: scheduler._server is None)
    assert seen == [True]
    scheduler.close()


# ------------------------------------------------------------------------------------- strangers


def test_other_machines_want_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMMOPT_SECRET", raising=False)
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ConfigurationError, match=r"listening on .* there is no secret; set COMMOPT_SECRET, or"):
            Scheduler(host=host)
    scheduler = Scheduler()
    with pytest.raises(ConfigurationError, match="there is no secret"):
        Server(scheduler.address, host="0.0.0.0")
    scheduler.close()
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.1:0: "):
        Scheduler(host="192.0.2.1", secret=SECRET)


def test_by_the_secret_they_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMOPT_SECRET", SECRET)
    scheduler = Scheduler(host="0.0.0.0", timeout=5.0)
    server = Server(scheduler.address, host="0.0.0.0")
    settings = ParameterServer(scheduler.address, period=BY_HAND)
    model = nn.Linear(3, 3)
    worker = commopt.attach(model, settings)
    for other in ("", "another"):
        monkeypatch.setenv("COMMOPT_SECRET", other)
        for join in (lambda: commopt.attach(nn.Linear(3, 3), settings), lambda: Server(scheduler.address)):
            with pytest.raises(ConfigurationError, match="does not have the secret of this process; set the same"):
                join()
    assert server.workers == [worker.number]
    worker.close()
    server.close()
    scheduler.close()


class Tap:
    """Keeps what would be sent."""

    def __init__(self, sendall: Callable[[bytes], None]) -> None:
        self.sendall = sendall

    def close(self) -> None:
        """Nothing to close."""


def test_frames_are_signed_and_counted() -> None:
    """Somebody between the two repeats, changes, drops and adds frames."""
    got: list[bytes] = []
    over = threading.Event()

    def serve(link: SecureChannel, _: str) -> None:
        try:
            while True:
                got.append(bytes(link.receive()[1]))
        finally:
            over.set()

    frames = [struct.pack("!BI", TEXT, 2) + b"{}"]
    listener = SecureListener("127.0.0.1", 0, SECRET, 5.0, serve, print)
    listener.start()
    for tamper in ("repeat", "change", "drop", "add", "reflect"):
        over.clear()
        got.clear()
        link = connect("127.0.0.1", listener.port, SECRET, 5.0, 5.0)
        sent: list[bytes] = []
        link._out = Tap(sent.append)  # type: ignore[assignment]
        link.send_json(a=1)
        link.send_json(a=2)
        changed = bytearray(sent[1])
        changed[8] ^= 1
        altered = {
            "repeat": [sent[0], sent[0]],
            "change": [sent[0], bytes(changed)],
            "drop": [sent[1]],
            "add": [frames[0] + bytes(16)],
            "reflect": [sent[0], sent[1][:-1] + bytes([sent[1][-1] ^ 1])],
        }[tamper]
        for each in altered:
            link._in.sendall(each)
        assert over.wait(limit(10))
        assert len(got) <= 1, tamper
        assert b'{"a": 2}' not in got, tamper
        link.close()
    listener.close()


def stranger(port: int, body: bytes) -> bytes:
    """Connect, say something without the secret, and return what was heard before the end."""
    heard = b""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=limit(10)) as connection:
        heard += connection.recv(48)
        connection.sendall(body)
        connection.shutdown(socket.SHUT_WR)
        while more := connection.recv(1000):
            heard += more
    return heard


def test_a_stranger_hears_a_greeting_and_nothing_else(ones: Good) -> None:
    before = ones.state()
    handshake = SecretHandshake(key_of("a guess"), bytes(32), bytes(32))
    for port in (ones.scheduler.port, ones.server.port):
        guess = bytes(32) + handshake.proof("client")
        for body in (b"", HTTP, bytes(64), os.urandom(64), os.urandom(5000), guess):
            heard = stranger(port, body)
            assert heard[:16] == GREETING
            assert len(heard) <= 48 + 33
            assert not any(heard[48:])
    assert same(before, ones.state())


def test_half_open_connections_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MOST_PENDING", 20)
    with good() as ones, contextlib.ExitStack() as stack:
        for port in (ones.scheduler.port, ones.server.port):
            for place in range(100):
                held = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=limit(10)))
                if place % 2:
                    with suppress(OSError):
                        held.sendall(b"\x00\x01")
        assert len(ones.scheduler._listener._pending) <= 20
        assert len(ones.server._listener._pending) <= 20
        begin = time.monotonic()
        ones.round()
        liar = Liar(ones)  # which joins as others do
        liar.link.close()
        assert time.monotonic() - begin < limit(10)


def test_a_stranger_that_is_slow_is_turned_away() -> None:
    listener = SecureListener("127.0.0.1", 0, SECRET, 5.0, lambda *_: None, print, limit_s=0.3)
    listener.start()
    with socket.create_connection(("127.0.0.1", listener.port), timeout=limit(10)) as held:
        held.recv(48)
        held.sendall(b"x")
        assert held.recv(1) == b""
    assert not listener._pending
    listener.close()


# ------------------------------------------------------------------------------------- at random


def outside(ones: Good, chance: random.Random) -> None:
    """Say something without the secret."""
    port = chance.choice((ones.scheduler.port, ones.server.port))
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=limit(10)) as connection:
        if chance.random() < 0.8:
            connection.sendall(chance.randbytes(chance.choice((0, 1, 31, 63, 64, 65, 200, 5000))))


def inside(ones: Good, chance: random.Random) -> None:
    """Be a worker that says something else than it should at some place; one in five takes part in a round before."""
    liar = Liar(ones, joins=False)
    odd: list[Any] = [None, True, -1, 0, 1.5, 10**30, "", "x", [], {}, [[]], float("nan")]
    with suppress(TransportError, OSError, KeyError, TypeError):
        if chance.random() < 0.3:
            liar.facts[chance.choice(list(liar.facts))] = chance.choice(odd)
        if chance.random() < 0.9:
            liar.link.send_json(**liar.facts)
            liar.number = liar.link.receive_json()["number"]
        if chance.random() < 0.2:
            liar.pull(ones)
        for _ in range(chance.randrange(1, 4)):
            what = chance.randrange(6)
            if what == 0:
                liar.raw(chance.randbytes(chance.randrange(1, 60)))
            elif what == 1:
                liar.frame(chance.choice((HEARTBEAT, TEXT, DATA, END, 9)), chance.randbytes(chance.randrange(200)))
            elif what == 2:
                words = {"kind": chance.choice(("push", "pull", "join", *map(str, odd))), "base": chance.choice(odd)}
                liar.link.send_json(**words, weight=chance.choice(odd))
            elif what == 3:
                liar.frame(TEXT, json.dumps(chance.choice(odd)).encode())
            elif what == 4:
                liar.link.send_json(kind="push", base=ones.server.round - chance.choice((0, 0, 1, 2)), weight=1.0)
                nbytes = chance.choice((4 * NUMEL, 4 * NUMEL, chance.randrange(1, 4 * NUMEL)))
                liar.link.send_tensor(torch.tensor(list(chance.randbytes(nbytes)), dtype=torch.uint8))
            else:
                liar.link.send_json(kind="pull", whole=chance.choice(odd))
    liar.link.close()


def fuzzed(count: int) -> None:
    chance = random.Random(0)
    with good() as ones:
        ones.round()
        threads, begin_kib = own_threads(), resident_kib()
        for place in range(count):
            (outside if place % 2 else inside)(ones, chance)
            # What the good one alone has made of it: its worker holds the same bits.
            assert torch.equal(theta_of(ones), ones.flat())
            if place % 100 == 99:
                ones.round()
        until(lambda: ones.server.workers == [ones.worker.number])
        until(lambda: own_threads() <= threads)
        assert resident_kib() - begin_kib < 100 * 1024
        assert not ones.server.failure
        assert not ones.scheduler.failure
        ones.round()


def theta_of(ones: Good) -> torch.Tensor:
    return torch.cat([each.reshape(-1) for each in ones.state()["parameters"].values()])


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


def test_nonsense_at_random() -> None:
    fuzzed(200)


@pytest.mark.slow
def test_much_nonsense_at_random() -> None:
    fuzzed(6000)
