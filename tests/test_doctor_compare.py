"""What differs between the nodes of a job; the report of many machines; a real run under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.demo import local_ranks
from commopt.doctor.finding import Check, Severity, merge
from commopt.doctor.nodes.compare import RankFacts, compare, rank_facts
from tests.doctor_machine import look, rdma_server, tcp_server
from topology.host import HostIdentity
from topology.model import Gpu, Nic, Topology

GPUS = tuple(Gpu(index, f"0000:{0x19 + index:02x}:00.0", 0, sm=90) for index in range(2))
HARDWARE = Topology("test", GPUS, (Nic("mlx5_0", "0000:1a:00.0", 1, 0, 400.0),))
FACTS = RankFacts(
    HostIdentity("a", "boot-a", None, 0),
    "0000:19:00.0",
    HARDWARE,
    "torch 2.13.0, CUDA 12.8, NCCL 2.28.9",
    "570.86.15",
    (("eth0", 100.0, 9000),),
    ("10.0.0.0/24",),
    (("mlx5_0:1", 400.0, "InfiniBand"),),
    (("NCCL_IB_HCA", "mlx5"),),
)


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
        "rank-layout", "nodes-versions", "nodes-settings", "nodes-machines", "nodes-network",
    }  # fmt: skip
    (machines,) = [finding for finding in findings if finding.check == "nodes-machines"]
    assert machines.value == "2 nodes x 2 rank(s), 1 rail(s), 400 Gb/s from the slowest node"


@pytest.mark.parametrize(
    ("change", "check", "severity", "value"),
    [
        ({"versions": "torch 2.12.0, CUDA 12.8, NCCL 2.27.3"}, "nodes-versions", "error", "2.27.3 on b"),
        ({"driver": "550.1"}, "nodes-versions", "warning", "550.1 on b"),
        ({"nics": (("eth0", 25.0, 9000),)}, "nodes-network", "warning", "fastest 25 Gb/s on b"),
        ({"nics": (("eth0", 100.0, 1500),)}, "nodes-network", "warning", "1500 on b"),
        ({"ports": (("mlx5_0:1", 100.0, "InfiniBand"),)}, "nodes-network", "warning", "100 Gb/s on b"),
        ({"ports": ()}, "nodes-network", "warning", "no RDMA port on b"),
        ({"hardware": replace(HARDWARE, gpus=GPUS[:1])}, "nodes-machines", "warning", "GPUs: 2 on node 0 (a); 1 on n"),
        ({"networks": ("192.168.0.0/24",)}, "nodes-network", "warning", "b: 192.168.0.0/24"),
        ({"settings": ()}, "nodes-settings", "warning", "unset on ranks 3"),
        ({"settings": (*FACTS.settings, ("NCCL_ALGO", "Ring"))}, "nodes-settings", "error", "Ring on ranks 3"),
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
    ranks = [replace(facts, gpu=None, hardware=Topology("test")) for facts in job()]
    assert {finding.severity for finding in compare(ranks)} == {Severity.OK}


def test_the_facts_of_a_rank(tmp_path: Path) -> None:
    host = HostIdentity("a", "", None, 1)
    environ = {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "1,0", "NCCL_ALGO": "Ring", "NCCL_HOSTID": "x", "PATH": "/"}
    facts = rank_facts(look(rdma_server(tmp_path / "ib"), environ), host)
    assert facts.gpu == "0000:19:00.0"
    assert facts.settings == (("NCCL_ALGO", "Ring"),)
    assert facts.ports == (("mlx5_0:1", 400.0, "InfiniBand"), ("mlx5_1:1", 400.0, "InfiniBand"))
    tcp = tcp_server(tmp_path / "tcp")
    facts = rank_facts(look(tcp, {"LOCAL_RANK": "5"}), host)
    assert (facts.gpu, facts.nics, facts.networks) == (None, (("eth0", 100.0, 9000),), ("10.0.0.0/24",))
    # A launcher that shows every rank one GPU means that one.
    assert rank_facts(look(tcp, {"LOCAL_RANK": "5", "CUDA_VISIBLE_DEVICES": "1"}), host).gpu == "0000:1a:00.0"
    uuid = "GPU-00019000-0000"
    assert rank_facts(look(tcp, {"LOCAL_RANK": "5", "CUDA_VISIBLE_DEVICES": uuid}), host).gpu == "0000:19:00.0"


def test_what_several_nodes_report_is_said_once() -> None:
    check = Check("shm", "Shared memory")
    one, other = check.warning("x", "1", "2", "y"), check.warning("x", "3", "2", "y")
    merged = merge([replace(one, nodes=("a",)), replace(other, nodes=("b",)), replace(one, nodes=("c",)),
                    replace(one, nodes=("a",))])  # fmt: skip
    assert [finding.nodes for finding in merged] == [("a", "c"), ("b",)]


def test_under_torchrun_rank_0_reports_for_all_nodes(tmp_path: Path) -> None:
    tree = tcp_server(tmp_path)
    # Two nodes of one rank each; the second has another setting.
    start = (
        "import os, sys; from commopt.__main__ import main\n"
        "os.environ['NCCL_HOSTID'] = 'node' + os.environ['RANK']\n"
        "if os.environ['RANK'] == '1': os.environ['NCCL_PROTO'] = 'LL'\n"
        f"sys.exit(main(['doctor', '--json', '--root', {str(tree.root)!r}]))\n"
    )
    script = tmp_path / "start.py"
    script.write_text(start)
    command = [
        sys.executable,
        "-m",
        *local_ranks(1, 2)[0],
        str(script),
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL", "CUDA"))}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    answer = json.loads(done.stdout)
    assert answer["status"] == 2
    assert done.returncode != 0
    first = answer["findings"][0]
    assert (first["check"], first["read"], first["nodes"]) == ("nodes-settings", "NCCL_PROTO", ["all nodes"])
    nodes = {finding["check"]: finding["nodes"] for finding in answer["findings"]}
    assert nodes["sockets"] == ["node0", "node1"]
    assert nodes["leftovers"] == ["node1"] or ["node1"] in [
        finding["nodes"] for finding in answer["findings"] if finding["check"] == "leftovers"
    ]
