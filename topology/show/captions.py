"""How the facts about a machine are put into words, for text and picture alike. Unknown facts are left out."""

from __future__ import annotations

from itertools import combinations

from topology.facts.bandwidth import peer_bandwidth_gbps
from topology.facts.nics import node_nic_gbps
from topology.facts.nvlink import links_per_gpu, nvlink_kind
from topology.facts.rings import rings
from topology.model import Cpu, Gpu, Nic, PciDevice, Topology

_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_NVLINK = {
    "switch": "NVSwitch",
    "mesh": "NVLinks from each GPU to each other",
    "pairs": "NVLinks between pairs of GPUs",
    "hybrid_cube_mesh": "NVLinks as a hybrid cube mesh",
    "irregular": "irregular NVLinks",
    "none": "no NVLinks",
    "unknown": "NVLinks unknown",
}


def cpu_words(cpu: Cpu) -> str:
    """As in "64 CPUs (0-31,64-95)"."""
    return f"{len(cpu.affinity)} CPUs ({_ranges(cpu.affinity)})" if cpu.affinity else ""


def gpu_words(gpu: Gpu) -> str:
    """The model without its maker, or else the compute capability."""
    return gpu.name.removeprefix("NVIDIA ") if gpu.name else f"sm_{gpu.sm}" if gpu.sm is not None else ""


def nic_words(nic: Nic) -> str:
    """As in "400 Gb/s InfiniBand"."""
    return " ".join(filter(None, (speed_words(nic.speed_gbps), nic.link_layer)))


def speed_words(gbps: float | None) -> str:
    """As in "25 Gb/s"."""
    return "" if gbps is None else f"{gbps:.4g} Gb/s"


def link_words(device: PciDevice | None) -> str:
    """As in "Gen5 x16", or "Gen5 x8 (of x16)" when it runs below what the device can.

    The generation is the best that it can: an idle device slows its link down, which says nothing.
    """
    if device is None:
        return ""
    gts = device.link_max.gts or device.link.gts
    width = device.link.width or device.link_max.width
    speed = "" if gts is None else f"Gen{_GENERATIONS[gts]}" if gts in _GENERATIONS else f"{gts:g} GT/s"
    lanes = f"x{width}" if width else ""
    if is_narrow(device):
        lanes += f" (of x{device.link_max.width})"
    return " ".join(filter(None, (speed, lanes)))


def is_narrow(device: PciDevice | None) -> bool:
    """Whether a link runs on fewer lanes than the device has."""
    return device is not None and bool(device.link.width) and (device.link.width or 0) < (device.link_max.width or 0)


def nvlink_words(topology: Topology) -> str:
    """As in "NVSwitch, 18 NVLinks per GPU"."""
    linked = [count for count in links_per_gpu(topology) if count]
    counts = "-".join(map(str, sorted({min(linked), max(linked)}))) if linked else ""
    gpus = len(topology.gpus)
    where = "per GPU" if len(linked) == gpus else f"at {len(linked)} of {gpus} GPUs"
    kind = nvlink_kind(topology)
    if kind == "unknown" and linked:
        return f"{counts} NVLinks {where}, directly or through switches"
    return _NVLINK[kind] + (f", {counts} NVLinks {where}" if linked else "")


def summary(topology: Topology) -> str:
    """The machine in one line."""
    models = list(dict.fromkeys(filter(None, map(gpu_words, topology.gpus))))
    ports = [nic for nic in topology.nics if not nic.virtual]
    parts = [
        _counted(len(topology.gpus), "GPU") + (f" ({', '.join(models)})" if models else ""),
        nvlink_words(topology) if len(topology.gpus) > 1 else "",
        _counted(len(ports), "network port"),
        speed_words(node_nic_gbps(topology)) or ("speed unknown" if ports else ""),
    ]
    return " · ".join(filter(None, parts))


def notes(topology: Topology) -> list[str]:
    """What the parts do not show by themselves, a line each; the warnings are not among them."""
    found = []
    pairs = list(combinations(range(len(topology.gpus)), 2))
    rates = [peer_bandwidth_gbps(topology, a, b) for a, b in pairs]
    known = sorted({rate for rate in rates if rate is not None})
    if known:
        span = speed_words(known[0]) + (f" to {speed_words(known[-1])}" if len(known) > 1 else "")
        some = "" if None not in rates else ", where known"
        found.append(f"GPU to GPU: {span} in each direction{some}")
    if len(topology.gpus) > 2 and nvlink_kind(topology) not in ("switch", "none", "unknown"):
        orders = ["-".join(str(topology.gpus[place].index) for place in ring) for ring in rings(topology)]
        words = [
            f"{order} (x{count})" if (count := orders.count(order)) > 1 else order for order in dict.fromkeys(orders)
        ]
        found.append(f"rings along NVLinks, as far as they go: {', '.join(words)}")
    virtual = [nic.name for nic in topology.nics if nic.virtual]
    if virtual:
        more = f" and {len(virtual) - 6} more" if len(virtual) > 6 else ""
        found.append(f"without hardware of their own: {', '.join(virtual[:6])}{more}")
    return found


def _counted(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _ranges(numbers: tuple[int, ...]) -> str:
    """As in "0-31,64-95"."""
    ordered = sorted(numbers)
    starts = [number for number in ordered if number - 1 not in set(numbers)]
    ends = [number for number in ordered if number + 1 not in set(numbers)]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
