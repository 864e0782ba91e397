# SPDX-License-Identifier: Apache-2.0
"""GPUs: peer access and NVLink, the NVSwitch fabric, other users, clocks, memory, errors in the driver's log."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from commopt.doctor.finding import Finding, Unread, check, error, info, ok, warning
from commopt.doctor.machine import GPU, SEVERAL_GPUS, Machine
from commopt.doctor.nvml import POWER_LIMIT, SLOWED_BY, NvmlGpu
from commopt.doctor.settings import nvlink_between_nodes

KERNEL_LOG = "dev/kmsg"
RECORDS = 100_000
# Errors of programs, such as an access out of bounds or a killed process.
OF_PROGRAMS = (13, 31, 43, 45, 68, 69)
XID_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)[^)]*\): (\d+)")
IMEX_CHANNELS = "dev/nvidia-caps-imex-channels"


def _names(gpus: Iterable[NvmlGpu]) -> str:
    return ", ".join(f"GPU{gpu.index}" for gpu in gpus)


@check(
    "NVML: peer access, NVLink state",
    "nvidia-smi topo -p2p r; check ACS and IOMMU; see the NVSwitch fabric too",
    needs=(SEVERAL_GPUS,),
)
def peer_access(machine: Machine) -> Iterator[Finding]:
    """Peer access and NVLink: between all GPUs; NCCL copies through CPU memory otherwise (GeForce never has it)."""
    if len(machine.hardware.gpus) < 2 and len(machine.nvml.gpus) < 2:
        return
    if machine.nvml.missing is not None:
        raise Unread(machine.nvml.missing, "nvidia-smi topo -p2p r; nvidia-smi nvlink -s")
    pairs = machine.nvml.no_peer_access
    if pairs:
        shown = ", ".join(f"GPU{a}-GPU{b}: {why}" for a, b, why in pairs[:4]) + (" ..." if len(pairs) > 4 else "")
        yield warning(shown, confidence="medium")
    up = {gpu.index: gpu.nvlinks_up for gpu in machine.nvml.gpus if gpu.nvlinks_up is not None}
    # A GPU beside a bridged pair has none by design.
    least, most = 0 if _switches(machine) else 1, max(up.values(), default=0)
    fewer = ", ".join(f"GPU{place}: {count} NVLinks" for place, count in up.items() if least <= count < most)
    if fewer:
        remedy = "nvidia-smi nvlink -s; nvidia-smi nvlink -e; reset the GPU or replace the bridge"
        yield warning(fewer, f"{most} like the other GPUs", remedy)


def _switches(machine: Machine) -> int:
    return sum(device.kind == "nvswitch" for device in machine.hardware.pci)


def _fabric(machine: Machine) -> bool:
    stated = any(gpu.fabric not in (None, "not supported") for gpu in machine.nvml.gpus)
    return stated or _switches(machine) > 0 or nvlink_between_nodes(machine)


@check("NVML: fabric state", needs=((_fabric, "no NVSwitch"),))
def nvswitch(machine: Machine) -> Iterator[Finding]:
    """NVSwitch fabric: completed, status 0, or no NVSwitch; CUDA does not start on these GPUs otherwise."""
    gpus = [gpu for gpu in machine.nvml.gpus if gpu.fabric not in (None, "not supported")]
    switches, missing = _switches(machine), machine.nvml.missing
    start = "sudo systemctl enable --now nvidia-fabricmanager; nvidia-smi -q | grep -A 3 Fabric"
    if machine.coherent or nvlink_between_nodes(machine):  # switches and fabric manager are in trays of their own
        start = "nvidia-smi -q | grep -A 8 Fabric; the fabric manager runs on the switch trays of the rack, not here"
    bad = [gpu for gpu in gpus if gpu.fabric != "completed" or gpu.fabric_status]
    if not gpus and (switches or (machine.hardware.gpus and missing is not None)):
        raise Unread(f"{switches} NVSwitches, but {missing or 'the driver gives no fabric state'}", start)
    if bad:
        yield error(", ".join(f"GPU{gpu.index}: {gpu.fabric}, status {gpu.fabric_status}" for gpu in bad), remedy=start)
    elif nvlink_between_nodes(machine) and not machine.listing(IMEX_CHANNELS):
        expected = "a channel: NVLink between nodes fails without one, and so does NCCL when it starts"
        remedy = "sudo systemctl enable --now nvidia-imex; nvidia-imex-ctl -N; "
        remedy += f"container: --device=/{IMEX_CHANNELS}/channel0"
        yield warning(machine.unread_reason(IMEX_CHANNELS), expected, remedy, "medium", f"/{IMEX_CHANNELS}")


@check("NVML: processes, MIG mode", "nvidia-smi", needs=(GPU,))
def tenants(machine: Machine) -> Iterator[Finding]:
    """Other users of the GPUs: none, since other processes and MIG slices share the GPUs with the job."""
    if sliced := _names(gpu for gpu in machine.driver_gpus if gpu.mig):
        expected = "off: MIG slices have no peer access, NCCL takes one slice of a GPU only"
        yield info(f"MIG is on for {sliced}", expected, "nvidia-smi mig -lgi; sudo nvidia-smi -mig 0 (ends all slices)")
    busy = ", ".join(f"GPU{gpu.index}: {gpu.tenants}" for gpu in machine.driver_gpus if gpu.tenants)
    if busy:
        yield info(f"{busy} other process(es)", confidence="medium")


@check(
    "NVML: clock event reasons",
    "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; check cooling, air flow and power supplies",
    needs=(GPU,),
)
def gpu_clocks(machine: Machine) -> Iterator[Finding]:
    """Clocks of the GPUs: full, also under load, since all ranks wait for the slowest GPU."""
    stated = {gpu.index: gpu.slowed_by for gpu in machine.driver_gpus if gpu.slowed_by is not None}
    if not stated and machine.hardware.gpus:
        raise Unread("the driver gives no reasons", "nvidia-smi -q -d PERFORMANCE,ROW_REMAPPER")
    reasons = {place: [why for bit, why in SLOWED_BY.items() if bits & bit] for place, bits in stated.items()}
    slowed = [f"GPU{place}: {', '.join(reasons[place])}" for place, bits in stated.items() if bits & ~POWER_LIMIT]
    limited = ", ".join(f"GPU{place}" for place, bits in stated.items() if bits)
    if slowed:
        yield warning("; ".join(slowed))
    elif limited:
        expected = "normal under full load, if all GPUs have the same limit"
        remedy = "nvidia-smi --query-gpu=index,power.limit,power.default_limit,clocks.sm --format=csv"
        yield info(f"power limit reached: {limited}", expected, remedy, "low")


@check(
    "NVML: remapped rows",
    "stop all processes on it, then: sudo nvidia-smi --gpu-reset -i INDEX (or reboot)",
    needs=(GPU,),
)
def gpu_memory(machine: Machine) -> Iterator[Finding]:
    """Memory of the GPUs: no bad row; they are replaced at the next reset, until no spare one is left."""
    if failed := _names(gpu for gpu in machine.nvml.gpus if gpu.rows_failed):
        expected = "replaced rows: this GPU's memory is broken, results and processes on it are not safe"
        yield error(f"replacement failed: {failed}", expected, "take it out of service, replace it")
    if pending := _names(gpu for gpu in machine.nvml.gpus if gpu.rows_pending and not gpu.rows_failed):
        yield warning(f"replacement pending: {pending}")


@check(
    f"/{KERNEL_LOG}",
    "sudo dmesg | grep Xid; what each number means: docs.nvidia.com/deploy/xid-errors; reset the GPU",
    needs=(GPU,),
)
def xid(machine: Machine) -> Iterator[Finding]:
    """Errors that the driver logged (Xid): none since the machine started."""
    if not machine.hardware.gpus:
        return
    lines = _records(machine.root / KERNEL_LOG)
    if not lines:
        raise Unread(machine.unread_reason(KERNEL_LOG), "sudo dmesg | grep -i xid")
    counts = Counter((match[1], int(match[2])) for match in map(XID_LINE.search, lines) if match is not None)
    serious = {key: count for key, count in counts.items() if key[1] not in OF_PROGRAMS}
    shown = ", ".join(f"{number} on {gpu} ({count})" for (gpu, number), count in (serious or counts).items())
    if serious:
        yield warning(shown, confidence="medium")
    elif counts:
        yield info(shown, "none; these usually come from programs", confidence="low")
    else:
        yield ok("none")


def _records(device: Path) -> list[str]:
    """Return the records of the kernel's ring buffer, without waiting for new ones."""
    found: list[str] = []

    def unblocked(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NONBLOCK)

    # An OSError means an overwritten record, or missing rights.
    with suppress(OSError), open(device, "rb", buffering=0, opener=unblocked) as file:
        while len(found) < RECORDS and (record := file.read(1 << 16)):
            found += record.decode(errors="replace").splitlines()
    return found
