"""What DDP calls for every bucket: `hook`, or a preset, which is a recipe for an aggregator at once."""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the types themselves.

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.aggregate import Aggregator, Hierarchical
from commopt.errors import ConfigurationError
from commopt.hooks.state import HookState


class Preset:
    """A hook that torch's DDP accepts as it is, made from a function that builds its aggregator.

    Pickled by name, so that a saved DDP model finds it again.
    """

    def __init__(self, recipe: Callable[..., Aggregator]) -> None:
        # DDP reads a hook's __name__, __qualname__ and signature; the latter must stay that of __call__.
        update_wrapper(self, recipe)
        vars(self).pop("__wrapped__")
        self._recipe = recipe
        self.name = recipe.__name__

    def __call__(self, state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average `bucket` with this preset's aggregator, unless DDP's `state` says otherwise."""
        _require_call(state, bucket, f"commopt.{self.name}")
        if state.decided_by != self.name:
            state.decide(self.build(), self.name)
        return state.reduce(bucket)

    def build(self, **options: Any) -> Aggregator:
        """Return the aggregator, with the preset's own options.

        Raises ConfigurationError for an option it does not have.
        """
        known = inspect.signature(self._recipe).parameters
        for name, value in options.items():
            if name not in known:
                accepted = f"it takes {', '.join(known)}" if known else "it takes none"
                raise ConfigurationError(f"preset {self.name} has no option {name}={value!r}; {accepted}")
        return self._recipe(**options)

    def __reduce__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"commopt.{self.name}"


def hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average `bucket` with the aggregator of `state`, Hierarchical() when it has none."""
    _require_call(state, bucket, "commopt.hook")
    if state.aggregator is None:
        state.decide(Hierarchical(), "hook")
    return state.reduce(bucket)


def _require_call(state: object, bucket: object, name: str) -> None:
    if not isinstance(state, HookState):
        raise ConfigurationError(
            f"{name} was registered with state={state!r}; it needs a HookState: "
            f"ddp.register_comm_hook(commopt.HookState(), {name})"
        )
    if not isinstance(bucket, dist.GradBucket):
        raise ConfigurationError(
            f"{name} got a {type(bucket).__name__} instead of a GradBucket, as torch.compile's python reducer hands "
            f"over; set torch._dynamo.config.optimize_ddp = 'ddp_optimizer' (or False)"
        )
