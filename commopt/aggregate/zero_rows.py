# SPDX-License-Identifier: Apache-2.0
"""Elements that were exactly zero on all ranks so far stay so, where each rank keeps a shard of the sum.

As in zeros, but no rank learns the sum of others: so a rank and the owner of a shard keep masks of that rank's own
elements, which it has not touched yet. Without error feedback these are exchanged in every step once any rank has one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from commopt.aggregate.rows import RowRegions
from commopt.aggregate.zeros import SignBitFlags, ZeroMask, packed_bits, put_masked, unpacked_bits, values_to_send
from commopt.compress import ErrorFeedback
from commopt.feedback import BufferContext, ResidualStore
from commopt.groups import Team
from commopt.kernels.codec import Codec


@dataclass(eq=False)
class _RowMasks:
    """The masks of the regions of several rows.

    sent: among the values of this rank.
    received: of each rank, in this rank's own shard.
    anywhere: whether any rank had masked elements at first; asked only where ranks exchange them in every step.
    asks_host: as a mask of matrices may.
    """

    asks_host: ClassVar[bool] = False
    sent: ZeroMask
    received: list[ZeroMask]
    anywhere: bool = False

    def state(self, copy: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return what a checkpoint keeps of them: this rank's own, which owners of shards get from it."""
        return self.sent.state(copy)

    @property
    def empty(self) -> bool:
        """Whether there are no masked elements."""
        return self.sent.empty and all(each.empty for each in self.received)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors, which are others once elements were left out."""
        return tuple(tensor for mask in (self.sent, *self.received) for tensor in mask.tensors())

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return self.sent.nbytes + sum(each.nbytes for each in self.received)


class MaskedRows:
    """The masked elements of the regions of several rows in one step."""

    def __init__(self, codec: Codec, regions: RowRegions, masks: _RowMasks, values: Tensor) -> None:
        self._flags = SignBitFlags(codec)
        self._regions = regions
        self._masks = masks
        self._values = values

    @classmethod
    def of(
        cls,
        regions: RowRegions,
        buffer: Tensor,
        scale: float,
        residual: ErrorFeedback | None,
        team: Team,
        context: BufferContext,
    ) -> MaskedRows | None:
        """Return the masked elements; None for none, and without a store.

        Collective over `team` the first time, and without a residual in every step where any rank had some then.
        buffer: 1-D, of which the regions are; multiplied by `scale`.
        """
        codec, store = regions.compressor.codec_without_zero, context.store
        if codec is None or store is None:
            return None
        masks = store.untouched.get((context.path, regions.layout))
        if masks is not None and masks.empty and not masks.anywhere:
            return None
        joined = torch.cat([buffer[begin:end] for _, region, _ in regions.by_row for begin, end in region.spans])
        if masks is None:
            known = store.touched_before.pop((context.path, regions.layout), None)
            touched = values_to_send(joined, scale, residual) != 0 if known is None else known.to(joined.device)
            masks = _RowMasks(
                ZeroMask(~touched), [ZeroMask(~each) for each in _exchanged(regions, touched, team, store)]
            )
            store.untouched[context.path, regions.layout] = masks
            masks.anywhere = residual is None and _any_masked(masks, team, store)
        if masks.anywhere:
            now = values_to_send(joined, scale, None) != 0
            pairs = [(masks.sent, now), *zip(masks.received, _exchanged(regions, now, team, store), strict=True)]
            for mask, each in pairs:
                mask.active &= ~each[mask.indices.long()]
        return cls(codec, regions, masks, values_to_send(joined, scale, residual, masks.sent.indices.long()))

    def encoded(self, payload: Tensor, chunk_numel: int, place: slice, residual: ErrorFeedback | None) -> None:
        """Flag the masked elements of a region that are touched here; their values stay in its residual.

        place: the elements of the residual that belong to the region.
        """
        mask = self._masks.sent
        here = mask.within(place.start, place.stop)
        indices, active, values = mask.indices[here].long() - place.start, mask.active[here], self._values[here]
        self._flags.write(payload, chunk_numel, indices, active, values != 0)
        if residual is not None:
            put_masked(residual.new, indices, active, values)
        active &= values == 0  # from the next step on

    def accumulate(self, payloads: Tensor, total: Tensor) -> None:
        """Set `total` (float32 [chunk_numel]) to the sum of the decoded rows, less the masked elements of each."""
        row, chunk_numel = torch.empty_like(total), total.numel()
        total.zero_()
        for number, mask in enumerate(self._masks.received):
            payload, indices = payloads[number : number + 1], mask.indices.long()
            self._regions.compressor.decompress(payload, row, chunk_numel)
            row[indices] = row[indices].masked_fill(mask.active, 0.0)
            total.add_(row)
            mask.active &= ~self._flags.read(payload, chunk_numel, indices)
            mask.shrink()

    def shrink(self) -> None:
        """Leave out elements that are masked no more among those that this rank sends."""
        self._masks.sent.shrink()


def _any_masked(masks: _RowMasks, team: Team, store: ResidualStore) -> bool:
    """Return whether any rank has masked elements. Collective."""
    own = torch.full((1,), not masks.empty, dtype=torch.uint8, device=masks.sent.indices.device)
    everyone = own.new_empty(team.size)
    store.beside += team.wire.all_gather(own.nbytes)
    team.all_gather(everyone, own)
    return bool(everyone.any())


def _exchanged(regions: RowRegions, touched: Tensor, team: Team, store: ResidualStore) -> Tensor:
    """Return the elements that each rank has touched of this rank's shard: bool [ranks, elements]. Collective."""
    nbytes = max(-(-region.numel // 8) for _, region, _ in regions.by_row)
    sent = torch.zeros(team.size, nbytes, dtype=torch.uint8, device=touched.device)
    for row, _, place in regions.by_row:
        sent[row] = packed_bits(touched[place], nbytes)
    received = torch.empty_like(sent)
    store.beside += team.wire.all_to_all(sent.nbytes)
    team.all_to_all(received.view(-1), sent.view(-1))
    own = next((region.numel for row, region, _ in regions.by_row if row == team.rank), 0)
    return unpacked_bits(received).view(team.size, -1)[:, :own]
