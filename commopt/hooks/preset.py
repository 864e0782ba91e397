"""What DDP calls for every bucket: `hook`, or a preset, which is a recipe for an aggregator at once."""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the types themselves.

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import update_wrapper
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.aggregate import Aggregator, Hierarchical
from commopt.errors import ConfigurationError
from commopt.hooks.state import HookState

STATE_OPTIONS = frozenset(inspect.signature(HookState).parameters) - {"aggregator", "module"}


class Preset:
    """A hook that torch's DDP accepts as it is, made from a function that builds its aggregator.

    Called with options, or with nothing, it returns that aggregator: `commopt.hierarchical_powersgd(matrix_rank=8)`.
    Pickled by name, so that a saved DDP model finds it again.
    """

    def __init__(self, recipe: Callable[..., Aggregator]) -> None:
        # DDP reads a hook's __name__, __qualname__ and signature.
        update_wrapper(self, recipe)
        vars(self).pop("__wrapped__")
        self.__signature__ = inspect.signature(hook)
        self._recipe = recipe
        self.name = recipe.__name__

    @overload
    def __call__(self, state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]: ...
    @overload
    def __call__(self, **options: Any) -> Aggregator: ...
    def __call__(self, *call: Any, **options: Any) -> Any:
        """Average a bucket with this preset's aggregator, unless DDP's state says otherwise; or build the aggregator.

        Raises ConfigurationError for an option it does not have, or that has no name.
        """
        if not call and not options.keys() & {"state", "bucket"}:
            return self.build(**options)
        if len(call) + len(options) != 2:
            raise ConfigurationError(
                f"{self!r} got {', '.join(map(repr, call))}; it takes options by name only: {self._takes()}"
            )
        return self._reduce(*call, **options)

    def _reduce(self, state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Do what DDP asks for."""
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
            if name in STATE_OPTIONS:
                raise ConfigurationError(
                    f"{name}={value!r} is no option of the preset {self.name} but of attach and HookState: pass it "
                    f"there, commopt.attach(ddp, {self!r}, {name}={value!r}), or to commopt run as "
                    f"--option {name}={value}"
                )
            if name not in known:
                near = get_close_matches(name, [*known, *STATE_OPTIONS], n=1, cutoff=0.5)
                meant = f"; did you mean {near[0]}?" if near else ";"
                raise ConfigurationError(
                    f"preset {self.name} has no option {name}={value!r}{meant} it takes {self._takes()}, and attach "
                    f"takes {', '.join(sorted(STATE_OPTIONS))} too"
                )
        return self._recipe(**options)

    def _takes(self) -> str:
        return ", ".join(inspect.signature(self._recipe).parameters) or "none"

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
