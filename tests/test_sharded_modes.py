# SPDX-License-Identifier: Apache-2.0
"""HSDP with commopt's exact average is HSDP: every mode of FSDP2 leaves the bits that torch's own all-reduce leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from commopt import Flat, Hierarchical
from tests.ranks import run
from tests.sharded_training import (
    MICROS,
    NODES,
    Made,
    Net,
    attached,
    batch,
    differences,
    each_layer,
    hsdp_mesh,
    local,
    modules_of,
    over_all_ranks,
    plain_steps,
    policy,
    same,
)

EVEN = (32, 16, 28, 6)
BUFFERS = 4  # in a backward of Net, one for each layer and one for the rest
Outcome = dict[str, Any]


def compare(made: Made, train: Callable[..., object], steps: int = 3, scales: bool = False) -> Outcome:
    """Train once with torch's average and once with commopt's; with a GradScaler each, if it `scales`."""
    stock, ours = made(), made()
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) if scales else None for _ in range(2)]
    with attached(ours, Flat(), scaler=scalers[1]) as state:
        told = [
            train(net, steps, scaler) if scales else train(net, steps)
            for net, scaler in zip((stock, ours), scalers, strict=True)
        ]
        stats = state.stats()
    placements = {str(p.placements) for p in ours.parameters() if isinstance(p, DTensor)}
    return {
        "equal": same(local(stock), local(ours)) and told[0] == told[1],
        "moved": not same(local(ours), local(made())),
        "buckets": stats["buckets"] / steps,
        "overlapped": stats["buckets_overlapped"] / steps,
        "steps": stats["steps"] / steps,
        "placements": placements,
    }


# ------------------------------------------------------------------------------------------- loops


def each_step(net: Any, steps: int) -> Iterator[int]:
    """Zero the gradients before the body of a loop, and let AdamW step after it."""
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        yield step
        optimizer.step()


def accumulate(how: str) -> Callable[..., None]:
    def loop(net: Any, steps: int) -> None:
        for step in each_step(net, steps):
            for micro in range(MICROS):
                last = micro == MICROS - 1
                if how == "shards only":
                    net.set_requires_all_reduce(last)
                if how == "nothing":
                    net.set_requires_gradient_sync(last)
                    net.set_is_last_backward(last)
                (net(batch(step, micro)).square().mean() / MICROS).backward()

    return loop


def accumulate_in_other_layouts(net: Any, steps: int) -> None:
    """Partial sums to which other parameters come with the next backward, and that have some which the last has not."""
    for step in each_step(net, steps):
        for micro in range(MICROS):
            net.set_requires_all_reduce(micro == MICROS - 1)
            (net(batch(step, micro), side=micro == step % MICROS).square().mean() / MICROS).backward()


def finalized_by_hand(net: Any, steps: int) -> None:
    net.set_manual_backward_finalization(True)
    for step in each_step(net, steps):
        net(batch(step)).square().mean().backward()
        net.finalize_backward(async_op=True).wait()


def clipped(net: Net, steps: int) -> list[float]:
    norms = []
    for step in each_step(net, steps):
        net(batch(step)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
    return norms


def now_and_then(net: Net, steps: int) -> None:
    for step in each_step(net, steps):
        net(batch(step), side=step % 2 == 0).square().mean().backward()


def scaled(net: Net, steps: int, scaler: Any) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    scales = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(batch(step)).square().mean()
        if step == 1 and dist.get_rank() == 3:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def large_losses(net: Net, steps: int) -> None:
    """Gradients of which none is subnormal in float16."""
    optimizer = torch.optim.SGD(net.parameters(), 1e-6)
    for step in range(steps):
        optimizer.zero_grad()
        (net(batch(step)).square().mean() * 1024).backward()
        optimizer.step()


def in_backward(net: Net, steps: int) -> None:
    optimizers: dict[Tensor, Any] = {parameter: torch.optim.AdamW([parameter], 1e-2) for parameter in net.parameters()}

    def step_now(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    for step in range(steps):
        net(batch(step)).square().mean().backward()


def two_uses(net: Net, steps: int) -> None:
    """Two forwards before one backward, so that each group reduces once for both."""
    for step in each_step(net, steps):
        (net(batch(step)).square().mean() + net(batch(step, 1)).square().mean()).backward()


def in_chunks(net: Any, steps: int, *, all_reduce: bool = False) -> None:
    """As torchtitan's ChunkedLossWrapper: a backward of the head for each chunk, the last of which reduces, or all."""
    for step in each_step(net, steps):
        hidden = net(batch(step))
        chunks = [chunk.detach().requires_grad_() for chunk in hidden.chunk(MICROS)]
        for number, chunk in enumerate(chunks):
            net.head.set_requires_gradient_sync(all_reduce or number == MICROS - 1, recurse=False)
            net.head(chunk).square().sum().backward()
        hidden.backward(torch.cat([chunk.grad for chunk in chunks]))


def raises_once(net: Net, steps: int) -> bool:
    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise ValueError("boom")

    plain_steps(net, 1)
    handle = net.layers[1].register_forward_hook(lambda module, inputs, output: Boom.apply(output))
    raised = False
    try:
        net(batch(9, width=net.width)).square().mean().backward()
    except ValueError:
        raised = True
    handle.remove()
    net.reset_iter_state()  # type: ignore[operator]
    net.zero_grad()
    plain_steps(net, steps - 1, 1)
    return raised


# ------------------------------------------------------------------------------------------- models


def divided(factor: float | None, forced: bool) -> Callable[[Net], None]:
    def adjust(net: Net) -> None:
        for module in modules_of(net):
            if factor is not None:
                module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(forced)

    return adjust


def two_layers_together(net: Net, **options: Any) -> None:
    fully_shard([net.layers[0], net.layers[1]], **options)
    fully_shard(net.layers[2], **options)
    fully_shard(net, **options)


class WithoutItsHead(Net):
    """Whose loss calls the head."""

    def forward(self, x: Tensor, side: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def last_layer_with_the_head(net: Net, **options: Any) -> None:
    fully_shard(net.layers[0], **options)
    fully_shard(net.layers[1], **options)
    fully_shard([net.layers[2], net.head], **options)
    fully_shard(net, **options)


without_its_head: dict[str, Any] = {"model": WithoutItsHead, "shard": last_layer_with_the_head}


def checkpointed(net: Net) -> None:
    for index, layer in enumerate(net.layers):
        net.layers[index] = checkpoint_wrapper(layer)


def frozen(net: Net) -> None:
    net.layers[1].requires_grad_(False)
    net.head.bias.requires_grad_(False)


def second_dimension(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else None


def replicated(net: Net, **options: Any) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "other"))["replicate"]
    for part in [*net.layers, net]:
        replicate(part, mesh=mesh)


def beside_tensor_parallelism(net: Net, **options: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    plan = {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()}
    parallelize_module(net.layers, mesh["tensor"], plan)
    each_layer(net, mesh=mesh["replicate", "shard"])


def a_stage() -> Made:
    """One of two different models, each on half of the ranks."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", "replicate", "shard"))
    return Made((33, 17 + dist.get_rank() // 2, 5), mesh=mesh["replicate", "shard"])


def compiled_layers(net: Net) -> None:
    for layer in net.layers:
        layer.compile(backend="eager")


def compiled(net: Net, steps: int) -> None:
    plain_steps(cast(Net, torch.compile(net, backend="eager")), steps)


def two_groups_in_a_module(net: Net, **options: Any) -> None:
    """Matrices have two replicas of two shards, vectors one of four: FSDP reduces these by itself."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    matrices = HSDPMeshInfo(hsdp_mesh(), shard_mesh_dim=1, replicate_mesh_dim=0)
    vectors = FSDPMeshInfo(init_device_mesh("cpu", (4,), mesh_dim_names=("all",)), shard_mesh_dim=0)

    def place(parameter: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(None, matrices if parameter.ndim > 1 else vectors)

    each_layer(net, mesh=init_device_mesh("cpu", (4,)), shard_placement_fn=place)


def matrices_in_bfloat16(net: Net) -> None:
    for layer in net.layers:
        layer[0].weight.grad_dtype = BF16  # type: ignore[index]


def kept_until_backward(net: Net) -> None:
    for module in modules_of(net):
        module.set_reshard_after_backward(False)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODES: dict[str, Callable[[], Outcome]] = {
    "ten steps": lambda: compare(Made(), plain_steps, 10),
    "clip_grad_norm_": lambda: compare(Made(), clipped),
    "parameters without gradient now and then": lambda: compare(Made(), now_and_then, 4),
    "accumulated after every backward": lambda: compare(Made(), accumulate("everything")),
    "accumulated over the shards": lambda: compare(Made(), accumulate("shards only")),
    "accumulated locally": lambda: compare(Made(), accumulate("nothing")),
    "bfloat16, reduced in float32": lambda: compare(Made(options=policy(BF16, FP32)), plain_steps),
    "bfloat16": lambda: compare(Made(options=policy(BF16, None)), plain_steps),
    "bfloat16, reduced in bfloat16": lambda: compare(Made(options=policy(BF16, BF16)), plain_steps),
    "float16": lambda: compare(Made(options=policy(FP16, FP16)), large_losses),
    "partial sums in float32": lambda: compare(Made(options=policy(BF16, FP32)), accumulate("shards only")),
    "partial sums, forced": lambda: compare(Made(adjust=divided(None, True)), accumulate("shards only")),
    "divided by the shards": lambda: compare(Made(adjust=divided(2.0, False)), plain_steps),
    "forced sum": lambda: compare(Made(adjust=divided(None, True)), plain_steps),
    "forced sum, divided by 1": lambda: compare(Made(adjust=divided(1.0, True)), plain_steps),
    "GradScaler with an overflow": lambda: compare(Made(), scaled, 4, scales=True),
    "frozen parameters": lambda: compare(Made(change=frozen), plain_steps),
    "Shard(1)": lambda: compare(Made(EVEN, {"shard_placement_fn": second_dimension}), plain_steps),
    "fully_shard([a, b])": lambda: compare(Made(shard=two_layers_together), plain_steps),
    "activation checkpointing": lambda: compare(Made(change=checkpointed), plain_steps),
    "optimizer in backward": lambda: compare(Made(), in_backward),
    "two forwards, one backward": lambda: compare(Made(), two_uses),
    "chunks that all reduce": lambda: compare(Made(**without_its_head), partial(in_chunks, all_reduce=True)),
    "a loss in chunks": lambda: compare(Made(**without_its_head), in_chunks),
    "no reshard after forward": lambda: compare(Made(options={"reshard_after_forward": False}), plain_steps),
    "reshard to 2": lambda: compare(Made(EVEN, {"reshard_after_forward": 2}), plain_steps),
    "no reshard after backward": lambda: compare(Made(adjust=kept_until_backward), plain_steps),
    "offloaded": lambda: compare(Made(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}), plain_steps),
    "replicate": lambda: compare(Made(shard=replicated), plain_steps),
    "tensor parallelism beside": lambda: compare(Made(EVEN, shard=beside_tensor_parallelism), plain_steps),
    "compiled layers": lambda: compare(Made(change=compiled_layers), plain_steps),
    "compiled": lambda: compare(Made(), compiled),
    "two groups in a module": lambda: compare(Made(shard=two_groups_in_a_module), plain_steps),
    "one replica": lambda: compare(Made(mesh=hsdp_mesh(1, 4)), plain_steps),
    "one shard": lambda: compare(Made(mesh=hsdp_mesh(4, 1)), large_losses),
    "a stage of a pipeline": lambda: compare(a_stage(), plain_steps),
    "a backward that raises": lambda: compare(Made(), raises_once),
    "gradients of two dtypes": lambda: compare(
        Made(change=matrices_in_bfloat16, shard=two_layers_together), large_losses
    ),
    "partial sums in other layouts": lambda: compare(Made(), accumulate_in_other_layouts, 4),
    "finalized by hand": lambda: compare(Made(), finalized_by_hand),
}
NOT_OVERLAPPED = (
    *(() if hasattr(FSDPModule, "finalize_backward") else ("bfloat16",)),  # torch 2.15 reduces it in float32
    *("bfloat16, reduced in bfloat16", "float16"),  # it is cast
    *("forced sum", "partial sums, forced"),  # it is divided afterwards
    *("optimizer in backward", "offloaded"),  # it is read, or copied
)
# What FSDPModule has where torch can do it.
SINCE = {
    "replicate": ("reset_iter_state", "replicate_with_fsdp is of torch 2.10"),
    "a backward that raises": ("reset_iter_state", "reset_iter_state is of 2.13"),
    "a loss in chunks": ("reset_iter_state", "groups of which only a part runs are of 2.13"),
    "chunks that all reduce": ("reset_iter_state", "groups of which only a part runs are of 2.13"),
    "two groups in a module": ("reset_iter_state", "they are of torch 2.12"),
    "gradients of two dtypes": ("finalize_backward", "FSDP2 takes them since 2.15"),
    "partial sums in other layouts": ("finalize_backward", "FSDP2 adds them up since 2.15"),
    "finalized by hand": ("finalize_backward", "finalize_backward is of 2.15"),
}


def skip_where_torch_cannot(mode: str) -> None:
    needed, why = SINCE.get(mode, ("unshard", ""))
    if not hasattr(FSDPModule, needed):
        pytest.skip(why)
    if torch.__version__ < "2.8":
        pytest.skip("stock HSDP takes averages of gloo, which has them since torch 2.8")


# Where more is known of what is sent and not waited for, per step.
SENT = {
    "ten steps": (BUFFERS, BUFFERS),
    "a loss in chunks": (BUFFERS, BUFFERS),
    "chunks that all reduce": (BUFFERS + MICROS - 1, BUFFERS),  # but for the first there is a .grad
    "accumulated over the shards": (BUFFERS, BUFFERS),
    "accumulated locally": (BUFFERS, BUFFERS),
    "accumulated after every backward": (BUFFERS * MICROS, BUFFERS),  # at first there is no .grad yet
    "finalized by hand": (BUFFERS, BUFFERS),
}


def one_mode(rank: int, world_size: int, name: str) -> Outcome:
    return MODES[name]()


@pytest.mark.parametrize("mode", MODES)
def test_mode(mode: str) -> None:
    skip_where_torch_cannot(mode)
    for found in run(one_mode, 4, mode, nodes=NODES):
        assert found["equal"], found
        assert found["moved"], found
        if mode in NOT_OVERLAPPED:
            assert found["overlapped"] == 0, found
        if mode in SENT:
            assert (found["buckets"], found["overlapped"]) == SENT[mode]
            assert found["placements"] == {"(Replicate(), Shard(dim=0))"}  # the user's mesh
        if mode == "finalized by hand":
            assert found["steps"] == 1, found


# ------------------------------------------------------------------------------------------- over all ranks

# How a model is made, and how it is trained.
OVER_ALL_RANKS: dict[str, tuple[dict[str, Any], Callable[..., object]]] = {
    "plain": ({}, plain_steps),
    "accumulation": ({}, accumulate("nothing")),
    "now and then without gradients": ({}, now_and_then),
    "bf16": ({"options": policy(BF16, FP32)}, plain_steps),
    "bf16 reduced": ({"options": policy(BF16, None)}, plain_steps),
    "fp16": ({"options": policy(FP16, FP16)}, plain_steps),
    "kept after forward": ({"options": {"reshard_after_forward": False}}, plain_steps),
    "fewer ranks after forward": ({"options": {"reshard_after_forward": 2}}, plain_steps),
    "two modules in a group": ({"shard": two_layers_together}, plain_steps),
    "recomputed": ({"adjust": checkpointed}, plain_steps),
    "forced sum": ({"adjust": divided(None, True)}, plain_steps),
    "optimizer in backward": ({}, in_backward),
    "chunks that all reduce": (without_its_head, partial(in_chunks, all_reduce=True)),
    "a loss in chunks": (without_its_head, in_chunks),
}
REDUCED = {
    "two modules in a group": 3,
    "chunks that all reduce": 6,
}  # buffers in a step, if not one for each layer and one


def exactly(rank: int, world: int, mode: str) -> list[float]:
    """Return how far exact averages are from stock FSDP2 after some steps."""
    found, (how, loop) = [], OVER_ALL_RANKS[mode]
    made = Made(mesh=over_all_ranks(), **how)
    loop(stock := made(), 3)
    for aggregator in (Flat(), Hierarchical()):
        with attached(model := made(), aggregator) as state:
            loop(model, 3)
            stats = state.stats()
        found.append(differences(stock, model))
        assert stats["buckets"] == 3 * REDUCED.get(mode, BUFFERS)
        assert mode != "optimizer in backward" or stats["buckets_overlapped"] == 0
    return found


@pytest.mark.parametrize("mode", OVER_ALL_RANKS)
@pytest.mark.parametrize("nodes", [(1, 1), NODES])
def test_exact_averages_over_all_ranks_are_those_of_stock_fsdp(nodes: tuple[int, ...], mode: str) -> None:
    skip_where_torch_cannot(mode)
    # Between two ranks the order of a sum does not matter: the same bits. Four are added up in other orders.
    limit = 0.0 if len(nodes) == sum(nodes) else 5e-2 if "16" in mode else 1e-4
    assert max(run(exactly, sum(nodes), mode, nodes=nodes)[0]) <= limit
