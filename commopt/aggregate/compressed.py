# SPDX-License-Identifier: Apache-2.0
"""All_reduce in compressed form: every element is encoded at most twice, whatever the number of ranks.

A ring that carries a 16-bit or quantized sum rounds it again at every hop, so its error grows with the ranks. Here
each rank owns one chunk: scatter the encoded chunks to their servers, add them in float32 in rank order, encode the
sum, gather. Between two ranks a single exchange of everything moves the same bytes in one message less and spares
the second rounding; more ranks do so with sparse payloads that are short. With feedback residuals take every
rounding error: of a rank's own encoding ("worker"), of the encoding of the sum ("server", as in DoubleSqueeze, arXiv
1905.05957) and of the final cast to a 16-bit buffer. Rows of bfloat16 may travel in fewer bytes, exactly
(aggregate/packed.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from commopt.aggregate.adam import Adam
from commopt.aggregate.base import HSDP, Action, Aggregator, Buffer, WorkKind, call, mark_non_finite, work
from commopt.aggregate.reduce_scatter import exchange_rows
from commopt.aggregate.residuals import add_rounding_error, encoding_residual
from commopt.aggregate.rows import RowFormat, ShardedBuffer, ShardRows, row_format, shard_rows, split
from commopt.aggregate.zeros import MaskedRegion
from commopt.compress import Candidates, Cast, Compressor, Encoding, ErrorFeedback, Exact, KernelCost, RngKey
from commopt.document import require_flags
from commopt.errors import ConfigurationError
from commopt.feedback import (
    EXP_AVG,
    EXP_AVG_SQ,
    SAMPLE_EVERY_STEPS,
    SAMPLE_NUMEL,
    BufferContext,
    Feedback,
    Layout,
    checked_patterns,
    require_feedback,
    require_repeatable,
    scale_and_add,
)
from commopt.groups import Team, TeamShape
from commopt.kernels.finite import all_finite, all_true

_EVERYTHING = ("*",)
_COLLECTIVE_NBYTES = 16 * 1024
"""What a rank could send while one more collective begins: 0.13 ms at 1 Gbit/s."""


@dataclass(frozen=True, repr=False)
class Compressed(Aggregator):
    """Exchange `compressor`'s payloads instead of the values.

    feedback: how the residual of a compression is kept for the next step; None drops it. Only hooks keep residuals: a
        standalone all_reduce does not know that two tensors are the same gradient a step apart.
    dense: patterns of parameter names that travel uncompressed ("*.bias"), beside those that would not shrink.
    packed: let bfloat16 numbers travel in 0.71 of their bytes, exactly, on the CPU; with Cast(torch.bfloat16).
    adam: compress Adam's directions instead of gradients, and return their sum (True: Adam(); a pair: with these
        betas); needs feedback, and an optimizer made by `CommState.optimizer`. A standalone all_reduce averages its
        tensor as it is.
    """

    compressor: Compressor
    feedback: Feedback | None = Feedback()
    dense: tuple[str, ...] = ()
    adam: Adam | None = None
    packed: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, Compressor):
            raise ConfigurationError(
                f"Compressed({self.compressor!r}) needs a Compressor, for example Compressed(Cast(torch.bfloat16))"
            )
        require_feedback("Compressed", self.feedback)
        require_flags(self, "packed")
        if self.packed and not (isinstance(self.compressor, Cast) and self.compressor.dtype == torch.bfloat16):
            raise ConfigurationError(
                f"Compressed({self.compressor}, packed=True) packs the exponents of bfloat16, which this does not "
                f"send; use Cast(torch.bfloat16) or packed=False"
            )
        object.__setattr__(self, "dense", checked_patterns("Compressed", self.dense))
        if isinstance(self.adam, bool):  # as a command line has it
            object.__setattr__(self, "adam", Adam() if self.adam else None)
        elif isinstance(self.adam, tuple):
            object.__setattr__(self, "adam", Adam(betas=self.adam))
        if self.adam is None:
            return
        if not isinstance(self.adam, Adam):
            raise ConfigurationError(f"Compressed(adam={self.adam!r}) must be a commopt.Adam(), or None for none")
        if self.feedback is None:
            raise ConfigurationError("Compressed(adam=..., feedback=None) has nowhere to keep m and v; leave feedback")

    def check(self, team: TeamShape) -> None:
        """Refuse to pack on a GPU, for which there is no kernel."""
        _require_cpu_to_pack(self, team.default_device)

    # --------------------------------------------------------------------------------- all_reduce

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        """Exchange, or scatter and gather; one rank alone sends nothing, but adds its residual."""
        if buffer.numel() == 0:
            return
        _require_cpu_to_pack(self, buffer.device)
        if self.adam is None or context.store is None:
            self._average(buffer, team, scale, context)
            return
        direction = self.adam.direction(buffer, team, scale, context)
        values = buffer
        if buffer.dtype.itemsize < torch.float32.itemsize:
            context = replace(context, result_dtype=context.result_dtype or buffer.dtype)
            values = context.scratch.take("updates", buffer.numel(), torch.float32, buffer.device)
        values.copy_(direction)
        rows, residuals = self._average(values, team, 1.0, context)
        if residuals:
            self.adam.compare(direction, values, team, rows, residuals, context)
        if values is not buffer:
            buffer.copy_(values)

    def _average(
        self, buffer: Tensor, team: Team, scale: float, context: BufferContext
    ) -> tuple[RowFormat, list[ErrorFeedback | None]]:
        """Average `buffer`; return the rows that travelled, and the residuals of their regions: none on one rank."""
        dtype = context.result_dtype or buffer.dtype
        row = self._rows(context.layout, dtype, 1, context.step)
        if team.size == 1:
            residual = None if self.feedback is None else context.flush(context.layout, buffer.device)
            scale_and_add(buffer, buffer, scale, residual)
            return row, []
        chunk_rows = self._rows(context.layout, dtype, team.size, context.step)
        if self.sends_to_all(row, chunk_rows, team.size):
            return row, self._exchange(row, buffer, team, scale, context)
        return chunk_rows, self._through_servers(chunk_rows, buffer, team, scale, context)

    def sends_to_all(self, row: RowFormat, chunk_rows: RowFormat, ranks: int) -> bool:
        """Return whether every rank sends one `row` to all others, rather than one of `chunk_rows` to each server.

        Two ranks do. More do with a sparse row, where that takes less time: to all a rank sends (ranks - 1) rows, by
        way of servers 2 (ranks - 1) rows of chunks in one collective more, which is less than two rows, however many
        ranks there are. The same on all ranks, since nothing measured is in it.
        """
        if ranks == 2:
            return True
        sparse = any(region.compressor.sparse for region in row.regions)
        return sparse and (ranks - 1) * (row.nbytes - 2 * chunk_rows.nbytes) <= _COLLECTIVE_NBYTES

    def _exchange(
        self, rows: RowFormat, buffer: Tensor, team: Team, scale: float, context: BufferContext
    ) -> list[ErrorFeedback | None]:
        """Let every rank send one row to all others."""
        if context.store is not None and not context.memory.complete:  # sums are not encoded any more
            context.store.release(context.path, context.layout, "server")
        received = rows.take(team.size, "received", context.scratch, buffer.device)
        mine = received[team.rank : team.rank + 1]
        residuals, masks = self._encode(rows, buffer, mine, team, scale, context)
        rows.travel("all_gather", team, received, mine, context.scratch)
        for region, residual, mask in zip(rows.regions, residuals, masks, strict=True):
            if mask is None and not rows.rounds:
                region.accumulate(received, buffer, context.scratch)
                continue
            with context.scratch.frame():
                total = region.target(buffer, torch.float32, region.chunk_numel, context.scratch)
                region.compressor.accumulate(region.payload(received), total)
                if mask is not None:
                    mask.clear(total)
                    mask.arrived(region.payload(received), region.chunk_numel, chunks=False)
                if residual is not None and rows.rounds:
                    own = slice(region.numel * team.rank // team.size, region.numel * (team.rank + 1) // team.size)
                    add_rounding_error(residual.new[own], total[own], rows.dtype, residual.loss_scale)
                region.write(buffer, total[: region.numel])
        if self.feedback is not None:
            _report_finite(rows, received, buffer, context)
        return residuals

    def _through_servers(
        self, rows: RowFormat, buffer: Tensor, team: Team, scale: float, context: BufferContext
    ) -> list[ErrorFeedback | None]:
        """Send each rank the chunk that it is the server of; it adds up and encodes the sum, which all gather."""
        scratch, device = context.scratch, buffer.device
        encoded = rows.take(team.size, "sent", scratch, device)
        own, masks = self._encode(rows, buffer, encoded, team, scale, context)
        gathered = encoded  # is sent, and as long
        served = gathered[team.rank : team.rank + 1]
        with scratch.frame():
            received = rows.take(team.size, "received", scratch, device)
            rows.travel("all_to_all", team, received, encoded, scratch)
            residuals = self._recode(rows, received, served, masks, team, context)
        rows.travel("all_gather", team, gathered, served, scratch)
        for region, residual, mask in zip(rows.regions, residuals, masks, strict=True):
            if residual is not None and rows.rounds:
                with scratch.frame():
                    exact = scratch.take("total", residual.new.numel(), torch.float32, device)
                    region.compressor.decompress(region.payload(served), exact, region.chunk_numel)
                    if mask is not None:
                        mask.clear(exact, region.chunk(team.rank)[0])
                    add_rounding_error(residual.new, exact, rows.dtype, residual.loss_scale)
            # The server, too, takes what it sent: otherwise its replica would differ from all others.
            if mask is None:
                region.decode(gathered, buffer, rows.dtype, scratch)
                continue
            with scratch.frame():
                values = region.target(buffer, rows.dtype, region.numel, scratch)
                region.compressor.decompress(region.payload(gathered), values, region.chunk_numel)
                mask.clear(values)
                mask.arrived(region.payload(gathered), region.chunk_numel, chunks=True)
                region.write(buffer, values)
        if self.feedback is not None:
            _report_finite(rows, gathered, buffer, context)
        return own

    def _recode(
        self,
        rows: RowFormat,
        received: Tensor,
        served: Tensor,
        masks: Sequence[MaskedRegion | None],
        team: Team,
        context: BufferContext,
    ) -> list[ErrorFeedback | None]:
        """Encode the sums of the received chunks into the row `served`; return the residual of each region."""
        residuals = []
        for region, mask in zip(rows.regions, masks, strict=True):
            begin, end = region.chunk(team.rank)
            own_chunk = region.chunk_layout(team.rank)
            residual = encoding_residual(
                region.compressor, self.feedback, "server", own_chunk, context, received.device, region.layout
            )
            residuals.append(residual)
            sources, target = region.payload(received), region.payload(served)
            encoding = Encoding(region.chunk_numel, 1.0, residual, context.rng_key("server"))
            region.compressor.recompress(sources, target, end - begin, encoding)
            if mask is not None:
                mask.summed(sources, target, region.chunk_numel, begin, end, residual)
        return residuals

    def _encode(
        self, rows: RowFormat, buffer: Tensor, payload: Tensor, team: Team, scale: float, context: BufferContext
    ) -> tuple[list[ErrorFeedback | None], list[MaskedRegion | None]]:
        """Encode all regions of `buffer`; return the residual of each, and its masked elements."""
        residuals: list[ErrorFeedback | None] = []
        masks: list[MaskedRegion | None] = []
        for region in rows.regions:
            encoder = region.compressor
            residual = encoding_residual(encoder, self.feedback, "worker", region.layout, context, buffer.device)
            residuals.append(residual)
            key = context.rng_key("worker") if encoder.stochastic else RngKey()
            encoding = Encoding(region.chunk_numel, scale, residual, key)
            if MaskedRegion.may_be(region, context):
                with context.scratch.frame():
                    values = region.read(buffer, context.scratch)
                    mask = MaskedRegion.of(region, values, scale, residual, team, context)
                    masks.append(mask)
                    encoder.compress(values, region.payload(payload), encoding)
                    if mask is not None:
                        mask.encoded(values, scale, region.payload(payload), region.chunk_numel, residual)
            else:
                masks.append(None)
                region.encode(buffer, payload, encoding, context.scratch)
            if residual is not None and not region.dense and context.step % SAMPLE_EVERY_STEPS == 0:
                context.sample(region.first(buffer, SAMPLE_NUMEL), scale, residual)
        return residuals, masks

    def _rows(self, layout: Layout, dtype: torch.dtype, chunks: int, step: int | None) -> RowFormat:
        compressor = self.compressor.at(step)
        if compressor is None:
            return row_format(layout, chunks, self.compressor, _EVERYTHING, dtype, self.packed)
        return row_format(layout, chunks, compressor, self.dense, dtype, self.packed)

    # ----------------------------------------------------------------------------- reduce_scatter

    def check_reduce_scatter(self, team: TeamShape) -> None:
        """Refuse Adam, packed rows, and sparse ones, whose length differs from owner to owner."""
        if self.adam is not None:
            raise ConfigurationError(
                f"{self} makes directions of gradients, and a 1-D FSDP2 mesh has no sum of a node to make them of; "
                f"use no adam, or {HSDP}"
            )
        if self.packed:
            raise ConfigurationError(
                f"{self} packs what it exchanges, which a 1-D FSDP2 mesh does not; use packed=False, or {HSDP}"
            )
        if self.compressor.sparse:
            raise ConfigurationError(
                f"{self.compressor} cannot compress the gradients of a model on a 1-D FSDP2 mesh, where the rows of "
                f"all owners have to be equally long; use commopt.Quantize, commopt.OneBit or commopt.Cast, or {HSDP}"
            )

    def reduce_scatter(
        self, output: Tensor, source: Tensor, buffer: ShardedBuffer, team: Team, scale: float, context: BufferContext
    ) -> None:
        """Encode a row for each owner, and add up the rows that come in: one encoding, and no residual of a sum."""
        exchange_rows(self.shard_rows(buffer), self.feedback, source, output, team, scale, context)

    def reduce_scatter_calls(self, buffer: ShardedBuffer, team: TeamShape) -> tuple[Action, ...]:
        """Return one all_to_all of rows."""
        rows = self.shard_rows(buffer)
        return (*rows.work("encode"), *call(team, "all_to_all", team.size * rows.nbytes), *rows.work("decode"))

    def residual_owners(self, team: TeamShape) -> tuple[int, ...]:
        """Return all ranks: this one encodes a row for each."""
        return tuple(range(team.size))

    def shard_rows(self, buffer: ShardedBuffer, layout: Layout | None = None) -> ShardRows:
        """Return a row for each shard of a buffer. layout: as of the function `shard_rows`."""
        compressor = self.compressor.at(buffer.step)
        dense = _EVERYTHING if compressor is None else self.dense
        return shard_rows(buffer.shards, compressor or self.compressor, dense, buffer.dtype, layout)

    # -------------------------------------------------------------------------------------- facts

    def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Action, ...]:
        """Return one all_gather of rows, or an all_to_all and an all_gather of chunks; Adam's own calls first."""
        if buffer.nbytes == 0 or team.size == 1:
            return ()
        beside = () if self.adam is None else self.adam.calls(buffer, team)
        row = self._rows(buffer.layout, buffer.dtype, 1, buffer.step)
        chunk_rows = self._rows(buffer.layout, buffer.dtype, team.size, buffer.step)
        if self.sends_to_all(row, chunk_rows, team.size):
            return (
                *beside,
                *_work("encode", row),
                *row.travels("all_gather", team, 1),
                *_work("decode", row, team.size),
            )
        return (
            *beside,
            *_work("encode", row),
            *chunk_rows.travels("all_to_all", team, team.size),
            *_work("recode", row),
            *chunk_rows.travels("all_gather", team, 1),
            *_work("decode", row),
        )

    @classmethod
    def candidates(cls) -> Candidates[Aggregator]:
        """Return packed bfloat16: the values of Cast(), in fewer bytes and with more work."""
        return Candidates("bf16_packed", (cls(Cast(torch.bfloat16), None, packed=True),), feedback=False)

    @property
    def error_bound(self) -> float:
        """The bounds of one encoding on the way to the server, and one of the sum."""
        return (1 + self.compressor.error_bound) ** 2 - 1

    @property
    def start_step(self) -> int:
        """The first step after the compressor's warm-up."""
        return self.compressor.start_step

    def phase(self, step: int) -> int:
        """Return the phase of the compressor, and of Adam's own exchanges."""
        first = self.compressor.phase(step)
        return first if self.adam is None else self.adam.phase(step, first)

    def check_capture(self, step: int, team: TeamShape) -> None:
        """Refuse random bits, whose key the host makes once for each launch."""
        super().check_capture(step, team)
        require_repeatable(str(self), self.feedback)
        if self.adam is not None:
            raise ConfigurationError(
                f"{self} corrects Adam's moments by the number of steps, and a CUDA graph would repeat one for ever; "
                f"capture nothing, or use no adam"
            )
        if self.compressor.stochastic:
            raise ConfigurationError(
                f"{self} rounds up or down at random and a CUDA graph would repeat the same random bits in every step; "
                f"use rounding='nearest'"
            )

    @cached_property
    def residual_paths(self) -> tuple[str, ...]:
        """With feedback its own level, and momentum or moments beside the residuals."""
        if self.feedback is None:
            return ()
        if self.adam is not None:
            return ("", EXP_AVG, EXP_AVG_SQ)
        return ("",)

    def with_dense(self, patterns: Sequence[str]) -> Compressed:
        """Return the same with more patterns in `dense`."""
        return replace(self, dense=(*self.dense, *patterns))

    def squared_error(self, layout: Layout, buffer: Tensor) -> float:
        """Return the error of one encoding of each compressed parameter by itself."""
        compressed = layout.select(split(layout, self.compressor, buffer.dtype, self.dense)[0])
        return sum(
            self.compressor.squared_error(buffer[begin:end])
            for piece in compressed.pieces
            for begin, end in layout.spans_of(Layout((piece,)))
        )

    def kernel_costs(self, ranks: int) -> dict[tuple[WorkKind, str], KernelCost]:
        """Return the passes of the compressor, and of dense elements beside it."""
        encoders = (self.compressor, Exact())
        return {(kind, repr(each)): passes for each in encoders for kind, passes in each.kernel_costs(ranks).items()}


def _require_cpu_to_pack(aggregator: Compressed, device: torch.device) -> None:
    if aggregator.packed and device.type != "cpu":
        raise ConfigurationError(
            f"{aggregator} packs bfloat16 on the CPU, and these tensors are on {device.type}; use packed=False "
            f"(hierarchical_bf16: lossless=False)"
        )


def _report_finite(rows: RowFormat, payloads: Tensor, buffer: Tensor, context: BufferContext) -> None:
    """Report whether the result is finite; if not, the buffer's first element is NaN."""
    if context.store is None:
        return
    flags = [region.compressor.finite(region.payload(payloads), region.chunk_numel) for region in rows.regions]
    if rows.rounds:  # the cast may overflow what was finite
        flags.append(all_finite(buffer, rows.dtype))
    finite = all_true(flags)
    mark_non_finite(buffer, finite)
    context.report(finite)


def _work(kind: WorkKind, rows: RowFormat, times: int = 1) -> tuple[Action, ...]:
    """Return the work on all elements of a buffer, or on `times` as many."""
    return tuple(work(kind, region.compressor, region.numel * times) for region in rows.regions)
