# SPDX-License-Identifier: Apache-2.0
"""Machines as people have them, all well: notes, but no alarm, and no advice that does harm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commopt.doctor import diagnose
from commopt.doctor.finding import Finding, Severity
from commopt.doctor.machine import Software
from commopt.doctor.nvml import NvmlFacts, NvmlGpu
from tests.doctor_machine import (
    LIMITS,
    ROUTES,
    SOFTWARE,
    STATUS,
    basics,
    config,
    look,
    rdma_server,
    roce_server,
)
from tests.machines import MELLANOX, Tree

AMAZON, GOOGLE, MICROSOFT, INTEL = 0x1D0F, 0x1AE0, 0x1414, 0x8086
LAN = "00A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0"
ALARMS = (Severity.ERROR, Severity.WARNING)


def h100_server(root: Path) -> Tree:
    """Eight GPUs and adapters; a port that nobody cabled, systemd's share of memory to lock, idle GPUs."""
    tree = rdma_server(root, gpus=8)
    tree.rdma("mlx5_8", "0000:02:00.0", "pci0000:00", numa=0, ports=2)
    tree.write("sys/class/infiniband/mlx5_8/ports/2/state", "1: DOWN")
    tree.write("sys/class/infiniband/mlx5_8/ports/2/phys_state", "3: Disabled")
    tree.write("proc/self/limits", LIMITS.replace("memory         unlimited", f"memory         {1 << 38}"))
    for file in tree.root.glob("sys/devices/pci*/*/*/*/*/current_link_speed"):
        if (file.parent / "class").read_text().startswith("0x0302"):
            file.write_text("2.5 GT/s PCIe\n")
    for place in range(3):
        veth(tree, f"cali{place}")
    return tree


def veth(tree: Tree, name: str) -> None:
    """The host's end of a container's cable: a route leads there."""
    tree.ethernet(name, mbps=10_000)
    routes = (tree.root / "proc/net/route").read_text().rstrip("\n")
    tree.write("proc/net/route", f"{routes}\n{name}\t0500000A\t00000000\t0005\t0\t0\t0\tFFFFFFFF\t0\t0\t0")


def virtual(root: Path, vendor: str, product: str) -> Tree:
    """Two GPUs of a cloud, without switches and without a network card so far."""
    tree = basics(Tree(root))
    tree.cpuinfo()
    tree.numa(0, "0-127")
    tree.write("sys/class/dmi/id/sys_vendor", vendor)
    tree.write("sys/class/dmi/id/product_name", product)
    for place in range(2):
        tree.gpu(f"0000:00:0{4 + place}.0", "pci0000:00", numa=0, port=False, gts=None)
    for name in ("rmem_max", "wmem_max"):
        tree.write(f"proc/sys/net/core/{name}", 212992)
    return tree


def amazon(root: Path) -> Tree:
    """ENA states no speed; pods have cables of their own."""
    tree = virtual(root, "Amazon EC2", "g5.12xlarge")
    tree.ethernet("eth0", "0000:00:06.0", "pci0000:00", port=False, gts=None, mbps=-1, mtu=9001, vendor=AMAZON)
    for place in range(3):
        veth(tree, f"eni0a1b2c{place}")
    return tree


def amazon_efa(root: Path) -> Tree:
    """EFA is an RDMA device of no link layer; the closed driver and no peermem are fine there."""
    tree = amazon(root)
    card: dict[str, Any] = {
        "numa": 0,
        "port": False,
        "gts": None,
        "vendor": AMAZON,
        "device": 0xEFA1,
        "pci_class": 0x020000,
    }
    tree.rdma("rdmap0s7", "0000:00:07.0", "pci0000:00", link_layer="Unknown", rate="100 Gb/sec (4X EDR)", **card)
    tree.write("dev/infiniband/uverbs0", "")
    tree.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01")
    tree.write("opt/amazon/ofi-nccl/lib/libnccl-net.so", "")
    return tree


def google(root: Path) -> Tree:
    """gVNIC with the network's usual small frames."""
    tree = virtual(root, "Google", "Google Compute Engine")
    card: dict[str, Any] = {"port": False, "gts": None, "vendor": GOOGLE, "device": 0x42}
    tree.ethernet("ens8", "0000:00:06.0", "pci0000:00", mbps=100_000, mtu=1460, **card)
    tree.write("proc/net/route", ROUTES.replace("eth0", "ens8"))
    for name in ("rmem_max", "wmem_max"):
        tree.write(f"proc/sys/net/core/{name}", 67108864)
    return tree


def azure(root: Path) -> Tree:
    """The interface of the hypervisor with the fast card below it, which has no address of its own."""
    tree = virtual(root, "Microsoft Corporation", "Virtual Machine")
    tree.ethernet("eth0", mbps=40_000, mtu=1500)
    tree.write("sys/class/net/eth0/device/vendor", f"0x{MICROSOFT:04x}")
    tree.ethernet("enP1s1", "0000:00:06.0", "pci0000:00", port=False, gts=None, mbps=40_000, vendor=MELLANOX)
    for name in ("rmem_max", "wmem_max"):
        tree.write(f"proc/sys/net/core/{name}", 67108864)
    return tree


def workstation(root: Path) -> Tree:
    """One GPU in a slot of eight lanes, a desktop's network chip, an IOMMU for virtual machines, access control."""
    tree = basics(Tree(root))
    tree.cpuinfo()
    tree.numa(0, "0-127")
    tree.gpu("0000:01:00.0", "pci0000:00", numa=0, gts=16.0, width=8, max_width=16, model="NVIDIA GeForce RTX 4090")
    chip: dict[str, Any] = {"gts": 5.0, "width": 1, "vendor": INTEL, "device": 0x125C}
    tree.ethernet("eth0", "0000:02:00.0", "pci0000:00", mbps=1_000, **chip)
    tree.write("sys/class/iommu/dmar0/x", "")
    for group, busid in enumerate(("0000:01:00.0", "0000:02:00.0")):
        tree.write(f"sys/kernel/iommu_groups/{group}/type", "DMA-FQ")
        tree.write(f"sys/kernel/iommu_groups/{group}/devices/{busid}", "")
    for device in tree.root.glob("sys/bus/pci/devices/*"):
        (device / "config").write_bytes(config(0x1D))
    return tree


def laptop(root: Path) -> Tree:
    """No GPU of NVIDIA, wireless beside the cable, a bridge for virtual machines, little shared memory."""
    tree = basics(Tree(root))
    tree.cpuinfo()
    tree.numa(0, "0-127")
    for place, name in enumerate(("eth0", "wlan0")):
        chip: dict[str, Any] = {"gts": 5.0, "width": 1, "vendor": INTEL, "mbps": -1 if place else 1_000}
        tree.ethernet(name, f"0000:0{2 + place}:00.0", "pci0000:00", **chip)
    tree.write("proc/net/route", f"{ROUTES}\nwlan0\t{LAN}")
    for name in ("virbr0", "vnet0", "vmnet1"):
        veth(tree, name)
    return tree


def container(root: Path) -> Tree:
    """One GPU, no privilege, Docker's limits and a cable to the host."""
    tree = workstation(root)
    tree.write(".dockerenv", "")
    tree.write("proc/self/status", STATUS.replace("Seccomp:\t0", "Seccomp:\t2"))
    tree.write("proc/self/limits", LIMITS.replace("memory         unlimited", "memory         8388608"))
    for device in tree.root.glob("sys/bus/pci/devices/*"):
        (device / "config").write_bytes(config(0x1D)[:64])
    return tree


def google_mega(root: Path) -> Tree:
    """Eight rails that Google's plugin drives over TCP."""
    tree = google(root)
    tree.write("sys/class/net/ens8/speed", 200_000)
    for place in range(2):
        card: dict[str, Any] = {"port": False, "gts": None, "vendor": GOOGLE, "device": 0x42}
        tree.ethernet(f"eth{1 + place}", f"0000:00:1{place}.0", "pci0000:00", mbps=200_000, mtu=8244, **card)
    return tree


MEGA = {
    # A part of what the provider's own script exports.
    "NCCL_FASTRAK_IFNAME": "eth1,eth2",
    "NCCL_FASTRAK_CTRL_DEV": "ens8",
    "NCCL_SOCKET_IFNAME": "=ens8",
    "GLOO_SOCKET_IFNAME": "ens8",
    "NCCL_ALGO": "Ring,Tree",
    "NCCL_PROTO": "Simple,LL128",
    "NCCL_BUFFSIZE": "8388608",
    "NCCL_MIN_NCHANNELS": "4",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CROSS_NIC": "0",
}


def azure_nd(root: Path) -> Tree:
    """Every device has a host bridge of its own: which adapter is near to which GPU, nobody sees."""
    tree = basics(Tree(root))
    tree.cpuinfo()
    tree.numa(0, "0-63")
    tree.numa(1, "64-127")
    tree.write("sys/class/dmi/id/sys_vendor", "Microsoft Corporation")
    tree.write("sys/class/dmi/id/product_name", "Virtual Machine")
    for place in range(8):
        alone: dict[str, Any] = {"numa": place // 4, "port": False, "gts": None}
        gpu, nic = f"{place + 1:04x}:00:00.0", f"{place + 0x101:04x}:00:00.0"
        tree.gpu(gpu, f"pci{gpu[:7]}", **alone)
        tree.rdma(f"mlx5_{place}", nic, f"pci{nic[:7]}", **alone)
    tree.write("sys/module/nvidia_peermem/version", "570.86.15")
    tree.write("dev/infiniband/uverbs0", "")
    return tree


def grace(root: Path, model: str = "NVIDIA GB200") -> Tree:
    """Two of the four GPUs of a tray, each beside its adapter on root ports of their own, access control on."""
    tree = basics(Tree(root))
    tree.write("proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f")
    tree.numa(0, "0-71")
    tree.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86.15")
    for place in range(2):
        tree.gpu(f"000{8 + place}:01:00.0", f"pci000{8 + place}:00", numa=0, model=model, device=0x2941)
        tree.rdma(f"mlx5_{place}", f"000{place}:01:00.0", f"pci000{place}:00", numa=0)
    tree.write("dev/infiniband/uverbs0", "")
    tree.write("dev/nvidia-caps-imex-channels/channel0", "")
    for device in tree.root.glob("sys/bus/pci/devices/*"):
        (device / "config").write_bytes(config(0x1D))
    return tree


GPUS: dict[Callable[[Path], Tree], int] = {h100_server: 8, workstation: 1, container: 1, laptop: 0}


def examined(
    tree: Tree,
    gpus: int = 2,
    nccl: tuple[int, ...] = (2, 28, 9),
    environ: Mapping[str, str] | None = None,
    **changes: Any,
) -> list[Finding]:
    ready = replace(NvmlGpu(0, mig=False, tenants=0, fabric="completed", fabric_status=0, multi_node=False), **changes)
    nvml = NvmlFacts(tuple(replace(ready, index=place) for place in range(gpus)), cuda=(12, 8))
    software = replace(SOFTWARE, nccl=nccl) if gpus else Software("2.13.0")
    return diagnose(look(tree, environ, nvml=nvml, software=software))


def alarms(found: list[Finding]) -> list[tuple[str, str, str]]:
    return [(one.check, one.severity.value, one.read) for one in found if one.severity in ALARMS]


@pytest.mark.parametrize("machine", [h100_server, amazon, amazon_efa, google, azure, workstation, laptop, container])
def test_machines_that_are_well_raise_no_alarm(machine: Callable[[Path], Tree], tmp_path: Path) -> None:
    found = examined(machine(tmp_path), GPUS.get(machine, 2))
    alarms = {(one.check, one.value) for one in found if one.severity in ALARMS}
    # Several sockets help on any fast link that NCCL does not know; its manual says so.
    assert alarms == ({("sockets", "unset, unset")} if machine is azure else set())
    for one in found:
        assert "sudo ip link set" not in (one.remedy or ""), one


def test_idle_gpus_are_one_note(tmp_path: Path) -> None:
    (found,) = [one for one in examined(h100_server(tmp_path), 8) if one.check == "pcie-link" and one.value]
    assert (found.severity, (found.value or "").count("2.5 GT/s x16 of 32 GT/s x16")) == (Severity.INFO, 8)


def test_a_gpu_beside_a_bridged_pair_has_lost_no_nvlink(tmp_path: Path) -> None:
    machine = look(
        virtual(tmp_path, "Amazon EC2", "g5.12xlarge"),
        nvml=NvmlFacts(tuple(NvmlGpu(place, nvlinks_up=count) for place, count in enumerate((4, 4, 0)))),
    )
    assert not [one for one in diagnose(machine) if one.check == "peer-access" and one.severity in ALARMS]
    lost = replace(machine, nvml=NvmlFacts((NvmlGpu(0, nvlinks_up=4), NvmlGpu(1, nvlinks_up=3))))
    (found,) = [one for one in diagnose(lost) if one.check == "peer-access"]
    assert (found.severity, found.value) == (Severity.WARNING, "GPU1: 3 NVLinks")


def test_amazons_adapters_without_their_plugin_mean_tcp(tmp_path: Path) -> None:
    tree = amazon_efa(tmp_path)
    tree.remove("opt/amazon/ofi-nccl/lib/libnccl-net.so")
    (found,) = [one for one in examined(tree) if one.severity in ALARMS]
    assert (found.check, "aws-ofi-nccl" in (found.remedy or "")) == ("transport", True)


def test_an_older_slot_that_is_faster_than_the_network_is_fine(tmp_path: Path) -> None:
    tree = rdma_server(tmp_path)
    card, port = "sys/bus/pci/devices/0000:1b:00.0", "sys/class/infiniband/mlx5_0/ports/1"
    tree.write(f"{card}/current_link_speed", "16.0 GT/s PCIe")
    tree.write(f"{port}/rate", "200 Gb/sec (4X HDR)")
    tree.write("sys/class/infiniband/mlx5_1/ports/1/rate", "200 Gb/sec (4X HDR)")
    assert not [one for one in examined(tree) if one.severity in ALARMS]


def test_what_people_forget_for_gpudirect_rdma_comes_out_in_a_container_too(tmp_path: Path) -> None:
    tree = rdma_server(tmp_path)
    tree.write(".dockerenv", "")
    tree.remove("sys/module/nvidia_peermem/version")
    tree.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01")
    (tree.root / "sys/bus/pci/devices/0000:17:00.0/config").write_bytes(config(0x1D))
    tree.rdma("mlx5_2", "0000:02:00.0", "pci0000:00", link_layer="Ethernet", rate="25 Gb/sec (1X EDR)")
    remedies = {one.check: one.remedy or "" for one in examined(tree) if one.severity in ALARMS}
    assert "modprobe nvidia-peermem" in remedies["gdr-module"]
    assert remedies["gdr-module"].endswith("# on the host")
    assert "setpci" in remedies["acs"]
    assert remedies["ib-hca"] == "export NCCL_IB_HCA==mlx5_0:1,mlx5_1:1"


TO_PLUGIN = {"NCCL_NET_PLUGIN": "/opt/amazon/ofi-nccl/lib/libnccl-net.so"}


@pytest.mark.parametrize(
    ("environ", "alarm"),
    [
        ({"NCCL_NET": "Socket"}, ("settings", "error", "NCCL_NET")),
        ({"NCCL_NET": "IB"}, ("settings", "error", "NCCL_NET")),
        ({"NCCL_NET_PLUGIN": "none"}, ("settings", "error", "NCCL_NET_PLUGIN")),
        ({"NCCL_NET_PLUGIN": "/opt/gone/libnccl-net.so"}, ("transport", "warning", "libnccl-net*.so")),
        ({"FI_PROVIDER": "tcp"}, ("settings", "error", "FI_PROVIDER")),
        ({"FI_PROVIDER": "^efa"}, ("settings", "error", "FI_PROVIDER")),
        ({"FI_EFA_USE_DEVICE_RDMA": "0"}, ("settings", "warning", "FI_EFA_USE_DEVICE_RDMA")),
        ({"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}, None),
        (TO_PLUGIN, None),
        ({"NCCL_NET": "AWS Libfabric", "NCCL_TUNER_PLUGIN": "libnccl-net.so"}, None),
    ],
)
def test_what_keeps_amazons_adapters_from_rdma(
    environ: dict[str, str], alarm: tuple[str, str, str] | None, tmp_path: Path
) -> None:
    assert alarms(examined(amazon_efa(tmp_path), environ=environ)) == ([] if alarm is None else [alarm])


def test_a_plugin_that_the_loader_knows_is_found(tmp_path: Path) -> None:
    tree = amazon_efa(tmp_path)
    tree.remove("opt/amazon/ofi-nccl/lib/libnccl-net.so")
    tree.write("etc/ld.so.cache", "glibc-ld.so.cache1.1\0libnccl-net.so\0/opt/x/libnccl-net.so")
    assert alarms(examined(tree)) == []


def test_a_providers_profile_is_left_alone(tmp_path: Path) -> None:
    tree = google_mega(tmp_path)
    found = examined(tree, environ=MEGA)
    assert alarms(found) == []
    (theirs,) = [one for one in found if one.check == "settings"]
    assert (theirs.severity, theirs.remedy) == (Severity.INFO, None)
    assert "NCCL_ALGO=Ring,Tree" in (theirs.value or "")
    # What is there for debugging only is nobody's profile.
    found = examined(tree, environ=MEGA | {"CUDA_LAUNCH_BLOCKING": "1"})
    assert alarms(found) == [("settings", "error", "CUDA_LAUNCH_BLOCKING")]
    # The same settings without the provider are somebody's experiment.
    own = {name: value for name, value in MEGA.items() if "FASTRAK" not in name}
    assert len(alarms(examined(tree, environ=own))) == 5
    own = {"NCCL_TOPO_FILE": "/opt/microsoft/ndv5-topo.xml", "NCCL_ALGO": "Ring"}
    assert ("settings", "warning", "NCCL_ALGO") in alarms(examined(azure_nd(tmp_path / "azure"), 8, environ=own))


def test_a_virtual_machine_without_its_topology_file(tmp_path: Path) -> None:
    tree = azure_nd(tmp_path)
    found = examined(tree, 8)
    assert alarms(found) == [("topology-file", "warning", "NCCL_TOPO_FILE")]
    # What the file would tell is not guessed at.
    assert [one.severity for one in found if one.check == "gdr-level"] == [Severity.OK]
    tree.write("opt/microsoft/ndv5-topo.xml", "")
    (told,) = [one for one in examined(tree, 8) if one.check == "topology-file"]
    assert told.remedy == "export NCCL_TOPO_FILE=/opt/microsoft/ndv5-topo.xml"
    tree.remove("sys/class/dmi/id/product_name")
    tree.write("sys/class/dmi/id/sys_vendor", "Supermicro")
    tree.write("proc/cpuinfo", "vendor_id\t: GenuineIntel\nflags\t\t: fpu")
    assert "topology-file" not in {check for check, _, _ in alarms(examined(tree, 8))}


def test_a_tray_of_grace_machines_is_well(tmp_path: Path) -> None:
    found = examined(grace(tmp_path / "metal"), multi_node=True)
    assert alarms(found) == []
    (level,) = [one for one in found if one.check == "gdr-level"]
    assert (level.severity, "P2C" in level.expected) == (Severity.OK, True)
    tree = grace(tmp_path / "virtual")
    tree.write("sys/class/dmi/id/sys_vendor", "Google")
    tree.write("sys/class/dmi/id/product_name", "Google Compute Engine")
    assert alarms(examined(tree, multi_node=True)) == []


def test_gpudirect_of_grace_machines_needs_nccl_2_27_and_its_switch(tmp_path: Path) -> None:
    tree = grace(tmp_path)
    for nccl, environ in (((2, 26, 5), None), ((2, 28, 9), {"NCCL_NET_GDR_C2C": "0"})):
        (level,) = [one for one in examined(tree, 2, nccl, environ) if one.check == "gdr-level"]
        assert level.severity is Severity.INFO
    found = examined(tree, environ={"NCCL_NET_GDR_LEVEL": "PXB"})
    assert alarms(found) == [("settings", "warning", "NCCL_NET_GDR_LEVEL")]


def test_the_iommu_of_an_arm_processor_has_a_name_of_its_own(tmp_path: Path) -> None:
    tree = grace(tmp_path)
    tree.write("sys/class/iommu/smmu3.0x1/x", "")
    tree.write("proc/cmdline", "quiet iommu.passthrough=1")
    assert alarms(examined(tree)) == []
    assert not [one for one in examined(tree) if one.check == "iommu" and one.value is None]
    tree.write("sys/kernel/iommu_groups/7/type", "DMA")
    tree.write("sys/kernel/iommu_groups/7/devices/0008:01:00.0", "")
    (found,) = [one for one in examined(tree) if one.check == "iommu"]
    assert (found.severity, "iommu.passthrough=1" in (found.remedy or "")) == (Severity.WARNING, True)
    assert "iommu=pt" not in (found.remedy or "")


def test_trays_have_their_switches_and_the_manager_elsewhere(tmp_path: Path) -> None:
    (found,) = [one for one in examined(grace(tmp_path), fabric="in progress") if one.check == "nvswitch"]
    assert found.severity is Severity.ERROR
    assert "nvidia-fabricmanager" not in (found.remedy or "")


@pytest.mark.parametrize("name", ["NCCL_CUMEM_ENABLE", "NCCL_MNNVL_ENABLE"])
def test_what_switches_nvlink_between_nodes_off(name: str, tmp_path: Path) -> None:
    tree = grace(tmp_path)
    assert alarms(examined(tree, environ={name: "0"}, multi_node=True)) == [("settings", "error", name)]
    assert alarms(examined(tree, environ={name: "0"})) == []


def test_pages_that_move_stop_the_gpus_of_grace_machines(tmp_path: Path) -> None:
    tree = grace(tmp_path)
    tree.numa(1, "72-143")
    tree.rdma("mlx5_2", "0012:01:00.0", "pci0012:00", numa=1)
    tree.write("proc/sys/kernel/numa_balancing", 1)
    assert ("numa-balancing", "warning", "/proc/sys/kernel/numa_balancing") in alarms(examined(tree))


def test_beside_rails_the_interface_that_all_nodes_share_is_offered(tmp_path: Path) -> None:
    tree = rdma_server(tmp_path)
    tree.ethernet("rail0", "0000:1d:00.0", "0000:17:00.0", numa=0, mbps=400_000, mtu=9000)
    tree.write("proc/net/route", f"{ROUTES}\nrail0\t{LAN}")
    remedies = {one.remedy for one in examined(tree) if one.check == "interface"}
    assert remedies == {"export NCCL_SOCKET_IFNAME==eth0", "export GLOO_SOCKET_IFNAME=eth0"}


def test_without_mlnx_ofed_the_open_driver_is_the_first_advice(tmp_path: Path) -> None:
    tree = rdma_server(tmp_path)
    tree.remove("sys/module/nvidia_peermem/version")
    tree.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01")

    def remedy() -> str:
        return next(one.remedy or "" for one in examined(tree) if one.check == "gdr-module")

    assert remedy().index("nvidia-open") < remedy().index("modprobe nvidia-peermem")
    tree.write("sys/module/mlx_compat/version", "24.10")
    assert remedy().startswith("sudo modprobe nvidia-peermem")


@pytest.mark.parametrize(("rate", "alarm"), [("100 Gb/sec (2X HDR)", False), ("50 Gb/sec (1X HDR)", True)])
def test_half_a_port_is_enough_for_a_narrow_slot(rate: str, alarm: bool, tmp_path: Path) -> None:
    tree = rdma_server(tmp_path)
    for card in tree.root.glob("sys/class/infiniband/*"):
        (card / "ports/1/rate").write_text(f"{rate}\n")
        for which in ("current", "max"):
            (card / f"device/{which}_link_speed").write_text("8.0 GT/s PCIe\n")
    assert ("ib-port" in {check for check, _, _ in alarms(examined(tree))}) == alarm


def test_an_address_of_either_family_is_enough_where_it_is_asked_for(tmp_path: Path) -> None:
    tree = roce_server(tmp_path)
    for place in range(2):
        tree.write(f"sys/class/infiniband/mlx5_{place}/ports/1/gids/1", "2001:0db8::1")
    assert alarms(examined(tree, environ={"NCCL_IB_ADDR_FAMILY": "AF_INET6"})) == []
    assert len(alarms(examined(tree))) == 2


def test_a_provider_sees_to_the_class_of_roce_packets(tmp_path: Path) -> None:
    found = examined(roce_server(tmp_path), environ={"NCCL_NET": "gIB"})
    assert [one.severity for one in found if one.check == "settings"] == [Severity.OK]


def test_freed_shared_memory_concerns_people_who_log_in(tmp_path: Path) -> None:
    tree = rdma_server(tmp_path)
    tree.write("etc/systemd/logind.conf", "[Login]")
    for drop_in, uid, told in (("RemoveIPC=no", 1000, False), ("RemoveIPC=yes", 1000, True), ("", 0, False)):
        tree.write("etc/systemd/logind.conf.d/ipc.conf", f"[Login]\n{drop_in}")
        tree.write("proc/self/status", f"{STATUS}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}")
        (found,) = [one for one in examined(tree) if one.check == "remove-ipc"]
        assert (found.severity is Severity.INFO) == told
