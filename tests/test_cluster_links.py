# SPDX-License-Identifier: Apache-2.0
"""Links of emulated nodes: delay, loss, a slow node, a cut and a flapping link, by netem or by a relay."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commopt.cluster import (
    Counters,
    EmulatedCluster,
    EmulatedLink,
    EmulatedSites,
    LinkTraffic,
    RelayError,
    cluster_options,
    relay_process,
)
from commopt.cluster.cli import add_arguments
from commopt.cluster.events import LinkEvent, LinkTimeline, read_cuts, read_links
from tests.speed import limit
from tests.test_cluster import _links, _traces

ROOT = Path(__file__).parents[1]
TEXTS = {"rate": "200mbit", "delay": "0ms", "loss": "0%"}

# ------------------------------------------------------------------------------ pure functions


def test_netem_delays_and_loses_where_the_kernel_has_it_and_rates_stay_the_kernels() -> None:
    link = EmulatedLink.parse("200mbit", "20ms", "0.01%")
    assert (link.delay_us, link.loss, link.is_impaired) == (20_000, 1e-4, True)
    netem, tbf = link.near_end()
    assert netem[3:] == ["netem", "delay", "20000us", "loss", "0.0100000%", "limit", "100000"]
    assert link.near_end(netem=False) == [["root", *tbf[2:]]]
    assert EmulatedLink.parse("none", loss="1%").near_end(netem=False) == []


def test_links_of_single_nodes_and_their_changes() -> None:
    options = ["1:rate=50mbit/10mbit", "1@2s+5s:loss=1%", "0@1.5s:delay=9ms,rate=none"]
    links, events = read_links(options, 3, TEXTS)
    usual = EmulatedLink.parse("200mbit")
    slow = EmulatedLink.parse("50mbit/10mbit")
    assert links == (usual, slow, usual)
    assert events == (
        LinkEvent(1, 2.0, 5.0, EmulatedLink.parse("50mbit/10mbit", loss="1%")),
        LinkEvent(0, 1.5, math.inf, EmulatedLink.parse("none", "9ms")),
    )
    assert read_cuts(["2@30s", "0@1s+500ms"], ["1@30s/2s+20s"], 3) == (
        LinkEvent(2, 30.0),
        LinkEvent(0, 1.0, 0.5),
        LinkEvent(1, 30.0, 20.0, None, 2.0),
    )


def test_an_event_lasts_as_long_as_was_said() -> None:
    cut, ever, flap = LinkEvent(0, 30, 5), LinkEvent(0, 30), LinkEvent(0, 30, 7, None, 2)
    at = (0, 29.9, 30, 31.9, 32, 33.9, 34, 34.9, 36, 36.9, 38, 1e6)
    assert [cut.is_on(each) for each in at] == [False, False, *[True] * 6, *[False] * 4]
    assert [ever.is_on(each) for each in at] == [False, False, *[True] * 10]
    assert [flap.is_on(each) for each in at] == [False, False, True, True, False, False, True, True, *[False] * 4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EmulatedLink.parse(loss="5"), "loss '5' must be a percentage from 0% to less than 100%; for example"),
        (lambda: EmulatedLink.parse(loss="100%"), "loss '100%' must be a percentage"),
        (lambda: EmulatedLink.parse(loss="-1%"), "loss '-1%' must be a percentage"),
        (lambda: read_links(["1"], 2, TEXTS), "--node '1' is not of the form 1:rate=50mbit"),
        (lambda: read_links(["1:speed=5"], 2, TEXTS), "'1:speed=5' sets 'speed'; it may set rate, delay, loss, as in"),
        (lambda: read_links(["1:"], 2, TEXTS), "is not of the form"),
        (lambda: read_links(["1:rate"], 2, TEXTS), "rate '' must be a number"),
        (lambda: read_links(["1@3s/1s:rate=1mbit"], 2, TEXTS), "is not of the form"),
        (lambda: read_links(["2:rate=1mbit"], 2, TEXTS), "names node 2 of 2; pass one from 0 to 1"),
        (lambda: read_cuts(["1"], [], 2), "--cut '1' is not of the form 1@30s or 1@30s[+]5s"),
        (lambda: read_cuts(["1@30s/2s"], [], 2), "--cut '1@30s/2s' is not of the form"),
        (lambda: read_cuts(["1@30"], [], 2), "--cut '1@30': time '30' must be a number and one of us, ms, s; for"),
        (lambda: read_cuts(["1@30s+5ms"], [], 2), "time 5ms is too short to be kept; pass 100ms or more"),
        (lambda: read_cuts([], ["1@30s"], 2), "--flap '1@30s' is not of the form 1@30s/2s"),
        (lambda: read_cuts([], ["1@30s/0s"], 2), "time 0s is too short"),
        (lambda: EmulatedCluster(cuts=["7@1s"]), "--cut '7@1s' names node 7 of 2"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_ranks_know_the_options_that_made_their_network(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = EmulatedSites((1, 1), "5mbit")
    cluster = EmulatedCluster(2, 1, "9mbit", "1ms", sites, "1%", ["1:rate=5mbit"], ["1@3s"], ["0@3s/1s"])
    monkeypatch.setenv("BENCH_CLUSTER_OPTIONS", cluster._environment(0)["BENCH_CLUSTER_OPTIONS"])
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    again = parser.parse_args(["--rate", "9mbit", *cluster_options(), "script.py"])
    assert (again.delay, again.loss, again.node_links) == ("1ms", "1%", ["1:rate=5mbit"])
    assert (again.cuts, again.flaps, again.sites, again.site_rate) == (["1@3s"], ["0@3s/1s"], [1, 1], "5mbit")
    monkeypatch.setenv("BENCH_CLUSTER_OPTIONS", EmulatedCluster()._environment(0)["BENCH_CLUSTER_OPTIONS"])
    assert cluster_options() == []


def test_the_share_of_what_was_sent_again_is_that_of_packets() -> None:
    whole = LinkTraffic(Counters(1000 * 1514, 1000), Counters(), 20)
    at_once = LinkTraffic(Counters(100 * (14480 + 66), 100), Counters(), 20)  # ten packets, counted as one
    assert whole.retransmitted_share == at_once.retransmitted_share == 0.02
    assert LinkTraffic(Counters(), Counters(), 3).retransmitted_share == 1.0


# ------------------------------------------------------------------------------- real clusters


@pytest.fixture(scope="module")
def missing() -> str | None:
    return EmulatedCluster.missing(delay="1ms", loss="1%")


@pytest.fixture(autouse=True)
def _skip_without_cluster(request: pytest.FixtureRequest, missing: str | None) -> None:
    if missing and request.node.get_closest_marker("cluster"):
        pytest.skip(missing)


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    links = _links()
    yield
    assert _traces(os.getpid()) == []
    assert _links() == links


ECHO = """
    import socket
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("", 5000))
    while True:
        server.sendto(*server.recvfrom(2000))
"""
PING = """
    import json, socket, sys, time
    peer, times, patience_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    asker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    asker.settimeout(patience_s)
    took = []
    for number in range(times):
        start = time.perf_counter()
        asker.sendto(b"%d" % number, (peer, 5000))
        try:
            while asker.recv(2000) != b"%d" % number:
                pass
            took.append(time.perf_counter() - start)
        except (TimeoutError, ConnectionRefusedError):
            time.sleep(0.05)
    print(json.dumps(took))
"""
SINK = """
    import hashlib, socket, time
    server = socket.create_server(("", 5000))
    print("listening", flush=True)
    while True:
        peer, found, start = server.accept()[0], hashlib.sha256(), time.monotonic()
        with peer:
            while part := peer.recv(1 << 20):
                found.update(part)
        print(found.hexdigest(), time.monotonic() - start, flush=True)
"""
STREAM = """
    import random, socket, sys
    data = random.Random(0).randbytes(int(sys.argv[2]))
    with socket.create_connection((sys.argv[1], 5000)) as peer:
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)
"""


def start(cluster: EmulatedCluster, node_rank: int, source: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", "-c", textwrap.dedent(source), *arguments]
    return cluster.start(node_rank, command, stdout=subprocess.PIPE)


def ping(cluster: EmulatedCluster, node_rank: int, times: int = 5, patience_s: float = 0.5) -> list[float]:
    """Return the round-trip times, in seconds, of the questions to node 0 that were answered."""
    asker = start(cluster, node_rank, PING, "10.77.0.1", str(times), str(patience_s))
    found: list[float] = json.loads(asker.communicate(timeout=limit(60))[0])
    return found


def listening(cluster: EmulatedCluster) -> subprocess.Popen[str]:
    start(cluster, 0, ECHO)
    while not ping(cluster, 1, 1):
        pass
    sink = start(cluster, 0, SINK)
    assert sink.stdout is not None
    assert sink.stdout.readline() == "listening\n"
    return sink


def stream(cluster: EmulatedCluster, node_rank: int, sink: subprocess.Popen[str], nbytes: int) -> tuple[str, float]:
    """Send bytes from a node to node 0; return the checksum of what arrived, and in how many seconds."""
    assert start(cluster, node_rank, STREAM, "10.77.0.1", str(nbytes)).wait(timeout=limit(120)) == 0
    assert sink.stdout is not None
    checksum, seconds = sink.stdout.readline().split()
    return checksum, float(seconds)


def sent(nbytes: int) -> str:
    return hashlib.sha256(random.Random(0).randbytes(nbytes)).hexdigest()


@pytest.mark.cluster
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("sites", [None, EmulatedSites((1, 1))], ids=["one bridge", "two sites"])
def test_a_round_trip_takes_the_delays_of_both_nodes(sites: EmulatedSites | None) -> None:
    cluster = EmulatedCluster(2, 1, delay="10ms", node_links=["1:delay=30ms"], sites=sites)
    with cluster:
        listening(cluster)
        usual = min(ping(cluster, 1))
        cluster.reshape(1, "none")
        near = min(ping(cluster, 1))
        cluster.reshape(1)
        again = min(ping(cluster, 1))
    assert 0.04 <= usual < 0.08
    assert 0.01 <= near < 0.03
    assert 0.04 <= again < 0.08


@pytest.mark.cluster
@pytest.mark.usefixtures("leaves_nothing")
def test_a_link_that_had_no_delay_gets_one_while_it_is_used() -> None:
    with EmulatedCluster(2, 1) as cluster:
        listening(cluster)
        assert min(ping(cluster, 1)) < 0.02
        cluster.reshape(1, "200mbit", "40ms")
        assert 0.04 <= min(ping(cluster, 1)) < 0.08


@pytest.mark.cluster
@pytest.mark.usefixtures("leaves_nothing")
def test_the_share_of_packets_lost_is_the_one_asked_and_a_stream_still_arrives_whole() -> None:
    count, loss, nbytes = 8000, 0.05, 1 << 20
    flood = "import socket, sys\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n" + (
        "for _ in range(int(sys.argv[1])): s.sendto(bytes(100), ('10.77.0.1', 6000))"
    )
    with EmulatedCluster(2, 1, rate="none", delay="1ms", node_links=["1:loss=5%"]) as cluster:
        sink = listening(cluster)
        before = cluster._network.traffic(0).link.rx_packets
        assert start(cluster, 1, flood, str(count)).wait(timeout=limit(60)) == 0
        ping(cluster, 1)
        arrived = cluster._network.traffic(0).link.rx_packets - before
        assert abs(count - arrived - count * loss) < 5 * math.sqrt(count * loss * (1 - loss))
        earlier = cluster._network.traffic(1)
        assert stream(cluster, 1, sink, nbytes)[0] == sent(nbytes)
        again = cluster._network.traffic(1) - earlier
        for counters in cluster._network.relays().values():
            assert counters.missed == counters.overflowed == 0
    assert again.retransmissions >= 10
    assert 0.01 < again.retransmitted_share < 0.3


@pytest.mark.cluster
@pytest.mark.usefixtures("leaves_nothing")
def test_a_slow_node_is_slower_than_the_others() -> None:
    nbytes = 1 << 19
    with EmulatedCluster(3, 1, delay="1ms", node_links=["1:rate=5mbit"]) as cluster:
        sink = listening(cluster)
        (_, slow), (_, fast) = (stream(cluster, node_rank, sink, nbytes) for node_rank in (1, 2))
    assert slow > 0.8 * 8 * nbytes / 5e6 > fast


@pytest.mark.cluster
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("delay", ["0ms", "1ms"])
def test_a_link_that_is_down_lets_nothing_through_and_comes_back(delay: str) -> None:
    cluster = EmulatedCluster(2, 1, delay=delay, cuts=["1@30s+5s"], flaps=["1@60s/2s+4s"])
    with cluster:
        listening(cluster)
        timeline = LinkTimeline(cluster._network, cluster._events)
        said: list[str] = []
        for at_s, answers in ((10, True), (31, False), (36, True), (61, False), (63, True), (70, True)):
            said += timeline.follow(at_s)
            assert bool(ping(cluster, 1, 3 if answers else 2)) == answers, f"at {at_s} s"
        timeline.undo()
    assert said == [f"link of node 1 {state}" for state in ("down", "up", "down", "up")]


@pytest.mark.cluster
@pytest.mark.usefixtures("leaves_nothing")
def test_a_relay_that_dies_ends_the_run_and_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '0': os.kill(int(os.environ['VICTIM']), 9)\ntime.sleep(600)"
    )
    with EmulatedCluster(2, 1, delay="1ms") as cluster:
        relay = cluster._network._relays.get(1)
        if relay is None:
            pytest.skip("this kernel has netem, so there is no relay")
        begun = time.monotonic()
        with pytest.raises(
            RelayError, match=r"the relay of node 1 ended with status -9: nothing gets through its link"
        ):
            cluster.run([str(script)], env={"VICTIM": str(relay._process.pid)}, timeout_s=limit(60))
        assert time.monotonic() - begun < limit(40)


@pytest.mark.cluster
@pytest.mark.usefixtures("leaves_nothing")
def test_a_relay_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmulatedCluster(1, 1) as cluster:
        monkeypatch.setattr(cluster._network, "has_netem", False)
        cluster.reshape(0, "none", "1ms")
        monkeypatch.setattr(relay_process, "_ANSWERS_WITHIN_S", 0.3)
        os.kill(cluster._network._relays[0]._process.pid, signal.SIGSTOP)
        with pytest.raises(RelayError, match=r"the relay of node 0 has not answered for 0.3 s"):
            cluster.reshape(0, "none", "2ms")


TRAIN = """
    import os, socket, sys, time
    rank, nbytes = int(os.environ["RANK"]), 1 << 21
    if rank == 0:
        peer, got = socket.create_server(("", 5000)).accept()[0], 0
        while part := peer.recv(1 << 20):
            got += len(part)
        print("got", got)
    else:
        time.sleep(0.5)
        with socket.create_connection(("node0", 5000)) as peer:
            for _ in range(16):
                peer.sendall(bytes(nbytes // 16))
                time.sleep(0.1)
"""


@pytest.mark.cluster
def test_the_command_cuts_a_link_and_reports_retransmissions(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    options = ["--ranks-per-node", "1", "--delay", "2ms", "--loss", "1%", "--cut", "1@1s+500ms"]
    command = [sys.executable, "-m", "commopt", "cluster", *options, str(script)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stdout, stderr = process.communicate(timeout=limit(120))
    assert (process.returncode, stdout) == (0, f"got {1 << 21}\n"), stderr
    assert re.search(r"^\[cluster\] [1-9]\d*\.\d s: link of node 1 down$", stderr, re.MULTILINE)
    assert re.search(r"^\[cluster\] \d+\.\d s: link of node 1 up$", stderr, re.MULTILINE)
    again = re.search(r"^ +1 .* (\d+) \((\d+\.\d+)%\)$", stderr, re.MULTILINE)
    assert again is not None
    assert int(again[1]) > 0
    assert 0 < float(again[2]) < 30
    assert re.search(r"^delay and loss: by (relays, .* lost|the kernel's netem)", stderr, re.MULTILINE)
    assert _traces(process.pid) == []
