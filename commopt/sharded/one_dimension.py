# SPDX-License-Identifier: Apache-2.0
"""`OneDimension`: FSDP2 over all ranks, a 1-D mesh. It replaces FSDP's collectives, and has its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from hashlib import sha256
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.aggregate import Aggregator
from commopt.attached.checks import REDUCIBLE
from commopt.attached.reduction import Reduction, Step
from commopt.attached.snapshot import Copy
from commopt.errors import ConfigurationError, UnsupportedTensorError
from commopt.feedback import Layout, ResidualStore, spread
from commopt.feedback.checkpoint import field, refuse
from commopt.groups import WireBytes
from commopt.groups.team import all_gather_single
from commopt.kernels.differences import MANTISSA
from commopt.lanes import LaneClient
from commopt.sharded import seams
from commopt.sharded.all_gather import AllGather, Weights
from commopt.sharded.backwards import Backwards, MessageOrder, Request
from commopt.sharded.layouts import require_length
from commopt.sharded.reduce_scatter import ReduceScatter
from commopt.sharded.seams import ParameterGroup
from commopt.sharded.shards import Parts


class OneDimension(Backwards):
    """The memory of one model on a 1-D mesh: `reduce` takes gradients in, `gather` weights, `end` ends a backward.

    gathers: by group, none where weights are exact.
    """

    def __init__(self, asked: Request) -> None:
        super().__init__(asked)
        self.gathers: dict[ParameterGroup, AllGather] = {}

    @property
    def _orders(self) -> Collection[MessageOrder]:
        return (self._order,)

    def _begin(self, aggregator: Aggregator, client: LaneClient) -> None:
        team, membership = client.team, client.membership
        names = sha256(repr([part.name for group in self.groups for part in group.parts]).encode()).hexdigest()
        facts = {"weights": repr(self.weights), "scaler": str(self.store.transaction.per_step), "parameters": names}
        membership.agree(f"attach of {client.name}", **facts)
        shards = self.groups[0].shards
        assert shards is not None
        order = tuple(dist.get_group_rank(shards, rank) for rank in membership.ranks)
        super()._begin(aggregator, client)
        self._order = MessageOrder(client)
        self._drops_with = client if self.store.transaction.per_step else None
        self._scatter = ReduceScatter(self._layouts.resolved(aggregator), team, order)
        if self.weights is not None and team.node_count > 1:
            weights = self._layouts.resolved(self.weights)
            self.gathers = {group: AllGather(weights, team, order, tuple(group.parts)) for group in self.groups}

    def install(self) -> None:
        """Take the place of FSDP's collectives."""
        for group in self.groups:
            group.scatter_by(self._model, _Scatters(self, group))
            if group in self.gathers:
                group.gather_by(self._model, _Gathers(self, group))
        self._watch()
        if self.gathers:
            for module in self._model.modules():
                handle = module.register_load_state_dict_post_hook(lambda *_: self.forget_copies(bases=False))
                self._undo.append(handle.remove)

    def close(self, *, groups: bool = True) -> None:
        """Take part no more, as LaneClient.close."""
        self.leave_model()
        super().close(groups=groups)

    # ------------------------------------------------------------------------------------- gradients

    def reduce(self, group: ParameterGroup, output: Tensor, source: Tensor, op: Any) -> None:
        """Set `output` to this rank's shard of what `op` makes of all ranks' `source`; may end with the backward."""
        entered_ns = perf_counter_ns()
        client, parts = self.client, tuple(group.parts_with_gradient)
        scale, divided = _scale_of(op, client.team.size), group.divided_later(source.dtype)
        if source.dtype not in REDUCIBLE:
            raise UnsupportedTensorError(f"gradients are {source.dtype}, which commopt does not add up")
        require_length(parts, output.numel())
        if self._is_first(source.device):
            weight = self.weight_of_step()
            replay = None if weight is not None else self.replay_of(self.store, source.device, moves=True)
            self.step = Step(self.steps, self.store, self.scaler, replay=replay, weight=weight)
        whole, step, scatter = _whole(parts), self.step, self._scatter
        number, recorded = self._next(whole, source.nbytes)
        reduction = Reduction(
            output,
            scatter.layout(parts),
            step,
            scatter.aggregator,
            client.team,
            number,
            last=False,
            title=f"gradients of {whole.title}",
            scale=scale,
            unit=divided,
            source=source,
            scatter=partial(scatter, parts=parts),
            turn=self._order.turn(whole, self.store),
            recorded=recorded,
        )
        pending = reduction.submit(client, self.sent)
        key = parts, source.dtype, scatter.aggregator.phase(self.steps)
        self.sent.count_calls(key, partial(scatter.calls, parts, source.dtype, self.steps), client.team)
        if group.may_wait(output):
            self.deferred += 1
        else:
            pending.wait()
        self.hook_calls += 1
        self.hook_ns += perf_counter_ns() - entered_ns

    # ------------------------------------------------------------------------------------- weights

    def gather(self, group: ParameterGroup, output: Tensor, source: Tensor) -> None:
        """Fill `output` with the weights of a group: across, or before and in backward from the second copy."""
        gather = self.gathers[group]
        if gather.weights.exact and gather.copy is not None and gather.copy.dtype != source.dtype:
            gather.copy = None
        # A forward that backward repeats (activation checkpointing) must see what the first one saw.
        backward = seams.is_before_backward(group) or torch._C._current_graph_task_id() != -1
        crosses = gather.copy is None or not backward
        exact, again = crosses and gather.is_exact_next, crosses and gather.base is not None
        dtype, team = output.dtype, self.client.team
        if again:
            self.sent.count_calls((group, dtype, "base"), lambda: gather.calls(dtype, exact=True)[:1], team)
        key = group, dtype, crosses, exact
        self.sent.count_calls(key, partial(gather.calls, dtype, crosses=crosses, exact=exact), team)

        def task() -> None:
            with self.store.scratch.frame():
                gather(output, source, self.store.scratch, crosses=crosses)

        self.client.submit(f"weights of {_title(gather.parts)}", task, output, (source,), numel=output.numel()).wait()
        if crosses and gather.differences is not None:
            nbytes = sum(gather.differences.lengths)
            self.sent.count_calls((group, "packed"), partial(gather.packed_calls, 1), team, times=nbytes)

    def forget_copies(self, *, bases: bool) -> None:
        """Drop second copies, to be made anew. bases: also those from a checkpoint that no gather has used yet."""
        for gather in self.gathers.values():
            gather.copy = None
            if bases:
                gather.base = None

    # ------------------------------------------------------------------------------------- sent bytes, checkpoints

    def usual_bytes(self, instead: Aggregator | None = None) -> WireBytes | None:
        """Return the mean payload of a step, weights and all; None for what would average in the place of this."""
        sent, steps = self.wire_bytes(), max(self.reduced_steps, 1)
        return None if instead is not None else sent // steps

    def extras(self) -> Callable[[Copy], dict[str, Any]]:
        """Return what reads this rank's row of the second copies that differences go to: others can be had again."""
        differs = self.weights is not None and self.weights.difference
        gathers = list(self.gathers.values()) if differs else []

        def read(copy: Copy) -> dict[str, Any]:
            rows = [None if row is None else copy(row) for row in (gather.own_row() for gather in gathers)]
            return {"weights": repr(self.weights), "copies": rows}

        return read

    def read_extras(self, part: Mapping[str, Any]) -> tuple[Any, object]:
        """Return the rows of `extras`, None where there were other weights; and which there are."""
        rows = field(part, "copies", list)
        if part.get("weights") != repr(self.weights) or not rows:
            return None, "no second copies"
        if len(rows) != len(self.gathers):
            refuse("copies", rows, f"a list of {len(self.gathers)}, one for each group")
        for row, gather in zip(rows, self.gathers.values(), strict=True):
            numel = sum(part.padded for part in gather.parts)
            if row is not None and not (isinstance(row, Tensor) and row.shape == (numel,) and row.is_floating_point()):
                refuse("a row of copies", row, f"None, or floats of shape [{numel}]")
        return rows, [row is not None for row in rows]

    def resume(
        self, store: ResidualStore, steps: int, buffers: Sequence[Layout], numels: Mapping[str, int], extras: Any
    ) -> None:
        """Resume from a checkpoint, as Registration.resume; second copies are as they were then, or made anew."""
        super().resume(store, steps, buffers, numels, extras)
        self.forget_copies(bases=True)
        for row, gather in zip(extras or (), self.gathers.values(), strict=False):
            gather.base = row

    def take_share(
        self, store: ResidualStore, parts: Sequence[Mapping[str, Any]], largest: Callable[[str], float]
    ) -> None:
        """Put into `store` this rank's part of the residuals of another world: of what it sends, and nothing else."""
        whole, scatter = ResidualStore(), self._scatter
        spread(whole, parts, parts[0]["parameters"], largest, scatter.senders)
        for path in {slot.path for slot in whole.residuals()}:
            for group in self.groups:
                layout = scatter.layout(tuple(group.parts))
                store.add(path, layout, whole.pop(path, layout))
        store.warm = True


class _Allocator:
    """Allocates the memory of one of FSDP's collectives."""

    def __init__(self, registration: OneDimension, group: ParameterGroup) -> None:
        self._registration = registration
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory from the usual allocator."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Scatters(_Allocator):
    """Stands in FSDP's place of a reduce-scatter."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce and scatter; FSDP's stream waits for it."""
        self._registration.reduce(self._group, output_tensor, input_tensor, op)


class _Gathers(_Allocator):
    """Stands in FSDP's place of an all-gather."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather, or let torch: bytes, extensions, or fewer ranks (reshard_after_forward=8)."""
        gather = self._registration.gathers[self._group]
        if group.size() == gather.team.size and gather.takes(output_tensor, input_tensor):
            self._registration.gather(self._group, output_tensor, input_tensor)
            return None
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


def _scale_of(op: Any, size: int) -> float:
    """Return what values are multiplied by before they are added up."""
    if op == dist.ReduceOp.AVG:
        return 1.0 / size
    if op == dist.ReduceOp.SUM:
        return 1.0
    factor = getattr(op, "factor", None)  # torch 2.13
    if op == dist.ReduceOp.PREMUL_SUM and isinstance(factor, float):
        return factor
    raise ConfigurationError(
        f"FSDP reduces gradients by {op}, which commopt cannot read on torch {torch.__version__}; leave out "
        f"set_gradient_divide_factor, or call set_force_sum_reduction_for_comms(True)"
    )


def _whole(parts: Parts) -> Layout:
    """Return the whole parameters, alike on all ranks."""
    return Layout.of_parameters((part.name, part.shape) for part in parts)


def _title(parts: Parts) -> str:
    return _whole(parts).title


def require_attachable(groups: Sequence[ParameterGroup], weights: object) -> None:
    """Raise ConfigurationError for a model, or weights, that OneDimension does not support."""
    seams.require_collectives(groups)
    meshes = [tuple(dist.get_process_group_ranks(group.shards)) for group in groups]
    if len(set(meshes)) > 1:
        raise ConfigurationError(
            f"this model's groups are sharded over different ranks ({', '.join(map(str, sorted(set(meshes))))}), and "
            f"commopt reduces over one 1-D mesh; attach the modules of each mesh by themselves, or use HSDP"
        )
    if any(group.ranks != set(mesh) for group, mesh in zip(groups, meshes, strict=True)):
        raise ConfigurationError(
            "this model has another parallelism beside a 1-D FSDP2 mesh, which commopt does not know there; use a "
            "2-D mesh (HSDP) beside it"
        )
    if isinstance(weights, Weights) and weights.exact:
        _require_packable(groups)
    if not (weights is None or isinstance(weights, Weights)):
        raise ConfigurationError(
            f"weights={weights!r} is no commopt.Weights; pass for example commopt.Weights(commopt.Quantize(bits=8))"
        )


def _require_packable(groups: Sequence[ParameterGroup]) -> None:
    for group in groups:
        if group.device.type != "cpu":
            raise ConfigurationError(
                f"Weights(exact=True) packs weights on CPUs, and {group.parts[0].name} is on {group.device}; leave it "
                f"out: weights are then exact too, in 16 bits each"
            )
    dtypes = {group.compute_dtype for group in groups}
    if not dtypes & MANTISSA.keys():
        raise ConfigurationError(
            f"Weights(exact=True) packs bfloat16 and float16, and this model computes in "
            f"{', '.join(sorted(map(str, dtypes)))}; pass MixedPrecisionPolicy(param_dtype=torch.bfloat16) to "
            f"fully_shard, or leave it out: weights are then exact too"
        )
