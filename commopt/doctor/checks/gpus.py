"""GPUs among themselves: CPU placement, peer access and NVLink, the NVSwitch fabric, other tenants."""

from __future__ import annotations

from commopt.doctor.facts.machine import Machine
from commopt.doctor.facts.placement import own_gpu
from commopt.doctor.facts.surroundings import coherent, status
from commopt.doctor.finding import Check, Finding
from topology.kernel_files import cpu_list

CPUS = Check("cpu-affinity", "CPUs of this process")
PEERS = Check("peer-access", "Peer access and NVLink")
FABRIC = Check("nvswitch", "NVSwitch fabric")
TENANTS = Check("tenants", "Other users of the GPUs")

NO_GPU = "no GPU"


def cpus(machine: Machine) -> list[Finding]:
    """A process pinned to the wrong processor, or to one CPU, feeds its GPU and its sockets slowly."""
    read = "/proc/self/status: Cpus_allowed_list"
    text = status(machine, "Cpus_allowed_list")
    allowed = set(cpu_list(text) or ())
    online = set(cpu_list(machine.text("sys/devices/system/cpu/online")) or ())
    if not allowed:
        return [CPUS.unread(read, machine.why_not("proc/self/status"), "taskset -p $$")]
    near, whose = _near(machine)
    found = []
    if near and not allowed & near:
        expected = f"CPUs near {whose} ({_ranges(near)})"
        remedy = f"numactl --physcpubind={_ranges(near)} ... (or the launcher's --cpu-bind); "
        remedy += "let NCCL choose: export NCCL_IGNORE_CPU_AFFINITY=1"
        found.append(CPUS.warning(read, text or "", expected, remedy))
    if len(allowed) == 1 and len(online) > 1:
        expected = "several CPUs: NCCL, gloo and data loaders need threads of their own beside the training thread"
        remedy = "torchrun without a CPU limit; Slurm: --cpus-per-task=8 --cpu-bind=cores; MPI: --bind-to none"
        found.append(CPUS.warning(read, f"{text} of {len(online)} CPUs", expected, remedy))
    return found or [CPUS.ok(read, text or "", "several CPUs, some of them near the GPU")]


def _near(machine: Machine) -> tuple[set[int], str]:
    """Return the CPUs near this process's GPU where the launcher names one, else those near any GPU."""
    gpus = machine.hardware.gpus
    mine = own_gpu(machine)
    if mine is not None:
        return set(cpu_list(gpus[mine].affinity) or ()), f"GPU{mine}"
    return {cpu for gpu in gpus for cpu in cpu_list(gpu.affinity) or ()}, "a GPU"


def _ranges(members: set[int]) -> str:
    """Write {0, 1, 2, 8} as "0-2,8"."""
    starts = [cpu for cpu in sorted(members) if cpu - 1 not in members]
    ends = [cpu for cpu in sorted(members) if cpu + 1 not in members]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def peers(machine: Machine) -> list[Finding]:
    """Switches left over from debugging, pairs of GPUs that cannot reach each other, NVLinks that are down."""
    found = []
    for name, cost in (
        ("NCCL_P2P_DISABLE", "GPUs exchange through CPU memory"),
        ("NCCL_SHM_DISABLE", "GPUs without peer access exchange over the network"),
    ):
        value = machine.variable(name)
        if value not in (None, "0"):
            found.append(PEERS.error(name, value, f"unset: {cost}", f"unset {name}"))
    level = machine.variable("NCCL_P2P_LEVEL")
    if level is not None:
        kind = PEERS.error if level.upper() in ("LOC", "0") else PEERS.warning
        expected = "unset: LOC means no peer access at all, and any other value takes the choice from NCCL"
        found.append(kind("NCCL_P2P_LEVEL", level, expected, "unset NCCL_P2P_LEVEL"))
    if len(machine.hardware.gpus) < 2 and len(machine.nvml.gpus) < 2:
        return found or [PEERS.ok("NVML", "fewer than two GPUs", "nothing to check")]
    if machine.nvml.missing is not None:
        return [*found, PEERS.unread("NVML", machine.nvml.missing, "nvidia-smi topo -p2p r; nvidia-smi nvlink -s")]
    if machine.nvml.no_peer_access:
        pairs = machine.nvml.no_peer_access
        shown = ", ".join(f"GPU{a}-GPU{b}: {why}" for a, b, why in pairs[:4]) + (" ..." if len(pairs) > 4 else "")
        expected = "peer access: NCCL copies through CPU memory otherwise (GeForce cards never have it)"
        remedy = "nvidia-smi topo -p2p r; check ACS and IOMMU; with NVSwitch: sudo systemctl start nvidia-fabricmanager"
        found.append(PEERS.warning("NVML: peer access", shown, expected, remedy, "medium"))
    up = {gpu.index: gpu.nvlinks_up for gpu in machine.nvml.gpus if gpu.nvlinks_up is not None}
    # A GPU beside a bridged pair has none by design.
    least = 0 if any(device.kind == "nvswitch" for device in machine.hardware.pci) else 1
    fewer = [index for index, count in up.items() if least <= count < max(up.values())]
    if fewer:
        shown = ", ".join(f"GPU{index}: {up[index]} NVLinks" for index in fewer)
        expected = f"{max(up.values())} like the other GPUs"
        remedy = "nvidia-smi nvlink -s; nvidia-smi nvlink -e; reset the GPU or replace the bridge"
        found.append(PEERS.warning("NVML: NVLink state", shown, expected, remedy))
    return found or [PEERS.ok("NVML, NCCL_P2P_*, NCCL_SHM_DISABLE", "all pairs", "peer access between all GPUs")]


def fabric(machine: Machine) -> list[Finding]:
    """GPUs behind NVSwitches work together only after the fabric manager has set up the switches."""
    switches = [device.busid for device in machine.hardware.pci if device.kind == "nvswitch"]
    gpus = [gpu for gpu in machine.nvml.gpus if gpu.fabric not in (None, "not supported")]
    read = "NVML: fabric state"
    if not switches and not gpus:
        if machine.hardware.gpus and machine.nvml.missing is not None:
            return [FABRIC.unread(read, machine.nvml.missing, "nvidia-smi -q | grep -A 3 Fabric")]
        return [FABRIC.ok("/sys/bus/pci/devices, NVML", "no NVSwitch", "nothing to check")]
    start = "sudo systemctl enable --now nvidia-fabricmanager; nvidia-smi -q | grep -A 3 Fabric"
    rack = coherent(machine) or any(gpu.multi_node for gpu in gpus)
    if rack:  # the switches, and who manages them, are in trays of their own
        start = "nvidia-smi -q | grep -A 8 Fabric; the fabric manager runs on the switch trays of the rack, not here"
    if not gpus:
        why = machine.nvml.missing or "the driver tells no fabric state"
        return [FABRIC.unread(read, f"{len(switches)} NVSwitches, but {why}", start)]
    bad = [gpu for gpu in gpus if gpu.fabric != "completed" or gpu.fabric_status]
    if bad:
        shown = ", ".join(f"GPU{gpu.index}: {gpu.fabric}, status {gpu.fabric_status}" for gpu in bad)
        expected = "completed, status 0: CUDA does not start on these GPUs, or NVLink is unusable"
        return [FABRIC.error(read, shown, expected, start)]
    off = [name for name in ("NCCL_CUMEM_ENABLE", "NCCL_MNNVL_ENABLE") if machine.variable(name) == "0"]
    if any(gpu.multi_node for gpu in gpus) and off:
        expected = "unset: NVLink between nodes (MNNVL) needs both; everything goes over the network otherwise"
        return [FABRIC.error(name, "0", expected, f"unset {name}") for name in off]
    if any(gpu.multi_node for gpu in gpus) and not machine.listing("dev/nvidia-caps-imex-channels"):
        expected = "a channel: NVLink between nodes fails without one, and so does NCCL when it starts"
        remedy = "sudo systemctl enable --now nvidia-imex; nvidia-imex-ctl -N; "
        remedy += "container: --device=/dev/nvidia-caps-imex-channels/channel0"
        where = "/dev/nvidia-caps-imex-channels"
        value = machine.why_not("dev/nvidia-caps-imex-channels")
        return [FABRIC.warning(where, value, expected, remedy, "medium")]
    return [FABRIC.ok(read, f"completed on {len(gpus)} GPUs", "completed, status 0")]


def tenants(machine: Machine) -> list[Finding]:
    """MIG slices, MPS and other processes share what the job believes to have alone."""
    found = []
    if machine.variable("CUDA_MPS_PIPE_DIRECTORY") or machine.exists("tmp/nvidia-mps/control"):
        value = machine.variable("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
        expected = "no MPS, unless several processes share a GPU on purpose"
        found.append(
            TENANTS.info(
                "CUDA_MPS_PIPE_DIRECTORY", value, expected, "echo quit | nvidia-cuda-mps-control (ends its clients)"
            )
        )
    if not machine.hardware.gpus and not machine.nvml.gpus:
        return found or [TENANTS.ok("NVML", NO_GPU, "nothing to check")]
    if machine.nvml.missing is not None:
        return [*found, TENANTS.unread("NVML: processes, MIG mode", machine.nvml.missing, "nvidia-smi")]
    sliced = [f"GPU{gpu.index}" for gpu in machine.nvml.gpus if gpu.mig]
    if sliced:
        expected = "off: MIG slices have no peer access, NCCL takes one slice of a GPU only"
        remedy = "nvidia-smi mig -lgi; sudo nvidia-smi -mig 0 (ends all slices)"
        found.append(TENANTS.info("NVML: MIG mode", f"on for {', '.join(sliced)}", expected, remedy))
    busy = [f"GPU{gpu.index}: {gpu.tenants}" for gpu in machine.nvml.gpus if gpu.tenants]
    if busy:
        shown = f"{', '.join(busy)} other process(es)"
        found.append(TENANTS.info("NVML: compute processes", shown, "the job alone", "nvidia-smi", "medium"))
    return found or [TENANTS.ok("NVML", "no MIG, no other process", "the job alone")]
