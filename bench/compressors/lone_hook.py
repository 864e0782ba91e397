# SPDX-License-Identifier: Apache-2.0
"""commopt's hook on one rank among ranks that are not there: all that the host does in training, and no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commopt import Aggregator, HookState
from commopt.groups import Team, TeamShape, apply_scale

_STARTING = torch.ones((), requires_grad=True)


class AbsentRanks(Team):
    """Rank 0 of a team whose other ranks do not exist.

    Each collective is one call of torch.distributed in a world of one, as much work for the host as any, and a copy
    that writes what a transport would. The others send what this rank does; sums are of this rank alone.
    """

    @classmethod
    def of_nodes(cls, ranks_per_node: Sequence[int], backends: dict[str, str]) -> AbsentRanks:
        """Return the team of a cluster, with its levels; the default process group has to be a world of one."""

        def made(shape: TeamShape) -> AbsentRanks:
            nodes = tuple(shape.wire.nodes)
            team = cls(tuple(range(shape.size)), nodes, dist.group.WORLD, backends, shape.level, shape.wire.sites)
            team.intra = None if shape.intra is None else made(shape.intra)
            team.inter = None if shape.inter is None else made(shape.inter)
            return team

        return made(TeamShape.of(ranks_per_node, 0, backends))

    def all_reduce(self, tensor: Tensor, *, scale: float = 1.0) -> None:
        """Scale `tensor`."""
        self._call_alone(apply_scale(tensor, scale))

    def starts_all_reduce(self, tensor: Tensor) -> bool:
        """Return False: nothing goes on without the others."""
        return False

    def reduce(self, tensor: Tensor, dst: int) -> None:
        """Leave `tensor` as it is."""
        self._call_alone(tensor)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Leave `tensor` as it is."""
        self._call_alone(tensor)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        """Keep this rank's block."""
        output.copy_(source[: output.numel()])
        self._call_alone(output)

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        """Put `source` where everybody's belongs: all of it can be decoded."""
        rows = output.view(-1, source.numel())
        rows.copy_(source.clone() if source.data_ptr() == output.data_ptr() else source)
        self._call_alone(source)

    def all_to_all(self, output: Tensor, source: Tensor) -> None:
        """Keep everything."""
        output.copy_(source)
        self._call_alone(output)

    def _call_alone(self, tensor: Tensor) -> None:
        self._run("all_reduce", dist.all_reduce, tensor)


class LoneHook:
    """A hook whose buckets are averaged over AbsentRanks, as it is called by DDP of any model.

    ranks_per_node: of the cluster that it pretends to be the first rank of.
    """

    def __init__(self, aggregator: Aggregator, ranks_per_node: Sequence[int], device: torch.device) -> None:
        self.state = HookState(aggregator, plan="ddp")
        client = self.state._registration.joined
        assert client is not None  # there is a process group
        backend = "nccl" if device.type == "cuda" else "gloo"
        client.team = AbsentRanks.of_nodes(ranks_per_node, {device.type: backend})

    def __call__(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average a bucket, or what passes for one."""
        return self.state._registration.reduce(bucket)

    @property
    def replayed(self) -> int:
        """How many buckets were replayed as CUDA graphs so far."""
        return int(self.state.stats().get("replayed", 0))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, task: Callable[[], None]) -> Tensor:
        ctx.task = task
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.task()
        return gradients[0], None


def in_backward(task: Callable[[], None]) -> None:
    """Run a task where DDP calls hooks: inside a backward pass."""
    torch.autograd.grad(_Backward.apply(_STARTING, task), _STARTING)  # type: ignore[no-untyped-call]
