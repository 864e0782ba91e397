"""Is this a virtual machine, a container, a process with privileges? Several checks read the same value differently."""

from __future__ import annotations

import re

from commopt.doctor.facts.machine import Machine
from topology.kernel_files import fields

IPC_LOCK = 14
SYS_NICE = 23


def virtual_machine(machine: Machine) -> bool | None:
    """Whether a hypervisor runs below; None when nothing says so or denies it."""
    if machine.exists("sys/hypervisor/type"):
        return True
    product = " ".join(machine.text(f"sys/class/dmi/id/{name}") or "" for name in ("sys_vendor", "product_name"))
    if any(word in product for word in ("QEMU", "KVM", "VMware", "Virtual", "Xen", "Amazon EC2", "Google Compute")):
        # Cloud providers put their name on machines without a hypervisor too; those say so.
        return "metal" not in product
    cpuinfo = machine.text("proc/cpuinfo")
    if cpuinfo is None or "flags" not in cpuinfo:
        return None
    return " hypervisor" in cpuinfo


def coherent(machine: Machine) -> bool:
    """Whether the GPUs share memory with the CPU over NVLink-C2C: GH200, GB200, GB300, GB10."""
    return any(re.search(r"\bG[HB]\d", gpu.name or "") for gpu in machine.hardware.gpus)


def arm(machine: Machine) -> bool:
    """Whether the processor is an ARM, which has an IOMMU with names of its own."""
    return any(cpu.arch == "arm64" for cpu in machine.hardware.cpus)


def container(machine: Machine) -> bool:
    """Whether this process is inside Docker, Podman or a Kubernetes pod."""
    if (
        machine.exists(".dockerenv")
        or machine.exists("run/.containerenv")
        or machine.variable("KUBERNETES_SERVICE_HOST")
    ):
        return True
    return any(word in (machine.text("proc/1/cgroup") or "") for word in ("docker", "kubepods", "containerd"))


def status(machine: Machine, name: str) -> str | None:
    """Return a line of /proc/self/status ("Mems_allowed_list"), None when it is not there."""
    return fields(machine.text("proc/self/status")).get(name)


def capable(machine: Machine, bit: int) -> bool | None:
    """Whether this process has a Linux capability in effect; None when unknown."""
    try:
        return bool(int(status(machine, "CapEff") or "", 16) >> bit & 1)
    except ValueError:
        return None


def limit(machine: Machine, name: str) -> int | None:
    """Return a soft limit of this process ("Max stack size") in bytes, -1 for unlimited, None when unknown."""
    for line in (machine.text("proc/self/limits") or "").splitlines():
        if line.startswith(name):
            soft = line[len(name) :].split()[:1]
            if soft == ["unlimited"]:
                return -1
            return int(soft[0]) if soft and soft[0].isdecimal() else None
    return None
