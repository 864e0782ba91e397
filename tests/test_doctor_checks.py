# SPDX-License-Identifier: Apache-2.0
"""Every check of the doctor, once on a healthy machine and once with its own trouble, which only it may report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commopt.doctor import diagnose
from commopt.doctor.finding import FINE, Finding, Severity
from commopt.doctor.machine import Machine, Software
from commopt.doctor.network import interfaces
from commopt.doctor.nvml import NvmlFacts
from tests.doctor_machine import (
    LIMITS,
    LINK_LOCAL,
    NVML,
    ROUTES,
    SOCKETS,
    SOFTWARE,
    STATUS,
    config,
    look,
    rdma_server,
    roce_server,
    tcp_server,
    troubles,
)
from tests.machines import Tree, plain

Change = Callable[[Tree], object]
Base = Callable[[Path], Tree]
FIRST_PORT = "sys/class/infiniband/mlx5_0/ports/1"
BRIDGE = "sys/bus/pci/devices/0000:17:00.0/config"
GPU, NIC = "sys/bus/pci/devices/0000:19:00.0", "sys/bus/pci/devices/0000:1b:00.0"
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15"


def write(path: str, text: object) -> Change:
    return lambda tree: tree.write(path, text)


def remove(path: str) -> Change:
    return lambda tree: tree.remove(path)


def limits(old: str, new: str) -> Change:
    assert old in LIMITS
    return write("proc/self/limits", LIMITS.replace(old, new))


def status(*pairs: tuple[str, str]) -> Change:
    text = STATUS
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return write("proc/self/status", text)


def every_port(name: str, text: str) -> Change:
    return lambda tree: [
        tree.write(f"{port.relative_to(tree.root)}/{name}", text)
        for port in tree.root.glob("sys/class/infiniband/*/ports/1")
    ]


def governor(name: str, driver: str) -> Change:
    folder = "sys/devices/system/cpu/cpu0/cpufreq"
    return both(write(f"{folder}/scaling_governor", name), write(f"{folder}/scaling_driver", driver))


def both(*changes: Change) -> Change:
    return lambda tree: [change(tree) for change in changes]


def second_interface(name: str = "eth1", mbps: int = 100_000, operstate: str = "up") -> Change:
    def change(tree: Tree) -> None:
        tree.ethernet(name, "0000:1c:00.0", "0000:17:00.0", numa=0, mbps=mbps, mtu=9000, operstate=operstate)
        tree.write("proc/net/route", f"{ROUTES}\n{name}\t0001A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0")

    return change


def gpus(**changes: object) -> NvmlFacts:
    """NVML's answers with something else about the first GPU."""
    return replace(NVML, gpus=(replace(NVML.gpus[0], **changes), *NVML.gpus[1:]))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """One trouble: what changes, who must report it how, and words of the value and the remedy."""

    check: str
    severity: str
    value: str
    remedy: str
    change: Change = lambda tree: None
    environ: Mapping[str, str] = field(default_factory=dict)
    base: Base = rdma_server
    nvml: NvmlFacts = NVML
    software: Software = SOFTWARE
    shm_bytes: int | None = 16 << 30
    also: frozenset[tuple[str, str]] = frozenset()
    """What the same trouble makes others report."""


NO_MODULE = remove("sys/module/nvidia_peermem/version")
CLOSED = write("proc/driver/nvidia/version", PROPRIETARY)
CONTAINER = write(".dockerenv", "")
CLASSED = {"NCCL_IB_TC": "106", "NCCL_IB_QPS_PER_CONNECTION": "4"}

# fmt: off
CASES = {
    # GPUDirect RDMA
    "no way to GPU memory": Case("gdr-module", "error", "open kernel driver", "modprobe nvidia-peermem",
        both(NO_MODULE, CLOSED)),
    "kernel too old for DMA-BUF": Case("gdr-module", "error", "Linux 5.12", "a kernel of Linux 5.12",
        both(NO_MODULE, write("proc/sys/kernel/osrelease", "5.4.0-1"))),
    "RDMA unused": Case("settings", "error", "Socket", "unset NCCL_NET", environ={"NCCL_NET": "Socket"} | SOCKETS,
        also=frozenset({("mtu", "warning")})),
    "no RDMA to use": Case("settings", "error", "IB", "unset NCCL_NET", environ={"NCCL_NET": "IB"} | SOCKETS,
        base=tcp_server),
    "strict ordering on AMD": Case("settings", "warning", "0", "unset",
        write("proc/cpuinfo", "vendor_id\t: AuthenticAMD\nflags\t\t: fpu"), {"NCCL_IB_PCI_RELAXED_ORDERING": "0"}),
    "class and paths of RoCE": Case("settings", "info", "unset", "NCCL_IB_TC=NUMBER", environ={"X": ""},
        base=roce_server),
    "implicit order too early": Case("settings", "warning", "1", "unset", environ={"NCCL_LAUNCH_ORDER_IMPLICIT": "1"},
        software=replace(SOFTWARE, cuda=(12, 2))),
    # Transport
    "no device files in the container": Case("transport", "error", "", "--device=/dev/infiniband",
        remove("dev/infiniband/uverbs0")),
    "no libibverbs": Case("transport", "warning", "usr/lib64", "libibverbs1", remove("usr/lib64/libibverbs.so.1")),
    # PCIe
    "ACS on": Case("acs", "warning", "0000:17:00.0", "setpci -s $b ECAP_ACS",
        lambda tree: (tree.root / BRIDGE).write_bytes(config(0x1D))),
    "configuration space hidden": Case("acs", "unread", "", "lspci",
        lambda tree: (tree.root / BRIDGE).write_bytes(config()[:64])),
    "IOMMU translates": Case("iommu", "error", "DMA-FQ", "iommu=pt",
        both(write("sys/class/iommu/dmar0/x", ""), write("sys/kernel/iommu_groups/7/type", "DMA-FQ"),
             write("sys/kernel/iommu_groups/7/devices/0000:19:00.0", ""))),
    "IOMMU of unknown type": Case("iommu", "unread", "", "dmesg", write("sys/class/iommu/dmar0/x", "")),
    "GPU at half width": Case("pcie-link", "warning", "x8 (gpu)", "reseat", write(f"{GPU}/current_link_width", 8)),
    "adapter at half speed": Case("pcie-link", "warning", "16 GT/s", "BIOS",
        write(f"{NIC}/current_link_speed", "16.0 GT/s PCIe")),
    "GPU link slow when idle": Case("pcie-link", "info", "2.5 GT/s", "nvidia-smi -q -d PCIE",
        write(f"{GPU}/current_link_speed", "2.5 GT/s PCIe")),
    "link unknown": Case("pcie-link", "unread", "", "LnkSta", write(f"{NIC}/current_link_speed", "Unknown")),
    # Limits
    "locked memory limited": Case("memlock", "error", "64 KiB", "limits.d",
        limits("Max locked memory         unlimited", "Max locked memory         65536")),
    "locked memory limited in a container": Case("memlock", "error", "8192 KiB", "--ulimit memlock=-1",
        both(CONTAINER, limits("Max locked memory         unlimited", "Max locked memory         8388608"))),
    "limits hidden": Case("memlock", "unread", "", "", remove("proc/self/limits"),
        also=frozenset({("stack", "unread"), ("open-files", "unread")})),
    "shared memory of Docker": Case("shm", "error", "64 MiB for 8 rank(s)", "--shm-size",
        CONTAINER, {"LOCAL_WORLD_SIZE": "8"}, shm_bytes=64 << 20),
    "shared memory scarce": Case("shm", "warning", "512 MiB", "remount", shm_bytes=512 << 20),
    "shared memory not mounted": Case("shm", "unread", "", "df", shm_bytes=None),
    "stack unlimited, old NCCL": Case("stack", "warning", "unlimited", "ulimit -s 8192",
        limits("8388608  ", "unlimited"), software=replace(SOFTWARE, nccl=(2, 27, 3))),
    "NUMA calls filtered": Case("numa-container", "warning", "NCCL 2.26.2", "SYS_NICE",
        both(CONTAINER, status(("Seccomp:\t0", "Seccomp:\t2"))), software=replace(SOFTWARE, nccl=(2, 26, 2))),
    "process status hidden": Case("numa-container", "unread", "", "", remove("proc/self/status"),
        also=frozenset({("cpu-affinity", "unread")})),
    # Ethernet
    "interface absent": Case("interface", "error", "eth7", "=eth0", environ={"NCCL_SOCKET_IFNAME": "eth7"} | SOCKETS,
        base=tcp_server),
    "interface down": Case("interface", "error", "eth1", "GLOO_SOCKET_IFNAME=eth0",
        second_interface(operstate="down"), {"GLOO_SOCKET_IFNAME": "eth1", **SOCKETS}, tcp_server),
    "gloo takes no prefixes": Case("interface", "error", "eth", "GLOO_SOCKET_IFNAME=eth0",
        environ={"GLOO_SOCKET_IFNAME": "eth", **SOCKETS}, base=tcp_server),
    "interface leads nowhere": Case("interface", "warning", "lo", "=eth0",
        write("proc/net/if_inet6", "00000000000000000000000000000001 01 80 00 80       lo"),
        {"NCCL_SOCKET_IFNAME": "lo", **SOCKETS}, tcp_server),
    "two interfaces, none named": Case("interface", "warning", "eth0, eth1", "export", second_interface(), SOCKETS,
        tcp_server),
    "name begins another": Case("interface", "warning", "eth0, eth01", "==eth0", second_interface("eth01"),
        {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0", **SOCKETS}, tcp_server),
    "no interface": Case("interface", "info", "no such", "ip route", write("proc/net/route", "Iface"),
        base=tcp_server, also=frozenset({("counters", "unread")})),
    "slower than its sibling": Case("nic-speed", "warning", "25 Gb/s", "ethtool eth1", second_interface(mbps=25_000),
        {"NCCL_SOCKET_IFNAME": "=eth1", "GLOO_SOCKET_IFNAME": "eth1", **SOCKETS}, tcp_server),
    "speed not stated": Case("nic-speed", "info", "not stated", "NCCL_TOPO_FILE",
        write("sys/class/net/eth0/speed", -1), base=tcp_server),
    "small frames": Case("mtu", "warning", "1500", "mtu 9000", write("sys/class/net/eth0/mtu", 1500), SOCKETS,
        tcp_server),
    "TCP buffers": Case("tcp-buffers", "warning", "net.core.rmem_max=212992", "net.core.rmem_max='67108864'",
        write("proc/sys/net/core/rmem_max", 212992), SOCKETS, tcp_server),
    "TCP buffers hidden": Case("tcp-buffers", "unread", "", "", remove("proc/sys/net/core/wmem_max"), SOCKETS,
        tcp_server),
    "one socket": Case("sockets", "warning", "unset, unset", "NTHREADS=4", base=tcp_server),
    "too many sockets": Case("sockets", "warning", "16, 8", "NTHREADS=4",
        environ={"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"}),
    # InfiniBand and RoCE
    "one port down": Case("ib-port", "warning", "1: DOWN", "ibstat mlx5_0",
        both(write(f"{FIRST_PORT}/state", "1: DOWN"), write(f"{FIRST_PORT}/phys_state", "3: Disabled"))),
    "no subnet manager": Case("ib-port", "error", "2: INIT", "sminfo", every_port("state", "2: INIT"),
        environ=SOCKETS, also=frozenset({("mtu", "warning")})),
    "one port slow": Case("ib-port", "warning", "mlx5_0:1 100 Gb/s", "NCCL_IB_HCA==mlx5_1:1",
        write(f"{FIRST_PORT}/rate", "100 Gb/sec (4X EDR)")),
    "adapter list fits nothing": Case("ib-hca", "error", "mlx4", "unset NCCL_IB_HCA",
        environ={"NCCL_IB_HCA": "mlx4"}),
    "adapter list leaves some out": Case("ib-hca", "warning", "=mlx5_0", "unset NCCL_IB_HCA",
        environ={"NCCL_IB_HCA": "=mlx5_0"}),
    "adapter list names an unknown one": Case("ib-hca", "warning", "mlx6_0", "ibstat",
        environ={"NCCL_IB_HCA": "mlx5,mlx6_0"}),
    "InfiniBand and Ethernet mixed": Case("ib-hca", "warning", "mlx5_0:1 Ethernet", "mlx5_1:1",
        both(write(f"{FIRST_PORT}/link_layer", "Ethernet"), write(f"{FIRST_PORT}/rate", "100 Gb/sec (4X EDR)")),
        also=frozenset({("roce-gid", "unread"), ("settings", "info")})),
    "adapter name begins another": Case("ib-hca", "warning", "mlx5_0:1, mlx5_01:1", "NCCL_IB_HCA==mlx5_0",
        lambda tree: tree.rdma("mlx5_01", "0000:1c:00.0"), {"NCCL_IB_HCA": "mlx5_0,mlx5_1"}),
    "GID index set": Case("roce-gid", "warning", "1", "unset", environ={"NCCL_IB_GID_INDEX": "1", **CLASSED},
        base=roce_server),
    "GID index of version 1": Case("roce-gid", "error", "0 is IB/RoCE v1", "unset",
        environ={"NCCL_IB_GID_INDEX": "0", **CLASSED}, base=roce_server),
    "no RoCE v2": Case("roce-gid", "error", "IB/RoCE v1", "ip address add ADDRESS/PREFIX dev ens0",
        remove(f"{FIRST_PORT}/gid_attrs/types/1"), base=roce_server),
    "small RoCE frames": Case("roce-gid", "warning", "1500", "ens0 mtu 9000", write("sys/class/net/ens0/mtu", 1500),
        base=roce_server),
    # GPUs
    "pinned to the other processor": Case("cpu-affinity", "warning", "32-63", "0-31,64-95",
        status(("0-127", "32-63")), {"LOCAL_RANK": "0"}),
    "pinned to one CPU": Case("cpu-affinity", "warning", "5 of 128", "cpus-per-task", status(("0-127", "5"))),
    "no peer access": Case("peer-access", "warning", "GPU0-GPU1: chipset", "topo -p2p",
        nvml=replace(NVML, no_peer_access=((0, 1, "chipset not supported"),))),
    "NVLinks down": Case("peer-access", "warning", "GPU0: 12 NVLinks", "nvlink -s", nvml=gpus(nvlinks_up=12)),
    "fabric not started": Case("nvswitch", "error", "GPU0: in progress", "nvidia-fabricmanager",
        nvml=gpus(fabric="in progress")),
    "fabric failed": Case("nvswitch", "error", "status 15", "nvidia-fabricmanager", nvml=gpus(fabric_status=15)),
    "no channel to other nodes": Case("nvswitch", "warning", "absent", "nvidia-imex", nvml=gpus(multi_node=True)),
    "no NVML": Case("nvswitch", "unread", "", "fabricmanager", nvml=NvmlFacts(missing="not installed"),
        also=frozenset({("peer-access", "unread"), ("tenants", "unread"), ("gpu-clocks", "unread")})),
    "MIG": Case("tenants", "info", "on for GPU0", "-mig 0", nvml=gpus(mig=True)),
    "another process": Case("tenants", "info", "GPU0: 2", "nvidia-smi", nvml=gpus(tenants=2)),
    # Health
    "GPU too hot": Case("gpu-clocks", "warning", "GPU0: power limit, too hot (slowed by hardware)", "nvidia-smi",
        nvml=gpus(slowed_by=0x44)),
    "GPU at its power limit": Case("gpu-clocks", "info", "GPU0", "power.limit", nvml=gpus(slowed_by=4)),
    "bad row not replaced": Case("gpu-memory", "error", "failed: GPU0", "replace",
        nvml=gpus(rows_failed=True, rows_pending=True)),
    "bad row waits for a reset": Case("gpu-memory", "warning", "GPU0", "gpu-reset", nvml=gpus(rows_pending=True)),
    "GPU fell off the bus": Case("xid", "warning", "79 on 0000:19:00 (1)", "xid-errors",
        write("dev/kmsg", "NVRM: Xid (PCI:0000:19:00): 79, pid=1\nNVRM: Xid (PCI:0000:19:00): 31, pid=2")),
    "a program's error": Case("xid", "info", "31 on 0000:19:00 (2)", "xid-errors",
        write("dev/kmsg", "4,1;NVRM: Xid (PCI:0000:19:00): 31\n" * 2)),
    "kernel log hidden": Case("xid", "unread", "", "dmesg", remove("dev/kmsg")),
    # The operating system
    "few open files": Case("open-files", "warning", "1024 for 64 ranks", "ulimit -n",
        limits("1048576              1048576", "1024                 1048576"),
        {"WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "8"}),
    "CPU clock low": Case("cpu-governor", "warning", "powersave (acpi-cpufreq)", "cpupower",
        governor("powersave", "acpi-cpufreq")),
    "CPU clock on demand": Case("cpu-governor", "info", "ondemand", "cpupower", governor("ondemand", "acpi-cpufreq")),
    "pages move": Case("numa-balancing", "info", "1", "numa_balancing=0", write("proc/sys/kernel/numa_balancing", 1)),
    "logging out frees memory": Case("remove-ipc", "info", "is not set", "RemoveIPC=no",
        write("etc/systemd/logind.conf", "[Login]\n#RemoveIPC=no")),
    # InfiniBand and RoCE, more
    "all ports at one lane": Case("ib-port", "warning", "mlx5_0:1 1X 100 Gb/s, mlx5_1:1 1X", "mlxlink",
        every_port("rate", "100 Gb/sec (1X NDR)")),
    "all ports at two lanes": Case("ib-port", "warning", "mlx5_0:1 2X 200 Gb/s", "mlxlink",
        every_port("rate", "200 Gb/sec (2X NDR)")),
    "only link-local addresses": Case("roce-gid", "error", "fe80::ba3f:d2ff:fe12:3456", "ip address add",
        write(f"{FIRST_PORT}/gids/1", LINK_LOCAL), base=roce_server),
    "IPv6 addresses only": Case("roce-gid", "error", "2001:db8::1", "NCCL_IB_ADDR_FAMILY=AF_INET6",
        write(f"{FIRST_PORT}/gids/1", "2001:0db8:0000:0000:0000:0000:0000:0001"), base=roce_server),
    # Leftovers, more
    # Settings and versions
    "settings in a file": Case("nccl-conf", "info", "NCCL_IB_HCA=mlx5", "/etc/nccl.conf",
        write("etc/nccl.conf", "# for all\nNCCL_IB_HCA = mlx5")),
    "leftover in the user's file": Case("settings", "warning", "Ring", "unset NCCL_ALGO",
        write("home/u/.nccl.conf", "NCCL_ALGO=Ring\nNCCL_DEBUG=INFO"), {"HOME": "/home/u", "NCCL_DEBUG": "WARN"},
        also=frozenset({("nccl-conf", "info")})),
    "topology file is none": Case("topology-file", "error", "topo.xml", "unset NCCL_TOPO_FILE",
        write("topo.xml", "<html/>"), {"NCCL_TOPO_FILE": "/topo.xml"}),
    "topology file absent": Case("topology-file", "error", "cannot be read", "unset NCCL_TOPO_FILE",
        environ={"NCCL_TOPO_FILE": "/none.xml"}),
    "torch without CUDA": Case("versions", "error", "CUDA unknown", "pip install torch", software=Software("2.13.0")),
    "driver too old": Case("versions", "error", "driver for CUDA 11.8", "update the driver",
        nvml=replace(NVML, cuda=(11, 8))),
    "versions unknown": Case("versions", "unread", "", "pip", software=Software()),
}
# fmt: on


# Check, a variable, and how bad its value is on a machine with InfiniBand; the remedy is always to unset it.
VARIABLES = """
settings NCCL_NET_GDR_LEVEL=LOC error
settings NCCL_NET_GDR_LEVEL=0 error
settings NCCL_NET_GDR_LEVEL=2 warning
settings NCCL_NET_GDR_LEVEL=PBX warning
settings NCCL_NET_GDR_LEVEL=PHB info
settings NCCL_IB_GDR_LEVEL=PXB warning
settings NCCL_DMABUF_ENABLE=0 warning
settings NCCL_IB_PCI_RELAXED_ORDERING=0 info
settings NCCL_P2P_DISABLE=1 error
settings NCCL_SHM_DISABLE=1 error
settings NCCL_P2P_LEVEL=LOC error
settings NCCL_P2P_LEVEL=NVL warning
settings NCCL_NET_GDR_READ=0 warning
settings NCCL_NET_GDR_C2C=0 warning
settings NCCL_IB_TIMEOUT=14 warning
settings NCCL_IB_TIMEOUT=22 info
settings NCCL_IB_ADAPTIVE_ROUTING=0 info
settings NCCL_IB_SPLIT_DATA_ON_QPS=1 info
settings NCCL_CHECK_MODE=debug_global warning
settings NCCL_P2P_DIRECT_DISABLE=1 info
settings NCCL_CUMEM_HOST_ENABLE=0 info
settings TORCH_NCCL_ASYNC_ERROR_HANDLING=0 warning
settings NCCL_CROSS_NIC=1 info
settings CUDA_LAUNCH_BLOCKING=1 error
settings TORCH_DISTRIBUTED_DEBUG=DETAIL error
settings NCCL_DEBUG=TRACE warning
settings NCCL_DEBUG=INFO info
settings NCCL_ALGO=Tree warning
settings CUDA_DEVICE_MAX_CONNECTIONS=1 warning
"""


def test_variables_that_hurt(tmp_path: Path) -> None:
    machine = look(rdma_server(tmp_path))
    for check, setting, severity in map(str.split, VARIABLES.strip().splitlines()):
        name, value = setting.split("=")
        found = [one for one in diagnose(replace(machine, environ={name: value})) if one.severity not in FINE]
        told = [(one.check, one.severity.value, one.read, one.value) for one in found]
        assert told == [(check, severity, name, value)]
        assert f"unset {name}" in (found[0].remedy or "")


HEALTHY: dict[Base, tuple[dict[str, str], set[tuple[str, str]]]] = {
    # What cannot be read there: the configuration space needs root, the RoCE ports have no counters.
    rdma_server: ({}, set()),
    roce_server: (CLASSED, {("acs", "unread"), ("counters", "unread")}),
    tcp_server: (SOCKETS, {("acs", "unread")}),
}


@pytest.mark.parametrize("base", HEALTHY, ids=["InfiniBand", "RoCE", "TCP"])
def test_a_healthy_machine_has_nothing_to_mend(base: Base, tmp_path: Path) -> None:
    environ, unread = HEALTHY[base]
    assert troubles(diagnose(look(base(tmp_path), environ))) == unread


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_trouble_is_reported_by_its_own_check_only(case: Case, tmp_path: Path) -> None:
    usual, unread = HEALTHY[case.base]
    tree = case.base(tmp_path)
    case.change(tree)
    environ = case.environ or (usual if case.check != "sockets" else {})
    found = diagnose(look(tree, environ, case.nvml, case.software, case.shm_bytes))
    assert troubles(found) - unread == {(case.check, case.severity)} | case.also
    mine = [finding for finding in found if finding.check == case.check]
    assert any(case.value in (finding.value or "") and case.remedy in (finding.remedy or "") for finding in mine), mine
    for finding in found:
        assert finding.read, finding
        assert finding.expected, finding
        assert finding.remedy or finding.severity not in (Severity.ERROR, Severity.WARNING), finding
        assert "\n" not in "".join((finding.read, finding.value or "", finding.expected, finding.remedy or ""))


def findings(machine: Machine, check: str) -> list[Finding]:
    return [finding for finding in diagnose(machine) if finding.check == check]


def test_the_adapter_of_another_processor_is_reported(tmp_path: Path) -> None:
    tree = rdma_server(tmp_path, gpus=4)
    for number in (2, 3):
        tree.write(f"sys/class/infiniband/mlx5_{number}/ports/1/state", "1: DOWN")
    machine = look(tree)
    (found,) = findings(machine, "gdr-level")
    assert (found.severity, found.value) == (Severity.WARNING, "GPU2-mlx5_0,mlx5_1 SYS; GPU3-mlx5_0,mlx5_1 SYS")


def test_counters_that_grow_are_errors_and_old_errors_are_a_note(tmp_path: Path) -> None:
    tree = rdma_server(tmp_path)
    tree.write(f"{FIRST_PORT}/counters/symbol_error", 7)
    machine = look(tree)
    (old,) = findings(machine, "counters")
    assert (old.severity, old.value) == (Severity.INFO, "mlx5_0 symbol_error 7")
    tree.write(f"{FIRST_PORT}/counters/symbol_error", 9)
    tree.write(f"{FIRST_PORT}/hw_counters/out_of_sequence", 100)
    grown = findings(machine, "counters")
    assert [finding.severity for finding in grown] == [Severity.ERROR, Severity.ERROR]
    assert ["+2" in (finding.value or "") for finding in grown] == [True, False]
    assert "PFC" not in (grown[1].remedy or "")
    assert "ibdiagnet" in (grown[1].remedy or "")


def test_lost_packets_of_roce_are_a_matter_of_its_traffic_class(tmp_path: Path) -> None:
    tree = roce_server(tmp_path)
    lost, marked = (f"{FIRST_PORT}/hw_counters/{name}" for name in ("out_of_sequence", "np_cnp_sent"))
    for path in (lost, marked):
        tree.write(path, 5)
    machine = look(tree, CLASSED)
    (old,) = findings(machine, "counters")
    assert old.value == "mlx5_0 out_of_sequence 5"
    for path in (lost, marked):
        tree.write(path, 7)
    error, note = findings(machine, "counters")
    assert (error.severity, note.severity) == (Severity.ERROR, Severity.INFO)
    assert "NCCL_IB_TC" in (error.remedy or "")
    assert "cma_roce" not in (error.remedy or "")


def test_a_slave_of_a_bond_that_is_down_is_reported(tmp_path: Path) -> None:
    tree = tcp_server(tmp_path)
    tree.ethernet("bond0", mbps=100_000, mtu=9000)
    tree.write("sys/class/net/bond0/bonding/slaves", "eth0 eth1")
    second_interface(operstate="down")(tree)
    tree.write("proc/net/route", ROUTES.replace("eth0", "bond0"))
    (found,) = findings(look(tree, SOCKETS), "nic-speed")
    assert (found.severity, found.read, found.value) == (Severity.WARNING, "/sys/class/net/eth1/speed", "down")


def test_routes_are_read_as_the_machine_writes_them(tmp_path: Path) -> None:
    tree = tcp_server(tmp_path)
    address, mask = (int.from_bytes(bytes(each), sys.byteorder) for each in ((192, 168, 1, 0), (255, 255, 255, 0)))
    line = f"eth0\t{address:08X}\t00000000\t0001\t0\t0\t0\t{mask:08X}\t0\t0\t0"
    tree.write("proc/net/route", f"Iface\n{line}\neth0\t00000000\t00000000\t0003\t0\t0\t0\t00000000\t0\t0\t0")
    (found,) = [each for each in interfaces(look(tree, SOCKETS)) if each.name == "eth0"]
    assert (found.networks, found.default_route) == ((IPv4Network("192.168.1.0/24"),), True)


def test_a_virtual_machine_is_not_blamed_for_what_its_host_decides(tmp_path: Path) -> None:
    tree = rdma_server(tmp_path)
    tree.write("sys/class/dmi/id/sys_vendor", "QEMU")
    (tree.root / BRIDGE).write_bytes(config(0x1D))
    tree.write("sys/class/iommu/dmar0/x", "")
    assert troubles(diagnose(look(tree))) == set()


def test_a_limit_on_locked_memory_does_not_hold_for_a_privileged_process(tmp_path: Path) -> None:
    tree = rdma_server(tmp_path)
    limits("Max locked memory         unlimited", "Max locked memory         65536")(tree)
    status(("CapEff:\t0000000000000000", "CapEff:\t0000000000004000"))(tree)
    assert troubles(diagnose(look(tree))) == set()


def test_a_small_machine_without_gpus_is_examined_without_noise(tmp_path: Path) -> None:
    found = diagnose(
        look(plain(tmp_path), nvml=NvmlFacts(missing="no driver"), software=Software("2.13.0"), shm_bytes=None)
    )
    assert not {finding.check for finding in found if finding.severity in (Severity.ERROR, Severity.WARNING)}
    # Nothing below proc/self is there: that is said, not passed over.
    unread = {finding.check for finding in found if finding.value is None}
    assert {"memlock", "shm", "stack", "cpu-affinity", "numa-container"} <= unread


def test_an_empty_root_says_what_is_missing(tmp_path: Path) -> None:
    found = diagnose(look(Tree(tmp_path), nvml=NvmlFacts(missing="no driver"), software=Software()))
    assert {finding.severity for finding in found} <= {Severity.INFO, *FINE}
    assert "interface" in {finding.check for finding in found if finding.value is None}


def test_errors_come_first_and_checks_keep_the_order_of_repair(tmp_path: Path) -> None:
    tree = rdma_server(tmp_path)
    NO_MODULE(tree)
    CLOSED(tree)
    environ = {"NCCL_IB_DISABLE": "1", "NCCL_ALGO": "Ring", "NCCL_P2P_DISABLE": "1"}
    found = [finding for finding in diagnose(look(tree, environ)) if finding.severity not in FINE]
    assert [finding.severity.rank for finding in found] == sorted(finding.severity.rank for finding in found)
    errors = [finding.check for finding in found if finding.severity is Severity.ERROR]
    assert errors == ["settings", "settings", "gdr-module"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """A machine with everything: InfiniBand, RoCE, a bond, an IOMMU."""
    tree = roce_server(tmp_path_factory.mktemp("wide"))
    tree.rdma("mlx5_2", "0000:1d:00.0", "0000:17:00.0", numa=0)
    tree.ethernet("bond0", mbps=100_000)
    tree.write("sys/class/net/bond0/bonding/slaves", "eth0 ens0")
    tree.write("sys/class/iommu/dmar0/x", "")
    tree.write("sys/kernel/iommu_groups/7/type", "DMA")
    tree.write("proc/net/if_inet6", "fe80 01 40 20 80 eth0")
    tree.write("etc/nccl.conf", "NCCL_IB_HCA=mlx5")
    return tree


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_file_is_so_broken_that_a_check_fails(wide: Tree, data: st.DataObject) -> None:
    files = sorted(path for path in wide.root.rglob("*") if path.is_file() and not path.is_symlink())
    junk = st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            [b"", b"-1", b"99999999999999999999", b"Unknown", b"1-99999999", b"=, ,^", b"a:b:c", b"\xff\xfe"]
        ),
    )
    broken = data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=6, unique=True))
    before = {path: path.read_bytes() for path in broken}
    try:
        for path in broken:
            path.write_bytes(data.draw(junk))
        found = diagnose(look(wide, {"LOCAL_RANK": "0", "NCCL_IB_GID_INDEX": "1"}))
    finally:
        for path, content in before.items():
            path.write_bytes(content)
    assert not [finding for finding in found if finding.expected.startswith("this check failed")]
