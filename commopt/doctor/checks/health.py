"""Is each GPU well? One that is hot, short of power or broken makes all others wait for it."""

from __future__ import annotations

import os
import re

from commopt.doctor.facts.machine import Machine
from commopt.doctor.facts.nvml import HELD_BACK
from commopt.doctor.finding import Check, Finding

CLOCKS = Check("gpu-clocks", "Clocks of the GPUs")
MEMORY = Check("gpu-memory", "Memory of the GPUs")
XID = Check("xid", "Errors that the driver logged (Xid)")
PERSISTENCE = Check("persistence", "Persistence mode")

POWER_LIMIT = 0x04
LOGS = ("var/log/kern.log", "var/log/messages", "var/log/syslog")
LOG_TAIL_BYTES = 8 << 20
RECORDS = 100_000
# Errors of programs: an access out of bounds, a process that was stopped.
OF_PROGRAMS = (13, 31, 43, 45, 68, 69)
XID_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)[^)]*\): (\d+)")


def clocks(machine: Machine) -> list[Finding]:
    """A GPU that slows its clock takes longer for each step, and the collective waits for the slowest."""
    read = "NVML: clock event reasons"
    told = [gpu for gpu in machine.nvml.gpus if gpu.held_back is not None]
    if not told and machine.hardware.gpus:
        # Says it for all of NVML that this file asks.
        why = machine.nvml.missing or "the driver does not tell"
        return [CLOCKS.unread(read, why, "nvidia-smi -q -d PERFORMANCE,ROW_REMAPPER")]
    slowed = [f"GPU{gpu.index}: {_reasons(gpu.held_back)}" for gpu in told if (gpu.held_back or 0) & ~POWER_LIMIT]
    if slowed:
        expected = "full clocks: all ranks wait for the slowest GPU"
        remedy = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; check cooling, air flow and power supplies"
        return [CLOCKS.warning(read, "; ".join(slowed), expected, remedy)]
    limited = [f"GPU{gpu.index}" for gpu in told if gpu.held_back]
    if limited:
        expected = "normal under full load, if all GPUs have the same limit"
        remedy = "nvidia-smi --query-gpu=index,power.limit,power.default_limit,clocks.sm --format=csv"
        return [CLOCKS.info(read, f"power limit reached: {', '.join(limited)}", expected, remedy, "low")]
    return [CLOCKS.ok(read, f"{len(told)} GPUs, nothing holds them back now", "full clocks, also under load")]


def _reasons(bits: int | None) -> str:
    return ", ".join(text for bit, text in HELD_BACK.items() if (bits or 0) & bit)


def memory(machine: Machine) -> list[Finding]:
    """Bad rows of memory are replaced at the next reset; once no spare one is left, the GPU has to go."""
    read = "NVML: remapped rows"
    told = [gpu for gpu in machine.nvml.gpus if gpu.rows_failed is not None]
    failed = ", ".join(f"GPU{gpu.index}" for gpu in told if gpu.rows_failed)
    pending = ", ".join(f"GPU{gpu.index}" for gpu in told if gpu.rows_pending and not gpu.rows_failed)
    found = []
    if failed:
        expected = "replaced rows: this GPU's memory is broken, results and processes on it are not safe"
        found.append(
            MEMORY.error(read, f"replacement failed: {failed}", expected, "take it out of service, replace it")
        )
    if pending:
        expected = "none: uncorrectable errors were seen, a reset replaces the rows"
        remedy = "stop all processes on it, then: sudo nvidia-smi --gpu-reset -i INDEX (or reboot)"
        found.append(MEMORY.warning(read, f"replacement pending: {pending}", expected, remedy))
    if not told:
        return []
    return found or [MEMORY.ok(read, f"{len(told)} GPUs, none pending or failed", "none pending or failed")]


def xid(machine: Machine) -> list[Finding]:
    """The driver logs what goes wrong with a GPU or an NVLink, and nothing else tells."""
    if not machine.hardware.gpus:
        return [XID.ok("kernel log", "no GPU", "nothing to check")]
    read, lines = _kernel_log(machine)
    if lines is None:
        return [XID.unread(read, "no kernel log that this user can read", "sudo dmesg | grep -i xid")]
    counts: dict[tuple[str, int], int] = {}
    for match in map(XID_LINE.search, lines):
        if match is not None:
            counts[match[1], int(match[2])] = counts.get((match[1], int(match[2])), 0) + 1
    serious = {key: count for key, count in counts.items() if key[1] not in OF_PROGRAMS}
    shown = ", ".join(f"{number} on {gpu} ({count})" for (gpu, number), count in (serious or counts).items())
    source = read.split()[0]  # /dev/kmsg has no end
    look = "sudo dmesg | grep Xid" if source.endswith("kmsg") else f"grep Xid {source}"
    remedy = f"{look}; what each number means: docs.nvidia.com/deploy/xid-errors; reset the GPU"
    if serious:
        return [XID.warning(read, shown, "none since the machine started", remedy, "medium")]
    if counts:
        return [XID.info(read, shown, "none; these come from programs as a rule", remedy, "low")]
    return [XID.ok(read, "none", "none since the machine started")]


def _kernel_log(machine: Machine) -> tuple[str, list[str] | None]:
    """Return where it was read, and what the kernel said since the machine started; None when nothing is readable."""
    records = _records(machine.root / "dev/kmsg")
    if records:
        return "/dev/kmsg", records
    for path in LOGS:
        try:
            with (machine.root / path).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            continue
        starts = [place for place, line in enumerate(lines) if "Linux version " in line]
        return f"/{path}", lines[starts[-1] :] if starts else lines
    return "/dev/kmsg, " + ", ".join(f"/{path}" for path in LOGS), None


def _records(device: os.PathLike[str]) -> list[str]:
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


def persistence(machine: Machine) -> list[Finding]:
    """Without it the driver lets go of an idle GPU, and the next process waits seconds until it is set up again."""
    off = ", ".join(f"GPU{gpu.index}" for gpu in machine.nvml.gpus if gpu.persistent is False)
    read = "NVML: persistence mode"
    if off:
        expected = "on: the driver sets an idle GPU up again for each process, which takes seconds"
        return [PERSISTENCE.info(read, f"off: {off}", expected, "sudo systemctl enable --now nvidia-persistenced")]
    on = any(gpu.persistent for gpu in machine.nvml.gpus)
    return [PERSISTENCE.ok(read, "on", "on")] if on else []
