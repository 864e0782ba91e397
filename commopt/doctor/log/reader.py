"""What NCCL really did: the facts in logs written with NCCL_DEBUG=INFO, for NCCL 2.4 and later."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from commopt.doctor.facts.machine import Version
from commopt.doctor.log.warnings import alike
from commopt.errors import ConfigurationError

HOW = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,NET,GRAPH,TUNING NCCL_DEBUG_FILE=nccl.%h.%p"
LONGEST = 4000  # characters of a line that are looked at: rings of large jobs are longer, and not needed
MOST_RANKS = 100_000
MOST = 200  # different lines of one kind that are kept

_T = TypeVar("_T")
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
TCP = ("Socket", "FastSocket")
"""Plugins that send through the kernel; all others do RDMA, or what a provider has in its place."""
PROTOCOLS = ("LL", "LL128", "Simple")
PATTERNS = {"1": "balanced tree", "2": "split tree", "3": "tree", "4": "ring", "5": "NVLS", "6": "CollNet"}

_VERSION = re.compile(r"NCCL version (\d+)\.(\d+)\.(\d+)")
_COMM = re.compile(r"comm \S+ rank (\d+) n[rR]anks (\d+)")
_NODES = re.compile(r"nNodes (\d+)")
_USING = re.compile(r"NET/(\S+?) ?: Using (.*)")
_DEVICE = re.compile(r"\[(\d+)\](?:=\{([^}]*)\}| ?([\w.\-]+:\d+/\w+|[\w.\-]+))")
_MERGED = re.compile(r"Made virtual device \[\d+\] name=\S+\+")
_NETWORK = re.compile(r"Using network ([\w.\-]+(?: [\w.\-]+)*)")
_SOCKETS = re.compile(r"NET/(?:Fast)?Socket")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w;\-]+)(?:.*\(found (\d+) nics\))?")
_THREADS = re.compile(r"NET/Socket ?: Using (\d+) threads and (\d+) sockets per thread")
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[\d+\])?([\w.\-]+):")
_CHANNEL = re.compile(
    r"(?:(?:Channel|Ring) \d+(?:/\d+)? : \d+(?:\[\w+\])? -> \d+(?:\[\w+\])?|Coll(?:Net)? \d+(?:/\d+)? : \d+) "
    r"(?:\[(send|receive)\] )?via (.+)"
)
# Ranks that share an output run into each other, so only what is known to belong to a name is taken.
_OVER_NETWORK = re.compile(r"(NET|COLLNET)/([^/]+)/(\d+)(?:\(\d+\))?(/GDRDMA)?")
_INSIDE = re.compile(r"P2P/(?:direct pointer|indirect|IPC|CUMEM|MNNVL|\w+)(?:/read)?(?:/CE)?|SHM(?:/(?:direct|CE))*")
_NO_GDR = re.compile(r"GPU Direct RDMA Disabled for (.*)")
_ENVIRONMENT = re.compile(r"(NCCL_\w+) set (?:by environment )?to (\S+)")
_BY_PLUGIN = re.compile(r"NET/\S+ .*\b(?:[Ss]etting|Adding) (NCCL_\w+)")
_NVLS = re.compile(r"(\d+) nvls channels")
_PATTERN = re.compile(r"Pattern (\d+), crossNic \d+, nChannels (\d+), (?:bw|speed) ([\d.]+)/([\d.]+), type (\w+)/(\w+)")
_NAMED = re.compile(r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+)(?: channel\S*)?")
_NUMBERED = re.compile(r"(\d+) Bytes -> Algo (\d+) proto (\d+)")
_FILE = re.compile(r"([\w/]+\.(?:cc|cu|h)):\d+ *$")
_HINT = re.compile(r"HINT: (?!See )(.*)")
_MESSAGE = re.compile(r"NCCL (INFO|WARN)\b")
_HOST = re.compile(r"([\w.\-]+):\d+:\d+ \[")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_LAST_ERROR = "Last error:"  # what torch says above the text of the last warning, whatever NCCL_DEBUG is
_NO_PEER = ("P2P is disabled between", "Could not enable P2P between", "P2P not supported between")
_PLUGIN_ERROR = re.compile(r"NET/Plugin.*?(version `[\w.]+' not found|undefined symbol: \w+)")
_NO_GDR_GPU = re.compile(r"GeForce|NVIDIA GB10\b")
_RANK = re.compile(r"^\s*(?:\[rank\d+\]:)?\s*")
NO_VERBS = "Failed to open libibverbs"  # a warning in old versions, although a machine without RDMA needs none


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
    seen: set[tuple[int, int]] = field(default_factory=set)
    """Size of a communicator and the number in it, of the ranks that wrote the log."""
    nodes: int | None = None
    """As NCCL counts them; ranks of one machine that cannot reach each other inside it count as nodes too."""
    hosts: set[str] = field(default_factory=set)
    """Names at the beginning of lines; not every log holds those of all nodes."""
    networks: Counter[str] = field(default_factory=Counter)
    devices: dict[str, list[str]] = field(default_factory=dict)
    """Names of adapters and interfaces by NET plugin ("IB", "Socket")."""
    places: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    """The same by number: nodes can have different adapters under one number."""
    merged: bool = False
    """Whether NCCL made one adapter of several, under a number of its own."""
    provider: str | None = None
    """What libfabric goes over: "efa", "tcp"."""
    provider_nics: int | None = None
    sockets: int | None = None
    """Sockets per connection, where NCCL opens more than one."""
    bootstrap: Counter[str] = field(default_factory=Counter)
    channels: Counter[str] = field(default_factory=Counter)
    """Ends of connections by transport: "NET/IB/GDRDMA", "NET/Socket", "P2P/CUMEM", "SHM/direct/direct"."""
    ends: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """"send" or "receive" and whether directly to GPU memory, of those over RDMA."""
    adapters: Counter[str] = field(default_factory=Counter)
    """Ends of connections by "IB 0": plugin and device number."""
    no_gdr: Counter[str] = field(default_factory=Counter)
    environment: dict[str, str] = field(default_factory=dict)
    by_plugin: set[str] = field(default_factory=set)
    """Variables that a network plugin set, not a person."""
    nvls: int | None = None
    """Channels that add in NVSwitches."""
    patterns: list[Pattern] = field(default_factory=list)
    choices: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Collective, algorithm, protocol, and how often."""
    largest: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """The same, and the largest message in bytes."""
    plugin_error: str | None = None
    """Why a network plugin that is there does not load."""
    no_verbs: bool = False
    no_ib_device: bool = False
    no_peer: bool = False
    no_gdr_gpu: str | None = None
    """A GPU that the job's own lines name and that has no GPUDirect RDMA, whatever is installed."""
    mnnvl: bool = False
    """Whether the nodes share NVLink."""
    warnings: dict[str, tuple[str, int]] = field(default_factory=dict)
    """The first of each kind of warnings, and how many there were, in the order of the log."""
    hints: list[str] = field(default_factory=list)
    """What NCCL itself advises."""

    @property
    def network_channels(self) -> dict[str, int]:
        """Those that leave the machine (or that NCCL sends over the network inside it)."""
        return {name: count for name, count in self.channels.items() if name.startswith(("NET/", "COLLNET/"))}

    @property
    def machines(self) -> int | None:
        """Nodes: as NCCL counts them, else by the names in the log where there are several."""
        # Where two lines ran into each other, the end of one sticks to the name.
        names = [name for name in self.hosts if not any(name != end and name.endswith(end) for end in self.hosts)]
        if self.all_over_network and len(names) == 1:
            return 1 if sum(size == self.ranks for size, _ in self.seen) == self.ranks else None
        return self.nodes or (len(names) if len(names) > 1 else None)

    @property
    def all_over_network(self) -> bool:
        """Whether everything that joins the ranks of one machine was switched off."""
        return all(self.environment.get(name) == "1" for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"))


def read_logs(paths: Sequence[Path]) -> Log:
    """Read logs of one job as one: files, and all files of a folder (one for each rank, say).

    Raises ConfigurationError (one line) for what cannot be read, and where no file has a line of NCCL.
    """
    files = [file for path in paths for file in (_files(path) if os.path.isdir(path) else [path])]
    source = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    log = parse_log((line for file in files for line in _lines(file)), source)
    if log is None:
        raise ConfigurationError(f"{source} has no line of NCCL in it; pass a log written with {HOW}")
    return log


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.is_file())
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be read ({error.strerror}); pass the folder of the logs") from None


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file, each up to LONGEST characters: a file may be one line without an end."""
    try:
        # A pipe nobody writes to would block, a device may have no end; what the shell or `|` hands over has both.
        if path.exists() and not path.is_file() and not str(path).startswith(("/dev/fd/", "/dev/stdin")):
            raise ValueError("not a plain file")
        with path.open(errors="replace") as file:
            begins = True
            while piece := file.readline(LONGEST):
                if begins:
                    yield piece
                begins = piece.endswith("\n")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"{path} cannot be read ({reason}); pass a log written with {HOW}") from None


def parse_log(lines: Iterable[str], source: str) -> Log | None:
    """Collect the facts of a log; None when no line is NCCL's."""
    log, any_line, last_error, before_line = Log(source), False, False, ""
    for line in lines:
        line = line[:LONGEST]
        if last_error:
            any_line = True
            _warning(log, _RANK.sub("", line).strip())
        last_error, before_line = _LAST_ERROR in line and "nccl" in before_line.lower(), line
        if log.no_gdr_gpu is None and (gpu := _NO_GDR_GPU.search(line)):
            log.no_gdr_gpu = gpu[0]
        if "NCCL" not in line:
            continue
        line = _COLOUR.sub("", line)
        if version := _VERSION.search(line):
            log.version = tuple(map(int, version.groups()))
            any_line = True
        before, *rest = _MESSAGE.split(line)
        for kind, text in zip(rest[::2], rest[1::2], strict=True):
            any_line = True
            if (hosts := _HOST.findall(before)) and len(log.hosts) < MOST:
                log.hosts.add(hosts[-1])
            if kind == "INFO":
                _info(log, text.strip())
            else:
                file = _FILE.search(before)
                # CUDA's errors mean different things in different places.
                where = f" ({file[1]})" if file and text.startswith(" Cuda failure") else ""
                _warning(log, text.strip() + where)
            before = text
    return log if any_line else None


def _warning(log: Log, text: str) -> None:
    text = re.sub(r"^\S+:\d+ ", "", text)
    kind = alike(text)
    if NO_VERBS in text:
        log.no_verbs = True
    elif text and (kind in log.warnings or len(log.warnings) < MOST):
        first, count = log.warnings.get(kind, (text, 0))
        log.warnings[kind] = first, count + 1


def _info(log: Log, text: str) -> None:
    if channel := _CHANNEL.search(text):
        _channel(log, channel)
    elif choice := _NAMED.search(text):
        _choice(log, choice[1], choice[3], choice[4], int(choice[2]))
    elif choice := _NUMBERED.search(text):
        _choice(log, "collective", choice[2], choice[3], int(choice[1]))
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
        if not _SOCKETS.search(text):  # sockets never do
            _count(log.no_gdr, off[1].strip())
    elif provider := _PROVIDER.search(text):
        log.provider, log.provider_nics = provider[1], int(provider[2]) if provider[2] else log.provider_nics
    elif threads := _THREADS.search(text):
        log.sockets = int(threads[1]) * int(threads[2])
    elif network := _NETWORK.search(text):
        _count(log.networks, network[1])
    elif using := _USING.search(text):
        _devices(log, using[1], using[2].split("; OOB")[0])
    else:
        _rest(log, text)


def _devices(log: Log, plugin: str, text: str) -> None:
    if plugin not in log.devices and len(log.devices) >= MOST:
        return
    known, places = log.devices.setdefault(plugin, []), log.places.setdefault(plugin, {})
    for place, group, single in _DEVICE.findall(text):
        names = [name for _, _, name in _DEVICE.findall(group)] or [single]
        known += [name for name in names if name not in known and len(known) < MOST]
        shown = "+".join(names)
        if len(places) < MOST and shown not in (there := places.setdefault(int(place), [])) and len(there) < MOST:
            there.append(shown)


def _rest(log: Log, text: str) -> None:
    if bootstrap := _BOOTSTRAP.search(text):
        _count(log.bootstrap, bootstrap[1])
    elif variable := _ENVIRONMENT.search(text):
        if variable[1] in log.environment or len(log.environment) < MOST:
            log.environment[variable[1]] = variable[2].rstrip(". ")
    elif hint := _HINT.search(text):
        if hint[1] not in log.hints and len(log.hints) < MOST:
            log.hints.append(hint[1])
    elif plugin := _BY_PLUGIN.search(text):
        if len(log.by_plugin) < MOST:
            log.by_plugin.add(plugin[1])
    elif broken := _PLUGIN_ERROR.search(text):
        log.plugin_error = broken[1]
    elif nvls := _NVLS.search(text):
        log.nvls = max(log.nvls or 0, int(nvls[1]))
    elif _MERGED.search(text):
        log.merged = True
    elif NO_VERBS in text:
        log.no_verbs = True
    elif "NET/IB : No device found" in text:
        log.no_ib_device = True
    elif any(words in text for words in _NO_PEER):
        log.no_peer = True
    if comm := _COMM.search(text):
        log.ranks = max(log.ranks or 0, int(comm[2]))
        if len(log.seen) < MOST_RANKS:
            log.seen.add((int(comm[2]), int(comm[1])))
    if nodes := _NODES.search(text):
        log.nodes = max(log.nodes or 0, int(nodes[1]))
        log.mnnvl |= "MNNVL 1" in text


def _channel(log: Log, channel: re.Match[str]) -> None:
    way = channel[2].split(" comm ")[0].strip()
    if network := _OVER_NETWORK.match(way):
        kind, plugin, place, direct = network.groups(default="")
        _count(log.channels, f"{kind}/{plugin}{direct}")
        _count(log.adapters, f"{plugin} {place}")
        if plugin not in TCP:
            log.ends[channel[1] or "", bool(direct)] += 1
    elif way.startswith("direct shared memory"):  # before NCCL 2.12
        log.channels["SHM"] += 1
    elif inside := _INSIDE.match(way):
        _count(log.channels, inside[0])


def _choice(log: Log, what: str, algorithm: str, protocol: str, nbytes: int) -> None:
    """Names stay as they are; some versions write numbers."""
    key = what, _named(algorithm, ALGORITHMS), _named(protocol, PROTOCOLS)
    if _count(log.choices, key):
        log.largest[key] = max(log.largest.get(key, 0), nbytes)


def _count(counter: Counter[_T], key: _T) -> bool:
    """Count `key`, unless there are too many others; returns whether it was."""
    if key not in counter and len(counter) >= MOST:
        return False
    counter[key] += 1
    return True


def _named(text: str, names: Sequence[str]) -> str:
    return names[int(text)] if text.isdecimal() and int(text) < len(names) else text


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
