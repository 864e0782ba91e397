"""What users type for rates and numbers of nodes."""

from __future__ import annotations

import re

from commopt.errors import ConfigurationError
from commopt.simulate.cluster import INTRA_GB_PER_S

MOST_GPUS = 2**14

_GBIT = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(?:g|gbps|gbit/s|gb/s)?", re.IGNORECASE)
_GBYTE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(?:GBps|GB/s)?")


def parse_gbps(text: str, option: str) -> float:
    """Return Gb/s from "25gbps", "25G" or "25"; raises ConfigurationError."""
    match = _GBIT.fullmatch(text.strip())
    if match is None or "GB" in text:
        raise ConfigurationError(f"{option} {text!r} is no rate in Gb/s (bits); write for example 25gbps")
    return float(match[1])


def parse_gb_per_s(text: str, option: str) -> float:
    """Return GB/s from "200GBps" or "200", or what a kind of link achieves; raises ConfigurationError."""
    if text in INTRA_GB_PER_S:
        return INTRA_GB_PER_S[text]
    match = _GBYTE.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(
            f"{option} {text!r} is no rate in GB/s (bytes); write for example 200GBps, or one of "
            f"{', '.join(INTRA_GB_PER_S)}"
        )
    return float(match[1])


def parse_nodes(text: str, gpus_per_node: int) -> tuple[int, ...]:
    """Return node counts from "1,2,5", or from "1..512": both ends and the powers of two between them."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:\s*\.\.\s*([0-9]{1,9}))?\s*", part)
        if match is None:
            raise ConfigurationError(f"--nodes {text!r} is no number of nodes; write for example 4, 1,2,5 or 1..512")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last:
            raise ConfigurationError(f"--nodes {text!r}: {part.strip()!r} must count up from 1 or more")
        powers = {2**exponent for exponent in range(last.bit_length())}
        counts += [count for count in sorted({first, last} | powers) if first <= count <= last]
    most = max(counts) * gpus_per_node
    if most > MOST_GPUS:
        raise ConfigurationError(f"--nodes {text!r} makes {most} GPUs; {MOST_GPUS} are the most that is simulated")
    return tuple(dict.fromkeys(counts))
