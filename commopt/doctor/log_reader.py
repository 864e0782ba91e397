# SPDX-License-Identifier: Apache-2.0
"""Reads the facts in logs of NCCL_DEBUG=INFO, and in torch's messages and dumps about hangs.

Supports NCCL 2.4 and later; for older versions only the network and its interfaces.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from commopt.doctor.flight_record import add_records, read_record
from commopt.doctor.flight_recorder import read_dump
from commopt.doctor.hang import Hang
from commopt.doctor.log_causes import NcclWarning, normalized
from commopt.doctor.machine import Version
from commopt.document import plain_file, reason_of
from commopt.errors import ConfigurationError

LOG_VARIABLES = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,NET,GRAPH NCCL_DEBUG_FILE=nccl.%h.%p"
LONGEST = 4000  # characters read of a line: only rings of large jobs are longer, and these are not needed
MOST = 200  # different lines kept of one kind
MOST_RANKS = 100_000
OLDEST = (2, 4)
"""Earlier versions of NCCL may log connections in unknown formats."""
TCP = ("Socket", "FastSocket")
"""Plugins that send through the kernel. All others use RDMA or a provider's equivalent."""

_T = TypeVar("_T")
_K = TypeVar("_K")


@dataclass
class Log:
    """The facts of a log; empty until a line provides them."""

    source: str
    version: Version | None = None
    ranks: int | None = None
    seen: set[tuple[int, int]] = field(default_factory=set)
    """Size of the communicator and rank in it, of each rank that wrote the log."""
    nodes: int | None = None
    """Number of nodes as NCCL counts them; ranks of one machine without a transport inside it count separately."""
    hosts: set[str] = field(default_factory=set)
    """Host names at the beginning of lines, perhaps not those of all nodes."""
    networks: Counter[str] = field(default_factory=Counter)
    devices: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    """Names of adapters and interfaces by NET plugin ("IB", "Socket") and number, which may differ between nodes."""
    merged: set[str] = field(default_factory=set)
    """Adapters that NCCL merged into one: "mlx5_0:1/IB"."""
    interfaces: dict[tuple[str, str, str], set[str]] = field(default_factory=dict)
    """The hosts that logged each (use, name, address); the use is "Bootstrap", "Socket" or "OOB"."""
    provider: str | None = None
    """The provider of libfabric: "efa", "tcp"."""
    sockets: int = 1
    """Number of sockets of each connection."""
    channels: Counter[str] = field(default_factory=Counter)
    """Ends of connections by transport: "NET/IB/GDRDMA", "NET/Socket", "P2P/CUMEM", "SHM/direct/direct"."""
    ends: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """Ends of RDMA connections: "send" or "receive", and whether directly to GPU memory."""
    adapters: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Ends of connections by plugin and device number."""
    no_gdr: Counter[str] = field(default_factory=Counter)
    gdr: set[str] = field(default_factory=set)
    """Adapters that the log calls enabled for GPUDirect RDMA: "HCA 0 'mlx5_0'"."""
    environment: dict[str, str] = field(default_factory=dict)
    by_plugin: dict[str, bool] = field(default_factory=dict)
    """Variables set by a network plugin, not by the user."""
    plugin_error: str | None = None
    """Reason why a present network plugin does not load."""
    no_verbs: bool = False
    no_ib_device: bool = False
    no_peer: bool = False
    no_gdr_gpu: str | None = None
    """A GPU named in the log that never has GPUDirect RDMA."""
    mnnvl: bool = False
    """Whether the nodes share NVLink."""
    warnings: dict[str, NcclWarning] = field(default_factory=dict)
    """The first warning of each kind, with the number of such warnings, in the order of the log."""
    failed: dict[str, NcclWarning] = field(default_factory=dict)
    """Lines of INFO with an error as result ("misc/socket.cc:505 -> 2"), which NCCL writes while it returns."""
    hang: Hang = field(default_factory=Hang)
    """torch's messages about ranks that hang."""

    @property
    def network_channels(self) -> dict[str, int]:
        """Connections over the network."""
        return {name: count for name, count in self.channels.items() if name.startswith(("NET/", "COLLNET/"))}

    @property
    def host_names(self) -> set[str]:
        """The host names without those damaged by the end of another line."""
        return {name for name in self.hosts if not any(name != end and name.endswith(end) for end in self.hosts)}

    @property
    def machines(self) -> int | None:
        """Number of nodes: as NCCL counts them, else the number of host names if there are several."""
        names = self.host_names
        if self.all_over_network and len(names) == 1:
            return 1 if sum(size == self.ranks for size, _ in self.seen) == self.ranks else None
        return self.nodes or (len(names) if len(names) > 1 else None)

    @property
    def all_over_network(self) -> bool:
        """Whether all transports inside a machine were disabled."""
        return all(self.environment.get(name) == "1" for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"))

    def names(self, plugin: str) -> list[str]:
        """Return the names of a plugin's adapters: "mlx5_0:1/IB"."""
        return sorted({name for names in self.devices.get(plugin, {}).values() for name in names})


def read_logs(paths: Sequence[Path]) -> Log:
    """Read the logs of one job: files, and all files of folders (one for each rank, say).

    Dumps of torch's flight recorder (pickle or JSON) and commopt's flight records are read too. Raises
    ConfigurationError (one line) for unreadable files, and if no file has a line of NCCL or torch's watchdog.
    """
    files = [file for path in paths for file in (_files(path) if os.path.isdir(path) else [path])]
    source = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    hang, texts, records = Hang(), [], []
    for file in files:
        if (record := read_record(file)) is not None:
            records.append(record)
        elif (dump := read_dump(file)) is None:
            texts.append(file)
        else:
            hang.add_dump(dump)
    add_records(hang, records)
    log = parse_log((line for file in texts for line in _lines(file)), source, hang)
    if log is None:
        raise ConfigurationError(f"{source} has no line of NCCL; pass a log written with {LOG_VARIABLES}")
    return log


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.is_file())
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be read ({error.strerror}); pass the folder of the logs") from None


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, each up to LONGEST characters: a file may be one line without an end."""
    try:
        if not str(path).startswith(("/dev/fd/", "/dev/stdin")):  # input from the shell or `|` has an end
            plain_file(path)
        with path.open(errors="replace") as file:
            begins = True
            while piece := file.readline(LONGEST):
                if begins:
                    yield piece
                begins = piece.endswith("\n")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({reason_of(error)}); pass a log written with {LOG_VARIABLES}"
        ) from None


_VERSION = re.compile(r"[NR]CCL version (\d+)\.(\d+)\.(\d+)")
_MESSAGE = re.compile(r"NCCL (INFO|WARN)\b")
_FILE = re.compile(r"([\w/]+\.(?:cc|cu|h)):\d+ *$")
_HOST = re.compile(r"([\w.\-]+):\d+:\d+ \[")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_LAST_ERROR = "Last error:"  # torch's line above the last warning, for any NCCL_DEBUG
_LAST_ENTRY = re.compile(r"Last NCCL warning\(error\) log entry \(may be unrelated\) '(.{1,400}?)'(?:\.|$)")
"""XLA's form of the last warning."""
_NO_GDR_GPU = re.compile(r"GeForce|(?:NVIDIA |\b)GB10\b|\bJetson\b|\b(?:NVIDIA Thor|Orin)\b|\broceP2p1s0f[01]\b")
"""Names of GPUs, or of an adapter in the second PCI domain of a GB10."""
_RANK = re.compile(r"^\s*(?:\[[\w|]+\]:)?\s*")
_NO_VERBS = "Failed to open libibverbs"  # a warning in old versions, though harmless without RDMA


def parse_log(lines: Iterable[str], source: str, hang: Hang | None = None) -> Log | None:
    """Return the facts of a log; None if it has no line of NCCL or torch's watchdog, and `hang` is empty."""
    log, any_line, line_before = Log(source, hang=hang or Hang()), False, ""
    prefix: str | None = None  # of the line above
    for line in lines:
        line = line[:LONGEST]
        log.hang.add_line(line)
        if prefix is not None:
            any_line = True
            _warning(log, _RANK.sub("", line.removeprefix(prefix)).strip())
        is_last_error = _LAST_ERROR in line and "nccl" in line_before.lower()
        prefix, line_before = line.partition(_LAST_ERROR)[0] if is_last_error else None, line
        for entry in _LAST_ENTRY.finditer(line):
            any_line = True
            _warning(log, entry[1])
        if log.no_gdr_gpu is None and (gpu := _NO_GDR_GPU.search(line)):
            log.no_gdr_gpu = "GB10" if gpu[0].startswith("roce") else gpu[0]
        if "CCL" not in line:  # RCCL is AMD's
            continue
        line = _COLOUR.sub("", line)
        if version := _VERSION.search(line):
            log.version = tuple(map(int, version.groups()))
            any_line = True
        before, *rest = _MESSAGE.split(line)
        for kind, text in zip(rest[::2], rest[1::2], strict=True):
            any_line = True
            hosts = _HOST.findall(before)
            host = hosts[-1] if hosts else ""
            if host and len(log.hosts) < MOST:
                log.hosts.add(host)
            if kind == "INFO":
                _info(log, text.strip(), host)
            else:
                file = _FILE.search(before)
                _warning(log, text.strip(), file[1] if file else "")
            before = text
    return log if any_line or log.hang else None


def _warning(log: Log, text: str, file: str = "") -> None:
    # The meaning of a CUDA error depends on the place.
    text = re.sub(r"^\S+:\d+ ", "", text) + (f" ({file})" if file and text.startswith("Cuda failure") else "")
    if _NO_VERBS in text:
        log.no_verbs = True
    elif text:
        _one_more(log.warnings, text, file)


def _one_more(table: dict[str, NcclWarning], text: str, file: str) -> None:
    kind = normalized(text)
    first = table.get(kind, NcclWarning(text, 0, file))
    _set_unless_full(table, kind, first._replace(times=first.times + 1))


def _info(log: Log, text: str, host: str) -> None:
    for use, name, address in _interfaces(text):
        _set_unless_full(log.interfaces, (use, name, address), log.interfaces.get((use, name, address), set()) | {host})
    if result := _RESULT.match(text):
        _one_more(log.failed, text, result[1])
    elif _LOUD.search(text):
        _warning(log, text)
    for pattern, take in _LINES:
        if found := pattern.search(text):
            take(log, found)
            return


def _interfaces(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield use, name and address of each interface in a line."""
    before, oob, after = text.partition("OOB ")
    if oob and (found := _INTERFACE.match(after)):
        yield "OOB", found[1], found[2]
    if use := _USING.match(before):
        kind = "Bootstrap" if use[1] == "Bootstrap" else "Socket"
        for found in _INTERFACE.finditer(before, use.end()):
            yield kind, found[1], found[2]


def _set_unless_full(table: dict[_K, _T], key: _K, value: _T) -> None:
    """Set an entry, unless the table is full."""
    if key in table or len(table) < MOST:
        table[key] = value


def _count(counter: Counter[_T], key: _T) -> None:
    _set_unless_full(counter, key, counter[key] + 1)


def _channel(log: Log, found: re.Match[str]) -> None:
    way = found[2].split(" comm ")[0].strip()
    if network := _OVER_NETWORK.match(way):
        kind, plugin, place, direct = network.groups(default="")
        _count(log.channels, f"{kind}/{plugin}{direct}")
        _count(log.adapters, (plugin, int(place)))
        if plugin not in TCP:
            log.ends[found[1] or "", bool(direct)] += 1
    elif way.startswith("direct shared memory"):  # before NCCL 2.12
        log.channels["SHM"] += 1
    elif inside := _INSIDE.match(way):
        _count(log.channels, inside[0])


def _devices(log: Log, found: re.Match[str]) -> None:
    _set_unless_full(log.devices, found[1], log.devices.get(found[1], {}))
    places = log.devices.get(found[1], {})
    for place, fused, single in _DEVICE.findall(found[2].split("; OOB")[0]):
        there = places.get(int(place), [])
        parts = [name for _, _, name in _DEVICE.findall(fused)]
        log.merged |= set(parts[:MOST]) if len(parts) > 1 and len(log.merged) < MOST else set()
        new = [name for name in parts or [single] if name not in there]
        if new and len(there) < MOST:
            _set_unless_full(places, int(place), there + new)


def _comm(log: Log, found: re.Match[str]) -> None:
    log.ranks = max(log.ranks or 0, int(found[2]))
    if len(log.seen) < MOST_RANKS:
        log.seen.add((int(found[2]), int(found[1])))
    if found[3]:
        log.nodes = max(log.nodes or 0, int(found[3]))
        log.mnnvl |= "MNNVL 1" in found.string


def _no_gdr(log: Log, found: re.Match[str]) -> None:
    if "Socket" not in found[0]:  # sockets never do
        _count(log.no_gdr, found[1].strip())


def _gdr(log: Log, found: re.Match[str]) -> None:
    if "Socket" not in found[0] and len(log.gdr) < MOST:
        log.gdr.add(found[1].strip())


def _set(name: str, value: object = None) -> Callable[[Log, re.Match[str]], None]:
    """Return a function that sets an attribute to `value`, or to the first group of the match."""
    return lambda log, found: setattr(log, name, value or found[1])


# Lines of ranks that share an output run into each other, so patterns accept only the known form of a name.
_OVER_NETWORK = re.compile(r"(NET|COLLNET)/([^/]+)/(\d{1,9})(?:\(\d+\))?(/GDRDMA)?")
_ADDRESS = r"[0-9a-fA-F.:]+(?:%[\w.\-]+)?"
_INTERFACE = re.compile(rf"(?:\[\d+\] ?)?([\w.\-@]+):({_ADDRESS})<\d+>")
_USING = re.compile(r"(Bootstrap|NET/(?:Fast)?Socket|NET) ?: Using (?:interface )?")
_RESULT = re.compile(r"((?:[\w\-]+/)*[\w\-]+\.(?:cc|cu|h)):\d+ -> [1-6]\b")  # 7 is "in progress"
# Messages that newer versions write as INFO and older ones as WARN, and messages about delayed connections.
_LOUD = re.compile(
    r"Could not find a path for pattern|Tried merging multiple devices|magic mismatch|ibv_modify_qp failed.*retrying"
)
_INSIDE = re.compile(r"P2P/(?:direct pointer|indirect|IPC|CUMEM|MNNVL|\w+)(?:/read)?(?:/CE)?|SHM(?:/(?:direct|CE))*")
_DEVICE = re.compile(r"\[(\d{1,9})\](?:=\{([^}]*)\}| ?([\w.\-]+:\d+/\w+|[\w.\-]+))")

# Meaning of a line of INFO: the first matching pattern counts.
_LINES: tuple[tuple[re.Pattern[str], Callable[[Log, re.Match[str]], None]], ...] = tuple(
    (re.compile(pattern), take) for pattern, take in (
        (r"(?:\d+(?:\[\w+\])? -> \d+(?:\[\w+\])?|Coll(?:Net)? \d+(?:/\d+)? : \d+) "
         r"(?:\[(send|receive)\] )?via (.+)", _channel),
        (r"(?:NET/\S+ .*?)?GPU Direct RDMA Disabled for (.*)", _no_gdr),
        (r"(?:NET/\S+ .*?)?GPU Direct RDMA (?:\([\w\- ]+\) )?[Ee]nabled for (.*)", _gdr),
        (r"NET/OFI Selected [Pp]rovider is ([\w;\-]+)", _set("provider")),
        (r"NET/Socket ?: Using (\d+) threads and (\d+) sockets per thread",
         lambda log, found: setattr(log, "sockets", int(found[1]) * int(found[2]))),
        (r"Using (?:internal )?[Nn]etwork ([\w.\-]+(?: [\w.\-]+)*)", lambda log, found: _count(log.networks, found[1])),
        (r"NET/(\S+?) ?: Using (?!interface )(.*)", _devices),
        (r"(NCCL_\w+) set (?:by environment )?to (\S+(?: Libfabric)?)",
         lambda log, found: _set_unless_full(log.environment, found[1], found[2].rstrip(". "))),
        (r"NET/\S+ .*\b(?:[Ss]etting|Adding) (NCCL_\w+)",
         lambda log, found: _set_unless_full(log.by_plugin, found[1], True)),
        (r"NET/Plugin.*?(version `[\w.]+' not found|undefined symbol: \w+)", _set("plugin_error")),
        (_NO_VERBS, _set("no_verbs", True)),
        ("NET/IB : No device found", _set("no_ib_device", True)),
        ("P2P is disabled between|Could not enable P2P between|P2P not supported between", _set("no_peer", True)),
        (r"(?:comm \S+ )?rank (\d+) n[rR]anks (\d+)(?:.*? nNodes (\d+))?", _comm),
    )
)  # fmt: skip
