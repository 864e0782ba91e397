"""GPUDirect RDMA: is there a driver module, or DMA-BUF instead, and has anybody switched it off?"""

from __future__ import annotations

import re

from commopt.doctor.facts.machine import Machine, version_text
from commopt.doctor.facts.nearness import nearest_ports, switches_hidden
from commopt.doctor.facts.network import active_ports, before
from commopt.doctor.facts.surroundings import coherent, container
from commopt.doctor.finding import Check, Finding
from topology.model import Distance
from topology.sysfs import GDR_FILES

MODULE = Check("gdr-module", "GPUDirect RDMA module")
DMABUF = Check("gdr-dmabuf", "GPUDirect RDMA through DMA-BUF")
LEVEL = Check("gdr-level", "GPUDirect RDMA distance limit")

LOAD = "sudo modprobe nvidia-peermem && echo nvidia-peermem | sudo tee /etc/modules-load.d/nvidia-peermem.conf"
OPEN = "sudo apt-get install nvidia-open (the driver's open kernel modules; DMA-BUF then needs nothing else)"
OFED = "sys/module/mlx_compat"
"""Of MLNX_OFED and DOCA: with the adapter's driver of most other kernels nvidia-peermem does not load."""
PEERMEM = GDR_FILES[0]
CLOSED, OLD = "the open kernel driver", "Linux 5.12"
SWITCHED_OFF = "NCCL_DMABUF_ENABLE (set to 0)"
# NCCL's words, and the numbers that old versions took.
LEVELS = {"0": "LOC", "1": "PIX", "2": "PXB", "3": "PHB", "4": "SYS", "5": "SYS"}


def needed(machine: Machine) -> bool:
    """Whether there are GPUs and RDMA ports, so that data could go from one to the other directly."""
    return bool(machine.hardware.gpus) and any(not port.elastic for port in active_ports(machine))


def module(machine: Machine) -> list[Finding]:
    """Look for the module or, in its place, DMA-BUF; only without both does every message cross the CPU's memory."""
    where = ", ".join(f"/{path}" for path in GDR_FILES)
    if not needed(machine):
        return [MODULE.ok(where, "not needed", "GPUs and an active RDMA port, which this machine does not have")]
    loaded = [path for path in GDR_FILES if machine.exists(path)]
    lacking = lacking_for_dmabuf(machine)
    if loaded == [PEERMEM] and before(machine.software.nccl, (2, 23)) and lacking:
        value = f"NCCL {version_text(machine.software.nccl)} does not look at /{PEERMEM}; DMA-BUF lacks {lacking[0]}"
        expected = f"/{GDR_FILES[1]}, or NCCL 2.23: data is copied through CPU memory, although the module is loaded"
        return [MODULE.warning(where, value, expected, "pip install --upgrade torch (NCCL 2.23 or newer)", "medium")]
    if loaded:
        return [MODULE.ok(f"/{loaded[0]}", machine.text(loaded[0]) or "loaded", "loaded")]
    if not lacking:
        return [MODULE.ok(where, "absent", "not needed: DMA-BUF takes its place")]
    expected = (
        "loaded, or DMA-BUF in its place: without both, data between GPUs and network is copied through CPU memory"
    )
    value = f"absent, and DMA-BUF lacks {' and '.join(lacking)}"
    remedy = LOAD if machine.exists(OFED) else f"{_towards_dmabuf(lacking)}; or, with MLNX_OFED or DOCA: {LOAD}"
    # In a container the host's modules show as well; they are loaded on the host.
    return [MODULE.error(where, value, expected, remedy + ("  # on the host" if container(machine) else ""))]


def dmabuf(machine: Machine) -> list[Finding]:
    """Say what is missing for the way that needs no extra module."""
    where = "/proc/driver/nvidia/version, /proc/sys/kernel/osrelease, CUDA"
    if not needed(machine):
        return [DMABUF.ok(where, "not needed", "GPUs and an active RDMA port, which this machine does not have")]
    if machine.variable("NCCL_DMABUF_ENABLE") == "0":
        return [
            DMABUF.warning(
                "NCCL_DMABUF_ENABLE", "0", "unset: DMA-BUF is NCCL's first choice", "unset NCCL_DMABUF_ENABLE"
            )
        ]
    if machine.text("proc/driver/nvidia/version") is None:
        return [DMABUF.unread("/proc/driver/nvidia/version", f"{machine.why_not('proc/driver/nvidia/version')}")]
    lacking = lacking_for_dmabuf(machine)
    if not lacking:
        return [DMABUF.ok(where, "open driver, kernel and CUDA are new enough", "open driver, Linux 5.12, CUDA 11.7")]
    return [
        DMABUF.info(
            where, f"lacks {' and '.join(lacking)}", "open driver, Linux 5.12, CUDA 11.7", _towards_dmabuf(lacking)
        )
    ]


def lacking_for_dmabuf(machine: Machine) -> list[str]:
    """Return what DMA-BUF needs and this machine has not; an unknown CUDA version counts as new enough."""
    lacking = []
    if "Open Kernel Module" not in (machine.text("proc/driver/nvidia/version") or ""):
        lacking.append(CLOSED)
    kernel = re.match(r"(\d+)\.(\d+)", machine.text("proc/sys/kernel/osrelease") or "")
    if kernel is None or (int(kernel[1]), int(kernel[2])) < (5, 12):
        lacking.append(OLD)
    if machine.software.cuda is not None and machine.software.cuda < (11, 7):
        lacking.append(f"CUDA 11.7 (torch has {version_text(machine.software.cuda)})")
    if machine.variable("NCCL_DMABUF_ENABLE") == "0":
        lacking.append(SWITCHED_OFF)
    return lacking


def _towards_dmabuf(lacking: list[str]) -> str:
    known = {CLOSED: OPEN, OLD: "a kernel of Linux 5.12 or newer", SWITCHED_OFF: "unset NCCL_DMABUF_ENABLE"}
    return "; ".join(known.get(what, "a torch for CUDA 11.7 or newer") for what in lacking)


def level(machine: Machine) -> list[Finding]:
    """Compare the limit that is set, or NCCL's own, with how far GPUs and adapters really are apart."""
    name = "NCCL_IB_GDR_LEVEL" if machine.variable("NCCL_IB_GDR_LEVEL") else "NCCL_NET_GDR_LEVEL"
    value = machine.variable(name)
    if not needed(machine):
        return [LEVEL.ok(name, value or "unset", "GPUs and an active RDMA port, which this machine does not have")]
    # Where the GPU's memory is the CPU's too (Grace), NCCL goes through the CPU as well.
    own_cpu = coherent(machine) and not before(machine.software.nccl, (2, 27))
    own_cpu = own_cpu and machine.variable("NCCL_NET_GDR_C2C") != "0"
    if value is not None:
        return _set_level(name, value, own_cpu)
    read = f"{name}, {machine.topology.source}"
    if switches_hidden(machine):
        return [LEVEL.ok(read, "unset", "unset; how far apart they are is for the provider's topology file to say")]
    farthest = Distance.NODE if own_cpu else Distance.PXB
    found = [
        f"{near.gpu}-{','.join(near.nics)} {near.distance.value}"
        for near in nearest_ports(machine)
        if near.distance is not None and near.distance.rank > farthest.rank
    ]
    if not found:
        return [LEVEL.ok(read, "unset", f"unset: NCCL goes directly up to {'P2C' if own_cpu else 'PXB'}")]
    if own_cpu:
        expected = "an adapter on the GPU's own CPU: NCCL does not use GPUDirect RDMA across two"
        return [LEVEL.info(read, "; ".join(found), expected, "python -m topology; move an adapter", "medium")]
    expected = "PXB or nearer: NCCL does not use GPUDirect RDMA across a CPU unless it is told to"
    # Through some CPUs it is faster than a copy, through others slower: only a trial tells.
    return [LEVEL.info(read, "; ".join(found), expected, "try: export NCCL_NET_GDR_LEVEL=PHB (or SYS)", "medium")]


def _set_level(name: str, value: str, own_cpu: bool) -> list[Finding]:
    found = []
    word = LEVELS.get(value, value.upper())
    if word == "LOC":
        expected = "unset, or PXB: LOC switches GPUDirect RDMA off"
        found.append(LEVEL.error(name, value, expected, f"unset {name}"))
    elif own_cpu and word in ("NVL", "C2C", "PIX", "PXB"):
        expected = "unset: adapters of this machine are reached through the CPU (P2C)"
        found.append(LEVEL.warning(name, value, expected, f"unset {name}", "medium"))
    elif value in LEVELS:
        expected = f"a word: NCCL reads {value} as {word}"
        found.append(LEVEL.warning(name, value, expected, f"unset {name}; export NCCL_NET_GDR_LEVEL={word}", "medium"))
    elif word not in ("NVL", "C2C", "PIX", "PXB", "PHB", "SYS", "P2C", "PXN"):
        found.append(LEVEL.warning(name, value, "LOC, PIX, PXB, PHB or SYS", f"unset {name}"))
    if name == "NCCL_IB_GDR_LEVEL":
        expected = "NCCL_NET_GDR_LEVEL, its name since NCCL 2.4"
        remedy = f"unset {name}" + ("" if word == "LOC" else f"; export NCCL_NET_GDR_LEVEL={word}")
        found.append(LEVEL.warning(name, value, expected, remedy, "medium"))
    if not found:
        found.append(LEVEL.info(name, value, "unset, unless the limit was measured to help", f"unset {name}", "low"))
    return found
