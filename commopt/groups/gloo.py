# SPDX-License-Identifier: Apache-2.0
"""Point-to-point collectives for gloo that keep both directions of a link busy.

Gloo announces a receive with a small message on the connection that also carries the data. Its own all_gather and
all_to_all announce after they have begun to send, so the announcement waits behind megabytes and the two directions
take turns. Here every receive is posted before the first send: about three quarters of the time for 8 MiB each way
(docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

_SEGMENT_NBYTES = 1024 * 1024
_LONG_PART_NBYTES = 2 * 1024 * 1024
# Tags. Gloo ends the process when a message is longer than what waits for it, so a comparison, which perhaps not all
# ranks have come to, is never taken for anything else.
_NEVER_SENT = 2**30
_COMPARISON = 2**30 - 1
_ADDED_IN_FLOAT32 = (torch.float16, torch.bfloat16)


def all_gather(output: Tensor, source: Tensor, group: dist.ProcessGroup) -> None:
    """Fill the blocks of `output` with every rank's `source`: a ring, so that each link carries each block once."""
    rank, world_size = group.rank(), group.size()
    blocks = output.view(world_size, -1)
    before, after = (rank - 1) % world_size, (rank + 1) % world_size
    arriving = [
        dist.irecv(blocks[(rank - step - 1) % world_size], group=group, group_src=before, tag=step)
        for step in range(world_size - 1)
    ]
    leaving = []
    if blocks[rank].data_ptr() != source.data_ptr():
        blocks[rank].copy_(source)
    for step, arrival in enumerate(arriving):
        leaving.append(dist.isend(blocks[(rank - step) % world_size], group=group, group_dst=after, tag=step))
        _wait([arrival])
    _wait(leaving)


def all_to_all(output: Tensor, source: Tensor, group: dist.ProcessGroup) -> None:
    """Send block j of `source` to rank j; block i of `output` comes from rank i."""
    rank, world_size = group.rank(), group.size()
    targets, blocks = output.view(world_size, -1), source.view(world_size, -1)
    peers = _peers(group)
    works = [dist.irecv(targets[peer], group=group, group_src=peer) for peer in reversed(peers)]
    works += [dist.isend(blocks[peer], group=group, group_dst=peer) for peer in peers]
    targets[rank].copy_(blocks[rank])
    _wait(works)


def reduce_scatter(output: Tensor, source: Tensor, group: dist.ProcessGroup) -> None:
    """Sum `source` over the ranks in rank order and keep this rank's block: half the bytes of gloo's own."""
    blocks = source.view(group.size(), -1)
    for arrivals, rows, segment in _exchange(list(blocks), group):
        _wait(arrivals)
        _sum_in_order(rows, output[segment])


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, scale: float = 1.0) -> None:
    """Set `tensor` (1-D) to `scale * sum`, with the same bits on every rank: by gloo's ring where parts are long.

    Else every rank adds up one part, in rank order, and sends the sum to the others: as many bytes per rank, in two
    steps instead of 2 (P-1), to every peer. Each rank scales its own values first. 16-bit floats are added in float32
    and rounded once. Long parts go in segments, so that the network is busy while others are scaled and added up.
    """
    if _own_ring_will_do(tensor, group):
        dist.all_reduce(apply_scale(tensor, scale), group=group)
        return
    rank, world_size = group.rank(), group.size()
    bounds = [place * tensor.numel() // world_size for place in range(world_size + 1)]
    parts = [tensor[begin:end] for begin, end in pairwise(bounds)]
    peers = _peers(group)
    # A peer sends a sum only when this rank's share has reached it, so the share is not overwritten too early.
    works = [
        dist.irecv(parts[peer][segment], group=group, group_src=peer, tag=2 * number + 1)
        for peer in reversed(peers)
        for number, segment in enumerate(_segments(parts[peer]))
    ]
    for number, (arrivals, rows, segment) in enumerate(_exchange(parts, group, scale)):
        _wait(arrivals)
        own = parts[rank][segment]
        _sum_in_order(rows, own)
        works += [dist.isend(own, group=group, group_dst=peer, tag=2 * number + 1) for peer in peers]
    _wait(works)


def all_equal(output: Tensor, source: Tensor, group: dist.ProcessGroup) -> None:
    """Write 1 into `output` (int64 [1]) if all ranks gave the number in `source`, else 0, alike on every rank.

    In each of log2(P) rounds a rank hears of twice as many others as in the one before: 16 bytes per round.
    """
    rank, world_size, number = group.rank(), group.size(), int(source)
    theirs = torch.empty(2, dtype=torch.int64, device="cpu")
    equal, distance = True, 1
    while distance < world_size:
        arrival = dist.irecv(theirs, group=group, group_src=(rank - distance) % world_size, tag=_COMPARISON)
        mine = torch.tensor([number, equal], device="cpu")
        leaving = dist.isend(mine, group=group, group_dst=(rank + distance) % world_size, tag=_COMPARISON)
        _wait([leaving, arrival])
        equal = equal and theirs.tolist() == [number, True]
        distance *= 2
    output.fill_(equal)


def lost_peers(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks whose connection to this one is broken: gloo refuses to receive from them, without waiting."""
    lost = []
    for peer in range(group.size()):
        try:
            if peer != group.rank():
                dist.irecv(torch.empty(1, device="cpu"), group=group, group_src=peer, tag=_NEVER_SENT)
        except RuntimeError:
            lost.append(peer)
    return lost


def _own_ring_will_do(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether gloo's all_reduce is quicker: parts are long, and it need not add in float32.

    Its ring has one connection each way, in C++: nothing waits for the slowest of many that share a link.
    """
    return tensor.nbytes >= group.size() * _LONG_PART_NBYTES and tensor.dtype not in _ADDED_IN_FLOAT32


_Arrival = tuple[list[dist.Work | None], list[Tensor], slice]


def _exchange(parts: Sequence[Tensor], group: dist.ProcessGroup, scale: float = 1.0) -> list[_Arrival]:
    """Send each rank its part of this rank's values; return what arrives of one's own part, segment by segment.

    `scale` is applied in place, also to this rank's own part. Each segment comes with the works to wait for and all
    ranks' values, in rank order, this rank's own in their place.
    """
    rank, peers = group.rank(), _peers(group)
    received = parts[rank].new_empty(group.size() - 1, parts[rank].numel())
    rows = [*received[:rank], parts[rank], *received[rank:]]
    arrivals: list[_Arrival] = []
    for number, segment in enumerate(_segments(parts[rank])):
        pieces = [row[segment] for row in rows]
        works = [dist.irecv(pieces[peer], group=group, group_src=peer, tag=2 * number) for peer in reversed(peers)]
        arrivals.append((works, pieces, segment))
    for peer in peers:
        for number, segment in enumerate(_segments(parts[peer])):
            leaving = dist.isend(apply_scale(parts[peer][segment], scale), group=group, group_dst=peer, tag=2 * number)
            arrivals[-1][0].append(leaving)
    apply_scale(parts[rank], scale)
    return arrivals


def _segments(part: Tensor) -> list[slice]:
    """Cut a part into pieces of a MiB or more; at least one, which may be empty."""
    count = max(1, part.numel() * part.element_size() // _SEGMENT_NBYTES)
    bounds = [place * part.numel() // count for place in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def _peers(group: dist.ProcessGroup) -> list[int]:
    """The other ranks, starting after this one, so that not all ranks serve the same peer first."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]


def _sum_in_order(rows: Sequence[Tensor], output: Tensor) -> None:
    """Add the rows one after the other, 16-bit floats in float32: the fixed order fixes the bits.

    `output` may be the memory of any row.
    """
    if len(rows) == 2 and output.dtype not in _ADDED_IN_FLOAT32:
        torch.add(*rows, out=output)  # one pass instead of three
        return
    total = rows[0].float() if output.dtype in _ADDED_IN_FLOAT32 else rows[0].clone()
    for row in rows[1:]:
        total += row
    output.copy_(total)


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        if work is not None:  # torch's word for "you are not in the group", which cannot be
            work.wait()


def apply_scale(values: Tensor, scale: float) -> Tensor:
    """Multiply in place unless that changes nothing; return `values`. A float16 sum would overflow, an average not."""
    return values if scale == 1.0 else values.mul_(scale)
