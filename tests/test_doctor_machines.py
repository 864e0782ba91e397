"""Machines as people have them, all well: notes, but no alarm, and no advice that does harm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commopt.doctor.checks.diagnosis import diagnose
from commopt.doctor.facts.machine import Software
from commopt.doctor.facts.nvml import NvmlFacts, NvmlGpu
from commopt.doctor.finding import Finding, Severity
from tests.doctor_machine import LIMITS, ROUTES, SOFTWARE, STATUS, basics, config, look, rdma_server
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


GPUS: dict[Callable[[Path], Tree], int] = {h100_server: 8, workstation: 1, container: 1, laptop: 0}


def examined(tree: Tree, gpus: int = 2, nccl: tuple[int, ...] = (2, 28, 9)) -> list[Finding]:
    ready = NvmlGpu(0, mig=False, tenants=0, fabric="completed", fabric_status=0, multi_node=False)
    nvml = NvmlFacts(tuple(replace(ready, index=place) for place in range(gpus)), cuda=(12, 8))
    return diagnose(look(tree, nvml=nvml, software=replace(SOFTWARE, nccl=nccl) if gpus else Software("2.13.0")))


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


def test_a_module_that_an_old_nccl_does_not_look_for_is_as_good_as_absent(tmp_path: Path) -> None:
    tree = rdma_server(tmp_path)
    tree.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01")
    assert not [one for one in examined(tree) if one.severity in ALARMS]
    (found,) = [one for one in examined(tree, nccl=(2, 21, 5)) if one.severity in ALARMS]
    assert (found.check, "NCCL 2.21.5 does not look" in (found.value or "")) == ("gdr-module", True)
    tree.write("sys/kernel/mm/memory_peers/nv_mem/version", "1.3")
    assert not [one for one in examined(tree, nccl=(2, 21, 5)) if one.severity in ALARMS]
