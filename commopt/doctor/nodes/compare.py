"""What differs between the nodes of a job, and how the launcher laid out its ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from commopt.doctor.facts.machine import Machine, version_text
from commopt.doctor.facts.network import active_ports, used_by_nccl
from commopt.doctor.facts.placement import own_gpu, own_name
from commopt.doctor.finding import Check, Finding
from commopt.doctor.nodes.reach import Offer, Unreached, own_offers
from topology.cluster import Cluster, HostIdentity
from topology.fabric import Fabric
from topology.model import Topology

VERSIONS = Check("nodes-versions", "Equal versions")
NETWORK = Check("nodes-network", "Equal networks")
SETTINGS = Check("nodes-settings", "Equal settings")
REACH = Check("nodes-reach", "Addresses that answer to all ranks")
LAYOUT = Check("rank-layout", "Layout of the ranks")
MACHINES = Check("nodes-machines", "Equal machines")

PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS")
LIVE = Path("/")
# These have to differ, or may.
OWN = ("NCCL_HOSTID", "NCCL_DEBUG_FILE", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE")
# Ranks that disagree about these wait for each other forever.
VITAL = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_MAX_CTAS")


@dataclass(frozen=True)
class RankFacts:
    """What one rank tells the others about itself."""

    host: HostIdentity
    gpu: str | None
    """Bus id of its GPU, or CUDA's name for it; None when it has none, or none is known."""
    hardware: Topology
    versions: str
    driver: str
    nics: tuple[tuple[str, float | None, int | None], ...]
    """Name, Gb/s and MTU of the interfaces NCCL would use."""
    networks: tuple[str, ...]
    ports: tuple[tuple[str, float | None, str | None], ...]
    """Name, Gb/s and link layer of the active RDMA ports."""
    settings: tuple[tuple[str, str], ...]
    offers: tuple[Offer, ...] = ()
    """The addresses that others are to connect to, as far as they are known."""
    unreached: tuple[Unreached, ...] = ()
    """Offers of other ranks that did not answer to this one."""

    @property
    def node(self) -> str:
        """The machine's name for people."""
        return self.host.nccl_hostid or self.host.hostname


def rank_facts(machine: Machine, host: HostIdentity) -> RankFacts:
    """Collect what `compare` needs of this rank."""
    used = used_by_nccl(machine)
    place, software = own_gpu(machine), machine.software
    return RankFacts(
        host,
        own_name(machine) if place is None else machine.hardware.gpus[place].busid,
        machine.hardware,
        f"torch {software.torch}, CUDA {version_text(software.cuda)}, NCCL {version_text(software.nccl)}",
        machine.text("sys/module/nvidia/version") or "none",
        tuple((interface.name, interface.gbps, interface.mtu) for interface in used),
        tuple(sorted(str(network) for interface in used for network in interface.networks)),
        tuple((port.name, port.gbps, port.link_layer) for port in active_ports(machine)),
        tuple(
            sorted(
                (name, value)
                for name, value in machine.environ.items()
                if name.startswith(PREFIXES) and name not in OWN and value
            )
        ),
        own_offers(machine) if machine.root == LIVE else (),
    )


def compare(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Report differences between ranks and nodes, in the order of repair; `ranks[rank]` is what that rank told."""
    found = [
        *_reach(ranks),
        *_layout(ranks),
        *_versions(ranks),
        *_settings(ranks),
        *_machines(ranks),
        *_networks(ranks),
    ]
    return [replace(finding, nodes=("all nodes",)) for finding in found]


def _groups(ranks: Sequence[RankFacts], key: Callable[[RankFacts], Hashable]) -> dict[Hashable, list[str]]:
    """Return the nodes by what they answer, the answer of the most nodes first."""
    groups: dict[Hashable, list[str]] = {}
    for facts in ranks:
        nodes = groups.setdefault(key(facts), [])
        if facts.node not in nodes:
            nodes.append(facts.node)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _shown(groups: Mapping[Hashable, list[str]]) -> str:
    """Write "A on node0, node1; B on node2", not more than a person reads."""
    parts = []
    for value, nodes in list(groups.items())[:4]:
        more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
        parts.append(f"{value} on {', '.join(nodes[:3])}{more}")
    return "; ".join(parts)


def _reach(ranks: Sequence[RankFacts]) -> list[Finding]:
    silent: dict[Unreached, list[str]] = {}
    for facts in ranks:
        for one in facts.unreached:
            silent.setdefault(one, []).append(facts.node)
    found = []
    for library in ("NCCL", "gloo"):
        failed = {one: nodes for one, nodes in silent.items() if one.library == library}
        if not failed:
            continue
        shown = [
            f"{one.address} of rank {one.rank} ({ranks[one.rank].node}), "
            f"from {', '.join(dict.fromkeys(nodes))}: {one.why}"
            for one, nodes in failed.items()
        ]
        value = "; ".join(shown[:4]) + (f"; and {len(shown) - 4} more" if len(shown) > 4 else "")
        expected = f"an answer: {library} connects to these addresses, and waits without an end or fails"
        remedy = f"export {library.upper()}_SOCKET_IFNAME to an interface on the network that all nodes share; "
        remedy += "open the firewall between them for all ports; a name in /etc/hosts that means 127.0.1.1: mend it"
        # A job on GPUs may do without gloo.
        kind = REACH.warning if library == "gloo" and any(facts.hardware.gpus for facts in ranks) else REACH.error
        found.append(kind("a TCP connection between each two nodes", value, expected, remedy))
    if found or not any(facts.offers for facts in ranks):
        return found
    shown_offers = ", ".join(dict.fromkeys(f"{offer.library} {offer.address}" for offer in ranks[0].offers))
    return [REACH.ok("a TCP connection between each two nodes", f"rank 0 offers {shown_offers}", "an answer from all")]


def _layout(ranks: Sequence[RankFacts]) -> list[Finding]:
    cluster = Cluster.from_hosts([facts.host for facts in ranks])
    shown = " | ".join(
        f"{name}: {', '.join(map(str, node[:8]))}{' ...' if len(node) > 8 else ''}"
        for name, node in list(zip(cluster.names, cluster.nodes, strict=True))[:4]
    )
    found = []
    for name, node in zip(cluster.names, cluster.nodes, strict=True):
        by_gpu: dict[str, list[int]] = {}
        for rank in node:
            by_gpu.setdefault(ranks[rank].gpu or "", []).append(rank)
        lost = by_gpu.pop("", [])
        for gpu, sharing in by_gpu.items():
            if len(sharing) > 1:
                value = f"{name}: ranks {', '.join(map(str, sharing))} on {gpu}"
                expected = "one rank per GPU: NCCL refuses duplicates"
                remedy = "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])); check CUDA_VISIBLE_DEVICES"
                found.append(LAYOUT.error("LOCAL_RANK, CUDA_VISIBLE_DEVICES", value, expected, remedy))
        if lost and ranks[node[0]].hardware.gpus:
            here = len(ranks[node[0]].hardware.gpus)
            value = f"{name}: no GPU for ranks {', '.join(map(str, lost))} ({here} in the machine)"
            expected = "a GPU for every rank"
            remedy = "torchrun --nproc-per-node as many as CUDA_VISIBLE_DEVICES shows"
            found.append(LAYOUT.error("LOCAL_RANK, CUDA_VISIBLE_DEVICES", value, expected, remedy))
    read = "host name, boot id, NCCL_HOSTID of every rank"
    if not cluster.node_contiguous:
        expected = "the ranks of a node in sequence: a ring crosses the network at every hop otherwise"
        remedy = "torchrun numbers them so; Slurm: --distribution=block; MPI: --map-by slot"
        found.append(LAYOUT.warning(read, shown, expected, remedy))
    if not cluster.uniform:
        expected = "as many ranks on every node: the node with fewer waits, or has less bandwidth"
        found.append(LAYOUT.warning(read, str(cluster), expected, "torchrun --nproc-per-node the same everywhere"))
    return found or [LAYOUT.ok(read, str(cluster), "equal nodes, ranks in sequence, one per GPU")]


def _versions(ranks: Sequence[RankFacts]) -> list[Finding]:
    found = []
    versions = _groups(ranks, lambda facts: facts.versions)
    if len(versions) > 1:
        remedy = "pip install the same torch on every node (pip freeze > constraints.txt)"
        expected = "the same on every rank: NCCL refuses other versions"
        found.append(VERSIONS.error("torch, CUDA, NCCL", _shown(versions), expected, remedy))
    drivers = _groups(ranks, lambda facts: facts.driver)
    if len(drivers) > 1:
        remedy = "install the same driver on every node"
        read = "/sys/module/nvidia/version"
        found.append(VERSIONS.warning(read, _shown(drivers), "the same driver on every node", remedy, "medium"))
    return found or [VERSIONS.ok("torch, CUDA, NCCL, driver", ranks[0].versions, "the same on every rank")]


def _settings(ranks: Sequence[RankFacts]) -> list[Finding]:
    found = []
    tables = [dict(facts.settings) for facts in ranks]
    for name in sorted({name for table in tables for name in table}):
        values: dict[str, list[int]] = {}
        for rank, table in enumerate(tables):
            values.setdefault(table.get(name, "unset"), []).append(rank)
        if len(values) > 1:
            shown = "; ".join(f"{value} on ranks {', '.join(map(str, on[:8]))}" for value, on in values.items())
            kind = SETTINGS.error if name in VITAL else SETTINGS.warning
            expected = "the same on every rank"
            remedy = f"export {name} for all ranks (mpirun -x {name}; sbatch --export), or unset it"
            found.append(kind(name, shown, expected, remedy, "high" if name in VITAL else "medium"))
    return found or [SETTINGS.ok("NCCL_*, GLOO_*", f"{len(tables[0])} set", "the same on every rank")]


def _machines(ranks: Sequence[RankFacts]) -> list[Finding]:
    cluster = Cluster.from_hosts([facts.host for facts in ranks])
    fabric = Fabric.from_ranks(cluster, [facts.hardware for facts in ranks])
    differences = fabric.differences
    found = [
        MACHINES.warning(
            "/sys/bus/pci/devices, NVML",
            f"{what}: {differences[what]}",
            "the same on every node: all wait for the slowest",
            "python -m topology on each of these nodes",
        )
        for what in ("GPUs", "GPU models", "NVLink")
        if what in differences
    ]
    speed = "speed unknown" if fabric.slowest_gbps is None else f"{fabric.slowest_gbps:g} Gb/s from the slowest node"
    value = f"{cluster}, {len(fabric.rails)} rail(s), {speed}"
    return found or [MACHINES.ok("/sys/bus/pci/devices, NVML", value, "the same on every node")]


def _networks(ranks: Sequence[RankFacts]) -> list[Finding]:
    found = []
    for read, key, expected, remedy in (
        (
            "/sys/class/infiniband/*/ports/*/rate",
            lambda facts: ", ".join(f"{count} x {rate}" for rate, count in _count(facts.ports)) or "no RDMA port",
            "the same ports on every node: all wait for the slowest, and NCCL connects equal kinds only",
            "ibstat on the node that differs",
        ),
        (
            "/sys/class/net/*/speed",
            lambda facts: "fastest " + _gbps(max((gbps or 0 for _, gbps, _ in facts.nics), default=0)),
            "the same speed on every node: all wait for the slowest",
            "ethtool INTERFACE on the slow node; check cable and switch port",
        ),
        (
            "/sys/class/net/*/mtu",
            lambda facts: ", ".join(sorted({str(mtu) for _, _, mtu in facts.nics if mtu})) or "unknown",
            "the same frame size on every node: large messages hang where it is smaller",
            "sudo ip link set INTERFACE mtu VALUE, the same everywhere",
        ),
    ):
        groups = _groups(ranks, key)
        if len(groups) > 1:
            found.append(NETWORK.warning(read, _shown(groups), expected, remedy))
    networks = {facts.node: set(facts.networks) for facts in ranks}
    if len(networks) > 1 and all(networks.values()) and not set.intersection(*networks.values()):
        value = "; ".join(f"{node}: {', '.join(sorted(its)) or 'none'}" for node, its in list(networks.items())[:4])
        expected = "one network that all nodes share, unless a router between them is meant"
        remedy = "export NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the shared network's interface on each node"
        found.append(NETWORK.warning("/proc/net/route", value, expected, remedy, "medium"))
    return found or [NETWORK.ok("/sys/class/net, /sys/class/infiniband", "equal", "equal on every node")]


def _count(ports: tuple[tuple[str, float | None, str | None], ...]) -> list[tuple[str, int]]:
    kinds = [f"{layer or 'unknown'} {_gbps(gbps)}" for _, gbps, layer in ports]
    return [(kind, kinds.count(kind)) for kind in sorted(set(kinds))]


def _gbps(value: float | None) -> str:
    return f"{value:g} Gb/s" if value else "speed unknown"
