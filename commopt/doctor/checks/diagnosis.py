"""All checks, in the order in which a person should mend what they find."""

from __future__ import annotations

from collections.abc import Callable

from commopt.doctor.checks import (
    configuration,
    counters,
    ethernet,
    gdr,
    gpus,
    health,
    host,
    infiniband,
    limits,
    pcie,
    settings,
    transport,
    versions,
)
from commopt.doctor.facts.machine import Machine
from commopt.doctor.finding import Check, Finding, in_order

# First what stops everything, then what takes the fast way away, then what slows the fast way, then details.
CHECKS: tuple[Callable[[Machine], list[Finding]], ...] = (
    versions.versions,
    settings.topology_file,
    gpus.fabric,
    health.memory,
    health.xid,
    infiniband.port,
    ethernet.choice,
    transport.transport,
    limits.memlock,
    limits.shm,
    limits.files,
    configuration.configuration,
    settings.leftovers,
    health.clocks,
    gpus.peers,
    infiniband.choice,
    infiniband.gid,
    gdr.module,
    gdr.dmabuf,
    gdr.level,
    pcie.acs,
    pcie.iommu,
    pcie.gpu_nic,
    pcie.links,
    ethernet.speed,
    ethernet.mtu,
    ethernet.sockets,
    ethernet.tcp,
    gpus.cpus,
    host.governor,
    host.balancing,
    host.remove_ipc,
    settings.overlap,
    limits.stack,
    limits.numa_container,
    infiniband.classes,
    infiniband.ordering,
    gpus.tenants,
    health.persistence,
    counters.counters,
)


def diagnose(machine: Machine) -> list[Finding]:
    """Run every check; errors first, and within one severity in the order of repair."""
    found: list[Finding] = []
    for check in CHECKS:
        try:
            found += check(machine)
        except (OSError, ValueError) as error:
            # A file that no machine had before: one check less is better than none.
            name = check.__name__.replace("_", "-")
            found.append(Check(name, name).unread(name, f"this check failed: {type(error).__name__}: {error}"))
    return in_order(found)
