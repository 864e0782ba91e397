# SPDX-License-Identifier: Apache-2.0
"""HookState, what users hold of a registration with DDP: CommState with its options and its plan."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from commopt.aggregate import Aggregator
from commopt.attached.checks import require_supported_parameters
from commopt.attached.comm_state import CommState, require_scaler
from commopt.attached.registration import Settings
from commopt.document import require_whole
from commopt.errors import ConfigurationError
from commopt.groups import NcclByLevel
from commopt.groups.build import read_arguments
from commopt.hooks.buckets import DDPRegistration
from commopt.schedule import BucketConfig, Decision, Plan, Tuned

if TYPE_CHECKING:
    from commopt.cost import Links


class HookState(CommState):
    """State of one DDP registration; collective over `process_group`: all its ranks must create it.

    Made before init_process_group(), it joins the others at the first bucket, over the world, or when it is registered
    with commopt's DistributedDataParallel, over that model's group.

    aggregator: what averages the buckets; None leaves it to the preset it is registered with.
    process_group: DDP's group, which on torch's own DDP nobody can check; None means the world. A one-dimensional
        DeviceMesh will do.
    ranks_per_node: declare blocks of ranks to be nodes (as COMMOPT_RANKS_PER_NODE does) instead of asking the hosts.
    module: the model, for parameter names; its parameters are checked here. Without it residuals are kept, and saved,
        under the numbers in which DDP first shows the parameters.
    scaler: the torch.amp.GradScaler of the training loop. Aggregators with error feedback need it: residuals are kept
        unscaled, and a step that the scaler drops changes none of them.
    timeout: seconds or timedelta that a collective, or a rank that never arrives, may take; default: what the process
        group was made with (600 s where torch does not tell).
    plan: which gradients travel together. "ddp", the default, leaves DDP's buckets alone, and follows no plan of a
        checkpoint; "adaptive", the default for "auto", measures and plans, from a checkpoint's plan on if it has one; a
        Plan (or the path of one that was saved) is followed. Ranks that differ follow rank 0's.
    links: what messages cost, from `python -m commopt probe` (or the path of its file), the same on all ranks; None:
        "adaptive" tries it out.
    tuned: for "auto", what an earlier tuning came to (or the path of its file): begun with, and watched.
    record: keep the times of all steps, for `timeline` and `report`; else only those that planning measures are kept.
        The same on all ranks.
    nccl: what NCCL may take of the GPU on a level ("world", "intra", "inter"; levels that this cluster lacks are no
        error): {"inter": NcclOptions(max_ctas=4)}.
    guard: compare a sample of what lossy averages deliver with the exact average in every `guard`-th step; "auto" does
        in every eighth, and leaves a strategy by which the model falls behind; others warn, once. None: "auto" alone.

    Raises ConfigurationError, UnsupportedTensorError, and MismatchError on every rank when ranks disagree.
    Pickling keeps aggregator, ranks_per_node, timeout, plan, links, record, tuned, nccl and guard; groups are made
    again at the first bucket, over the world, and `scaler` must be assigned again. Residuals are each rank's own and a
    pickle is usually one rank's: save them with state_dict().
    """

    _registration: DDPRegistration

    def __init__(
        self,
        aggregator: Aggregator | None = None,
        process_group: Any = None,
        ranks_per_node: int | None = None,
        module: nn.Module | None = None,
        scaler: Any = None,
        timeout: float | timedelta | None = None,
        plan: Plan | str | Path | None = None,
        links: Links | str | Path | None = None,
        record: bool = False,
        tuned: Tuned | str | Path | None = None,
        nccl: NcclByLevel | None = None,
        guard: int | None = None,
    ) -> None:
        config, problem = BucketConfig(), None
        try:  # a mistake of this rank alone, as a file that it lacks, is every rank's to hear of
            _require_arguments(aggregator, module, scaler)
            ranks_per_node, timeout_s, nccl = read_arguments(ranks_per_node, timeout, nccl)
            config = BucketConfig.read(plan, links, tuned)
            if guard is not None:
                require_whole(guard, 1, "guard")
        except Exception as error:
            aggregator, module, scaler, guard, problem = None, None, None, None, error
            ranks_per_node, timeout_s, nccl = None, None, {}
        settings = Settings(ranks_per_node, timeout_s, config, record, nccl, guard)
        self._registration = DDPRegistration(settings, aggregator, module, scaler)
        if process_group is not None or dist.is_initialized():
            self._registration.join(process_group, problem)
        elif problem is not None:
            raise problem

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self._registration.settings, "aggregator": self.aggregator}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self._registration = DDPRegistration(saved["settings"], saved["aggregator"], None, None)

    def know(self, module: nn.Module) -> None:
        """Learn the names of the parameters, after unpickling; for DDP models that are unpickled."""
        before = self._registration
        self._registration = DDPRegistration(before.settings, before.aggregator, module, before.scaler)
        if before.controller.frozen:
            self.freeze()

    def stats(self) -> dict[str, Any]:
        """Return what was done so far, as CommState.stats, and plan_changes.

        With a guard also steps_behind: what the model was not told yet, in L2 norms of gradients; None before it knows.
        """
        registration = self._registration
        more: dict[str, Any] = {"plan_changes": registration.controller.changes}
        if registration.guard:
            more["steps_behind"] = registration.shadow.steps_behind()
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

        return explain(self.aggregator, self.tuned, self.decisions)

    def freeze(self) -> None:
        """Change the plan no more; every rank must call it between the same two steps.

        A step can then be captured in a CUDA graph, once DDP has shown the same buckets twice: what cannot be repeated
        (docs/bucketing.md) raises ConfigurationError while it is captured. Replayed steps are not in `stats()`.
        """
        self._registration.freeze()


def _require_arguments(aggregator: object, module: object, scaler: Any) -> None:
    if aggregator is not None and not isinstance(aggregator, Aggregator):
        raise ConfigurationError(
            f"HookState(aggregator={aggregator!r}) is not an aggregator; pass for example "
            f"commopt.Hierarchical(), or use commopt.attach(ddp, ...) for presets and names"
        )
    if module is not None and not isinstance(module, nn.Module):
        raise ConfigurationError(f"module is a {type(module).__name__}; pass the torch.nn.Module that DDP wraps")
    if module is not None:
        require_supported_parameters(module)
    require_scaler(scaler)
