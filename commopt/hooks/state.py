# SPDX-License-Identifier: Apache-2.0
"""HookState, the users' handle of a registration with DDP: CommState with its options and its plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from commopt.aggregate import Aggregator
from commopt.attached.checks import require_supported_parameters
from commopt.attached.comm_state import CommState
from commopt.attached.options import AttachOptions, shows_options
from commopt.errors import ConfigurationError
from commopt.hooks.buckets import DDPRegistration
from commopt.schedule import Decision, Plan, Tuned


class HookState(CommState):
    """State of one DDP registration; collective over `process_group`: all its ranks must create it.

    Made before init_process_group(), it joins the others at the first bucket, over the world, or when it is registered
    with commopt's DistributedDataParallel, over that model's group.

    aggregator: averages the buckets; None leaves it to the preset that the state is registered with.
    module: the model, for parameter names; its parameters are checked here. Without it residuals are kept, and saved,
        under the numbers in which DDP first shows the parameters.

    Raises ConfigurationError, UnsupportedTensorError, and MismatchError on every rank when ranks disagree.
    A pickle holds the aggregator and the options, but for process_group and scaler: groups are made again at the first
    bucket, over the world, and `scaler` must be assigned again. Residuals are each rank's own and a pickle is usually
    one rank's: save them with state_dict().
    """

    _registration: DDPRegistration

    @shows_options("ddp")
    def __init__(
        self,
        aggregator: Aggregator | None = None,
        process_group: Any = None,
        *,
        module: nn.Module | None = None,
        **options: Any,
    ) -> None:
        given, kept, problem = AttachOptions(process_group, **options), AttachOptions(), None
        try:  # a mistake of one rank, as a file that it lacks, is raised on all of them
            _require_arguments(aggregator, module)
            kept = given.checked("ddp")
        except Exception as error:
            aggregator, module, problem = None, None, error
        self._registration = DDPRegistration(kept, aggregator, module)
        if process_group is not None or dist.is_initialized():
            self._registration.join(process_group, problem)
        elif problem is not None:
            raise problem

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self._registration.options.portable(), "aggregator": self.aggregator}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self._registration = DDPRegistration(saved["options"], saved["aggregator"], None)

    def set_module(self, module: nn.Module) -> None:
        """Take the names of the parameters from the module inside a DDP model; for one that is unpickled."""
        before = self._registration
        options = replace(before.options, scaler=before.scaler)
        self._registration = DDPRegistration(options, before.aggregator, module)
        if before.controller.frozen:
            self.freeze()

    def stats(self) -> dict[str, Any]:
        """Return the figures so far, as CommState.stats, and plan_changes.

        With "auto" also steps_behind: how far the model is behind exact averages, in norms of a gradient.
        """
        registration = self._registration
        more: dict[str, Any] = {"plan_changes": registration.controller.changes}
        if registration.exact_sample is not None:
            more["steps_behind"] = registration.exact_sample.steps_behind()
        return {**super().stats(), **more}

    # ------------------------------------------------------------------------------------- plans

    @property
    def plan(self) -> Plan | None:
        """What is followed now, None while DDP's own buckets are; `to_json()` saves it for another run."""
        return self._registration.controller.plan

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What was decided about the plan so far, and why."""
        return tuple(self._registration.controller.decisions)

    @property
    def tuned(self) -> Tuned | None:
        """What tuning has come to, None before; `save()` writes it to a file for the next run."""
        return self._registration.controller.tuned

    def explain(self) -> str:
        """Return in words and numbers what averages the gradients now, and why; the same on every rank."""
        from commopt.schedule import explain

        return "\n".join([explain(self.aggregator, self.tuned, self.decisions), *self._connections()])

    def freeze(self) -> None:
        """Change the plan no more; every rank must call it between the same two steps.

        A step can then be captured in a CUDA graph, once DDP has shown the same buckets twice. A step that cannot
        be repeated (docs/bucketing.md) raises ConfigurationError during the capture. Replayed steps are not in
        `stats()`.
        """
        self._registration.freeze()


def _require_arguments(aggregator: object, module: object) -> None:
    if aggregator is not None and not isinstance(aggregator, Aggregator):
        raise ConfigurationError(
            f"HookState(aggregator={aggregator!r}) is not an aggregator; pass for example "
            f"commopt.Hierarchical(), or use commopt.attach(ddp, ...) for presets and names"
        )
    if module is not None and not isinstance(module, nn.Module):
        raise ConfigurationError(f"module is a {type(module).__name__}; pass the torch.nn.Module that DDP wraps")
    if module is not None:
        require_supported_parameters(module)
