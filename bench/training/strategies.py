# SPDX-License-Identifier: Apache-2.0
"""Who takes part: stock DDP, torch's own hooks, PowerSGD after backward, and every preset; and the command line."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import bench.training
import commopt
from bench.models import Trainable, add_options
from bench.vision import check_pixels
from commopt.command_line import CommandParser, number, output_file, whole
from examples.train_gpt import PARALLEL, STRATEGIES, choose_averaging, strategy_name


class LowRankAverage:
    """Averages the gradients of some parameters over all ranks; keeps right factors and residuals between calls.

    In the first `dense_steps` steps everything is averaged as it is, as commopt's and torch's PowerSGD begin too.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], matrix_rank: int, dense_steps: int = 0) -> None:
        self.matrix_rank = matrix_rank
        self.dense_steps = dense_steps
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        draws = torch.Generator().manual_seed(0)  # the same on every rank: all must begin with the same factors
        self.factors: dict[nn.Parameter, Tensor] = {}
        self.residuals: dict[nn.Parameter, Tensor] = {}
        for parameter in self.parameters:
            matrix = parameter.detach().flatten(1) if parameter.dim() > 1 else None
            if matrix is not None and self._pays(*matrix.shape):
                factor = torch.randn(matrix.shape[1], matrix_rank, generator=draws)
                self.factors[parameter] = factor.to(matrix)
                self.residuals[parameter] = torch.zeros_like(matrix)

    def __call__(self) -> None:
        """Put the average in the place of every gradient; collective."""
        if self.dense_steps:
            self.dense_steps -= 1
            _average([p.grad for p in self.parameters if p.grad is not None])
            return
        dense = [p.grad for p in self.parameters if p.grad is not None and p not in self.factors]
        _average(dense)
        low_rank = [p for p in self.factors if p.grad is not None]
        matrices = [_matrix(p) + self.residuals[p] for p in low_rank]
        lefts = [matrix @ self.factors[p] for p, matrix in zip(low_rank, matrices, strict=True)]
        _average(lefts)
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.T @ left for matrix, left in zip(matrices, lefts, strict=True)]
        _average(rights)
        for parameter, matrix, left, right in zip(low_rank, matrices, lefts, rights, strict=True):
            approximation = left @ right.T
            self.factors[parameter] = right
            self.residuals[parameter] = matrix - approximation
            _matrix(parameter).copy_(approximation)

    def _pays(self, rows: int, cols: int) -> bool:
        return 2 * self.matrix_rank * (rows + cols) <= rows * cols


class Unoverlapped:
    """A Trainable whose gradients are averaged between backward and the optimizer's step, and not before."""

    def __init__(self, training: Trainable, average: LowRankAverage) -> None:
        self._training = training
        self.model = training.model
        self.optimizer = training.optimizer
        self.device = training.device
        self.evaluation = training.evaluation
        self.follow = training.follow
        self.optimizer.register_step_pre_hook(lambda optimizer, arguments, options: average())

    def step(self) -> Tensor:
        """Do one step; gradients are averaged before the optimizer's."""
        with _ddp_of(self).no_sync():
            return self._training.step()

    def held_out_loss(self) -> float:
        """Return the loss of the training inside."""
        return self._training.held_out_loss()


def _matrix(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.view(parameter.shape[0], -1)


def _average(tensors: list[Tensor]) -> None:
    """Average the tensors over all ranks in one message."""
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))


# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.


MATRIX_RANK = 4  # of all PowerSGD that is not commopt's: the default of commopt's
AUTO = "auto"
_DENSE_STEPS = 2  # commopt's default; torch's hook needs as many before DDP's buckets stay as they are
_ONE_BUCKET_MB = 2**20

Entry = Callable[[Trainable], Trainable]


def _ddp_of(training: Trainable) -> DistributedDataParallel:
    assert isinstance(training.model, DistributedDataParallel)  # as require_known made sure
    return training.model


def torch_fp16(training: Trainable) -> Trainable:
    """Put torch's fp16_compress_hook on the model."""
    _ddp_of(training).register_comm_hook(None, default_hooks.fp16_compress_hook)
    return training


def bf16_hook(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Call torch's bf16_compress_hook, which DDP refuses by its name on gloo, though gloo reduces bfloat16 well."""
    return default_hooks.bf16_compress_hook(state, bucket)  # type: ignore[arg-type]  # None is the world


def torch_bf16(training: Trainable) -> Trainable:
    """Put torch's bf16_compress_hook on the model."""
    _ddp_of(training).register_comm_hook(None, bf16_hook)
    return training


def torch_powersgd(training: Trainable) -> Trainable:
    """Put torch's powerSGD_hook on the model; over gloo wrapped anew so that all gradients are one bucket.

    With more the hook hangs there: it starts collectives of several buckets from gloo's threads, in any order.
    """
    ddp = _ddp_of(training)
    if dist.get_backend() == "gloo":
        ddp = DistributedDataParallel(ddp.module, device_ids=ddp.device_ids, bucket_cap_mb=_ONE_BUCKET_MB)
    state = PowerSGDState(None, matrix_approximation_rank=MATRIX_RANK, start_powerSGD_iter=_DENSE_STEPS)
    ddp.register_comm_hook(state, powerSGD_hook)
    training.model = ddp
    return training


def unoverlapped_powersgd(training: Trainable) -> Trainable:
    """Average low-rank factors of all gradients once backward has ended."""
    return Unoverlapped(training, LowRankAverage(_ddp_of(training).module.parameters(), MATRIX_RANK, _DENSE_STEPS))


OTHERS: Mapping[str, Entry] = {
    entry.__name__: entry for entry in (torch_fp16, torch_bf16, torch_powersgd, unoverlapped_powersgd)
}
NOTES: Mapping[str, str] = {
    "torch_powersgd": f"torch_powersgd: rank {MATRIX_RANK} after {_DENSE_STEPS} dense steps; over gloo all gradients "
    f"in one bucket, since torch's hook hangs there with more than one",
    "unoverlapped_powersgd": f"unoverlapped_powersgd: rank {MATRIX_RANK}, plain torch after backward has ended, "
    f"{_DENSE_STEPS} dense steps first",
}
WEIGHTS: Mapping[str, commopt.Weights] = {
    "weights8": commopt.Weights(commopt.Quantize(bits=8), second_copy=True),
    "weights4": commopt.Weights(commopt.Quantize(bits=4), second_copy=True, difference=True),
    "weights_exact": commopt.Weights(exact=True),
}
"""What may follow a strategy of --parallel fsdp after a plus sign."""

KNOWN = (*STRATEGIES, *OTHERS)


def enter(training: Trainable, strategy: str, plan: str | None) -> tuple[Trainable, commopt.CommState | None]:
    """Return the training with `strategy` in it, and the state of commopt's hook if it is one of commopt's.

    With adam= it has taken the hook's optimizer.
    plan: of DDP's buckets, for presets, None for their own default; what tunes itself chooses its own. Collective.
    """
    if strategy in OTHERS:
        return OTHERS[strategy](training), None
    name, weights = _and_weights(strategy)
    options: dict[str, Any] = {} if plan is None or name.partition(":")[0] == AUTO else {"plan": plan}
    if weights:
        options["weights"] = WEIGHTS[weights]
    state = choose_averaging(training.model, name, **options)
    training.follow(state)
    return training, state


def require_known(strategy: str, parallel: str = "ddp") -> None:
    """Raise ValueError, with what is known, unless `strategy` can be entered."""
    name, weights = _and_weights(strategy)
    try:
        if name not in OTHERS:
            strategy_name(name)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"strategy {strategy!r} is unknown; known: {', '.join(KNOWN)} ({error})") from error
    if (name in OTHERS and parallel != "ddp") or (name in PARALLEL and name != parallel):
        raise ValueError(f"strategy {strategy!r} is not for --parallel {parallel}; torch's own is {parallel!r}")
    if weights not in ("", *WEIGHTS) or (weights and parallel != "fsdp"):
        raise ValueError(f"strategy {strategy!r}: only --parallel fsdp sends weights; + one of {', '.join(WEIGHTS)}")


def _and_weights(strategy: str) -> tuple[str, str]:
    """Return the parts of "flat+weights8", the second of which may be empty; "auto:allow=onebit+dgc" is one."""
    name, plus, weights = strategy.rpartition("+")
    return (name, weights) if plus and weights.startswith("weights") else (strategy, "")


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


DEFAULT_STRATEGIES = (
    "ddp",
    "hierarchical",
    "hierarchical_bf16",
    "hierarchical_quantized",
    "hierarchical_quantized:bits=4",
    "hierarchical_onebit",
    "hierarchical_dgc:density=0.01",
    "hierarchical_powersgd",
)


SHARDED_STRATEGIES = {
    "hsdp": ("hsdp", "flat", *DEFAULT_STRATEGIES[2:5], DEFAULT_STRATEGIES[-1]),
    "fsdp": (
        "fsdp",
        *DEFAULT_STRATEGIES[1:4],
        "hierarchical_quantized+weights8",
        "hierarchical_quantized:bits=4+weights4",
    ),
}


def add_strategies(parser: argparse.ArgumentParser, default: tuple[str, ...]) -> None:
    """Add what chooses the contenders."""
    parser.add_argument(
        "--strategies",
        type=split_strategies,
        default=list(default),
        metavar="NAME[:OPTION=VALUE][,NAME...]",
        help=f"of {', '.join(KNOWN)}; with --parallel fsdp and + {' or + '.join(WEIGHTS)} behind it weights are "
        f"compressed too (default: {','.join(default)})",
    )


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add what chooses the buckets."""
    parser.add_argument(
        "--plan",
        choices=("ddp", "adaptive"),
        default="ddp",
        help="of the buckets: DDP's own, so that strategies alone differ (default), or adaptive",
    )


def parse_options() -> argparse.Namespace:
    """Read the command line; a wrong one ends here, before anything is started."""
    parser = CommandParser(prog="python -m bench.training", description=(bench.training.__doc__ or "").splitlines()[0])
    add_strategies(parser, DEFAULT_STRATEGIES)
    parser.add_argument("--seconds", type=number(), default=25.0, help="for each strategy (default 25)")
    what = "in which each strategy has its seconds, so that a machine's speed changes for all (default 1)"
    parser.add_argument("--turns", type=whole(1), default=1, help=what)
    parser.add_argument("--look-every", type=number(), default=5.0, metavar="S", help="evaluate so often (default 5 s)")
    parser.add_argument("--target-loss", type=number(), metavar="X", help="report the seconds to this held-out loss")
    add_plan(parser)
    what = "steps without communication, before, between and after strategies (default 60)"
    parser.add_argument("--noop-steps", type=whole(1), default=60, help=what)
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write JSON lines: the environment, then strategies"
    )
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="draw a picture (PNG, SVG, PDF)")
    add_options(parser)
    options = parser.parse_args()
    if options.parallel != "ddp" and options.strategies == list(DEFAULT_STRATEGIES):
        options.strategies = list(SHARDED_STRATEGIES[options.parallel])
    try:
        if options.parallel != "ddp" and options.model != "gpt":
            raise ValueError(f"--parallel {options.parallel} trains --model gpt, not {options.model}")
        if options.model == "swin-t":
            check_pixels(options.pixels)
        for name in options.strategies:
            require_known(name, options.parallel)
    except ValueError as error:
        parser.error(str(error))
    if options.plot and not find_spec("matplotlib"):
        parser.error("--plot needs matplotlib: pip install matplotlib, or leave --plot out")
    return options
