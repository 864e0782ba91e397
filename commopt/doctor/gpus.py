"""GPUs: peer access and NVLink, the NVSwitch fabric, other users, clocks, memory, errors that the driver logged."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from commopt.doctor.finding import Finding, check, error, info, ok, unread, warning
from commopt.doctor.machine import Machine
from commopt.doctor.nvml import POWER_LIMIT, SLOWED_BY
from commopt.doctor.settings import nvlink_between_nodes

LOGS = ("var/log/kern.log", "var/log/messages", "var/log/syslog")
LOG_TAIL_BYTES = 8 << 20
RECORDS = 100_000
# Errors of programs: an access out of bounds, a process that was stopped.
OF_PROGRAMS = (13, 31, 43, 45, 68, 69)
XID_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)[^)]*\): (\d+)")


@check("peer-access", "Peer access and NVLink", "NVML", "peer access between all GPUs")
def peers(machine: Machine) -> Iterator[Finding]:
    """Find pairs of GPUs that cannot reach each other, and NVLinks that are down."""
    if len(machine.hardware.gpus) < 2 and len(machine.nvml.gpus) < 2:
        return
    if machine.nvml.missing is not None:
        yield unread(machine.nvml.missing, "nvidia-smi topo -p2p r; nvidia-smi nvlink -s")
    pairs = machine.nvml.no_peer_access
    if pairs:
        shown = ", ".join(f"GPU{a}-GPU{b}: {why}" for a, b, why in pairs[:4]) + (" ..." if len(pairs) > 4 else "")
        expected = "peer access: NCCL copies through CPU memory otherwise (GeForce cards never have it)"
        remedy = "nvidia-smi topo -p2p r; check ACS and IOMMU; with NVSwitch: sudo systemctl start nvidia-fabricmanager"
        yield warning(shown, expected, remedy, "medium", "NVML: peer access")
    up = {gpu.index: gpu.nvlinks_up for gpu in machine.nvml.gpus if gpu.nvlinks_up is not None}
    # A GPU beside a bridged pair has none by design.
    least = 0 if any(device.kind == "nvswitch" for device in machine.hardware.pci) else 1
    fewer = ", ".join(
        f"GPU{place}: {count} NVLinks" for place, count in up.items() if least <= count < max(up.values())
    )
    if fewer:
        remedy = "nvidia-smi nvlink -s; nvidia-smi nvlink -e; reset the GPU or replace the bridge"
        yield warning(fewer, f"{max(up.values())} like the other GPUs", remedy, read="NVML: NVLink state")


@check("nvswitch", "NVSwitch fabric", "NVML: fabric state", "completed, status 0, or no NVSwitch")
def fabric(machine: Machine) -> Iterator[Finding]:
    """GPUs behind NVSwitches work together only after the fabric manager has set up the switches."""
    switches = sum(device.kind == "nvswitch" for device in machine.hardware.pci)
    gpus = [gpu for gpu in machine.nvml.gpus if gpu.fabric not in (None, "not supported")]
    missing, start = machine.nvml.missing, "sudo systemctl enable --now nvidia-fabricmanager; "
    start += "nvidia-smi -q | grep -A 3 Fabric"
    if machine.coherent or nvlink_between_nodes(machine):  # the switches, and who manages them, are in their own trays
        start = "nvidia-smi -q | grep -A 8 Fabric; the fabric manager runs on the switch trays of the rack, not here"
    bad = [gpu for gpu in gpus if gpu.fabric != "completed" or gpu.fabric_status]
    if not gpus and (switches or (machine.hardware.gpus and missing is not None)):
        yield unread(f"{switches} NVSwitches, but {missing or 'the driver tells no fabric state'}", start)
    elif bad:
        shown = ", ".join(f"GPU{gpu.index}: {gpu.fabric}, status {gpu.fabric_status}" for gpu in bad)
        yield error(shown, "completed, status 0: CUDA does not start on these GPUs, or NVLink is unusable", start)
    elif nvlink_between_nodes(machine) and not machine.listing("dev/nvidia-caps-imex-channels"):
        expected = "a channel: NVLink between nodes fails without one, and so does NCCL when it starts"
        remedy = "sudo systemctl enable --now nvidia-imex; nvidia-imex-ctl -N; "
        remedy += "container: --device=/dev/nvidia-caps-imex-channels/channel0"
        value = machine.why_not("dev/nvidia-caps-imex-channels")
        yield warning(value, expected, remedy, "medium", "/dev/nvidia-caps-imex-channels")


@check("tenants", "Other users of the GPUs", "NVML: processes, MIG mode", "the job alone")
def tenants(machine: Machine) -> Iterator[Finding]:
    """MIG slices and other processes share what the job believes to have alone."""
    if machine.nvml.missing is not None and machine.hardware.gpus:
        yield unread(machine.nvml.missing, "nvidia-smi")
    sliced = ", ".join(f"GPU{gpu.index}" for gpu in machine.nvml.gpus if gpu.mig)
    if sliced:
        expected = "off: MIG slices have no peer access, NCCL takes one slice of a GPU only"
        yield info(f"MIG is on for {sliced}", expected, "nvidia-smi mig -lgi; sudo nvidia-smi -mig 0 (ends all slices)")
    busy = ", ".join(f"GPU{gpu.index}: {gpu.tenants}" for gpu in machine.nvml.gpus if gpu.tenants)
    if busy:
        yield info(f"{busy} other process(es)", "the job alone", "nvidia-smi", "medium")


@check("gpu-clocks", "Clocks of the GPUs", "NVML: clock event reasons", "full clocks, also under load")
def clocks(machine: Machine) -> Iterator[Finding]:
    """A GPU that slows its clock takes longer for each step, and the collective waits for the slowest."""
    told = {gpu.index: gpu.slowed_by for gpu in machine.nvml.gpus if gpu.slowed_by is not None}
    if not told and machine.hardware.gpus:
        yield unread(machine.nvml.missing or "the driver does not tell", "nvidia-smi -q -d PERFORMANCE,ROW_REMAPPER")
    slowed = [
        f"GPU{place}: {', '.join(why for bit, why in SLOWED_BY.items() if bits & bit)}"
        for place, bits in told.items()
        if bits & ~POWER_LIMIT
    ]
    limited = ", ".join(f"GPU{place}" for place, bits in told.items() if bits)
    if slowed:
        remedy = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; check cooling, air flow and power supplies"
        yield warning("; ".join(slowed), "full clocks: all ranks wait for the slowest GPU", remedy)
    elif limited:
        expected = "normal under full load, if all GPUs have the same limit"
        remedy = "nvidia-smi --query-gpu=index,power.limit,power.default_limit,clocks.sm --format=csv"
        yield info(f"power limit reached: {limited}", expected, remedy, "low")


@check("gpu-memory", "Memory of the GPUs", "NVML: remapped rows", "none pending or failed")
def memory(machine: Machine) -> Iterator[Finding]:
    """Bad rows of memory are replaced at the next reset; once no spare one is left, the GPU has to go."""
    failed = ", ".join(f"GPU{gpu.index}" for gpu in machine.nvml.gpus if gpu.rows_failed)
    pending = ", ".join(f"GPU{gpu.index}" for gpu in machine.nvml.gpus if gpu.rows_pending and not gpu.rows_failed)
    if failed:
        expected = "replaced rows: this GPU's memory is broken, results and processes on it are not safe"
        yield error(f"replacement failed: {failed}", expected, "take it out of service, replace it")
    if pending:
        expected = "none: uncorrectable errors were seen, a reset replaces the rows"
        remedy = "stop all processes on it, then: sudo nvidia-smi --gpu-reset -i INDEX (or reboot)"
        yield warning(f"replacement pending: {pending}", expected, remedy)


@check("xid", "Errors that the driver logged (Xid)", "kernel log", "none since the machine started")
def xid(machine: Machine) -> Iterator[Finding]:
    """The driver logs what goes wrong with a GPU or an NVLink, and nothing else tells."""
    if not machine.hardware.gpus:
        return
    read, lines = _kernel_log(machine.root)
    if lines is None:
        yield unread("no kernel log that this user can read", "sudo dmesg | grep -i xid", read)
        return
    counts = Counter((match[1], int(match[2])) for match in map(XID_LINE.search, lines) if match is not None)
    serious = {key: count for key, count in counts.items() if key[1] not in OF_PROGRAMS}
    shown = ", ".join(f"{number} on {gpu} ({count})" for (gpu, number), count in (serious or counts).items())
    look = "sudo dmesg | grep Xid" if read.endswith("kmsg") else f"grep Xid {read}"  # /dev/kmsg has no end
    remedy = f"{look}; what each number means: docs.nvidia.com/deploy/xid-errors; reset the GPU"
    if serious:
        yield warning(shown, "none since the machine started", remedy, "medium", read)
    elif counts:
        yield info(shown, "none; these come from programs as a rule", remedy, "low", read)
    else:
        yield ok("none", read=read)


def _kernel_log(root: Path) -> tuple[str, list[str] | None]:
    """Return where it was read, and what the kernel said since the machine started; None when nothing is readable."""
    records = _records(root / "dev/kmsg")
    if records:
        return "/dev/kmsg", records
    for path in LOGS:
        try:
            with (root / path).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            continue
        starts = [place for place, line in enumerate(lines) if "Linux version " in line]
        return f"/{path}", lines[starts[-1] :] if starts else lines
    return "/dev/kmsg, " + ", ".join(f"/{path}" for path in LOGS), None


def _records(device: Path) -> list[str]:
    """Return the kernel's ring buffer, a record at each read, without waiting for the next one."""
    found: list[str] = []
    try:
        file = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return found
    try:
        while len(found) < RECORDS and (record := os.read(file, 1 << 16)):
            found += record.decode(errors="replace").splitlines()
    except OSError:  # the end, or a record that was overwritten meanwhile
        pass
    finally:
        os.close(file)
    return found
