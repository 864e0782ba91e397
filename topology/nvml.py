# SPDX-License-Identifier: Apache-2.0
"""Facts from NVIDIA's driver through NVML: GPUs, their NVLinks, and distances that the PCI tree lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any

from topology.model import Distance, Gpu, NvLinks, Topology, normalise_busid


class NoDriver(Exception):
    """The driver does not answer, or its Python binding is missing. The message has the reason."""


class Driver:
    """An initialized NVML."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        self._no_answer = (
            AttributeError,  # an older binding
            nvml.NVMLError_NotSupported,
            nvml.NVMLError_InvalidArgument,
            nvml.NVMLError_FunctionNotFound,
            nvml.NVMLError_NoPermission,
        )

    def ask(self, question: str, *arguments: Any) -> Any:
        """Return the result of a function of NVML; None if this GPU or version has none. Raises other errors."""
        try:
            return getattr(self.nvml, question)(*arguments)
        except self._no_answer:
            return None


@contextmanager
def driver() -> Iterator[Driver]:
    """Give access to the driver inside the block. Raises NoDriver if it is missing or stops answering."""
    try:
        import pynvml
    except ImportError:
        raise NoDriver("pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
        try:
            yield Driver(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NoDriver(f"NVML says: {error}") from None


def add_nvml(topology: Topology) -> Topology:
    """Return the live machine's `topology` with the driver's facts and its order of GPUs.

    Raises nothing: without pynvml or the driver, a topology with GPUs gets a warning.
    """
    try:
        with driver() as asked:
            return _completed(topology, asked)
    except NoDriver as why:
        warning = f"NVLinks and compute capability unknown; {why}"
        return replace(topology, warnings=(*topology.warnings, warning)) if topology.gpus else topology


def _completed(topology: Topology, asked: Driver) -> Topology:
    on_the_bus = {gpu.busid: place for place, gpu in enumerate(topology.gpus)}
    busids = [_busid(asked.nvml.nvmlDeviceGetPciInfo(handle).busId) for handle in asked.handles]
    labels = {f"GPU{on_the_bus[busid]}": f"GPU{place}" for place, busid in enumerate(busids) if busid in on_the_bus}
    labels |= {f"NIC{place}": f"NIC{place}" for place in range(len(topology.nics))}
    stated = [(labels[a], labels[b], far) for a, b, far in topology.stated or () if a in labels and b in labels]
    warnings = list(topology.warnings)
    hidden = sum(busid not in busids for busid in on_the_bus)
    if hidden:
        warnings.append(f"the driver gives this process {len(busids)} GPUs; {hidden} more on the PCI bus are left out")
    gpus = [
        topology.gpus[on_the_bus[busid]] if busid in on_the_bus else Gpu(index=place, busid=busid, numa=None)
        for place, busid in enumerate(busids)
    ]
    return replace(
        topology,
        gpus=tuple(_gpu(asked, place, handle, gpus[place]) for place, handle in enumerate(asked.handles)),
        pci=tuple(device for device in topology.pci if device.kind != "gpu" or device.busid in busids),
        nvlinks=_links(asked, busids),
        stated=(*stated, *_ancestors(asked, {frozenset((a, b)) for a, b, _ in stated})),
        warnings=tuple(warnings),
    )


def _gpu(asked: Driver, index: int, handle: Any, seen: Gpu) -> Gpu:
    capability = asked.ask("nvmlDeviceGetCudaComputeCapability", handle)
    return replace(
        seen,
        index=index,
        sm=None if capability is None else capability[0] * 10 + capability[1],
        name=asked.ask("nvmlDeviceGetName", handle) or seen.name,
        uuid=asked.ask("nvmlDeviceGetUUID", handle) or seen.uuid,
    )


def _links(asked: Driver, busids: list[str]) -> tuple[NvLinks, ...]:
    """Return the active NVLinks of all GPUs, combined by their other end."""
    places = {busid: place for place, busid in enumerate(busids)}
    ends = ((place, *end) for place, handle in enumerate(asked.handles) for end in _far_ends(asked, handle))
    links = []
    for (place, target, kind), count in Counter(ends).items():
        peer = places.get(target)
        if peer == place:  # a virtual machine that hides the other end
            links.append(NvLinks(place, None, count, target, "switch" if kind == "switch" else "unknown"))
        else:
            links.append(NvLinks(place, peer, count, target, kind if peer is None else "gpu"))
    return tuple(links)


def _far_ends(asked: Driver, handle: Any) -> Iterator[tuple[str, Any]]:
    """Yield bus id and kind of the other end of each active link of one GPU."""
    nvml = asked.nvml
    kinds = {
        nvml.NVML_NVLINK_DEVICE_TYPE_GPU: "gpu",
        nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH: "switch",
        nvml.NVML_NVLINK_DEVICE_TYPE_IBMNPU: "cpu",
    }
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = asked.ask("nvmlDeviceGetNvLinkState", handle, link)
        if state is None:  # no such link on this model
            return
        if state == nvml.NVML_FEATURE_ENABLED:
            target = _busid(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
            kind = kinds.get(asked.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link), "unknown")
            # The driver masks the bus id of an NVSwitch that this system may not touch.
            yield target, "switch" if target.startswith("fffffff:") else kind


# nvmlDeviceGetTopologyCommonAncestor
_LEVELS = {10: Distance.PIX, 20: Distance.PXB, 30: Distance.PHB, 40: Distance.NODE, 50: Distance.SYS}


def _ancestors(asked: Driver, known: set[frozenset[str]]) -> Iterator[tuple[str, str, Distance]]:
    """Yield PCIe distances between GPUs that are missing in the PCI tree (virtual machines)."""
    for a, b in combinations(range(len(asked.handles)), 2):
        if {f"GPU{a}", f"GPU{b}"} not in known:
            level = asked.ask("nvmlDeviceGetTopologyCommonAncestor", asked.handles[a], asked.handles[b])
            if level in _LEVELS:
                yield f"GPU{a}", f"GPU{b}", _LEVELS[level]


def _busid(written: str) -> str:
    return normalise_busid(written) or written.lower()
