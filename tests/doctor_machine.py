# SPDX-License-Identifier: Apache-2.0
"""Machines for the doctor: healthy ones, from which each test takes one thing away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from commopt.doctor import observe
from commopt.doctor.finding import FINE, Finding
from commopt.doctor.machine import Machine, Software
from commopt.doctor.nvml import NvmlFacts, NvmlGpu
from tests.machines import MELLANOX, Tree, server

SOFTWARE = Software("2.13.0", (12, 8), (2, 28, 9))
NVML = NvmlFacts(
    tuple(
        NvmlGpu(
            index,
            mig=False,
            tenants=0,
            fabric="completed",
            fabric_status=0,
            multi_node=False,
            nvlinks_up=18,
            slowed_by=0,
            rows_pending=False,
            rows_failed=False,
        )
        for index in range(2)
    ),
    cuda=(12, 8),
)
CPUS = {0: "0-31,64-95", 1: "32-63,96-127"}
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max stack size            8388608              unlimited            bytes
Max locked memory         unlimited            unlimited            bytes
Max open files            1048576              1048576              files"""
STATUS = """Name:\tpython
Seccomp:\t0
CapEff:\t0000000000000000
Cpus_allowed_list:\t0-127
Mems_allowed_list:\t0-1"""
ROUTES = """Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT
eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0"""


LINK_LOCAL = "fe80:0000:0000:0000:ba3f:d2ff:fe12:3456"


def basics(tree: Tree) -> Tree:
    """Everything outside PCI that a healthy machine has."""
    tree.write("proc/self/limits", LIMITS)
    tree.write("proc/self/status", STATUS)
    tree.write("proc/cmdline", "quiet")
    tree.write("proc/net/route", ROUTES)
    tree.write("dev/kmsg", "6,0,0,-;Linux version 6.8.0-45-generic")
    tree.write("proc/sys/kernel/osrelease", "6.8.0-45-generic")
    tree.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15")
    for name in ("rmem_max", "wmem_max"):
        tree.write(f"proc/sys/net/core/{name}", 67108864)
    for name in ("tcp_rmem", "tcp_wmem"):
        tree.write(f"proc/sys/net/ipv4/{name}", "4096\t131072\t67108864")
    tree.write("sys/devices/system/cpu/online", "0-127")
    tree.write("usr/lib64/libibverbs.so.1", "")
    return tree


def rdma_server(root: Path, gpus: int = 2) -> Tree:
    """As many InfiniBand adapters as GPUs, NVSwitches; GPUDirect RDMA by module and by DMA-BUF."""
    tree = basics(server(root, gpus))
    tree.write("sys/module/nvidia_peermem/version", "570.86.15")
    tree.write("dev/infiniband/uverbs0", "")
    for device in tree.root.glob("sys/bus/pci/devices/*"):
        # The whole configuration space, as root sees it, with access control off.
        (device / "config").write_bytes(config())
        numa = int((device / "numa_node").read_text())
        tree.write(f"sys/bus/pci/devices/{device.name}/local_cpulist", CPUS.get(numa, "0-127"))
    for port in tree.root.glob("sys/class/infiniband/*/ports/1"):
        for name in ("counters/symbol_error", "hw_counters/out_of_sequence"):
            tree.write(f"{port.relative_to(tree.root)}/{name}", 0)
    return tree


def roce_server(root: Path) -> Tree:
    """Two GPUs and two RoCE ports on one switch; the ports have an address of either version."""
    tree = basics(server(root, gpus=2, rdma=False, nvswitch=False))
    tree.write("sys/module/nvidia_peermem/version", "570.86.15")
    tree.write("dev/infiniband/uverbs0", "")
    for place in range(2):
        busid, port = f"0000:{0x1B + place:02x}:00.0", f"sys/class/infiniband/mlx5_{place}/ports/1"
        tree.rdma(f"mlx5_{place}", busid, "0000:17:00.0", numa=0, link_layer="Ethernet", rate="100 Gb/sec (4X EDR)")
        tree.ethernet(f"ens{place}", busid, mtu=9000)
        tree.write(f"{port}/gid_attrs/types/0", "IB/RoCE v1")
        tree.write(f"{port}/gid_attrs/types/1", "RoCE v2")
        tree.write(f"{port}/gid_attrs/ndevs/0", f"ens{place}")
        tree.write(f"{port}/gids/0", LINK_LOCAL)
        tree.write(f"{port}/gids/1", f"0000:0000:0000:0000:0000:ffff:0a00:000{1 + place}")
    return tree


def tcp_server(root: Path) -> Tree:
    """Two GPUs and one 100 Gb/s interface without RDMA."""
    tree = basics(Tree(root))
    tree.cpuinfo()
    tree.numa(0, "0-127")
    switch = tree.switch("0000:17:00.0", "pci0000:16", numa=0)
    for busid in ("0000:19:00.0", "0000:1a:00.0"):
        tree.gpu(busid, switch, numa=0)
    tree.ethernet("eth0", "0000:1b:00.0", switch, numa=0, mbps=100_000, mtu=9000, vendor=MELLANOX)
    for name in ("rx_crc_errors", "rx_missed_errors"):
        tree.write(f"sys/class/net/eth0/statistics/{name}", 0)
    tree.ethernet("lo")
    return tree


def config(control: int = 0, capability: int = 0x0D) -> bytes:
    """A PCIe configuration space with one extended capability in front of access control."""
    space = bytearray(512)
    space[256:260] = (0x0001 | 1 << 16 | 0x140 << 20).to_bytes(4, "little")
    space[0x140:0x144] = (capability | 1 << 16).to_bytes(4, "little")
    space[0x146:0x148] = control.to_bytes(2, "little")
    return bytes(space)


SOCKETS = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}


def look(
    tree: Tree,
    environ: Mapping[str, str] | None = None,
    nvml: NvmlFacts = NVML,
    software: Software = SOFTWARE,
    shm_bytes: int | None = 16 << 30,
) -> Machine:
    """The machine as `observe` sees it, with what a fixture tree cannot give: NVML, torch, the size of /dev/shm."""
    return replace(observe(tree.root, environ or {}), nvml=nvml, software=software, shm_bytes=shm_bytes)


def troubles(findings: list[Finding]) -> set[tuple[str, str]]:
    """Check and severity of everything that is not fine ("unread" for what could not be read)."""
    return {
        (finding.check, "unread" if finding.value is None else finding.severity.value)
        for finding in findings
        if finding.severity not in FINE
    }
