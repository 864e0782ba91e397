# SPDX-License-Identifier: Apache-2.0
"""A compressed reduce-scatter: a rank encodes one row for the shard of each owner, and adds up the rows it receives.

One encoding, and a residual of the shards that the rank sends: nobody gathers the sum. Rows are added in float32, in
the order of the ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.aggregate.residuals import add_rounding_error, encoding_residual
from commopt.aggregate.rows import Region, RowRegions, ShardRows
from commopt.aggregate.zero_rows import MaskedRows
from commopt.compress import Encoding, ErrorFeedback, RngKey
from commopt.feedback import SAMPLE_EVERY_STEPS, SAMPLE_NUMEL, BufferContext, Feedback, Scratch
from commopt.groups import Team
from commopt.kernels.finite import all_finite, all_true


def exchange_rows(
    rows: ShardRows,
    feedback: Feedback | None,
    buffer: Tensor,
    output: Tensor,
    team: Team,
    scale: float,
    context: BufferContext,
) -> None:
    """Set `output` [n] to the sum of the rows that all ranks of `team` encode for this rank. Collective.

    buffer: 1-D, floating; the rows are those of its shards, one for each rank. Its elements are multiplied by `scale`.
    """
    scratch, device = context.scratch, buffer.device
    sent = rows.take(team.size, "sent", scratch, device)
    encoded = [
        _encode(regions, len(rows.formats), feedback, buffer, sent, team, scale, context) for regions in rows.regions
    ]
    received = rows.take(team.size, "received", scratch, device)
    team.all_to_all(received.view(-1), sent.view(-1))
    output.zero_()  # rows leave out the padding
    own = {region.dense: region for region in rows.formats[team.rank].regions}
    for regions, (residual, mask) in zip(rows.regions, encoded, strict=True):
        if regions.dense in own:
            _add_up(regions, own[regions.dense], team.rank, received, output, residual, mask, scratch)
    if feedback is not None:
        context.report(all_true([*(regions.finite(sent) for regions in rows.regions), all_finite(output)]))


def _encode(
    regions: RowRegions,
    row_count: int,
    feedback: Feedback | None,
    buffer: Tensor,
    sent: Tensor,
    team: Team,
    scale: float,
    context: BufferContext,
) -> tuple[ErrorFeedback | None, MaskedRows | None]:
    """Encode regions into their rows; return their residual, and their masked elements."""
    residual = encoding_residual(regions.compressor, feedback, "worker", regions.layout, context, buffer.device)
    samples = residual is not None and not regions.dense and context.step % SAMPLE_EVERY_STEPS == 0
    mask = MaskedRows.of(regions, buffer, scale, residual, team, context)
    for row, region, place in regions.by_row:
        own, encoded = _slice(residual, place), sent[row : row + 1]
        key = RngKey(context.rank, context.step, context.number * row_count + row)
        region.encode(buffer, encoded, Encoding(region.chunk_numel, scale, own, key), context.scratch)
        if mask is not None:
            mask.encoded(region.payload(encoded), region.chunk_numel, place, own)
        if samples and own is not None:
            context.sample(region.first(buffer, SAMPLE_NUMEL), scale, own)
            samples = False
    if mask is not None:
        mask.shrink()
    return residual, mask


def _slice(residual: ErrorFeedback | None, place: slice) -> ErrorFeedback | None:
    return None if residual is None else residual.cut(place.start, place.stop)


def _add_up(
    regions: RowRegions,
    own: Region,
    own_row: int,
    received: Tensor,
    output: Tensor,
    residual: ErrorFeedback | None,
    mask: MaskedRows | None,
    scratch: Scratch,
) -> None:
    """Put the sums of the received rows, all in the format of this rank's own row, into `output`.

    own: the region of this rank's shard, which is `output`.
    The residual of this rank's row for itself takes the rounding error.
    """
    total = scratch.take("sum", own.chunk_numel, torch.float32, output.device)
    if mask is None:
        regions.compressor.accumulate(own.payload(received), total)
    else:
        mask.accumulate(own.payload(received), total)
    exact = total[: own.numel]
    if residual is not None and output.dtype.itemsize < torch.float32.itemsize:
        place = next(place for row, _, place in regions.by_row if row == own_row)
        add_rounding_error(residual.new[place], exact, output.dtype, residual.loss_scale)
    own.write(output, exact)
