"""Limits of this process and its container that NCCL runs into: pinned memory, shared memory, stack, NUMA calls."""

from __future__ import annotations

from commopt.doctor.facts.machine import Machine, version_text
from commopt.doctor.facts.network import active_ports, before
from commopt.doctor.facts.surroundings import IPC_LOCK, SYS_NICE, capable, container, limit, status
from commopt.doctor.finding import Check, Finding
from topology.kernel_files import fields

MEMLOCK = Check("memlock", "Locked memory")
SHM = Check("shm", "Shared memory")
STACK = Check("stack", "Stack size")
FILES = Check("open-files", "Open files and sockets")
NUMA = Check("numa-container", "NUMA calls in a container")

MIB = 1 << 20
MEMLOCK_COMFORT = 4096 * MIB
MANY_RANKS = 32
FILES_PER_RANK = 228
"""A process of 144 ranks over TCP was seen to have 32 768 open."""
SHM_PER_RANK = 32 * MIB
SHM_COMFORT = 1024 * MIB


def memlock(machine: Machine) -> list[Finding]:
    """RDMA registers (pins) its buffers."""
    read = "/proc/self/limits: Max locked memory"
    value = limit(machine, "Max locked memory")
    if value is None:
        return [MEMLOCK.unread(read, machine.why_not("proc/self/limits"), "ulimit -l")]
    if value == -1:
        return [MEMLOCK.ok(read, "unlimited", "unlimited")]
    shown = f"{value // 1024} KiB"
    if not active_ports(machine):
        return [MEMLOCK.ok(read, shown, "unlimited where there is RDMA, which this machine does not have")]
    if capable(machine, IPC_LOCK):
        return [MEMLOCK.ok(read, f"{shown}, but CAP_IPC_LOCK lifts it", "unlimited")]
    remedy = (
        "printf '* soft memlock unlimited\\n* hard memlock unlimited\\n' | sudo tee /etc/security/limits.d/rdma.conf"
    )
    if value >= MEMLOCK_COMFORT:  # newer systems allow a part of the memory; NCCL pins some hundred MiB
        return [MEMLOCK.info(read, shown, "unlimited, as a rule for RDMA; this much is enough for NCCL", remedy, "low")]
    if container(machine):
        remedy = "docker run --ulimit memlock=-1 ... (Kubernetes: add the capability IPC_LOCK)"
    return [MEMLOCK.error(read, shown, "unlimited: ibv_reg_mr fails otherwise", remedy)]


def shm(machine: Machine) -> list[Finding]:
    """Ranks on one machine exchange through /dev/shm where they have no peer access, and so do data loaders."""
    read = "/proc/self/mounts: /dev/shm"
    size = _shm_bytes(machine)
    if size is None:
        return [SHM.unread(read, "/dev/shm is not mounted, or its size is not stated", "df -h /dev/shm")]
    needed = SHM_PER_RANK * machine.ranks_here
    shown = f"{size // MIB} MiB for {machine.ranks_here} rank(s)"
    expected = f"{max(needed, SHM_COMFORT) // MIB} MiB: NCCL needs about 32 MiB a rank, data loaders more"
    remedy = "sudo mount -o remount,size=8G /dev/shm"
    if container(machine):
        remedy = "docker run --shm-size=8g ... (or --ipc=host; Kubernetes: an emptyDir of medium Memory on /dev/shm)"
    if size < SHM_COMFORT and not machine.hardware.gpus:
        return [SHM.info(read, shown, expected, remedy, "low")]
    if size < needed:
        return [SHM.error(read, shown, expected, remedy)]
    if size < SHM_COMFORT:
        return [SHM.warning(read, shown, expected, remedy, "medium")]
    left = [name for name in machine.listing("dev/shm") if name.startswith("nccl-")]
    if len(left) > 64:
        expected = "only the segments of running jobs; killed jobs leave theirs behind"
        return [SHM.info("/dev/shm", f"{len(left)} nccl-* files", expected, "with no job running: rm /dev/shm/nccl-*")]
    return [SHM.ok(read, shown, expected)]


def _shm_bytes(machine: Machine) -> int | None:
    options = None
    for line in (machine.text("proc/self/mounts") or "").splitlines():
        columns = line.split()
        if len(columns) > 3 and columns[1] == "/dev/shm":
            options = columns[3]
    if options is None:
        return None
    total = _memory_bytes(machine)
    for option in options.split(","):
        key, _, value = option.partition("=")
        if key == "size":
            return _size(value, total)
    return None if total is None else total // 2  # tmpfs without a size


def _size(text: str, total: int | None) -> int | None:
    number, unit = text.rstrip("kmgKMG%"), text[-1:].lower()
    if not number.isdecimal():
        return None
    if unit == "%":
        return None if total is None else total * int(number) // 100
    return int(number) * {"k": 1 << 10, "m": MIB, "g": 1 << 30}.get(unit, 1)


def _memory_bytes(machine: Machine) -> int | None:
    total = fields(machine.text("proc/meminfo")).get("MemTotal", "").split()
    return int(total[0]) * 1024 if total and total[0].isdecimal() else None


def files(machine: Machine) -> list[Finding]:
    """Every connection of NCCL and gloo is an open file, and in a large job a process has many."""
    read = "/proc/self/limits: Max open files"
    value = limit(machine, "Max open files")
    if value is None:
        return [FILES.unread(read, machine.why_not("proc/self/limits"), "ulimit -n")]
    world = machine.environ.get("WORLD_SIZE", "")
    ranks = int(world) if world.isdecimal() else 1
    shown, needed = "unlimited" if value == -1 else f"{value} for {ranks} ranks", FILES_PER_RANK * ranks
    if value == -1 or not machine.several_nodes or value >= needed:
        return [FILES.ok(read, shown, f"about {FILES_PER_RANK} for each rank of a job on several nodes")]
    expected = f"up to {needed}: 'Too many open files' otherwise, where the job goes over TCP"
    remedy = "ulimit -n 1048576 (limits.conf: * soft/hard nofile 1048576; docker run --ulimit nofile=1048576)"
    kind = FILES.warning if ranks >= MANY_RANKS else FILES.info
    return [kind(read, shown, expected, remedy, "medium")]


def stack(machine: Machine) -> list[Finding]:
    """Old versions of NCCL put the stack limit into an allocation."""
    read = "/proc/self/limits: Max stack size"
    value = limit(machine, "Max stack size")
    if value is None:
        return [STACK.unread(read, machine.why_not("proc/self/limits"), "ulimit -s")]
    if value != -1:
        return [STACK.ok(read, f"{value // 1024} KiB", "limited")]
    old = before(machine.software.nccl, (2, 28))
    if old is False:
        return [STACK.ok(read, "unlimited", "any: NCCL 2.28 and later do not mind")]
    expected = f"limited: NCCL before 2.28 can crash (this one: {version_text(machine.software.nccl)})"
    return [STACK.warning(read, "unlimited", expected, "ulimit -s 8192", "high" if old else "low")]


def numa_container(machine: Machine) -> list[Finding]:
    """NCCL 2.24 to 2.26.4 allocate host memory with a NUMA call that a container's seccomp profile forbids."""
    read = "/proc/self/status: Mems_allowed_list, Seccomp, CapEff"
    memory = status(machine, "Mems_allowed_list")
    if memory is None:
        return [NUMA.unread(read, machine.why_not("proc/self/status"))]
    if machine.variable("NCCL_CUMEM_HOST_ENABLE") == "0":
        return [NUMA.ok("NCCL_CUMEM_HOST_ENABLE", "0", "0 is one remedy")]
    filtered = container(machine) and status(machine, "Seccomp") == "2" and capable(machine, SYS_NICE) is False
    version = machine.software.nccl
    affected = version is not None and (2, 24) <= version < (2, 26, 5)
    if not filtered or (version is not None and not affected):
        return [NUMA.ok(read, f"NUMA nodes {memory}", "NUMA calls allowed, or an NCCL that does not need them")]
    value = f"NUMA calls are filtered (container without SYS_NICE), NCCL {version_text(version)}"
    expected = "SYS_NICE, or NCCL outside 2.24 to 2.26.4: shared buffers in host memory fail otherwise"
    remedy = "docker run --cap-add SYS_NICE ..., or: export NCCL_CUMEM_HOST_ENABLE=0"
    if affected and machine.hardware.gpus:
        return [NUMA.warning(read, value, expected, remedy, "medium")]
    return [NUMA.info(read, value, expected, remedy, "low")]
