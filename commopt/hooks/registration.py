"""What one registration of a hook remembers, and how it takes a bucket through the lane."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter_ns
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from commopt import lanes
from commopt.aggregate import Aggregator, Flat
from commopt.bucketing import Assembly, Held, Layouts, Message, Planning, Wish
from commopt.errors import CommoptError, ConfigurationError
from commopt.feedback import Fidelity, Layout, Ledger
from commopt.groups import NcclByLevel, WireBytes
from commopt.hooks import misuse
from commopt.hooks.gradients import require_supported_bucket
from commopt.hooks.periodic import ParameterAverages
from commopt.hooks.sending import Sending, Step
from commopt.lanes.ownership import enter, leave
from commopt.plan import Faithfulness, Plan, Tuned
from commopt.recording import Recorder


@dataclass(frozen=True)
class Settings:
    """What a registration is asked for beside an aggregator, and begins with again after unpickling.

    record: whether the times of all steps are kept rather than of those that planning measures.
    """

    ranks_per_node: int | None
    timeout_s: float | None
    wish: Wish
    record: bool
    nccl: NcclByLevel


class Registration:
    """The memory of one hook: made without communication; `join` finds the other ranks, `settle` what averages.

    steps: how many are complete, with those before the checkpoint it goes on from; reduced_steps: without. Those that
    DDP averages by itself join them when the hook is back; steps_by_ddp: how many of them were.
    step: the one under way, or the last. joined: None before `join`.
    """

    def __init__(
        self, settings: Settings, aggregator: Aggregator | None, module: nn.Module | None, scaler: Any
    ) -> None:
        self.settings = settings
        self.aggregator = aggregator
        self.scaler = scaler
        self.joined: Sending | None = None
        self.steps = self.reduced_steps = self.steps_by_ddp = 0
        self.ledger = Ledger(per_step=scaler is not None and scaler.is_enabled())
        self.step = Step(0, self.ledger, scaler)
        self.hook_ns = self.hook_calls = 0
        self.layouts = Layouts(module)
        self.recorder = Recorder()
        self.assembly = Assembly()
        self.planning = Planning(self.recorder, self.assembly, self.layouts, self._fidelity, record=settings.record)
        self.averages = ParameterAverages(aggregator, module, self.layouts.parameters.values(), self._average_if_due)
        self._module = None if module is None else ref(module)
        self._device: torch.device | None = None
        self._plans_seen = 0
        self._raising_task = -1
        self._lately_ns: deque[int] = deque(maxlen=64)
        self._sent_by_ddp = WireBytes()
        self._unused: misuse.UnusedAverages | None = None

    # ------------------------------------------------------------------------------------- setting up

    def join(self, process_group: Any = None, problem: Exception | None = None) -> Sending:
        """Find the other ranks of the group, None meaning the world, and agree with them; collective.

        `problem` is why this rank cannot go on: it raises it, and the others a ConfigurationError that tells it.
        """
        settings = self.settings
        membership = enter(process_group, settings.ranks_per_node, settings.timeout_s, settings.nccl, problem)
        try:
            if membership.team.rank == 0:
                misuse.warn_of_untested_torch(torch.__version__)
            record = str(settings.record)  # what is recorded is never left to DDP
            owner = membership.enroll("HookState", problem, aggregator=self.aggregator_name, record=record)
            sending = Sending(membership, owner, self.recorder)
            self.settings = replace(settings, wish=settings.wish.settled(owner, membership))
            if self.aggregator is not None:
                self._begin(self.aggregator, sending)
        except BaseException:
            leave(membership, close=False)
            raise
        self.joined = sending
        return sending

    def settle(self, aggregator: Aggregator) -> None:
        """Average with `aggregator`, as none was chosen yet; collective."""
        sending = self.sending
        sending.require_open("first bucket")
        sending.membership.agree(f"first bucket of {sending.owner}", aggregator=repr(aggregator))
        self._begin(aggregator, sending)
        self.aggregator = aggregator

    def _begin(self, aggregator: Aggregator, sending: Sending) -> None:
        aggregator.check(sending.team)
        aggregator = self.layouts.resolved(aggregator, warn=sending.team.rank == 0)
        may_plan = not self.planning.given_up
        sending.watch_fidelity = may_plan and aggregator.tunes and bool(aggregator.residual_paths)
        self.planning.begin(sending.team, aggregator, self.settings.wish)

    @property
    def sending(self) -> Sending:
        """This rank's place among the others; where it was not found at first it is, collectively, when needed."""
        return self.joined or self.join()

    def close(self, *, groups: bool = True) -> None:
        """See HookState.close. groups: False keeps the process groups for the next owner, at once."""
        if self.joined is not None and not self.joined.closed:
            leave(self.joined.membership, close=groups)
            self.joined.closed = True

    def require_open(self, what: str) -> None:
        """Raise ConfigurationError when `close` came before `what`."""
        if self.joined is not None:
            self.joined.require_open(what)

    @property
    def aggregator_name(self) -> str:
        """What averages, for messages and comparisons."""
        return repr(self.aggregator) if self.aggregator is not None else "chosen by the hook"

    # ------------------------------------------------------------------------------------- every bucket

    def before_forward(self, *, sends: bool) -> None:
        """Change, between two steps, what was decided to be changed."""
        self.recorder.forward_begins()
        self.planning.before_forward(self.steps, sends=sends)
        self._count_by_ddp()

    def _count_by_ddp(self) -> None:
        """Take note of the steps that DDP has averaged by itself before the hook came back."""
        steps = self.planning.turns.fetch_steps_away()
        if steps == 0:  # then this rank need not even have joined the others yet
            return
        self._sent_by_ddp += self._wire_bytes_by_ddp(steps)
        self.steps_by_ddp += steps
        self.reduced_steps += steps
        self.steps += steps
        self.ledger.steps += steps

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average one bucket over the ranks; the future resolves to `bucket.buffer()` itself."""
        entered_ns = perf_counter_ns()
        buffer, number, last = bucket.buffer(), bucket.index(), bucket.is_last()
        require_supported_bucket(bucket, buffer, self._module)
        if buffer.storage_offset() != 0 or not buffer.is_contiguous():
            # DDP would read the result from the start of its storage, whatever the tensor says.
            raise CommoptError(f"DDP's bucket {number} does not fill its storage; report this torch version")
        layout = self.layouts.of(bucket)
        if number == 0:
            self._begin_step(buffer.device)
        if buffer.device != self._device:
            self._require_one_device(buffer.device)
        if self.recorder.enabled:
            self.recorder.bucket(number, layout.title, buffer.nbytes)
        if last:
            self._check_step()
        ticket = self._pass_on(Held(number, layout, buffer), last=last)
        future = ticket.ended(buffer) if self._let_backward_raise() else ticket.future
        if last:
            self._end_step()
        spent_ns = perf_counter_ns() - entered_ns
        self._lately_ns.append(spent_ns)
        self.hook_ns += spent_ns
        self.hook_calls += 1
        return future

    def _begin_step(self, device: torch.device) -> None:
        self._average_if_due()  # a rank that ran out of data, in DDP's join(), makes no forward before this
        if self._device is None:
            self._device = device
        self.planning.begin_step(self.steps)
        self.recorder.begin_step(self.steps, device)
        self.assembly.begin_step()
        self.step = Step(self.steps, self.ledger, self.scaler)
        if self.planning.changes != self._plans_seen:  # a new plan is judged by its own samples
            self._plans_seen = self.planning.changes
            self.sending.fidelity = Fidelity(self.steps)

    def _let_backward_raise(self) -> bool:
        """Let the backward under way raise the error of a lane that fails meanwhile; return False outside of one.

        Such a LaneError stays what it is, where DDP makes a RuntimeError of a future's. A step may have several graph
        tasks (a reentrant checkpoint, two backwards of one forward). DDP waits for the futures in the one in which it
        shows the last bucket, which it does not always call the last: so every task that shows one gets a callback.
        """
        task = torch._C._current_graph_task_id()
        if task == -1:  # DDP's join() calls the hook by itself
            return False
        if task != self._raising_task:
            engine = Variable._execution_engine
            # From within a callback, so that it comes after DDP's own, which waits for the lane.
            engine.queue_callback(lambda: engine.queue_callback(lanes.require_healthy))
            self._raising_task = task
        return True

    def _require_one_device(self, device: torch.device) -> None:
        assert self.aggregator is not None
        if self.aggregator.residual_paths:
            raise ConfigurationError(
                f"gradients lie on {self._device} and {device}; error feedback keeps one device per DDP model: put the "
                f"model on one, or use a lossless aggregator"
            )
        self.planning.give_up(f"gradients lie on {self._device} and {device}, and messages are of one device")

    def _check_step(self) -> None:
        """See, once a step is complete, to what an aggregator that remembers needs."""
        assert self.aggregator is not None
        self.recorder.compute_ends()
        if self.aggregator.residual_paths:
            if self.reduced_steps == 0 and self.scaler is None:
                misuse.warn_of_unknown_scaler()
            if not self.ledger.per_step:
                self._unused = self._unused or misuse.UnusedAverages()
                self._unused.step_is_reduced()
            self.layouts.require_expected()

    def _pass_on(self, held: Held, *, last: bool) -> lanes.Ticket:
        """Send what is complete with this bucket, which may itself have to wait for others; return its ticket."""
        messages = self.assembly.add(held, last=last)
        if all(message.held[-1] is not held for message in messages):
            held.ticket = lanes.Ticket(held.bucket)
        for message in messages:
            sent = self._send(message, last=last and message is messages[-1])
            if message.held[-1] is held:
                ticket = sent
        return ticket if held.ticket is None else held.ticket

    def _send(self, message: Message, *, last: bool) -> lanes.Ticket:
        return self.sending.send(message, self.planning.aggregators_for(message), self.step, last=last)

    def _end_step(self) -> None:
        assert self._device is not None  # of the first bucket
        usual_us = median(self._lately_ns) / 1000 if self._lately_ns else 0.0
        self.planning.end_step(self.steps, self._device, usual_us, self.run)
        self.steps += 1
        self.reduced_steps += 1

    # ------------------------------------------------------------------------------------- between steps

    def freeze(self) -> None:
        """See HookState.freeze."""
        self.planning.give_up("frozen")
        if self.joined is not None:
            self.joined.watch_fidelity = False  # which nobody will ask for

    def run(self, work: Callable[[], None], what: str, device: torch.device | None = None) -> lanes.Ticket:
        """Put work of another kind on the lane, which every rank does at the same point."""
        sending = self.sending
        return sending.run(work, what, device or self._device or sending.team.default_device)

    def scale_by(self, scaler: Any) -> None:
        """Take note of another GradScaler."""
        self.scaler = scaler
        self.ledger.per_step = scaler is not None and scaler.is_enabled()

    def average_parameters(self) -> None:
        """See HookState.average_parameters."""
        self.averages.run(self.sending.team, self.run)

    def _average_if_due(self) -> None:
        """Average the parameters if it is time, but start nothing in a step that must not be captured."""
        self.planning.require_repeatable(self.steps)
        self.averages.take_turn(self.steps, self.sending.team, self.run)

    def wire_bytes(self) -> WireBytes:
        """Return the payload this rank has sent, nothing before it has joined."""
        if self.joined is None:
            return WireBytes()
        team, away = self.joined.team, self.planning.turns.steps_away()
        sent = self.joined.traffic.wire_bytes(team) + self.averages.traffic.wire_bytes(team) + self._sent_by_ddp
        return sent + self._wire_bytes_by_ddp(away) if away else sent

    def _wire_bytes_by_ddp(self, steps: int) -> WireBytes:
        """Return what DDP by itself sends in so many steps."""
        sent, team, device = WireBytes(), self.sending.team, self._device
        assert device is not None  # it has shown its buckets
        for layout in self.assembly.buckets:
            dtype = self.layouts.parameters[layout.pieces[0].name].dtype
            sent += Flat().wire_bytes(layout, dtype, team, device, 0) * steps
        return sent

    def _fidelity(self) -> Faithfulness | None:
        """Return how well compressed updates follow the gradients, where that is watched; on the lane."""
        sending = self.joined
        if sending is None or not sending.watch_fidelity:
            return None
        return Faithfulness(sending.fidelity.cosine(), self.ledger.stats()["residual_norm"])

    def go_on(
        self,
        ledger: Ledger,
        steps: int,
        buffers: Sequence[Layout],
        plan: Plan | None,
        tuned: Tuned | None,
        numels: Mapping[str, int],
    ) -> None:
        """Go on from a checkpoint, taken after `steps` steps of a model with parameters of `numels`.

        buffers: in which it went, empty for other ones. plan: which it followed, if any. tuned: what tuning came to.
        """
        self.planning.turns.come_back()
        self._count_by_ddp()
        ledger.steps = self.steps = steps
        self.ledger = ledger
        self.step = Step(steps, ledger, self.scaler, list(buffers))
        self.averages.begin_anew()
        self.assembly.imitate(buffers)
        self.planning.restart(steps, plan, tuned)
        self.layouts.expect(numels)
