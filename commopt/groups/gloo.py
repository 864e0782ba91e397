# SPDX-License-Identifier: Apache-2.0
"""Point-to-point collectives for gloo that keep both directions of a link busy.

Gloo announces a receive with a small message on the connection that also carries the data. Its own all_gather and
all_to_all post receives after they have begun to send, so the announcement waits behind megabytes and the two
directions take turns. Here a receive is posted before the send beside it. docs/performance.md has the rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.groups.connections import connections_of

_GLOO_SEGMENT_NBYTES = 1024 * 1024  # at most, in gloo's own ring
_SEGMENT_NBYTES = 256 * 1024  # at least
_PART_NBYTES = 32 * 1024  # at least, of what is split over several connections
_LONG_CHUNK_NBYTES = 2 * 1024 * 1024
_PACED_FROM_NBYTES = 32 * 1024  # shorter chunks of all ranks fit into the queue of a port
# Tags. Gloo ends the process when a message is longer than the posted receive, so a comparison, which some ranks may
# not have reached, has a tag of its own. With several connections torch gives a tag its connection, each in turn.
_NEVER_SENT = 2**30
_COMPARISON = 2**30 - 1
_LATER = 2**28  # added where the same tags may not have ended everywhere
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
        start_gloo_ring(apply_scale(tensor, scale), group).finish()
        return
    rank, world_size = group.rank(), group.size()
    bounds = [place * tensor.numel() // world_size for place in range(world_size + 1)]
    chunks = [tensor[begin:end] for begin, end in pairwise(bounds)]
    rows = _room_for(chunks[rank], group)
    for segment in _rotate(chunks, rows, group, scale):
        _sum_in_order([row[segment] for row in rows], chunks[rank][segment])
    # A sum arrives only when this rank's share has reached its owner, so no share is overwritten too early.
    _ring(chunks, group, tag=_LATER)


def send_receive(output: Tensor, source: Tensor, group: dist.ProcessGroup, peer: int) -> None:
    """Send `source` to rank `peer`, and fill `output` with what it sends."""
    shift(output, source, group, peer, peer, connections_of(group))


def shift(output: Tensor, source: Tensor, group: dist.ProcessGroup, to: int, by: int, connections: int) -> None:
    """Send `source` to rank `to`, and fill `output` (as long) with what rank `by` sends, over so many connections."""
    flat_output, flat_source = output.view(-1), source.view(-1)
    parts = _segments(flat_source, _count_of_parts(source.nbytes, connections))
    works = [dist.irecv(flat_output[part], group=group, group_src=by, tag=tag) for tag, part in enumerate(parts)]
    works += [dist.isend(flat_source[part], group=group, group_dst=to, tag=tag) for tag, part in enumerate(parts)]
    _wait(works)


# ------------------------------------------------------------------------- gloo's own ring, also in parts


@dataclass(frozen=True)
class Parts:
    """A sum in gloo's threads: one collective, or one for each connection. `finish` waits, and raises what failed."""

    works: Sequence[dist.Work]
    finish: Callable[[], None]

    def future(self) -> torch.futures.Future[Any]:
        """Return a future that is done when all parts have ended, well or badly."""
        futures = [work.get_future() for work in self.works]
        return futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)


def gloo_ring(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Set `tensor` to its sum by gloo's own all_reduce, split over the connections of the group."""
    start_gloo_ring(tensor, group).finish()


def start_gloo_ring(tensor: Tensor, group: dist.ProcessGroup) -> Parts:
    """Start gloo's own all_reduce, in one part for each connection, with the bits of one.

    In what order gloo adds an element depends on its chunk, of which there are as many as ranks. So each part has a
    share of every chunk. Between two ranks all orders give the same bits, and nothing is copied.
    """
    size = group.size()
    count = _count_of_parts(tensor.nbytes // size, connections_of(group))
    if count == 1 or not tensor.is_contiguous():
        return _started([tensor], group)
    flat = tensor.view(-1)
    if size == 2:
        return _started([flat[part] for part in _segments(flat, count)], group)
    chunk = _gloo_chunk(flat, size)
    # Gloo cuts a chunk into two segments, or more of 1 MiB: a share of two equal ones is a chunk again.
    while -(-chunk // count) * flat.element_size() > 2 * _GLOO_SEGMENT_NBYTES:
        count *= 2
    width = 2 * -(-chunk // (2 * count))
    shares = []
    for begin in range(0, chunk, width):
        share = flat.new_zeros(size, width)
        for row, (first, last) in zip(share, _share_bounds(flat.numel(), chunk, begin, width), strict=False):
            row[: last - first] = flat[first:last]
        shares.append(share)

    def put_back() -> None:
        for share, begin in zip(shares, range(0, chunk, width), strict=True):
            for row, (first, last) in zip(share, _share_bounds(flat.numel(), chunk, begin, width), strict=False):
                flat[first:last] = row[: last - first]

    return _started(shares, group, put_back)


def _share_bounds(numel: int, chunk: int, begin: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield the range of each chunk's elements from `begin` to `begin + width`; the last chunks may have none."""
    for start in range(0, numel, chunk):
        end = min(start + chunk, numel)
        yield min(start + begin, end), min(start + begin + width, end)


def _gloo_chunk(flat: Tensor, size: int) -> int:
    """Return the elements of each chunk of which gloo's ring sums one at each rank."""
    segments = max(-(-flat.nbytes // _GLOO_SEGMENT_NBYTES), 2 * size)
    segments = -(-segments // size) * size
    segment_nbytes = -(-flat.nbytes // segments)
    return -(-segment_nbytes // flat.element_size()) * segments // size


def _started(parts: Sequence[Tensor], group: dist.ProcessGroup, after: Callable[[], None] | None = None) -> Parts:
    started = [dist.all_reduce(part, group=group, async_op=True) for part in parts]
    works = [work for work in started if work is not None]

    def finish() -> None:
        _wait(started)
        if after is not None:
            after()

    return Parts(works, finish)


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
    tags = range(_NEVER_SENT, _NEVER_SENT + connections_of(group))
    for peer in range(group.size()):
        try:
            for tag in tags if peer != group.rank() else ():
                dist.irecv(torch.empty(1, device="cpu"), group=group, group_src=peer, tag=tag)
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
    on its way over each connection: the next is announced, and sent, when it has arrived. If all send to one at once,
    the queue of its port overflows, and TCP backs off (docs/performance.md). What is sent is multiplied by `scale`
    first, in place, also this rank's own.
    """
    rank, world_size = group.rank(), group.size()
    sources = [(rank - step) % world_size for step in range(1, world_size)]
    targets = [(rank + step) % world_size for step in range(1, world_size)]
    connections = connections_of(group)
    # Chunks differ by one element at most. As many segments of each, or ranks would wait for each other in a circle.
    longest_nbytes = max(chunk.nbytes for chunk in leaving)
    count = _count_of_parts(longest_nbytes, connections)
    count *= max(1, longest_nbytes // (_SEGMENT_NBYTES * count))
    incoming = [(peer, *segment) for peer in sources for segment in enumerate(_segments(arriving[peer], count))]
    outgoing = [(peer, *segment) for peer in targets for segment in enumerate(_segments(leaving[peer], count))]
    apply_scale(leaving[rank], scale)
    receives = (
        dist.irecv(arriving[peer][segment], group=group, group_src=peer, tag=number)
        for peer, number, segment in incoming
    )
    sends = (
        dist.isend(apply_scale(leaving[peer][segment], scale), group=group, group_dst=peer, tag=number)
        for peer, number, segment in outgoing
    )
    paced = world_size > 2 and longest_nbytes >= _PACED_FROM_NBYTES
    ahead = min(connections, count) if paced else len(incoming)
    arrivals, works = list(islice(receives, ahead)), list(islice(sends, ahead))
    for place, (source, _, segment) in enumerate(incoming):
        _wait([arrivals[place]])
        if source == sources[-1]:
            yield segment
        arrivals.extend(islice(receives, 1))
        works.extend(islice(sends, 1))
    _wait(works)


def _ring(blocks: Sequence[Tensor], group: dist.ProcessGroup, tag: int = 0) -> None:
    """Send every rank's own block around the ring. tag: 0, or _LATER while another may not have ended everywhere."""
    rank, world_size = group.rank(), group.size()
    before, after = (rank - 1) % world_size, (rank + 1) % world_size
    count = _count_of_parts(max(block.nbytes for block in blocks), connections_of(group))
    parts = [[block[part] for part in _segments(block, count)] for block in blocks]
    arrivals = [
        dist.irecv(part, group=group, group_src=before, tag=step * count + place + tag)
        for step in range(world_size - 1)
        for place, part in enumerate(parts[(rank - step - 1) % world_size])
    ]
    own = enumerate(parts[rank])
    sends = [dist.isend(part, group=group, group_dst=after, tag=place + tag) for place, part in own]
    for number, arrival in enumerate(arrivals):
        _wait([arrival])
        step, place = divmod(number, count)
        if step < world_size - 2:  # the last block is for this rank
            part = parts[(rank - step - 1) % world_size][place]
            sends.append(dist.isend(part, group=group, group_dst=after, tag=number + count + tag))
    _wait(sends)


def _count_of_parts(nbytes: int, connections: int) -> int:
    """Return in how many parts to send a message, one over each connection unless it is short."""
    return max(1, min(connections, nbytes // _PART_NBYTES))


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
