# SPDX-License-Identifier: Apache-2.0
"""Point-to-point collectives for gloo that keep both directions of a link busy.

Gloo announces a receive with a small message on the connection that also carries the data. Its own all_gather and
all_to_all post receives after they have begun to send, so the announcement waits behind megabytes and the two
directions take turns. Here a receive is posted before the send beside it. docs/performance.md has the rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

_SEGMENT_NBYTES = 256 * 1024  # at least
_LONG_CHUNK_NBYTES = 2 * 1024 * 1024
_PACED_FROM_NBYTES = 32 * 1024  # shorter chunks of all ranks fit into the queue of a port
# Tags. Gloo ends the process when a message is longer than the posted receive, so a comparison, which some ranks may
# not have reached, has a tag of its own.
_NEVER_SENT = 2**30
_COMPARISON = 2**30 - 1
_ADDED_IN_FLOAT32 = (torch.float16, torch.bfloat16)


def all_gather(output: Tensor, source: Tensor, group: dist.ProcessGroup) -> None:
    """Fill the blocks of `output` with every rank's `source`: a ring, so that each link carries each block once."""
    blocks = list(output.view(group.size(), -1))
    own = blocks[group.rank()]
    if own.data_ptr() != source.data_ptr():
        own.copy_(source)
    _ring(blocks, group)


def all_to_all(output: Tensor, source: Tensor, group: dist.ProcessGroup) -> None:
    """Send block j of `source` to rank j; block i of `output` comes from rank i."""
    rank, world_size = group.rank(), group.size()
    targets, blocks = output.view(world_size, -1), source.view(world_size, -1)
    for _ in _rotate(list(blocks), list(targets), group):
        pass
    targets[rank].copy_(blocks[rank])


def reduce_scatter(output: Tensor, source: Tensor, group: dist.ProcessGroup) -> None:
    """Sum `source` over the ranks in rank order and keep this rank's block: half the bytes of gloo's own."""
    blocks = list(source.view(group.size(), -1))
    rows = _room_for(blocks[group.rank()], group)
    for segment in _rotate(blocks, rows, group):
        _sum_in_order([row[segment] for row in rows], output[segment])


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, scale: float = 1.0) -> None:
    """Set `tensor` (1-D) to `scale * sum`, with the same bits on every rank.

    Where gloo's own all_reduce is not used, every rank adds up one chunk, in rank order, and the sums go round a ring.
    Each rank scales its own values first. 16-bit floats are added in float32 and rounded once.
    """
    if uses_gloo_ring(tensor, group):
        dist.all_reduce(apply_scale(tensor, scale), group=group)
        return
    rank, world_size = group.rank(), group.size()
    bounds = [place * tensor.numel() // world_size for place in range(world_size + 1)]
    chunks = [tensor[begin:end] for begin, end in pairwise(bounds)]
    rows = _room_for(chunks[rank], group)
    for segment in _rotate(chunks, rows, group, scale):
        _sum_in_order([row[segment] for row in rows], chunks[rank][segment])
    # A sum arrives only when this rank's share has reached its owner, so no share is overwritten too early.
    _ring(chunks, group, tag=1)


def send_receive(output: Tensor, source: Tensor, group: dist.ProcessGroup, peer: int) -> None:
    """Send `source` to rank `peer`, and fill `output` with what it sends."""
    arrival = dist.irecv(output, group=group, group_src=peer)
    _wait([dist.isend(source, group=group, group_dst=peer), arrival])


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


def uses_gloo_ring(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether to call gloo's own all_reduce, as stock DDP does: always, but for two kinds of messages.

    It would add 16-bit floats in their own dtype. Between two ranks the exchange of short messages takes a step less.
    Gloo's ring crosses each border between racks or sites once, where an exchange of all with all crosses it more often
    the more nodes there are (docs/simulator.md).
    """
    short = group.size() == 2 and tensor.nbytes < 2 * _LONG_CHUNK_NBYTES
    return not short and tensor.dtype not in _ADDED_IN_FLOAT32


def _room_for(chunk: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return memory for every rank's values of a chunk, in rank order; this rank's own stay where they are."""
    rank = group.rank()
    received = chunk.new_empty(group.size() - 1, chunk.numel())
    return [*received[:rank], chunk, *received[rank:]]


def _rotate(
    leaving: Sequence[Tensor], arriving: Sequence[Tensor], group: dist.ProcessGroup, scale: float = 1.0
) -> Iterator[slice]:
    """Send `leaving[i]` to rank i and fill `arriving[i]` from it; yield each segment once it is there from all ranks.

    In round k a rank sends to the rank k after it and receives from the rank k before it. Of long chunks one segment is
    on its way to each rank: the next is announced, and sent, when it has arrived. If all send to one at once, the queue
    of its port overflows, and TCP backs off (docs/performance.md). What is sent is multiplied by `scale` first, in
    place, also this rank's own.
    """
    rank, world_size = group.rank(), group.size()
    sources = [(rank - step) % world_size for step in range(1, world_size)]
    targets = [(rank + step) % world_size for step in range(1, world_size)]
    # Chunks differ by one element at most. As many segments of each, or ranks would wait for each other in a circle.
    longest_nbytes = max(chunk.nbytes for chunk in leaving)
    count = max(1, longest_nbytes // _SEGMENT_NBYTES)
    incoming = [(peer, *segment) for peer in sources for segment in enumerate(_segments(arriving[peer], count))]
    outgoing = [(peer, *segment) for peer in targets for segment in enumerate(_segments(leaving[peer], count))]
    apply_scale(leaving[rank], scale)
    receives: Iterable[dist.Work | None] = (
        dist.irecv(arriving[peer][segment], group=group, group_src=peer, tag=2 * number)
        for peer, number, segment in incoming
    )
    sends: Iterable[dist.Work | None] = (
        dist.isend(apply_scale(leaving[peer][segment], scale), group=group, group_dst=peer, tag=2 * number)
        for peer, number, segment in outgoing
    )
    if world_size == 2 or longest_nbytes < _PACED_FROM_NBYTES:
        receives, sends = list(receives), list(sends)
    works = []
    for (source, _, segment), receive, send in zip(incoming, receives, sends, strict=True):
        works.append(send)
        _wait([receive])
        if source == sources[-1]:
            yield segment
    _wait(works)


def _ring(blocks: Sequence[Tensor], group: dist.ProcessGroup, tag: int = 0) -> None:
    """Send every rank's own block around the ring. tag: 0, or 1 while another may not have ended everywhere."""
    rank, world_size = group.rank(), group.size()
    before, after = (rank - 1) % world_size, (rank + 1) % world_size
    arrivals = [
        dist.irecv(blocks[(rank - step - 1) % world_size], group=group, group_src=before, tag=2 * step + tag)
        for step in range(world_size - 1)
    ]
    sends = []
    for step, arrival in enumerate(arrivals):
        block = blocks[(rank - step) % world_size]
        sends.append(dist.isend(block, group=group, group_dst=after, tag=2 * step + tag))
        _wait([arrival])
    _wait(sends)


def _segments(chunk: Tensor, count: int) -> list[slice]:
    """Cut a chunk into `count` segments of about one length."""
    bounds = [place * chunk.numel() // count for place in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


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
