# SPDX-License-Identifier: Apache-2.0
"""What was exactly zero on all ranks so far stays so, where every rank keeps a shard of the sum.

As in aggregate.untouched, but nobody learns of a sum of others: so a rank and the owner of a shard know, of this rank
alone, what it has not touched yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.aggregate.untouched import SignBits, Untouched, packed_bits, unpacked_bits, what_is_to_be_sent
from commopt.compress import ErrorFeedback
from commopt.feedback import BufferContext
from commopt.groups import Team
from commopt.kernels.codec import Codec
from commopt.sharded.rows import Chunk, Kind


class RestingRows:
    """The elements of one kind that rest in a step: among what this rank sends, and of each rank in its own shard."""

    def __init__(self, codec: Codec, kind: Kind, sent: Untouched, received: Untouched, kept: Tensor) -> None:
        self._signs, self._kind, self._kept = SignBits(codec), kind, kept
        self._sent, self._received = sent, received
        self._resting = sent.resting.clone()

    @classmethod
    def of(
        cls, kind: Kind, values: Tensor, carry: ErrorFeedback | None, team: Team, context: BufferContext
    ) -> RestingRows | None:
        """Return them; None where nothing rests, or nothing is remembered. Collective over `team` the first time.

        values: a row of each shard, as Chunk.read takes them.
        """
        codec, store = kind.compressor.codec_without_zero, context.store
        if codec is None or store is None:
            return None
        sent, received = (
            store.untouched.get((path, kind.layout)) for path in (context.path, f"{context.path}.received")
        )
        if sent is not None and received is not None and sent.none and received.none:
            return None
        parts = [values[chunk.row][begin:end] for chunk in kind.chunks for begin, end in chunk.spans]
        kept = what_is_to_be_sent(torch.cat(parts), 1.0, carry)
        if sent is None or received is None:
            sent = Untouched(kept == 0)
            received = Untouched(~_exchanged(kind, kept != 0, team))
            store.rest(context.path, kind.layout, sent)
            store.rest(f"{context.path}.received", kind.layout, received)
            sent.look()
            received.look()
            if sent.none and received.none:
                return None
        return cls(codec, kind, sent, received, kept)

    def encoded(self, payload: Tensor, chunk: Chunk, carry: ErrorFeedback | None) -> None:
        """Tell by sign bits which resting elements of a chunk are touched here; they stay in the residual.

        carry: of the chunk.
        """
        resting, kept = self._resting[chunk.begin : chunk.end], self._kept[chunk.begin : chunk.end]
        self._signs.write(payload, chunk.chunk_numel, resting, kept != 0)
        if carry is not None:
            torch.where(resting, kept, carry.new, out=carry.new)
        self._sent.resting[chunk.begin : chunk.end] &= kept == 0

    def accumulate(self, payloads: Tensor, chunk: Chunk, total: Tensor) -> None:
        """Set `total` (float32 [chunk_numel]) to the sum of the decoded rows, less what rests in each."""
        numel, row = chunk.end - chunk.begin, torch.empty_like(total)
        total.zero_()
        for place, resting in enumerate(self._received.resting):
            payload = payloads[place : place + 1]
            self._kind.compressor.decompress(payload, row, chunk.chunk_numel)
            row[:numel].masked_fill_(resting[:numel], 0.0)
            total.add_(row)
            resting[:numel] &= ~self._signs.read(self._signs.codes(payload, chunk.chunk_numel)[0])[:numel]
        self._received.look()

    def look(self) -> None:
        """See whether anything is left that rests."""
        self._sent.look()


def _exchanged(kind: Kind, touched: Tensor, team: Team) -> Tensor:
    """Return what each rank has touched of this rank's shard: bool [ranks, elements and padding]. Collective."""
    nbytes = max(-(-(chunk.end - chunk.begin) // 8) for chunk in kind.chunks)
    sent = torch.zeros(team.size, nbytes, dtype=torch.uint8, device=touched.device)
    for chunk in kind.chunks:
        sent[chunk.row] = packed_bits(touched[chunk.begin : chunk.end], nbytes)
    received = torch.empty_like(sent)
    team.all_to_all(received.view(-1), sent.view(-1))
    return unpacked_bits(received).view(team.size, -1)
