"""The operating system and the limits of this process: memory, files, stack, the CPU's clock, NUMA, logout."""

from __future__ import annotations

from collections.abc import Iterator

from commopt.doctor.finding import Finding, check, error, info, ok, unread, warning
from commopt.doctor.machine import IPC_LOCK, SYS_NICE, Machine, before, own_gpu, version_text
from commopt.doctor.network import active_ports
from topology.kernel_files import cpu_list, fields

MIB = 1 << 20
MEMLOCK_COMFORT = 4096 * MIB
MANY_RANKS = 32
FILES_PER_RANK = 228
"""A process of 144 ranks over TCP was seen to have 32 768 open."""
SHM_PER_RANK = 32 * MIB
SHM_COMFORT = 1024 * MIB
# These drivers choose the clock themselves: the governor's name says how eager they are, not that the clock is low.
OWN_CLOCK = ("intel_pstate", "amd-pstate-epp")
LIMITS = "/proc/self/limits"


@check("memlock", "Locked memory", f"{LIMITS}: Max locked memory", "unlimited where there is RDMA")
def memlock(machine: Machine) -> Iterator[Finding]:
    """RDMA registers (pins) its buffers."""
    value = machine.limit("Max locked memory")
    shown = "unlimited" if value == -1 else f"{(value or 0) // 1024} KiB"
    remedy = (
        "printf '* soft memlock unlimited\\n* hard memlock unlimited\\n' | sudo tee /etc/security/limits.d/rdma.conf"
    )
    if value is None:
        yield unread(machine.why_not("proc/self/limits"), "ulimit -l")
    elif value == -1 or not active_ports(machine) or machine.capable(IPC_LOCK):
        yield ok(shown)
    elif value >= MEMLOCK_COMFORT:  # newer systems allow a part of the memory; NCCL pins some hundred MiB
        yield info(shown, "unlimited, as a rule for RDMA; this much is enough for NCCL", remedy, "low")
    else:
        if machine.in_container:
            remedy = "docker run --ulimit memlock=-1 ... (Kubernetes: add the capability IPC_LOCK)"
        yield error(shown, "unlimited: ibv_reg_mr fails otherwise", remedy)


@check("shm", "Shared memory", "/proc/self/mounts: /dev/shm", "32 MiB a rank for NCCL, more for data loaders")
def shm(machine: Machine) -> Iterator[Finding]:
    """Ranks on one machine exchange through /dev/shm where they have no peer access, and so do data loaders."""
    size = _shm_bytes(machine)
    if size is None:
        yield unread("/dev/shm is not mounted, or its size is not stated", "df -h /dev/shm")
        return
    needed = SHM_PER_RANK * machine.ranks_here
    shown = f"{size // MIB} MiB for {machine.ranks_here} rank(s)"
    expected = f"{max(needed, SHM_COMFORT) // MIB} MiB: NCCL needs about 32 MiB a rank, data loaders more"
    remedy = "sudo mount -o remount,size=8G /dev/shm"
    left = sum(name.startswith("nccl-") for name in machine.listing("dev/shm"))
    if machine.in_container:
        remedy = "docker run --shm-size=8g ... (or --ipc=host; Kubernetes: an emptyDir of medium Memory on /dev/shm)"
    if size < SHM_COMFORT and not machine.hardware.gpus:
        yield info(shown, expected, remedy, "low")
    elif size < needed:
        yield error(shown, expected, remedy)
    elif size < SHM_COMFORT:
        yield warning(shown, expected, remedy, "medium")
    elif left > 64:
        expected = "only the segments of running jobs; killed jobs leave theirs behind"
        yield info(f"{left} nccl-* files", expected, "with no job running: rm /dev/shm/nccl-*", read="/dev/shm")
    else:
        yield ok(shown)


def _shm_bytes(machine: Machine) -> int | None:
    columns = [line.split() for line in (machine.text("proc/self/mounts") or "").splitlines()]
    options = [column[3] for column in columns if len(column) > 3 and column[1] == "/dev/shm"]
    if not options:
        return None
    words = fields(machine.text("proc/meminfo")).get("MemTotal", "").split()
    total = int(words[0]) * 1024 if words and words[0].isdecimal() else None
    size = dict(option.partition("=")[::2] for option in options[-1].split(",")).get("size", "50%")
    number, unit = size.rstrip("kmgKMG%"), size[-1:].lower()
    if not number.isdecimal() or (unit == "%" and total is None):
        return None
    return (total or 0) * int(number) // 100 if unit == "%" else int(number) << {"k": 10, "m": 20, "g": 30}.get(unit, 0)


@check(
    "open-files", "Open files and sockets", f"{LIMITS}: Max open files", "228 for each rank of a job on several nodes"
)
def files(machine: Machine) -> Iterator[Finding]:
    """Every connection of NCCL and gloo is an open file, and in a large job a process has many."""
    value, world = machine.limit("Max open files"), machine.environ.get("WORLD_SIZE", "")
    ranks = int(world) if world.isdecimal() else 1
    needed = FILES_PER_RANK * ranks
    if value is None:
        yield unread(machine.why_not("proc/self/limits"), "ulimit -n")
    elif machine.several_nodes and -1 < value < needed:
        expected = f"up to {needed}: 'Too many open files' otherwise, where the job goes over TCP"
        remedy = "ulimit -n 1048576 (limits.conf: * soft/hard nofile 1048576; docker run --ulimit nofile=1048576)"
        kind = warning if ranks >= MANY_RANKS else info
        yield kind(f"{value} for {ranks} ranks", expected, remedy, "medium")


@check("stack", "Stack size", f"{LIMITS}: Max stack size", "limited, or NCCL 2.28 and later")
def stack(machine: Machine) -> Iterator[Finding]:
    """Old versions of NCCL put the stack limit into an allocation."""
    value, old = machine.limit("Max stack size"), before(machine.software.nccl, (2, 28))
    if value is None:
        yield unread(machine.why_not("proc/self/limits"), "ulimit -s")
    elif value == -1 and old is not False:
        expected = f"limited: NCCL before 2.28 can crash (this one: {version_text(machine.software.nccl)})"
        yield warning("unlimited", expected, "ulimit -s 8192", "high" if old else "low")


@check("numa-container", "NUMA calls in a container", "/proc/self/status: Seccomp, CapEff", "NUMA calls allowed")
def numa_container(machine: Machine) -> Iterator[Finding]:
    """NCCL 2.24 to 2.26.4 allocate host memory with a NUMA call that a container's seccomp profile forbids."""
    version = machine.software.nccl
    affected = version is not None and (2, 24) <= version < (2, 26, 5)
    if machine.status("Mems_allowed_list") is None:
        yield unread(machine.why_not("proc/self/status"))
    elif machine.variable("NCCL_CUMEM_HOST_ENABLE") == "0" or (version is not None and not affected):
        return
    elif machine.in_container and machine.status("Seccomp") == "2" and machine.capable(SYS_NICE) is False:
        value = f"NUMA calls are filtered (container without SYS_NICE), NCCL {version_text(version)}"
        expected = "SYS_NICE, or NCCL outside 2.24 to 2.26.4: shared buffers in host memory fail otherwise"
        remedy = "docker run --cap-add SYS_NICE ..., or: export NCCL_CUMEM_HOST_ENABLE=0"
        sure = affected and machine.hardware.gpus
        yield (warning if sure else info)(value, expected, remedy, "medium" if sure else "low")


@check(
    "cpu-affinity", "CPUs of this process", "/proc/self/status: Cpus_allowed_list", "several CPUs, some near the GPU"
)
def cpus(machine: Machine) -> Iterator[Finding]:
    """A process pinned to the wrong processor, or to one CPU, feeds its GPU and its sockets slowly."""
    text, gpus = machine.status("Cpus_allowed_list"), machine.hardware.gpus
    allowed = set(cpu_list(text) or ())
    online = set(cpu_list(machine.text("sys/devices/system/cpu/online")) or ())
    if not allowed:
        yield unread(machine.why_not("proc/self/status"), "taskset -p $$")
        return
    place, _ = own_gpu(machine)
    near = {cpu for gpu in (gpus if place is None else [gpus[place]]) for cpu in cpu_list(gpu.affinity) or ()}
    if near and not allowed & near:
        whose = "a GPU" if place is None else f"GPU{place}"
        remedy = f"numactl --physcpubind={_ranges(near)} ... (or the launcher's --cpu-bind); "
        remedy += "let NCCL choose: export NCCL_IGNORE_CPU_AFFINITY=1"
        yield warning(text or "", f"CPUs near {whose} ({_ranges(near)})", remedy)
    if len(allowed) == 1 and len(online) > 1:
        expected = "several CPUs: NCCL, gloo and data loaders need threads beside the training thread"
        remedy = "torchrun without a CPU limit; Slurm: --cpus-per-task=8 --cpu-bind=cores; MPI: --bind-to none"
        yield warning(f"{text} of {len(online)} CPUs", expected, remedy)


def _ranges(members: set[int]) -> str:
    """Write {0, 1, 2, 8} as "0-2,8"."""
    starts = [cpu for cpu in sorted(members) if cpu - 1 not in members]
    ends = [cpu for cpu in sorted(members) if cpu + 1 not in members]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


@check("cpu-governor", "Clock of the CPU", "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance")
def governor(machine: Machine) -> Iterator[Finding]:
    """gloo, the sockets of NCCL and the launch of kernels run as fast as the CPU's clock."""
    folder = "sys/devices/system/cpu/cpu0/cpufreq"
    value, driver = machine.text(f"{folder}/scaling_governor"), machine.text(f"{folder}/scaling_driver")
    if value in (None, "performance", "schedutil") or (value == "powersave" and driver in OWN_CLOCK):
        return
    if machine.hardware.gpus and not machine.virtual:
        kind = warning if value == "powersave" else info
        expected = "performance: at a low clock launches, copies and TCP are slow"
        remedy = "sudo cpupower frequency-set -g performance"
        yield kind(f"{value} ({driver or 'driver unknown'})", expected, remedy)


@check("numa-balancing", "NUMA balancing", "/proc/sys/kernel/numa_balancing", "0 where there are NUMA nodes")
def balancing(machine: Machine) -> Iterator[Finding]:
    """The kernel unmaps pages now and then to see who uses them, which stops threads, and GPUs on Grace machines."""
    if machine.number("proc/sys/kernel/numa_balancing") and machine.hardware.gpus and len(machine.hardware.cpus) > 1:
        expected = "0: threads are bound to their NUMA node anyway, and pages that move stop them for a while"
        kind = warning if machine.coherent else info
        yield kind("1", expected, "sudo sysctl -w kernel.numa_balancing=0", "medium")


@check("remove-ipc", "Shared memory after logout", "/etc/systemd/logind.conf", "no, where users log in to start jobs")
def remove_ipc(machine: Machine) -> Iterator[Finding]:
    """systemd removes a user's shared memory when the last session ends, also from under a job that goes on."""
    path = "etc/systemd/logind.conf"
    found = [machine.text(file) for file in (path, *(f"{path}.d/{name}" for name in machine.listing(f"{path}.d")))]
    lines = [line.partition("=") for text in found if text is not None for line in text.splitlines()]
    stated = [value.strip().lower() for name, _, value in lines if name.strip() == "RemoveIPC"]
    user = (machine.status("Uid") or "").split()[:1]
    service = bool(user) and user[0].isdecimal() and int(user[0]) < 1000  # root, and users of services
    if not any(text is not None for text in found) or machine.in_container or service:
        return
    if stated[-1:] not in (["no"], ["false"], ["0"], ["off"]):
        shown = f"RemoveIPC={stated[-1]}" if stated else "RemoveIPC is not set: yes, as systemd has it"
        expected = "no: a job that outlives its login session loses /dev/shm, and NCCL fails"
        remedy = "printf '[Login]\\nRemoveIPC=no\\n' | sudo tee /etc/systemd/logind.conf.d/ipc.conf; "
        remedy += "sudo systemctl restart systemd-logind; or: sudo loginctl enable-linger $USER"
        yield info(
            shown, expected, f"sudo mkdir -p /etc/systemd/logind.conf.d; {remedy}", "medium" if stated else "low"
        )
