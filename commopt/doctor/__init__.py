# SPDX-License-Identifier: Apache-2.0
"""Finds the causes of slow communication: checks of files, environment, driver and logs, each with its remedy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from commopt.doctor import ethernet, gpudirect, gpus, host, rdma, settings
from commopt.doctor.finding import Check, Finding, Severity, in_order, unread
from commopt.doctor.machine import Machine, Software, Version
from commopt.doctor.nvml import read_nvml
from topology.machine import discover
from topology.sysfs import read_sysfs

__all__ = ["CHECKS", "LIVE", "Finding", "Machine", "Severity", "diagnose", "observe"]

LIVE = Path("/")

# In the order of repair: failures, loss of the fast path, a slower fast path, details.
CHECKS: tuple[Check[Machine], ...] = (
    settings.versions,
    settings.topology_file,
    gpus.nvswitch,
    gpus.gpu_memory,
    gpus.xid,
    rdma.ib_port,
    ethernet.interface,
    rdma.transport,
    settings.settings,
    settings.nccl_conf,
    host.memlock,
    host.shm,
    host.open_files,
    gpus.gpu_clocks,
    gpus.peer_access,
    rdma.ib_hca,
    rdma.roce_gid,
    gpudirect.gdr_module,
    gpudirect.gdr_level,
    gpudirect.acs,
    gpudirect.iommu,
    gpudirect.pcie_link,
    ethernet.nic_speed,
    ethernet.mtu,
    ethernet.sockets,
    ethernet.tcp_buffers,
    host.cpu_affinity,
    host.cpu_governor,
    host.numa_balancing,
    host.remove_ipc,
    host.stack,
    host.numa_container,
    gpus.tenants,
    rdma.counters,
)


def observe(root: Path = LIVE, environ: Mapping[str, str] = os.environ) -> Machine:
    """Read the facts of a machine; NVML, installed versions and the size of /dev/shm only for the live one."""
    environ = settings.effective(root, environ)
    machine = Machine(root, environ, discover(root, environ), read_sysfs(root))
    if root == LIVE:
        shm_bytes = shutil.disk_usage("/dev/shm").total if os.path.ismount("/dev/shm") else None
        machine = replace(machine, nvml=read_nvml(), software=_software(), shm_bytes=shm_bytes)
    return replace(machine, counters=rdma.read_counters(machine))


def _software() -> Software:
    import torch  # imported here: a recorded machine is examined without it

    try:
        nccl = tuple(torch.cuda.nccl.version())
    except (AttributeError, RuntimeError):  # torch without CUDA
        nccl = ()
    return Software(torch.__version__, _version(torch.version.cuda), nccl or None)


def _version(text: str | None) -> Version | None:
    parts = (text or "").split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else None


def diagnose(machine: Machine) -> list[Finding]:
    """Run all checks. Return findings with errors first, and within one severity in the order of repair."""
    found: list[Finding] = []
    for check in CHECKS:
        try:
            found += check(machine)
        except (OSError, ValueError) as error:
            # A file of unknown content: one check less is better than none.
            found.append(check.named(unread(f"this check failed: {type(error).__name__}: {error}")))
    return in_order(found)
