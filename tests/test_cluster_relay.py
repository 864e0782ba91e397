# SPDX-License-Identifier: Apache-2.0
"""The relay of an emulated link: what it delays and loses, where it runs, and what is reported of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from commopt.cluster import ClusterUnavailableError, EmulatedLink, network
from commopt.cluster.relay import DelayLine, RelayCounters
from commopt.cluster.report import Result, path_lines


def frames(count: int) -> list[bytes]:
    return [number.to_bytes(4, "big") for number in range(count)]


def test_every_frame_leaves_once_in_order_and_never_before_it_is_due() -> None:
    line = DelayLine("0", limit=1000, delay_s=0.02)
    left: list[tuple[float, bytes]] = []
    for step, frame in enumerate(frames(200)):
        now_s = step * 0.001
        if step == 100:
            line.delay_s = 0.005  # those under way still come first
        line.enter(frame, now_s)
        while (found := line.leave(now_s)) is not None:
            left.append((now_s, found))
    assert line.waits_s(0.2) is not None
    left += [(1.0, rest) for _ in range(200) if (rest := line.leave(1.0)) is not None]
    assert [frame for _, frame in left] == frames(200)
    assert all(at >= step * 0.001 + (0.02 if step < 100 else 0.005) for step, (at, _) in enumerate(left))
    assert (line.sent, line.lost, line.overflowed, line.waits_s(2.0)) == (200, 0, 0, None)
    assert line.latest_s == pytest.approx(1 - 0.105 - 0.0, abs=0.1)


@pytest.mark.parametrize("loss", [0.001, 0.05, 0.5])
def test_a_relay_loses_the_share_that_was_asked_and_the_same_frames_again(loss: float) -> None:
    count = 20_000

    def survivors(seed: str) -> list[bytes]:
        line = DelayLine(seed, count, 0.0, loss)
        for frame in frames(count):
            line.enter(frame, 0.0)
        found = [kept for _ in range(count) if (kept := line.leave(0.0)) is not None]
        assert (line.sent, line.sent + line.lost) == (len(found), count)
        return found

    first = survivors("0")
    assert first == survivors("0")
    assert first != survivors("1")
    assert abs(count - len(first) - count * loss) < 4 * math.sqrt(count * loss * (1 - loss))


def test_more_frames_than_the_limit_are_lost_and_counted() -> None:
    line = DelayLine("0", limit=10, delay_s=1.0)
    for frame in frames(25):
        line.enter(frame, 0.0)
    assert line.overflowed == 15
    assert [line.leave(1.0) for _ in range(11)] == [*frames(10), None]


@pytest.mark.parametrize("netem", [True, False])
def test_no_relay_runs_where_the_kernel_has_netem(netem: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[str] = []
    relays: list[str] = []

    class FakeRelay:
        def __init__(self, name: str, enter: Sequence[str], seed: str, limit: int, ports: tuple[str, str]) -> None:
            relays.append(name)

        def set(self, delay_us: int, loss: float) -> None:
            relays.append(f"{delay_us} {loss}")

        def close(self) -> None:
            pass

    def fake(*words: str) -> str:
        commands.append(" ".join(words))
        if "netem" in words and not netem:
            raise ClusterUnavailableError("Specified qdisc kind is unknown")
        return ""

    for name, replacement in (("ip", fake), ("tc", fake), ("run", lambda words: fake(*words)), ("Relay", FakeRelay)):
        monkeypatch.setattr(network, name, replacement)
    monkeypatch.setattr(network, "_CONFIGURATIONS", tmp_path)
    monkeypatch.setattr(network, "check_tools", lambda: None)
    made = network.EmulatedNetwork([EmulatedLink.parse("9mbit"), EmulatedLink.parse("9mbit", "5ms", "1%")])
    made.build()
    impaired = f"-n {made.nodes[1]} qdisc add dev eth0 root handle 1: netem delay 5000us loss 1.0000000% limit 100000"
    assert (impaired in commands) == netem
    assert relays == ([] if netem else ["the relay of node 1", "5000 0.01"])
    whole = [each for each in commands if each.endswith("whole eth0")]
    assert [each.split()[3] for each in whole] == list(made.nodes)  # also of the node whose link is not impaired
    made.remove()


def test_the_report_says_who_made_delay_and_loss_and_how_well() -> None:
    relays = {0: RelayCounters(900, 100, 0, 0, 45_000, 2000), 2: RelayCounters(1000, 0, 3, 4, 50_000, 1000)}
    first, second, warning = path_lines(Result(0, "", "", 1.0, (), relays=relays))
    assert first == "delay and loss: by relays, for want of netem: 1900 packets carried, 100 lost (5.000%)"
    assert second == "relays: packets were 0.05 ms late on average, 2.0 ms at most"
    assert warning.startswith(
        "warning: the relay of node 2 did not keep up, and lost 7 more packets; pass a lower --rate"
    )
    assert list(path_lines(Result(0, "", "", 1.0, (), has_netem=True))) == ["delay and loss: by the kernel's netem"]
    assert list(path_lines(Result(0, "", "", 1.0, ()))) == []
    assert relays[0].since(RelayCounters(100, 10, 0, 0, 5000, 1000)) == RelayCounters(800, 90, 0, 0, 40_000, 2000)
