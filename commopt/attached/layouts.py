# SPDX-License-Identifier: Apache-2.0
"""The parameters in a bucket, by name."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from glob import escape
from itertools import count
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from commopt.aggregate import Aggregator
from commopt.errors import CommoptError, ConfigurationError
from commopt.feedback import Layout, matches

_log = logging.getLogger("commopt")

T = TypeVar("T")

_COMPILED = "_orig_mod"  # torch.compile's name of the module inside its own


class Layouts:
    """Layouts of DDP's buckets.

    Parameters have their names in `module`, or "parameter N" in the order in which DDP shows them. A parameter of a
    compiled module has its name in the plain one, a shared parameter the first of its names.

    numels: elements of each parameter, by name; with those of a checkpoint that DDP is yet to show.
    parameters: by name.
    frozen: elements of those that trained nowhere when this was made. DDP shows them all the same if it was made
        before, so a checkpoint may have them or not.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self.numels: dict[str, int] = {}
        self.parameters: dict[str, Tensor] = {}
        self.frozen: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._names_of_frozen: dict[int, str] = {}
        self._called: dict[str, str | None] = {}  # by any name in the module; None where DDP averages nothing
        self._numbers = count()
        self._known: dict[tuple[int, ...], Layout] = {}
        self._expected: Mapping[str, int] | None = None
        if module is not None:
            ignored = _ignored_by_ddp(module)
            for full_name, parameter in module.named_parameters(remove_duplicate=False):
                name = ".".join(part for part in full_name.split(".") if part != _COMPILED)
                if parameter.requires_grad and parameter not in ignored and id(parameter) not in self._names:
                    self._name(parameter, name)
                elif not parameter.requires_grad and id(parameter) not in self._names_of_frozen:
                    self._names_of_frozen[id(parameter)] = name
                    self.frozen[name] = parameter.numel()
                self._called[name] = self._called[full_name] = self._names.get(id(parameter))

    def of(self, bucket: dist.GradBucket) -> Layout:
        """Return the layout of `bucket`."""
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        if key not in self._known:
            self._known[key] = self._describe(bucket, parameters)
        return self._known[key]

    def resolved(self, aggregator: T) -> T:
        """Return `aggregator`, or anything with `dense`, whose patterns match a shared parameter by any of its names.

        Patterns that match nothing are warned of, on every rank: not all launchers show the first one's log.
        """
        changes: dict[str, Any] = {}
        for name in getattr(aggregator, "__dataclass_fields__", ()):
            value = getattr(aggregator, name)
            if isinstance(value, Aggregator):
                changes[name] = self.resolved(value)
            elif name == "dense" and value:
                changes[name] = value + self._further_patterns(value)
                self._warn_of_unmatched(value)
        differs = any(value != getattr(aggregator, name) for name, value in changes.items())
        return replace(aggregator, **changes) if differs else aggregator  # type: ignore[type-var]

    def also_called(self, name: str, called: str) -> None:
        """Let patterns that match a parameter's `name` mean `called`, under which a part of it is sent."""
        self._called[name] = called

    def _further_patterns(self, patterns: tuple[str, ...]) -> tuple[str, ...]:
        meant = dict.fromkeys(called for name, called in self._called.items() if called and matches(name, patterns))
        return tuple(escape(called) for called in meant if not matches(called, patterns))

    def _warn_of_unmatched(self, patterns: tuple[str, ...]) -> None:
        for pattern in patterns:
            if matches("parameter 0", (pattern,)):
                continue
            if not self._called:
                _log.warning(
                    "dense=%r: the names of the parameters are unknown, so it may match none; use commopt.attach, or "
                    "HookState(..., module=model)",
                    pattern,
                )
            elif not any(matches(name, (pattern,)) for name in self._called):
                near = get_close_matches(pattern, self._called, cutoff=0.4) or list(self._called)[:3]
                _log.warning("dense=%r matches no parameter; there are for example %s", pattern, ", ".join(near))

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Forget parameters that are averaged by others."""
        for parameter in parameters:
            name = self._names.pop(id(parameter), None)
            if name is not None:
                del self.parameters[name], self.numels[name]

    def require_same(self, saved: Mapping[str, int]) -> None:
        """Raise ConfigurationError if a checkpoint is of other parameters than those seen so far, frozen ones apart."""
        own = {name: each.numel() for name, each in self.parameters.items()}
        if saved and own:
            require_same_parameters({**self.frozen, **saved}, {**self.frozen, **own})

    def expect(self, saved: Mapping[str, int]) -> None:
        """Note the parameters of a checkpoint, for when the model shows its own."""
        self._expected = dict(saved)
        self._count(self._expected)

    def require_expected(self, *, residuals: bool) -> None:
        """Forget a checkpoint's parameters; call it when all have been seen. residuals: whether any are kept of them.

        Raises ConfigurationError if they are and these are others.
        """
        if self._expected is not None:
            expected, self._expected = self._expected, None
            if residuals:
                self.require_same(expected)
            else:
                self._count({})

    def _count(self, saved: Mapping[str, int]) -> None:
        """Set `numels` to those seen so far and to those of a checkpoint."""
        own = {name: each.numel() for name, each in self.parameters.items()}
        self.numels.clear()
        self.numels.update({**own, **saved})

    def _describe(self, bucket: dist.GradBucket, parameters: Sequence[Tensor]) -> Layout:
        for parameter in parameters:
            if id(parameter) not in self._names:
                self._name(parameter, self._names_of_frozen.get(id(parameter)) or f"parameter {next(self._numbers)}")
        layout = Layout.of_gradients({self._names[id(parameter)]: parameter for parameter in parameters})
        if layout.numel != bucket.buffer().numel():
            raise CommoptError(
                f"DDP's bucket {bucket.index()} holds {bucket.buffer().numel()} elements, its parameters "
                f"{layout.numel}; report this torch version"
            )
        return layout

    def _name(self, parameter: Tensor, name: str) -> None:
        self.parameters[name] = parameter  # which also keeps the ids unique
        self._names[id(parameter)] = name
        self.numels[name] = parameter.numel()


def _ignored_by_ddp(module: nn.Module) -> set[Tensor]:
    """Return the parameters that DDP ignores on request, by the names it gives them (".weight" of the root)."""
    names = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    owners = module.named_modules() if names else ()
    return {
        parameter
        for prefix, owner in owners
        for name, parameter in owner.named_parameters(recurse=False)
        if f"{prefix}.{name}" in names
    }


def require_same_parameters(saved: Mapping[str, int], current: Mapping[str, int]) -> None:
    """Raise ConfigurationError that names the parameters which differ. Without `current`, nothing is compared."""
    if not current or saved == current:
        return
    differences = {
        "only in the checkpoint": sorted(saved.keys() - current.keys()),
        "only in the model": sorted(current.keys() - saved.keys()),
        "of another size": [
            f"{name} ({saved[name]} elements, now {current[name]})"
            for name in sorted(saved.keys() & current.keys())
            if saved[name] != current[name]
        ],
    }
    listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in differences.items() if names)
    raise ConfigurationError(
        f"the checkpoint's residuals belong to another model; {listed}. Load it into the model it was made with, or "
        f"start without it"
    )
