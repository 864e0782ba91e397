"""What one registration of a hook remembers, and how it takes a bucket through the lane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from itertools import count
from time import perf_counter_ns
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commopt import lanes
from commopt.aggregate import Aggregator
from commopt.errors import CommoptError, ConfigurationError
from commopt.feedback import Account, Layout, Ledger, layout_of
from commopt.groups import Membership, WireBytes, join
from commopt.hooks import misuse, saving
from commopt.hooks.gradients import require_supported_bucket, require_supported_parameters
from commopt.hooks.layouts import Layouts
from commopt.hooks.rebucketing import Gradients, Rebucketing
from topology import Cluster

_UNDECIDED = "chosen by the hook"


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

    Raises ConfigurationError, UnsupportedTensorError, and MismatchError on every rank when ranks disagree.
    Pickling keeps aggregator, ranks_per_node and timeout; groups are made again at the first bucket, over the world.
    Residuals are each rank's own and a pickle is usually one rank's: save them with state_dict().
    """

    def __init__(
        self,
        aggregator: Aggregator | None = None,
        process_group: Any = None,
        ranks_per_node: int | None = None,
        module: nn.Module | None = None,
        scaler: Any = None,
        timeout: float | timedelta | None = None,
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
        self._start(module)
        self._join(process_group)

    def _start(self, module: nn.Module | None) -> None:
        self.decided_by: str | None = None
        self._module = None if module is None else ref(module)
        self._joined: Membership | None = None
        self._owner = ""
        self._sequence = count()
        self._loads = count()
        self._steps = 0
        self._hook_ns = 0
        self._buckets: Counter[tuple[Layout, torch.dtype, torch.device, int]] = Counter()
        self._layouts = Layouts(module)
        self._step_layouts: list[Layout] = []  # the buckets of this step so far, or of the last one
        self._device: torch.device | None = None
        self._ledger = Ledger(per_step=self.scaler is not None and self.scaler.is_enabled())
        self._rebucketing: Rebucketing | None = None
        self._gradients = None if module is None else misuse.ReducedGradients(module)

    def _join(self, process_group: Any) -> Membership:
        lanes.require_healthy()
        self._joined = membership = join(process_group, self._ranks_per_node, self._timeout_s)
        self._owner = f"HookState {next(membership.owners)}"
        membership.agree(f"{self._owner} setup", aggregator=repr(self.aggregator) if self.aggregator else _UNDECIDED)
        if self.aggregator is not None:
            self.aggregator.check(membership.team)
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
        elif self.aggregator != aggregator:
            raise ConfigurationError(
                f"HookState(aggregator={self.aggregator}) is registered with the hook commopt.{hook_name}, which means "
                f"{aggregator}; register commopt.hook to use the state's own, or pass HookState() without one"
            )
        self.decided_by = hook_name

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average one bucket over the ranks; the future resolves to `bucket.buffer()` itself."""
        entered_ns = perf_counter_ns()
        membership, aggregator = self.membership, self.aggregator
        assert aggregator is not None  # the hook decided
        buffer = bucket.buffer()
        require_supported_bucket(buffer, bucket.parameters(), self._module() if self._module else None)
        if buffer.storage_offset() != 0 or not buffer.is_contiguous():
            # DDP would read the result from the start of its storage, whatever the tensor says.
            raise CommoptError(f"DDP's bucket {bucket.index()} does not fill its storage; report this torch version")
        # What is exact treats all elements alike; the rest may go by names and shapes, with or without a memory.
        layout = Layout.anonymous(buffer.numel()) if aggregator.lossless else self._layouts.of(bucket)
        if aggregator.residual_paths:
            self._prepare(bucket, layout, buffer.device)
        if self._rebucketing is not None and bucket.index() == 0 and self._rebucketing.ends():
            self._rebucketing = None
        if self._rebucketing is not None:
            future = self._hold(membership, bucket, layout, self._rebucketing)
        else:
            future = self._submit(membership, bucket, Gradients((layout,), [(layout, buffer.view(-1))]))
        self._steps += bucket.is_last()
        self._hook_ns += perf_counter_ns() - entered_ns
        return future

    def _prepare(self, bucket: dist.GradBucket, layout: Layout, device: torch.device) -> None:
        """See to what an aggregator that remembers needs before each bucket."""
        if self._device is None:
            self._device = device
        elif device != self._device:
            raise ConfigurationError(
                f"gradients lie on {self._device} and {device}; error feedback keeps one device per DDP model: put the "
                f"model on one, or use a lossless aggregator"
            )
        if bucket.is_last():
            if self._steps == 0 and self.scaler is None:
                misuse.warn_of_unknown_scaler()
            if self._gradients is not None:
                self._gradients.step_is_reduced()
            self._layouts.require_expected()
        if bucket.index() == 0:
            self._step_layouts = []
        self._step_layouts.append(layout)

    def _hold(
        self, membership: Membership, bucket: dist.GradBucket, layout: Layout, rebucketing: Rebucketing
    ) -> torch.futures.Future[Tensor]:
        """Keep a bucket until its step is complete, then reduce them all in the buckets of the checkpoint."""
        if not bucket.is_last():
            return rebucketing.hold(layout, bucket.buffer()).future
        regrouped, tickets = rebucketing.complete(layout, bucket.buffer())
        self._step_layouts = list(regrouped.layouts)
        return self._submit(membership, bucket, regrouped, tickets)

    def _submit(
        self,
        membership: Membership,
        bucket: dist.GradBucket,
        gradients: Gradients,
        waiting: Sequence[lanes.Ticket] = (),
    ) -> torch.futures.Future[Tensor]:
        """Queue the reduction of one bucket, or of all buckets of a step."""
        aggregator, ledger = self.aggregator, self._ledger
        assert aggregator is not None  # the hook decided
        team, step, scaler, buffer = membership.team, self._steps, self.scaler, bucket.buffer()
        first_number, last = bucket.index() - len(waiting), bucket.is_last()

        def work() -> None:
            if first_number == 0:
                ledger.begin_step()
            loss_scale = _loss_scale(scaler, buffer.device)
            packed = gradients.pack()
            for number, (layout, flat) in enumerate(packed, first_number):
                account = Account(layout, step, number, membership.global_rank, ledger, loss_scale)
                aggregator.all_reduce(flat, team, 1.0 / team.size, account)
                ledger.end_bucket(last=last and flat is packed[-1][1])
            gradients.unpack(packed)

        what = f"bucket {bucket.index()} by {aggregator}"
        operation = lanes.Operation(
            membership, self._owner, next(self._sequence), what, gradients.numel, buffer.device.type
        )
        inputs = [held for _, held in gradients.held]
        ticket = lanes.lane_for(buffer.device).submit(operation, work, buffer, inputs, waiting)
        for layout, dtype in zip(gradients.layouts, gradients.dtypes(), strict=True):
            self._buckets[layout, dtype, buffer.device, aggregator.phase(step)] += 1
        return ticket.future

    def stats(self) -> dict[str, Any]:
        """Return what was done so far.

        Steps, buckets, payload bytes this rank sent and microseconds spent in the hook; with error feedback also
        residual_norm (of this rank, in units of the average gradient), compression_error (left out over what should
        have been sent, sampled), residual_bytes kept, and dropped_commits (non-finite values). Waits for the device.
        """
        buckets = self._buckets.total()
        sent = WireBytes()
        if self.aggregator is not None and self._joined is not None:
            for (layout, dtype, device, step), times in self._buckets.items():
                sent += self.aggregator.wire_bytes(layout, dtype, self._joined.team, device, step) * times
        return {
            "aggregator": repr(self.aggregator) if self.aggregator else _UNDECIDED,
            "cluster": str(self._joined.cluster) if self._joined else "not joined yet",
            "steps": self._steps,
            "buckets": buckets,
            "intra_bytes": sent.intra,
            "inter_bytes": sent.inter,
            "hook_us_per_bucket": self._hook_ns / 1000 / buckets if buckets else 0.0,
            **(self._ledger.stats() if self.aggregator is not None and self.aggregator.residual_paths else {}),
        }

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
        self._ledger = ledger
        self._step_layouts = [layout_of(pieces) for pieces in part["buckets"]] if own is not None else []
        self._rebucketing = Rebucketing(self._step_layouts) if self._step_layouts else None
        self._layouts.expect(part["parameters"])

    def __getstate__(self) -> dict[str, Any]:
        return {
            "aggregator": self.aggregator,
            "ranks_per_node": self._ranks_per_node,
            "timeout_s": self._timeout_s,
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.aggregator = saved["aggregator"]
        self.scaler = None
        self._ranks_per_node = saved["ranks_per_node"]
        self._timeout_s = saved["timeout_s"]
        self._start(None)

    def know(self, module: nn.Module) -> None:
        """Learn the names of the parameters, after unpickling."""
        self._start(module)


def _loss_scale(scaler: Any, device: torch.device) -> Tensor | None:
    """Return what gradients are multiplied by, on `device`; None for 1. No host sync."""
    if scaler is None or not scaler.is_enabled() or scaler._scale is None:
        return None
    scale: Tensor = scaler._scale
    return scale.detach().to(device, torch.float32, non_blocking=True)
