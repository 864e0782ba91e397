"""The rate, burst and delay of a node's link, and the queueing disciplines that enforce them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_RATE_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_DELAY_UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6}
_BURST_UNITS = {"b": 1.0, "kib": 2.0**10, "mib": 2.0**20}

_PACKET_BYTES = 1514
# Long enough for TCP never to starve, short enough that a full queue is noticed as lost packets, not as lag.
_QUEUE_LATENCY = "100ms"
# netem's default of 1000 packets would drop what a fast link keeps in flight during the delay.
_DELAYED_PACKETS = 100_000


@dataclass(frozen=True)
class Link:
    """One node's full-duplex link; `rate_bps` None means unshaped, `delay_us` is one way."""

    rate_bps: int | None = None
    burst_bytes: int | None = None
    delay_us: int = 0

    @classmethod
    def parse(cls, rate: str = "none", delay: str = "0ms", burst: str = "auto") -> Link:
        """Read text such as "200mbit", "1.5ms", "64kib"; raise a ValueError that shows the right form."""
        delay_us = _quantity("delay", delay, _DELAY_UNITS, example="5ms")
        if rate == "none":
            if burst != "auto":
                raise ValueError(f"burst {burst!r} needs a rate to shape; give a rate such as 200mbit")
            return cls(delay_us=delay_us)
        rate_bps = _quantity("rate", rate, _RATE_UNITS, example="200mbit, or none for an unshaped link")
        if rate_bps <= 0:
            raise ValueError(f"rate {rate!r} must be above 0; write none for an unshaped link")
        if burst == "auto":
            return cls(rate_bps, auto_burst_bytes(rate_bps), delay_us)
        burst_bytes = _quantity("burst", burst, _BURST_UNITS, example="64kib, or auto")
        if burst_bytes < _PACKET_BYTES:
            raise ValueError(f"burst {burst!r} is less than one packet ({_PACKET_BYTES} bytes); use auto")
        return cls(rate_bps, burst_bytes, delay_us)

    def near_end(self) -> list[list[str]]:
        """`tc qdisc add` arguments for the node's own end of its link."""
        if not self.delay_us:
            return self.far_end()
        netem = ["netem", "delay", f"{self.delay_us}us", "limit", str(_DELAYED_PACKETS)]
        return [["root", "handle", "1:", *netem], *(["parent", "1:1", *tbf] for tbf in self._tbf())]

    def far_end(self) -> list[list[str]]:
        """`tc qdisc add` arguments for the bridge's end, which shapes what the node receives."""
        return [["root", *tbf] for tbf in self._tbf()]

    def _tbf(self) -> list[list[str]]:
        if self.rate_bps is None:
            return []
        shape = ["rate", f"{self.rate_bps}bit", "burst", f"{self.burst_bytes}b", "latency", _QUEUE_LATENCY]
        return [["tbf", *shape]]


def auto_burst_bytes(rate_bps: int) -> int:
    """What a port may send at once: 2 ms of the rate; a larger burst lets small messages through for free."""
    return max(32 * 1024, rate_bps * 2 // 1000 // 8)


def _quantity(name: str, text: str, units: Mapping[str, float], example: str) -> int:
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*([a-z]+)", text.strip().lower())
    if match is None or match[2] not in units:
        raise ValueError(f"{name} {text!r} must be a number and one of {', '.join(units)}; for example {example}")
    return round(float(match[1]) * units[match[2]])
