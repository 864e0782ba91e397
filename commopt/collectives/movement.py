# SPDX-License-Identifier: Apache-2.0
"""Arrays of torch, NumPy and CuPy as tensors over the same memory, and how they move over two levels of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from commopt.errors import UnsupportedTensorError
from commopt.groups import Membership, Team

_FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTEGER = (torch.int64, torch.int32, torch.uint8, torch.int8)


@dataclass(frozen=True)
class Operand:
    """A caller's array, seen as a dense tensor."""

    array: Any
    tensor: Tensor
    # Set when no tensor can share the array's memory: copies the tensor back into it.
    write_back: Callable[[], None] | None = None

    def flat(self) -> Tensor:
        """Return the elements in logical order as a contiguous 1-D tensor: a view where possible, else a copy.

        A conjugate or negative of torch is a view of other values with a bit set, which neither gloo nor NCCL looks at.
        """
        dense = self.tensor.resolve_conj().resolve_neg().contiguous()
        return dense.as_strided((dense.numel(),), (1,))  # a view of a single element may keep any stride

    def store(self, flat: Tensor) -> None:
        """Make `flat` the array's elements; free when it already is."""
        if flat.data_ptr() != self.tensor.data_ptr():
            self.tensor.copy_(flat.view(self.tensor.shape))
        if self.write_back is not None:
            self.write_back()


def readable(array: Any) -> Operand:
    """Return an operand to read from; raises UnsupportedTensorError for what is no dense array."""
    if isinstance(array, torch.Tensor):
        _require_dense(array)
        return Operand(array, array.detach())
    if isinstance(array, np.ndarray):
        plain = array if array.flags.writeable and min(array.strides, default=0) >= 0 else array.copy()
        return Operand(array, _from_numpy(plain))
    if hasattr(array, "__dlpack__"):
        return Operand(array, _from_dlpack(array))
    raise UnsupportedTensorError(
        f"{type(array).__name__} is not an array; pass a torch tensor, a NumPy or CuPy array, or a DLPack object"
    )


def writable(array: Any) -> Operand:
    """Return an operand to write to, zero-copy where the memory allows.

    Raises UnsupportedTensorError for read-only memory and for elements that overlap each other.
    """
    if isinstance(array, np.ndarray):
        if not array.flags.writeable:
            raise UnsupportedTensorError("the NumPy array is read-only and results are written in place; pass a copy()")
        if min(array.strides, default=0) < 0:  # torch has no negative strides
            copy = _from_numpy(array.copy())
            return Operand(array, copy, lambda: np.copyto(array, copy.numpy()))
    operand = readable(array)
    if _overlaps(operand.tensor):
        raise UnsupportedTensorError(
            f"elements of the array may share memory (shape {tuple(operand.tensor.shape)}, strides "
            f"{operand.tensor.stride()}), as after expand(); results are written in place: pass .contiguous()"
        )
    return operand


def require_reducible(tensor: Tensor, name: str = "the array") -> None:
    """Raise UnsupportedTensorError unless sums over ranks are defined and supported for `tensor`."""
    _require_dense(tensor, name)
    if tensor.is_complex():
        raise UnsupportedTensorError(
            f"{name} is {tensor.dtype}; sums of complex values are not supported: pass torch.view_as_real(x), or keep "
            f"such a parameter as a real one with a trailing dimension of 2"
        )
    if tensor.dtype not in _FLOATING + _INTEGER:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATING + _INTEGER)
        raise UnsupportedTensorError(f"{name} is {tensor.dtype}, which cannot be summed; convert it to one of {names}")


def _overlaps(tensor: Tensor) -> bool:
    """Return whether two elements may share memory: dimensions that do not nest count as overlapping."""
    if tensor.numel() == 0:
        return False
    span = 0  # distance to the last element reached by the dimensions looked at so far
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride <= span:
                return True
            span += stride * (length - 1)
    return False


def _require_dense(tensor: Tensor, name: str = "the array") -> None:
    if tensor.is_nested or tensor.is_quantized:
        kind, fix = ("nested", "to_padded_tensor(0)") if tensor.is_nested else (tensor.dtype, "dequantize()")
        raise UnsupportedTensorError(f"{name} is {kind}, which is more than its elements; pass x.{fix}")
    if tensor.layout != torch.strided:
        raise UnsupportedTensorError(
            f"{name} is sparse ({tensor.layout}); pass x.to_dense(), or for gradients use nn.Embedding(sparse=False)"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedTensorError(f"{name} is on {tensor.device}; move it to a cpu or cuda device")


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise UnsupportedTensorError(f"NumPy array of dtype {array.dtype}: {error}") from None


def _from_dlpack(array: Any) -> Tensor:
    try:
        tensor = torch.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedTensorError(f"{type(array).__name__} that torch cannot share: {error}") from None
    _require_dense(tensor)
    return tensor


# ------------------------------------------------------------------------------------------- movement
#
# `blocks` are rows in the order of the group's ranks. On unequal nodes, or where there is one level only, the team's
# own primitive runs in one piece; only the order of the rows has to be translated.


def reduce_scatter(blocks: Tensor, membership: Membership) -> Tensor:
    """Return this rank's row of the sum of `blocks` [world_size, n] over ranks."""
    mine, levels = torch.empty_like(blocks[0]), _two_levels(membership)
    if blocks.numel() == 0:
        return mine
    if levels is None:
        membership.team.reduce_scatter(mine, _node_by_node(blocks, membership).view(-1))
        return mine
    intra, inter = levels
    per_node = blocks.new_empty(inter.size * blocks.shape[1])
    intra.reduce_scatter(per_node, _by_place(blocks, membership).view(-1))  # of [place, node, n]
    inter.reduce_scatter(mine, per_node)
    return mine


def all_gather(block: Tensor, membership: Membership) -> Tensor:
    """Return the rows [world_size, n] of all ranks' `block` [n]."""
    team, levels = membership.team, _two_levels(membership)
    gathered = block.new_empty(team.size, block.numel())
    if block.numel() == 0:
        return gathered
    if levels is None:
        team.all_gather(gathered.view(-1), block)
        return _rank_by_rank(gathered, membership)
    intra, inter = levels
    across = block.new_empty(inter.size * block.numel())
    inter.all_gather(across, block)
    by_place = block.new_empty(intra.size, inter.size, block.numel())
    intra.all_gather(by_place.view(-1), across)
    return _rank_by_rank(by_place.transpose(0, 1).reshape(gathered.shape), membership)


def all_to_all(blocks: Tensor, membership: Membership) -> Tensor:
    """Return the rows [world_size, n] that the ranks sent here; row j of `blocks` goes to rank j."""
    levels = _two_levels(membership)
    if blocks.numel() == 0:
        return blocks
    if levels is None:
        received = torch.empty_like(blocks)
        membership.team.all_to_all(received.view(-1), _node_by_node(blocks, membership).view(-1))
        return _rank_by_rank(received, membership)
    intra, inter = levels
    by_place = _by_place(blocks, membership)  # [destination place, destination node, n]
    collected = torch.empty_like(by_place)  # [source place, destination node, n]
    intra.all_to_all(collected.view(-1), by_place.view(-1))
    by_node = collected.transpose(0, 1).contiguous()  # [destination node, source place, n]
    received = torch.empty_like(by_node)  # [source node, source place, n]
    inter.all_to_all(received.view(-1), by_node.view(-1))
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


def _two_levels(membership: Membership) -> tuple[Team, Team] | None:
    """Return the teams inside the node and between nodes, None where there is one level or nodes are unequal."""
    team = membership.team
    if team.intra is None or team.inter is None or not membership.cluster.uniform:
        return None
    return team.intra, team.inter


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
