# SPDX-License-Identifier: Apache-2.0
"""The registration of a hook with a DDP model: DDP's buckets on their way to the lane."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from time import perf_counter_ns
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt import lanes
from commopt.aggregate import Aggregator, LocalSGD, auto_of
from commopt.attached.checks import (
    REDUCIBLE,
    kind_of,
    refuse_bucket,
    warn_of_unknown_scaler,
    when_first_stepped,
)
from commopt.attached.checksum import comparable
from commopt.attached.divergence import DivergenceCheck, Named, Replicas, alike_in
from commopt.attached.layouts import Layouts
from commopt.attached.local_sgd import ParameterAverages
from commopt.attached.options import AttachOptions
from commopt.attached.reduction import Reduction, Step
from commopt.attached.registration import Registration
from commopt.attached.snapshot import Copy
from commopt.errors import CommoptError, ConfigurationError
from commopt.feedback import ExactSample, Layout, ResidualStore
from commopt.schedule import Controller, Plan, Tuned
from commopt.schedule.reducer import is_capturing

_log = logging.getLogger("commopt")


class DDPRegistration(Registration):
    """Averages DDP's buckets: `reduce` is called with each, `before_forward` between steps.

    layouts: those of DDP's buckets.
    controller: makes and follows plans.
    decided_by: the name of the preset that was compared with the aggregator last.
    exact_sample: samples how far lossy averages are behind exact ones, for "auto"; None where nothing is compared.
    """

    def __init__(self, options: AttachOptions, aggregator: Aggregator | None, module: nn.Module | None) -> None:
        self.layouts = Layouts(module)
        super().__init__(options, aggregator, self.layouts.parameters, self.layouts.numels)
        self.controller = Controller(self.recorder, self.layouts.parameters, self.layouts.frozen)
        self.decided_by: str | None = None
        self.exact_sample: ExactSample | None = None
        parameters = self._averaged = dict(self.parameters)  # by a LocalSGD
        if isinstance(aggregator, LocalSGD):
            found = ref(self)
            self.averages = ParameterAverages(
                aggregator,
                module,
                lambda: parameters,
                self.store,
                parameters,
                lambda: getattr(found(), "scaler", None),
                self.boundary,
                nodes_agree=lambda: not _joins(found()),
            )
        # The gradients of a LocalSGD leave nothing for later, and `store` is for its parameters.
        self._gradient_store = None if self.averages is None else ResidualStore()
        self._ddp: ref[TorchDDP] | None = None
        self._module = None if module is None else ref(module)
        self._sampled_plan = 0  # the plan whose averages `exact_sample` samples, by Controller.changes
        self._raising_task = -1
        self._arrived_steps = 0
        self._latest: lanes.Pending | None = None  # bucket's, until backward has looked at it
        self._lately_ns: deque[int] = deque(maxlen=64)

    def _begin(self, aggregator: Aggregator, client: lanes.LaneClient) -> None:
        aggregator.check(client.team)
        aggregator = self.layouts.resolved(aggregator)
        self.watch_optimizers(aggregator)
        if (auto := auto_of(aggregator)) is not None:
            self.controller.optimizer = auto.optimizer or ""
            if auto.optimizer is None:
                when_first_stepped(self, _note_optimizer)
        plan, links, tuned = self.options.plan, self.options.links, self.options.tuned
        # Checked options hold no paths any more.
        self.controller.begin(client.team, aggregator, plan, links, tuned)  # type: ignore[arg-type]
        self.exact_sample = ExactSample() if self.controller.watches else None
        self._sampled_plan = self.controller.changes
        if self.averages is not None:
            self.averages.client = client
        self._compare_replicas(aggregator, client)

    def _compare_replicas(self, aggregator: Aggregator, client: lanes.LaneClient) -> None:
        """Let all ranks compare what DDP keeps alike; with a LocalSGD those of a node."""
        found, own, local = ref(self), list[Replicas](), isinstance(aggregator, LocalSGD)
        if (team := alike_in(client.team, aggregator)) is not None:
            averaged = isinstance(aggregator, LocalSGD) and aggregator.buffers
            buffers = dict if averaged else lambda: buffers_of(found())
            own.append(Replicas(client, team, lambda: parameters_of(found()), buffers))
        nodes = client.team.wire.nodes
        self.divergence = DivergenceCheck.of(self, client, [[node if local else 0] for node in nodes], own)

    def decide(self, aggregator: Aggregator, hook_name: str) -> None:
        """Use `aggregator`, the one the registered hook stands for; collective the first time.

        Raises ConfigurationError when the state was made with another one.
        """
        if self.aggregator is None:
            client = self.client
            client.require_open("first bucket")
            client.membership.agree(f"first bucket of {client.name}", aggregator=repr(aggregator))
            self._begin(aggregator, client)
            self.aggregator = aggregator
        elif self.aggregator != aggregator:
            raise ConfigurationError(
                f"HookState(aggregator={self.aggregator}) is registered with the hook commopt.{hook_name}, which means "
                f"{aggregator}; register commopt.hook to use the state's own, or pass HookState() without one"
            )
        self.decided_by = hook_name

    def set_model(self, ddp: TorchDDP) -> None:
        """Take note of the model, whose buckets can then be made anew."""
        self._ddp = ref(ddp)
        self.layouts.leave_out(getattr(ddp, "_delay_all_reduce_params", ()))
        self.controller.set_model(ddp)

    @property
    def title(self) -> str:
        """The name of the class of the module inside DDP."""
        ddp = self.model()
        return "" if ddp is None else type(ddp.module).__name__

    def model(self) -> TorchDDP | None:
        """Return the DDP model."""
        return None if self._ddp is None else self._ddp()

    def freeze(self) -> None:
        """Change the plan no more."""
        self.controller.give_up("frozen")
        self.exact_sample = None  # no strategy could be left, and a captured step would not be sampled

    def before_forward(self, *, sends: bool) -> None:
        """Adopt, between two steps, a new plan if there is one. sends: whether the backward will send gradients."""
        self.recorder.forward_begins()
        self.controller.before_forward(self.steps, sends=sends)
        # Steps of a LocalSGD are known when a backward begins. A forward without a weight may be one that a rank makes
        # alone, to look at the model; if its backward is averaged, the others hear of it then.
        if sends and self.averages is None and self.step_weights.given:
            self.begin_weights()

    # ------------------------------------------------------------------------------------- every step

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average one bucket over the ranks; the future resolves to `bucket.buffer()` itself."""
        entered_ns = perf_counter_ns()
        buffer, number, last = bucket.buffer(), bucket.index(), bucket.is_last()
        if buffer.dtype not in REDUCIBLE or buffer.layout != torch.strided:
            refuse_bucket(bucket, buffer, self.parameters)
        if buffer.storage_offset() != 0 or not buffer.is_contiguous():
            # DDP would read the result from the start of its storage, whatever the tensor says.
            raise CommoptError(f"DDP's bucket {number} does not fill its storage; report this torch version")
        layout = self.layouts.of(bucket)
        if number == 0:
            self._begin_step(buffer.device)
        if buffer.device != self.device:
            self._require_one_device(buffer.device)
        if self.recorder.enabled:
            self.recorder.bucket(number, layout.title, buffer.nbytes)
        if last:
            self._check_step()
        graph_task = torch._C._current_graph_task_id()
        if graph_task != self._raising_task and graph_task != -1:
            self._let_backward_raise(graph_task)
        handle = self._send(layout, buffer, number, last=last)
        if last:
            self._end_step()
        spent_ns = perf_counter_ns() - entered_ns
        self._lately_ns.append(spent_ns)
        self.hook_ns += spent_ns
        self.hook_calls += 1
        if last:
            for log in self.logs:
                log()
        if graph_task == -1:  # DDP's join() calls the hook outside of any backward
            return handle.future
        self._latest = handle
        return handle.ended

    def _begin_step(self, device: torch.device) -> None:
        if self.joined is None:
            self.join()
        shadowed = torch._C._current_graph_task_id() == -1  # a rank without data, in DDP's join()
        if self.averages is None and self.step_weights.used:  # at the place of other ranks' forwards
            self.begin_weights(shadowed=shadowed)
        steps = self.steps
        if self.divergence is not None and self.divergence.unread is not None:
            self.divergence.look()
        self.controller.begin_step(steps)
        self._require_optimizer_step()
        if self.averages is not None:  # a rank without data, in DDP's join(), makes no forward before this
            self.averages.take_turn()
            self._require_averaged()
        if self.joined is not None and self.joined.closed:
            self.joined.require_open("bucket")  # before anything counts
        self.boundary.begin("a backward")
        if self.device is None:
            self.device = device
        if self.divergence is not None and steps % self.divergence.every == 0:
            # A rank without data, in DDP's join(), makes no optimizer steps.
            self.divergence.compare(steps, device, takes_part=not shadowed)
        if self.recorder.enabled:
            self.recorder.begin_step(steps, device)
        # With a LocalSGD its optimizer steps decide whether gradients cross between nodes.
        number = steps if self.averages is None else self.averages.steps
        ddp = self.model()
        skips = ddp is not None and ddp.find_unused_parameters and not ddp.static_graph
        store = self._gradient_store or self.store
        weight = self.weight_of_step(shadowed=shadowed) if self.step_weights.used else None
        replays = weight is None and device.type == "cuda"  # a graph would keep this step's weight
        replay = self.replay_of(store, device) if replays else None
        self.step = Step(number, store, self.scaler, skips=skips, replay=replay, weight=weight)
        if self.exact_sample is not None and is_capturing():
            self.exact_sample = None  # a CUDA graph would sample in every step, or in none
        if self.exact_sample is not None and self.controller.changes != self._sampled_plan:
            self._sampled_plan = self.controller.changes
            self.exact_sample = ExactSample(first_step=steps)  # a new plan is judged by its own samples

    def _require_averaged(self) -> None:
        """Raise ConfigurationError where nodes would learn by themselves what no round averages."""
        if len(self.parameters) == len(self._averaged):
            return
        late = [name for name, each in self.parameters.items() if each.requires_grad and name not in self._averaged]
        if late:
            raise ConfigurationError(
                f"parameter {late[0]!r} ({len(late)} in all) is trained, and was frozen at attach, or is not in the "
                f"module that HookState was given: {self.aggregator} would never average it between nodes; unfreeze "
                f"before attach, and freeze again behind it"
            )

    def _require_optimizer_step(self) -> None:
        """Check that an optimizer has stepped by the last averages; DDP averages accumulated gradients.

        Lossless averages tolerate that. Residuals count the first gradient twice: a warning, once. With adam= a
        direction would be added to a gradient: ConfigurationError, on all ranks before anything is sent.
        """
        watch = self.steps_between
        if watch is None or torch._C._current_graph_task_id() == -1:
            return  # a rank without data, in DDP's join(), has neither backwards nor optimizer steps
        if not watch.missed(self.scaler, self.store.transaction):
            return
        if self.directions is not None:
            raise ConfigurationError(
                "two backwards in a row were averaged without an optimizer step between, and adam= makes a direction "
                "of each average, which cannot be added to gradients: accumulate under ddp.no_sync(), the forward "
                "too, and call optimizer.step() after every averaged backward; where a GradScaler may drop steps, "
                "call scaler.update() after each and pass attach(..., scaler=scaler)"
            )
        _log.warning(
            "two backwards in a row were averaged without an optimizer step between: accumulate gradients under "
            "ddp.no_sync(), or error feedback counts them twice; what is averaged and then thrown away, it counts "
            "as applied"
        )
        self.steps_between = None  # warned of once

    def _let_backward_raise(self, graph_task: int) -> None:
        """Let the backward under way raise the error of a lane that fails before the last bucket has arrived.

        Such a LaneError stays what it is, where DDP makes a RuntimeError of a future's. A step may have several graph
        tasks (a reentrant checkpoint, two backwards of one forward). DDP waits for the futures in the one in which it
        shows the last bucket, which it does not always call the last: so every task that shows one gets a callback.
        """
        engine = Variable._execution_engine
        # From within a callback, so that it comes after DDP's own, which waits for the lane.
        engine.queue_callback(lambda: engine.queue_callback(self._raise_lost))
        self._raising_task = graph_task

    def _raise_lost(self) -> None:
        """Raise the error that lost a bucket; errors behind the last one, as of a peer that leaves, may wait."""
        latest, self._latest = self._latest, None  # keep no bucket
        if latest is None or not latest.arrived:
            lanes.require_healthy()
        self._arrived_steps = self.steps
        if latest is not None and self.directions is not None:
            self.directions.delivered()

    def _require_one_device(self, device: torch.device) -> None:
        if self.keeps_residuals:
            raise ConfigurationError(
                f"gradients lie on {self.device} and {device}; error feedback keeps one device per DDP model: "
                f"put the model on one, or use a lossless aggregator"
            )
        self.controller.give_up(f"gradients lie on {self.device} and {device}, and messages are of one device")

    def _check_step(self) -> None:
        """Check, at the last bucket of a step, what residuals depend on."""
        if self.recorder.enabled:
            self.recorder.compute_ends()
        self.layouts.require_expected(residuals=self.keeps_residuals)
        if not self.keeps_residuals:
            return
        if self.reduced_steps == 0 and self.scaler is None:
            warn_of_unknown_scaler()
        if self.steps_between is not None and torch._C._current_graph_task_id() != -1:
            self.steps_between.averaged(self.scaler)

    def _send(self, layout: Layout, buffer: Tensor, index: int, *, last: bool) -> lanes.Pending:
        """Queue the average of bucket `index`, `last` of its step."""
        client, step, aggregator, recorder = self.joined, self.step, self.controller.aggregator, self.recorder
        assert client is not None  # since the step began
        reduction = Reduction(buffer, layout, step, aggregator, client.team, number=len(step.buffers), last=last)
        exact_sample = self.exact_sample
        if exact_sample is not None and not aggregator.lossless and exact_sample.takes(step.number):
            reduction.exact_sample = exact_sample
        if recorder.enabled:
            reduction.recorded = recorder.message((index,), layout.title, buffer.nbytes)
        step.buffers.append(layout)
        step.gradients.append(buffer)
        return reduction.submit(client, self.sent)

    def _end_step(self) -> None:
        client = self.joined
        assert client is not None  # since the step began
        assert self.device is not None  # of the first bucket
        usual_us = median(self._lately_ns) / 1000 if self.recorder.enabled and self._lately_ns else 0.0
        step = self.step
        self.controller.end_step(
            client, self.steps, self.device, step.buffers, step.gradients, usual_us, self.exact_sample
        )
        step.gradients.clear()
        self.end_weights()
        self.steps += 1
        if torch._C._current_graph_task_id() == -1:  # in DDP's join(), whose caller waits
            self._arrived_steps = self.steps
        if self.divergence is not None:
            self.divergence.repair(self.steps)
        self.reduced_steps += 1
        if self.averages is not None:
            self.averages.optimizer_steps.backward_ended(shadowed=torch._C._current_graph_task_id() == -1)
        self.boundary.end()

    # ------------------------------------------------------------------------------------- checkpoints

    @property
    def arrived_steps(self) -> int:
        """As Registration.arrived_steps: known once a backward has ended without an error."""
        return self._arrived_steps

    def require_same_parameters(self, saved: Mapping[str, int]) -> None:
        """Raise ConfigurationError unless it is of the parameters seen so far, as Registration's does."""
        self.layouts.require_same(saved)

    def shares(self) -> list[tuple[lanes.LaneClient, Layout]]:
        """Return all ranks, which average all parameters: as Registration, whether or not DDP shows the frozen ones."""
        return [(self.client, Layout.of_parameters(sorted({**self.layouts.frozen, **self.numels}.items())))]

    def planned(self) -> tuple[Any, object]:
        """Return the plan that is followed and what tuning came to, as Registration.planned."""
        plan, tuned = self.controller.plan, self.controller.tuned
        return (plan, tuned, None), [None if each is None else each.to_json() for each in (plan, tuned)]

    def extras(self) -> Callable[[Copy], dict[str, Any]]:
        """Return what reads the plan that is followed and what tuning came to, and what Registration.extras does."""
        plan, tuned, others = self.controller.plan, self.controller.tuned, super().extras()
        return lambda copy: {
            "plan": None if plan is None else plan.to_json(),
            "tuned": None if tuned is None else tuned.to_json(),
            **others(copy),
        }

    def read_extras(self, part: Mapping[str, Any]) -> tuple[Any, object]:
        """Return all of them, as Registration.read_extras."""
        try:
            plan = None if part.get("plan") is None else Plan.from_json(part["plan"])
            tuned = None if part.get("tuned") is None else Tuned.from_json(part["tuned"])
        except ConfigurationError as error:
            raise ConfigurationError(
                f"the checkpoint's {error}; load another, start without one, or set its 'plan' and 'tuned' to None"
            ) from error
        rounds, alike = super().read_extras(part)
        return (plan, tuned, rounds), (None if plan is None else plan.digest(), tuned, alike)

    def resume(
        self, store: ResidualStore, steps: int, buffers: Sequence[Layout], numels: Mapping[str, int], extras: Any
    ) -> None:
        """Resume from a checkpoint, as Registration.resume; the controller takes over its plan if it can."""
        plan, tuned, rounds = extras or (None, None, None)
        super().resume(store, steps, buffers, numels, rounds)
        self._arrived_steps = steps
        self.controller.restart(steps, plan, tuned, buffers)
        self._sampled_plan = -1  # samples begin anew
        self.layouts.expect(numels)


def _joins(registration: DDPRegistration | None) -> bool:
    """Return whether ranks that have run out of data may follow others, in DDP's join(); with an unknown model True."""
    ddp = None if registration is None else registration.model()
    return ddp is None or ddp._join_config.enable


def _module_of(registration: DDPRegistration | None) -> nn.Module | None:
    ddp = None if registration is None else registration.model()
    module = None if registration is None or registration._module is None else registration._module()
    return module if ddp is None else ddp.module


def parameters_of(registration: DDPRegistration | None) -> Named:
    """Return what DDP made equal at the start: frozen parameters too; of an unknown model those in its buckets."""
    module = _module_of(registration)
    if module is None:
        return {} if registration is None else registration.parameters
    return _not_ignored(module, module.named_parameters())


def buffers_of(registration: DDPRegistration | None) -> Named:
    """Return the buffers, where DDP does not send the first rank's to all before each forward."""
    module, ddp = _module_of(registration), None if registration is None else registration.model()
    if module is None or ddp is None or ddp.broadcast_buffers:
        return {}
    return _not_ignored(module, module.named_buffers())


def _not_ignored(module: nn.Module, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return what can be compared, but for what DDP is told to ignore, by its names (".weight" of the root)."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return comparable(
        {name: each for name, each in named if ignored.isdisjoint((name, name if "." in name else f".{name}"))}
    )


def _note_optimizer(registration: DDPRegistration, optimizer: torch.optim.Optimizer) -> None:
    """Tell the tuner what steps on the parameters: what is like Adam counts, whatever else there is."""
    if registration.controller.optimizer != "adamw":
        registration.controller.optimizer = kind_of(optimizer)
