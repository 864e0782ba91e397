"""What one registration of a hook remembers, and how it takes a bucket through the lane."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from hashlib import sha256
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt import lanes
from commopt.aggregate import Aggregator
from commopt.bucketing import Assembly, Held, Layouts, Message, Planning, Wish
from commopt.cost import Links
from commopt.errors import CommoptError, ConfigurationError
from commopt.feedback import Layout, Ledger, layout_of
from commopt.groups import Membership, WireBytes, join
from commopt.hooks import misuse, saving
from commopt.hooks.gradients import require_supported_bucket, require_supported_parameters
from commopt.hooks.insight import report_on, timeline_of
from commopt.hooks.periodic import ParameterAverages
from commopt.hooks.sending import Sending
from commopt.plan import Decision, Plan
from commopt.recording import Recorder
from commopt.timeline import Report, Timeline
from topology import Cluster

_UNDECIDED = "chosen by the hook"
_PICKLED = ("aggregator", "_ranks_per_node", "_timeout_s", "_wish", "_record")


class HookState:
    """State of one DDP registration; collective over `process_group`: all its ranks must create it.

    aggregator: what averages the buckets; None leaves it to the preset it is registered with.
    process_group: DDP's group, which on torch's own DDP nobody can check; None means the world. A one-dimensional
        DeviceMesh will do.
    ranks_per_node: declare blocks of ranks to be nodes (as COMMOPT_RANKS_PER_NODE does) instead of asking the hosts.
    module: the model, for parameter names; its parameters are checked here. Without it residuals are kept, and saved,
        under the numbers in which DDP first shows the parameters.
    scaler: the torch.amp.GradScaler of the training loop. Aggregators with error feedback need it: residuals are kept
        unscaled, and a step that the scaler drops changes none of them.
    timeout: seconds or timedelta that a collective, or a rank that never arrives, may take; default 600 s.
    plan: which gradients travel together. "ddp" leaves DDP's buckets alone, "adaptive" measures and plans (the default
        of `attach`), a Plan (or the path of one that was saved) is followed; ranks that differ follow rank 0's.
    links: what messages cost, from `python -m commopt probe` (or the path of its file); None: "adaptive" tries it out.
    needed_first: let plans send buckets in the order in which the next forward needs them, where several are ready.
    record: keep the times of all steps, for `timeline` and `report`; else only those that planning measures are kept.

    Raises ConfigurationError, UnsupportedTensorError, and MismatchError on every rank when ranks disagree.
    Pickling keeps aggregator, ranks_per_node, timeout, plan and links; groups are made again at the first bucket, over
    the world. Residuals are each rank's own and a pickle is usually one rank's: save them with state_dict().
    """

    def __init__(
        self,
        aggregator: Aggregator | None = None,
        process_group: Any = None,
        ranks_per_node: int | None = None,
        module: nn.Module | None = None,
        scaler: Any = None,
        timeout: float | timedelta | None = None,
        plan: Plan | str | Path = "ddp",
        links: Links | str | Path | None = None,
        needed_first: bool = False,
        record: bool = False,
    ) -> None:
        if aggregator is not None and not isinstance(aggregator, Aggregator):
            raise ConfigurationError(
                f"HookState(aggregator={aggregator!r}) is not an aggregator; pass for example "
                f"commopt.Hierarchical(), or use commopt.attach(ddp, ...) for presets and names"
            )
        if module is not None and not isinstance(module, nn.Module):
            raise ConfigurationError(f"module is a {type(module).__name__}; pass the torch.nn.Module that DDP wraps")
        if module is not None:
            require_supported_parameters(module)
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise ConfigurationError(f"scaler is a {type(scaler).__name__}; pass the torch.amp.GradScaler or None")
        self.aggregator = aggregator
        self.scaler = scaler
        self._ranks_per_node = ranks_per_node
        self._timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self._wish = Wish.read(plan, links, needed_first)
        self._record = record
        self._start(module)
        self._join(process_group)

    def _start(self, module: nn.Module | None) -> None:
        self.decided_by: str | None = None
        self._module = None if module is None else ref(module)
        self._joined: Membership | None = None
        self._owner = ""
        self._loads = count()
        self._steps = 0
        self._hook_ns = self._hook_calls = 0
        self._lately_ns: deque[int] = deque(maxlen=64)
        self._ddp: ref[TorchDDP] | None = None
        self._layouts = Layouts(module)
        self._step_layouts: list[Layout] = []  # the buffers of this step so far, or of the last one
        self._device: torch.device | None = None
        self._ledger = Ledger(per_step=self.scaler is not None and self.scaler.is_enabled())
        self._sending = Sending()
        self._assembly = Assembly()
        self._recorder = Recorder()
        self._planning = Planning(self._recorder, self._assembly, self._layouts, record=self._record)
        self._gradients = None if module is None else misuse.ReducedGradients(module)
        self._averages = ParameterAverages(self.aggregator, module, self._average_if_due)

    def _join(self, process_group: Any) -> Membership:
        lanes.require_healthy()
        self._joined = membership = join(process_group, self._ranks_per_node, self._timeout_s)
        self._owner = f"HookState {next(membership.owners)}"
        membership.agree(f"{self._owner} setup", aggregator=repr(self.aggregator) if self.aggregator else _UNDECIDED)
        self._wish = self._wish.settled(self._owner, membership)
        if self.aggregator is not None:
            self.aggregator.check(membership.team)
            self._planning.begin(membership.team, self.aggregator, self._wish)
        return membership

    @property
    def membership(self) -> Membership:
        """This rank's place in the groups; joins them (collectively) after unpickling."""
        return self._joined or self._join(None)

    @property
    def cluster(self) -> Cluster:
        """Which ranks share a node."""
        return self.membership.cluster

    def decide(self, aggregator: Aggregator, hook_name: str) -> None:
        """Settle on `aggregator`, the one the registered hook stands for; collective the first time.

        Raises ConfigurationError when the state was made with another one.
        """
        if self.aggregator is None:
            membership = self.membership
            aggregator.check(membership.team)
            membership.agree(f"first bucket of {self._owner}", aggregator=repr(aggregator))
            self.aggregator = aggregator
            self._planning.begin(membership.team, aggregator, self._wish)
        elif self.aggregator != aggregator:
            raise ConfigurationError(
                f"HookState(aggregator={self.aggregator}) is registered with the hook commopt.{hook_name}, which means "
                f"{aggregator}; register commopt.hook to use the state's own, or pass HookState() without one"
            )
        self.decided_by = hook_name

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average one bucket over the ranks; the future resolves to `bucket.buffer()` itself."""
        entered_ns = perf_counter_ns()
        assert self.aggregator is not None  # the hook decided
        buffer, number, last = bucket.buffer(), bucket.index(), bucket.is_last()
        require_supported_bucket(buffer, bucket.parameters(), self._module() if self._module else None)
        if buffer.storage_offset() != 0 or not buffer.is_contiguous():
            # DDP would read the result from the start of its storage, whatever the tensor says.
            raise CommoptError(f"DDP's bucket {number} does not fill its storage; report this torch version")
        layout = self._layouts.of(bucket)
        if number == 0:
            self._begin_step(buffer.device)
        self._require_one_device(buffer.device)
        if self._recorder.enabled:
            self._recorder.bucket(number, layout.title, buffer.nbytes)
        if last:
            self._check_step()
        held = Held(number, layout, buffer)
        future = self._pass_on(held, last=last)
        if last:
            self._end_step()
        self._lately_ns.append(perf_counter_ns() - entered_ns)
        self._hook_ns += self._lately_ns[-1]
        self._hook_calls += 1
        return future

    def _begin_step(self, device: torch.device) -> None:
        self._average_if_due()  # a rank that ran out of data, in DDP's join(), makes no forward before this
        if self._device is None:
            self._device = device
        self._planning.begin_step(self._steps)
        self._recorder.begin_step(self._steps, device)
        self._assembly.begin_step()
        self._sending.begin_step()
        self._step_layouts = []

    def _require_one_device(self, device: torch.device) -> None:
        assert self.aggregator is not None
        if device == self._device:
            return
        if self.aggregator.residual_paths:
            raise ConfigurationError(
                f"gradients lie on {self._device} and {device}; error feedback keeps one device per DDP model: put the "
                f"model on one, or use a lossless aggregator"
            )
        self._planning.give_up(f"gradients lie on {self._device} and {device}, and messages are of one device")

    def _check_step(self) -> None:
        """See, once a step is complete, to what an aggregator that remembers needs."""
        assert self.aggregator is not None
        self._recorder.compute_ends()
        if self.aggregator.residual_paths:
            if self._steps == 0 and self.scaler is None:
                misuse.warn_of_unknown_scaler()
            if self._gradients is not None:
                self._gradients.step_is_reduced()
            self._layouts.require_expected()

    def _pass_on(self, held: Held, *, last: bool) -> torch.futures.Future[Tensor]:
        """Send what is complete with this bucket, which may itself have to wait for others."""
        messages = self._assembly.add(held, last=last)
        if all(message.held[-1] is not held for message in messages):
            held.ticket = lanes.Ticket(held.bucket)
        for message in messages:
            ticket = self._send(message, last=last and message is messages[-1])
            if message.held[-1] is held:
                future = ticket.future
        return future if held.ticket is None else held.ticket.future

    def _send(self, message: Message, *, last: bool) -> lanes.Ticket:
        assert self.aggregator is not None
        self._step_layouts += message.layouts
        return self._sending.send(
            message,
            self._planning.aggregators_for(message, self.aggregator),
            self.membership,
            self._owner,
            self._ledger,
            self._steps,
            self.scaler,
            self._recorder,
            last=last,
        )

    def _end_step(self) -> None:
        assert self._device is not None  # of the first bucket
        usual_us = median(self._lately_ns) / 1000 if self._lately_ns else 0.0
        self._planning.end_step(self._steps, self._device, usual_us, self._run)
        self._steps += 1

    def _run(self, work: Callable[[], None], what: str, device: torch.device | None = None) -> lanes.Ticket:
        """Put work of another kind on the lane, which every rank does at the same point."""
        device = device or self._device or self.membership.team.default_device
        return self._sending.run(work, what, self.membership, self._owner, device)

    def _run_and_wait(self, work: Callable[[], None], what: str) -> None:
        self._run(work, what).wait()

    def average_parameters(self) -> None:
        """Replace the parameters by their mean over all ranks, as PeriodicAverage does from time to time; collective.

        Call it before the model is saved or evaluated, and after training; the next average comes when it would have
        come. With other aggregators, and on one node, parameters are equal already and nothing happens.
        """
        self._averages.run(self.membership.team, self._run)

    def _average_if_due(self) -> None:
        self._averages.take_turn(self._steps, self.membership.team, self._run)

    def serve(self, ddp: TorchDDP) -> None:
        """Learn which model this is the state of, so that its buckets can be made anew."""
        self._ddp = ref(ddp)
        self._planning.serve(ddp)

    def before_forward(self) -> None:
        """Change, between two steps, what was decided to be changed."""
        self._recorder.forward_begins()
        self._planning.before_forward()

    def stats(self) -> dict[str, Any]:
        """Return what was done so far.

        Steps, DDP's buckets, the messages they made, payload bytes this rank sent and microseconds spent in the hook;
        with error feedback also
        residual_norm (of this rank, in units of the average gradient), compression_error (left out over what should
        have been sent, sampled), residual_bytes kept, and dropped_commits (non-finite values). Waits for the device.
        """
        joined, team = self._joined, None if self._joined is None else self._joined.team
        sent = WireBytes() if team is None else self._sending.wire_bytes(team) + self._averages.wire_bytes(team)
        return {
            "aggregator": repr(self.aggregator) if self.aggregator else _UNDECIDED,
            "cluster": str(joined.cluster) if joined else "not joined yet",
            "steps": self._steps,
            "buckets": self._hook_calls,
            "messages": self._sending.messages,
            "intra_bytes": sent.intra,
            "inter_bytes": sent.inter,
            "hook_us_per_bucket": self._hook_ns / 1000 / self._hook_calls if self._hook_calls else 0.0,
            **self._averages.stats(),
            **(self._ledger.stats() if self.aggregator is not None and self.aggregator.residual_paths else {}),
        }

    def timeline(self, trace: str | Path | None = None, plot: str | Path | None = None) -> Timeline:
        """Return what every rank recorded, on one clock; collective, between two steps.

        trace: where rank 0 writes it as a Chrome trace (ui.perfetto.dev reads it). plot: where rank 0 draws it, which
        needs matplotlib. Raises ConfigurationError when nothing was recorded.
        """
        return timeline_of(self._recorder, self.membership.team, self._run_and_wait, trace, plot)

    def report(self) -> Report:
        """Return where the time of a step goes: print it; collective, between two steps. Raises as `timeline`."""
        timeline, team = self.timeline(), self.membership.team
        ddp = None if self._ddp is None else self._ddp()
        sent = self._sending.wire_bytes(team) + self._averages.wire_bytes(team)
        return report_on(timeline, sent, self._steps, ddp, self._planning.plan)

    @property
    def plan(self) -> Plan | None:
        """What is followed now, None while DDP's own buckets are; `to_json()` saves it for another run."""
        return self._planning.plan

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What was decided about the plan so far, and why."""
        return tuple(self._planning.decisions)

    def freeze(self) -> None:
        """Change the plan no more, as under a CUDA graph; every rank must call it between the same two steps."""
        self._planning.give_up("frozen")

    # -------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by parameter name and element range, and the buckets they belong to.

        Every rank must save its own; `gathered_state_dict` is for checkpoints that one rank writes.
        """
        return saving.describe_rank(
            self._ledger,
            repr(self.aggregator) if self.aggregator else _UNDECIDED,
            self._steps,
            self.membership,
            self._layouts.numels,
            self._step_layouts,
            self._planning.plan,
        )

    def gathered_state_dict(self) -> dict[str, Any] | None:
        """Return all ranks' states on the first rank of the group, None on the others; collective."""
        return saving.gather(self.state_dict(), self.membership)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `saved` was taken: one rank's state_dict(), or a gathered one; collective.

        In the same world every bit is as if training had never stopped, if DDP had settled its buckets when the state
        was saved (after two steps; three with static_graph): they are used until DDP makes them again. In another
        world, for which the gathered form is needed, each rank starts with an equal part of the sum of all residuals.
        Raises ConfigurationError when parameters do not match, naming them, and MismatchError when ranks load
        different checkpoints.
        """
        if self.aggregator is None:
            raise ConfigurationError(
                "load_state_dict needs to know the aggregator; use commopt.attach, or HookState(aggregator)"
            )
        ledger = Ledger(per_step=self._ledger.per_step)
        own, problem = None, ""
        try:
            own = saving.load_into(ledger, saved, self.membership, self._layouts.numels, self.aggregator.residual_paths)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = str(error) if isinstance(error, ConfigurationError) else repr(error)
        part: Mapping[str, Any] = {} if problem else own or saved["ranks"][0]
        self.membership.agree(
            f"load_state_dict {next(self._loads)} of {self._owner}",
            loading=problem or "works",
            steps=str(part.get("steps")),
            buckets=sha256(repr(part.get("buckets")).encode()).hexdigest(),
        )
        if problem:
            raise ConfigurationError(problem)
        ledger.steps = self._steps = part["steps"]
        self._averages.begin_anew()
        self._ledger = ledger
        self._step_layouts = [layout_of(pieces) for pieces in part["buckets"]] if own is not None else []
        self._assembly.imitate(self._step_layouts)
        plan = None if own is None else own.get("plan")  # a plan is for one world
        self._planning.restart(self._steps, None if plan is None else Plan.from_json(plan))
        self._layouts.expect(part["parameters"])

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _PICKLED}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved)
        self.scaler = None
        self._start(None)

    def know(self, module: nn.Module) -> None:
        """Learn the names of the parameters, after unpickling."""
        self._start(module)
