# SPDX-License-Identifier: Apache-2.0
"""All_reduces on links of one latency and one bandwidth, in closed form: what prices and simulations are held against.

nbytes is S, `ranks` P, in a hierarchy `per_node` L on each of `nodes` N.
"""

from __future__ import annotations

from commopt.cost import LinkCost, ring


def ring_us(nbytes: float, ranks: int, link: LinkCost) -> float:
    """2 (P-1) alpha + 2 (P-1)/P S beta (Patarasuk and Yuan 2009)."""
    return 2 * (ranks - 1) * link.alpha_us + 2 * (ranks - 1) / ranks * nbytes * link.beta_us_per_byte


def sharded_us(nbytes: float, nodes: int, per_node: int, intra: LinkCost, inter: LinkCost) -> float:
    """reduce_scatter in the node, a ring of each shard, all_gather; `inter` is what each of L ranks has for itself."""
    return ring_us(nbytes, per_node, intra) + ring_us(nbytes / per_node, nodes, inter)


def leader_us(nbytes: float, nodes: int, per_node: int, intra: LinkCost, inter: LinkCost) -> float:
    """reduce to one rank, a ring of everything over these ranks, broadcast; `inter` is what one rank has alone."""
    inside_us = sum(ring(primitive, per_node).time_us(nbytes, intra) for primitive in ("reduce", "broadcast"))
    return inside_us + ring_us(nbytes, nodes, inter)


def ring_over_nodes_us(nbytes: float, nodes: int, per_node: int, intra: LinkCost, inter: LinkCost) -> float:
    """A ring that crosses to the next node once in L hops; `inter` is what a whole node sends.

    2 (N-1) alpha_n + 2 N (L-1) alpha_i + 2 (P-1)/P S max(beta_n, beta_i)
    """
    latency_us = 2 * (nodes - 1) * inter.alpha_us + 2 * nodes * (per_node - 1) * intra.alpha_us
    ranks = nodes * per_node
    used = [link.beta_us_per_byte for link, count in ((inter, nodes), (intra, per_node)) if count > 1]
    return latency_us + ring("all_reduce", ranks).volume * nbytes * max(used, default=0.0)
