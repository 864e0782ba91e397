"""The machine that this process runs on: its files, its driver, and the NCCL topology file that takes precedence."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from topology.model import Distance, Gpu, Nic, NvLinks, Topology, TopologyError, normalise_busid
from topology.sysfs import read_sysfs
from topology.xml_reader import read_nccl_xml

VIRTUAL_TOPOLOGY = "var/run/nvidia-topologyd/virtualTopology.xml"
"""Where cloud images leave the topology that a virtual machine hides; NCCL reads it when NCCL_TOPO_FILE is unset."""


def discover(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Topology:
    """Find out what this machine is. Raises nothing: what cannot be read is None, or a warning.

    As in NCCL, the file of NCCL_TOPO_FILE (or of VIRTUAL_TOPOLOGY) wins over the system's own files, which then fill in
    what it leaves open. `root` leads all reads to a copy of another machine's files; then NVML is not asked.
    """
    seen = read_sysfs(root)
    if root == Path("/"):
        seen = add_nvml(seen)
    named = environ.get("NCCL_TOPO_FILE")
    file = _below(root, named) if named else root / VIRTUAL_TOPOLOGY
    if not named and not file.is_file():
        return seen
    try:
        given = read_nccl_xml(file.read_bytes(), str(file))
    except OSError as error:
        why = f"cannot be read ({error.strerror}): NCCL goes on without it"
        return replace(seen, warnings=(*seen.warnings, f"NCCL_TOPO_FILE={named} {why}" if named else f"{file} {why}"))
    except TopologyError as error:
        return replace(seen, warnings=(*seen.warnings, f"the topology file that NCCL reads is refused: {error}"))
    return _completed(given, seen, f"{file} ({'NCCL_TOPO_FILE' if named else 'where NCCL looks'}) and {seen.source}")


def _below(root: Path, named: str) -> Path:
    return Path(named) if root == Path("/") else root / named.lstrip("/")


def _completed(given: Topology, seen: Topology, source: str) -> Topology:
    """`given`, with the facts about the same devices that only `seen` has."""
    gpus = {gpu.busid: gpu for gpu in seen.gpus}
    ports: dict[str | None, list[Nic]] = {}
    for nic in seen.nics:
        if nic.busid is not None:
            ports.setdefault(nic.busid, []).append(nic)
    return replace(
        given,
        source=source,
        gpus=tuple(_gpu(gpu, gpus[gpu.busid]) if gpu.busid in gpus else gpu for gpu in given.gpus),
        nics=tuple(port for nic in given.nics for port in _ports(nic, ports.get(nic.busid, []))),
        nvlinks=_nvlinks(given, seen) if given.nvlinks is None else given.nvlinks,
        warnings=(
            *(f"of the topology file alone: {warning}" for warning in given.warnings),
            *seen.warnings,
            *_differences(given, seen),
        ),
    )


def _gpu(given: Gpu, seen: Gpu) -> Gpu:
    missing = {name: value for name, value in vars(seen).items() if getattr(given, name) is None}
    return replace(given, index=seen.index, **missing)


def _ports(given: Nic, seen: list[Nic]) -> list[Nic]:
    """The ports of a card that the file only has as a PCI device; otherwise the file's own port."""
    return [replace(port, numa=given.numa) for port in seen] if seen and given.name == given.busid else [given]


def _nvlinks(given: Topology, seen: Topology) -> tuple[NvLinks, ...] | None:
    """The driver's NVLinks in the file's order of GPUs; None unless the driver told about all of them."""
    places = {gpu.busid: place for place, gpu in enumerate(given.gpus)}
    if seen.nvlinks is None or set(places) - {gpu.busid for gpu in seen.gpus}:
        return None
    moved = {old: places.get(gpu.busid) for old, gpu in enumerate(seen.gpus)}
    return tuple(
        replace(link, gpu=place, peer=None if link.peer is None else moved[link.peer])
        for link in seen.nvlinks
        if (place := moved[link.gpu]) is not None
    )


def _differences(given: Topology, seen: Topology) -> list[str]:
    in_file = {gpu.busid for gpu in given.gpus} | {nic.busid for nic in given.nics} | {nic.name for nic in given.nics}
    added = [gpu.busid for gpu in seen.gpus if gpu.busid not in in_file]
    added += [nic.name for nic in seen.nics if not nic.virtual and not in_file & {nic.busid or nic.name, nic.name}]
    absent = [gpu.busid or "?" for gpu in given.gpus if gpu.busid not in {gpu.busid for gpu in seen.gpus}]
    return [
        *([f"not in the topology file, yet on this machine: {', '.join(map(str, added))}"] if added else []),
        *([f"in the topology file, but no GPU of this machine: {', '.join(absent)}"] if absent else []),
    ]


# nvmlDeviceGetTopologyCommonAncestor
_LEVELS = {10: Distance.PIX, 20: Distance.PXB, 30: Distance.PHB, 40: Distance.NODE, 50: Distance.SYS}


@dataclass(frozen=True)
class _Found:
    """One GPU of the driver's list."""

    handle: Any
    busid: str
    gpu: Gpu


def add_nvml(topology: Topology) -> Topology:
    """Complete the running machine's `topology`; the GPUs of the result are those of the driver, in its order.

    Raises nothing: where pynvml or the driver is missing, the topology comes back with a warning if it has a GPU.
    """
    try:
        import pynvml
    except ImportError:
        return _unchanged(topology, "pip install nvidia-ml-py")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _unchanged(topology, f"NVML says: {error}")
    try:
        return _asked_of_driver(topology, pynvml)
    except pynvml.NVMLError as error:
        return _unchanged(topology, f"NVML says: {error}")
    finally:
        pynvml.nvmlShutdown()


def _unchanged(topology: Topology, why: str) -> Topology:
    if not topology.gpus:
        return topology
    return replace(topology, warnings=(*topology.warnings, f"NVLinks and compute capability unknown; {why}"))


def _asked_of_driver(topology: Topology, nvml: Any) -> Topology:
    on_the_bus = {gpu.busid: place for place, gpu in enumerate(topology.gpus)}
    on_the_bus_by_id = {gpu.busid: gpu for gpu in topology.gpus}
    found = [_driver_gpu(nvml, index, on_the_bus_by_id) for index in range(nvml.nvmlDeviceGetCount())]
    kept = {one.busid for one in found}
    labels = {
        f"GPU{on_the_bus[one.busid]}": f"GPU{place}" for place, one in enumerate(found) if one.busid in on_the_bus
    }
    labels |= {f"NIC{place}": f"NIC{place}" for place in range(len(topology.nics))}
    stated = [(labels[a], labels[b], far) for a, b, far in topology.stated or () if a in labels and b in labels]
    warnings = list(topology.warnings)
    hidden = sum(busid not in kept for busid in on_the_bus)
    if hidden:
        warnings.append(f"the driver gives this process {len(kept)} GPUs; {hidden} more on the PCI bus are left out")
    return replace(
        topology,
        gpus=tuple(one.gpu for one in found),
        pci=tuple(device for device in topology.pci if device.kind != "gpu" or device.busid in kept),
        nvlinks=_driver_links(nvml, found),
        stated=(*stated, *_ancestors(nvml, found, {(a, b) for a, b, _ in stated})),
        warnings=tuple(warnings),
    )


def _driver_gpu(nvml: Any, index: int, on_the_bus: dict[str | None, Gpu]) -> _Found:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    busid = _busid(nvml.nvmlDeviceGetPciInfo(handle).busId)
    capability = _asked(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    seen = on_the_bus.get(busid) or Gpu(index=index, busid=busid, numa=None)
    gpu = replace(
        seen,
        index=index,
        sm=None if capability is None else capability[0] * 10 + capability[1],
        name=_text(_asked(nvml, nvml.nvmlDeviceGetName, handle)) or seen.name,
        uuid=_text(_asked(nvml, nvml.nvmlDeviceGetUUID, handle)) or seen.uuid,
    )
    return _Found(handle, busid, gpu)


def _driver_links(nvml: Any, found: list[_Found]) -> tuple[NvLinks, ...]:
    """The active NVLinks of every GPU, bundled by what is at their other end."""
    places = {one.busid: place for place, one in enumerate(found)}
    bundles = Counter((place, *end) for place, one in enumerate(found) for end in _far_ends(nvml, one.handle))
    links = []
    for (place, target, kind), count in bundles.items():
        peer = places.get(target)
        if peer == place:  # a virtual machine that hides what is at the other end
            links.append(NvLinks(place, None, count, target, "switch" if kind == "switch" else "unknown"))
        else:
            links.append(NvLinks(place, peer, count, target, kind if peer is None else "gpu"))
    return tuple(links)


def _far_ends(nvml: Any, handle: Any) -> list[tuple[str, Any]]:
    """Bus id and kind of device at the other end of each active link of one GPU."""
    kinds = {
        nvml.NVML_NVLINK_DEVICE_TYPE_GPU: "gpu",
        nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH: "switch",
        nvml.NVML_NVLINK_DEVICE_TYPE_IBMNPU: "cpu",
    }
    ends = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = _asked(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:  # no such link on this model
            break
        if state == nvml.NVML_FEATURE_ENABLED:
            target = _busid(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
            kind = kinds.get(_asked(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link), "unknown")
            # The driver masks the bus id of an NVSwitch that this system may not touch.
            ends.append((target, "switch" if target.startswith("fffffff:") else kind))
    return ends


def _ancestors(nvml: Any, found: list[_Found], known: set[tuple[str, str]]) -> list[tuple[str, str, Distance]]:
    """Distances over PCIe between GPUs that the PCI tree did not tell (virtual machines)."""
    return [
        (f"GPU{a}", f"GPU{b}", _LEVELS[level])
        for a, b in combinations(range(len(found)), 2)
        if not known & {(f"GPU{a}", f"GPU{b}"), (f"GPU{b}", f"GPU{a}")}
        and (level := _asked(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, found[a].handle, found[b].handle))
        in _LEVELS
    ]


def _asked(nvml: Any, question: Any, *arguments: Any) -> Any:
    """The answer, None where this model or driver has none; other errors are raised."""
    try:
        return question(*arguments)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument, nvml.NVMLError_FunctionNotFound):
        return None


def _text(value: str | bytes | None) -> str | None:
    """Older bindings answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _busid(value: str | bytes) -> str:
    written = _text(value) or ""
    return normalise_busid(written) or written.lower()
