# SPDX-License-Identifier: Apache-2.0
"""Everything a check may look at: files below a root, the environment, NVML, software versions. Nothing else."""

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
    """Versions of what is installed for this process; None where it is unknown or absent."""

    torch: str | None = None
    cuda: Version | None = None
    """The CUDA that torch was built for."""
    nccl: Version | None = None

    def __str__(self) -> str:
        return f"torch {self.torch}, CUDA {version_text(self.cuda)}, NCCL {version_text(self.nccl)}"


@dataclass(frozen=True)
class Machine:
    """One machine as one process sees it: every check is a function of this and of nothing else."""

    root: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    """The process's variables, and under them those of NCCL's configuration files."""
    topology: Topology = field(default_factory=lambda: Topology("nothing"))
    """What NCCL will see: the file that it is told to read, otherwise the hardware."""
    hardware: Topology = field(default_factory=lambda: Topology("nothing"))
    """What the kernel says, with the state of every PCIe link."""
    nvml: NvmlFacts = field(default_factory=lambda: NvmlFacts(missing="not asked: these are another machine's files"))
    software: Software = field(default_factory=Software)
    shm_bytes: int | None = None
    """Size of /dev/shm."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Error counters by path, as they were some time ago: a check compares them with what they are now."""

    def text(self, path: str) -> str | None:
        """Return a file without the white space around it; None when it is absent or unreadable."""
        return kernel_files.text(self.root / path)

    def number(self, path: str) -> int | None:
        """Return a file that holds one whole number, decimal or 0x; None when it does not."""
        return kernel_files.number(self.root / path)

    def listing(self, path: str) -> list[str]:
        """Return the sorted names in a directory; empty when it is absent or unreadable."""
        return kernel_files.names(self.root / path)

    def content(self, path: str) -> bytes:
        """Return a binary file, as much of it as this user may read; empty when there is nothing."""
        with suppress(OSError):
            return (self.root / path).read_bytes()
        return b""

    def exists(self, path: str) -> bool:
        """Whether there is such a file or directory, as far as this user can see."""
        return os.path.exists(self.root / path)

    def why_not(self, path: str) -> str:
        """Say for people why `text` or `listing` returned nothing."""
        return "empty, or not readable for this user" if self.exists(path) else "absent, or out of sight"

    def need(self, path: str) -> str:
        """Return a file without the white space around it; raises Unread when there is none, or nothing in it."""
        found = self.text(path)
        if not found:
            raise Unread(self.why_not(path), read=f"/{path}")
        return found

    def variable(self, name: str) -> str | None:
        """Return an environment variable; None when it is unset or empty, which NCCL takes for the same."""
        return self.environ.get(name) or None

    def status(self, name: str) -> str:
        """Return a line of /proc/self/status ("Seccomp"), "" when it is not there; raises Unread without the file."""
        return kernel_files.fields(self.need("proc/self/status")).get(name, "")

    def capable(self, bit: int) -> bool | None:
        """Whether this process has a Linux capability in effect; None when unknown."""
        try:
            return bool(int(self.status("CapEff"), 16) >> bit & 1)
        except (ValueError, Unread):
            return None

    def limit(self, name: str) -> float:
        """Return a soft limit of this process ("Max stack size"), inf for unlimited; raises Unread when unknown."""
        path = "proc/self/limits"
        found = re.search(rf"^{name} +(unlimited\b|\d+\b)", self.need(path), re.MULTILINE)
        if found is None:
            raise Unread(f"no line {name!r}", read=f"/{path}")
        return inf if found[1] == "unlimited" else int(found[1])

    @property
    def ranks_here(self) -> int:
        """Processes that share this machine: what the launcher says, else one for each GPU, at least 1."""
        return self._count("LOCAL_WORLD_SIZE") or max(1, len(self.hardware.gpus))

    @property
    def ranks(self) -> int:
        """Processes of the job, as the launcher says; 0 when it does not."""
        return self._count("WORLD_SIZE")

    def _count(self, name: str) -> int:
        text = self.environ.get(name, "")
        return int(text) if text.isdecimal() else 0

    @property
    def several_nodes(self) -> bool:
        """Whether the launcher says that the job spans machines."""
        return self.ranks > self.ranks_here

    @property
    def driver_gpus(self) -> tuple[NvmlGpu, ...]:
        """The GPUs as NVML has them; raises Unread where there are some that it does not tell about."""
        if self.nvml.missing is not None and self.hardware.gpus:
            raise Unread(self.nvml.missing)
        return self.nvml.gpus

    @property
    def virtual(self) -> bool:
        """Whether a hypervisor runs below, as far as anything says so."""
        if self.exists("sys/hypervisor/type"):
            return True
        product = " ".join(self.text(f"sys/class/dmi/id/{name}") or "" for name in ("sys_vendor", "product_name"))
        if any(word in product for word in HYPERVISORS):
            return "metal" not in product  # providers put their name on machines without a hypervisor too
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
    """Whether a version is older than `gate`; None when it is unknown."""
    return None if version is None else version < gate


def own_gpu(machine: Machine) -> tuple[int | None, str | None]:
    """Return this rank's GPU: its place in `machine.hardware.gpus`, and CUDA's name for it; None where unknown.

    A launcher that shows each rank one GPU means that one; otherwise a rank takes the one of its local number.
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
# What a check may need: where it is not there, and what is said then.
GPU: Need = (lambda machine: machine.hardware.gpus or machine.nvml.gpus, "no GPU")
SEVERAL_GPUS: Need = (
    lambda machine: max(len(machine.hardware.gpus), len(machine.nvml.gpus)) > 1,
    "fewer than two GPUs",
)
SEVERAL_NODES: Need = (lambda machine: machine.several_nodes, "no job on several nodes")
CONTAINER: Need = (lambda machine: machine.in_container, "no container")
REAL: Need = (lambda machine: not machine.virtual, "a virtual machine")
