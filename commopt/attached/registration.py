# SPDX-License-Identifier: Apache-2.0
"""What one registration of an aggregator with a model, of DDP or any other, remembers from first buffer to last."""

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
from commopt.attached.local_sgd import ParameterAverages
from commopt.attached.options import AttachOptions
from commopt.attached.reduction import Reduction, Step, Traffic
from commopt.feedback import ExactSample, Layout, ResidualStore, spread
from commopt.feedback.checkpoint import required, whole
from commopt.groups import Membership, WireBytes
from commopt.lanes import LaneClient, Work
from commopt.recording import Recorder


class Registration:
    """The memory of one hook: made without communication; `join` finds the other ranks, `send` averages a buffer.

    kind: what users hold it by, for messages. parameters: those averaged here, by name; numels: of whole ones.
    joined: None before `join`. steps: how many are complete, with those before the checkpoint it goes on from;
    reduced_steps: without. options: `checked` ones. step: the one under way, or the last. device: of the first buffer.
    keeps_residuals: whether what averages does. steps_between, directions: see to what becomes of averages, where
    residuals are kept and with adam=. averages: those of a LocalSGD, whose `store` it is then.
    logs: called after each step, by whom backward runs in.
    """

    kind = "HookState"
    sharding = ""  # which parts of the parameters ranks hold: residuals of another sharding are shared out anew

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
        self.store = ResidualStore(per_step=scaler is not None and scaler.is_enabled())
        self.step = Step(0, self.store, scaler)
        self.recorder = Recorder(always=options.record)
        self.logs: list[Callable[[], None]] = []
        self.traffic = Traffic()
        self.hook_ns = self.hook_calls = 0

    # ------------------------------------------------------------------------------------- the other ranks

    def join(self, process_group: Any = None, problem: Exception | None = None) -> LaneClient:
        """Find the other ranks of the group, None meaning the world, and agree with them; collective.

        `problem` is why this rank cannot go on: it raises it, and the others a ConfigurationError that tells it.
        """
        options = self.options
        client = LaneClient.join(
            self.kind,
            process_group,
            options.ranks_per_node,
            options.timeout,
            problem,
            meets=True,
            aggregator=self.aggregator_name,
            **options.compared(),
        )
        try:
            if client.team.rank == 0:
                warn_of_untested_torch(torch.__version__)
            self.options = replace(options, plan=options.buckets.settled(client.name, client.membership).plan)
            if self.aggregator is not None:
                self._begin(self.aggregator, client)
        except BaseException:
            client.close(groups=False)
            raise
        self.joined = client
        return client

    def _begin(self, aggregator: Aggregator, client: LaneClient) -> None:
        """Learn, before the first buffer, what averages; all ranks alike."""
        aggregator.check(client.team)
        self.watch_optimizers(aggregator)

    def watch_optimizers(self, aggregator: Aggregator) -> None:
        """See from now on what optimizers do with averages, where what `aggregator` keeps, or makes, depends on it."""
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
        """What averages, for messages and comparisons."""
        return repr(self.aggregator) if self.aggregator is not None else "chosen by the hook"

    def close(self, *, groups: bool = True) -> None:
        """Take part no more, as LaneClient.close."""
        if self.averages is not None:
            self.averages.close()
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

    def send(
        self,
        layout: Layout,
        buffer: Tensor,
        index: int,
        aggregator: Aggregator,
        *,
        last: bool,
        shadow: ExactSample | None = None,
        scale: float | None = None,
    ) -> Work:
        """Queue the average of a buffer, `index` of the model's and `last` of its step, as Reduction; count it."""
        client, recorder, step = self.joined, self.recorder, self.step
        assert client is not None  # since the step began
        # Words only for who asks for them: this is on the way of backward.
        recorded = recorder.message((index,), layout.title, buffer.nbytes) if recorder.enabled else None
        number = len(step.buffers)
        task = Reduction(buffer, layout, number, last, step, aggregator, client.team, shadow, recorded, scale)
        work = client.submit(task, task, buffer, numel=layout.numel)
        step.buffers.append(layout)
        self.traffic.count(aggregator, layout, buffer.dtype, buffer.device, step.number)
        if task.asks_who_is_used:
            self.traffic.count_exact(len(layout.pieces), torch.float32, buffer.device, step.number)
        if task.exchanges_norm:
            self.traffic.count_exact(1, torch.float64, buffer.device, step.number)
        return work

    @property
    def residual_paths(self) -> tuple[str, ...]:
        """The levels at which `store` keeps something: of gradients, or of a LocalSGD's parameters."""
        if isinstance(self.aggregator, LocalSGD):
            return self.aggregator.parameters.residual_paths
        return () if self.aggregator is None else self.aggregator.residual_paths

    def wire_bytes(self) -> WireBytes:
        """Return the payload this rank has sent, nothing before it has joined."""
        sent = self.store.beside if self.averages is None else self.store.beside + self.averages.sent
        return sent if self.joined is None else sent + self.traffic.wire_bytes(self.joined.team)

    def usual_bytes(self, instead: Aggregator | None = None) -> WireBytes | None:
        """Return the payload this rank sends in a step like the last one, past a dense start; None if that is unknown.

        instead: what would average the buffers in the place of what does.
        """
        if self.joined is None:
            return None
        usual = self.traffic.usual(self.joined.team, instead)
        if self.averages is None or instead is not None:
            return usual
        rounds, steps = self.averages.sent, max(self.reduced_steps, 1)
        return usual + WireBytes(rounds.intra // steps, rounds.inter // steps)

    def model(self) -> TorchDDP | None:
        """Return the DDP model, whose own broadcasts a report tells; None for others."""
        return None

    # ------------------------------------------------------------------------------------- checkpoints

    def extras(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside steps, buffers and residuals: where the rounds of a LocalSGD are."""
        return {} if self.averages is None else {"rounds": self.averages.state()}

    def read_extras(self, part: Mapping[str, Any]) -> tuple[Any, object]:
        """Return what a rank's own part has of `extras`, and of that what must be alike on all ranks.

        Raises ConfigurationError for what is damaged.
        """
        if self.averages is None or "rounds" not in part:
            return None, None
        rounds = self.averages.read(required(part["rounds"], dict, "rounds"))
        return rounds, (rounds[0], list(rounds[1]))

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

    def go_on(
        self, store: ResidualStore, steps: int, buffers: Sequence[Layout], numels: Mapping[str, int], extras: Any
    ) -> None:
        """Go on from a checkpoint, taken after `steps` steps of a model with parameters of `numels`.

        buffers: in which it went, empty for other ones. extras: what `read_extras` returned, None in another world.
        """
        store.transaction.steps = self.steps = steps
        store.beside = self.store.beside
        self.store = store
        if self.averages is not None:
            self.averages.begin_anew(steps, store, extras)
        self.step = Step(steps, store, self.scaler, list(buffers))
