# SPDX-License-Identifier: Apache-2.0
"""What a link should carry: by the machine's kind, the adapter's speed, its PCIe lanes, or the emulator's rate.

Sources of MACHINES, Gb/s of all adapters together in one direction:
- AWS: docs.aws.amazon.com/ec2/latest/instancetypes/ac.html, "Network specifications", baseline or sustained bandwidth.
- Spark: ConnectX-7 behind two PCIe 5.0 x4 links, of which each carries about 97 Gb/s of payload; the port itself is a
  200 Gb/s one (github.com/NVIDIA/dgx-spark-playbooks, issues 103 and 108).
- Thunderbolt: Intel, "Thunderbolt Networking": a 10 Gb/s connection between two machines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from commopt.cluster.link import EmulatedLink
from commopt.cluster.network import INTERFACE, RATE_VARIABLE
from commopt.doctor.machine import Machine
from commopt.doctor.network import NetworkInterface


class Expected(NamedTuple):
    """Gb/s in one direction, and who says so."""

    gbps: float
    source: str


MACHINES: Mapping[str, Expected] = {
    "p3.16xlarge": Expected(25, "AWS"),
    "p3dn.24xlarge": Expected(100, "AWS"),
    "p4d.24xlarge": Expected(400, "AWS"),
    "p4de.24xlarge": Expected(400, "AWS"),
    "p5.48xlarge": Expected(3200, "AWS"),
    "p5e.48xlarge": Expected(3200, "AWS"),
    "p5en.48xlarge": Expected(3200, "AWS"),
    "g4dn.12xlarge": Expected(50, "AWS"),
    "g4dn.metal": Expected(100, "AWS"),
    "g5.12xlarge": Expected(40, "AWS"),
    "g5.24xlarge": Expected(50, "AWS"),
    "g5.48xlarge": Expected(100, "AWS"),
    "g6.12xlarge": Expected(40, "AWS"),
    "g6.24xlarge": Expected(50, "AWS"),
    "g6.48xlarge": Expected(100, "AWS"),
    "NVIDIA_DGX_Spark": Expected(194, "2 x PCIe 5.0 x4 of a DGX Spark"),
}
"""By the product name that the firmware states (/sys/class/dmi/id/product_name)."""

_THUNDERBOLT = Expected(10, "Thunderbolt networking")
_ENCODING = {2.5: 0.8, 5.0: 0.8}  # of PCIe 1 and 2; 128b/130b from the third generation on
_PCIE_PAYLOAD = 0.9  # of the encoded rate: headers of packets with 256 bytes


def machine_kind(machine: Machine) -> Expected | None:
    """Return what the machine's kind should carry, None for an unknown kind."""
    name = (machine.text("sys/class/dmi/id/product_name") or "").replace(" ", "_")
    return MACHINES.get(name)


def pcie_gbps(machine: Machine, interface: str) -> float | None:
    """Return the payload that an interface's PCIe lanes carry; None for one that is on no PCIe bus."""
    folder = f"sys/class/net/{interface}/device"
    speed = re.match(r"([\d.]+) GT/s", machine.text(f"{folder}/current_link_speed") or "")
    width = machine.number(f"{folder}/current_link_width")
    if speed is None or not width:
        return None
    rate = float(speed[1])
    return rate * width * _ENCODING.get(rate, 128 / 130) * _PCIE_PAYLOAD


def interface_rate(machine: Machine, interface: NetworkInterface, siblings: int = 1) -> Expected | None:
    """Return what one interface should carry; None if nobody says.

    siblings: interfaces over which the machine's adapters are divided.
    """
    emulated = machine.variable(RATE_VARIABLE)
    if emulated is not None:  # the speed that a veth pair states is made up
        if interface.name != INTERFACE:
            return None
        link = EmulatedLink.parse(emulated)
        rates = [bps / 1e9 for bps in (link.send_bps, link.receive_bps) if bps is not None]
        return Expected(min(rates), "commopt cluster --rate") if rates else None
    if interface.name.startswith("thunderbolt"):
        return _THUNDERBOLT
    hardware = interface.vendor is not None or interface.name.startswith(("bond", "ib"))
    if interface.gbps and hardware:
        lanes = pcie_gbps(machine, interface.name)
        if lanes is not None and lanes < interface.gbps:
            return Expected(lanes, "its PCIe lanes")
        return Expected(interface.gbps, "the adapter's speed")
    kind = machine_kind(machine)
    return None if kind is None else Expected(kind.gbps / max(siblings, 1), f"{kind.source}, this machine type")
