# SPDX-License-Identifier: Apache-2.0
"""Models, data and the reference for training with hooks: gradients equal the float64 mean, replicas stay alike."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import commopt
from commopt import Aggregator
from tests.catalogue import Mean, assert_average, uses_compression

Batch = tuple[Any, ...]
# Where presets differ for the hook: exact, with residuals, with factors besides.
REPRESENTATIVES = ["flat", "hierarchical_quantized", "hierarchical_powersgd"]
STEPS = 4  # DDP rebuilds its buckets after iteration 0, or 1 with a static graph
WIDTH = 64  # so wide that a layer has more elements than the DGC presets send at least
BUCKETS_CAN_BE_GIVEN = torch.__version__ >= "2.12"  # to DDP, by a plan or a checkpoint
SMALL_BUCKET: dict[str, Any] = {"bucket_cap_mb": 0.012}


class Tower(nn.Module):
    """Six layers: a bucket of SMALL_BUCKET's cap holds one or two."""

    def __init__(self, numel: int = WIDTH, checkpointing: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(numel, numel) for _ in range(6))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.checkpointing and index % 2:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = layer(x)
            x = torch.tanh(x)
        return x


class Branches(nn.Module):
    """Uses one branch per batch, and a parameter never."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.never = nn.Parameter(torch.ones(50))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        y: Tensor = self.branches[branch](torch.tanh(self.stem(x)))
        return y


class ManyDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_float32 = nn.Linear(WIDTH, WIDTH)
        self.in_bfloat16 = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.in_float64 = nn.Linear(WIDTH, WIDTH + 1, dtype=torch.float64)
        self.gain = nn.Parameter(torch.ones((), dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.in_float32(x)) * self.gain
        x = torch.tanh(self.in_bfloat16(x.bfloat16()))
        y: Tensor = self.in_float64(x.double())
        return y


def batch_of(rank: int, step: int, micro: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    values = torch.randn(4, WIDTH, generator=generator, device="cpu") * (1 + rank)
    return (values.to(torch.get_default_device()),)


def branching(peer: int, step: int, micro: int = 0) -> Batch:
    """A batch for Branches: of its three branches one is used by nobody."""
    return (*batch_of(peer, step, micro), (peer + step) % 2)


def loss_of(module: nn.Module, batch: Batch) -> Tensor:
    output: Tensor = module(*batch)
    return output.float().square().sum()


def seeded(kind: type[nn.Module], *args: Any) -> nn.Module:
    torch.manual_seed(7)
    return kind(*args)


def expected_gradients(module: nn.Module, batches: Sequence[Sequence[Batch]]) -> dict[str, Mean]:
    """Return the mean over the ranks' gradients, each summed over that rank's micro-batches."""
    replica = copy.deepcopy(module)
    per_rank: dict[str, list[Tensor]] = {name: [] for name, _ in replica.named_parameters()}
    for micro_batches in batches:
        replica.zero_grad(set_to_none=True)
        for batch in micro_batches:
            loss_of(replica, batch).backward()
        for name, parameter in replica.named_parameters():
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            per_rank[name].append(gradient.clone())
    return {name: Mean.of(gradients) for name, gradients in per_rank.items()}


class Owed:
    """What error feedback still owes each parameter: the sum of true means less the sum of what was applied."""

    SHARE: ClassVar = {8: 0.1, 4: 0.4, 2: 2.0, 1: 6.0}  # of the largest gradient seen, by bits per element

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._largest: dict[str, float] = {}

    def check(self, name: str, got: Tensor, mean: Mean, aggregator: Aggregator, context: object) -> None:
        """Take in one step; what is owed must stay a share of one gradient, however many steps there were."""
        bits = min((getattr(wire, "bits", 1) for wire in uses_compression(aggregator)), default=1)
        owed = self._sums.get(name, torch.zeros_like(mean.value)) + mean.value - got.double()
        largest = max(self._largest.get(name, 0.0), float(mean.magnitude.norm()))
        self._sums[name], self._largest[name] = owed, largest
        # Blocks cross tensors, so a small gradient beside a large one is owed more: a floor for every parameter.
        limit = self.SHARE[bits] * max(largest, *self._largest.values())
        assert owed.norm() <= limit, f"{aggregator} {context} {name}: owes {owed.norm():.3g}, may owe {limit:.3g}"


def assert_gradients(
    module: nn.Module, expected: dict[str, Mean], aggregator: Aggregator, context: object, owed: Owed
) -> None:
    """Check every gradient against the mean, or with error feedback all of them so far; `owed` lives through a run."""
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            assert expected[name].magnitude.max() == 0, f"{name} has no gradient"
        elif aggregator.residual_paths:
            owed.check(name, parameter.grad, expected[name], aggregator, context)
        else:
            assert_average(parameter.grad, expected[name], aggregator, (context, name))


def train(
    ddp: TorchDDP,
    rank: int,
    world_size: int,
    aggregator: Aggregator,
    *,
    steps: int = STEPS,
    micros: int = 1,
    batch: Callable[..., Batch] = batch_of,
    before: Callable[[int], None] = lambda step: None,
) -> str:
    """Train for some steps, checking every gradient; return a hash of the parameters. `before` is told each step."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    owed = Owed()
    for step in range(steps):
        before(step)
        batches = [[batch(peer, step, micro) for micro in range(micros)] for peer in range(world_size)]
        expected = expected_gradients(ddp.module, batches)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for micro in batches[rank][:-1]:
            with ddp.no_sync():
                loss_of(ddp, micro).backward()
        loss_of(ddp, batches[rank][-1]).backward()
        assert_gradients(ddp.module, expected, aggregator, f"step {step}", owed)
        optimizer.step()
    return digest_of(ddp.module)


def digest_of(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def ddp_buckets(state: commopt.HookState) -> list[int]:
    """Return the bytes of DDP's own buckets in the last step; collective, with record=True."""
    return [bucket.nbytes for bucket in state.timeline().steps[-1][0].buckets]


def assert_identical(digests: list[str]) -> None:
    assert len(set(digests)) == 1, "replicas differ"


def registered(ddp: TorchDDP, *hook: Any) -> TorchDDP:
    ddp.register_comm_hook(*hook)
    return ddp


def attached(ddp: TorchDDP, choice: Any, **options: Any) -> TorchDDP:
    assert isinstance(commopt.attach(ddp, choice, **options), commopt.HookState)
    return ddp


def register_preset(module: nn.Module, preset: str, **options: Any) -> TorchDDP:
    return registered(commopt.DistributedDataParallel(module, **options), commopt.PRESETS[preset])


def register_torch_convention(module: nn.Module, preset: str, **options: Any) -> TorchDDP:
    return registered(TorchDDP(module, **options), commopt.HookState(), commopt.PRESETS[preset])


def register_hook_function(module: nn.Module, preset: str, **options: Any) -> TorchDDP:
    return registered(TorchDDP(module, **options), commopt.HookState(commopt.PRESETS[preset].build()), commopt.hook)


def attach_preset(module: nn.Module, preset: str, **options: Any) -> TorchDDP:
    return attached(TorchDDP(module, **options), commopt.PRESETS[preset])


def attach_name(module: nn.Module, preset: str, **options: Any) -> TorchDDP:
    return attached(TorchDDP(module, **options), preset, timeout=60)


def attach_aggregator(module: nn.Module, preset: str, **options: Any) -> TorchDDP:
    return attached(commopt.DistributedDataParallel(module, **options), commopt.PRESETS[preset].build())


WAYS = {
    function.__name__: function
    for function in (
        register_preset,
        register_torch_convention,
        register_hook_function,
        attach_preset,
        attach_name,
        attach_aggregator,
    )
}
