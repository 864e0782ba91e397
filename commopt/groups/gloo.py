# SPDX-License-Identifier: Apache-2.0
"""Point-to-point collectives for gloo that keep both directions of a link busy.

Gloo announces a receive with a small message on the connection that also carries the data. Its own all_gather and
all_to_all post receives after they have begun to send, so the announcement waits behind megabytes and the two
directions take turns. Here every receive is posted before the first send. This takes about three quarters of the time
for 8 MiB each way (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

_SEGMENT_NBYTES = 1024 * 1024
_LONG_CHUNK_NBYTES = 2 * 1024 * 1024
# Tags. Gloo ends the process when a message is longer than the posted receive, so a comparison, which some ranks may
# not have reached, has a tag of its own.
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
    """Sum `source` over the ranks in rank order and keep this rank's block. Sends half the bytes of gloo's own."""
    blocks = source.view(group.size(), -1)
    for arrivals, rows, segment in _exchange(list(blocks), group):
        _wait(arrivals)
        _sum_in_order(rows, output[segment])


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, scale: float = 1.0) -> None:
    """Set `tensor` (1-D) to `scale * sum`, with the same bits on every rank.

    Long chunks go through gloo's own ring. Otherwise every rank adds up one chunk, in rank order, and sends the sum to
    the others: as many bytes per rank, to every peer, in two steps instead of 2 (P-1). Each rank scales its own values
    first. 16-bit floats are added in float32 and rounded once. Long chunks are sent in segments, so that the network
    is busy while other segments are scaled and added.
    """
    if _use_gloo_ring(tensor, group):
        dist.all_reduce(apply_scale(tensor, scale), group=group)
        return
    rank, world_size = group.rank(), group.size()
    bounds = [place * tensor.numel() // world_size for place in range(world_size + 1)]
    chunks = [tensor[begin:end] for begin, end in pairwise(bounds)]
    peers = _peers(group)
    # A peer sends a sum only when this rank's values have reached it, so they are not overwritten too early.
    works = [
        dist.irecv(chunks[peer][segment], group=group, group_src=peer, tag=2 * number + 1)
        for peer in reversed(peers)
        for number, segment in enumerate(_segments(chunks[peer]))
    ]
    for number, (arrivals, rows, segment) in enumerate(_exchange(chunks, group, scale)):
        _wait(arrivals)
        own = chunks[rank][segment]
        _sum_in_order(rows, own)
        works += [dist.isend(own, group=group, group_dst=peer, tag=2 * number + 1) for peer in peers]
    _wait(works)


def all_equal(output: Tensor, source: Tensor, group: dist.ProcessGroup) -> None:
    """Write 1 into `output` (int64 [1]) if all ranks gave the number in `source`, else 0, on every rank.

    After each of log2(P) rounds a rank has compared itself with twice as many others: 16 bytes per round.
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
    """Return the ranks whose connection to this one is broken: gloo refuses at once to receive from them."""
    lost = []
    for peer in range(group.size()):
        try:
            if peer != group.rank():
                dist.irecv(torch.empty(1, device="cpu"), group=group, group_src=peer, tag=_NEVER_SENT)
        except RuntimeError:
            lost.append(peer)
    return lost


def _use_gloo_ring(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether gloo's own all_reduce is faster: for long chunks that need not be added in float32.

    Its ring has one connection in each direction, in C++, so it never waits for the slowest of many that share a link.
    """
    return tensor.nbytes >= group.size() * _LONG_CHUNK_NBYTES and tensor.dtype not in _ADDED_IN_FLOAT32


_Arrival = tuple[list[dist.Work | None], list[Tensor], slice]


def _exchange(chunks: Sequence[Tensor], group: dist.ProcessGroup, scale: float = 1.0) -> list[_Arrival]:
    """Send each rank its chunk of this rank's values. Return the arrivals of this rank's own chunk, by segment.

    Each arrival has the works to wait for, the values of all ranks in rank order, this rank's own included, and the
    segment.

    scale: factor applied in place to all chunks, this rank's own included.
    """
    rank, peers = group.rank(), _peers(group)
    received = chunks[rank].new_empty(group.size() - 1, chunks[rank].numel())
    rows = [*received[:rank], chunks[rank], *received[rank:]]
    arrivals: list[_Arrival] = []
    for number, segment in enumerate(_segments(chunks[rank])):
        segments = [row[segment] for row in rows]
        works = [dist.irecv(segments[peer], group=group, group_src=peer, tag=2 * number) for peer in reversed(peers)]
        arrivals.append((works, segments, segment))
    for peer in peers:
        for number, segment in enumerate(_segments(chunks[peer])):
            leaving = dist.isend(apply_scale(chunks[peer][segment], scale), group=group, group_dst=peer, tag=2 * number)
            arrivals[-1][0].append(leaving)
    apply_scale(chunks[rank], scale)
    return arrivals


def _segments(chunk: Tensor) -> list[slice]:
    """Return the segments of a chunk, of a MiB or more each; at least one, which may be empty."""
    count = max(1, chunk.numel() * chunk.element_size() // _SEGMENT_NBYTES)
    bounds = [place * chunk.numel() // count for place in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def _peers(group: dist.ProcessGroup) -> list[int]:
    """Return the other ranks, starting after this one, so that not all ranks send to the same peer first."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]


def _sum_in_order(rows: Sequence[Tensor], output: Tensor) -> None:
    """Add the rows in their order, 16-bit floats in float32. The fixed order gives fixed bits.

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
        if work is not None:  # torch returns None outside the group, which cannot happen here
            work.wait()


def apply_scale(values: Tensor, scale: float) -> Tensor:
    """Multiply `values` in place unless `scale` is 1, and return them. Scaling first keeps float16 from overflowing."""
    return values if scale == 1.0 else values.mul_(scale)
