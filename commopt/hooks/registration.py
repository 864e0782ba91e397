"""What one registration of a hook remembers, from its first bucket to its last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import nn

from commopt.aggregate import Aggregator, LocalSGD
from commopt.feedback import Layout, ResidualStore
from commopt.feedback.quality import GradientCosine
from commopt.groups import NcclByLevel
from commopt.hooks.checks import warn_of_untested_torch
from commopt.hooks.local_sgd import ParameterAverages
from commopt.lanes import LaneClient
from commopt.recording import Recorder
from commopt.schedule import BucketConfig, Controller, Layouts, Plan, Tuned


@dataclass(frozen=True)
class Settings:
    """What a registration is asked for beside an aggregator, and begins with again after unpickling.

    record: whether the times of all steps are kept rather than of those that planning measures.
    """

    ranks_per_node: int | None
    timeout_s: float | None
    config: BucketConfig
    record: bool
    nccl: NcclByLevel


@dataclass(frozen=True)
class Step:
    """What the messages of one step have in common.

    scaler: the torch.amp.GradScaler that multiplied its loss, or None. buffers: what was sent in it so far, in order.
    """

    number: int
    store: ResidualStore
    scaler: Any
    buffers: list[Layout] = field(default_factory=list)


class Registration:
    """The memory of one hook: made without communication; `join` finds the other ranks, `settle` what averages.

    joined: None before `join`. steps: how many are complete, with those before the checkpoint it goes on from;
    reduced_steps: without. step: the one under way, or the last. device: of the first bucket.
    keeps_residuals: whether what averages does. cosine: of lossy averages and exact ones, where that is watched.
    """

    def __init__(
        self, settings: Settings, aggregator: Aggregator | None, module: nn.Module | None, scaler: Any
    ) -> None:
        self.settings = settings
        self.aggregator = aggregator
        self.scaler = scaler
        self.module = None if module is None else ref(module)
        self.device: torch.device | None = None
        self.joined: LaneClient | None = None
        self.steps = self.reduced_steps = 0
        self.keeps_residuals = self.watches_cosine = False
        self.cosine = GradientCosine()
        self.store = ResidualStore(per_step=scaler is not None and scaler.is_enabled())
        self.step = Step(0, self.store, scaler)
        self.layouts = Layouts(module)
        self.recorder = Recorder()
        self.controller = Controller(self.recorder, self.layouts, record=settings.record)
        self.averages: ParameterAverages | None = None
        if isinstance(aggregator, LocalSGD):
            self.averages = ParameterAverages(aggregator, module, self.layouts.parameters.values())

    def join(self, process_group: Any = None, problem: Exception | None = None) -> LaneClient:
        """Find the other ranks of the group, None meaning the world, and agree with them; collective.

        `problem` is why this rank cannot go on: it raises it, and the others a ConfigurationError that tells it.
        """
        settings = self.settings
        client = LaneClient.join(
            *("HookState", process_group, settings.ranks_per_node, settings.timeout_s, settings.nccl, problem),
            aggregator=self.aggregator_name,
            record=str(settings.record),
        )
        try:
            if client.team.rank == 0:
                warn_of_untested_torch(torch.__version__)
            self.settings = replace(settings, config=settings.config.settled(client.name, client.membership))
            if self.aggregator is not None:
                self._begin(self.aggregator, client)
        except BaseException:
            client.close(groups=False)
            raise
        self.joined = client
        if self.averages is not None:
            self.averages.client = client
        return client

    @property
    def client(self) -> LaneClient:
        """This rank among the others; where it has not joined them it does, collectively."""
        return self.joined or self.join()

    def settle(self, aggregator: Aggregator) -> None:
        """Average with `aggregator`, as none was chosen yet; collective."""
        client = self.client
        client.require_open("first bucket")
        client.membership.agree(f"first bucket of {client.name}", aggregator=repr(aggregator))
        self._begin(aggregator, client)
        self.aggregator = aggregator

    def _begin(self, aggregator: Aggregator, client: LaneClient) -> None:
        aggregator.check(client.team)
        aggregator = self.layouts.resolved(aggregator, warn=client.team.rank == 0)
        self.keeps_residuals = bool(aggregator.residual_paths)
        self.controller.begin(client.team, aggregator, self.settings.config)
        self.watches_cosine = self.controller.watches_cosine

    @property
    def aggregator_name(self) -> str:
        """What averages, for messages and comparisons."""
        return repr(self.aggregator) if self.aggregator is not None else "chosen by the hook"

    def freeze(self) -> None:
        """Change the plan no more."""
        self.controller.give_up("frozen")
        self.watches_cosine = False  # which nobody will ask for

    def scale_by(self, scaler: Any) -> None:
        """Take note of another GradScaler."""
        self.scaler = scaler
        self.store.per_step = scaler is not None and scaler.is_enabled()

    def go_on(
        self,
        store: ResidualStore,
        steps: int,
        buffers: Sequence[Layout],
        plan: Plan | None,
        tuned: Tuned | None,
        numels: Mapping[str, int],
    ) -> None:
        """Go on from a checkpoint, taken after `steps` steps of a model with parameters of `numels`.

        buffers: in which it went, empty for other ones. plan: which it followed, if any. tuned: what tuning came to.
        """
        store.steps = self.steps = steps
        self.store = store
        self.step = Step(steps, store, self.scaler, list(buffers))
        if self.averages is not None:
            self.averages.begin_anew(steps)
        self.controller.restart(steps, plan, tuned, buffers)
        self.layouts.expect(numels)
