"""Who takes part: stock DDP, torch's own hooks, PowerSGD without overlap, and every preset of commopt."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

import argparse
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import commopt
from bench.models import Trainable
from bench.training.unoverlapped import LowRankAverage, Unoverlapped
from examples.train_gpt import STRATEGIES, choose_averaging, strategy_name

MATRIX_RANK = 4  # of all PowerSGD that is not commopt's: the default of commopt's
AUTO = "auto"
_DENSE_STEPS = 2  # torch's hook needs as many before DDP's buckets stay as they are
_ONE_BUCKET_MB = 2**20

Entry = Callable[[Trainable], Trainable]


def torch_fp16(training: Trainable) -> Trainable:
    """Put torch's fp16_compress_hook on the model."""
    training.ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return training


def bf16_hook(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Call torch's bf16_compress_hook, which DDP refuses by its name on gloo, though gloo reduces bfloat16 well."""
    return default_hooks.bf16_compress_hook(state, bucket)  # type: ignore[arg-type]  # None is the world


def torch_bf16(training: Trainable) -> Trainable:
    """Put torch's bf16_compress_hook on the model."""
    training.ddp.register_comm_hook(None, bf16_hook)
    return training


def torch_powersgd(training: Trainable) -> Trainable:
    """Put torch's powerSGD_hook on the model, wrapped anew so that all gradients are one bucket.

    With more the hook hangs on gloo: it starts collectives of several buckets from gloo's threads, in any order.
    """
    old = training.ddp
    training.ddp = DistributedDataParallel(old.module, device_ids=old.device_ids, bucket_cap_mb=_ONE_BUCKET_MB)
    state = PowerSGDState(None, matrix_approximation_rank=MATRIX_RANK, start_powerSGD_iter=_DENSE_STEPS)
    training.ddp.register_comm_hook(state, powerSGD_hook)
    return training


def unoverlapped_powersgd(training: Trainable) -> Trainable:
    """Average low-rank factors of all gradients once backward has ended."""
    return Unoverlapped(training, LowRankAverage(training.ddp.module.parameters(), MATRIX_RANK))


OTHERS: Mapping[str, Entry] = {
    entry.__name__: entry for entry in (torch_fp16, torch_bf16, torch_powersgd, unoverlapped_powersgd)
}
NOTES: Mapping[str, str] = {
    "torch_powersgd": f"torch_powersgd: rank {MATRIX_RANK}, all gradients in one bucket after {_DENSE_STEPS} dense "
    f"steps, since torch's hook hangs on gloo with more than one",
    "unoverlapped_powersgd": f"unoverlapped_powersgd: rank {MATRIX_RANK}, plain torch after backward has ended",
}
KNOWN = (*STRATEGIES, *OTHERS)


def enter(training: Trainable, strategy: str, plan: str) -> tuple[Trainable, commopt.HookState | None]:
    """Return the training with `strategy` in it, and the state of commopt's hook if it is one of commopt's.

    plan: of the buckets, for presets; what tunes itself chooses its own. Collective.
    """
    if strategy in OTHERS:
        return OTHERS[strategy](training), None
    options = {} if strategy.partition(":")[0] == AUTO else {"plan": plan}
    return training, choose_averaging(training.ddp, strategy, **options)


def require_known(strategy: str) -> None:
    """Raise ValueError, with all that is known, unless `strategy` can be entered."""
    try:
        strategy in OTHERS or strategy_name(strategy)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"strategy {strategy!r} is unknown; known: {', '.join(KNOWN)} ({error})") from error


def split_strategies(text: str) -> list[str]:
    """Return the names in "ddp,auto:allow=('lossless','quantized')": commas inside of brackets belong to a name."""
    names, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and not depth:
            names.append("")
        else:
            names[-1] += character
    return names
