# SPDX-License-Identifier: Apache-2.0
"""Facts from the driver's management library (NVML): peer access, fabric, MIG, tenants, links, health."""

from __future__ import annotations

import os
from collections.abc import Iterator
from ctypes import byref
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from topology.nvml import Driver, NoDriver, driver

NVLINKS = 18  # the largest number of links of a GPU so far
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
"""NVML's clock event reasons, without those of idle GPUs and of chosen clocks."""
P2P_FINE_OR_UNKNOWN = (0, 6)


@dataclass(frozen=True)
class NvmlGpu:
    """One GPU; None for values that the driver does not give."""

    index: int
    mig: bool | None = None
    tenants: int | None = None
    """Compute processes other than this one."""
    fabric: str | None = None
    """A value of FABRIC_STATES."""
    fabric_status: int | None = None
    """0 for success."""
    multi_node: bool | None = None
    """Whether its NVLink fabric spans machines."""
    nvlinks_up: int | None = None
    slowed_by: int | None = None
    """Reasons for a reduced clock: bits of SLOWED_BY."""
    rows_pending: bool | None = None
    """Whether bad memory rows await replacement at the next reset."""
    rows_failed: bool | None = None
    """Whether a bad row could not be replaced."""


@dataclass(frozen=True)
class NvmlFacts:
    """NVML's facts about this machine."""

    gpus: tuple[NvmlGpu, ...] = ()
    no_peer_access: tuple[tuple[int, int, str], ...] = ()
    """Pairs of GPU indices without peer access, with the reason."""
    cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver supports."""
    missing: str | None = None
    """Reason why there are no facts; None if NVML answered."""


def read_nvml() -> NvmlFacts:
    """Return the driver's facts. If it does not answer, or nvidia-ml-py is missing, `missing` has the reason."""
    try:
        with driver() as asked:
            cuda = asked.ask("nvmlSystemGetCudaDriverVersion_v2")
            return NvmlFacts(
                tuple(_gpu(asked, index, handle) for index, handle in enumerate(asked.handles)),
                tuple(_pairs_apart(asked)),
                None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
            )
    except NoDriver as why:
        return NvmlFacts(missing=str(why))


def _gpu(asked: Driver, index: int, handle: Any) -> NvmlGpu:
    mig, rows = asked.ask("nvmlDeviceGetMigMode", handle), asked.ask("nvmlDeviceGetRemappedRows", handle)
    slowed = asked.ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    states = [asked.ask("nvmlDeviceGetNvLinkState", handle, link) for link in range(NVLINKS)]
    processes = asked.ask("nvmlDeviceGetComputeRunningProcesses", handle)
    fabric = asked.ask("c_nvmlGpuFabricInfoV_t")
    if fabric is not None and asked.ask("nvmlDeviceGetGpuFabricInfoV", handle, byref(fabric)) is None:
        fabric = None
    return NvmlGpu(
        index,
        mig=None if mig is None else bool(mig[0]),
        tenants=None if processes is None else sum(process.pid != os.getpid() for process in processes),
        fabric=fabric and FABRIC_STATES.get(int(fabric.state)),
        fabric_status=fabric and int(fabric.status),
        multi_node=fabric and any(bytes(fabric.clusterUuid)),
        nvlinks_up=None if all(state is None for state in states) else sum(bool(state) for state in states),
        slowed_by=None if slowed is None else sum(bit for bit in SLOWED_BY if slowed & bit),
        rows_pending=None if rows is None else bool(rows[2]),
        rows_failed=None if rows is None else bool(rows[3]),
    )


def _pairs_apart(asked: Driver) -> Iterator[tuple[int, int, str]]:
    for a, b in permutations(range(len(asked.handles)), 2):
        state = asked.ask("nvmlDeviceGetP2PStatus", asked.handles[a], asked.handles[b], P2P_READ)
        if state is not None and state not in P2P_FINE_OR_UNKNOWN:
            yield a, b, P2P_STATES.get(int(state), f"state {state}")
