"""Everything a check may look at: files below a root, the environment, NVML, software versions. Nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from commopt.doctor.facts.nvml import NvmlFacts
from topology import kernel_files
from topology.model import Topology

Version = tuple[int, ...]


@dataclass(frozen=True)
class Software:
    """Versions of what is installed for this process; None where it is unknown or absent."""

    torch: str | None = None
    cuda: Version | None = None
    """The CUDA that torch was built for."""
    nccl: Version | None = None


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
    nvml: NvmlFacts = field(default_factory=lambda: NvmlFacts(missing="not asked"))
    software: Software = field(default_factory=Software)
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
        try:
            return (self.root / path).read_bytes()
        except OSError:
            return b""

    def exists(self, path: str) -> bool:
        """Whether there is such a file or directory, as far as this user can see."""
        try:
            return (self.root / path).exists()
        except OSError:
            return False

    def why_not(self, path: str) -> str:
        """Say for people why `text` or `listing` returned nothing."""
        try:
            (self.root / path).stat()
        except PermissionError:
            return "not readable for this user"
        except OSError:
            return "absent"
        return "empty, or not readable for this user"

    def variable(self, name: str) -> str | None:
        """Return an environment variable; None when it is unset or empty, which NCCL takes for the same."""
        return self.environ.get(name) or None

    @property
    def ranks_here(self) -> int:
        """Processes that share this machine: what the launcher says, else one for each GPU, at least 1."""
        declared = self.environ.get("LOCAL_WORLD_SIZE", "")
        return int(declared) if declared.isdecimal() and int(declared) > 0 else max(1, len(self.hardware.gpus))

    @property
    def several_nodes(self) -> bool:
        """Whether the launcher says that the job spans machines."""
        world = self.environ.get("WORLD_SIZE", "")
        return world.isdecimal() and int(world) > self.ranks_here


def version_text(version: Version | None) -> str:
    """Return "2.28.9", or "unknown"."""
    return ".".join(map(str, version)) if version else "unknown"
