# SPDX-License-Identifier: Apache-2.0
"""One node's link: its rates, delay and loss as text, and the kernel's arguments that make it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_RATE_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIME_UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6}

# Long enough for TCP never to starve, short enough that a full queue is noticed as lost packets, not as lag.
_QUEUE_S = 0.1
# A host queues packets that its link cannot send yet. A drop there would count as sent twice and never leave.
_NEAR_QUEUE_BYTES = 640_000
# netem's default of 1000 packets would drop packets that a fast link keeps in flight during the delay.
DELAYED_PACKETS = 100_000


@dataclass(frozen=True)
class EmulatedLink:
    """One node's full-duplex link.

    send_bps: rate of sending in bit/s; None: unshaped.
    receive_bps: rate of receiving in bit/s; None: unshaped.
    delay_us: delay of what the node sends, so that a round trip takes the delays of both nodes.
    loss: share of the packets it sends that never arrive, each drawn by itself.
    """

    send_bps: int | None = None
    receive_bps: int | None = None
    delay_us: int = 0
    loss: float = 0.0

    @classmethod
    def parse(cls, rate: str = "none", delay: str = "0ms", loss: str = "0%") -> EmulatedLink:
        """Parse texts such as "200mbit", "1.5ms" and "0.01%". Raises a ValueError that shows the right form.

        Two rates, "50mbit/10mbit", are the rates of receiving and of sending.
        """
        receive, slash, send = rate.partition("/")
        return cls(_rate(send if slash else receive), _rate(receive), duration_us("delay", delay), _loss(loss))

    @property
    def is_impaired(self) -> bool:
        """Whether packets are delayed or lost, which is netem's work, or a relay's."""
        return self.delay_us > 0 or self.loss > 0

    def near_end(self, netem: bool = True) -> list[list[str]]:
        """Return `tc qdisc add` arguments for the node's own end of its link.

        netem: False leaves delay and loss to a relay.
        """
        shaped = _tbf(self.send_bps, least_queue_bytes=_NEAR_QUEUE_BYTES)
        if not netem or not self.is_impaired:
            return [["root", *tbf] for tbf in shaped]
        impaired = ["netem", "delay", f"{self.delay_us}us", "loss", f"{self.loss:.7%}", "limit", str(DELAYED_PACKETS)]
        return [["root", "handle", "1:", *impaired], *(["parent", "1:1", *tbf] for tbf in shaped)]

    def far_end(self) -> list[list[str]]:
        """Return `tc qdisc add` arguments for the bridge's end, which shapes the node's receiving side."""
        return [["root", *tbf] for tbf in _tbf(self.receive_bps)]


def _rate(rate: str) -> int | None:
    if rate == "none":
        return None
    rate_bps = _quantity("rate", rate, _RATE_UNITS, example="200mbit, or none for an unshaped link")
    if rate_bps <= 0:
        raise ValueError(f"rate {rate!r} must be above 0; write none for an unshaped link")
    return rate_bps


def _loss(loss: str) -> float:
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)\s*%", loss.strip())
    if match is None or float(match[1]) >= 100:
        raise ValueError(f"loss {loss!r:.40} must be a percentage from 0% to less than 100%; for example 0.01%")
    return float(match[1]) / 100


def duration_us(name: str, text: str, example: str = "5ms") -> int:
    """Parse a text such as "1.5ms". Raises a ValueError that calls it `name` and shows the right form."""
    return _quantity(name, text, _TIME_UNITS, example)


def _tbf(rate_bps: int | None, least_queue_bytes: int = 0) -> list[list[str]]:
    if rate_bps is None:
        return []
    # Bytes a port may send at once: 2 ms of the rate. A larger burst would let small messages pass unshaped.
    burst_bytes = max(32 * 1024, rate_bps * 2 // 1000 // 8)
    queue_bytes = burst_bytes + max(least_queue_bytes, int(rate_bps / 8 * _QUEUE_S))
    return [["tbf", "rate", f"{rate_bps}bit", "burst", f"{burst_bytes}b", "limit", f"{queue_bytes}b"]]


def _quantity(name: str, text: str, units: Mapping[str, float], example: str) -> int:
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*([a-z]+)", text.strip().lower())
    if match is None or match[2] not in units:
        raise ValueError(f"{name} {text!r} must be a number and one of {', '.join(units)}; for example {example}")
    return round(float(match[1]) * units[match[2]])
