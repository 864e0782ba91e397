# SPDX-License-Identifier: Apache-2.0
"""The live readers on machines whose files are made up: PCI tree, NUMA, network cards, and the NCCL file that wins."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.machines import Tree, plain, server
from topology.machine import VIRTUAL_TOPOLOGY, discover
from topology.model import Distance, Nic, PciLink, Topology
from topology.queries import gpu_distance, nearest_nics, nic_distance
from topology.sysfs import read_sysfs


def nic(topology: Topology, name: str) -> Nic:
    [found] = [nic for nic in topology.nics if nic.name == name]
    return found


def test_a_server(tmp_path: Path) -> None:
    found = read_sysfs(server(tmp_path, gpus=4).root)
    assert [(gpu.index, gpu.busid, gpu.numa) for gpu in found.gpus] == [
        (0, "0000:19:00.0", 0),
        (1, "0000:1a:00.0", 0),
        (2, "0000:39:00.0", 1),
        (3, "0000:3a:00.0", 1),
    ]
    assert found.gpus[0].name == "NVIDIA H100 80GB HBM3"
    assert found.gpus[0].uuid is not None
    assert [nic.name for nic in found.nics] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "eth0"]
    assert nic(found, "mlx5_2") == Nic("mlx5_2", "0000:3b:00.0", 1, 1, 400.0, "InfiniBand", gdr=None)
    assert nic(found, "eth0") == Nic("eth0", "0000:01:00.0", None, 0, 25.0, "Ethernet", gdr=False)
    assert [(cpu.numa, cpu.arch, cpu.vendor) for cpu in found.cpus] == [
        (numa, "x86_64", "GenuineIntel") for numa in range(2)
    ]
    assert found.cpus[0].affinity == (*range(32), *range(64, 96))
    assert found.nvlinks is None
    assert found.warnings == ()


def test_a_switch_stands_once_in_the_tree_by_its_upstream_port(tmp_path: Path) -> None:
    found = read_sysfs(server(tmp_path, gpus=2).root)
    switches = [device for device in found.pci if device.kind == "switch"]
    assert [(device.busid, device.parent, device.cpu) for device in switches] == [("0000:17:00.0", None, 0)]
    assert {device.busid for device in found.pci if device.parent == "0000:17:00.0"} == {
        "0000:19:00.0",
        "0000:1a:00.0",
        "0000:1b:00.0",
        "0000:1c:00.0",
    }
    assert sum(device.kind == "nvswitch" for device in found.pci) == 4


def test_distances(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.numa(0, "0-7")
    tree.numa(1, "8-15")
    outer = tree.switch("0000:11:00.0", "pci0000:10", numa=0)
    left, right = tree.switch("0000:13:00.0", outer, numa=0), tree.switch("0000:23:00.0", outer, numa=0)
    tree.gpu("0000:15:00.0", left, numa=0)
    for name, busid, under, numa in (
        ("pix", "0000:16:00.0", left, 0),
        ("pxb", "0000:26:00.0", right, 0),
        ("phb", "0000:1f:00.0", "pci0000:10", 0),
        ("node", "0000:31:00.0", "pci0000:30", 0),
        ("sys", "0000:81:00.0", "pci0000:80", 1),
    ):
        tree.ethernet(name, busid, under, numa=numa)
    found = read_sysfs(tmp_path)
    assert {card.name: nic_distance(found, 0, place) for place, card in enumerate(found.nics)} == {
        "pix": Distance.PIX,
        "pxb": Distance.PXB,
        "phb": Distance.PHB,
        "node": Distance.NODE,
        "sys": Distance.SYS,
    }
    near = nearest_nics(found, 0)
    assert near is not None
    assert [found.nics[place].name for place in near[0]] == ["pix"]


def test_gpus_are_in_the_order_of_their_bus_ids_as_numbers(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for busid in ("10000:01:00.0", "0002:01:00.0", "0000:c1:00.0"):
        tree.gpu(busid, f"pci{busid[:-8]}:00")
    assert [gpu.busid for gpu in read_sysfs(tmp_path).gpus] == ["0000:c1:00.0", "0002:01:00.0", "10000:01:00.0"]


def test_only_nvidias_graphics_chips_are_gpus(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu("0000:03:00.0", "pci0000:00", vendor=0x1A03, model=None)
    tree.gpu("0000:04:00.0", "pci0000:00", pci_class=0x030000, model=None)
    tree.gpu("0000:04:00.1", "pci0000:00", pci_class=0x040300, model=None)
    assert [(gpu.busid, gpu.name) for gpu in read_sysfs(tmp_path).gpus] == [("0000:04:00.0", None)]


def test_links_as_they_run_and_at_their_best(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu("0000:04:00.0", "pci0000:00", gts=2.5, width=8, max_gts=16.0, max_width=16)
    tree.gpu("0000:05:00.0", "pci0000:00")
    tree.write("sys/bus/pci/devices/0000:05:00.0/current_link_speed", "Unknown")
    tree.write("sys/bus/pci/devices/0000:05:00.0/current_link_width", "255")
    first, second = read_sysfs(tmp_path).pci
    assert (first.link, first.link_max) == (PciLink(2.5, 8), PciLink(16.0, 16))
    assert (second.link, second.link_max) == (PciLink(None, None), PciLink(32.0, 16))


def test_unknown_numa_nodes(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.numa(0, "0-3")
    tree.numa(1, "4-7")
    tree.gpu("0000:04:00.0", "pci0000:00")
    tree.gpu("0001:04:00.0", "pci0001:00")
    tree.gpu("0002:04:00.0", "pci0002:00", numa=1)
    found = read_sysfs(tmp_path)
    assert [gpu.numa for gpu in found.gpus] == [None, None, 1]
    assert [found.cpus[device.cpu or 0].numa for device in found.pci] == [None, None, 1]
    assert gpu_distance(found, 0, 1) is None  # NODE or SYS


def test_one_numa_node_leaves_no_doubt(tmp_path: Path) -> None:
    tree = plain(tmp_path)
    tree.gpu("0000:04:00.0", "pci0000:00", port=False)
    tree.gpu("0001:04:00.0", "pci0001:00", port=False)
    found = read_sysfs(tmp_path)
    assert [device.cpu for device in found.pci] == [0, 0, 0]
    assert gpu_distance(found, 0, 1) is Distance.NODE


def test_a_plain_virtual_machine(tmp_path: Path) -> None:
    started = time.process_time()
    found = discover(plain(tmp_path).root, {})
    assert time.process_time() - started < 0.5
    assert nic(found, "eth0") == Nic("eth0", "0000:00:03.0", None, None, None, "Ethernet", gdr=False)
    assert nic(found, "docker0").virtual
    assert [nic.name for nic in found.nics] == ["docker0", "eth0"]
    assert any("no NVIDIA GPU" in warning for warning in found.warnings)
    assert any("no speed stated: eth0" in warning for warning in found.warnings)


def test_an_empty_folder(tmp_path: Path) -> None:
    found = read_sysfs(tmp_path)
    assert (found.gpus, found.nics, found.pci) == ((), (), ())
    assert any("no PCI device" in warning for warning in found.warnings)
    assert any("no network card" in warning for warning in found.warnings)


@pytest.mark.parametrize("with_devices", [True, False])
def test_a_copy_that_has_lost_its_links(tmp_path: Path, with_devices: bool) -> None:
    root = server(tmp_path, gpus=2).root
    for link in (root / "sys/bus/pci/devices").iterdir():
        files = {file.name: file.read_text() for file in link.iterdir() if file.is_file()}
        link.unlink()
        link.mkdir()
        for name, text in files.items():
            (link / name).write_text(text)
    if not with_devices:
        shutil.rmtree(root / "sys/devices/pci0000:16")
    found = read_sysfs(root)
    assert [gpu.busid for gpu in found.gpus] == ["0000:19:00.0", "0000:1a:00.0"]
    assert gpu_distance(found, 0, 1) is (Distance.PIX if with_devices else None)
    assert any("lost their place" in warning for warning in found.warnings) is not with_devices


def test_a_copy_of_the_interesting_devices_only(tmp_path: Path) -> None:
    root = server(tmp_path, gpus=2).root
    for link in (root / "sys/bus/pci/devices").iterdir():
        if (link / "class").read_text().startswith("0x0604"):
            link.unlink()
    found = read_sysfs(root)
    assert gpu_distance(found, 0, 1) is Distance.PIX
    assert [device.pci_class for device in found.pci if device.kind == "switch"] == [None]


def test_a_dead_port_has_no_speed(tmp_path: Path) -> None:
    tree = server(tmp_path, gpus=2)
    tree.write("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN")
    tree.write("sys/class/infiniband/mlx5_1/ports/1/rate", "10 Gb/sec (4X SDR)")
    tree.write("sys/class/net/eth0/operstate", "down")
    tree.write("sys/class/net/eth0/speed", "-1")
    found = read_sysfs(tmp_path)
    assert [nic.speed_gbps for nic in found.nics] == [400.0, None, None]
    assert found.warnings == ("no link: mlx5_1 port 1, eth0",)


def test_both_ports_of_a_roce_card_hide_their_interfaces(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.rdma("mlx5_0", "0000:04:00.0", "pci0000:00", link_layer="Ethernet", rate="100 Gb/sec (4X EDR)", ports=2)
    tree.ethernet("ens1f0", "0000:04:00.0")
    found = read_sysfs(tmp_path)
    assert [(nic.name, nic.port, nic.speed_gbps, nic.link_layer) for nic in found.nics] == [
        ("mlx5_0", 1, 100.0, "Ethernet"),
        ("mlx5_0", 2, 100.0, "Ethernet"),
    ]


def test_what_has_no_hardware_of_its_own_is_virtual(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.ethernet("eth0", "0000:04:00.0", "pci0000:00")
    tree.ethernet("bond0")
    tree.ethernet("hv0", "0000:05:00.0", "pci0000:00")
    (tmp_path / "sys/class/net/hv0/lower_eth0").mkdir()  # a synthetic interface over a real one
    tree.ethernet("rep0", "0000:04:00.0")
    tree.write("sys/class/net/rep0/phys_port_name", "pf0vf3")
    tree.ethernet("vf0", "0000:04:00.2", "pci0000:00")
    (tmp_path / "sys/bus/pci/devices/0000:04:00.2/physfn").symlink_to("../0000:04:00.0")
    tree.ethernet("guest", "0000:07:00.2", "pci0000:00")
    (tmp_path / "sys/bus/pci/devices/0000:07:00.2/physfn").symlink_to("../0000:07:00.0")  # a card out of sight
    tree.write("sys/class/net/bonding_masters", "bond0")
    found = read_sysfs(tmp_path)
    assert {nic.name: nic.virtual for nic in found.nics} == {
        "bond0": True,
        "eth0": False,
        "guest": False,
        "hv0": True,
        "rep0": True,
        "vf0": True,
    }


def test_rdma_in_software_hides_nothing(tmp_path: Path) -> None:
    tree = plain(tmp_path)
    tree.write("sys/class/infiniband/rxe0/ports/1/state", "4: ACTIVE")
    found = read_sysfs(tmp_path)
    assert nic(found, "rxe0").virtual
    assert not nic(found, "eth0").virtual


def test_a_usb_card_is_not_the_usb_controller(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.pci("0000:00:14.0", "pci0000:00", pci_class=0x0C0330, port=False)
    tree.write("sys/devices/pci0000:00/0000:00:14.0/usb1/1-2/net/usb0/type", "1")
    (tmp_path / "sys/devices/pci0000:00/0000:00:14.0/usb1/1-2/net/usb0/device").symlink_to("../..")
    (tmp_path / "sys/class/net").mkdir(parents=True)
    (tmp_path / "sys/class/net/usb0").symlink_to("../../devices/pci0000:00/0000:00:14.0/usb1/1-2/net/usb0")
    found = read_sysfs(tmp_path)
    assert [(nic.name, nic.busid, nic.virtual) for nic in found.nics] == [("usb0", None, False)]
    assert found.pci == ()


def test_a_card_without_an_interface_is_named(tmp_path: Path) -> None:
    tree = server(tmp_path, gpus=2)
    tree.pci("0000:aa:00.0", "pci0000:a0", pci_class=0x020700)
    assert read_sysfs(tmp_path).warnings == (
        "network cards without an interface here (no driver, or a container): 0000:aa:00.0",
    )


@pytest.mark.parametrize("file", ["sys/module/nvidia_peermem/version", "sys/kernel/mm/memory_peers/nv_mem/version"])
def test_the_module_for_gpudirect_rdma(tmp_path: Path, file: str) -> None:
    tree = server(tmp_path, gpus=2)
    tree.write(file, "1.0")
    found = read_sysfs(tmp_path)
    assert [nic.gdr for nic in found.nics] == [True, True, False]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), content=st.binary(max_size=30))
def test_damaged_files_never_raise(tmp_path: Path, data: st.DataObject, content: bytes) -> None:
    root = tmp_path / "machine"
    if not root.exists():
        server(root, gpus=2)
    files = sorted(file for file in root.rglob("*") if file.is_file() and not file.is_symlink())
    file = data.draw(st.sampled_from(files))
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        assert isinstance(read_sysfs(root), Topology)
    finally:
        file.write_bytes(before)


XML = """<system version="1">
  <cpu numaid="0" affinity="00000000,0000ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="ffff:ff:01.0" class="0x060400" link_speed="16 GT/s" link_width="16">
      <pci busid="0000:1a:00.0" class="0x030200" link_speed="16 GT/s" link_width="16"/>
      <pci busid="0000:19:00.0" class="0x030200" link_speed="16 GT/s" link_width="16"/>
      <pci busid="0000:1b:00.0" class="0x020700" link_speed="16 GT/s" link_width="16"/>
    </pci>
  </cpu>
</system>
"""


@pytest.mark.parametrize("named", [True, False])
def test_the_nccl_topology_file_wins_and_is_completed(tmp_path: Path, named: bool) -> None:
    tree = server(tmp_path, gpus=2)
    tree.write("etc/topo.xml" if named else VIRTUAL_TOPOLOGY, XML)
    found = discover(tmp_path, {"NCCL_TOPO_FILE": "/etc/topo.xml"} if named else {})
    assert [device.busid for device in found.pci if device.kind == "switch"] == ["ffff:ff:01.0"]
    assert {gpu.busid: (gpu.index, gpu.name) for gpu in found.gpus} == {
        "0000:19:00.0": (0, "NVIDIA H100 80GB HBM3"),
        "0000:1a:00.0": (1, "NVIDIA H100 80GB HBM3"),
    }
    assert [(nic.name, nic.speed_gbps, nic.numa) for nic in found.nics] == [("mlx5_0", 400.0, 0)]
    assert any("not in the topology file" in warning and "mlx5_1, eth0" in warning for warning in found.warnings)


def test_a_topology_file_of_another_machine(tmp_path: Path) -> None:
    tree = plain(tmp_path)
    tree.write("topo.xml", XML)
    found = discover(tmp_path, {"NCCL_TOPO_FILE": "/topo.xml"})
    assert len(found.gpus) == 2
    assert any("no GPU of this machine: 0000:1" in warning for warning in found.warnings)


@pytest.mark.parametrize(("content", "reason"), [(None, "cannot be read"), ("<system", "refused"), ("GPU0", "refused")])
def test_a_topology_file_that_is_no_use_is_a_warning(tmp_path: Path, content: str | None, reason: str) -> None:
    tree = server(tmp_path, gpus=2)
    if content is not None:
        tree.write("topo.xml", content)
    found = discover(tmp_path, {"NCCL_TOPO_FILE": "/topo.xml"})
    assert len(found.gpus) == 2
    [warning] = found.warnings
    assert reason in warning
    assert "\n" not in warning


def test_nccl_topo_file_hides_the_other_place(tmp_path: Path) -> None:
    tree = server(tmp_path, gpus=2)
    tree.write(VIRTUAL_TOPOLOGY, XML)
    found = discover(tmp_path, {"NCCL_TOPO_FILE": "/absent.xml"})
    assert [device.busid for device in found.pci if device.kind == "switch"] == ["0000:17:00.0"]
