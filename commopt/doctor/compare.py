# SPDX-License-Identifier: Apache-2.0
"""Under a launcher every rank examines its own machine, and rank 0 collects and compares the results."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from commopt.doctor.finding import Check, Finding, Severity, check, error, in_order, merge, ok, warning
from commopt.doctor.machine import Machine, own_gpu
from commopt.doctor.network import active_ports, used_by_nccl
from commopt.doctor.rank_answers import (
    MOST_PEERS,
    Offer,
    RankFacts,
    Unreached,
    as_json,
    read_answer,
    read_listen_address,
)
from commopt.errors import MismatchError
from topology.cluster import Cluster, HostIdentity
from topology.queries import node_nic_gbps, nvlink_kind

PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS")
# These may differ, or must.
OWN = ("NCCL_HOSTID", "NCCL_DEBUG_FILE", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE")
# Ranks that disagree about these wait for each other forever.
VITAL = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_MAX_CTAS")

TIMEOUT_S = 120.0
LEAVE_S = 2.0
CONNECT_S = 5.0

_PREFIX = "commopt/doctor"
_SIOCGIFADDR = 0x8915


class EqualFact(NamedTuple):
    """A fact that must be the same on every node.

    value: returns the fact of a machine; None if unknown, which is not compared.
    """

    read: str
    severity: Severity
    value: Callable[[Machine], str | None]
    expected: str
    remedy: str


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(Counter(names).items()))


def _gbps(value: float | None) -> str:
    return f"{value:g} Gb/s" if value else "speed unknown"


def _gpus(machine: Machine) -> str:
    return _counted(gpu.name or "GPU" for gpu in machine.hardware.gpus) or "no GPU"


def _nvlinks(machine: Machine) -> str | None:
    kind = nvlink_kind(machine.topology)
    return None if kind == "unknown" else f"NVLink {kind}"


def _ports(machine: Machine) -> str:
    ports = active_ports(machine)
    return _counted(f"{port.link_layer or 'unknown'} {_gbps(port.gbps)}" for port in ports) or "no RDMA port"


WARNING = Severity.WARNING
EQUAL_FACTS = tuple(EqualFact(*row) for row in (
    ("torch, CUDA, NCCL", Severity.ERROR, lambda machine: str(machine.software),
     "the same on every rank: NCCL refuses other versions",
     "pip freeze > constraints.txt on one node, pip install torch -c constraints.txt on the others"),
    ("/sys/module/nvidia/version", WARNING, lambda machine: machine.text("sys/module/nvidia/version") or "none",
     "the same driver on every node", "install the same driver on every node"),
    ("/sys/bus/pci/devices", WARNING, _gpus, "the same GPUs on every node: all wait for the slowest",
     "python -m topology on each of these nodes"),
    ("NVML: NVLinks", WARNING, _nvlinks, "the same NVLinks on every node: all wait for the slowest",
     "nvidia-smi nvlink -s on each of these nodes"),
    ("/sys/class/infiniband/*/ports/*/rate", WARNING, _ports,
     "the same ports on every node: all wait for the slowest, and NCCL connects equal kinds only",
     "ibstat on the node that differs"),
    ("/sys/class/net/*/speed", WARNING,
     lambda machine: "fastest " + _gbps(max((one.gbps or 0 for one in used_by_nccl(machine)), default=0)),
     "the same speed on every node: all wait for the slowest",
     "ethtool INTERFACE on the slow node; check cable and switch port"),
    ("/sys/class/net/*/mtu", WARNING,
     lambda machine: ", ".join(sorted({str(one.mtu) for one in used_by_nccl(machine) if one.mtu})) or None,
     "the same frame size on every node: large messages hang where it is smaller",
     "sudo ip link set INTERFACE mtu VALUE, the same everywhere"),
))  # fmt: skip


def rank_facts(machine: Machine, host: HostIdentity) -> RankFacts:
    """Collect the facts of this rank for `compare`."""
    place, name = own_gpu(machine)
    chosen = ((name, value) for name, value in machine.environ.items() if name.startswith(PREFIXES) and value)
    return RankFacts(
        host,
        name if place is None else machine.hardware.gpus[place].busid,
        len(machine.hardware.gpus),
        node_nic_gbps(machine.topology),
        tuple(row.value(machine) for row in EQUAL_FACTS),
        {name: value for name, value in chosen if name not in OWN},
        own_offers(machine) if machine.root == Path("/") else (),
    )


# ------------------------------------------------------------------------------------------ comparing

Ranks = Sequence[RankFacts]


def compare(ranks: Ranks) -> list[Finding]:
    """Return findings about differences between ranks and nodes, in the order of repair."""
    checks: tuple[Check[Ranks], ...] = (nodes_reach, rank_layout, nodes_settings, nodes_equal)
    return [replace(finding, nodes=("all nodes",)) for look in checks for finding in look(ranks)]


@check("a TCP connection between each two nodes")
def nodes_reach(ranks: Ranks) -> Iterator[Finding]:
    """Addresses that answer to all ranks"""
    for library in ("NCCL", "gloo"):
        silent: dict[Unreached, dict[str, None]] = {}
        for facts in ranks:
            for one in facts.unreached:
                silent.setdefault(one, {})[facts.node] = None
        shown = [
            f"{one.offer.address} of rank {one.rank} ({ranks[one.rank].node}), from {', '.join(nodes)}: {one.why}"
            for one, nodes in silent.items()
            if one.offer.library == library
        ]
        if not shown:
            continue
        value = "; ".join(shown[:4]) + (f"; and {len(shown) - 4} more" if len(shown) > 4 else "")
        expected = f"an answer: {library} connects to these addresses, and otherwise waits forever or fails"
        remedy = f"export {library.upper()}_SOCKET_IFNAME to an interface on the network that all nodes share; "
        remedy += "open the firewall between them for all ports; correct a name in /etc/hosts that means 127.0.1.1"
        # A job on GPUs may not need gloo.
        yield (warning if library == "gloo" and any(facts.gpus for facts in ranks) else error)(value, expected, remedy)
    if ranks[0].offers and not any(facts.unreached for facts in ranks):
        offers = ", ".join(f"{offer.library} {offer.address}" for offer in ranks[0].offers)
        yield ok(f"rank 0 offers {offers}", "an answer from all")


@check("host name, boot id, NCCL_HOSTID of every rank", "torchrun --nproc-per-node the same everywhere")
def rank_layout(ranks: Ranks) -> Iterator[Finding]:
    """Layout of the ranks: one per GPU, as many on every node, in sequence."""
    cluster = Cluster.from_hosts([facts.host for facts in ranks])
    read = "LOCAL_RANK, CUDA_VISIBLE_DEVICES"
    for name, node in zip(cluster.names, cluster.nodes, strict=True):
        by_gpu: dict[str | None, list[int]] = {}
        for rank in node:
            by_gpu.setdefault(ranks[rank].gpu, []).append(rank)
        lost = ", ".join(map(str, by_gpu.pop(None, [])))
        for gpu, sharing in by_gpu.items():
            if len(sharing) > 1:
                remedy = "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])); check CUDA_VISIBLE_DEVICES"
                value = f"{name}: ranks {', '.join(map(str, sharing))} on {gpu}"
                yield error(value, "one rank per GPU: NCCL refuses duplicates", remedy, read=read)
        gpus = ranks[node[0]].gpus
        if lost and gpus:
            remedy = "torchrun --nproc-per-node as many as CUDA_VISIBLE_DEVICES shows"
            value = f"{name}: no GPU for ranks {lost} ({gpus} in the machine)"
            yield error(value, "a GPU for every rank", remedy, read=read)
    if not cluster.node_contiguous:
        shown = " | ".join(
            f"{name}: {', '.join(map(str, node[:8]))}{' ...' if len(node) > 8 else ''}"
            for name, node in list(zip(cluster.names, cluster.nodes, strict=True))[:4]
        )
        expected = "the ranks of a node in sequence: a ring crosses the network at every hop otherwise"
        yield warning(shown, expected, "torchrun numbers them so; Slurm: --distribution=block; MPI: --map-by slot")
    if not cluster.uniform:
        yield warning(str(cluster), "as many ranks on every node: the node with fewer waits, or has less bandwidth")


@check("NCCL_*, GLOO_*")
def nodes_settings(ranks: Ranks) -> Iterator[Finding]:
    """Equal settings: the variables that NCCL, gloo and torch read are the same on every rank."""
    for name in sorted({name for facts in ranks for name in facts.settings}):
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(ranks):
            values.setdefault(facts.settings.get(name, "unset"), []).append(rank)
        if len(values) > 1:
            shown = "; ".join(f"{value} on {_ranks_by_node(ranks, on)}" for value, on in values.items())
            remedy = f"export {name} for all ranks (mpirun -x {name}; sbatch --export), or unset it"
            kind, sure = (error, "high") if name in VITAL else (warning, "medium")
            yield kind(shown, remedy=remedy, confidence=sure, read=name)


def _ranks_by_node(ranks: Ranks, some: Sequence[int]) -> str:
    """Return "n0 (ranks 0, 1), n1 (rank 2)", at most eight ranks of each of four nodes."""
    nodes: dict[str, list[str]] = {}
    for rank in some:
        nodes.setdefault(ranks[rank].node, []).append(str(rank))
    shown = [
        f"{node} (rank{'s' * (len(on) > 1)} {', '.join(on[:8])}{' ...' * (len(on) > 8)})" for node, on in nodes.items()
    ]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


@check("versions, GPUs, network")
def nodes_equal(ranks: Ranks) -> Iterator[Finding]:
    """Equal nodes: the same versions, GPUs and network; all wait for the slowest."""
    fine = True
    for place, row in enumerate(EQUAL_FACTS):
        groups: dict[str, dict[str, None]] = {}
        for facts in ranks:
            if (answer := facts.equal[place]) is not None:
                groups.setdefault(answer, {})[facts.node] = None
        if len(groups) > 1:
            fine = False
            shown = [  # the answer of the most first
                f"{value} on {', '.join(list(nodes)[:3])}" + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
                for value, nodes in sorted(groups.items(), key=lambda item: -len(item[1]))[:4]
            ]
            yield Finding(row.severity, "; ".join(shown), row.expected, row.remedy, read=row.read)
    if fine:
        cluster, speeds = Cluster.from_hosts([facts.host for facts in ranks]), [facts.gbps for facts in ranks]
        slowest = None if None in speeds else min(speed for speed in speeds if speed is not None)
        yield ok(f"{cluster}, {_gbps(slowest)} from the slowest node")


# ------------------------------------------------------------------------------------------ reaching


def ipv4_of(interface: str) -> str | None:
    """Return the IPv4 address of an interface of this machine; None if it has none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        return socket.inet_ntoa(fcntl.ioctl(asker, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))[20:24])
    return None


def own_offers(machine: Machine, address_of: Callable[[str], str | None] = ipv4_of) -> tuple[Offer, ...]:
    """Return the addresses that this rank offers, as far as they are known."""
    gloo, used = machine.variable("GLOO_SOCKET_IFNAME"), used_by_nccl(machine) if machine.hardware.gpus else []
    place = {one.name: machine.number(f"sys/class/net/{one.name}/ifindex") or 0 for one in used}
    tried = sorted(place, key=lambda name: (not name.startswith("ib"), place[name]))  # as NCCL does
    nccl_at = next(filter(None, map(address_of, tried)), None)
    gloo_at = _address_of_host() if gloo is None else next(filter(None, map(address_of, gloo.split(","))), None)
    return tuple(Offer(library, at) for library, at in (("NCCL", nccl_at), ("gloo", gloo_at)) if at is not None)


def _address_of_host() -> str:
    """Return the address of this host's name, on which gloo listens."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return "127.0.0.1"


def listener() -> socket.socket:
    """Return a socket that accepts connections on all addresses of this machine, at a free port."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 is switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def peers_of(rank: int, world_size: int) -> list[int]:
    """Return the ranks that `rank` connects to: all others, or MOST_PEERS of them, evenly spread."""
    others = world_size - 1
    count = min(others, MOST_PEERS)
    return [(rank + 1 + place * others // count) % world_size for place in range(count)]


def unreached(targets: Sequence[tuple[int, int, Offer]], limit_s: float = CONNECT_S) -> tuple[Unreached, ...]:
    """Connect to all targets (rank, port, offer) in parallel. Return those without an answer in `limit_s`."""

    def attempt(target: tuple[int, int, Offer]) -> Unreached | None:
        rank, port, offer = target
        try:
            socket.create_connection((offer.address, port), limit_s).close()
        except TimeoutError:
            return Unreached(rank, offer, f"no answer within {limit_s:g} s")
        except OSError as error:
            return Unreached(rank, offer, error.strerror or str(error))
        return None

    with ThreadPoolExecutor(max(1, min(len(targets), 2 * MOST_PEERS))) as pool:
        return tuple(filter(None, pool.map(attempt, targets)))


# ------------------------------------------------------------------------------------------ gathering


def gather(facts: RankFacts, findings: Sequence[Finding], timeout_s: float = TIMEOUT_S) -> list[Finding] | None:
    """Return the findings of all ranks and their differences on rank 0, None on the others.

    Uses the launcher's store, without a process group, so it works if gloo and NCCL cannot connect. With COMMOPT_SECRET
    all messages are signed. Raises MismatchError when a rank is missing after `timeout_s`, and for content of the store
    that no rank wrote.
    """
    # Imported here: a single machine is examined without torch.
    from torch.distributed.rendezvous import rendezvous

    from commopt.groups.agreement import exchange_facts
    from commopt.groups.signed import own_secret
    from commopt.groups.store import limited

    try:
        launcher, rank, world_size = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise MismatchError(f"the ranks did not meet within {timeout_s:g} s: {reason}") from error
    ranks, answered = range(world_size), False
    try:
        store = limited(launcher, _PREFIX, timeout_s, own_secret())
        with listener() as server:  # open until all others have tried to connect
            mine = {"node": facts.host.node_key, "port": server.getsockname()[1], "offers": facts.offers}
            answers = exchange_facts(store, ranks, rank, "the doctor", mine, timeout_s)
            addresses = [read_listen_address(one, each) for each, one in zip(ranks, answers, strict=True)]
            away = [peer for peer in peers_of(rank, world_size) if addresses[peer].node != addresses[rank].node]
            targets = [(peer, addresses[peer].port, offer) for peer in away for offer in addresses[peer].offers]
            facts = replace(facts, unreached=unreached(targets))
            store.set(f"answer/{rank}", as_json(facts, [replace(finding, nodes=(facts.node,)) for finding in findings]))
            answered = True
            exchange_facts(store, ranks, rank, "the doctor's end", {}, timeout_s)
        if rank != 0:
            store.set(f"left/{rank}", "")
            return None
        known = [read_answer(store.get(f"answer/{each}"), each, world_size, len(EQUAL_FACTS)) for each in ranks]
        with suppress(RuntimeError):  # rank 0 may hold the store: the other ranks should leave it first
            launcher.wait([f"{_PREFIX}/left/{each}" for each in ranks[1:]], timedelta(seconds=LEAVE_S))
    except MismatchError:
        raise
    except RuntimeError as error:
        if answered and rank != 0:  # rank 0 may have held the store, read all answers, and exited
            return None
        reason = str(error).splitlines()[0]
        raise MismatchError(
            f"a rank left, or sent untrusted data, while the doctor collected the answers: {reason}"
        ) from error
    found = [finding for _, theirs in known for finding in theirs]
    return in_order(merge([*compare([facts for facts, _ in known]), *found]))
