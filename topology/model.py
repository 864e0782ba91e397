"""What one machine is made of: frozen facts as a reader found them, None where it could not know.

Readers (nccl_xml, nvidia_smi, live) build a `Topology`; everything that asks about one (paths, nvlink, rings, the
writer, tree, picture, the doctor) takes nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal


class Distance(Enum):
    """How far two devices are apart, in NCCL's and nvidia-smi's words, nearest first."""

    NVL = "NVL"  # NVLink, directly or through switches
    PIX = "PIX"  # at most one PCIe switch
    PXB = "PXB"  # several PCIe switches, no host bridge
    PHB = "PHB"  # the CPU's PCIe host bridge (in NCCL's XML: a CPU, which may be NODE)
    NODE = "NODE"  # two host bridges of one NUMA node
    SYS = "SYS"  # the link between NUMA nodes

    @property
    def rank(self) -> int:
        """0 for the nearest: distances compare by it."""
        return list(Distance).index(self)


@dataclass(frozen=True)
class PciLink:
    """A PCIe link as it runs, or at its best."""

    gts: float | None
    """GT/s per lane: 2.5, 5, 8, 16, 32, 64."""
    width: int | None
    """Lanes."""

    @property
    def gbps(self) -> float | None:
        """Gb/s in one direction after line coding (8b/10b up to 5 GT/s, 128b/130b after), None when unknown."""
        if self.gts is None or self.width is None:
            return None
        return self.gts * self.width * (0.8 if self.gts <= 5 else 128 / 130)


@dataclass(frozen=True)
class PciDevice:
    """A place in the PCIe tree: a switch, or what sits in a slot."""

    busid: str
    """Lower case "dddd:bb:dd.f"; longer domains as they are."""
    kind: Literal["switch", "gpu", "nic", "nvswitch", "other"]
    parent: str | None
    """Bus id of the switch above; None directly below a CPU."""
    cpu: int | None
    """Index into Topology.cpus."""
    pci_class: int | None = None
    vendor: int | None = None
    device: int | None = None
    link: PciLink = PciLink(None, None)
    """Towards the parent, as it runs."""
    link_max: PciLink = PciLink(None, None)


@dataclass(frozen=True)
class Cpu:
    """A NUMA node with the CPUs and devices that are near to it."""

    numa: int | None
    arch: str | None = None
    """As NCCL writes it: "x86_64", "arm64", "ppc64"."""
    vendor: str | None = None
    """"GenuineIntel", "AuthenticAMD", ..."""
    affinity: tuple[int, ...] | None = None
    """CPU numbers."""
    host_hash: int | None = None
    family: int | None = None
    model: int | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU; its place in Topology.gpus is how others refer to it."""

    index: int
    """CUDA's (NCCL's dev), or its place among the GPUs of the file, by bus id, where the file has no numbers."""
    busid: str | None
    numa: int | None
    """None also where it is given as a list; then `affinity` has the text."""
    sm: int | None = None
    """Compute capability as in 90."""
    gdr: bool | None = None
    """Whether GPUDirect RDMA works on its side."""
    rank: int | None = None
    name: str | None = None
    uuid: str | None = None
    affinity: str | None = None
    """CPUs near to it, as the source writes them."""


@dataclass(frozen=True)
class Nic:
    """One port of a network card."""

    name: str
    """"mlx5_0", "eth0"; the bus id where the source names none."""
    busid: str | None
    port: int | None
    numa: int | None
    speed_gbps: float | None
    link_layer: Literal["InfiniBand", "Ethernet"] | None = None
    gdr: bool | None = None
    guid: int | None = None
    virtual: bool = False
    """No hardware behind it (docker0, veth, lo): never a rail."""
    index: int | None = None
    """NCCL's dev."""


@dataclass(frozen=True)
class NvLinks:
    """Bundled NVLinks that leave one GPU for one peer."""

    gpu: int
    """Place in Topology.gpus."""
    peer: int | None
    """Place in Topology.gpus; None for an NVSwitch, or for another kind of device."""
    count: int
    target: str | None = None
    """Bus id at the other end, as the source has it."""
    kind: Literal["gpu", "switch", "cpu", "unknown"] = "unknown"
    """"gpu" is a direct link; "unknown" with a peer: direct or through NVSwitches."""


@dataclass(frozen=True)
class Topology:
    """One machine."""

    source: str
    """For people: "NCCL XML topo.xml", "nvidia-smi topo -m", "this machine"."""
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    cpus: tuple[Cpu, ...] = ()
    pci: tuple[PciDevice, ...] = ()
    """Parents before children."""
    nvlinks: tuple[NvLinks, ...] | None = None
    """None: the source does not tell (() means: it tells that there are none)."""
    stated: tuple[tuple[str, str, Distance], ...] | None = None
    """Distances that the source states itself, by label ("GPU0", "NIC0"): then no path is worked out from the tree."""
    warnings: tuple[str, ...] = ()
    """What is missing, damaged or ambiguous, a sentence each."""
