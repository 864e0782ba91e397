# SPDX-License-Identifier: Apache-2.0
"""All inputs of the checks: files below a root, the environment, NVML, software versions."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from commopt.doctor.finding import Unread
from commopt.doctor.nvml import NvmlFacts, NvmlGpu
from topology import kernel_files
from topology.model import Topology

Version = tuple[int, ...]

IPC_LOCK, SYS_NICE = 14, 23
HYPERVISORS = ("QEMU", "KVM", "VMware", "Virtual", "Xen", "Amazon EC2", "Google Compute")


@dataclass(frozen=True)
class Software:
    """Installed versions for this process; None if unknown or absent."""

    torch: str | None = None
    cuda: Version | None = None
    """The CUDA version that torch was built for."""
    nccl: Version | None = None

    def __str__(self) -> str:
        return f"torch {self.torch}, CUDA {version_text(self.cuda)}, NCCL {version_text(self.nccl)}"


@dataclass(frozen=True)
class Machine:
    """One machine as one process sees it; the only input of a check."""

    root: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    """The process's variables, which override those of NCCL's configuration files."""
    topology: Topology = field(default_factory=lambda: Topology("nothing"))
    """The topology that NCCL will see: that of its topology file, otherwise the hardware."""
    hardware: Topology = field(default_factory=lambda: Topology("nothing"))
    """The topology of the kernel, with the state of every PCIe link."""
    nvml: NvmlFacts = field(default_factory=lambda: NvmlFacts(missing="not asked: these are another machine's files"))
    software: Software = field(default_factory=Software)
    shm_bytes: int | None = None
    """Size of /dev/shm."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Earlier error counters by path, which a check compares with the present ones."""

    def text(self, path: str) -> str | None:
        """Return the content of a file without surrounding white space; None if it is absent or unreadable."""
        return kernel_files.text(self.root / path)

    def number(self, path: str) -> int | None:
        """Return the whole number in a file, decimal or 0x; None if there is none."""
        return kernel_files.number(self.root / path)

    def listing(self, path: str) -> list[str]:
        """Return the sorted names in a directory; empty if it is absent or unreadable."""
        return kernel_files.names(self.root / path)

    def content(self, path: str) -> bytes:
        """Return the readable part of a binary file; empty if there is none."""
        with suppress(OSError):
            return (self.root / path).read_bytes()
        return b""

    def exists(self, path: str) -> bool:
        """Return whether this user can see such a file or directory."""
        return os.path.exists(self.root / path)

    def unread_reason(self, path: str) -> str:
        """Return a text that explains why `text` or `listing` returned nothing."""
        return "empty, or not readable for this user" if self.exists(path) else "absent, or out of sight"

    def need(self, path: str) -> str:
        """Return the content of a file without surrounding white space. Raises Unread if it is absent or empty."""
        found = self.text(path)
        if not found:
            raise Unread(self.unread_reason(path), read=f"/{path}")
        return found

    def variable(self, name: str) -> str | None:
        """Return an environment variable; None if it is unset or empty, which is the same for NCCL."""
        return self.environ.get(name) or None

    def status(self, name: str) -> str:
        """Return a line of /proc/self/status ("Seccomp"), or "" if it is missing. Raises Unread without the file."""
        return kernel_files.fields(self.need("proc/self/status")).get(name, "")

    def capable(self, bit: int) -> bool | None:
        """Return whether this process has an effective Linux capability; None if unknown."""
        try:
            return bool(int(self.status("CapEff"), 16) >> bit & 1)
        except (ValueError, Unread):
            return None

    def limit(self, name: str) -> float:
        """Return a soft limit of this process ("Max stack size"), inf for unlimited. Raises Unread if unknown."""
        path = "proc/self/limits"
        found = re.search(rf"^{name} +(unlimited\b|\d+\b)", self.need(path), re.MULTILINE)
        if found is None:
            raise Unread(f"no line {name!r}", read=f"/{path}")
        return inf if found[1] == "unlimited" else int(found[1])

    @property
    def ranks_here(self) -> int:
        """Number of processes on this machine: from the launcher, else one for each GPU, at least 1."""
        return self._count("LOCAL_WORLD_SIZE") or max(1, len(self.hardware.gpus))

    @property
    def ranks(self) -> int:
        """Number of processes of the job, from the launcher; 0 if unknown."""
        return self._count("WORLD_SIZE")

    def _count(self, name: str) -> int:
        text = self.environ.get(name, "")
        return int(text) if text.isdecimal() else 0

    @property
    def several_nodes(self) -> bool:
        """Whether the job spans machines, according to the launcher."""
        return self.ranks > self.ranks_here

    @property
    def driver_gpus(self) -> tuple[NvmlGpu, ...]:
        """The GPUs of NVML. Raises Unread if there are GPUs but NVML does not answer."""
        if self.nvml.missing is not None and self.hardware.gpus:
            raise Unread(self.nvml.missing)
        return self.nvml.gpus

    @property
    def virtual(self) -> bool:
        """Whether the machine shows signs of a hypervisor."""
        if self.exists("sys/hypervisor/type"):
            return True
        product = " ".join(self.text(f"sys/class/dmi/id/{name}") or "" for name in ("sys_vendor", "product_name"))
        if any(word in product for word in HYPERVISORS):
            return "metal" not in product  # providers name machines without a hypervisor too
        return " hypervisor" in (self.text("proc/cpuinfo") or "")

    @property
    def in_container(self) -> bool:
        """Whether this process is inside Docker, Podman or a Kubernetes pod."""
        if self.exists(".dockerenv") or self.exists("run/.containerenv") or self.variable("KUBERNETES_SERVICE_HOST"):
            return True
        return any(word in (self.text("proc/1/cgroup") or "") for word in ("docker", "kubepods", "containerd"))

    @property
    def coherent(self) -> bool:
        """Whether the GPUs share memory with the CPU over NVLink-C2C: GH200, GB200, GB300, GB10."""
        return any(re.search(r"\bG[HB]\d", gpu.name or "") for gpu in self.hardware.gpus)


def version_text(version: Version | None) -> str:
    """Return "2.28.9", or "unknown"."""
    return ".".join(map(str, version)) if version else "unknown"


def before(version: Version | None, gate: Version) -> bool | None:
    """Return whether a version is older than `gate`; None if it is unknown."""
    return None if version is None else version < gate


def own_gpu(machine: Machine) -> tuple[int | None, str | None]:
    """Return this rank's GPU: its index in `machine.hardware.gpus`, and CUDA's name; None if unknown.

    If the launcher shows each rank one GPU, that one; otherwise the GPU of the local rank.
    """
    shown = machine.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(machine.hardware.gpus)))))
    names = [item.strip() for item in shown.split(",") if item.strip()]
    rank = machine.environ.get("LOCAL_RANK", "")
    if not rank.isdecimal() or not names or (len(names) > 1 and int(rank) >= len(names)):
        return None, None
    name = names[int(rank)] if len(names) > 1 else names[0]
    for place, gpu in enumerate(machine.hardware.gpus):
        if name == str(place) or (gpu.uuid is not None and name.startswith("GPU-") and gpu.uuid.startswith(name)):
            return place, name
    return None, name


Need = tuple[Callable[[Machine], object], str]
# Conditions for checks, each with the text for its absence.
GPU: Need = (lambda machine: machine.hardware.gpus or machine.nvml.gpus, "no GPU")
SEVERAL_GPUS: Need = (
    lambda machine: max(len(machine.hardware.gpus), len(machine.nvml.gpus)) > 1,
    "fewer than two GPUs",
)
SEVERAL_NODES: Need = (lambda machine: machine.several_nodes, "no job on several nodes")
CONTAINER: Need = (lambda machine: machine.in_container, "no container")
REAL: Need = (lambda machine: not machine.virtual, "a virtual machine")
