"""What NCCL really did: the facts in a log written with NCCL_DEBUG=INFO, for NCCL 2.4 and later."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from commopt.doctor.facts.machine import Version
from commopt.errors import ConfigurationError

HOW = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,NET,GRAPH,TUNING NCCL_DEBUG_FILE=nccl.%h.%p"
LONGEST = 4000  # characters of a line that are looked at: rings of large jobs are longer, and not needed
MOST = 200  # different lines of one kind that are kept

ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
PATTERNS = {"1": "balanced tree", "2": "split tree", "3": "tree", "4": "ring", "5": "NVLS", "6": "CollNet"}

_VERSION = re.compile(r"NCCL version (\d+)\.(\d+)\.(\d+)")
_COMM = re.compile(r"comm \S+ rank (\d+) n[rR]anks (\d+)")
_NODES = re.compile(r"nNodes (\d+)")
_USING = re.compile(r"NET/(\S+?) ?: Using (.*)")
_DEVICE = re.compile(r"\[\d+\] ?([\w.\-]+:\d+/\w+|[\w.\-]+)")
_NETWORK = re.compile(r"Using network (\S+(?: \S+)?)")
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[\d+\])?([\w.\-]+):")
_CHANNEL = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : \d+(?:\[\w+\])? -> \d+(?:\[\w+\])? (?:\[(?:send|receive)\] )?via (.+)"
)
_NO_GDR = re.compile(r"GPU Direct RDMA Disabled for (.*)")
_ENVIRONMENT = re.compile(r"(NCCL_\w+) set (?:by environment )?to (\S.*)")
_PATTERN = re.compile(r"Pattern (\d+), crossNic \d+, nChannels (\d+), (?:bw|speed) ([\d.]+)/([\d.]+), type (\w+)/(\w+)")
_NAMED = re.compile(r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+)(?: channel\S*)?")
_NUMBERED = re.compile(r"(\d+) Bytes -> Algo (\d+) proto (\d+)")
_WARNING = re.compile(r"NCCL WARN (.*)")


@dataclass(frozen=True)
class Pattern:
    """One of the plans that NCCL made before the first message."""

    name: str
    channels: int
    intra_gbs: float
    """GB/s of one channel inside a node."""
    inter_gbs: float
    """GB/s of one channel between nodes."""
    intra: str
    """Longest path between two GPUs: NVL, PIX, PHB, SYS."""
    inter: str
    """Longest path between a GPU and its adapter."""


@dataclass
class Log:
    """What was found; everything is empty until a line says it."""

    source: str
    version: Version | None = None
    ranks: int | None = None
    nodes: int | None = None
    networks: Counter[str] = field(default_factory=Counter)
    devices: dict[str, list[str]] = field(default_factory=dict)
    """Names of adapters and interfaces by NET plugin ("IB", "Socket")."""
    bootstrap: Counter[str] = field(default_factory=Counter)
    channels: Counter[str] = field(default_factory=Counter)
    """Ends of connections by transport: "NET/IB/GDRDMA", "NET/Socket", "P2P/CUMEM", "SHM/direct/direct"."""
    adapters: Counter[str] = field(default_factory=Counter)
    """Ends of connections by "IB 0": plugin and device number."""
    no_gdr: Counter[str] = field(default_factory=Counter)
    environment: dict[str, str] = field(default_factory=dict)
    patterns: list[Pattern] = field(default_factory=list)
    choices: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Collective, algorithm, protocol, and how often."""
    largest: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """The same, and the largest message in bytes."""
    no_verbs: bool = False
    no_ib_device: bool = False
    no_peer: bool = False
    warnings: Counter[str] = field(default_factory=Counter)

    @property
    def network_channels(self) -> dict[str, int]:
        """Those that leave the machine (or that NCCL sends over the network inside it)."""
        return {name: count for name, count in self.channels.items() if name.startswith("NET/")}


def read_log(path: Path) -> Log:
    """Read a log. Raises ConfigurationError (one line) for what is none, or cannot be read."""
    try:
        with path.open(errors="replace") as lines:
            log = parse_log(lines, str(path))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror}); pass a log written with {HOW}") from None
    if log is None:
        raise ConfigurationError(f"{path} has no line of NCCL in it; pass a log written with {HOW}")
    return log


def parse_log(lines: Iterable[str], source: str) -> Log | None:
    """Collect the facts of a log; None when no line is NCCL's."""
    log, any_line = Log(source), False
    for line in lines:
        line = line[:LONGEST]
        if "NCCL" not in line:
            continue
        if version := _VERSION.search(line):
            log.version = tuple(map(int, version.groups()))
            any_line = True
        if "NCCL INFO" in line:
            any_line = True
            _info(log, line.split("NCCL INFO", 1)[1].strip())
        elif warning := _WARNING.search(line):
            any_line = True
            if len(log.warnings) < MOST:
                log.warnings[re.sub(r"^\S+:\d+ ", "", warning[1].strip())] += 1
    return log if any_line else None


def _info(log: Log, text: str) -> None:
    if channel := _CHANNEL.search(text):
        _channel(log, channel)
    elif choice := _NAMED.search(text):
        _choice(log, (choice[1], choice[3], choice[4]), int(choice[2]))
    elif choice := _NUMBERED.search(text):
        algorithm, protocol = int(choice[2]), int(choice[3])
        if algorithm < len(ALGORITHMS) and protocol < len(PROTOCOLS):
            _choice(log, ("collective", ALGORITHMS[algorithm], PROTOCOLS[protocol]), int(choice[1]))
    elif pattern := _PATTERN.search(text):
        plan = Pattern(
            PATTERNS.get(pattern[1], f"pattern {pattern[1]}"),
            int(pattern[2]),
            _float(pattern[3]),
            _float(pattern[4]),
            pattern[5],
            pattern[6],
        )
        if plan not in log.patterns and len(log.patterns) < MOST:
            log.patterns.append(plan)
    elif off := _NO_GDR.search(text):
        if len(log.no_gdr) < MOST:
            log.no_gdr[off[1].strip()] += 1
    elif network := _NETWORK.search(text):
        log.networks[network[1]] += 1
    elif using := _USING.search(text):
        names = _DEVICE.findall(using[2].split("; OOB")[0].replace("{", " ").replace("=", " "))
        known = log.devices.setdefault(using[1], [])
        known += [name for name in dict.fromkeys(names) if name not in known]
    else:
        _rest(log, text)


def _rest(log: Log, text: str) -> None:
    if bootstrap := _BOOTSTRAP.search(text):
        log.bootstrap[bootstrap[1]] += 1
    elif variable := _ENVIRONMENT.search(text):
        log.environment[variable[1]] = variable[2].rstrip(". ")
    elif "Failed to open libibverbs" in text:
        log.no_verbs = True
    elif "NET/IB : No device found" in text:
        log.no_ib_device = True
    elif "P2P is disabled between" in text or "Could not enable P2P between" in text:
        log.no_peer = True
    if comm := _COMM.search(text):
        log.ranks = max(log.ranks or 0, int(comm[2]))
    if nodes := _NODES.search(text):
        log.nodes = max(log.nodes or 0, int(nodes[1]))


def _channel(log: Log, channel: re.Match[str]) -> None:
    way = channel[1].split(" comm ")[0].strip()
    parts = way.split("/")
    if parts[0] == "NET" and len(parts) > 2:
        log.adapters[f"{parts[1]} {parts[2].split('(')[0]}"] += 1
        direct = "/GDRDMA" if any(part.startswith("GDRDMA") for part in parts[3:]) else ""
        log.channels[f"NET/{parts[1]}{direct}"] += 1
    elif way.startswith("direct shared memory"):  # before NCCL 2.12
        log.channels["SHM"] += 1
    else:
        log.channels["P2P/indirect" if way.startswith("P2P/indirect") else way] += 1


def _choice(log: Log, key: tuple[str, str, str], nbytes: int) -> None:
    log.choices[key] += 1
    log.largest[key] = max(log.largest.get(key, 0), nbytes)


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
