"""The elements of NCCL's topology XML, one by one: what each says as a frozen fact, and notes about the rest."""

from __future__ import annotations

import re

from topology.busid import normalise_busid
from topology.errors import TopologyError, shown
from topology.model import Cpu, Gpu, Nic, NvLinks, PciDevice
from topology.nccl_xml.attributes import Attributes, Notes
from topology.nccl_xml.elements import Element
from topology.pci_class import device_kind, link_layer, nvlink_target

UNNUMBERED = -1
"""Index of a GPU whose number the file does not give."""

_VERSION = "1"
# Names of interfaces without hardware. They only count for ports that the file puts on no PCI device.
_VIRTUAL_NAME = re.compile(
    r"lo|(?:dummy|docker|ifb|sit|gre|tun|tunl|tap|tailscale|wg|cni|flannel|vxlan|virbr|vnet|vmnet|zt|utun)[.\d].*"
    r"|(?:br-|veth|cali|lxc|docker_|virbr|cni|cilium|lxd|vxlan|geneve|kube-|nodelocal|gretap|erspan|ip6|weave|ovs-).*"
)


class Walk:
    """Goes through the elements in file order and keeps what they say; nothing is looked up or judged yet."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.notes = Notes()
        self.cpus: list[Cpu] = []
        self.pci: dict[str, PciDevice] = {}
        self.lines: dict[str, int] = {}
        self.gpus: list[Gpu] = []
        self.nics: list[Nic] = []
        self.loose: dict[str, int] = {}
        """The CPUs of ports on no PCI device, by name."""
        self.free_busids = (f"ffff:{n >> 8:02x}:{n & 255:02x}.0" for n in range(0x10000))
        self.links: list[NvLinks] = []
        self.knows_links = True
        """Whether `links` are all that join GPUs: not so on AMD's machines."""

    def read_system(self, root: Element) -> None:
        """Read the CPUs of the first host: a dump of a multi-node NVLink job has several."""
        if (version := root.attributes.get("version")) != _VERSION:
            self.notes.add(f"version {shown(version)}: NCCL reads version {_VERSION} only", root.line)
        hosts = list(dict.fromkeys(host for child in root.children if (host := child.attributes.get("host_hash"))))
        if len(hosts) > 1:
            self.notes.add(
                f"the file describes {len(hosts)} hosts (host_hash); only the first, {shown(hosts[0])}, is read"
            )
        for child in root.children:
            if child.tag != "cpu":
                self.ignore(child)
            elif child.attributes.get("host_hash") in (None, "", *hosts[:1]):
                self.read_cpu(child)

    def read_cpu(self, element: Element) -> None:
        attributes = Attributes(element, self.notes)
        numa = attributes.integer("numaid")
        self.cpus.append(
            Cpu(
                numa=None if numa is None or numa < 0 else numa,
                arch=attributes.text("arch"),
                vendor=attributes.text("vendor"),
                affinity=attributes.affinity(),
                host_hash=attributes.integer("host_hash", 0),
                family=attributes.integer("familyid", 0),
                model=attributes.integer("modelid", 0),
            )
        )
        cpu = len(self.cpus) - 1
        for child in element.children:
            if child.tag == "pci":
                self.read_pci(child, None, cpu)
            elif child.tag == "nic":
                self.read_nic(child, None, cpu)
            else:
                self.ignore(child)

    def read_pci(self, element: Element, parent: str | None, cpu: int) -> None:
        attributes = Attributes(element, self.notes)
        busid = self.place_of(element, parent)
        # A <nic> without a <net> says nothing about the device.
        tags = {child.tag for child in element.children if child.tag != "nic" or _nets(child)}
        pci_class, vendor = attributes.integer("class", 0), attributes.integer("vendor", 0)
        if pci_class is None and "pci" in tags:
            pci_class = 0x060400  # only a bridge has devices below it
        kind = device_kind(pci_class, vendor, tags)
        if busid not in self.pci:
            self.pci[busid] = PciDevice(
                busid=busid,
                kind=kind,
                parent=parent,
                cpu=cpu,
                pci_class=pci_class,
                vendor=vendor,
                device=attributes.integer("device", 0),
                link=attributes.link(),
            )
            self.lines[busid] = element.line
        for child in element.children:
            if child.tag == "pci":
                self.read_pci(child, busid, cpu)
            elif child.tag == "gpu":
                self.read_gpu(child, busid, cpu)
            elif child.tag == "nic":
                self.read_nic(child, busid, cpu)
            elif child.tag != "pcilink":  # a shortcut between switches; no class of distance knows it
                self.ignore(child)

    def place_of(self, element: Element, parent: str | None) -> str:
        """The device's bus id; a free one for a switch whose id another has (providers invent them)."""
        text = Attributes(element, self.notes).text("busid")
        if text is None:
            raise TopologyError(f"{self.source}:{element.line}: <pci> without busid; NCCL needs one for every device")
        busid = normalise_busid(text)
        if busid is None:
            busid = text.lower()
            self.notes.add(f"busid {shown(text)} is no PCI bus id (like 0000:0f:00.0)", element.line)
        if busid not in self.pci:
            return busid
        if any(child.tag == "pci" for child in element.children):
            renamed = next(name for name in self.free_busids if name not in self.pci)
            self.notes.add(f"busid {busid} is that of line {self.lines[busid]} too; here it is {renamed}", element.line)
            return renamed
        if self.pci[busid].parent != parent:
            raise TopologyError(
                f"{self.source}:{element.line}: busid {shown(busid)} is in another place too, on line "
                f"{self.lines[busid]}; a device has one place, take the wrong one out"
            )
        return busid

    def read_gpu(self, element: Element, busid: str, cpu: int) -> None:
        attributes = Attributes(element, self.notes)
        place, dev = len(self.gpus), attributes.integer("dev", 0)
        self.gpus.append(
            Gpu(
                index=UNNUMBERED if dev is None else dev,
                busid=busid,
                numa=self.cpus[cpu].numa,
                sm=attributes.integer("sm", 1, 9999),
                gdr=attributes.flag("gdr"),
                rank=attributes.integer("rank", 0),
            )
        )
        if attributes.text("mlopart") is not None:
            self.notes.add(f"GPU {busid} is divided (mlopart); its parts are listed as GPUs", element.line)
        for child in element.children:
            if child.tag == "nvlink":
                self.read_nvlink(child, place)
            elif child.tag == "xgmi":
                self.knows_links = False
                self.notes.add("<xgmi> is AMD's: this is RCCL's file, and what joins its GPUs is taken as unknown")
            elif child.tag == "c2c":
                self.notes.add(f"GPU {busid} has a C2C link to its CPU, which is not kept", child.line)
            else:
                self.ignore(child)

    def read_nvlink(self, element: Element, place: int) -> None:
        attributes = Attributes(element, self.notes)
        target, count = attributes.text("target"), attributes.integer("count", 1, 1000)
        if target is None or count is None:
            self.notes.add("<nvlink> without target or count is left out", element.line)
            return
        target = normalise_busid(target) or target.lower()
        kind = nvlink_target(attributes.integer("tclass", 0))
        self.links.append(NvLinks(gpu=place, peer=None, count=count, target=target, kind=kind))

    def read_nic(self, element: Element, busid: str | None, cpu: int) -> None:
        for child in element.children:
            if child.tag not in ("net", "gin", "rma"):  # gin and rma are other uses of the same ports
                self.ignore(child)
        for net in _nets(element):
            attributes = Attributes(net, self.notes)
            index, speed = attributes.integer("dev", 0), attributes.integer("speed", highest=10**9)
            name = attributes.text("name") or busid or ("net" if index is None else f"net{index}")
            if busid is None and self.loose.setdefault(name, cpu) != cpu:
                # NCCL lists a port without a PCI device once for each rank, at the rank's CPU.
                if _VIRTUAL_NAME.fullmatch(name) is None:
                    self.notes.add(f"{shown(name)} is at several CPUs: counted once, at the first")
                continue
            if speed is None or speed <= 0:
                self.notes.add(f"no speed for {shown(name)} (NCCL then assumes 10 Gb/s)", net.line)
            self.nics.append(
                Nic(
                    name=name,
                    busid=busid,
                    port=attributes.integer("port", 0),
                    numa=self.cpus[cpu].numa,
                    speed_gbps=speed / 1000 if speed is not None and speed > 0 else None,
                    link_layer=link_layer(self.pci[busid].pci_class) if busid is not None else None,
                    gdr=attributes.flag("gdr"),
                    guid=attributes.integer("guid", 0),
                    virtual=busid is None and _VIRTUAL_NAME.fullmatch(name) is not None,
                    index=index,
                )
            )

    def ignore(self, element: Element) -> None:
        self.notes.add(f"<{shown(element.tag)[1:-1]}> has no meaning here and is left out", element.line)


def _nets(nic: Element) -> list[Element]:
    return [child for child in nic.children if child.tag == "net"]
