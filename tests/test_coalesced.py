"""Messages of several buckets go without copies where the transport takes several tensors at once.

NCCL does; gloo, which copies them itself, shows here that the values are right.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt.bucketing import messages
from commopt.groups.team import Team
from commopt.kernels.pack import pack
from tests.hook_training import SMALL_BUCKET, Tower, seeded, train
from tests.plan_changes import plan_of
from tests.ranks import run


def merge(rank: int, world_size: int, aggregator: commopt.Aggregator, coalesces: bool) -> tuple[str, list[int], int]:
    """Follow a plan with two messages of several buckets; return the result, the parts sent and the buffers packed."""
    module = seeded(Tower)
    names = [name for name, _ in reversed(list(module.named_parameters()))]
    plan = plan_of(names[:5], names[5:], strategy=repr(aggregator))
    parts: list[int] = []
    packed: list[Tensor] = []
    together = Team.all_reduce_coalesced

    def overheard(team: Team, tensors: Sequence[Tensor], *, scale: float = 1.0) -> None:
        parts.append(len(tensors))
        together(team, tensors, scale=scale)

    def watched(tensors: Sequence[Tensor], flat: Tensor) -> None:
        packed.append(flat)
        pack(tensors, flat)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Team, "coalesces", lambda team, device: coalesces)
        patch.setattr(Team, "all_reduce_coalesced", overheard)
        patch.setattr(messages, "pack", watched)
        ddp = TorchDDP(module, **SMALL_BUCKET)  # its buckets stay: the state does not know it
        ddp.register_comm_hook(commopt.HookState(aggregator, module=module, plan=plan), commopt.hook)
        digest = train(ddp, rank, world_size, aggregator)
    return digest, parts, len(packed)


def test_buckets_of_a_message_are_sent_together_without_copies() -> None:
    copied = run(merge, 2, commopt.Flat(), False)
    together = run(merge, 2, commopt.Flat(), True)
    for (digest, _, _), (expected, parts, packed) in zip(together, copied, strict=True):
        assert digest == expected
        assert parts == []
        assert packed > 0
    for _, parts, packed in together:
        assert packed == 0
        assert len(parts) > 2
        assert min(parts) > 1


def test_what_needs_one_buffer_is_packed() -> None:
    for _, parts, packed in run(merge, 2, commopt.Hierarchical(), True, nodes=(1, 1)):
        assert parts == []
        assert packed > 0


def coalesce(rank: int, world_size: int) -> tuple[bool, list[list[float]]]:
    comm = commopt.Communicator()
    team = comm._membership.team
    tensors = [torch.full((numel,), rank + 1.0) for numel in (3, 1, 5)]
    team.all_reduce_coalesced(tensors, scale=0.5)
    return team.coalesces(tensors[0].device), [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_tensor_is_summed_and_scaled(world_size: int) -> None:
    total = 0.5 * sum(range(1, world_size + 1))
    for coalesces, tensors in run(coalesce, world_size):
        assert not coalesces, "gloo would copy them"
        assert tensors == [[total] * numel for numel in (3, 1, 5)]
