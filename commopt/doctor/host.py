# SPDX-License-Identifier: Apache-2.0
"""The operating system and the limits of this process: memory, files, stack, the CPU's clock, NUMA, logout."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from commopt.doctor.finding import Finding, Unread, check, error, info, ok, warning
from commopt.doctor.machine import (
    CONTAINER,
    GPU,
    IPC_LOCK,
    REAL,
    SEVERAL_NODES,
    SYS_NICE,
    Machine,
    before,
    own_gpu,
    version_text,
)
from commopt.doctor.network import active_ports
from topology.kernel_files import cpu_list, ranges

MIB = 1 << 20
MEMLOCK_COMFORT = 4096 * MIB
MANY_RANKS = 32
FILES_PER_RANK = 228
"""Measured: a process of a job with 144 ranks over TCP had 32 768 files open."""
SHM_PER_RANK = 32 * MIB
SHM_COMFORT = 1024 * MIB
# These drivers choose the clock themselves: their governor "powersave" does not mean a low clock.
OWN_CLOCK = ("intel_pstate", "amd-pstate-epp")
LIMITS = "/proc/self/limits"
LOGIND = "etc/systemd/logind.conf"


@check(
    f"{LIMITS}: Max locked memory",
    "printf '* soft memlock unlimited\\n* hard memlock unlimited\\n' | sudo tee /etc/security/limits.d/rdma.conf",
    needs=((active_ports, "no active RDMA port"),),
)
def memlock(machine: Machine) -> Iterator[Finding]:
    """Locked memory: unlimited where there is RDMA, which pins its buffers; ibv_reg_mr fails otherwise."""
    value = machine.limit("Max locked memory")
    shown = "unlimited" if value == inf else f"{int(value) // 1024} KiB"
    if not active_ports(machine):
        return
    if value == inf or machine.capable(IPC_LOCK):
        yield ok(shown)
    elif value >= MEMLOCK_COMFORT:  # newer systems allow a part of the memory; NCCL pins a few hundred MiB
        yield info(shown, "unlimited, as usual for RDMA; this much is enough for NCCL", confidence="low")
    elif machine.in_container:
        yield error(shown, remedy="docker run --ulimit memlock=-1 ... (Kubernetes: add the capability IPC_LOCK)")
    else:
        yield error(shown)


@check("/dev/shm", "sudo mount -o remount,size=8G /dev/shm")
def shm(machine: Machine) -> Iterator[Finding]:
    """Shared memory: 32 MiB for each rank, where GPUs have no peer access, and more for data loaders."""
    size, needed = machine.shm_bytes, SHM_PER_RANK * machine.ranks_here
    if size is None:
        raise Unread("/dev/shm is not mounted, or another machine's", "df -h /dev/shm")
    shown, remedy = f"{size // MIB} MiB for {machine.ranks_here} rank(s)", None
    expected = f"{max(needed, SHM_COMFORT) // MIB} MiB: NCCL needs about 32 MiB a rank, data loaders more"
    if machine.in_container:
        remedy = "docker run --shm-size=8g ... (or --ipc=host; Kubernetes: an emptyDir of medium Memory on /dev/shm)"
    if size >= max(needed, SHM_COMFORT):
        yield ok(shown)
    elif not machine.hardware.gpus:
        yield info(shown, expected, remedy, "low")
    else:
        yield error(shown, expected, remedy) if size < needed else warning(shown, expected, remedy, "medium")


@check(
    f"{LIMITS}: Max open files",
    "ulimit -n 1048576 (limits.conf: * soft/hard nofile 1048576; docker run --ulimit nofile=1048576)",
    needs=(SEVERAL_NODES,),
)
def open_files(machine: Machine) -> Iterator[Finding]:
    """Open files and sockets: some 228 for each rank of a job that goes over TCP; 'Too many open files' otherwise."""
    value, ranks = machine.limit("Max open files"), machine.ranks
    if machine.several_nodes and value < FILES_PER_RANK * ranks:
        kind = warning if ranks >= MANY_RANKS else info
        yield kind(f"{int(value)} for {ranks} ranks", confidence="medium")


@check(f"{LIMITS}: Max stack size", "ulimit -s 8192")
def stack(machine: Machine) -> Iterator[Finding]:
    """Stack size: limited, or NCCL 2.28 and later, since older versions put the limit into an allocation."""
    value, old = machine.limit("Max stack size"), before(machine.software.nccl, (2, 28))
    if value == inf and old is not False:
        expected = f"limited: NCCL before 2.28 can crash (this one: {version_text(machine.software.nccl)})"
        yield warning("unlimited", expected, confidence="high" if old else "low")


@check(
    "/proc/self/status: Seccomp, CapEff",
    "docker run --cap-add SYS_NICE ..., or: export NCCL_CUMEM_HOST_ENABLE=0",
    needs=(CONTAINER,),
)
def numa_container(machine: Machine) -> Iterator[Finding]:
    """NUMA calls in a container: allowed, or NCCL 2.26.5 and later; its buffers in host memory fail otherwise."""
    old, filtered = before(machine.software.nccl, (2, 26, 5)), machine.status("Seccomp") == "2"
    if old is False or machine.variable("NCCL_CUMEM_HOST_ENABLE") == "0":
        return
    if machine.in_container and filtered and machine.capable(SYS_NICE) is False:
        value = f"NUMA calls are filtered (container without SYS_NICE), NCCL {version_text(machine.software.nccl)}"
        sure = old and machine.hardware.gpus
        yield (warning if sure else info)(value, confidence="medium" if sure else "low")


@check(
    "/proc/self/status: Cpus_allowed_list",
    "torchrun without a CPU limit; Slurm: --cpus-per-task=8 --cpu-bind=cores; MPI: --bind-to none",
)
def cpu_affinity(machine: Machine) -> Iterator[Finding]:
    """CPUs of this process: several, some near the GPU, for NCCL, gloo and data loaders beside the training thread."""
    text, gpus = machine.status("Cpus_allowed_list"), machine.hardware.gpus
    allowed = set(cpu_list(text) or ())
    place, _ = own_gpu(machine)
    near = {cpu for gpu in (gpus if place is None else [gpus[place]]) for cpu in cpu_list(gpu.affinity) or ()}
    if allowed and near and not allowed & near:
        whose = "a GPU" if place is None else f"GPU{place}"
        remedy = f"numactl --physcpubind={ranges(near)} ... (or the launcher's --cpu-bind); "
        remedy += "let NCCL choose: export NCCL_IGNORE_CPU_AFFINITY=1"
        yield warning(text, f"CPUs near {whose} ({ranges(near)})", remedy)
    online = cpu_list(machine.text("sys/devices/system/cpu/online")) or ()
    if len(allowed) == 1 < len(online):
        yield warning(f"{text} of {len(online)} CPUs")


@check(
    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "sudo cpupower frequency-set -g performance",
    needs=(GPU, REAL),
)
def cpu_governor(machine: Machine) -> Iterator[Finding]:
    """Clock of the CPU: performance; at a low clock the launch of kernels, copies and TCP are slow."""
    folder = "sys/devices/system/cpu/cpu0/cpufreq"
    value, driver = machine.text(f"{folder}/scaling_governor"), machine.text(f"{folder}/scaling_driver")
    if value in (None, "performance", "schedutil") or (value == "powersave" and driver in OWN_CLOCK):
        return
    if machine.hardware.gpus and not machine.virtual:
        yield (warning if value == "powersave" else info)(f"{value} ({driver or 'driver unknown'})")


@check("/proc/sys/kernel/numa_balancing", "sudo sysctl -w kernel.numa_balancing=0", needs=(GPU,))
def numa_balancing(machine: Machine) -> Iterator[Finding]:
    """NUMA balancing: 0, since pages that move stop threads for a while, and on Grace machines GPUs."""
    if machine.number("proc/sys/kernel/numa_balancing") and machine.hardware.gpus and len(machine.hardware.cpus) > 1:
        yield (warning if machine.coherent else info)("1", confidence="medium")


@check(
    f"/{LOGIND}",
    "sudo mkdir -p /etc/systemd/logind.conf.d; printf '[Login]\\nRemoveIPC=no\\n' | sudo tee "
    "/etc/systemd/logind.conf.d/ipc.conf; sudo systemctl restart systemd-logind; or: sudo loginctl enable-linger $USER",
)
def remove_ipc(machine: Machine) -> Iterator[Finding]:
    """Shared memory after logout: kept, where users log in; a job that outlives its session loses it otherwise."""
    paths = (LOGIND, *(f"{LOGIND}.d/{name}" for name in machine.listing(f"{LOGIND}.d")))
    found = [text for path in paths if (text := machine.text(path)) is not None]
    if not found or machine.in_container:
        return
    user = machine.status("Uid").split()[:1]
    if user and user[0].isdecimal() and int(user[0]) < 1000:  # root, and users of services
        return
    lines = (line.partition("=") for text in found for line in text.splitlines())
    stated = [value.strip().lower() for name, _, value in lines if name.strip() == "RemoveIPC"]
    if stated[-1:] not in (["no"], ["false"], ["0"], ["off"]):
        shown = f"RemoveIPC={stated[-1]}" if stated else "RemoveIPC is not set: yes by default in systemd"
        yield info(shown, confidence="medium" if stated else "low")
