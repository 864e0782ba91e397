"""What only NVIDIA's driver tells: the GPUs that this process may use, compute capability, NVLinks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from topology.busid import normalise_busid
from topology.model import Distance, Gpu, NvLinks, Topology

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
        return _completed(topology, pynvml)
    except pynvml.NVMLError as error:
        return _unchanged(topology, f"NVML says: {error}")
    finally:
        pynvml.nvmlShutdown()


def _unchanged(topology: Topology, why: str) -> Topology:
    if not topology.gpus:
        return topology
    return replace(topology, warnings=(*topology.warnings, f"NVLinks and compute capability unknown; {why}"))


def _completed(topology: Topology, nvml: Any) -> Topology:
    on_the_bus = {gpu.busid: place for place, gpu in enumerate(topology.gpus)}
    found = [_gpu(nvml, index, {gpu.busid: gpu for gpu in topology.gpus}) for index in range(nvml.nvmlDeviceGetCount())]
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
        nvlinks=_nvlinks(nvml, found),
        stated=(*stated, *_ancestors(nvml, found, {(a, b) for a, b, _ in stated})),
        warnings=tuple(warnings),
    )


def _gpu(nvml: Any, index: int, on_the_bus: dict[str | None, Gpu]) -> _Found:
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


def _nvlinks(nvml: Any, found: list[_Found]) -> tuple[NvLinks, ...]:
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
