"""An ordered set of ranks with its own process group, and its two-level split into nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from commopt.errors import CommoptError, ConfigurationError, LaneError, TransportError
from commopt.groups import gloo
from commopt.groups.wire import WireModel

# torch 2.13 renamed these and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Team:
    """Ranks in node-contiguous order; `dst` and `src` below are positions in that order.

    Every primitive is synchronous: on the CPU it returns when done, on CUDA it is ordered on the current stream.
    `intra` holds this rank's node, `inter` the ranks at the same place on the other nodes; both are None in a team
    that has no further levels, and `inter` is None on a rank that is not a leader when nodes are unequal.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        nodes: tuple[int, ...],
        group: dist.ProcessGroup | None,
        backends: Mapping[str, str],
        intra: Team | None = None,
        inter: Team | None = None,
    ) -> None:
        self.ranks = ranks
        self.rank = ranks.index(dist.get_rank())
        self.wire = WireModel(self.rank, nodes)
        self.intra = intra
        self.inter = inter
        # torch's registry owns the group. Weak here, so that destroy_process_group() really closes its connections.
        self._group = None if group is None else ref(group)
        self._backends = dict(backends)
        self._closed = False

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def node_count(self) -> int:
        """Number of different nodes among the ranks."""
        return len(set(self.wire.nodes))

    @property
    def uniform(self) -> bool:
        """Whether all nodes have equally many of the ranks."""
        nodes = self.wire.nodes
        return len({nodes.count(node) for node in set(nodes)}) == 1

    @property
    def default_device(self) -> torch.device:
        """The kind of device whose tensors this team is meant for: the GPU where NCCL is there."""
        on_gpu = torch.cuda.is_available() and self._backends.get("cuda") == "nccl"
        return torch.device("cuda" if on_gpu else "cpu")

    def backend(self, device: torch.device) -> str:
        """Return the name of the backend that moves tensors of `device` (gloo, nccl, ...).

        Raises ConfigurationError when there is none, as in an NCCL group for CPU tensors.
        """
        if device.type not in self._backends:
            raise ConfigurationError(
                f"a {device.type} tensor cannot travel over a process group with backends {self._backends}; move the "
                f"tensor, or start with init_process_group('cpu:gloo,cuda:nccl')"
            )
        return self._backends[device.type]

    def warm(self, device: torch.device) -> None:
        """Open the connections of every level, in one fixed order: NCCL makes them in the first collective."""
        for level in (self, self.intra, self.inter):
            if level is not None:
                level.all_reduce(torch.zeros(1, device=device))

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the team, in place."""
        if self.size > 1:
            with self._transport("all_reduce") as group:
                if self._on_gloo(tensor) and self.node_count == self.size:
                    gloo.all_reduce(tensor, group)
                else:
                    dist.all_reduce(tensor, group=group)

    def reduce(self, tensor: Tensor, dst: int) -> None:
        """Sum into `tensor` of rank `dst`; the other ranks' tensors are left undefined."""
        if self.size > 1:
            with self._transport("reduce") as group:
                dist.reduce(tensor, group=group, group_dst=dst)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy `tensor` of rank `src` to every rank."""
        if self.size > 1:
            with self._transport("broadcast") as group:
                dist.broadcast(tensor, group=group, group_src=src)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        """Sum `source` over the team and keep this rank's block of output.numel() elements."""
        if self.size > 1:
            with self._transport("reduce_scatter") as group:
                if self._on_gloo(source):
                    gloo.reduce_scatter(output, source, group)
                else:
                    reduce_scatter_single(output, source, group=group)
        else:
            output.copy_(source)

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        """Fill `output` with every rank's `source`, in rank order."""
        if self.size > 1:
            with self._transport("all_gather") as group:
                if self._on_gloo(source):
                    gloo.all_gather(output, source, group)
                else:
                    all_gather_single(output, source, group=group)
        else:
            output.copy_(source)

    def all_to_all(self, output: Tensor, source: Tensor) -> None:
        """Send block j of `source` to rank j; block i of `output` comes from rank i."""
        if self.size > 1:
            with self._transport("all_to_all") as group:
                if self._on_gloo(source):
                    gloo.all_to_all(output, source, group)
                else:
                    dist.all_to_all_single(output, source, group=group)
        else:
            output.copy_(source)

    def close(self) -> None:
        """Destroy the process groups, which also frees peers that wait in them; later primitives raise."""
        for part in (self.intra, self.inter):
            if part is not None:
                part.close()
        group = self._live_group()
        self._closed = True
        if group is None:
            return
        if "nccl" in self._backends.values():
            c10d._abort_process_group(group)  # a NCCL kernel that waits for a peer ends only by an abort
        else:
            dist.destroy_process_group(group)

    def release(self) -> None:
        """Close when nothing but gloo is behind it, whose threads are then joined; of NCCL nothing is aborted."""
        if "nccl" not in self._backends.values():
            self.close()

    @property
    def closed(self) -> bool:
        """Whether the team can no longer communicate: it was closed, or its process group destroyed."""
        return self._closed or not dist.is_initialized() or (self._group is not None and self._live_group() is None)

    def _live_group(self) -> dist.ProcessGroup | None:
        group = None if self._group is None else self._group()
        return group if group is not None and is_alive(group) else None

    def _on_gloo(self, tensor: Tensor) -> bool:
        return self.backend(tensor.device) == "gloo"

    @contextmanager
    def _transport(self, primitive: str) -> Iterator[dist.ProcessGroup]:
        group = self._live_group()
        if group is None:
            raise LaneError(
                f"{primitive} over ranks {self.ranks}: the process group was destroyed meanwhile; after "
                f"init_process_group() make a new HookState or Communicator"
            )
        try:
            yield group
        except CommoptError:
            raise
        except RuntimeError as error:
            raise TransportError(f"{primitive} over ranks {self.ranks} failed: {error}") from error


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return whether torch still knows `group`: destroy_process_group forgets it."""
    return group in c10d._world.pg_map
