# SPDX-License-Identifier: Apache-2.0
"""What differs between the nodes of a job; the report of many machines; a real run under torchrun."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bench.demo import local_ranks
from commopt.doctor.compare import compare, gather, listener, own_offers, peers_of, rank_facts, unreached
from commopt.doctor.finding import Severity, error, merge, warning
from commopt.doctor.rank_answers import Offer, RankFacts, Unreached, as_json, read_answer, read_listen_address
from commopt.errors import MismatchError
from tests.doctor_machine import ROUTES, look, rdma_server, tcp_server
from topology.cluster import HostIdentity

SAME = ("torch 2.13.0", "570.86.15", "2 x NVIDIA H200", None, "1 x InfiniBand 400 Gb/s", "fastest 100 Gb/s", "9000")
FACTS = RankFacts(
    HostIdentity("a", "boot-a", None, 0),
    "0000:19:00.0",
    2,
    400.0,
    SAME,
    {"NCCL_IB_HCA": "mlx5"},
)


def other(place: int, answer: str) -> dict[str, tuple[str | None, ...]]:
    return {"equal": (*SAME[:place], answer, *SAME[place + 1 :])}


def job(nodes: Sequence[str] = "aabb") -> list[RankFacts]:
    """One rank for each letter, on the node of that name, in the order of the letters."""
    ranks: list[RankFacts] = []
    for node in nodes:
        local = sum(facts.host.hostname == node for facts in ranks)
        host = HostIdentity(node, f"boot-{node}", None, local)
        ranks.append(replace(FACTS, host=host, gpu=f"0000:{0x19 + local:02x}:00.0"))
    return ranks


def test_equal_nodes_have_nothing_to_mend() -> None:
    findings = compare(job())
    assert {finding.severity for finding in findings} == {Severity.OK}
    assert {finding.check for finding in findings} == {
        "rank-layout", "nodes-equal", "nodes-settings",
    }  # fmt: skip
    (equal,) = [finding for finding in findings if finding.check == "nodes-equal"]
    assert equal.value == "2 nodes x 2 rank(s), 400 Gb/s from the slowest node"


@pytest.mark.parametrize(
    ("change", "check", "severity", "value"),
    [
        (other(0, "torch 2.12.0"), "nodes-equal", "error", "torch 2.13.0 on a; torch 2.12.0 on b"),
        (other(1, "550.1"), "nodes-equal", "warning", "550.1 on b"),
        (other(2, "1 x NVIDIA H200"), "nodes-equal", "warning", "1 x NVIDIA H200 on b"),
        (other(4, "no RDMA port"), "nodes-equal", "warning", "no RDMA port on b"),
        (other(5, "fastest 25 Gb/s"), "nodes-equal", "warning", "fastest 25 Gb/s on b"),
        (other(6, "1500"), "nodes-equal", "warning", "1500 on b"),
        ({"settings": {}}, "nodes-settings", "warning", "unset on b (rank 3)"),
        ({"settings": {**FACTS.settings, "NCCL_ALGO": "Ring"}}, "nodes-settings", "error", "Ring on b (rank 3)"),
        ({"gpu": "0000:19:00.0"}, "rank-layout", "error", "b: ranks 2, 3 on 0000:19:00.0"),
        ({"gpu": None}, "rank-layout", "error", "b: no GPU for ranks 3"),
    ],
)
def test_one_rank_that_differs(change: dict[str, object], check: str, severity: str, value: str) -> None:
    ranks = job()
    if check != "rank-layout" and "settings" not in change:
        ranks[2] = replace(ranks[2], **change)  # type: ignore[arg-type]
    ranks[3] = replace(ranks[3], **change)  # type: ignore[arg-type]
    (bad,) = [finding for finding in compare(ranks) if finding.severity is not Severity.OK]
    assert (bad.check, bad.severity.value) == (check, severity)
    assert value in (bad.value or "")
    assert bad.remedy
    assert bad.nodes == ("all nodes",)


@pytest.mark.parametrize(
    ("nodes", "expected", "value"),
    [("abab", "in sequence", "a: 0, 2 | b: 1, 3"), ("aab", "as many ranks", "2 nodes x 2+1")],
)
def test_how_the_launcher_laid_out_the_ranks(nodes: str, expected: str, value: str) -> None:
    (bad,) = [finding for finding in compare(job(nodes)) if finding.severity is not Severity.OK]
    assert (bad.check, bad.severity) == ("rank-layout", Severity.WARNING)
    assert expected in bad.expected
    assert value in (bad.value or "")


def test_ranks_without_gpus_anywhere_are_no_trouble() -> None:
    ranks = [replace(facts, gpu=None, gpus=0) for facts in job()]
    assert {finding.severity for finding in compare(ranks)} == {Severity.OK}


def test_the_facts_of_a_rank(tmp_path: Path) -> None:
    host = HostIdentity("a", "", None, 1)
    environ = {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "1,0", "NCCL_ALGO": "Ring", "NCCL_HOSTID": "x", "PATH": "/"}
    facts = rank_facts(look(rdma_server(tmp_path / "ib"), environ), host)
    assert facts.gpu == "0000:19:00.0"
    assert facts.settings == {"NCCL_ALGO": "Ring"}
    assert facts.equal == (
        *("torch 2.13.0, CUDA 12.8, NCCL 2.28.9", "none", "2 x NVIDIA H100 80GB HBM3", None),
        *("2 x InfiniBand 400 Gb/s", "fastest 25 Gb/s", "1500"),
    )
    tcp = tcp_server(tmp_path / "tcp")
    facts = rank_facts(look(tcp, {"LOCAL_RANK": "5"}), host)
    assert (facts.gpu, facts.equal[5:]) == (None, ("fastest 100 Gb/s", "9000"))
    # A launcher that shows every rank one GPU means that one.
    assert rank_facts(look(tcp, {"LOCAL_RANK": "5", "CUDA_VISIBLE_DEVICES": "1"}), host).gpu == "0000:1a:00.0"
    uuid = "GPU-00019000-0000"
    assert rank_facts(look(tcp, {"LOCAL_RANK": "5", "CUDA_VISIBLE_DEVICES": uuid}), host).gpu == "0000:19:00.0"


def test_what_several_nodes_report_is_said_once() -> None:
    one, other = warning("1", "2", "y"), warning("3", "2", "y")
    merged = merge([replace(one, nodes=("a",)), replace(other, nodes=("b",)), replace(one, nodes=("c",)),
                    replace(one, nodes=("a",))])  # fmt: skip
    assert [finding.nodes for finding in merged] == [("a", "c"), ("b",)]


def test_the_addresses_that_a_rank_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tcp_server(tmp_path)
    for index, name in enumerate(("docker0", "eth0", "tailscale0", "ib0")):
        tree.write(f"sys/class/net/{name}/operstate", "up")
        tree.write(f"sys/class/net/{name}/ifindex", index)
    routes = [f"{name}\t0001A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0" for name in ("tailscale0", "ib0")]
    tree.write("proc/net/route", "\n".join([ROUTES, *routes]))
    known = {"docker0": "172.17.0.1", "eth0": "10.0.0.1", "tailscale0": "100.64.0.1"}

    def offers(**environ: str) -> dict[str, str]:
        return {offer.library: offer.address for offer in own_offers(look(tree, environ), known.get)}

    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **kwargs: [(2, 1, 6, "", ("127.0.1.1", 0))])
    assert offers() == {"NCCL": "10.0.0.1", "gloo": "127.0.1.1"}
    named = offers(NCCL_SOCKET_IFNAME="tail", GLOO_SOCKET_IFNAME="docker0")
    assert named == {"NCCL": "100.64.0.1", "gloo": "172.17.0.1"}
    known["ib0"] = "10.1.0.1"
    assert offers()["NCCL"] == "10.1.0.1"
    assert offers(NCCL_SOCKET_IFNAME="=none", GLOO_SOCKET_IFNAME="none") == {}


def test_connections_to_other_ranks_end_in_time() -> None:
    with listener() as door, socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        # The system answers for one more than the queue holds, then for none.
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        free = socket.create_server(("127.0.0.1", 0))
        closed = free.getsockname()[1]
        free.close()
        targets = [
            (1, door.getsockname()[1], Offer("NCCL", "127.0.0.1")),
            (2, closed, Offer("NCCL", "127.0.0.1")),
            (3, port, Offer("gloo", "127.0.0.1")),
        ]
        failed = unreached(targets, limit_s=0.5)
        for one in waiting:
            one.close()
    assert [(one.rank, one.offer.library, one.why) for one in failed] == [
        (2, "NCCL", "Connection refused"),
        (3, "gloo", "no answer within 0.5 s"),
    ]
    assert unreached([]) == ()


@pytest.mark.parametrize("world_size", [2, 9, 65, 1000])
def test_every_rank_is_tried_by_as_many_others(world_size: int) -> None:
    tried = [peers_of(rank, world_size) for rank in range(world_size)]
    count = min(world_size - 1, 64)
    assert all(len(set(peers)) == count and rank not in peers for rank, peers in enumerate(tried))
    assert set(Counter(peer for peers in tried for peer in peers).values()) == {count}


@pytest.mark.parametrize(
    ("library", "gpus", "severity"), [("NCCL", True, "error"), ("gloo", True, "warning"), ("gloo", False, "error")]
)
def test_an_address_that_does_not_answer(library: str, gpus: bool, severity: str) -> None:
    offers = (Offer("NCCL", "10.0.0.1"), Offer("gloo", "10.0.0.1"))
    ranks = [replace(facts, offers=offers, gpus=2 if gpus else 0, gpu=facts.gpu if gpus else None) for facts in job()]
    (fine,) = [finding for finding in compare(ranks) if finding.check == "nodes-reach"]
    assert (fine.severity, fine.value) == (Severity.OK, "rank 0 offers NCCL 10.0.0.1, gloo 10.0.0.1")
    failed = (Unreached(3, Offer(library, "100.64.0.1"), "no answer within 5 s"),)
    ranks[0], ranks[1] = (replace(facts, unreached=failed) for facts in ranks[:2])
    (bad,) = [finding for finding in compare(ranks) if finding.check == "nodes-reach"]
    assert (bad.severity.value, bad.value) == (severity, "100.64.0.1 of rank 3 (b), from a: no answer within 5 s")
    assert f"export {library.upper()}_SOCKET_IFNAME" in (bad.remedy or "")


@pytest.fixture
def _store_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two ranks, of which this process is the first, and a store that a launcher keeps."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "RANK": "0",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, value)
    yield
    del store


@pytest.mark.usefixtures("_store_of_a_launcher")
def test_a_rank_that_never_comes_is_named() -> None:
    with pytest.raises(MismatchError, match=r"^rank 1 did not reach the doctor within"):
        gather(FACTS, [], timeout_s=0.5)


FINDING = replace(warning("1", "2", "y"), nodes=("b",), check="mtu", title="MTU", read="/sys")


def test_what_a_rank_tells_comes_back() -> None:
    failed = (Unreached(1, Offer("gloo", "10.0.0.2"), "refused"),)
    facts = replace(FACTS, offers=(Offer("NCCL", "10.0.0.1"),), unreached=failed, gbps=None)
    text = as_json(facts, [FINDING, error("x")]).encode()
    assert read_answer(text, 0, 2, len(SAME)) == (facts, [FINDING, error("x")])


# fmt: off
DAMAGE = [
    ("facts", "host", "x"), ("facts", "gpus", -1), ("facts", "gpus", True), ("facts", "gbps", "fast"),
    ("facts", "gbps", float("nan")), ("facts", "equal", ["a"]), ("facts", "settings", {"A": 1}),
    ("facts", "settings", {str(number): "" for number in range(1001)}), ("facts", "gpu", "x" * 20_001),
    ("facts", "offers", [["NCCL", "evil.example.org"]]), ("facts", "offers", [["ssh", "10.0.0.1"]]),
    ("facts", "unreached", [[2, ["NCCL", "10.0.0.1"], "why"]]), ("facts", "more", 1), ("findings", 0, {}),
    ("findings", 0, {**FINDING.as_dict(), "severity": "worse"}), ("findings", 0, {**FINDING.as_dict(), "nodes": "b"}),
    ("findings", 0, {**FINDING.as_dict(), "value": 5}), ("findings", 0, {**FINDING.as_dict(), "title": None}),
]
# fmt: on


@pytest.mark.parametrize(("part", "name", "value"), DAMAGE)
def test_what_a_stranger_writes_is_refused(part: str, name: str, value: Any) -> None:
    answer = json.loads(as_json(FACTS, [FINDING]))
    answer[part][name] = value
    with pytest.raises(MismatchError, match="the answer of rank 1 to the doctor cannot be read"):
        read_answer(json.dumps(answer).encode(), 1, 2, len(SAME))


@pytest.mark.parametrize("text", [b"", b"[]", b"\x80\x04N.", b"{}", b"[" * 100_000, b'{"facts": "' + b"x" * (5 << 20)])
def test_no_answer_is_so_broken_that_it_does_more_than_raise(text: bytes) -> None:
    with pytest.raises(MismatchError, match="cannot be read"):
        read_answer(text, 1, 2, len(SAME))


@pytest.mark.parametrize(
    "told", [{}, {"node": ["a"], "port": 70_000, "offers": []}, {"node": ["a"], "port": 1, "offers": [["NCCL", "h"]]}]
)
def test_an_address_that_is_none_is_not_connected_to(told: dict[str, Any]) -> None:
    with pytest.raises(MismatchError, match="rank 1 sent the doctor an invalid address"):
        read_listen_address(told, 1)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.usefixtures("_store_of_a_launcher")
def test_rank_0_may_leave_with_the_store_once_it_has_heard_all(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", str(rank))

    def exchange(store: object, ranks: object, me: int, purpose: str, facts: dict[str, Any], limit_s: float) -> Any:
        if purpose == "the doctor":
            return [json.loads(json.dumps(facts))] * 2
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr("commopt.groups.agreement.exchange_facts", exchange)
    if rank == 1:
        assert gather(FACTS, []) is None
    else:
        with pytest.raises(MismatchError, match="a rank left"):
            gather(FACTS, [])


def test_under_torchrun_rank_0_reports_for_all_nodes(tmp_path: Path) -> None:
    tree = tcp_server(tmp_path)
    # Two nodes of one rank each; the second has another setting, and an address that nobody can connect to.
    start = (
        "import os, sys; from commopt.__main__ import main\n"
        "os.environ['NCCL_HOSTID'] = 'node' + os.environ['RANK']\n"
        "if os.environ['RANK'] == '1': os.environ['NCCL_PROTO'] = 'LL'\n"
        "import commopt.doctor.cli as cli; from dataclasses import replace\n"
        "from commopt.doctor.rank_answers import Offer\n"
        "address = '127.0.0.1' if os.environ['RANK'] == '0' else '0.0.0.1'\n"
        "known = cli.rank_facts\n"
        "cli.rank_facts = lambda *given: replace(known(*given), offers=(Offer('NCCL', address),))\n"
        f"sys.exit(main(['doctor', '--json', '--root', {str(tree.root)!r}]))\n"
    )
    script = tmp_path / "start.py"
    script.write_text(start)
    command = [sys.executable, "-m", *local_ranks(1, 2)[0], str(script)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL", "CUDA"))}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd(), "COMMOPT_SECRET": "of this job"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    answer = json.loads(done.stdout)
    assert answer["status"] == 3
    assert done.returncode != 0
    unreachable, first = answer["findings"][:2]
    assert (unreachable["check"], unreachable["severity"]) == ("nodes-reach", "error")
    assert unreachable["value"].startswith("0.0.0.1 of rank 1 (node1), from node0: ")
    assert (first["check"], first["read"], first["nodes"]) == ("nodes-settings", "NCCL_PROTO", ["all nodes"])
    nodes = {finding["check"]: finding["nodes"] for finding in answer["findings"]}
    assert nodes["sockets"] == ["node0", "node1"]
    assert ["node1"] in [finding["nodes"] for finding in answer["findings"] if finding["check"] == "settings"]
