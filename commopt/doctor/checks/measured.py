"""What was measured, beside what the network cards are rated at."""

from __future__ import annotations

from commopt.cost import Links
from commopt.doctor.facts.machine import Machine
from commopt.doctor.finding import Check, Finding
from commopt.probe.report import LineRate
from topology.facts.nics import node_nic_gbps

MEASURED = Check("measured", "Measured bandwidth between nodes")


EMULATED = ("BENCH_CLUSTER_RATE=", "COMMOPT_RANKS_PER_NODE=")


def measured(machine: Machine, links: Links, path: str) -> list[Finding]:
    """Compare the fastest curve of a probe with the line rate of this machine, which stands for all nodes."""
    made_up = links.nominal or any(name in links.header.command for name in EMULATED)
    network = None if made_up else LineRate.of(links, node_nic_gbps(machine.topology))
    if network is None:
        return [
            MEASURED.unread(path, "no measured curve leaves a machine", "torchrun ... -m commopt probe -o links.json")
        ]
    if network.share is None:
        return [MEASURED.unread(path, "the line rate of this machine is unknown", "python -m topology")]
    told = f"{network.measured_gbps:.3g} of {network.nominal_gbps:g} Gb/s ({100 * network.share:.0f} %)"
    if not network.slow:
        return [MEASURED.ok(path, told, "at least half of the line rate")]
    expected = (
        "at least half of the line rate: TCP on one socket, one rail of many, or a port that is slower than it says"
    )
    remedy = "mend what else is found here; then NCCL_DEBUG=INFO and: python -m commopt doctor --log FILE"
    return [MEASURED.warning(path, told, expected, remedy, "medium")]
