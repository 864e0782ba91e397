# SPDX-License-Identifier: Apache-2.0
"""A compressed reduce-scatter: a rank encodes one row for the shard of each owner, and adds up the rows it receives.

One encoding, and a residual of the shards that the rank sends: nobody gathers the sum. Rows are added in float32, in
the order of the ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.aggregate.residuals import add_rounding_error, encoding_residual
from commopt.aggregate.rows import RowRegions, ShardRows
from commopt.aggregate.zero_rows import MaskedRows
from commopt.compress import Encoding, ErrorFeedback, RngKey
from commopt.feedback import SAMPLE_EVERY_STEPS, BufferContext, Feedback, Scratch
from commopt.groups import Team
from commopt.kernels.finite import all_finite, all_true


def exchange_rows(
    rows: ShardRows, feedback: Feedback | None, values: Tensor, output: Tensor, team: Team, context: BufferContext
) -> None:
    """Set `output` [n] to the sum of the rows that all ranks of `team` encode for this rank. Collective.

    values: float32 or float64 [team.size, n], a shard for each rank.
    """
    scratch, device = context.scratch, values.device
    sent = rows.take(team.size, "sent", scratch, device)
    encoded = [_encode(regions, len(rows.formats), feedback, values, sent, team, context) for regions in rows.regions]
    received = rows.take(team.size, "received", scratch, device)
    team.all_to_all(received.view(-1), sent.view(-1))
    output.zero_()  # rows leave out the padding
    for regions, (residual, mask) in zip(rows.regions, encoded, strict=True):
        _add_up(regions, team.rank, received, output, residual, mask, scratch)
    if feedback is not None:
        residuals = [residual.new for residual, _ in encoded if residual is not None]
        context.report(all_true([all_finite(each) for each in (values, output, *residuals)]))


def _encode(
    regions: RowRegions,
    row_count: int,
    feedback: Feedback | None,
    values: Tensor,
    sent: Tensor,
    team: Team,
    context: BufferContext,
) -> tuple[ErrorFeedback | None, MaskedRows | None]:
    """Encode regions into their rows; return their residual, and their masked elements."""
    residual = encoding_residual(regions.compressor, feedback, "worker", regions.layout, context, values.device)
    samples = residual is not None and not regions.dense and context.step % SAMPLE_EVERY_STEPS == 0
    mask = MaskedRows.of(regions, values, residual, team, context)
    for row, region, place in regions.by_row:
        taken, own = region.read(values[row], context.scratch), _slice(residual, place)
        key = RngKey(context.rank, context.step, context.number * row_count + row)
        payload = region.payload(sent[row : row + 1])
        regions.compressor.compress(taken, payload, Encoding(region.chunk_numel, 1.0, own, key))
        if mask is not None:
            mask.encoded(payload, region.chunk_numel, place, own)
        if samples and own is not None:
            context.sample(taken, 1.0, own)
            samples = False
    if mask is not None:
        mask.shrink()
    return residual, mask


def _slice(residual: ErrorFeedback | None, place: slice) -> ErrorFeedback | None:
    return None if residual is None else residual.cut(place.start, place.stop)


def _add_up(
    regions: RowRegions,
    own_row: int,
    received: Tensor,
    output: Tensor,
    residual: ErrorFeedback | None,
    mask: MaskedRows | None,
    scratch: Scratch,
) -> None:
    """Put the sums of the received rows, all in the format of this rank's own row, into `output`.

    The residual of this rank's row for itself takes the rounding error.
    """
    for row, region, place in regions.by_row:
        if row != own_row:
            continue
        total = scratch.take("sum", region.chunk_numel, torch.float32, output.device)
        if mask is None:
            regions.compressor.accumulate(region.payload(received), total)
        else:
            mask.accumulate(region.payload(received), total)
        exact = total[: region.numel]
        if residual is not None and output.dtype.itemsize < torch.float32.itemsize:
            add_rounding_error(residual.new[place], exact, output.dtype, residual.loss_scale)
        region.write(output, exact)
