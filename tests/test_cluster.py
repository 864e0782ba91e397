# SPDX-License-Identifier: Apache-2.0
"""The emulated cluster: its link really is slow, its counters are right, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commopt.__main__ import main
from commopt.cluster import (
    ClusterUnavailableError,
    Counters,
    EmulatedCluster,
    EmulatedLink,
    EmulatedSites,
    LinkTraffic,
    cli,
    commands,
    traffic,
)
from tests.speed import limit

ROOT = Path(__file__).parents[1]
RATE_BPS = 100_000_000

# ------------------------------------------------------------------------------ pure functions


@pytest.mark.parametrize(
    ("rate", "rate_bps", "burst_bytes"),
    [
        ("64 kbit", 64_000, 32 * 1024),
        ("200mbit", 200_000_000, 50_000),
        ("1.5Gbit", 1_500_000_000, 375_000),
        ("none", None, None),
    ],
)
def test_a_link_by_its_rate(rate: str, rate_bps: int | None, burst_bytes: int | None) -> None:
    link = EmulatedLink.parse(rate)
    assert link == EmulatedLink(rate_bps, rate_bps)
    shape = [] if rate_bps is None else [["root", "tbf", "rate", f"{rate_bps}bit", "burst", f"{burst_bytes}b"]]
    assert [arguments[:6] for arguments in link.near_end()] == [each[:6] for each in link.far_end()] == shape


def test_a_link_may_receive_faster_than_it_sends() -> None:
    link = EmulatedLink.parse("50mbit/10mbit", "5ms")
    assert (link.receive_bps, link.send_bps) == (50_000_000, 10_000_000)
    assert "10000000bit" in link.near_end()[1]
    assert "50000000bit" in link.far_end()[0]
    assert EmulatedLink.parse("none/1mbit").far_end() == []


def test_delay_is_one_way_and_kept_above_the_rate() -> None:
    link = EmulatedLink.parse("200mbit", delay="1.5ms")
    assert link.delay_us == 1500
    netem, tbf = link.near_end()
    assert netem[:4] == ["root", "handle", "1:", "netem"]
    assert tbf[:3] == ["parent", "1:1", "tbf"]
    assert [arguments[:2] for arguments in link.far_end()] == [["root", "tbf"]]
    assert EmulatedLink.parse("none").near_end() == EmulatedLink.parse("none").far_end() == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: EmulatedLink.parse("200mbps"),
            "rate '200mbps' must be a number and one of bit, kbit, mbit, gbit; for example",
        ),
        (lambda: EmulatedLink.parse("0mbit"), "rate '0mbit' must be above 0; write none"),
        (lambda: EmulatedLink.parse("5mbit/"), "rate '' must be a number"),
        (lambda: EmulatedLink.parse("-5mbit"), "rate '-5mbit' must be a number"),
        (lambda: EmulatedLink.parse(delay="5"), "delay '5' must be a number and one of us, ms, s; for example 5ms"),
        (lambda: EmulatedCluster(0), "nodes 0 must be between 1 and 254"),
        (lambda: EmulatedCluster(3, [2, 1]), r"ranks_per_node \(2, 1\) names 2 nodes, not 3"),
        (lambda: EmulatedCluster(2, [2, 0]), r"ranks_per_node \(2, 0\) must be at least 1"),
        (lambda: EmulatedSites.of(2, 5), "5 nodes cannot be divided into 2 equal sites"),
        (lambda: EmulatedSites.of([3, 0], 3), r"sites of \(3, 0\) nodes must be two or more, with a node or more each"),
        (lambda: EmulatedSites.of(1, 2, "50mbit"), "--site-rate and --tell-sites need --sites"),
        (lambda: EmulatedCluster(4, sites=EmulatedSites((3, 2))), r"sites of \(3, 2\) nodes hold 5 nodes, not 4"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_traffic_parses_what_the_kernel_says() -> None:
    # Wide counters touch the colon.
    text = textwrap.dedent("""\
        Inter-|   Receive                                               |  Transmit
         face |bytes    packets errs drop fifo frame compressed multicast|bytes   packets errs drop fifo
            lo:     700       7    0    0    0     0          0         0     700       7    0    0    0
          eth0:12345678901   30    1    2    3     4          5         6    9066      11    0    0    0
        """)
    tcp = "Tcp: RtoMin OutSegs RetransSegs InErrs\nTcp: 200 25 3 0\nUdp: InDatagrams\nUdp: 7\n"
    snapshot = LinkTraffic.parse(text, tcp)
    assert snapshot.link == Counters(tx_bytes=9066, tx_packets=11, rx_bytes=12345678901, rx_packets=30)
    assert snapshot.link.tx_payload_bytes == 9066 - 11 * 66
    assert (snapshot.retransmissions, snapshot.link_payload_bytes) == (3, 9066 - 11 * 66 - 3 * 1448)
    assert snapshot - snapshot == LinkTraffic(Counters(), Counters(), 0)


def test_traffic_outside_a_cluster_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"not on an emulated node.*commopt cluster"):
        traffic()


# ------------------------------------------------------------------ machines that cannot do it


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert main(["cluster", __file__]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "user id 65534 may not make network namespaces" in message
    assert "needs root (`sudo" in message


def test_without_iproute2_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = EmulatedCluster.missing()
    assert reason is not None
    assert reason.startswith("no ip and no tc on PATH")
    assert "apt-get install iproute2" in reason


# ------------------------------------------------------------------------------- real clusters


@pytest.fixture(scope="module")
def missing() -> str | None:
    return EmulatedCluster.missing()


@pytest.fixture(autouse=True)
def _skip_without_cluster(request: pytest.FixtureRequest, missing: str | None) -> None:
    if missing and request.node.get_closest_marker("cluster"):
        pytest.skip(missing)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(source: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


def _traces(pid: int) -> list[str]:
    """Namespaces, links, files and processes of the clusters that process `pid` made."""
    mark = f"commopt-{pid}-"
    found = [str(path) for folder in ("/run/netns", "/etc/netns") for path in Path(folder).glob(f"{mark}*")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def _links() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    links = _links()
    yield
    assert _traces(os.getpid()) == []
    assert _links() == links


def _start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "commopt", "cluster", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


MEASURE = """
    import json, os, time
    import torch, torch.distributed as dist
    from datetime import timedelta
    from commopt.cluster import link_rate, traffic

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    groups = {"intra": dist.new_group([0, 1]), "inter": dist.new_group([0, 2])}
    report = {name: os.environ[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "NCCL_HOSTID")}
    report |= {"rate": link_rate(), "launched": dist.is_torchelastic_launched()}
    x = torch.ones(NUMEL)
    for name, group in groups.items():
        member = dist.get_rank(group) >= 0
        if member:
            dist.all_reduce(x[:1].clone(), group=group)
        counts = []
        for _ in range(3):
            dist.barrier()
            before, start = traffic(), time.perf_counter()
            dist.barrier()
            y = x.clone()
            if member:
                dist.all_reduce(y, group=group)
            seconds = time.perf_counter() - start
            dist.barrier()
            moved = traffic() - before
            link, loopback = moved.link, moved.loopback
            counts.append([y.sum().item(), seconds, moved.link_payload_bytes, link.rx_bytes, loopback.tx_bytes])
        # A busy machine adds to seconds, and TCP's probes to bytes; nothing takes away.
        report[name] = [min(column) for column in zip(*counts)]
    reports = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    if rank == 0:
        print(json.dumps(reports))
    dist.destroy_process_group()
"""


SEND = """
import json, os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, numel = dist.get_rank(), NUMEL
took = {}
for peer in (1, 2):  # in the site of rank 0, and in the other one
    dist.barrier()
    start = time.perf_counter()
    if rank == 0:
        dist.send(torch.ones(numel), peer)
        dist.recv(torch.ones(1), peer)
    elif rank == peer:
        dist.recv(torch.ones(numel), 0)
        dist.send(torch.ones(1), 0)
    took[peer] = time.perf_counter() - start
dist.barrier()
if rank == 0:
    print(json.dumps([took, os.environ.get("COMMOPT_SITE"), os.environ["BENCH_CLUSTER_OPTIONS"]]))
dist.destroy_process_group()
"""


@pytest.mark.cluster
@pytest.mark.usefixtures("leaves_nothing")
def test_only_traffic_between_sites_crosses_their_link(script: Callable[[str], str]) -> None:
    numel = 1 << 18
    sites = EmulatedSites.of([2, 1], 3, "10mbit", told=True)
    with EmulatedCluster(nodes=3, ranks_per_node=1, rate="none", sites=sites) as cluster:
        result = cluster.run([script(SEND.replace("NUMEL", str(numel)))], timeout_s=limit(300))
    assert result.returncode == 0, result.stderr
    took, site, options = json.loads(result.stdout)
    assert (site, options) == ("site0", "--sites 2,1 --site-rate 10mbit --tell-sites")
    assert took["2"] > 0.8 * 8 * 4 * numel / 10e6 > took["1"]
    first, second = result.sites
    assert first.tx_payload_bytes == pytest.approx(4 * numel, rel=0.05)
    assert second.tx_payload_bytes < 0.05 * 4 * numel


@pytest.mark.alone
@pytest.mark.cluster
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(("mbit", "numel"), [(100, 1 << 20), (10, 1 << 18)])
def test_only_traffic_between_nodes_is_slow_and_every_byte_is_counted(
    mbit: int, numel: int, script: Callable[[str], str]
) -> None:
    with EmulatedCluster(nodes=2, ranks_per_node=[2, 1], rate=f"{mbit}mbit") as cluster:
        command = [script(MEASURE.replace("NUMEL", str(numel)))]
        result = cluster.run(command, timeout_s=limit(300), env={"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr
    reports = json.loads(result.stdout)

    asked = [(r["WORLD_SIZE"], r["LOCAL_WORLD_SIZE"], r["rate"], r["launched"]) for r in reports]
    assert asked == [("3", nranks, f"{mbit}mbit", True) for nranks in ("2", "2", "1")]
    assert reports[0]["NCCL_HOSTID"] == reports[1]["NCCL_HOSTID"] != reports[2]["NCCL_HOSTID"]

    # Two ranks: each sends half the buffer to be reduced and half of the result.
    nbytes = 4 * numel
    total, inter_seconds, payload, received, _ = reports[0]["inter"]
    assert total == 2 * numel
    assert payload == pytest.approx(nbytes, rel=0.02)
    assert received > nbytes
    assert reports[2]["inter"][2] == pytest.approx(nbytes, rel=0.02)
    wire_seconds = 8 * nbytes / (mbit * 1e6)
    assert 0.8 * wire_seconds < inter_seconds < 3 * wire_seconds

    total, intra_seconds, payload, received, loopback = reports[0]["intra"]
    assert total == 2 * numel
    assert payload + received < 0.01 * nbytes
    assert loopback > 2 * nbytes
    assert intra_seconds < 0.5 * inter_seconds

    first, second = result.nodes
    assert (first.ranks, second.ranks) == (2, 1)
    for sender, receiver in ((first, second), (second, first)):
        assert sender.traffic.link.tx_bytes > nbytes
        assert receiver.traffic.link.rx_bytes == pytest.approx(sender.traffic.link.tx_bytes, abs=1000)


@pytest.mark.cluster
@pytest.mark.usefixtures("leaves_nothing")
def test_connections_between_nodes_use_linux_own_congestion_control(script: Callable[[str], str]) -> None:
    command = script("""
        import os, socket, time
        if os.environ["RANK"] == "0":
            peer = socket.create_server(("", 5000)).accept()[0]
        else:
            peer = None
            while peer is None:
                try:
                    peer = socket.create_connection(("node0", 5000))
                except ConnectionRefusedError:  # rank 0 has not begun
                    time.sleep(0.1)
        name = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert name.rstrip(b"\\0") == b"cubic", name
    """)
    with EmulatedCluster(ranks_per_node=1) as cluster:
        result = cluster.run([command], timeout_s=limit(300))
    assert result.returncode == 0, result.stderr


@pytest.mark.cluster
def test_command_line_runs_a_module_and_reports() -> None:
    process = _start("--ranks-per-node", "1,1", "-m", "timeit", "-n", "1", "-r", "1", "pass")
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert stdout.startswith("1 loop, best of 1")
    assert len(stdout.splitlines()) == 1
    assert "[node 1] 1 loop, best of 1" in stderr
    title, *table = stderr[stderr.index("2 nodes at 200mbit") :].splitlines()
    rows = [line.split() for line in table if line.split()[:1] in (["0"], ["1"])]
    assert [(row[:2], int(row[3]) > 0) for row in rows] == [(["0", "1"], True), (["1", "1"], True)], title
    assert _traces(process.pid) == []


@pytest.mark.cluster
@pytest.mark.usefixtures("leaves_nothing")
def test_failing_rank_takes_the_others_down(script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_GRACE_S", 1.0)
    command = script("""
        import os, sys, time
        if "SUCCEED" in os.environ:
            if os.environ["RANK"] == "1":
                time.sleep(2)
                from torch.distributed import TCPStore  # which outlives the ranks of its node
                TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])).set("key", "value")
            sys.exit()
        if os.environ["RANK"] == "1":
            print("about to fail:", time.time(), file=sys.stderr)
            sys.exit(7)
        print("waiting", flush=True)
        time.sleep(600)
    """)
    with EmulatedCluster(nodes=2, ranks_per_node=1) as cluster:
        result = cluster.run([command], timeout_s=limit(300))
        assert (result.returncode, result.stdout) == (7, "waiting\n")
        failed = re.search(r"^\[node 1\] about to fail: (\S+)$", result.stderr, re.MULTILINE)
        assert failed is not None
        assert time.time() - float(failed[1]) < 30
        assert "rank 1 failed, the first of its node; exit code: 7" in result.stderr
        again = cluster.run([command], timeout_s=limit(300), env={"SUCCEED": "1"})
        assert (again.returncode, again.stdout) == (0, "")


@pytest.mark.cluster
@pytest.mark.usefixtures("leaves_nothing")
def test_timeout_and_then_an_exception_leave_nothing(
    script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_GRACE_S", 0.5)
    sleeper = script("import time; time.sleep(600)")

    def run_then_raise() -> None:
        with EmulatedCluster(nodes=2, ranks_per_node=1, rate="none") as cluster:
            result = cluster.run([sleeper], timeout_s=1)
            assert result.returncode == 124
            assert "[cluster] still running after 1 s; stopped\n" in result.stderr
            raise KeyError("from the body")

    with pytest.raises(KeyError, match="from the body"):
        run_then_raise()


# A rank that ignores every polite signal, and a child that has left its process group and session.
STUBBORN = """
    import os, signal, subprocess, sys, time
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("ready", flush=True)
    time.sleep(600)
"""
SAVING = STUBBORN.replace("signal.SIG_IGN", "lambda *_: [time.sleep(1), print('saved', flush=True), sys.exit()]")


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("number", "source"),
    [
        pytest.param(signal.SIGINT, STUBBORN, id="ctrl-c-stubborn-rank"),
        pytest.param(signal.SIGTERM, SAVING, id="sigterm"),
    ],
)
def test_signal_stops_everything(script: Callable[[str], str], number: signal.Signals, source: str) -> None:
    links = _links()
    process = _start("--ranks-per-node", "1", script(source))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert _traces(process.pid)
    process.send_signal(number)
    assert process.communicate(timeout=30)[0] == ("saved\n" if source == SAVING else "")
    assert process.returncode == 128 + number
    assert _traces(process.pid) == []
    assert _links() == links


@pytest.mark.cluster
@pytest.mark.usefixtures("leaves_nothing")
def test_failed_setup_is_undone_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedLink, "far_end", lambda link: [["root", "tbf", "rate", "nonsense"]])
    cluster = EmulatedCluster()
    with pytest.raises(ClusterUnavailableError, match=r"tc -n .*nonsense.* failed: .*CONFIG_NET_SCH_TBF"):
        cluster.__enter__()


@pytest.mark.cluster
def test_leftovers_of_dead_launchers_are_removed_and_those_of_the_living_kept() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    dead, alive = f"commopt-{gone.pid}-0-node0", "commopt-1-0-node0"
    for name in (dead, alive):
        subprocess.run(["ip", "netns", "add", name], check=True)
    orphan = subprocess.Popen(["ip", "netns", "exec", dead, "sleep", "600"])
    try:
        deadline = time.monotonic() + 5
        while not commands.ip("netns", "pids", dead).split() and time.monotonic() < deadline:
            time.sleep(0.01)
        with EmulatedCluster():
            assert not Path("/run/netns", dead).exists()
            assert Path("/run/netns", alive).exists()
        assert orphan.wait(timeout=5) == -signal.SIGKILL
    finally:
        subprocess.run(["ip", "netns", "delete", alive], check=True)


@pytest.mark.cluster
@pytest.mark.usefixtures("leaves_nothing")
def test_two_clusters_side_by_side() -> None:
    with EmulatedCluster() as first, EmulatedCluster() as second:
        assert len(_traces(os.getpid())) >= 6
        assert first.link == second.link
    assert first is not second


def test_a_script_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert main(["cluster", "no_such_script.py"]) == 2
    assert "there is no file no_such_script.py; for a module put -m" in capsys.readouterr().err
    for name in ("no_such_module", "commopt.no_such_module", ""):
        assert main(["cluster", "-m", name]) == 2
        assert f"there is no module {name!r}; for a file leave -m out" in capsys.readouterr().err
