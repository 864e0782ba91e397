# SPDX-License-Identifier: Apache-2.0
"""torch's communication hooks, called as DDP calls them, and which of them each preset is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks

from bench.compressors.methods import Bucket, Gradients, Method, Start, preset
from bench.timing import times_s
from commopt import ConfigurationError
from commopt.feedback import Layout

_FLOAT_NBYTES = 4
_CHANNEL_NUMEL = 512  # the default of quantization_perchannel_hook
_DENSE_STEPS = 2  # the fewest that PowerSGDState allows with error feedback
_EMPTY_CALLS = 50

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]


@contextmanager
def world_of_one(device: torch.device) -> Iterator[None]:
    """Be the only rank of a world: NCCL's for a GPU, gloo's for a CPU."""
    if device.type == "cuda":
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def empty_all_reduce_us(device: torch.device) -> float:
    """Return what one element takes through an all_reduce of this world until the host knows that it is done."""
    element = torch.zeros(1, device=device)

    def call() -> None:
        dist.all_reduce(element, async_op=True).get_future().wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    (taken_s,) = times_s([call], _EMPTY_CALLS)
    return 1e6 * median(taken_s)


def _entering(hook: Hook, state: Callable[[], object]) -> Callable[[Gradients], Start]:
    def enter(gradients: Gradients) -> Start:
        buckets, own = [Bucket(gradients, number) for number in range(len(gradients.buffers))], state()
        return lambda number: hook(own, buckets[number]).wait

    return enter


def _stateless(name: str, hook: Hook, bucket_nbytes: Callable[[int], int]) -> Method:
    """Return a hook whose only state is the process group; bucket_nbytes: payload by the elements of a bucket."""
    return Method(
        name,
        _entering(hook, lambda: None),
        lambda gradients: sum(bucket_nbytes(layout.numel) for layout in gradients.layouts),
    )


def _powersgd(matrix_rank: int, batched: bool) -> Method:
    def state() -> powerSGD_hook.PowerSGDState:
        return powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=matrix_rank,
            start_powerSGD_iter=_DENSE_STEPS,
            batch_tensors_with_same_shape=batched,
        )

    return Method(
        f"torch.powerSGD:r={matrix_rank}{':batched' if batched else ''}",
        _entering(powerSGD_hook.powerSGD_hook, state),
        lambda gradients: sum(_powersgd_nbytes(layout, matrix_rank) for layout in gradients.layouts),
        _DENSE_STEPS,
    )


def _powersgd_nbytes(layout: Layout, matrix_rank: int) -> int:
    """Return the bytes of both factors of each matrix, and of what would not shrink to half."""
    sent = 0
    for piece in layout.pieces:
        rows = piece.shape[0]
        cols = piece.numel // rows
        factors = (rows + cols) * min(rows, cols, matrix_rank)
        sent += factors if 2 * factors < piece.numel else piece.numel
    return _FLOAT_NBYTES * sent


def _perchannel_nbytes(numel: int) -> int:
    """Return the bytes of whole channels, one more than needed where there is no rest, each with scale and zero."""
    channels = numel // _CHANNEL_NUMEL + 1
    return channels * (_CHANNEL_NUMEL + 2 * _FLOAT_NBYTES)


_ALL = (
    _stateless("torch.allreduce", default_hooks.allreduce_hook, lambda numel: _FLOAT_NBYTES * numel),
    _stateless("torch.fp16", default_hooks.fp16_compress_hook, lambda numel: 2 * numel),
    _stateless("torch.bf16", default_hooks.bf16_compress_hook, lambda numel: 2 * numel),
    _stateless(
        "torch.pertensor", quantization_hooks.quantization_pertensor_hook, lambda numel: numel + 2 * _FLOAT_NBYTES
    ),
    _stateless("torch.perchannel", quantization_hooks.quantization_perchannel_hook, _perchannel_nbytes),
    *(_powersgd(matrix_rank, batched) for matrix_rank in (4, 32) for batched in (False, True)),
)
TORCH_HOOKS: dict[str, Method] = {method.name: method for method in _ALL}


class Beside(NamedTuple):
    """A hook of torch that does what a preset does.

    target: how many times as fast as the hook the preset has to be on a GPU.
    """

    hook: str
    target: float | None = None


METHODS: dict[str, Beside | None] = {
    "torch.allreduce": None,
    "flat": Beside("torch.allreduce"),
    "hierarchical": Beside("torch.allreduce"),
    "torch.fp16": None,
    "torch.bf16": None,
    "hierarchical_bf16": Beside("torch.bf16"),
    "torch.pertensor": None,
    "torch.perchannel": None,
    "quantized": Beside("torch.pertensor"),
    "quantized:bits=4": Beside("torch.pertensor"),
    "hierarchical_quantized": Beside("torch.pertensor"),
    "onebit": None,
    "hierarchical_onebit": None,
    "dgc": None,
    "hierarchical_dgc": None,
    "torch.powerSGD:r=4": None,
    "torch.powerSGD:r=4:batched": None,
    "powersgd": Beside("torch.powerSGD:r=4", target=4.0),
    "hierarchical_powersgd": Beside("torch.powerSGD:r=4"),
    "torch.powerSGD:r=32": None,
    "torch.powerSGD:r=32:batched": None,
    "powersgd:matrix_rank=32": Beside("torch.powerSGD:r=32"),
}


def in_rounds(methods: Sequence[Method]) -> list[list[Method]]:
    """Return those of whom there is a target, with the hooks they are held against, and then the others.

    A run that is killed in the second round has what has a target, of all models.
    """
    target = {name for preset, beside in METHODS.items() if beside and beside.target for name in (preset, beside.hook)}
    first = [each for each in methods if each.name in target]
    others = [each for each in methods if each.name not in target]
    return [each for each in (first, others) if each]


def method_of(name: str) -> Method:
    """Return one of torch's hooks, or the preset that `name` describes; raises ConfigurationError for anything else."""
    if name in TORCH_HOOKS:
        return TORCH_HOOKS[name]
    if name.startswith("torch."):
        raise ConfigurationError(f"{name!r} is unknown; of torch's hooks there are {', '.join(TORCH_HOOKS)}")
    return preset(name)
