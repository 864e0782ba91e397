"""Does the address that each rank offers answer to the others? Where it does not, NCCL waits without an end."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from commopt.doctor.facts.machine import Machine
from commopt.doctor.facts.pattern import Pattern

CONNECT_S = 5.0
MOST_PEERS = 64
"""A rank tries this many others; in a larger job each is still tried by as many."""

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Offer:
    """An address that a library on this rank tells the other ranks to connect to."""

    library: str
    """ "NCCL" or "gloo"."""
    address: str

    def as_pair(self) -> tuple[str, str]:
        """Return plain values for JSON."""
        return self.library, self.address


@dataclass(frozen=True)
class Target:
    """Another rank's offer, and the port on which that rank listens while the doctor runs."""

    rank: int
    port: int
    library: str
    address: str


@dataclass(frozen=True)
class Unreached:
    """A target that did not answer, and why."""

    rank: int
    library: str
    address: str
    why: str


def ipv4_of(interface: str) -> str | None:
    """Return the address of an interface of this machine; None when it has none."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as asker:
        try:
            answer = fcntl.ioctl(asker, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def own_offers(machine: Machine, address_of: Callable[[str], str | None] = ipv4_of) -> tuple[Offer, ...]:
    """Return what this rank would offer; what cannot be known is left out."""
    names = sorted(
        machine.listing("sys/class/net"), key=lambda name: machine.number(f"sys/class/net/{name}/ifindex") or 0
    )
    up = [name for name in names if machine.text(f"sys/class/net/{name}/operstate") in ("up", "unknown")]
    nccl = _first(_as_nccl_looks(up, machine.variable("NCCL_SOCKET_IFNAME")), address_of)
    chosen = machine.variable("GLOO_SOCKET_IFNAME")
    gloo = _first(chosen.split(","), address_of) if chosen is not None else _of_host_name()
    told = (("NCCL", nccl if machine.hardware.gpus else None), ("gloo", gloo))
    return tuple(Offer(library, address) for library, address in told if address is not None)


def _as_nccl_looks(names: Sequence[str], chosen: str | None) -> list[str]:
    """Order interfaces as NCCL tries them: what is named; else InfiniBand's, the others, Docker's and lo."""
    if chosen is not None:
        return [name for name in names if Pattern.parse(chosen).selects(name)]
    last = ("docker", "lo", "virbr")
    return sorted(names, key=lambda name: (not name.startswith("ib"), name.startswith(last)))


def _first(names: Sequence[str], address_of: Callable[[str], str | None]) -> str | None:
    return next((address for name in names if (address := address_of(name)) is not None), None)


def _of_host_name() -> str | None:
    """Return the address that this host's name stands for: gloo listens there."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return "127.0.0.1"


def listener() -> socket.socket:
    """Return a socket that the system answers for, on every address of this machine and a free port."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        except OSError:  # IPv6 is switched off
            pass
    return socket.create_server(("", 0), backlog=1024)


def peers_of(rank: int, world_size: int) -> list[int]:
    """Return the ranks that `rank` tries: all others, or as many as a rank tries at most, evenly spread."""
    others = world_size - 1
    count = min(others, MOST_PEERS)
    return [(rank + 1 + place * others // count) % world_size for place in range(count)]


def unreached(targets: Sequence[Target], limit_s: float = CONNECT_S) -> tuple[Unreached, ...]:
    """Connect to all targets, many at once; return those that did not answer within `limit_s` each."""
    if not targets:
        return ()

    def attempt(target: Target) -> str | None:
        try:
            socket.create_connection((target.address, target.port), limit_s).close()
        except TimeoutError:
            return f"no answer within {limit_s:g} s"
        except OSError as error:
            return error.strerror or str(error)
        return None

    with ThreadPoolExecutor(min(len(targets), 2 * MOST_PEERS)) as pool:
        answers = pool.map(attempt, targets)
        return tuple(
            Unreached(target.rank, target.library, target.address, why)
            for target, why in zip(targets, answers, strict=True)
            if why is not None
        )
