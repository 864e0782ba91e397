# SPDX-License-Identifier: Apache-2.0
"""Which ranks share a machine, from what each of them reports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import topology
from topology import Cluster, HostIdentity, read_host_identity


def host(name: str, local_rank: int | None = None, nccl_hostid: str | None = None, boot: str = "b") -> HostIdentity:
    return HostIdentity(name, boot, nccl_hostid, local_rank)


def test_hosts_become_nodes_in_order_of_their_first_rank() -> None:
    cluster = Cluster.from_hosts([host("b", 0), host("b", 1), host("a", 0), host("a", 1)])
    assert cluster.nodes == ((0, 1), (2, 3))
    assert cluster.names == ("b", "a")
    assert cluster.node_contiguous
    assert cluster.uniform
    assert str(cluster) == "2 nodes x 2 rank(s)"


def test_interleaved_launch_is_put_in_node_order_and_reported() -> None:
    cluster = Cluster.from_hosts([host("a", 0), host("b", 0), host("a", 1), host("b", 1)])
    assert cluster.nodes == ((0, 2), (1, 3))
    assert cluster.order == (0, 2, 1, 3)
    assert not cluster.node_contiguous
    assert cluster.node_of(3) == 1


def test_local_rank_decides_the_place_within_a_node() -> None:
    cluster = Cluster.from_hosts([host("a", 1), host("a", 0), host("b", 0), host("b", 1)])
    assert cluster.nodes == ((1, 0), (2, 3))


def test_a_reboot_or_a_clone_with_the_same_name_is_another_machine() -> None:
    assert len(Cluster.from_hosts([host("a"), host("a", boot="other")]).nodes) == 2


def test_nccl_hostid_overrides_name_and_boot_id() -> None:
    cluster = Cluster.from_hosts([host("a", nccl_hostid="n0"), host("b", nccl_hostid="n0"), host("a")])
    assert cluster.nodes == ((0, 1), (2,))
    assert cluster.names == ("n0", "a")
    assert str(cluster) == "2 nodes x 2+1 rank(s)"
    assert not cluster.uniform


def test_ranks_per_node_makes_blocks() -> None:
    cluster = Cluster.from_ranks_per_node(6, 2)
    assert cluster.nodes == ((0, 1), (2, 3), (4, 5))
    assert cluster.emulated
    assert cluster.world_size == 6
    assert str(cluster) == "3 nodes x 2 rank(s) (emulated)"


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "message"),
    [
        (
            6,
            4,
            "6 is not a multiple of ranks_per_node 4; pass ranks_per_node=3, or leave it out to use the real hosts",
        ),
        (
            2,
            8,
            "2 is not a multiple of ranks_per_node 8; pass ranks_per_node=2, or leave it out to use the real hosts",
        ),
        (7, 3, "pass ranks_per_node=1"),
        (4, 0, "ranks_per_node 0 is not a positive number"),
    ],
)
def test_blocks_that_do_not_fill_the_world_are_refused(world_size: int, ranks_per_node: int, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared below)
        Cluster.from_ranks_per_node(world_size, ranks_per_node)
    assert message in str(caught.value)


def test_a_rank_outside_the_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 4 is not in this cluster of 4 ranks"):
        Cluster.from_ranks_per_node(4, 2).node_of(4)


def test_identity_is_read_from_environment_and_files(tmp_path: Path) -> None:
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("1234\n")
    identity = read_host_identity({"LOCAL_RANK": "3", "NCCL_HOSTID": "n7"}, root=tmp_path)
    assert (identity.boot_id, identity.local_rank, identity.nccl_hostid) == ("1234", 3, "n7")
    assert identity.node_key == ("n7",)
    assert HostIdentity(**identity.as_dict()) == identity  # type: ignore[arg-type]


def test_identity_without_proc_or_launcher_still_names_the_host(tmp_path: Path) -> None:
    identity = read_host_identity({}, root=tmp_path)
    assert identity.hostname
    assert (identity.boot_id, identity.local_rank, identity.nccl_hostid) == ("", None, None)


def test_readers_and_pictures_are_loaded_when_they_are_used() -> None:
    """`import commopt` needs who shares a machine, and nothing else of the topology; nor does it need the timeline."""
    script = """
import sys, commopt, topology
print(sorted(name for name in sys.modules if name.startswith(("topology.", "commopt.timeline."))))
assert all(getattr(topology, name) for name in topology.__all__)
assert commopt.Report and commopt.Timeline and commopt.timeline.analyse
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert ran.stdout.split() == ["['topology.cluster']"]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'discovery'"):
        topology.discovery  # noqa: B018
