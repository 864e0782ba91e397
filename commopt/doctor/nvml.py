"""What the driver's management library says and no file does: peer access, fabric, MIG, tenants, links, health."""

from __future__ import annotations

import os
from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any, TypeVar

T = TypeVar("T")

NVLINKS = 18  # the most that a GPU has, so far
P2P_READ = 0  # the binding's own NVML_P2P_CAPS_INDEX_READ is a tuple by mistake
FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
P2P_STATES = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "no common root port",
    4: "disabled by a driver key",
    5: "not supported",
}
POWER_LIMIT = 0x04
SLOWED_BY = {
    POWER_LIMIT: "power limit",
    0x08: "slowed by hardware",
    0x20: "too hot (slowed by the driver)",
    0x40: "too hot (slowed by hardware)",
    0x80: "power brake from outside",
}
"""NVML's clock event reasons, without those of an idle GPU and of clocks that somebody chose."""
P2P_FINE_OR_UNKNOWN = (0, 6)


@dataclass(frozen=True)
class NvmlGpu:
    """One GPU; None for what the driver does not tell."""

    index: int
    mig: bool | None = None
    tenants: int | None = None
    """Compute processes other than this one."""
    fabric: str | None = None
    """A word of FABRIC_STATES."""
    fabric_status: int | None = None
    """0 for success."""
    multi_node: bool | None = None
    """Whether its NVLink fabric spans machines."""
    nvlinks_up: int | None = None
    slowed_by: int | None = None
    """Why its clock is lower than it could be: bits of SLOWED_BY."""
    rows_pending: bool | None = None
    """Whether bad memory rows wait for a reset to be replaced."""
    rows_failed: bool | None = None
    """Whether a bad row could not be replaced."""


@dataclass(frozen=True)
class NvmlFacts:
    """What NVML says of this machine."""

    gpus: tuple[NvmlGpu, ...] = ()
    no_peer_access: tuple[tuple[int, int, str], ...] = ()
    """Pairs of GPU indices that cannot read each other, and why."""
    cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver supports."""
    missing: str | None = None
    """Why there is nothing here; None when NVML answered."""


def read_nvml() -> NvmlFacts:
    """Ask the driver; without it, or without nvidia-ml-py, say so in `missing`."""
    try:
        import pynvml
    except ImportError:
        return NvmlFacts(missing="nvidia-ml-py is not installed: pip install nvidia-ml-py")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return NvmlFacts(missing=f"NVML does not start: {error}")
    try:
        return _ask(pynvml)
    except pynvml.NVMLError as error:  # a GPU that fell off the bus, or that this user may not open
        return NvmlFacts(missing=f"NVML stopped answering: {error}")
    finally:
        pynvml.nvmlShutdown()


def _ask(nvml: Any) -> NvmlFacts:
    def ask(question: Callable[[], T]) -> T | None:
        # Older drivers, older bindings and virtual GPUs each lack some answers.
        try:
            return question()
        except (nvml.NVMLError, AttributeError):
            return None

    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    cuda = ask(lambda: int(nvml.nvmlSystemGetCudaDriverVersion_v2()))
    return NvmlFacts(
        tuple(_gpu(nvml, ask, index, handle) for index, handle in enumerate(handles)),
        tuple(_pairs_apart(nvml, ask, handles)),
        None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
    )


def _gpu(nvml: Any, ask: Callable[[Callable[[], Any]], Any], index: int, handle: Any) -> NvmlGpu:
    fabric = ask(lambda: _fabric(nvml, handle))
    slowed = ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
    if slowed is None:  # older bindings know the older name only
        slowed = ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
    states = [ask(partial(nvml.nvmlDeviceGetNvLinkState, handle, link)) for link in range(NVLINKS)]
    processes = ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return NvmlGpu(
        index,
        mig=ask(lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0])),
        tenants=None if processes is None else sum(process.pid != os.getpid() for process in processes),
        fabric=fabric and FABRIC_STATES.get(int(fabric.state)),
        fabric_status=fabric and int(fabric.status),
        multi_node=fabric and any(bytes(fabric.clusterUuid)),
        nvlinks_up=None if all(state is None for state in states) else sum(bool(state) for state in states),
        slowed_by=None if slowed is None else sum(bit for bit in SLOWED_BY if slowed & bit),
        rows_pending=ask(lambda: bool(nvml.nvmlDeviceGetRemappedRows(handle)[2])),
        rows_failed=ask(lambda: bool(nvml.nvmlDeviceGetRemappedRows(handle)[3])),
    )


def _fabric(nvml: Any, handle: Any) -> Any:
    info = nvml.c_nvmlGpuFabricInfoV_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
    return info


def _pairs_apart(nvml: Any, ask: Callable[[Callable[[], Any]], Any], handles: list[Any]) -> list[tuple[int, int, str]]:
    apart = []
    for a, b in permutations(range(len(handles)), 2):
        state = ask(partial(nvml.nvmlDeviceGetP2PStatus, handles[a], handles[b], P2P_READ))
        if state is not None and state not in P2P_FINE_OR_UNKNOWN:
            apart.append((a, b, P2P_STATES.get(int(state), f"state {state}")))
    return apart
