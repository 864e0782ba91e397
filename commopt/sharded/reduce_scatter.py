# SPDX-License-Identifier: Apache-2.0
"""The gradients of an FSDP2 parameter group go to their owners: exact inside the node, compressed across.

A rank adds up, with the others of its node, what the ranks at its place on all nodes own; encodes one row for each of
these; and adds up, in the order of the nodes, the rows it receives. One encoding, and a residual of numel / ranks per
node: nobody gathers the sum.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from commopt.aggregate import Aggregator, Compressed, Flat, Hierarchical
from commopt.aggregate.base import Step, call, work
from commopt.compress import Encoding, ErrorFeedback, RngKey
from commopt.errors import ConfigurationError
from commopt.feedback import SAMPLE_EVERY_STEPS, BufferContext, Layout, Scratch, scale_and_add
from commopt.groups import Team, TeamShape, apply_scale
from commopt.sharded.rows import Kind, Parts, Rows, Shard, rows_of, shard_of
from commopt.sharded.untouched import RestingRows

_EVERYTHING = ("*",)
_HSDP = "use a 2-D mesh (HSDP), where it averages over the replicas"


class Places:
    """The ranks of a shard group in a team's order, which goes node by node.

    order: the rank in the shard group of each member of the team.
    """

    def __init__(self, team: TeamShape, order: tuple[int, ...], *, levels: bool) -> None:
        self.team = team
        self.order = order
        self.inside, self.across = (team.intra, team.inter) if levels else (None, None)
        if self.inside is None or self.across is None:
            self.inside = None
            self.across = team
        self.per_node = 1 if self.inside is None else self.inside.size
        self._place = 0 if self.inside is None else self.inside.rank
        self._index: dict[torch.device, Tensor] = {}

    @cached_property
    def in_order(self) -> bool:
        """Whether both orders are one."""
        return self.order == tuple(range(len(self.order)))

    def index(self, device: torch.device) -> Tensor:
        """Return `order` on `device`; copied there once, as the host waits for that."""
        if device not in self._index:
            self._index[device] = torch.tensor(self.order, device=device)
        return self._index[device]

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """The ranks of the shard group at this one's place on every node: those that it talks to across."""
        return self.order[self._place :: self.per_node]


class ReduceScatter:
    """What an aggregator comes to where every rank keeps its shard of the sum.

    Raises ConfigurationError for an aggregator that cannot do that, and on nodes of unequal length for those with two
    levels; alike on every rank.
    """

    def __init__(self, aggregator: Aggregator, team: TeamShape, order: tuple[int, ...]) -> None:
        self.aggregator = aggregator
        self.team = team
        levels = isinstance(aggregator, Hierarchical)
        inner = aggregator.inter if isinstance(aggregator, Hierarchical) else aggregator
        if isinstance(aggregator, Hierarchical) and team.node_count == 1:
            inner = Flat()
        _require_reducible(aggregator, inner)
        if levels and not team.uniform:
            raise ConfigurationError(
                f"{aggregator} needs equally many ranks on every node to scatter gradients over an FSDP2 mesh, and "
                f"nodes hold {', '.join(map(str, team.ranks_per_node))}; use commopt.Flat() or commopt.Compressed(...)"
            )
        self.places = Places(team, order, levels=levels)
        self.compressed = inner if isinstance(inner, Compressed) else None
        self._path = "inter" if levels else ""

    # ------------------------------------------------------------------------------------- what travels

    def rows(self, parts: Parts, dtype: torch.dtype, step: int | None) -> Rows | None:
        """Return the rows that this rank sends of the gradients of `parts`, None where they are exact."""
        if self.compressed is None:
            return None
        compressor, dense = self.compressed.compressor, self.compressed.dense
        now = compressor.at(step)
        if now is None:
            now, dense = compressor, _EVERYTHING
        return rows_of(parts, self.places.alike, self.team.size, now, dense, dtype)

    def layout(self, parts: Parts, dtype: torch.dtype, step: int | None) -> Layout:
        """Return what this rank may keep residuals of: what it sends; where it is exact, what it owns."""
        rows = self.rows(parts, dtype, step)
        return self._own(parts).layout if rows is None else rows.layout

    def _own(self, parts: Parts) -> Shard:
        return shard_of(parts, self.places.order[self.team.rank], self.team.size)

    def calls(self, parts: Parts, dtype: torch.dtype, step: int | None = None) -> tuple[Step, ...]:
        """Return, in order, what this rank does for the gradients of `parts`, in the form of Aggregator.calls."""
        inside, across = self.places.inside, self.places.across
        rows = self.rows(parts, dtype, step)
        shard_numel = sum(part.padded for part in parts)
        numel = shard_numel * self.team.size
        summed = dtype if rows is None else torch.promote_types(dtype, torch.float32)
        steps: tuple[Step, ...] = ()
        if inside is not None:
            steps = (work("copy", "", numel), *call(inside, "reduce_scatter", numel * summed.itemsize))
            numel //= inside.size
        assert across is not None
        if rows is None:
            return steps + call(across, "reduce_scatter", numel * dtype.itemsize)
        return (
            *steps,
            *(work("encode", kind.compressor, kind.layout.numel) for kind in rows.kinds),
            *call(across, "all_to_all", across.size * rows.nbytes),
            *(work("decode", kind.compressor, kind.layout.numel) for kind in rows.kinds),
        )

    # ------------------------------------------------------------------------------------- the collective

    def __call__(self, output: Tensor, source: Tensor, parts: Parts, scale: float, context: BufferContext) -> None:
        """Set `output` [n] to this rank's row of `scale` times the sum of all ranks' `source` [size * n].

        `source` is overwritten. Runs on the lane; every rank must call it. With feedback the new residuals are staged
        in `context`, whose layout is `layout`, and it is told whether all that this rank saw was finite.
        """
        rows = self.rows(parts, source.dtype, context.step)
        across = self.places.across
        assert isinstance(across, Team)
        mine = self._summed_inside(source, scale, context.scratch, exact=rows is None)
        if rows is None:
            across.reduce_scatter(output, mine.view(-1))
            self._add_leftover(output, parts, context)
            return
        within = context.within(self._path, rows.layout) if self._path else context
        sent = rows.take(across.size, "sent", context.scratch, source.device)
        encoded = [self._encode(rows, kind, mine, sent, across, within) for kind in rows.kinds]
        carries = [carry for carry, _ in encoded]
        received = rows.take(across.size, "received", context.scratch, source.device)
        across.all_to_all(received.view(-1), sent.view(-1))
        output.zero_()  # of which rows leave the padding alone
        for kind, (carry, rest) in zip(rows.kinds, encoded, strict=True):
            _add_up(kind, across.rank, received, output, carry, rest, context.scratch)
        if self.compressed is not None and self.compressed.feedback is not None:
            kept = [carry.new.isfinite().all() for carry in carries if carry is not None]
            context.report(torch.stack([mine.isfinite().all(), output.isfinite().all(), *kept]).all())

    def _add_leftover(self, output: Tensor, parts: Parts, context: BufferContext) -> None:
        """Add what compression had left out of this shard before it came to be exact, as a checkpoint may bring it."""
        own = self._own(parts)
        carry = context.flush(own.layout, output.device)
        if carry is not None:
            spans = own.spans_of(own.layout)
            values = torch.cat([output[begin:end] for begin, end in spans])
            scale_and_add(values, values, 1.0, carry)
            context.report(values.isfinite().all())
            sizes = [end - begin for begin, end in spans]
            torch._foreach_copy_([output[begin:end] for begin, end in spans], list(values.split(sizes)))

    def _summed_inside(self, source: Tensor, scale: float, scratch: Scratch, *, exact: bool) -> Tensor:
        """Return [nodes, n]: the node's scaled sums of what the ranks at this rank's place own, in their nodes' order.

        exact: in the dtype of `source`, else in float32 at least.
        """
        places, size = self.places, self.team.size
        shards = source.view(size, -1)
        if not places.in_order:
            shards = shards.index_select(0, places.index(shards.device))
        dtype = source.dtype if exact else torch.promote_types(source.dtype, torch.float32)
        if places.inside is None:
            return apply_scale(shards.to(dtype), scale)
        inside, numel = places.inside, shards.shape[1]
        assert isinstance(inside, Team)
        nodes = size // inside.size
        laid = scratch.take("laid out for the node", (inside.size, nodes, numel), dtype, source.device)
        laid.copy_(shards.view(nodes, inside.size, numel).transpose(0, 1))
        mine = scratch.take("shard", (nodes, numel), dtype, source.device)
        inside.reduce_scatter(mine.view(-1), apply_scale(laid, scale).view(-1))
        return mine

    def _encode(
        self, rows: Rows, kind: Kind, values: Tensor, sent: Tensor, across: Team, context: BufferContext
    ) -> tuple[ErrorFeedback | None, RestingRows | None]:
        """Encode what there is of a kind; return the residuals that went in and come out, and what rests."""
        assert self.compressed is not None
        feedback, device = self.compressed.feedback, values.device
        if not kind.compressor.exact:
            carry = context.error_feedback("worker", kind.layout, feedback, device)
        else:
            carry = None if feedback is None or context.memory.complete else context.flush(kind.layout, device)
        samples = carry is not None and not kind.dense and context.step % SAMPLE_EVERY_STEPS == 0
        rest = RestingRows.of(kind, values, carry, across, context)
        for chunk in kind.chunks:
            taken, own = chunk.read(values[chunk.row], context.scratch), _slice(carry, chunk.begin, chunk.end)
            key = RngKey(context.rank, context.step, context.number * len(rows.shards) + chunk.row)
            payload = chunk.payload(sent[chunk.row : chunk.row + 1])
            kind.compressor.compress(taken, payload, Encoding(chunk.chunk_numel, 1.0, own, key))
            if rest is not None:
                rest.encoded(payload, chunk, own)
            if samples and own is not None:
                context.sample(taken, 1.0, own)
                samples = False
        if rest is not None:
            rest.look()
        return carry, rest


def _slice(carry: ErrorFeedback | None, begin: int, end: int) -> ErrorFeedback | None:
    return None if carry is None else carry.cut(begin, end)


def _add_up(
    kind: Kind,
    row: int,
    received: Tensor,
    output: Tensor,
    carry: ErrorFeedback | None,
    rest: RestingRows | None,
    scratch: Scratch,
) -> None:
    """Put the sums of the received rows, all like this rank's own `row`, into `output`.

    What rounding them takes away is kept with what this rank has sent to itself.
    """
    for chunk in kind.chunks:
        if chunk.row != row:
            continue
        total = scratch.take("sum", chunk.chunk_numel, torch.float32, output.device)
        if rest is None:
            kind.compressor.accumulate(chunk.payload(received), total)
        else:
            rest.accumulate(chunk.payload(received), chunk, total)
        exact = total[: chunk.end - chunk.begin]
        if carry is not None and output.dtype.itemsize < torch.float32.itemsize:
            lost = exact - exact.to(output.dtype)
            carry.new[chunk.begin : chunk.end] += lost if carry.loss_scale is None else lost / carry.loss_scale
        chunk.write(output, exact)


def _require_reducible(aggregator: Aggregator, inner: Aggregator) -> None:
    if isinstance(aggregator, Hierarchical) and aggregator.form == "leader":
        raise ConfigurationError(
            f"{aggregator}: on a 1-D FSDP2 mesh every rank keeps a shard of the sum, so form='leader' has no meaning; "
            f"use form=None"
        )
    if inner.tunes or inner.node_local:
        raise ConfigurationError(
            f"{inner} is for DDP models only; attach another to a model of fully_shard, for example "
            f"'hierarchical_quantized'"
        )
    if not isinstance(inner, (Flat, Compressed)):
        raise ConfigurationError(
            f"{inner} cannot average the gradients of a model on a 1-D FSDP2 mesh, where each rank keeps a shard of "
            f"the sum; use commopt.Hierarchical(commopt.Compressed(commopt.Quantize(bits=8))), or {_HSDP}"
        )
    if isinstance(inner, Compressed):
        if inner.adam is not None:
            raise ConfigurationError(
                f"{inner} makes directions of gradients, and a 1-D FSDP2 mesh has no sum of a node to make them of; "
                f"use no adam, or {_HSDP}"
            )
        if inner.packed:
            raise ConfigurationError(
                f"{inner} packs what it exchanges, which a 1-D FSDP2 mesh does not; use packed=False, or {_HSDP}"
            )
        compressor = inner.compressor
        if compressor.sparse:
            raise ConfigurationError(
                f"{compressor} cannot compress the gradients of a model on a 1-D FSDP2 mesh, where the rows of all "
                f"owners have to be equally long; use commopt.Quantize, commopt.OneBit or commopt.Cast, or {_HSDP}"
            )
