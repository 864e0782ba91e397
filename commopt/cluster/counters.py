"""Count what a node sent and received, from inside a rank or from outside."""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from pathlib import Path

INTERFACE = "eth0"
RATE_VARIABLE = "BENCH_CLUSTER_RATE"
PROC_FILES = ("/proc/net/dev", "/proc/net/snmp")  # what Traffic.parse reads

# Ethernet 14, IPv4 20, TCP with timestamps 32.
_HEADER_BYTES = 66
_SEGMENT_PAYLOAD_BYTES = 1500 - 20 - 32


@dataclass(frozen=True)
class Counters:
    """Bytes (headers included) and packets of one interface; subtract two for what passed between them."""

    tx_bytes: int = 0
    tx_packets: int = 0
    rx_bytes: int = 0
    rx_packets: int = 0

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))

    @property
    def tx_payload_bytes(self) -> int:
        """Bytes sent less the TCP, IP and Ethernet headers of every packet (acknowledgements count 0)."""
        return self.tx_bytes - _HEADER_BYTES * self.tx_packets


@dataclass(frozen=True)
class Traffic:
    """A node's counters: `link` crosses the shaped network, `loopback` stays inside the node.

    `retransmissions` are the TCP segments a node sent again: acknowledgements wait in the queue of a slow link, and a
    busy machine delays them until TCP takes data that did arrive for lost.
    """

    link: Counters
    loopback: Counters
    retransmissions: int = 0

    def __sub__(self, earlier: Traffic) -> Traffic:
        retransmissions = self.retransmissions - earlier.retransmissions
        return Traffic(self.link - earlier.link, self.loopback - earlier.loopback, retransmissions)

    @property
    def link_payload_bytes(self) -> int:
        """What programs sent over the link: no headers, and every full segment once however often it was sent."""
        return max(0, self.link.tx_payload_bytes - _SEGMENT_PAYLOAD_BYTES * self.retransmissions)

    @classmethod
    def parse(cls, proc_net_dev: str, proc_net_snmp: str) -> Traffic:
        """Read the texts of /proc/net/dev and /proc/net/snmp."""
        counters = {}
        for line in proc_net_dev.splitlines()[2:]:
            name, _, fields = line.partition(":")
            rx_bytes, rx_packets, *_, tx_bytes, tx_packets = (int(field) for field in fields.split()[:10])
            counters[name.strip()] = Counters(tx_bytes, tx_packets, rx_bytes, rx_packets)
        names, values = (line.split() for line in proc_net_snmp.splitlines() if line.startswith("Tcp:"))
        retransmissions = int(values[names.index("RetransSegs")])
        return cls(counters[INTERFACE], counters["lo"], retransmissions)


def link_rate() -> str | None:
    """Rate of this node's emulated link ("none": unshaped), or None outside an emulated cluster."""
    return os.environ.get(RATE_VARIABLE)


def traffic() -> Traffic:
    """Snapshot the counters of the node this process runs on; all ranks of a node see the same ones.

    Take it after a barrier: a collective returns while its last bytes still wait for the link.
    """
    if link_rate() is None:
        raise RuntimeError(
            "this process is not on an emulated node, so its counters would show the host's own traffic; "
            "start it with `commopt cluster`, or ask link_rate() first"
        )
    return Traffic.parse(*(Path(file).read_text() for file in PROC_FILES))
