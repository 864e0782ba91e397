"""HookState, what users hold of a registration: its options, what it did, its plan and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.aggregate import Aggregator
from commopt.errors import ConfigurationError
from commopt.groups import Membership, NcclByLevel
from commopt.groups.build import read_arguments
from commopt.hooks import checkpoint
from commopt.hooks.checks import require_supported_parameters
from commopt.hooks.path import BucketPath
from commopt.hooks.registration import Registration, Settings
from commopt.schedule import BucketConfig, Decision, Plan, Tuned
from topology import Cluster

if TYPE_CHECKING:
    from commopt.cost import Links
    from commopt.timeline import Report, Timeline


class HookState:
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
    needed_first: changes nothing any more; True warns.
    tuned: for "auto", what an earlier tuning came to (or the path of its file): begun with, and watched.
    record: keep the times of all steps, for `timeline` and `report`; else only those that planning measures are kept.
        The same on all ranks.
    nccl: what NCCL may take of the GPU on a level ("world", "intra", "inter"; levels that this cluster lacks are no
        error): {"inter": NcclOptions(max_ctas=4)}.

    Raises ConfigurationError, UnsupportedTensorError, and MismatchError on every rank when ranks disagree.
    Pickling keeps aggregator, ranks_per_node, timeout, plan, links, record, tuned and nccl; groups are made again at
    the first bucket, over the world, and `scaler` must be assigned again. Residuals are each rank's own and a pickle is
    usually one rank's: save them with state_dict().
    """

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
        needed_first: bool = False,
        record: bool = False,
        tuned: Tuned | str | Path | None = None,
        nccl: NcclByLevel | None = None,
    ) -> None:
        config, problem = BucketConfig(), None
        try:  # a mistake of this rank alone, as a file that it lacks, is every rank's to hear of
            _require_arguments(aggregator, module, scaler)
            ranks_per_node, timeout_s, nccl = read_arguments(ranks_per_node, timeout, nccl)
            config = BucketConfig.read(plan, links, needed_first, tuned)
        except Exception as error:
            aggregator, module, scaler, problem = None, None, None, error
            ranks_per_node, timeout_s, nccl = None, None, {}
        settings = Settings(ranks_per_node, timeout_s, config, record, nccl)
        self._start(settings, aggregator, module, scaler)
        if process_group is not None or dist.is_initialized():
            self._registration.join(process_group, problem)
        elif problem is not None:
            raise problem

    def _start(
        self, settings: Settings, aggregator: Aggregator | None, module: nn.Module | None, scaler: Any = None
    ) -> None:
        self.decided_by: str | None = None
        self._registration = Registration(settings, aggregator, module, scaler)
        self._path = BucketPath(self._registration)
        self._controller = self._registration.controller
        self._ddp: ref[TorchDDP] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self._registration.settings, "aggregator": self.aggregator}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self._start(saved["settings"], saved["aggregator"], None)

    @property
    def aggregator(self) -> Aggregator | None:
        """What averages the buckets, None while that is left to a preset."""
        return self._registration.aggregator

    @property
    def scaler(self) -> Any:
        """The GradScaler of the training loop, or None; it may be given later, between two steps."""
        return self._registration.scaler

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        _require_scaler(scaler)
        self._registration.scale_by(scaler)

    @property
    def membership(self) -> Membership:
        """This rank's place in the groups; joins them (collectively) after unpickling."""
        return self._registration.client.membership

    @property
    def cluster(self) -> Cluster:
        """Which ranks share a node."""
        return self.membership.cluster

    def average_parameters(self) -> None:
        """Replace the parameters by their mean over all ranks, as LocalSGD does from time to time; collective.

        Call it before the model is saved or evaluated, and after training; the next average comes when it would have
        come. With other aggregators, and on one node, parameters are equal already and nothing happens.
        """
        if self._registration.averages is not None:
            self._registration.averages.run(self._registration.client)

    def close(self) -> None:
        """Finish what was started, and close commopt's process groups; every rank must, and the model trains no more.

        They are shared: the last HookState or Communicator of the same group and settings to close ends them. What was
        never closed is, when the process group has been destroyed, at the next call that joins one.
        """
        if self._registration.joined is not None:
            self._registration.joined.close()

    # ------------------------------------------------------------------------------------- for hooks

    def withdraw(self) -> None:
        """Take part no more, as no model got this state; not collective."""
        if self._registration.joined is not None:
            self._registration.joined.close(groups=False)

    def join(self, process_group: dist.ProcessGroup) -> None:
        """Find the other ranks of DDP's group, unless that was done before; collective."""
        if self._registration.joined is None:
            self._registration.join(process_group)

    def know(self, module: nn.Module) -> None:
        """Learn the names of the parameters, after unpickling."""
        frozen = self._controller.frozen
        self._start(self._registration.settings, self.aggregator, module, self.scaler)
        if frozen:
            self.freeze()

    def serve(self, ddp: TorchDDP) -> None:
        """Learn which model this is the state of, so that its buckets can be made anew."""
        self._ddp = ref(ddp)
        self._controller.serve(ddp)

    def before_forward(self, *, sends: bool) -> None:
        """Change, between two steps, what was decided to be changed. sends: whether the backward will."""
        registration = self._registration
        registration.recorder.forward_begins()
        registration.controller.before_forward(registration.steps, sends=sends)

    def decide(self, aggregator: Aggregator, hook_name: str) -> None:
        """Settle on `aggregator`, the one the registered hook stands for; collective the first time.

        Raises ConfigurationError when the state was made with another one.
        """
        if self.aggregator is None:
            self._registration.settle(aggregator)
        elif self.aggregator != aggregator:
            raise ConfigurationError(
                f"HookState(aggregator={self.aggregator}) is registered with the hook commopt.{hook_name}, which means "
                f"{aggregator}; register commopt.hook to use the state's own, or pass HookState() without one"
            )
        self.decided_by = hook_name

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average one bucket over the ranks; the future resolves to `bucket.buffer()` itself."""
        return self._path.reduce(bucket)

    # ------------------------------------------------------------------------------------- what was done

    def stats(self) -> dict[str, Any]:
        """Return what was done so far.

        Steps, DDP's buckets that the hook saw, payload bytes this rank sent and microseconds spent in the hook; with
        error feedback also residual_norm (of this rank, in units of the average gradient), compression_error (left
        out over what should have been sent, sampled), residual_bytes and factor_bytes kept, and dropped_commits
        (non-finite values); with LocalSGD parameter_averages. Waits for the device.
        """
        registration, path, sent = self._registration, self._path, self._path.wire_bytes()
        joined, averages = registration.joined, registration.averages
        return {
            "aggregator": registration.aggregator_name,
            "cluster": str(joined.membership.cluster) if joined else "not joined yet",
            "steps": registration.steps,
            "buckets": path.hook_calls,
            "intra_bytes": sent.intra,
            "inter_bytes": sent.inter,
            "hook_us_per_bucket": path.hook_ns / 1000 / path.hook_calls if path.hook_calls else 0.0,
            **({} if averages is None else {"parameter_averages": averages.times}),
            **(registration.store.stats() if self.aggregator is not None and self.aggregator.residual_paths else {}),
        }

    def timeline(self, trace: str | Path | None = None, plot: str | Path | None = None) -> Timeline:
        """Return what every rank recorded, on one clock; collective, between two steps.

        trace: where rank 0 writes it as a Chrome trace (ui.perfetto.dev reads it). plot: where rank 0 draws it, which
        needs matplotlib. Raises ConfigurationError on every rank when nothing was recorded or a file cannot be written.
        """
        from commopt.hooks.insight import timeline_of  # which draws, and reads what all ranks recorded

        return timeline_of(self._registration.recorder, self._registration.client, trace, plot)

    def report(self) -> Report:
        """Return where the time of a step goes: print it; collective, between two steps. Raises as `timeline`."""
        from commopt.hooks.insight import report_on

        ddp, steps = None if self._ddp is None else self._ddp(), self._registration.reduced_steps
        return report_on(self.timeline(), self._path.wire_bytes(), steps, ddp, self.plan)

    # ------------------------------------------------------------------------------------- plans

    @property
    def plan(self) -> Plan | None:
        """What is followed now, None while DDP's own buckets are; `to_json()` saves it for another run."""
        return self._controller.plan

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What was decided about the plan so far, and why."""
        return tuple(self._controller.decisions)

    @property
    def tuned(self) -> Tuned | None:
        """What tuning has come to, None before; `save()` writes it to a file for the next run."""
        return self._controller.tuned

    def explain(self) -> str:
        """Return in words and numbers what averages the gradients now, and why; the same on every rank."""
        from commopt.schedule import explain

        return explain(self.aggregator, self.tuned, self.decisions)

    def save_nccl_tuning(self, path: str | Path, links: Links | str | Path) -> None:
        """Write what NCCL should send the messages of a step by, as the file of its example tuner plugin.

        links: what `python -m commopt probe` measured over NCCL, or nominal ones. A prediction, by closed forms; see
        commopt.schedule.nccl. Not collective. Raises ConfigurationError before the first step, and for other links.
        """
        from commopt.cost import Links
        from commopt.schedule import tuner_rows, write_csv

        lengths = self._controller.message_nbytes()
        if not lengths:
            raise ConfigurationError("no step was taken yet, so it is not known how long messages are; train first")
        known = Links.load(links) if isinstance(links, (str, Path)) else links
        write_csv(tuner_rows(self.membership.team, known, lengths), path)

    def freeze(self) -> None:
        """Change the plan no more; every rank must call it between the same two steps.

        A step can then be captured in a CUDA graph, once DDP has shown the same buckets twice: what cannot be repeated
        (docs/bucketing.md) raises ConfigurationError while it is captured. Replayed steps are not in `stats()`.
        """
        self._registration.freeze()

    # ------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by parameter name and element range, and the buckets they belong to.

        Every rank must save its own; `gathered_state_dict` is for checkpoints that one rank writes. Ask between two
        steps: during one, some of its buckets count already and others do not.
        """
        return checkpoint.part_of(self._registration)

    def gathered_state_dict(self) -> dict[str, Any] | None:
        """Return all ranks' states on the first rank of the group, None on the others; collective."""
        self._require_open("gathered_state_dict")
        return checkpoint.gather(self.state_dict(), self.membership)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `saved` was taken: one rank's state_dict(), a gathered or a merged one; collective.

        In the same world every bit is as if training had never stopped, if DDP had settled its buckets when the state
        was saved (after two steps; three with static_graph) and makes the same ones, or can be given them (torch 2.13),
        whatever `plan` is. A strategy that a plan chose is followed with "adaptive" only. In another world, for which
        the gathered form or commopt.merged_state() is needed, each rank starts with an equal part of the sum of all
        residuals.
        Raises ConfigurationError when what any rank was given is damaged or does not fit, naming what, and
        MismatchError when ranks load different checkpoints; on every rank, and nothing has changed then.
        """
        self.load_from(lambda: saved)

    def load_from(self, read: Callable[[], object]) -> None:
        """Load what `read` returns; what it raises becomes a ConfigurationError on every rank. As load_state_dict."""
        self._require_open("load_state_dict")
        checkpoint.load(read, self._registration)

    def _require_open(self, what: str) -> None:
        if self._registration.joined is not None:
            self._registration.joined.require_open(what)


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
    _require_scaler(scaler)


def _require_scaler(scaler: Any) -> None:
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise ConfigurationError(f"scaler is a {type(scaler).__name__}; pass the torch.amp.GradScaler or None")
