# SPDX-License-Identifier: Apache-2.0
"""From FSDP's hook to the lane: one message per buffer, averaged over the replicas of this rank's shard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from hashlib import sha256
from time import perf_counter_ns
from typing import Any
from weakref import ref
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.aggregate import LocalSGD
from commopt.attached.checks import warn_of_untested_torch
from commopt.attached.checksum import comparable
from commopt.attached.divergence import DivergenceCheck, Replicas, alike_in
from commopt.attached.local_sgd import ParameterAverages
from commopt.attached.reduction import Reduction, Step
from commopt.errors import ConfigurationError, LaneError
from commopt.feedback import Layout, Piece, ResidualStore, Spans, is_average, spread
from commopt.groups import Membership
from commopt.lanes import LaneClient, Pending
from commopt.sharded.backwards import Backwards, MessageOrder, Request
from commopt.sharded.layouts import layout_of, require_length
from commopt.sharded.seams import ParameterGroup, reshard_between_steps


class ShardedRegistration(Backwards):
    """Averages the buffers that FSDP leaves to it: `reduce` is called with each, `end` after each backward.

    replicas: the ranks with the same shard as this one, by their process group.
    """

    def __init__(self, asked: Request) -> None:
        super().__init__(asked)
        self.replicas: dict[dist.ProcessGroup | None, MessageOrder] = {}
        self._clients: list[LaneClient] = []
        self._of_gradients: ResidualStore | None = None
        self._known: dict[tuple[int, ...], tuple[Layout, Spans]] = {}
        self._sent: set[Layout] = set()  # since the last step of an optimizer, with adam=
        self._sent_before = False  # whether any was in an earlier backward than the one under way

    @property
    def _orders(self) -> Collection[MessageOrder]:
        return self.replicas.values()

    # ------------------------------------------------------------------------------------- the other ranks

    def join(self, process_group: Any = None, problem: Exception | None = None) -> LaneClient:
        """Find all that hold a part of the model, and among them this rank's replicas; collective, as Registration."""
        aggregator = self.aggregator
        assert aggregator is not None
        try:
            names = sha256(repr(sorted(self.numels.items())).encode()).hexdigest()
            facts = {
                "aggregator": self.aggregator_name,
                "scaler": str(self.store.transaction.per_step),
                "parameters": names,
            }
            everyone = self._join(_all_ranks(self.groups), problem, **facts, **self.options.compared())
            try:
                for group in dict.fromkeys(group.replicas for group in self.groups):
                    self.replicas[group] = MessageOrder(self._join(group))
                for replicas in self.replicas.values():
                    aggregator.check(replicas.client.team)
                if isinstance(aggregator, LocalSGD):
                    self._average_parameters(aggregator)
            except Exception as error:  # of some replicas, perhaps: heard of before any rank waits for them again
                problem = error
            teams = [alike_in(order.client.team, aggregator) for order in self.replicas.values()]
            keys = [crc32(repr(everyone.team.rank if team is None else team.ranks).encode()) for team in teams]
            nodes = [order.client.team.node_count for order in self.replicas.values()]
            what = f"the replicas of {everyone.name}"
            answers = everyone.membership.exchange(what, problem, replicas=keys, nodes=nodes)
            if isinstance(aggregator, LocalSGD):
                _require_as_many_nodes(aggregator, {tuple(answer["nodes"]) for answer in answers})
            self._compare_replicas_of(everyone, [answer["replicas"] for answer in answers])
            if self.store.transaction.per_step:
                try:
                    self._drops_with = self._who_drops_steps(everyone)
                except Exception as error:
                    problem = error
                everyone.membership.exchange(f"the end of {everyone.name} setup", problem)
        except BaseException:
            self.close(groups=False)
            raise
        if everyone.team.rank == 0:
            warn_of_untested_torch(torch.__version__)
        self._resolved = self._layouts.resolved(aggregator)
        self.watch_optimizers(aggregator)
        self.device = self.groups[0].device
        self.joined = everyone
        return everyone

    def _average_parameters(self, average: LocalSGD) -> None:
        """See to the parameters too; raises ConfigurationError where their shards have different replicas."""
        if len(self.replicas) > 1:
            raise ConfigurationError(
                f"{average} averages the parameters of one mesh, and this model was sharded on several; use one mesh"
            )
        called, pieces = {}, {}
        for group in self.groups:
            for part in group.parts:
                piece = part.piece(group.shard_rank, group.shard_count)
                called[part.name], pieces[piece.name] = piece.name, piece

        def read() -> dict[str, Tensor]:
            held = (each for group in self.groups for each in group.shards_by_part)
            return {called[part.name]: values for part, values in held if values.numel()}

        self._of_gradients = ResidualStore()  # which leave nothing for later: `store` is for the parameters
        found = ref(self)
        parameters, scaler = self.parameters, lambda: getattr(found(), "scaler", None)
        reshard = partial(reshard_between_steps, self._model)
        self.averages = ParameterAverages(
            average, self._model, read, self.store, parameters, scaler, self.boundary, pieces, reshard
        )
        self.averages.client = next(iter(self.replicas.values())).client

    def _compare_replicas_of(self, everyone: LaneClient, keys: list[list[int]]) -> None:
        """Let ranks compare their shards with those of their replicas, and buffers, which FSDP leaves to them."""
        found, own = ref(self), list[Replicas]()
        for number, (replicas, order) in enumerate(self.replicas.items()):
            if (team := alike_in(order.client.team, self.aggregator)) is not None:
                buffers = partial(_buffers_of, found) if number == 0 else dict
                own.append(Replicas(order.client, team, partial(_shards_of, found, replicas), buffers))
        self.divergence = DivergenceCheck.of(self, everyone, keys, own)

    def end(self) -> None:
        """End a backward, as Backwards.end."""
        before = self.steps
        super().end()
        if self.steps > before:
            if self.steps_between is not None:
                self.steps_between.averaged(self.scaler)
            if self.directions is not None:
                self.directions.delivered()
            if self.averages is not None:
                self.averages.optimizer_steps.backward_ended(shadowed=False)

    def _join(self, group: Any, problem: Exception | None = None, **facts: str) -> LaneClient:
        options = self.options
        client = LaneClient.join(
            self.kind, group, None, options.timeout, problem, site=options.site, meets=True, **facts
        )
        self._clients.append(client)
        return client

    def _who_drops_steps(self, everyone: LaneClient) -> LaneClient | None:
        """Return the ranks that drop a step together with this one and do not see it themselves, as replicas do."""
        shards = {group.shards for group in self.groups}
        only = next(iter(shards))
        replicas = next(iter(self.replicas.values())).client.team
        if len(shards) > 1 or len(self.replicas) > 1:
            return everyone
        if only is None or only.size() * replicas.size < everyone.team.size:  # tensor parallelism beside
            return None if replicas.size == everyone.team.size else everyone
        return self._join(only)

    @property
    def everyone(self) -> Membership:
        """All ranks that hold a part of the model."""
        return self._clients[0].membership

    @property
    def recorded_with(self) -> LaneClient:
        """The replicas of this rank's first shard: other shards' messages have other lengths."""
        return next(iter(self.replicas.values())).client

    def close(self, *, groups: bool = True) -> None:
        """Take part no more, as LaneClient.close."""
        self.leave_model()
        super().close(groups=groups)
        for client in self._clients:
            client.close(groups=groups)

    def install(self) -> None:
        """Take FSDP's place between the replicas."""
        for group in self.groups:
            group.reduce_by(partial(self.reduce, group))
        self._watch()

    # ------------------------------------------------------------------------------------- every backward

    def weigh(self, weight: Any) -> None:
        """Let this rank's gradients count for `weight`, as Registration.weigh: before FSDP adds them up."""
        if self.step_weights.total is not None:
            raise ConfigurationError(
                f"weight({weight!r}) comes after a backward whose gradients were weighed and added up within the "
                f"shards; before the first of them give the weight of all that are averaged together"
            )
        for group in self.groups:
            if group.shard_count > 1:
                group.wrap_scatter(lambda own: _Weighs(own, self._weigh))
        super().weigh(weight)

    def _weigh(self, source: Tensor) -> None:
        """Multiply gradients of this rank by its factor, where anybody gives weights."""
        weight = self.weight_of_step()
        if weight is not None:
            factor = weight()
            source.mul_(factor)
            if factor == 0:  # what a rank without samples has may be NaN
                source.zero_()

    def reduce(self, group: ParameterGroup, buffer: Tensor) -> None:
        """Average one buffer over the replicas, in place: now, or by the end of backward if FSDP does not notice.

        Where the lane has failed nothing is averaged, and `end` raises the error: the other shards of this replica,
        which may not know yet, wait for this rank in FSDP's own collectives until then.
        """
        try:
            self._reduce(group, buffer)
        except LaneError:
            if group.shard_count == 1:
                raise

    def _reduce(self, group: ParameterGroup, buffer: Tensor) -> None:
        entered_ns = perf_counter_ns()
        if (kept := group.take_partial(buffer)) is not None:
            buffer += kept
        if group.shard_count == 1:
            self._weigh(buffer)
        if buffer.is_cuda:  # FSDP made it on another stream, and keeps no reference while its values are cast here
            buffer.record_stream(torch.cuda.current_stream(buffer.device))
        if self._is_first(buffer.device):
            if self.averages is not None:
                self.averages.take_turn()
            # As under DDP: of a LocalSGD the optimizer steps say how far gradients go.
            number = self.steps if self.averages is None else self.averages.steps
            store = self._of_gradients or self.store
            replay = self.replay_of(store, buffer.device, moves=True)
            self.step = Step(number, store, self.scaler, replay=replay)
            if self.steps_between is None or not self.steps_between.missed(self.scaler, self.store.transaction):
                self._sent.clear()
            self._sent_before = bool(self._sent)
        layout, spans = self._layout_of(group, buffer)
        if self._resolved.adam is not None:
            self._require_one_message(layout)
        if layout.numel:
            pending = self._send(group, buffer, layout, spans)
            if group.may_wait(buffer):
                self.deferred += 1
            else:
                pending.wait()
        self.hook_calls += 1
        self.hook_ns += perf_counter_ns() - entered_ns

    def _require_one_message(self, layout: Layout) -> None:
        """Raise ConfigurationError where parts of a gradient are sent one by one: Adam would make a step of each.

        In one backward, or in several without an optimizer's step between. Ranks send alike, so that all of them raise.
        """
        if any(layout.shares_names(each) for each in self._sent):
            how = "one backward sends gradients of {} in two messages"
            cure = "call set_requires_gradient_sync(False) on this part of the model, and True before the last of them"
            if self._sent_before:
                how = "gradients of {} are averaged in a second backward without an optimizer step between"
                cure = (
                    "call model.set_requires_gradient_sync(False), or set_requires_all_reduce(False), and True before "
                    "the last backward, then optimizer.step(); where a GradScaler may drop steps, call "
                    "scaler.update() after each and pass attach(..., scaler=scaler)"
                )
            raise ConfigurationError(
                f"{how.format(layout.title)}, and adam= needs all of a gradient before it makes a direction of it; "
                f"{cure}, or use no adam"
            )
        self._sent.add(layout)

    def _layout_of(self, group: ParameterGroup, buffer: Tensor) -> tuple[Layout, Spans]:
        known = self._known.get(group.key)
        if known is None:
            parts = group.parts_with_gradient
            require_length(parts, buffer.numel())
            known = self._known[group.key] = layout_of(parts, group.shard_rank, group.shard_count)
        return known

    def _send(self, group: ParameterGroup, buffer: Tensor, layout: Layout, spans: Spans) -> Pending:
        order, step = self.replicas[group.replicas], self.step
        number, recorded = self._next(layout, layout.numel * buffer.element_size())
        assert step.store is not None
        reduction = Reduction(
            buffer,
            layout,
            step,
            self._resolved,
            order.client.team,
            number,
            last=False,
            title=f"gradients of {layout.title}",
            scale=1.0 if group.sums else None,
            unit=group.divided_later(buffer.dtype),
            spans=() if spans == ((0, buffer.numel()),) else spans,
            turn=order.turn(layout, step.store),
            recorded=recorded,
        )
        return reduction.submit(order.client, self.sent)

    # ------------------------------------------------------------------------------------- checkpoints

    def shares(self) -> list[tuple[LaneClient, Layout]]:
        """Return the replicas of each shard with its elements, as Registration.shares."""
        pieces: dict[dist.ProcessGroup | None, list[Piece]] = {replicas: [] for replicas in self.replicas}
        for group in self.groups:
            pieces[group.replicas] += layout_of(group.parts, group.shard_rank, group.shard_count)[0].pieces
        return [(self.replicas[replicas].client, Layout(tuple(each))) for replicas, each in pieces.items()]

    def take_share(
        self, store: ResidualStore, parts: Sequence[Mapping[str, Any]], largest: Callable[[str], float]
    ) -> None:
        """Put into `store` this rank's part of the residuals of another world: of the ranges that it owns, no more."""
        held = sum(group.shard_count * self.replicas[group.replicas].client.team.size for group in self.groups)
        if held != len(self.groups) * self.everyone.team.size:
            raise ConfigurationError(
                "residuals of a model with tensor parallelism beside FSDP can be loaded into the world that saved them "
                "only: start without them"
            )
        everything = ResidualStore()
        spread(everything, parts, parts[0]["parameters"], largest, 1)
        kept = {(slot.path, name) for slot in everything.residuals() for name in slot.layout.names}
        for path in {path for path, _ in kept}:
            for group in self.groups:
                layout, _ = layout_of(group.parts, group.shard_rank, group.shard_count)
                layout = Layout(tuple(piece for piece in layout.pieces if (path, piece.name) in kept))
                held_by = 1 if is_average(path) else self.replicas[group.replicas].client.team.size
                values = everything.pop(path, layout) / held_by
                store.add(path, layout, values)
        store.factors = everything.factors
        store.warm = True


def _require_as_many_nodes(average: LocalSGD, found: set[tuple[int, ...]]) -> None:
    """Raise ConfigurationError where the replicas of one shard are on more nodes than those of another.

    Some would be averaged in rounds and some, inside a node, in every step: one model by two algorithms.
    """
    counts = sorted(count for (count,) in found)
    if len(counts) > 1:
        raise ConfigurationError(
            f"{average} averages between nodes, and the replicas of some shards are on {counts[0]} and of others on "
            f"{counts[-1]} nodes; shard inside nodes of equally many ranks: init_device_mesh(..., (nodes, ranks per "
            f"node)), or average gradients in every step (commopt.hierarchical)"
        )


class _Weighs:
    """Stands in the place of a reduce-scatter of FSDP, which it calls. weigh: has the gradients before."""

    def __init__(self, reduce_scatter: Any, weigh: Callable[[Tensor], None]) -> None:
        self._reduce_scatter = reduce_scatter
        self._weigh = weigh

    def allocate(self, *size: Any, **options: Any) -> Any:
        """Return memory of the other's."""
        return self._reduce_scatter.allocate(*size, **options)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *others: Any, **options: Any) -> Any:
        """Weigh the gradients, then reduce and scatter them."""
        self._weigh(input_tensor)
        return self._reduce_scatter(output_tensor, input_tensor, *others, **options)


def _shards_of(found: ref[ShardedRegistration], replicas: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Return this rank's shards of the parameters that have these replicas."""
    alive = found()
    groups = () if alive is None else alive.groups
    held = (each for group in groups if group.replicas is replicas for each in group.shards_by_part)
    return comparable({part.name: values for part, values in held})


def _buffers_of(found: ref[ShardedRegistration]) -> dict[str, Tensor]:
    alive = found()
    return {} if alive is None else comparable(dict(alive._model.named_buffers()))


def _all_ranks(groups: Sequence[ParameterGroup]) -> dist.ProcessGroup | None:
    """Return a process group of all ranks that hold a part of the model, None for the world; collective over them."""
    ranks = sorted({rank for group in groups for rank in group.ranks})
    if len(ranks) == dist.get_world_size():
        return None
    candidates = {each for group in groups for each in (group.replicas, group.shards)}
    for candidate in candidates:
        if candidate is not None and sorted(dist.get_process_group_ranks(candidate)) == ranks:
            return candidate
    made: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return made
