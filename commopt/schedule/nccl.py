"""The file of NCCL's example tuner plugin: which algorithm and protocol commopt's messages should take.

NCCL_TUNER_PLUGIN names the plugin (ext-tuner/example in NCCL's repository), NCCL_TUNER_CONFIG_FILE this file. Lines
are `collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff`, of which the
first that matches counts; min_bytes and max_bytes belong to the range.

The times are those of `commopt.cost`. A protocol multiplies the latency of a step and divides the bandwidth:
ll sends a flag of 4 bytes with every 4, ll128 one of 8 bytes with every 120. Latencies are in the proportion of those
of the ring in NCCL's own model (hwLat in src/graph/tuning.cc).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from commopt.cost import Link, Links, ring, ring_over_nodes_us, tree_us
from commopt.errors import ConfigurationError
from commopt.groups import TeamShape
from commopt.version import __version__

FIELDS = "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff"

_ANY = -1
# Not -1: "as many as NCCL likes" is 0 to NCCL, and the plugin makes 1 of -1.
_CHANNELS = 0
_LARGEST_NBYTES = 2**63 - 1
_FAR_NBYTES = 2.0**30  # far enough to tell the slope of a straight line


class Protocol(NamedTuple):
    """How a step of NCCL is signalled: its latency, beside that of ll, and its share of the bandwidth."""

    name: str
    intra_latency: float
    inter_latency: float
    bandwidth_share: float


PROTOCOLS = (
    Protocol("ll", 1.0, 1.0, 4 / 8),
    Protocol("ll128", 1.9 / 0.6, 4.0 / 2.7, 120 / 128),
    Protocol("simple", 3.4 / 0.6, 14.0 / 2.7, 1.0),
)


@dataclass(frozen=True)
class Row:
    """What a collective of min_nbytes to max_nbytes takes in communicators of so many nodes and ranks.

    Bytes as NCCL counts them: of all_gather what a rank ends with, of reduce_scatter what it begins with.
    """

    collective: str
    min_nbytes: int
    max_nbytes: int
    algorithm: str
    protocol: str
    nodes: int
    ranks: int

    def __str__(self) -> str:
        """Return its line in the file."""
        values = (self.collective, self.min_nbytes, self.max_nbytes, self.algorithm, self.protocol, _CHANNELS)
        return ",".join(map(str, (*values, self.nodes, self.ranks, _ANY, _ANY)))


class Way(NamedTuple):
    """A straight line: what an algorithm takes with a protocol."""

    algorithm: str
    protocol: str
    alpha_us: float
    beta_us_per_byte: float

    def time_us(self, nbytes: float) -> float:
        """Return the time of a message."""
        return self.alpha_us + self.beta_us_per_byte * nbytes

    def overtaken_at(self, other: Way) -> float:
        """Return from how many bytes on `other`, which has more latency, is the faster."""
        return (other.alpha_us - self.alpha_us) / (self.beta_us_per_byte - other.beta_us_per_byte)


def tuner_rows(shape: TeamShape, links: Links, nbytes: Sequence[int]) -> list[Row]:
    """Return what gradients of `nbytes` should take: the lengths of a rank's buckets.

    All ranks: all_reduce. Where there are two levels, also reduce_scatter and all_gather in the node (equal nodes only;
    others have leaders) and all_reduce of a shard between nodes. Between two of the lengths the choice changes where
    the formulas cross; messages of next to nothing, such as a loss, are counted in. Ranges leave no gap.
    Raises ConfigurationError for lengths below 1, links that were not measured over NCCL, and a team of one.
    """
    if not nbytes or min(nbytes) < 1:
        raise ConfigurationError(f"nbytes={list(nbytes)!r} must be lengths of messages, 1 or more")
    if shape.size == 1:
        raise ConfigurationError("one rank sends nothing, so there is nothing to tune; pass the shape of a cluster")
    if not links.nominal and links.header.backend != "nccl":
        raise ConfigurationError(
            f"these links were measured over {links.header.backend or 'an unknown backend'}, which says nothing of "
            f"NCCL; probe the cluster with GPUs, or use nominal_links"
        )
    nodes, per_node = shape.node_count, max(shape.ranks_per_node)
    lengths = sorted({0, *nbytes})
    intra, inter, shared = _links(shape, links)
    rows = list(_rows("allreduce", lengths, _all_reduce(nodes, per_node, intra, shared), nodes, shape.size))
    if shape.intra is None:
        return rows
    shards = per_node if shape.uniform else 1
    if shape.uniform:
        for name in ("reduce_scatter", "all_gather"):
            rows += _rows(name.replace("_", ""), lengths, _half(name, per_node, intra), 1, per_node)
    across = _all_reduce(nodes, 1, intra, inter)
    rows += _rows("allreduce", sorted({-(-length // shards) for length in lengths}), across, nodes, nodes)
    return rows


def write_csv(rows: Iterable[Row], path: str | Path) -> None:
    """Write the file for NCCL_TUNER_CONFIG_FILE."""
    # The plugin reads 255 characters at a time: what is left of a longer comment would be a line to it.
    head = (
        f"# commopt {__version__}: algorithm and protocol of its messages over NCCL.",
        "# A prediction: closed forms of ring and tree, latency and bandwidth of the links. Compare it with a run",
        "# without it before you keep it.",
        f"# channels={_CHANNELS}: NCCL's own number. For what no line matches the published plugin allows one channel;",
        "# there, *nChannels = 0 in pluginGetCollInfo leaves that to NCCL too.",
        f"# {FIELDS}",
    )
    Path(path).write_text("\n".join((*head, *map(str, rows))) + "\n")


def _rows(collective: str, lengths: Sequence[int], ways: Sequence[Way], nodes: int, ranks: int) -> Iterator[Row]:
    """Yield adjoining ranges: the fastest way at each of the lengths, from where it overtakes the one before."""
    fastest = [(length, min(ways, key=lambda way: way.time_us(length))) for length in lengths]
    runs = [(way, [length for length, _ in run]) for way, run in groupby(fastest, key=lambda each: each[1])]
    ends = [
        min(max(int(way.overtaken_at(following)), mine[-1]), theirs[0] - 1)
        for (way, mine), (following, theirs) in pairwise(runs)
    ]
    begin = 0
    for (way, _), end in zip(runs, (*ends, _LARGEST_NBYTES), strict=True):
        yield Row(collective, begin, end, way.algorithm, way.protocol, nodes, ranks)
        begin = end + 1


def _all_reduce(nodes: int, per_node: int, intra: Link, inter: Link) -> list[Way]:
    """Return ring and tree with each protocol; links are those of ll, `inter` is what a whole node sends."""

    def timed(form: Callable[[float, int, int, Link, Link], float], protocol: Protocol) -> Callable[[float], float]:
        near, far = _under(protocol, intra, protocol.intra_latency), _under(protocol, inter, protocol.inter_latency)
        return lambda nbytes: form(nbytes, nodes, per_node, near, far)

    forms = {"ring": ring_over_nodes_us, "tree": tree_us}
    return [_line(name, protocol, timed(form, protocol)) for name, form in forms.items() for protocol in PROTOCOLS]


def _half(primitive: str, ranks: int, intra: Link) -> list[Way]:
    """Return the ring, the one algorithm of reduce_scatter and all_gather in a node, with each protocol."""
    block = ranks if primitive == "all_gather" else 1  # the formula counts one rank's block of it

    def timed(protocol: Protocol) -> Callable[[float], float]:
        link = _under(protocol, intra, protocol.intra_latency)
        return lambda nbytes: ring(primitive, ranks).time_us(nbytes / block, link)

    return [_line("ring", protocol, timed(protocol)) for protocol in PROTOCOLS]


def _line(algorithm: str, protocol: Protocol, time_us: Callable[[float], float]) -> Way:
    alpha_us = time_us(0)
    return Way(algorithm, protocol.name, alpha_us, (time_us(_FAR_NBYTES) - alpha_us) / _FAR_NBYTES)


def _under(protocol: Protocol, link: Link, latency: float) -> Link:
    return Link(link.alpha_us * latency, link.beta_us_per_byte / protocol.bandwidth_share)


def _links(shape: TeamShape, links: Links) -> tuple[Link, Link, Link]:
    """Return the link in a node, and between nodes what a rank has while all send, and what a whole node has.

    Latencies are those of ll. What is measured begins with it, as NCCL itself chooses; line rates come with those of
    simple.
    """
    base = PROTOCOLS[-1] if links.nominal else PROTOCOLS[0]
    counts, busiest = shape.ranks_per_node, max(shape.ranks_per_node)
    sending = busiest if shape.uniform else 1
    if shape.intra is None:
        near = far = _link(links, "world", shape.size, 1)
        sending = 1
    else:
        near = _link(links, "intra", busiest, counts.count(busiest))
        far = _link(links, "inter", shape.node_count, sending)
    intra = near._replace(alpha_us=near.alpha_us / base.intra_latency)
    inter = far._replace(alpha_us=far.alpha_us / base.inter_latency)
    return intra, inter, inter._replace(beta_us_per_byte=inter.beta_us_per_byte / sending)


def _link(links: Links, level: str, ranks: int, groups: int) -> Link:
    """Return latency and bandwidth of one step, from what goes by a ring at every length."""
    curve, takes = links.curve(level, "reduce_scatter", ranks, groups), ring("reduce_scatter", ranks)
    first, last = curve.segments[0], curve.segments[-1]
    return Link(first.alpha_us / takes.steps, last.beta_us_per_byte / takes.volume)
