# SPDX-License-Identifier: Apache-2.0
"""Collectives over NCCL, called on the process group itself: torch.distributed calls eight functions around each.

These look for modes of torch functions, for complex numbers and for a group that this rank is not in; nothing of that
reaches a Team. Options never change, so they are made once.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

Options = TypeVar("Options")


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Sum `tensor` over the ranks, in place."""
    _end(group.allreduce([tensor], _ALL_REDUCE))


def reduce(tensor: Tensor, group: dist.ProcessGroup, group_dst: int) -> None:
    """Sum into `tensor` of rank `group_dst`."""
    _end(group.reduce([tensor], _to(group_dst)))


def broadcast(tensor: Tensor, group: dist.ProcessGroup, group_src: int) -> None:
    """Copy `tensor` of rank `group_src` to all."""
    _end(group.broadcast([tensor], _from(group_src)))


def reduce_scatter(output: Tensor, source: Tensor, group: dist.ProcessGroup) -> None:
    """Sum `source` over the ranks, and keep this rank's block."""
    _end(group._reduce_scatter_base(output, source, _REDUCE_SCATTER))


def all_gather(output: Tensor, source: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `output` with every rank's `source`."""
    _end(group._allgather_base(output, source, _ALL_GATHER))


def all_to_all(output: Tensor, source: Tensor, group: dist.ProcessGroup) -> None:
    """Send block j of `source` to rank j, and fill block i of `output` from rank i."""
    _end(group.alltoall_base(output, source, [], [], _ALL_TO_ALL))


def send_receive(output: Tensor, source: Tensor, group: dist.ProcessGroup, peer: int) -> None:
    """Send `source` to rank `peer`, and fill `output` with what it sends; other ranks need not take part."""
    ends = [dist.P2POp(call, each, None, group, 0, peer) for call, each in ((dist.isend, source), (dist.irecv, output))]
    for work in dist.batch_isend_irecv(ends):
        work.wait()


def _end(work: Any) -> None:
    if work is not None:  # newer NCCL groups have let the current stream wait already
        work.wait()


def _synchronous(options: Options) -> Options:
    """Return options of a call after which the current stream waits; older ones cannot say so, and work is awaited."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


@cache
def _to(rank: int) -> c10d.ReduceOptions:
    options = _synchronous(c10d.ReduceOptions())
    options.rootRank = rank
    return options


@cache
def _from(rank: int) -> c10d.BroadcastOptions:
    options = _synchronous(c10d.BroadcastOptions())
    options.rootRank = rank
    return options


_ALL_REDUCE = _synchronous(c10d.AllreduceOptions())
_REDUCE_SCATTER = _synchronous(c10d.ReduceScatterOptions())
_ALL_GATHER = _synchronous(c10d.AllgatherOptions())
_ALL_TO_ALL = _synchronous(c10d.AllToAllOptions())
