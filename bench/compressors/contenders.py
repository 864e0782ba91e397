"""All that is timed by default, and which of torch's hooks each of commopt's presets is held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench.compressors.contender import Contender
from bench.compressors.presets import preset
from bench.compressors.torch_hooks import TORCH_HOOKS
from commopt import ConfigurationError


class Beside(NamedTuple):
    """A hook of torch that does what a preset does.

    asked: how many times as fast as the hook the preset has to be on a GPU.
    """

    hook: str
    asked: float | None = None


CONTENDERS: dict[str, Beside | None] = {
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
    "powersgd": Beside("torch.powerSGD:r=4", asked=4.0),
    "powersgd:alternating=True": Beside("torch.powerSGD:r=4"),
    "hierarchical_powersgd": Beside("torch.powerSGD:r=4"),
    "torch.powerSGD:r=32": None,
    "torch.powerSGD:r=32:batched": None,
    "powersgd:matrix_rank=32": Beside("torch.powerSGD:r=32"),
}


def in_rounds(contenders: Sequence[Contender]) -> list[list[Contender]]:
    """Return those of whom something is asked, with the hooks they are held against, and then the others.

    A run that is killed in the second round has what is asked, of all models.
    """
    asked = {name for preset, beside in CONTENDERS.items() if beside and beside.asked for name in (preset, beside.hook)}
    first = [each for each in contenders if each.name in asked]
    others = [each for each in contenders if each.name not in asked]
    return [each for each in (first, others) if each]


def contender(name: str) -> Contender:
    """Return one of torch's hooks, or the preset that `name` describes; raises ConfigurationError for anything else."""
    if name in TORCH_HOOKS:
        return TORCH_HOOKS[name]
    if name.startswith("torch."):
        raise ConfigurationError(f"{name!r} is unknown; of torch's hooks there are {', '.join(TORCH_HOOKS)}")
    return preset(name)
