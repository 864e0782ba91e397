"""A topology as the XML that NCCL takes from NCCL_TOPO_FILE.

NCCL's own small parser sets the style: no declaration, single blanks between attributes, bus ids in lower case. What is
unknown is left out: NCCL then asks the running system.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from xml.sax.saxutils import quoteattr

from topology.model import Cpu, Gpu, Nic, NvLinks, PciDevice, Topology, TopologyError, device_kind

# NCCL reads at most 255 characters of a value: 28 words of 32 CPUs with their commas.
_MASK_WORDS = 28
_UNKNOWN_SWITCH = "fffffff:ff:ff.0"  # what NCCL writes for NVSwitches that a virtual machine hides


def write_nccl_xml(topology: Topology) -> str:
    """Return the XML of `topology`; reading it again gives the same facts, without warnings and source.

    Raises TopologyError when a GPU has no place in a PCI tree, as in a matrix.
    """
    return "\n".join(_Writer(topology).system()) + "\n"


class _Writer:
    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.gpus: dict[str, list[int]] = defaultdict(list)
        self.nics: dict[str, list[int]] = defaultdict(list)
        self.devices = {device.busid: device for device in topology.pci}
        for place, gpu in enumerate(topology.gpus):
            if gpu.busid is None or gpu.busid not in self.devices:
                raise TopologyError(
                    f"{topology.source}: GPU {gpu.index} (bus id {gpu.busid}) has no place in a PCI tree, which NCCL "
                    "needs; take an NCCL XML file or the live machine as the source"
                )
            self.gpus[gpu.busid].append(place)
        for place, nic in enumerate(topology.nics):
            if nic.busid in self.devices:
                self.nics[nic.busid].append(place)
        self.below: dict[str | None, list[PciDevice]] = defaultdict(list)
        for device in topology.pci:
            self.below[device.parent].append(device)
        self.lists_gpus = topology.nvlinks is not None or any(
            fact is not None for gpu in topology.gpus for fact in (gpu.sm, gpu.gdr, gpu.rank)
        )
        self.lists_nets = not self.is_template_of_nics()
        fused = [nic.name.split("+") for nic in topology.nics if nic.virtual and "+" in nic.name]
        self.fused = {name for names in fused for name in names}

    def is_template_of_nics(self) -> bool:
        """Whether classes of PCI devices alone say all that is known about the network ports."""
        by_class = [d.busid for d in self.topology.pci if device_kind(d.pci_class, d.vendor, ()) == "nic"]
        nameless = [Nic(busid, busid, None, None, None) for busid in by_class]
        return [replace(nic, numa=None, link_layer=None) for nic in self.topology.nics] == nameless

    def system(self) -> list[str]:
        content: list[str] = []
        for place, cpu in enumerate(self.topology.cpus):
            content += self.cpu(cpu, place)
        homeless_ports = bool(self.topology.nics) and not self.topology.cpus
        if homeless_ports or any(device.cpu is None for device in self.below[None]):
            content += self.cpu(Cpu(numa=None), None)
        return _element("system", ' version="1"', content)

    def cpu(self, cpu: Cpu, place: int | None) -> list[str]:
        mask, offset = (None, None) if cpu.affinity is None else _mask(cpu.affinity)
        attributes = _attributes(
            host_hash=_hex(cpu.host_hash),
            numaid=-1 if cpu.numa is None else cpu.numa,
            affinity=mask,
            affinity_offset=offset,
            arch=cpu.arch,
            vendor=cpu.vendor,
            familyid=cpu.family,
            modelid=cpu.model,
        )
        loose = self.loose_nics(place)
        content: list[str] = []
        for device in self.below[None]:
            if device.cpu == place:
                first = min(self.nic_places(device), default=-1)
                while loose and loose[0] < first:  # ports keep the order that they have in the topology
                    content += self.nic([loose.pop(0)])
                content += self.pci(device)
        for left in loose:
            content += self.nic([left])
        return _element("cpu", attributes, content)

    def loose_nics(self, cpu: int | None) -> list[int]:
        """Ports without a PCI device, which go to the first CPU of their NUMA node, or else to the first of all."""
        numas = [cpu.numa for cpu in self.topology.cpus]
        return [
            place
            for place, nic in enumerate(self.topology.nics)
            if nic.busid not in self.devices
            and cpu == (numas.index(nic.numa) if nic.numa in numas else 0 if numas else None)
        ]

    def nic_places(self, device: PciDevice) -> Iterable[int]:
        yield from self.nics[device.busid]
        for child in self.below[device.busid]:
            yield from self.nic_places(child)

    def pci(self, device: PciDevice) -> list[str]:
        # NCCL reckons with the best speed (idle GPUs run their links slowly), and with the lanes that both ends have.
        gts = device.link.gts if device.link_max.gts is None else device.link_max.gts
        width = device.link_max.width if device.link.width is None else device.link.width
        attributes = _attributes(
            busid=device.busid,
            **{"class": _hex(device.pci_class, 6)},
            vendor=_hex(device.vendor, 4),
            device=_hex(device.device, 4),
            link_speed=None if gts is None else f"{gts:.1f} GT/s PCIe",
            link_width=width,
        )
        content: list[str] = []
        if self.lists_gpus:
            for place in self.gpus[device.busid]:
                content += self.gpu(self.topology.gpus[place], place)
        if self.lists_nets and self.nics[device.busid]:
            content += self.nic(self.nics[device.busid])
        for child in self.below[device.busid]:
            content += self.pci(child)
        return _element("pci", attributes, content)

    def gpu(self, gpu: Gpu, place: int) -> list[str]:
        links = [self.nvlink(link) for link in self.topology.nvlinks or () if link.gpu == place]
        return _element("gpu", _attributes(dev=gpu.index, sm=gpu.sm, rank=gpu.rank, gdr=_flag(gpu.gdr)), links)

    def nvlink(self, link: NvLinks) -> str:
        peer = None if link.peer is None else self.topology.gpus[link.peer].busid
        classes = {"gpu": "0x030200", "switch": "0x068000", "cpu": "0x068001", "unknown": None}
        attributes = _attributes(
            target=link.target or peer or _UNKNOWN_SWITCH, count=link.count, tclass=classes[link.kind]
        )
        return _element("nvlink", attributes, [])[0]

    def nic(self, places: list[int]) -> list[str]:
        return _element("nic", "", [self.net(self.topology.nics[place]) for place in places])

    def net(self, nic: Nic) -> str:
        attributes = _attributes(
            name=nic.name,
            dev=nic.index,
            speed=None if nic.speed_gbps is None else round(nic.speed_gbps * 1000),
            port=nic.port,
            guid=_hex(nic.guid),
            gdr=_flag(nic.gdr),
            net="0" if nic.name in self.fused else None,
        )
        return _element("net", attributes, [])[0]


def _attributes(**values: str | int | None) -> str:
    return "".join(f" {key}={quoteattr(str(value))}" for key, value in values.items() if value is not None)


def _element(tag: str, attributes: str, content: list[str]) -> list[str]:
    if not content:
        return [f"<{tag}{attributes}/>"]
    return [f"<{tag}{attributes}>", *(f"  {line}" for line in content), f"</{tag}>"]


def _hex(value: int | None, digits: int = 1) -> str | None:
    return None if value is None else f"0x{value:0{digits}x}"


def _flag(value: bool | None) -> int | None:
    return None if value is None else int(value)


def _mask(cpus: tuple[int, ...]) -> tuple[str, int | None]:
    """Words of 32 CPUs in hexadecimal, highest first; for high numbers, the number of the lowest bit too."""
    highest, lowest = max(cpus, default=0) // 32, min(cpus, default=0) // 32
    first = lowest if highest >= _MASK_WORDS else 0
    mask = sum(1 << (cpu - 32 * first) for cpu in set(cpus))
    words = [f"{mask >> 32 * place & 0xFFFFFFFF:08x}" for place in reversed(range(highest - first + 1))]
    return ",".join(words), 32 * first or None
