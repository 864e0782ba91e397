# SPDX-License-Identifier: Apache-2.0
"""Model of one machine: frozen facts from a reader, None if unknown.

Readers (xml_reader, matrix, machine) build a `Topology`, the only input of queries, text, picture and the doctor.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Literal


class TopologyError(ValueError):
    """A file or text that is not a topology, or too damaged to be read. The message is one line."""


def shown(value: object, limit: int = 60) -> str:
    """Return `value` quoted for a message: one printable line of about `limit` characters at most."""
    text = str(value)
    return ascii(text if len(text) <= limit else text[: limit - 3] + "...")


class Distance(Enum):
    """Distance between two devices, in the terms of NCCL and nvidia-smi, nearest first."""

    NVL = "NVL"  # NVLink, directly or through switches
    PIX = "PIX"  # at most one PCIe switch
    PXB = "PXB"  # several PCIe switches, no host bridge
    PHB = "PHB"  # the CPU's PCIe host bridge (in NCCL's XML: a CPU, which may be NODE)
    NODE = "NODE"  # two host bridges of one NUMA node
    SYS = "SYS"  # the link between NUMA nodes

    @property
    def rank(self) -> int:
        """0 for the nearest distance, for comparisons."""
        return list(Distance).index(self)


@dataclass(frozen=True)
class PciLink:
    """The present, or the best possible, state of a PCIe link."""

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
    """A node of the PCIe tree: a switch, or a device in a slot."""

    busid: str
    """Lower case "dddd:bb:dd.f"; longer domains unchanged."""
    kind: Literal["switch", "gpu", "nic", "nvswitch", "other"]
    parent: str | None
    """Bus id of the switch above; None directly below a CPU."""
    cpu: int | None
    """Index into Topology.cpus."""
    pci_class: int | None = None
    link: PciLink = PciLink(None, None)
    """The present state of the link to the parent."""
    link_max: PciLink = PciLink(None, None)


@dataclass(frozen=True)
class Cpu:
    """A NUMA node with the CPUs and devices near it."""

    numa: int | None
    arch: str | None = None
    """In NCCL's form: "x86_64", "arm64", "ppc64"."""
    vendor: str | None = None
    """"GenuineIntel", "AuthenticAMD", ..."""
    affinity: tuple[int, ...] | None = None
    """CPU numbers."""


@dataclass(frozen=True)
class Gpu:
    """A GPU. Others refer to it by its index in Topology.gpus."""

    index: int
    """CUDA's number (NCCL's dev), or the GPU's place in the order of bus ids if the file has no numbers."""
    busid: str | None
    numa: int | None
    """None also for a list, whose text is in `affinity`."""
    sm: int | None = None
    """Compute capability, such as 90."""
    name: str | None = None
    uuid: str | None = None
    affinity: str | None = None
    """CPUs near it, in the source's form."""


@dataclass(frozen=True)
class Nic:
    """One port of a network card."""

    name: str
    """"mlx5_0", "eth0"; the bus id if the source has no name."""
    busid: str | None
    port: int | None
    numa: int | None
    speed_gbps: float | None
    link_layer: Literal["InfiniBand", "Ethernet"] | None = None
    gdr: bool | None = None
    """Whether it supports GPUDirect RDMA."""
    virtual: bool = False
    """No hardware behind it (docker0, veth, lo): never a rail."""


@dataclass(frozen=True)
class NvLinks:
    """The NVLinks from one GPU to one peer."""

    gpu: int
    """Index in Topology.gpus."""
    peer: int | None
    """Index in Topology.gpus; None for an NVSwitch or another kind of device."""
    count: int
    target: str | None = None
    """Bus id of the other end, in the source's form."""
    kind: Literal["gpu", "switch", "cpu", "unknown"] = "unknown"
    """"gpu" is a direct link; "unknown" with a peer: direct or through NVSwitches."""


@dataclass(frozen=True)
class Topology:
    """One machine."""

    source: str
    """Readable name: "NCCL XML topo.xml", "nvidia-smi topo -m", "this machine"."""
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    cpus: tuple[Cpu, ...] = ()
    pci: tuple[PciDevice, ...] = ()
    """Parents before children."""
    nvlinks: tuple[NvLinks, ...] | None = None
    """None if unknown; () if the source states that there are none."""
    stated: tuple[tuple[str, str, Distance], ...] | None = None
    """Distances given by the source, by label ("GPU0", "NIC0"). If present, they are not derived from the tree."""
    warnings: tuple[str, ...] = ()
    """Missing, damaged or ambiguous facts, a sentence each."""


_BUSID = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-9a-f]))?", re.ASCII)


def normalise_busid(text: str) -> str | None:
    """Return "dddd:bb:dd.f" in lower case; None if `text` is not a bus id.

    NVML's eight digits of domain become four where they fit ("00000000:0F:00.0"), lspci's missing domain is 0000, and
    a missing function is 0. Domains that need more digits keep them ("fffffff:ff:ff.0").
    """
    match = _BUSID.fullmatch(text.strip().lower())
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus:0>2}:{device:0>2}.{function or '0'}"


# GPUs of these vendors count; 0 and 0xffff stand for "any" in templates. Others in class 0x03 are a server's VGA chip.
_GPU_VENDORS = (None, 0x10DE, 0x1002, 0x0000, 0xFFFF)


def device_kind(
    pci_class: int | None, vendor: int | None, inside: Collection[str]
) -> Literal["switch", "gpu", "nic", "nvswitch", "other"]:
    """Return the kind of a device, from the tags inside its element or else from its 24-bit class."""
    if "pci" in inside:
        return "switch"
    if "gpu" in inside:
        return "gpu"
    if "nic" in inside:
        return "nic"
    if pci_class is None:
        return "other"
    if pci_class >> 16 == 0x03:
        return "gpu" if vendor in _GPU_VENDORS else "other"
    if pci_class >> 16 == 0x02:
        return "nic"
    if pci_class == 0x068000:
        return "nvswitch"
    return "switch" if pci_class == 0x060400 else "other"


def link_layer(pci_class: int | None) -> Literal["InfiniBand"] | None:
    """Return "InfiniBand" for class 0x0207; class 0x0200 is Ethernet, but also EFA and others, so None."""
    return "InfiniBand" if pci_class is not None and pci_class >> 8 == 0x0207 else None


def nvlink_target(target_class: int | None) -> Literal["gpu", "switch", "cpu", "unknown"]:
    """Return the kind of device at the other end of an NVLink, from its PCI class."""
    if target_class == 0x068001:
        return "cpu"  # IBM's bridge into a POWER9
    if target_class == 0x068000:
        return "switch"
    return "gpu" if target_class is not None and target_class >> 16 == 0x03 else "unknown"
