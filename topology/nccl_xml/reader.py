"""NCCL's topology XML: dumps (NCCL_TOPO_DUMP_FILE) with <gpu> and <net>, and cloud providers' templates without them.

A template only has PCI devices: those of class 0x03 are its GPUs and those of class 0x02 its network cards, as in NCCL;
NVLinks, speeds and names are not in it and stay None. Of a file that describes several hosts, the first is read. C2C
links and NCCL's own bookkeeping (latency, maxconn, coll) have no place in the model.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Literal

from topology.errors import TopologyError, shown
from topology.facts.paths import Paths
from topology.model import Distance, Gpu, Nic, NvLinks, PciDevice, Topology
from topology.nccl_xml.attributes import Notes
from topology.nccl_xml.elements import parse_elements
from topology.nccl_xml.walk import UNNUMBERED, Walk
from topology.pci_class import link_layer

MOST_GPUS = 128
MOST_NICS = 512

_FOREIGN = {
    "graphs": "an NCCL graph file (NCCL_GRAPH_DUMP_FILE); give the one that NCCL_TOPO_DUMP_FILE writes",
    "topology": "an hwloc file; give NCCL's own (NCCL_TOPO_DUMP_FILE=...)",
    "cpu": "a fragment of a topology; give the whole file",
    "pci": "a fragment of a topology; give the whole file",
}


def read_nccl_xml(text: str | bytes, source: str) -> Topology:
    """Read one machine from NCCL's XML; `source` names the file in messages.

    GPUs and ports are in file order. Unknown elements, values that cannot be meant and facts that are missing are in
    `warnings`. Raises TopologyError, one line with the line number, for what is not well-formed or not this format.
    """
    root = parse_elements(text, source)
    if root.tag != "system":
        what = _FOREIGN.get(root.tag, "not NCCL's format; give a file that NCCL_TOPO_DUMP_FILE wrote")
        raise TopologyError(f"{source}:{root.line}: root element is <{shown(root.tag)[1:-1]}>, not <system>: {what}")
    walk = Walk(source)
    walk.read_system(root)
    gpus = _numbered(tuple(walk.gpus) or _class_gpus(walk))
    names = {nic.name for nic in walk.nics}
    nics = tuple(_unfused(nic, names) for nic in walk.nics) or _class_nics(walk)
    if len(gpus) > MOST_GPUS or len(nics) > MOST_NICS:
        raise TopologyError(
            f"{source}:{root.line}: {len(gpus)} GPUs and {len(nics)} network ports; "
            f"one machine has at most {MOST_GPUS} and {MOST_NICS}, give the file of one"
        )
    topology = Topology(
        source=f"NCCL XML {source}",
        gpus=gpus,
        nics=nics,
        cpus=tuple(walk.cpus),
        pci=tuple(walk.pci.values()),
        nvlinks=_joined(walk.links, gpus, walk.notes) if walk.gpus and walk.knows_links else None,
    )
    _note_what_is_missing(topology, walk)
    return replace(topology, warnings=walk.notes.sentences())


def _of_kind(walk: Walk, kind: Literal["gpu", "nic"]) -> list[PciDevice]:
    return [device for device in walk.pci.values() if device.kind == kind]


def _numa(walk: Walk, device: PciDevice) -> int | None:
    return None if device.cpu is None else walk.cpus[device.cpu].numa


def _class_gpus(walk: Walk) -> tuple[Gpu, ...]:
    return tuple(Gpu(UNNUMBERED, device.busid, _numa(walk, device)) for device in _of_kind(walk, "gpu"))


def _class_nics(walk: Walk) -> tuple[Nic, ...]:
    return tuple(
        Nic(
            name=device.busid,
            busid=device.busid,
            port=None,
            numa=_numa(walk, device),
            speed_gbps=None,
            link_layer=link_layer(device.pci_class),
        )
        for device in _of_kind(walk, "nic")
    )


def _unfused(nic: Nic, listed: set[str]) -> Nic:
    """A NIC that NCCL made of several counts as virtual where the several are listed too."""
    return replace(nic, virtual=True) if "+" in nic.name and listed.issuperset(nic.name.split("+")) else nic


def _numbered(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Number those that the file does not: by bus id, among all."""
    order = sorted(range(len(gpus)), key=lambda place: (len(gpus[place].busid or ""), gpus[place].busid or ""))
    numbers = {place: number for number, place in enumerate(order)}
    return tuple(
        replace(gpu, index=numbers[place]) if gpu.index == UNNUMBERED else gpu for place, gpu in enumerate(gpus)
    )


def _joined(links: list[NvLinks], gpus: tuple[Gpu, ...], notes: Notes) -> tuple[NvLinks, ...]:
    """Find the GPU at the other end of each NVLink."""
    places: dict[str | None, int] = {}
    for place, gpu in enumerate(gpus):
        places.setdefault(gpu.busid, place)
    found = []
    for link in links:
        peer = places.get(link.target) if link.kind in ("gpu", "unknown") else None
        if peer is None and link.kind == "gpu":
            notes.add(f"GPU {link.target}, where NVLinks lead to, is not in the file")
        if peer == link.gpu:  # a virtual machine that hides what is at the other end
            notes.add(f"NVLinks of GPU {link.target} lead to itself: what they join is taken as unknown")
            found.append(replace(link, kind="unknown"))
            continue
        found.append(link if peer is None else replace(link, peer=peer, kind="gpu"))
    return tuple(found)


def _note_what_is_missing(topology: Topology, walk: Walk) -> None:
    """Say what a reader of the facts would otherwise take for a fact."""
    add = walk.notes.add
    classless = sum(device.pci_class is None for device in topology.pci)
    if not topology.gpus:
        add("no GPU found" + (f": {classless} PCI devices do not say what they are (no class)" if classless else ""))
    if not topology.nics:
        add("no network card found")
    if any(link.kind == "switch" for link in topology.nvlinks or ()):
        for place in sorted(set(range(len(topology.gpus))) - {link.gpu for link in topology.nvlinks or ()}):
            busid = topology.gpus[place].busid
            add(f"no NVLink at GPU {busid}, though others are on an NVSwitch: see `nvidia-smi nvlink -s`")
    if topology.gpus and not walk.gpus:
        add("a template without <gpu>: NVLinks, compute capability and GPUDirect are unknown")
    if topology.nics and not walk.nics:
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
