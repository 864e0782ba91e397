# SPDX-License-Identifier: Apache-2.0
"""`Registration`: the memory of one aggregator at one model, of DDP or any other, from the first buffer to the last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.aggregate import Aggregator, LocalSGD
from commopt.attached.averages_used import Directions, StepsBetweenAverages
from commopt.attached.checks import warn_of_untested_torch
from commopt.attached.divergence import DivergenceCheck
from commopt.attached.layouts import require_same_parameters
from commopt.attached.local_sgd import ParameterAverages
from commopt.attached.options import AttachOptions
from commopt.attached.reduction import Reduction, SentBytes, Step
from commopt.attached.replay import Replays, replay_wanted
from commopt.attached.snapshot import Copy, StepBoundary
from commopt.attached.step_weights import StepWeights, factor_of
from commopt.errors import ConfigurationError
from commopt.feedback import Layout, ResidualStore, spread
from commopt.feedback.checkpoint import required, whole
from commopt.groups import Membership, Team, WireBytes
from commopt.lanes import LaneClient
from commopt.recording import Recorder
from commopt.schedule.config import agreed_plan


class Registration:
    """The memory of one hook: made without communication; `join` finds the other ranks.

    kind: the class of the object that users hold, for messages.
    sharding: which parts of the parameters ranks hold; residuals of another sharding are distributed anew.
    options: `checked` ones.
    parameters: those averaged here, by name.
    numels: of whole parameters, by name.
    device: of the first buffer.
    joined: this rank among the others, None before `join`.
    steps: complete ones, with those before the checkpoint it has resumed from.
    reduced_steps: complete ones, without those.
    step: the current one, or the last.
    boundary: whether one is under way.
    keeps_residuals: whether the aggregator does.
    averages: those of a LocalSGD, which then uses `store`; None for other aggregators.
    steps_between: where residuals are kept, checks that each average is followed by an optimizer step.
    directions: with adam=, checks what optimizers do with directions.
    divergence: compares replicas; None where there are none, or where nobody wants it.
    sent: counts the payload.
    step_weights: those that users give of this rank's gradients.
    logs: called after each step, in the thread of backward.
    hook_ns, hook_calls: the time spent in the hook, and how often it was called.
    """

    kind = "HookState"
    sharding = ""

    def __init__(
        self,
        options: AttachOptions,
        aggregator: Aggregator | None,
        parameters: Mapping[str, Tensor],
        numels: Mapping[str, int],
    ) -> None:
        self.options = options
        self.aggregator = aggregator
        self.scaler = scaler = options.scaler
        self.parameters = parameters
        self.numels = numels
        self.device: torch.device | None = None
        self.joined: LaneClient | None = None
        self.steps = self.reduced_steps = 0
        self.keeps_residuals = False
        self.averages: ParameterAverages | None = None
        self.steps_between: StepsBetweenAverages | None = None
        self.directions: Directions | None = None
        self.divergence: DivergenceCheck | None = None
        self.store = ResidualStore(per_step=scaler is not None and scaler.is_enabled())
        self.store.offload = isinstance(aggregator, LocalSGD) and aggregator.offload
        self.step = Step(0, self.store, scaler)
        self.boundary = StepBoundary()
        self.recorder = Recorder(always=options.record)
        self.logs: list[Callable[[], None]] = []
        self.sent = SentBytes()
        self.step_weights = StepWeights(self.sent)
        self.hook_ns = self.hook_calls = 0
        self._replays: Replays | None = None

    # ------------------------------------------------------------------------------------- the other ranks

    def join(self, process_group: Any = None, problem: Exception | None = None) -> LaneClient:
        """Find the other ranks of the group, None meaning the world, and agree with them; collective.

        problem: the error of this rank, which raises it; the others raise a ConfigurationError that names it.
        """
        options = self.options
        client = LaneClient.join(
            self.kind,
            process_group,
            options.ranks_per_node,
            options.timeout,
            problem,
            site=options.site,
            meets=True,
            aggregator=self.aggregator_name,
            **options.compared(),
        )
        try:
            if client.team.rank == 0:
                warn_of_untested_torch(torch.__version__)
            # Checked options hold no paths any more.
            plan = agreed_plan(client.name, client.membership, options.plan, options.links, options.tuned)  # type: ignore[arg-type]
            self.options = replace(options, plan=plan)
            if self.aggregator is not None:
                self._begin(self.aggregator, client)
        except BaseException:
            client.close(groups=False)
            raise
        self.joined = client
        return client

    def _begin(self, aggregator: Aggregator, client: LaneClient) -> None:
        """Prepare, before the first buffer, for the aggregator; all ranks alike."""
        aggregator.check(client.team)
        self.watch_optimizers(aggregator)

    def watch_optimizers(self, aggregator: Aggregator) -> None:
        """Watch optimizers from now on, where the residuals or the directions of `aggregator` depend on their steps."""
        self.keeps_residuals = bool(aggregator.residual_paths)
        if self.keeps_residuals and self.steps_between is None:
            self.steps_between = StepsBetweenAverages()
        if aggregator.adam is not None and self.directions is None:
            self.directions = Directions(self)

    @property
    def client(self) -> LaneClient:
        """This rank among the others; where it has not joined them it does, collectively."""
        return self.joined or self.join()

    @property
    def everyone(self) -> Membership:
        """The ranks that save, load and report together."""
        return self.client.membership

    @property
    def recorded_with(self) -> LaneClient:
        """This rank among those whose recordings make a timeline: they send each other the same messages."""
        return self.client

    @property
    def title(self) -> str:
        """The name of the model's class, "" where no model is known."""
        return ""

    @property
    def aggregator_name(self) -> str:
        """The aggregator, for messages and comparisons."""
        return repr(self.aggregator) if self.aggregator is not None else "chosen by the hook"

    def close(self, *, groups: bool = True) -> None:
        """Take part no more, as LaneClient.close."""
        if self.averages is not None:
            self.averages.close()
        if self.directions is not None:
            self.directions.close()
        if self.joined is not None:
            self.joined.close(groups=groups)

    def require_open(self, what: str) -> None:
        """Raise ConfigurationError when `close` came before `what`."""
        if self.joined is not None:
            self.joined.require_open(what)

    # ------------------------------------------------------------------------------------- every step

    def scale_by(self, scaler: Any) -> None:
        """Take note of another GradScaler."""
        self.scaler = scaler
        self.store.transaction.per_step = scaler is not None and scaler.is_enabled()

    def weigh(self, weight: Any) -> None:
        """Let this rank's gradients count for `weight` in the next averaged backward, as CommState.weight."""
        self.require_open("weight")
        if self.aggregator is not None and self.aggregator.adam is not None:
            raise ConfigurationError(
                f"weight() is for averages of gradients, and {self.aggregator} makes a direction of each node's, which "
                f"is as long whatever it was made of; leave out adam=, or weight()"
            )
        try:
            self.step_weights.give(weight)
        except ConfigurationError:
            self.begin_weights()  # so that the others learn of it
            raise

    def begin_weights(self, *, shadowed: bool = False) -> None:
        """Start the exchange of weights of the coming step if there are any; all ranks at the same place.

        shadowed: as StepWeights.begin has it.
        """
        if self.step_weights.used:
            client = self.client
            parameter = next(iter(self.parameters.values()), None)
            device = client.team.default_device if parameter is None else parameter.device
            self.step_weights.begin(client, self._weighted_team, self.steps, self.device or device, shadowed=shadowed)

    @property
    def _weighted_team(self) -> Team | None:
        """The ranks whose gradients are averaged with this one's in the next step, None where nobody's are."""
        team = self.client.team
        if self.aggregator is None:
            return team
        return self.aggregator.reach(team, self.steps if self.averages is None else self.averages.steps)

    def weight_of_step(self, *, shadowed: bool = False) -> Callable[[], float] | None:
        """Return what tells this rank's factor in the step that begins, None where nobody gives weights.

        Raises ConfigurationError, on all ranks, where one of them has given none.
        """
        if not self.step_weights.used:
            return None
        self.begin_weights(shadowed=shadowed)
        client, team = self.client, self._weighted_team
        weights = self.step_weights.found(client, team, self.steps)
        factor = factor_of(weights, 0 if team is None else team.rank)
        return lambda: factor

    def end_weights(self) -> None:
        """Forget the weights of a step that is complete, but for what a node's part in the next round is."""
        total = self.step_weights.total
        if total is not None and self.averages is not None and self._weighted_team is not self.client.team:
            self.averages.add_weight(total)
        self.step_weights.end()

    def replay_of(
        self, store: ResidualStore, device: torch.device, *, moves: bool = False
    ) -> Callable[[Reduction], bool] | None:
        """Return what replays buckets whose residuals are in `store`, as Step.replay; None for nothing.

        moves: whether buckets come at other addresses in every step.
        """
        if device.type != "cuda":
            return None
        if self._replays is None or self._replays.store is not store:
            before = self.replayed
            self._replays = Replays(store, before, moves=moves) if replay_wanted() else None
        return None if self._replays is None else self._replays.replay

    @property
    def replayed(self) -> int:
        """The number of buckets that were replayed as CUDA graphs."""
        return 0 if self._replays is None else self._replays.count

    @property
    def residual_paths(self) -> tuple[str, ...]:
        """The levels at which `store` keeps something: of gradients, or of a LocalSGD's parameters."""
        if isinstance(self.aggregator, LocalSGD):
            return self.aggregator.parameters.residual_paths
        return () if self.aggregator is None else self.aggregator.residual_paths

    def wire_bytes(self) -> WireBytes:
        """Return the payload this rank has sent."""
        sent = self.store.beside + self.sent.wire_bytes()
        if self.joined is not None:  # a level over which nothing went is there all the same
            sent += WireBytes(beyond=(0,) * self.joined.team.sites_above)
        return sent if self.averages is None else sent + self.averages.sent.wire_bytes()

    def usual_bytes(self, instead: Aggregator | None = None) -> WireBytes | None:
        """Return the payload this rank sends in a step like the last one, past a dense start; None if that is unknown.

        instead: averages the buffers in the place of the aggregator that does.
        """
        if self.joined is None:
            return None
        usual = self.sent.usual(instead)
        if self.averages is None or instead is not None:
            return usual
        rounds, steps = self.averages.sent.wire_bytes(), max(self.reduced_steps, 1)
        return usual + rounds // steps

    @property
    def arrived_steps(self) -> int:
        """The complete steps whose averages have all arrived: one fewer than `steps` where a failure has ended one."""
        return self.steps

    def require_same_parameters(self, saved: Mapping[str, int]) -> None:
        """Raise ConfigurationError unless what was `saved`, elements by name, is of the parameters here."""
        require_same_parameters(saved, self.numels)

    def shares(self) -> list[tuple[LaneClient, Layout]]:
        """Return the ranks that average the same elements with this one, and these elements; DDP's are all."""
        return [(self.client, Layout.of_parameters(self.numels.items()))]

    def planned(self) -> tuple[Any, object]:
        """Return what another registration resumes with to follow the same plan, and what tells plans apart."""
        return None, ""

    def model(self) -> TorchDDP | None:
        """Return the DDP model, whose own broadcasts a report tells; None for others."""
        return None

    # ------------------------------------------------------------------------------------- checkpoints

    def extras(self) -> Callable[[Copy], dict[str, Any]]:
        """Return what reads, on the lane, all that a checkpoint holds beside steps, buffers and residuals.

        That is where the rounds of a LocalSGD are.
        """
        if self.averages is None:
            return lambda copy: {}
        rounds = self.averages.state()
        return lambda copy: {"rounds": rounds(copy)}

    def read_extras(self, part: Mapping[str, Any]) -> tuple[Any, object]:
        """Return what a rank's own part has of `extras`, and of that what must be alike on all ranks.

        Raises ConfigurationError for what is damaged.
        """
        if self.averages is None or "rounds" not in part:
            return None, None
        rounds = self.averages.read(required(part["rounds"], dict, "rounds"))
        return rounds, (rounds[0], list(rounds[1]), rounds[4])

    def optimizer_steps_of(self, part: Mapping[str, Any]) -> int:
        """Return after how many optimizer steps a part was saved; without a LocalSGD nobody counts them.

        Raises ConfigurationError for what is damaged.
        """
        rounds = part.get("rounds")
        steps = rounds.get("steps") if isinstance(rounds, Mapping) else None
        return whole(part["steps"] if steps is None else steps, "steps")

    def take_share(
        self, store: ResidualStore, parts: Sequence[Mapping[str, Any]], largest: Callable[[str], float]
    ) -> None:
        """Put into `store` this rank's part of the residuals that ranks of another world have saved.

        largest: the magnitude that a residual of a parameter may have. Raises ConfigurationError for what is damaged.
        """
        spread(store, parts, parts[0]["parameters"], largest, self.everyone.team.size)

    def resume(
        self, store: ResidualStore, steps: int, buffers: Sequence[Layout], numels: Mapping[str, int], extras: Any
    ) -> None:
        """Resume from a checkpoint, taken after `steps` steps of a model with parameters of `numels`.

        buffers: those of the run that was saved, empty if this one has others.
        extras: what `read_extras` returned, None in another world.
        """
        store.transaction.steps = self.steps = steps
        store.beside, store.offload = self.store.beside, self.store.offload
        self.store = store
        if self.averages is not None:
            self.averages.resume(steps, store, extras)
        for check in (self.divergence, self.steps_between, self.directions):  # of what was averaged before
            if check is not None:
                check.forget()
        self.step = Step(steps, store, self.scaler, list(buffers))
        self.boundary.end()  # of a step that was given up
