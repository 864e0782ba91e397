"""Closed forms of what collectives cost on links of one latency and one bandwidth. Times in microseconds.

nbytes is the gradient on each rank (S), `ranks` P, in a hierarchy `per_node` L on each of `nodes` N. `intra` is the
link between two ranks of a node, `inter` the one to other nodes. docs/cost.md has them in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf, log2
from operator import mul
from typing import NamedTuple

PRIMITIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reduce", "broadcast")

_TREE_EFFICIENCY = 0.78  # of NCCL's double binary tree, against a ring on large messages
_WORTHWHILE = 0.03  # what more chunks must gain: less is within the error of any fit


class Link(NamedTuple):
    """Microseconds per message and per byte."""

    alpha_us: float
    beta_us_per_byte: float


class Ring(NamedTuple):
    """A collective is `steps` messages one after the other; `volume` times its bytes pass each link."""

    steps: int
    volume: float

    def time_us(self, nbytes: float, link: Link) -> float:
        """Return what it costs."""
        return self.steps * link.alpha_us + self.volume * nbytes * link.beta_us_per_byte


def ring(primitive: str, ranks: int) -> Ring:
    """Return what a collective takes in the algorithm for large messages; bytes as `WireModel` counts them.

    Rings (Patarasuk and Yuan 2009): reduce_scatter and all_gather P - 1 steps, all_reduce both; reduce is a
    reduce_scatter whose blocks the root collects. all_to_all: direct sends. broadcast: a binomial tree.
    """
    others = ranks - 1
    match primitive:
        case "all_reduce" | "reduce":
            return Ring(2 * others, 2 * others / ranks)
        case "reduce_scatter" | "all_to_all":
            return Ring(others, others / ranks)
        case "all_gather":
            return Ring(others, others)
        case "broadcast":
            return Ring(others.bit_length(), others.bit_length())
    raise ValueError(f"{primitive!r} is none of {', '.join(PRIMITIVES)}")


# ---------------------------------------------------------------------------------- all_reduce on one level


def ring_us(nbytes: float, ranks: int, link: Link) -> float:
    """2 (P-1) alpha + 2 (P-1)/P S beta (Patarasuk and Yuan 2009)."""
    return ring("all_reduce", ranks).time_us(nbytes, link)


def ring_over_nodes_us(nbytes: float, nodes: int, per_node: int, intra: Link, inter: Link) -> float:
    """A ring that crosses to the next node once in L hops; `inter` is what a whole node sends.

    2 (N-1) alpha_n + 2 N (L-1) alpha_i + 2 (P-1)/P S max(beta_n, beta_i)
    """
    latency_us = 2 * (nodes - 1) * inter.alpha_us + 2 * nodes * (per_node - 1) * intra.alpha_us
    ranks = nodes * per_node
    used = [link.beta_us_per_byte for link, count in ((inter, nodes), (intra, per_node)) if count > 1]
    return latency_us + ring("all_reduce", ranks).volume * nbytes * max(used, default=0.0)


def halving_doubling_us(nbytes: float, ranks: int, link: Link) -> float:
    """2 log2(P) alpha + 2 (P-1)/P S beta (Thakur, Rabenseifner, Gropp 2005); two messages of S more to fold other P."""
    power = 1 << (ranks.bit_length() - 1)
    fold_us = 0.0 if power == ranks else 2 * (link.alpha_us + nbytes * link.beta_us_per_byte)
    return 2 * log2(power) * link.alpha_us + 2 * (power - 1) / power * nbytes * link.beta_us_per_byte + fold_us


def tree_us(nbytes: float, nodes: int, per_node: int, intra: Link, inter: Link) -> float:
    """2 (log2(N) alpha_n + (L-1) alpha_i) + 2 S beta_n / 0.78: NCCL's double binary tree over chains in the nodes."""
    latency_us = 2 * (log2(nodes) * inter.alpha_us + (per_node - 1) * intra.alpha_us)
    link = inter if nodes > 1 else intra
    return latency_us + 2 * nbytes * link.beta_us_per_byte / _TREE_EFFICIENCY


def one_shot_us(nbytes: float, ranks: int, link: Link) -> float:
    """log2(P) alpha + (P-1) S beta: everybody gets everything and adds it up."""
    return log2(ranks) * link.alpha_us + (ranks - 1) * nbytes * link.beta_us_per_byte


# ------------------------------------------------------------------------------ all_reduce on several levels


def sharded_us(nbytes: float, nodes: int, per_node: int, intra: Link, inter: Link) -> float:
    """reduce_scatter in the node, a ring of each shard, all_gather; `inter` is what each of L ranks has for itself.

    2 (L-1) alpha_i + 2 (L-1)/L S beta_i + 2 (N-1) alpha_n + 2 (N-1)/N S/L beta_n
    """
    return levels_us(nbytes, [(per_node, intra), (nodes, inter)])


def levels_us(nbytes: float, levels: Sequence[tuple[int, Link]]) -> float:
    """reduce_scatter level after level, from the innermost on, and all_gather back (BlueConnect, Cho et al. 2019).

    levels: (ranks, link) of each; a level sees S over the ranks of those inside it.
    """
    shares = accumulate((ranks for ranks, _ in levels), mul, initial=1)
    return sum(ring_us(nbytes / share, ranks, link) for (ranks, link), share in zip(levels, shares, strict=False))


def all_reduced_us(nbytes: float, nodes: int, per_node: int, intra: Link, inter: Link) -> float:
    """all_reduce in the node, of which each rank keeps a slice, a ring of each slice, all_gather."""
    spread_us = ring("reduce_scatter", per_node).time_us(nbytes, intra)
    return ring_us(nbytes, per_node, intra) + ring_us(nbytes / per_node, nodes, inter) + spread_us


def leader_us(nbytes: float, nodes: int, per_node: int, intra: Link, inter: Link) -> float:
    """reduce to one rank, a ring of everything over these ranks, broadcast; `inter` is what one rank has alone."""
    inside_us = sum(ring(primitive, per_node).time_us(nbytes, intra) for primitive in ("reduce", "broadcast"))
    return inside_us + ring_us(nbytes, nodes, inter)


# ------------------------------------------------------------------------------------------------- chunks


class StageTimes(NamedTuple):
    """What one chunk takes inside the node on its way up, between the nodes, and on its way down."""

    up_us: float
    across_us: float
    down_us: float


def pipelined_us(stage: StageTimes, chunks: int) -> float:
    """T(k) = max(t_up + k t_across + t_down, k (t_up + t_down) + [k=1] t_across) of k equal chunks.

    A bound: the busier of two lanes is never idle. `overlapped_us` is what the order of the chunks makes of it.
    """
    network_us = stage.up_us + chunks * stage.across_us + stage.down_us
    return max(network_us, chunks * (stage.up_us + stage.down_us))


def overlapped_us(chunks: Sequence[StageTimes]) -> float:
    """Return when the last chunk is down: one lane for up(1), up(2), down(1), up(3), ..., one beside it for across."""
    near_us = far_us = 0.0
    landing: tuple[float, float] | None = None  # when the chunk before is there, and what its way down takes
    for chunk in chunks:
        near_us += chunk.up_us
        far_us = max(near_us, far_us) + chunk.across_us
        if landing is not None:
            near_us = max(near_us, landing[0]) + landing[1]
        landing = far_us, chunk.down_us
    return near_us if landing is None else max(near_us, landing[0]) + landing[1]


def best_chunks(time_us: Callable[[int], float], most: int = 16) -> int:
    """Return the fewest chunks whose `time_us(chunks)` is within 3 % of the best from 1 to `most`."""
    times_us = [time_us(count) for count in range(1, most + 1)]
    limit_us = min(times_us, default=inf) * (1 + _WORTHWHILE)
    return next(count for count, each_us in enumerate(times_us, 1) if each_us <= limit_us)
