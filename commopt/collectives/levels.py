"""The data movement of each collective over the two levels of a cluster.

`blocks` are rows in the order of the group's ranks. On unequal nodes, or where there is one level only, the team's
own primitive runs in one piece; only the order of the rows has to be translated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.groups import Membership


def reduce_scatter(blocks: Tensor, membership: Membership) -> Tensor:
    """Return this rank's row of the sum of `blocks` [world_size, n] over ranks."""
    team = membership.team
    if blocks.numel() == 0:
        return blocks[0]
    if not _two_levels(membership):
        mine = torch.empty_like(blocks[0])
        team.reduce_scatter(mine, _node_by_node(blocks, membership).view(-1))
        return mine
    assert team.intra is not None
    assert team.inter is not None
    by_place = _by_place(blocks, membership)  # [place, node, n]
    per_node = blocks.new_empty(team.inter.size, blocks.shape[1])
    team.intra.reduce_scatter(per_node.view(-1), by_place.view(-1))
    mine = torch.empty_like(blocks[0])
    team.inter.reduce_scatter(mine, per_node.view(-1))
    return mine


def all_gather(block: Tensor, membership: Membership) -> Tensor:
    """Return the rows [world_size, n] of all ranks' `block` [n]."""
    team = membership.team
    gathered = block.new_empty(team.size, block.numel())
    if block.numel() == 0:
        return gathered
    if not _two_levels(membership):
        team.all_gather(gathered.view(-1), block)
        return _rank_by_rank(gathered, membership)
    assert team.intra is not None
    assert team.inter is not None
    across = block.new_empty(team.inter.size, block.numel())
    team.inter.all_gather(across.view(-1), block)
    everything = block.new_empty(team.intra.size, team.inter.size, block.numel())
    team.intra.all_gather(everything.view(-1), across.view(-1))
    return _rank_by_rank(everything.transpose(0, 1).reshape(gathered.shape), membership)


def all_to_all(blocks: Tensor, membership: Membership) -> Tensor:
    """Return the rows [world_size, n] that the ranks sent here; row j of `blocks` goes to rank j."""
    team = membership.team
    if blocks.numel() == 0:
        return blocks
    if not _two_levels(membership):
        received = torch.empty_like(blocks)
        team.all_to_all(received.view(-1), _node_by_node(blocks, membership).view(-1))
        return _rank_by_rank(received, membership)
    assert team.intra is not None
    assert team.inter is not None
    by_place = _by_place(blocks, membership)  # [destination place, destination node, n]
    collected = torch.empty_like(by_place)  # [source place, destination node, n]
    team.intra.all_to_all(collected.view(-1), by_place.view(-1))
    by_node = collected.transpose(0, 1).contiguous()  # [destination node, source place, n]
    received = torch.empty_like(by_node)  # [source node, source place, n]
    team.inter.all_to_all(received.view(-1), by_node.view(-1))
    return _rank_by_rank(received.view(blocks.shape), membership)


def broadcast(flat: Tensor, src: int, membership: Membership) -> None:
    """Copy `flat` of the group's rank `src` to all ranks: one message per remote node."""
    team, cluster = membership.team, membership.cluster
    if flat.numel() == 0:
        return
    if team.intra is None:
        team.broadcast(flat, cluster.order.index(src))
        return
    src_node = cluster.node_of(src)
    src_place = cluster.nodes[src_node].index(src)
    my_node = team.wire.nodes[team.rank]
    # Equal places have a link of their own between nodes; on unequal nodes only leaders have one.
    gate = src_place if cluster.uniform else 0
    if my_node == src_node:
        team.intra.broadcast(flat, src_place)
    if team.inter is not None and team.intra.rank == gate:
        team.inter.broadcast(flat, src_node)
    if my_node != src_node:
        team.intra.broadcast(flat, gate)


def _two_levels(membership: Membership) -> bool:
    return membership.team.intra is not None and membership.cluster.uniform


def _node_by_node(rows: Tensor, membership: Membership) -> Tensor:
    """Sort rows in the order of the group's ranks into the team's; free when the launcher numbered node by node."""
    order = membership.cluster.order
    return rows if _sorted(order) else rows[torch.tensor(order, device=rows.device)]


def _rank_by_rank(rows: Tensor, membership: Membership) -> Tensor:
    """Sort rows in the team's order into that of the group's ranks."""
    order = membership.cluster.order
    if _sorted(order):
        return rows
    sorted_rows = torch.empty_like(rows)
    sorted_rows[torch.tensor(order, device=rows.device)] = rows
    return sorted_rows


def _by_place(rows: Tensor, membership: Membership) -> Tensor:
    """Arrange rows in the order of the group's ranks as [place within the node, node, n]."""
    nodes = len(membership.cluster.nodes)
    by_node = _node_by_node(rows, membership).view(nodes, -1, rows.shape[1])
    return by_node.transpose(0, 1).contiguous()


def _sorted(order: tuple[int, ...]) -> bool:
    return order == tuple(range(len(order)))
