# SPDX-License-Identifier: Apache-2.0
"""`CommState`, the object that users hold of any registration: figures, reports and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commopt.aggregate import Aggregator
from commopt.attached import checkpoint
from commopt.attached.checks import require_plain_groups
from commopt.attached.options import require_scaler
from commopt.attached.registration import Registration
from commopt.attached.snapshot import Snapshot
from commopt.checkpoint_files import from_bytes, to_bytes
from commopt.errors import ConfigurationError
from commopt.groups import Connections, Membership
from commopt.schedule import Decision, Plan
from topology import Cluster

if TYPE_CHECKING:
    from commopt.timeline import Report, Timeline

_log = logging.getLogger("commopt")


class CommState:
    """The figures, checkpoints and reports of one attached model; made by `attach`.

    HookState for DDP; ShardedState for FSDP2 with replicas and OneDimensionState for FSDP2 over all ranks. Methods that
    say "collective" must be called by every rank of the model, between two steps; a mistake of one rank is raised on
    all of them. Bytes are of payload, of this rank, since `attach`.
    """

    _registration: Registration

    @property
    def aggregator(self) -> Aggregator | None:
        """The aggregator of the gradients, None while that is left to a preset."""
        return self._registration.aggregator

    @property
    def scaler(self) -> Any:
        """The GradScaler of the training loop, or None; it may be given later, between two steps."""
        return self._registration.scaler

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        require_scaler(scaler)
        self._registration.scale_by(scaler)

    @property
    def membership(self) -> Membership:
        """This rank's place in the groups; joins them (collectively) after unpickling."""
        return self._registration.client.membership

    @property
    def cluster(self) -> Cluster:
        """Which ranks share a node."""
        return self.membership.cluster

    @property
    def plan(self) -> Plan | None:
        """Which gradients travel together and how, where commopt says so; None where the model does."""
        return None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions about the plan so far, with their reasons."""
        return ()

    def optimizer(self, params: Any, lr: float | Tensor, weight_decay: float = 0.01) -> torch.optim.SGD:
        """Return the optimizer for an aggregator with `adam=`: together they are AdamW, decoupled decay and all.

        A torch.optim.SGD without momentum: what is in .grad is Adam's direction u, and x -= lr (u + weight_decay x).
        params: parameters, or groups of them with `lr` and `weight_decay` of their own, as torch's optimizers take.
        Raises ConfigurationError without `adam=`, for options of groups that belong into commopt.Adam, and for
        parameters whose gradients are not averaged here.
        """
        if self.aggregator is None or self.aggregator.adam is None:
            raise ConfigurationError(
                f"optimizer() is for directions of Adam, and {self._registration.aggregator_name} averages gradients; "
                f"attach with adam=, for example commopt.attach(ddp, 'hierarchical_onebit', adam=commopt.Adam())"
            )
        made = torch.optim.SGD(params, lr=lr, weight_decay=weight_decay)
        require_plain_groups(made)
        ours = set(map(id, self._registration.parameters.values()))
        given = [each for group in made.param_groups for each in group["params"] if each.requires_grad]
        if ours and (others := sum(id(each) not in ours for each in given)):
            raise ConfigurationError(
                f"optimizer() got {others} of {len(given)} parameters whose gradients are not averaged here, so that "
                f"nobody makes directions of them; give them an optimizer of their own"
            )
        if self._registration.steps_between is not None:
            self._registration.steps_between.expect()
        return made

    def weight(self, n: float | Tensor) -> None:
        """Let this rank's gradients count for `n` in the average of this step: the samples or tokens they are of.

        With g_r the gradient of rank r as its backward leaves it, of the mean loss over its n_r samples, `.grad` is
        sum_r n_r g_r / sum_r n_r, the gradient of the mean loss over all samples, in the place of the mean of all g_r.
        Call it on every rank, in every step, before the forward whose backward is averaged; calls before earlier
        forwards under no_sync() add up. n: a number, 0 or more (a tensor on a GPU would be waited for). A rank with 0
        sends zeros, whatever its gradients are; a rank without further data in join() counts as 0. Where all have 0
        the average is zero, and a warning says so once.

        With a LocalSGD it is the weight inside the node, and what a node's gradients counted for since the last round
        is the weight of its parameters in the next one.

        Raises ConfigurationError for what is no weight, on this rank now and on the others in their backward; on all
        ranks in backward where one of them gave none; at once with `adam=`. Where only some ranks begin to call it they
        raise MismatchError within `timeout`.
        """
        self._registration.weigh(n)

    def average_parameters(self) -> None:
        """Replace the parameters by their mean over all ranks, exactly; collective.

        With LocalSGD call it before the model is saved or evaluated, and after training: what is on its way arrives
        first, and the next round comes when it would have come. With other aggregators, and on one node, parameters are
        equal already and nothing happens. Raises MismatchError within `timeout`, and nothing has changed then, when not
        all ranks call it between the same two steps.
        """
        registration = self._registration
        if registration.averages is not None:
            what = f"average_parameters after {registration.steps} averaged backwards"
            registration.averages.run(registration.averages.client or registration.client, what)

    @property
    def nodes_differ(self) -> bool:
        """Whether nodes may hold different parameters now: with LocalSGD, in training since average_parameters().

        The same on all ranks.
        """
        averages = self._registration.averages
        return averages is not None and averages.apart

    def close(self) -> None:
        """Finish what was started, and close commopt's process groups; every rank must.

        A model of DDP trains no more; one of FSDP2 is FSDP's own again, and may be attached again.
        They are shared: the last state or Communicator of the same group and settings to close ends them. What was
        never closed is, when the process group has been destroyed, at the next call that joins one.
        """
        self._registration.close()

    # ------------------------------------------------------------------------------------- what was done

    def stats(self) -> dict[str, Any]:
        """Return what was done so far.

        connections: of gloo between two ranks of different nodes (docs/performance.md#several-connections).
        Steps, buckets that the hook saw, how many of them were replayed as CUDA graphs (docs/performance.md), payload
        bytes this rank sent (inter_bytes to other nodes; where sites are known, of these inter.intra_bytes inside the
        site and inter.inter_bytes to other sites) and microseconds spent in the hook; with error feedback also
        residual_norm (of this rank, in units of the average gradient), compression_error (left out over what should
        have been sent, sampled), residual_bytes and factor_bytes kept, and dropped_commits (non-finite values); with
        LocalSGD parameter_averages; once replicas were compared replica_checks (how often), replicas_equal_after (the
        steps before the last check that found them equal) and residual_norms (of all ranks). memory: the bytes kept on
        this rank, by kind (residuals, averages, factors, masks, scratch). Waits for the device.
        """
        registration = self._registration
        joined, calls, sent = registration.joined, registration.hook_calls, registration.wire_bytes()
        return {
            "aggregator": registration.aggregator_name,
            "cluster": str(joined.membership.cluster) if joined else "not joined yet",
            "connections": joined.membership.connections.count if joined else 1,
            "steps": registration.steps,
            "buckets": calls,
            **{f"{level}_bytes": nbytes for level, nbytes in sent.by_level().items()},
            "replayed": registration.replayed,
            "hook_us_per_bucket": registration.hook_ns / 1000 / calls if calls else 0.0,
            "memory": registration.store.memory(),
            **(registration.store.stats() if registration.residual_paths else {}),
            **({} if registration.divergence is None else registration.divergence.stats()),
            **({} if registration.averages is None else {"parameter_averages": registration.averages.times}),
        }

    def timeline(self, trace: str | Path | None = None) -> Timeline:
        """Return what every rank recorded, on one clock; collective, between two steps.

        Of FSDP2's replicas each gets that of its shard. trace: where rank 0 writes it as a Chrome trace
        (ui.perfetto.dev reads it). Raises ConfigurationError on every rank when nothing was recorded or the file cannot
        be written, and MismatchError when not all ranks call it.
        """
        from commopt.attached.insight import timeline_of  # which reads what all ranks recorded
        from commopt.timeline import write_trace

        return timeline_of(self._registration, write_trace, trace, "timeline")

    def report(self, html: str | Path | None = None) -> Report:
        """Return where the time of a step goes: print it; collective, between two steps. Raises as `timeline`.

        html: where rank 0 writes it as one page with pictures, which needs a browser and no network.
        """
        from commopt.attached.insight import report_on, timeline_of

        def write(timeline: Timeline, file: Path) -> None:
            from commopt.timeline.page import write_page

            found = report_on(timeline, self._registration, self.plan)
            write_page(file, timeline, found, self.explain(), [each.reason for each in self.decisions])

        return report_on(timeline_of(self._registration, write, html, "report"), self._registration, self.plan)

    def log_to(self, target: Any, every: int = 50) -> None:
        """Write what communication does to a logger, from now on, after every `every`-th step; collective.

        target: where the first rank writes; the others' is not looked at and may be None.
            `add_scalar(name, value, step)`: a SummaryWriter of TensorBoard
            `log_metrics(scalars, step=)`: a logger of Lightning, MLflow or Comet
            `log(scalars)`: a run of W&B, with the step as comm/step; a Trainer of transformers
            a path: a CSV file, which is added to
            anything else that can be called: `target(step, scalars)`, with a dict of floats

        The scalars, each if it is known:
            comm/step_ms, comm/compute_ms: length of a step; until its last gradient
            comm/exposed_ms, comm/waiting_ms: communication after that; of it, waiting for ranks that are not there yet
            comm/hidden_ms: communication while gradients were computed
            comm/late_ms: how far the latest rank's gradients are behind the median of the others'
            comm/intra_bytes, comm/inter_bytes: payload a step that the first rank sends inside its node, to others
            comm/messages: a step
            comm/plan_changes: how often other buckets or another strategy were taken so far
            comm/residual_norm, comm/compression_error: as in `stats`, of the first rank
        Times are those of `report`: means over all ranks (of FSDP2's replicas: over those of the first shard) and the
        last 8 steps. Bytes are means since the last time.

        Steps are recorded from now on, and every `every`-th ends with a meeting of all ranks: some forty messages of a
        few bytes and one of some kilobytes, for which a GPU is waited for. `target` is called in backward; where it
        raises, a warning says so and nothing more is written.

        Call it between two steps, on every rank. Where one does not, the others raise MismatchError once `timeout` is
        over; also when ranks give another `every`. Raises ConfigurationError, on every rank, for what is no logger.
        """
        from commopt.attached.log import StepLog, writer_for

        StepLog(self._registration, self.stats, lambda: self.plan, every, lambda: writer_for(target))

    def explain(self) -> str:
        """Return in words and numbers what averages the gradients now, and why; the same on every rank."""
        from commopt.schedule import explain

        return "\n".join([explain(self.aggregator, None, ()), *self._connections()])

    def _connections(self) -> list[str]:
        """Return a line on the connections between nodes, where somebody chose them."""
        joined = self._registration.joined
        chosen = Connections() if joined is None else joined.membership.connections
        return [] if chosen == Connections() else [str(chosen)]

    # ------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by parameter name and element range, and the buckets they belong to.

        Every rank must save its own; `gathered_state_dict` is for checkpoints that one rank writes. It waits for what
        was sent. Raises ConfigurationError while a step is under way, where some of its gradients count already and
        others do not: from the first gradient that is sent to the last, also in another thread.
        """
        return checkpoint.part_of(self._registration)

    def async_state_dict(self) -> Snapshot:
        """Return at once what will have the state of this moment in host memory, while training goes on.

        Its `result()`, from any thread, waits for the copies and returns what state_dict() would have returned here;
        later steps do not change it. `done()` returns whether that would wait. On CUDA copies go to pinned memory, on
        the stream of the messages; with adam= and with LocalSGD it waits for the device all the same. Raises as
        state_dict().
        """
        return checkpoint.snapshot_of(self._registration, "async_state_dict", pinned=True)

    def gathered_state_dict(self) -> dict[str, Any] | None:
        """Return all ranks' states on the first rank of the group, None on the others; collective.

        It is as large as all residuals together: with error feedback between P ranks up to 4 P bytes of host memory and
        of disk for each parameter, between N nodes 4 N. `stats()["residual_bytes"]` is this rank's part. Raises
        MismatchError within `timeout` when not all ranks call it, between the same two steps.
        """
        return checkpoint.gather(self._registration)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `saved` was taken: one rank's state_dict(), a gathered or a merged one; collective.

        In the same world every bit is as if training had never stopped, if DDP had settled its buckets when the state
        was saved (after two steps) and makes the same ones, as with find_unused_parameters, or can be given them: with
        torch 2.12, whatever `plan` is, but not with static_graph, mixed_precision or frozen parameters, and those of
        several dtypes only if DDP had made them by the caps that it has now. A strategy that a plan chose is followed
        with "adaptive" only. In another world, for which the gathered form or commopt.merged_state() is needed, each
        rank starts with an equal part of the sum of all residuals.
        Raises ConfigurationError when what any rank was given is damaged or does not fit, naming what, and
        MismatchError when ranks load different checkpoints; on every rank, and nothing has changed then.
        """
        self.load_from(lambda: saved)

    def load_from(self, read: Callable[[], object]) -> None:
        """Load what `read` returns; what it raises becomes a ConfigurationError on every rank. As load_state_dict."""
        self._registration.require_open("load_state_dict")
        checkpoint.load(read, self._registration)


# ------------------------------------------------------------------- checkpoints of others: of all ranks, of one


class Checkpointed:
    """Let every rank write and read its own residuals: `dcp.save({"model": ..., "comm": Checkpointed(comm)}, ...)`.

    Also with dcp.async_save, beside training. dcp.load needs to know what to look for before anything is there. Each
    rank's part is therefore one value, under the rank's own name. To load into another world (other ranks, or other
    nodes), say how many ranks wrote the checkpoint: `saved_world_size`.
    """

    def __init__(self, state: CommState, saved_world_size: int | None = None) -> None:
        _require_state("Checkpointed", state)
        if saved_world_size is not None and (type(saved_world_size) is not int or saved_world_size < 1):
            raise ConfigurationError(
                f"Checkpointed(saved_world_size={saved_world_size!r}) must be the number of ranks that wrote the "
                f"checkpoint, 1 or more, or None for the ranks there are now"
            )
        self._state = state
        self._saved_world_size = saved_world_size

    def state_dict(self) -> dict[str, PickledPart | bytes]:
        """Return this rank's part under its own name; for another world, empty places for all ranks' parts."""
        _warn_of_one_nodes_model(self._state)
        team = self._state.membership.team
        if self._saved_world_size is not None:
            return {f"place {place}": b"" for place in range(self._saved_world_size)}
        return {f"place {team.rank}": PickledPart(self._state.async_state_dict())}

    def load_state_dict(self, saved: Mapping[str, PickledPart | bytes]) -> None:
        """Go on where the checkpoint was taken, as CommState.load_state_dict; collective."""
        self._state.load_from(lambda: _read_parts(saved))
        self._saved_world_size = None  # from now on it is this world that saves


class PickledPart:
    """A rank's part of a checkpoint, which is bytes once it is pickled or asked for: by whoever writes it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __bytes__(self) -> bytes:
        return to_bytes(self._snapshot.result())

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        return bytes, (bytes(self),)

    def __deepcopy__(self, memo: object) -> PickledPart:
        return self  # no step changes it, so torch's stagers need no copy


class Gathered:
    """Let one rank write what all have kept, for checkpoints with a single file: Fabric's, and Accelerate's.

    Every rank must save and load it, so no `if is_main_process` around save_state: what ranks have kept is sent to the
    first one. Where not all do, a warning names the call after two seconds, and MismatchError is raised at `timeout`.
    The checkpoint fits any world.
    """

    def __init__(self, state: CommState) -> None:
        _require_state("Gathered", state)
        self._state = state

    def state_dict(self) -> dict[str, Any] | None:
        """Return what all ranks have kept on the first rank, which must be the one that writes; None on the others."""
        _warn_of_one_nodes_model(self._state)
        what = "gathered_state_dict (of save_state or fabric.save, which every rank must call)"
        return checkpoint.gather(self._state._registration, what, patience_s=2.0)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where the checkpoint was taken, as CommState.load_state_dict; collective."""
        self._state.load_state_dict(saved)


def _require_state(whose: str, state: object) -> None:
    """Raise ConfigurationError for another object now, and not when the first checkpoint is saved."""
    if not isinstance(state, CommState):
        raise ConfigurationError(f"{whose}({type(state).__name__}) needs the state that commopt.attach returned")


def _warn_of_one_nodes_model(state: CommState) -> None:
    """Say it when the model that is saved beside a state is not that of all nodes."""
    if state.nodes_differ and state.membership.team.rank == 0:
        _log.warning(
            "nodes hold different parameters, and a checkpoint of one rank's has lost what the others learned: call "
            "average_parameters() on every rank before it is saved"
        )


def _read_parts(saved: Mapping[str, PickledPart | bytes]) -> dict[str, Any]:
    parts = [from_bytes(bytes(saved[name]), f"the checkpoint's {name}") for name in sorted(saved)]
    return parts[0] if len(parts) == 1 else {"format": checkpoint.FORMAT, "ranks": parts}
