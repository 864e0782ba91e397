# SPDX-License-Identifier: Apache-2.0
"""The user's handles of attached models of fully_shard or replicate, and attach_sharded, which makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from commopt.aggregate import Aggregator, Flat, LocalSGD
from commopt.attached.checks import REDUCIBLE, require_supported_parameters
from commopt.attached.comm_state import CommState
from commopt.attached.options import AttachOptions
from commopt.errors import ConfigurationError
from commopt.groups import Membership
from commopt.sharded.backwards import Request
from commopt.sharded.one_dimension import OneDimension, require_attachable
from commopt.sharded.registration import ShardedRegistration
from commopt.sharded.seams import ParameterGroup, forget_meshes, groups_of, require_seams, reshard_between_steps


class ShardedState(CommState):
    """The handle of a model of fully_shard (on a 2-D mesh) or replicate whose replicas are averaged; `attach` makes it.

    The model stays FSDP's: its DTensors, clip_grad_norm_, its optimizers and its checkpoints are as without commopt.
    Residuals belong to parameters by name and to the ranges of them that a rank owns. A step is a backward in which
    anything was averaged. It cannot be pickled: save state_dict(), and attach to the model of the next run.
    """

    _registration: ShardedRegistration

    def __init__(self, registration: Any) -> None:
        self._registration = registration

    def __getstate__(self) -> NoReturn:
        raise ConfigurationError(
            "a ShardedState cannot be pickled, nor can the model it is attached to; save every rank's state_dict(), or "
            "gathered_state_dict(), and call commopt.attach in the next run"
        )

    @property
    def membership(self) -> Membership:
        """This rank's place among all that hold a part of the model."""
        return self._registration.everyone

    def stats(self) -> dict[str, Any]:
        """Return counts of the work so far, as HookState.stats; buckets are FSDP's buffers.

        buckets_overlapped: those that the hook did not wait for (on the CPU; on a GPU it never does).
        """
        return {**super().stats(), "buckets_overlapped": self._registration.deferred}

    def explain(self) -> str:
        """Return in words how the parameters of this rank are averaged, group by group."""
        registration = self._registration
        lines = [f"asked for: {self.aggregator}", *self._connections()]
        for group in registration.groups:
            team, parts = registration.replicas[group.replicas].client.team, group.parts
            lines.append(
                f"{parts[0].name} .. {parts[-1].name}: {sum(part.numel for part in parts)} elements, shard "
                f"{group.shard_rank + 1} of {group.shard_count}, {'added up' if group.sums else 'averaged'} over ranks "
                f"{', '.join(map(str, team.ranks))}"
            )
        return "\n".join(lines)


class OneDimensionState(ShardedState):
    """The handle of a model that fully_shard cut over all ranks: of its gradients, and of its weights."""

    _registration: OneDimension  # type: ignore[assignment]

    def stats(self) -> dict[str, Any]:
        """Return counts of the work so far; with weights also their crossings, and the bytes of second copies."""
        gathers = self._registration.gathers.values()
        copies = [gather.copy for gather in gathers if gather.copy is not None]
        of_weights = {
            "weight_crossings": sum(gather.crossings for gather in gathers),
            "second_copy_bytes": sum(copy.numel() * copy.element_size() for copy in copies),
        }
        return {**super().stats(), **(of_weights if gathers else {})}

    def explain(self) -> str:
        """Return in words how gradients are averaged and how weights travel."""
        weights = self._registration.weights
        return f"gradients: {self.aggregator}\nweights between nodes: {'exact' if weights is None else weights}"

    def invalidate(self) -> None:
        """Let second copies be made anew, each at its next gather; every rank must call it, between two steps.

        Weights that were changed by hand between a forward and its backward need it; and, with
        Weights(difference=True), those that were changed much, as by a checkpoint that is read into them in place:
        differences of a few bits take some forwards to catch up. The model's load_state_dict does it.
        """
        self._registration.forget_copies(bases=True)


def attach_sharded(model: nn.Module, choose: Callable[[], Aggregator], given: AttachOptions) -> ShardedState:
    """Average the replicas of a model of fully_shard or replicate; collective over all its ranks.

    Where it has none, on a mesh of one dimension, the gradients go to their owners, and the weights to all, as the
    aggregator and the options `given` say.
    Raises ConfigurationError and UnsupportedTensorError on every rank when that cannot be done, and in a later backward
    ConfigurationError when FSDP's hook or collectives were replaced meanwhile.

    choose: returns the aggregator, or raises why this rank has none.
    """
    require_seams(model)
    forget_meshes()
    reshard_between_steps(model)  # after an evaluation the root still has whole parameters, which no optimizer knows
    groups = groups_of(model)
    if not groups:
        raise ConfigurationError("fully_shard left this model no parameters to reduce; attach the one that has some")
    replicated = [group for group in groups if group.replicas is not None]
    problem: Exception | None = None
    options = AttachOptions()
    aggregator: Aggregator = Flat()
    try:  # a mistake of one rank is raised on all of them
        aggregator = choose()
        _require_aggregator(aggregator, replicated=bool(replicated))
        checked = given.checked("replicated" if replicated else "sharded")
        _require_reducible(model, replicated or groups)
        if not replicated:
            require_attachable(groups, checked.weights)
        options = checked
    except Exception as error:
        problem = error
    asked = Request(options, aggregator, model, replicated or groups)
    if not replicated:
        over_all = OneDimension(asked)
        over_all.join(groups[0].shards, problem)
        over_all.install()
        return OneDimensionState(over_all)
    registration = ShardedRegistration(asked)
    registration.join(problem=problem)
    registration.install()
    return ShardedState(registration)


def _require_aggregator(aggregator: Aggregator, *, replicated: bool) -> None:
    if aggregator.tunes:
        raise ConfigurationError(
            f"{aggregator} is for DDP models only, as it makes plans of DDP's buckets; attach another to a model of "
            f"fully_shard, for example 'hierarchical_quantized'"
        )
    if isinstance(aggregator, LocalSGD) and (aggregator.buffers or not replicated):
        why = "nodes have none on a 1-D mesh: shard inside them, on a 2-D one"
        if replicated:
            why = "FSDP leaves buffers to each rank: leave buffers out"
        raise ConfigurationError(f"{aggregator} averages the parameters of replicas, and {why}")
    if aggregator.adam is not None and aggregator.adam.clip_norm is not None:
        raise ConfigurationError(
            f"{aggregator}: clip_norm is for DDP models only, as no rank of FSDP2 sees the norm of all; leave it out"
        )


def _require_reducible(model: nn.Module, groups: list[ParameterGroup]) -> None:
    require_supported_parameters(model)
    for group in groups:
        title = group.parts[0].name
        if group.has_hook:
            raise ConfigurationError(
                f"the group of {title} has an all-reduce hook already, of set_all_reduce_hook or of another attach; "
                f"FSDP takes one: leave the other out"
            )
        if group.device.type not in ("cpu", "cuda"):
            raise ConfigurationError(f"gradients of {title} are on {group.device}; they can be on CPU and CUDA")
        if group.reduce_dtype is not None and group.reduce_dtype not in REDUCIBLE:
            raise ConfigurationError(
                f"MixedPrecisionPolicy(reduce_dtype={group.reduce_dtype}) of the group of {title} cannot be averaged; "
                f"use torch.float32 or torch.bfloat16"
            )
