# SPDX-License-Identifier: Apache-2.0
"""NCCL's topology XML: dumps (NCCL_TOPO_DUMP_FILE) with <gpu> and <net>, and cloud providers' templates without them.

A template has PCI devices only: those of class 0x03 are GPUs and those of class 0x02 network cards, as in NCCL. It
lacks NVLinks, speeds and names, which are None. If a file describes several hosts, the first is read. C2C links and
NCCL's own attributes (latency, maxconn, coll) are not in the model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import Literal

from topology.model import (
    Cpu,
    Distance,
    Gpu,
    Nic,
    NvLinks,
    PciDevice,
    Topology,
    TopologyError,
    device_kind,
    link_layer,
    normalise_busid,
    nvlink_target,
    shown,
)
from topology.queries import Paths
from topology.xml_elements import Attributes, Element, Notes, parse_elements

UNNUMBERED = -1
"""Index of a GPU without a number in the file."""

_VERSION = "1"
# Names of interfaces without hardware. They matter only for ports without a PCI device in the file.
_VIRTUAL_NAME = re.compile(
    r"lo|(?:dummy|docker|ifb|sit|gre|tun|tunl|tap|tailscale|wg|cni|flannel|vxlan|virbr|vnet|vmnet|zt|utun)[.\d].*"
    r"|(?:br-|veth|cali|lxc|docker_|virbr|cni|cilium|lxd|vxlan|geneve|kube-|nodelocal|gretap|erspan|ip6|weave|ovs-).*"
)


class ElementReader:
    """Reads the elements in file order and collects their facts, without relating them yet."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.notes = Notes()
        self.cpus: list[Cpu] = []
        self.pci: dict[str, PciDevice] = {}
        self.lines: dict[str, int] = {}
        self.gpus: list[Gpu] = []
        self.nics: list[Nic] = []
        self.cpu_of_port: dict[str, int] = {}
        """CPUs of the ports without a PCI device, by name."""
        self.free_busids = (f"ffff:{n >> 8:02x}:{n & 255:02x}.0" for n in range(0x10000))
        self.links: list[NvLinks] = []
        self.has_all_links = True
        """Whether `links` has all links between GPUs; false for AMD's machines."""

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
        busid = self.busid_of(element, parent)
        # A <nic> without a <net> gives no kind of device.
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
                link=attributes.link(),
            )
            self.lines[busid] = element.line
        gpus = [child for child in element.children if child.tag == "gpu"]
        if len(gpus) > 1 and not any(gpu.attributes.get("mlopart") for gpu in gpus):
            self.notes.add(
                f"{len(gpus)} <gpu> in one <pci>, {busid}: a device is one GPU, all are listed", element.line
            )
        for child in element.children:
            if child.tag == "pci":
                self.read_pci(child, busid, cpu)
            elif child.tag == "gpu":
                self.read_gpu(child, busid, cpu)
            elif child.tag == "nic":
                self.read_nic(child, busid, cpu)
            elif child.tag != "pcilink":  # a shortcut between switches, without a class of distance
                self.ignore(child)

    def busid_of(self, element: Element, parent: str | None) -> str:
        """Return the device's bus id; a free one for a switch with a duplicate id (providers invent ids)."""
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
            )
        )
        if attributes.text("mlopart") is not None:
            self.notes.add(f"GPU {busid} is divided (mlopart); its parts are listed as GPUs", element.line)
        for child in element.children:
            if child.tag == "nvlink":
                self.read_nvlink(child, place)
            elif child.tag == "xgmi":
                self.has_all_links = False
                self.notes.add("<xgmi> is AMD's: this is RCCL's file, and its links between GPUs are taken as unknown")
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
            speed = attributes.integer("speed", highest=10**9)
            name = attributes.text("name") or busid or f"net{attributes.text('dev') or ''}"
            if busid is None and self.cpu_of_port.setdefault(name, cpu) != cpu:
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
                    virtual=busid is None and _VIRTUAL_NAME.fullmatch(name) is not None,
                )
            )

    def ignore(self, element: Element) -> None:
        self.notes.add(f"<{shown(element.tag)[1:-1]}> has no meaning here and is left out", element.line)


def _nets(nic: Element) -> list[Element]:
    return [child for child in nic.children if child.tag == "net"]


MOST_GPUS = 128
MOST_NICS = 512

_FOREIGN = {
    "graphs": "an NCCL graph file (NCCL_GRAPH_DUMP_FILE); give the one that NCCL_TOPO_DUMP_FILE writes",
    "topology": "an hwloc file; give NCCL's own (NCCL_TOPO_DUMP_FILE=...)",
    "cpu": "a fragment of a topology; give the whole file",
    "pci": "a fragment of a topology; give the whole file",
}


def read_nccl_xml(text: str | bytes, source: str) -> Topology:
    """Return one machine from NCCL's XML; `source` is the file's name in messages.

    GPUs and ports are in file order. `warnings` mention unknown elements, impossible values and missing facts. Raises
    TopologyError, one line with the line number, for malformed XML or another format.
    """
    root = parse_elements(text, source)
    if root.tag != "system":
        problem = _FOREIGN.get(root.tag, "not NCCL's format; give a file that NCCL_TOPO_DUMP_FILE wrote")
        raise TopologyError(f"{source}:{root.line}: root element is <{shown(root.tag)[1:-1]}>, not <system>: {problem}")
    reader = ElementReader(source)
    reader.read_system(root)
    gpus = _numbered(tuple(reader.gpus) or _class_gpus(reader))
    names = {nic.name for nic in reader.nics}
    nics = tuple(_mark_merged(nic, names) for nic in reader.nics) or _class_nics(reader)
    if len(gpus) > MOST_GPUS or len(nics) > MOST_NICS:
        raise TopologyError(
            f"{source}:{root.line}: {len(gpus)} GPUs and {len(nics)} network ports; "
            f"one machine has at most {MOST_GPUS} and {MOST_NICS}, give the file of one"
        )
    topology = Topology(
        source=f"NCCL XML {source}",
        gpus=gpus,
        nics=nics,
        cpus=tuple(reader.cpus),
        pci=tuple(reader.pci.values()),
        nvlinks=_with_peers(reader.links, gpus, reader.notes) if reader.gpus and reader.has_all_links else None,
    )
    _note_what_is_missing(topology, reader)
    return replace(topology, warnings=reader.notes.sentences())


def _of_kind(reader: ElementReader, kind: Literal["gpu", "nic"]) -> list[PciDevice]:
    return [device for device in reader.pci.values() if device.kind == kind]


def _numa(reader: ElementReader, device: PciDevice) -> int | None:
    return None if device.cpu is None else reader.cpus[device.cpu].numa


def _class_gpus(reader: ElementReader) -> tuple[Gpu, ...]:
    return tuple(Gpu(UNNUMBERED, device.busid, _numa(reader, device)) for device in _of_kind(reader, "gpu"))


def _class_nics(reader: ElementReader) -> tuple[Nic, ...]:
    return tuple(
        Nic(
            name=device.busid,
            busid=device.busid,
            port=None,
            numa=_numa(reader, device),
            speed_gbps=None,
            link_layer=link_layer(device.pci_class),
        )
        for device in _of_kind(reader, "nic")
    )


def _mark_merged(nic: Nic, listed: set[str]) -> Nic:
    """Return a NIC, marked virtual if NCCL merged it from several NICs that are listed too."""
    return replace(nic, virtual=True) if "+" in nic.name and listed.issuperset(nic.name.split("+")) else nic


def _numbered(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Return the GPUs with numbers; those without one get their place in the order of bus ids."""
    order = sorted(range(len(gpus)), key=lambda place: (len(gpus[place].busid or ""), gpus[place].busid or ""))
    numbers = {place: number for number, place in enumerate(order)}
    return tuple(
        replace(gpu, index=numbers[place]) if gpu.index == UNNUMBERED else gpu for place, gpu in enumerate(gpus)
    )


def _with_peers(links: list[NvLinks], gpus: tuple[Gpu, ...], notes: Notes) -> tuple[NvLinks, ...]:
    """Return the NVLinks with the GPU at their other end."""
    places: dict[str | None, int] = {}
    for place, gpu in enumerate(gpus):
        places.setdefault(gpu.busid, place)
    found = []
    for link in links:
        peer = places.get(link.target) if link.kind in ("gpu", "unknown") else None
        if peer is None and link.kind == "gpu":
            notes.add(f"GPU {link.target}, where NVLinks lead to, is not in the file")
        if peer == link.gpu:  # a virtual machine that hides the other end
            notes.add(f"NVLinks of GPU {link.target} lead to itself: their other end is taken as unknown")
            found.append(replace(link, kind="unknown"))
            continue
        found.append(link if peer is None else replace(link, peer=peer, kind="gpu"))
    return tuple(found)


def _note_what_is_missing(topology: Topology, reader: ElementReader) -> None:
    """Add remarks about missing facts, which a user might otherwise misread."""
    add = reader.notes.add
    classless = sum(device.pci_class is None for device in topology.pci)
    if not topology.gpus:
        add("no GPU found" + (f": {classless} PCI devices do not say what they are (no class)" if classless else ""))
    if not topology.nics:
        add("no network card found")
    if any(link.kind == "switch" for link in topology.nvlinks or ()):
        for place in sorted(set(range(len(topology.gpus))) - {link.gpu for link in topology.nvlinks or ()}):
            busid = topology.gpus[place].busid
            add(f"no NVLink at GPU {busid}, though others are on an NVSwitch: see `nvidia-smi nvlink -s`")
    if topology.gpus and not reader.gpus:
        add("a template without <gpu>: NVLinks, compute capability and GPUDirect are unknown")
    if topology.nics and not reader.nics:
        add("a template without <net>: names, speeds and ports of the network cards are unknown")
    listed = {gpu.busid for gpu in topology.gpus} | {nic.busid for nic in topology.nics}
    left_out: dict[str, list[str]] = defaultdict(list)
    for device in topology.pci:
        if device.busid not in listed and device.kind in ("gpu", "nic"):
            left_out["<gpu>" if device.kind == "gpu" else "<net>"].append(device.busid)
    for tag, busids in left_out.items():
        add(f"{', '.join(busids[:8])}{', ...' if busids[8:] else ''}: no {tag}, so left out (NCCL did not use it)")
    if _phb_matters(topology):
        add("PHB may be NODE: the file does not tell the host bridges of one NUMA node apart, NCCL says PHB for both")


def _phb_matters(topology: Topology) -> bool:
    paths, gpus = Paths(topology), range(len(topology.gpus))
    nearest = (paths.nearest(gpu) for gpu in gpus)
    return any(found is not None and found[1] is Distance.PHB for found in nearest) or any(
        paths.gpu(a, b) is Distance.PHB for a in gpus for b in gpus[a + 1 :]
    )
