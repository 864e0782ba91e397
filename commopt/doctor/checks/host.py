"""The operating system: the CPU's clock, pages that move between NUMA nodes, memory that is freed at logout."""

from __future__ import annotations

from commopt.doctor.facts.machine import Machine
from commopt.doctor.facts.surroundings import coherent, container, status, virtual_machine
from commopt.doctor.finding import Check, Finding

GOVERNOR = Check("cpu-governor", "Clock of the CPU")
BALANCING = Check("numa-balancing", "NUMA balancing")
REMOVE_IPC = Check("remove-ipc", "Shared memory after logout")

# These choose the clock themselves: with them the name says how eager they are, not that the clock is low.
OWN_CLOCK = ("intel_pstate", "amd-pstate-epp")
SYSTEM_USERS = 1000


def governor(machine: Machine) -> list[Finding]:
    """gloo, the sockets of NCCL and the launch of kernels run as fast as the CPU's clock."""
    folder = "sys/devices/system/cpu/cpu0/cpufreq"
    value, driver = machine.text(f"{folder}/scaling_governor"), machine.text(f"{folder}/scaling_driver")
    read = f"/{folder}/scaling_governor"
    if value is None or virtual_machine(machine) or not machine.hardware.gpus:
        return [GOVERNOR.ok(read, value or "none", "performance, on a machine of one's own with GPUs")]
    if value in ("performance", "schedutil") or (value == "powersave" and driver in OWN_CLOCK):
        return [GOVERNOR.ok(read, f"{value} ({driver or 'driver unknown'})", "performance, or one that follows load")]
    kind = GOVERNOR.warning if value == "powersave" else GOVERNOR.info
    expected = "performance: at a low clock launches, copies and TCP are slow"
    return [
        kind(read, f"{value} ({driver or 'driver unknown'})", expected, "sudo cpupower frequency-set -g performance")
    ]


def balancing(machine: Machine) -> list[Finding]:
    """The kernel unmaps pages now and then to see who uses them, which stops threads, and GPUs on Grace machines."""
    path = "proc/sys/kernel/numa_balancing"
    value = machine.number(path)
    if not value or not machine.hardware.gpus or len(machine.hardware.cpus) < 2:
        return [BALANCING.ok(f"/{path}", "absent" if value is None else str(value), "0 where there are NUMA nodes")]
    kind = BALANCING.warning if coherent(machine) else BALANCING.info
    expected = "0: threads are bound to their NUMA node anyway, and pages that move stop them for a while"
    return [kind(f"/{path}", str(value), expected, "sudo sysctl -w kernel.numa_balancing=0", "medium")]


def remove_ipc(machine: Machine) -> list[Finding]:
    """systemd removes a user's shared memory when the last session ends, also from under a job that goes on."""
    path = "etc/systemd/logind.conf"
    files = [path, *(f"{path}.d/{name}" for name in machine.listing(f"{path}.d"))]
    texts = [text for file in files if (text := machine.text(file)) is not None]
    user = (status(machine, "Uid") or "").split()[:1]
    if not texts or container(machine) or (user and user[0].isdecimal() and int(user[0]) < SYSTEM_USERS):
        return [REMOVE_IPC.ok(f"/{path}", "not needed", "no, where users log in to start jobs")]
    stated = [
        line.partition("=")[2].strip().lower()
        for text in texts
        for line in text.splitlines()
        if line.partition("=")[0].strip() == "RemoveIPC"
    ]
    if stated and stated[-1] in ("no", "false", "0", "off"):
        return [REMOVE_IPC.ok(f"/{path}", f"RemoveIPC={stated[-1]}", "no")]
    shown = f"RemoveIPC={stated[-1]}" if stated else "RemoveIPC is not set: yes, as systemd has it"
    expected = "no: a job that outlives its login session loses /dev/shm, and NCCL fails to open or remove it"
    remedy = "sudo mkdir -p /etc/systemd/logind.conf.d; "
    remedy += "printf '[Login]\\nRemoveIPC=no\\n' | sudo tee /etc/systemd/logind.conf.d/ipc.conf; "
    remedy += "sudo systemctl restart systemd-logind; or: sudo loginctl enable-linger $USER"
    return [REMOVE_IPC.info(f"/{path}", shown, expected, remedy, "medium" if stated else "low")]
