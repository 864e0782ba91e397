# SPDX-License-Identifier: Apache-2.0
"""What was exactly zero on all ranks so far stays so, where every rank keeps a shard of the sum.

As in aggregate.untouched, but nobody learns of a sum of others: so a rank and the owner of a shard know, of this rank
alone, what it has not touched yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.aggregate.untouched import SignBits, Untouched, keep, packed_bits, unpacked_bits, what_is_to_be_sent
from commopt.compress import ErrorFeedback
from commopt.feedback import BufferContext, ResidualStore
from commopt.groups import Team
from commopt.kernels.codec import Codec
from commopt.sharded.rows import Chunk, Kind


@dataclass(eq=False)
class _Known:
    """What rests of one kind: among what this rank sends, and of each rank in this one's own shard."""

    sent: Untouched
    received: list[Untouched]


class RestingRows:
    """The elements of one kind that rest in a step."""

    def __init__(self, codec: Codec, kind: Kind, known: _Known, kept: Tensor) -> None:
        self._signs = SignBits(codec)
        self._kind = kind
        self._known = known
        self._kept = kept

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
        known = store.untouched.get((context.path, kind.layout))
        if known is not None and known.sent.none and all(each.none for each in known.received):
            return None
        parts = [values[chunk.row][begin:end] for chunk in kind.chunks for begin, end in chunk.spans]
        joined = torch.cat(parts)
        if known is None:
            touched = what_is_to_be_sent(joined, 1.0, carry) != 0
            known = _Known(Untouched(~touched), [Untouched(~each) for each in _exchanged(kind, touched, team, store)])
            store.untouched[context.path, kind.layout] = known
        return cls(codec, kind, known, what_is_to_be_sent(joined, 1.0, carry, known.sent.places))

    def encoded(self, payload: Tensor, chunk: Chunk, carry: ErrorFeedback | None) -> None:
        """Tell by sign bits which resting elements of a chunk are touched here; they stay in the residual.

        carry: of the chunk.
        """
        known = self._known.sent
        here = known.within(chunk.begin, chunk.end)
        places, resting, kept = known.places[here] - chunk.begin, known.resting[here], self._kept[here]
        self._signs.write(payload, chunk.chunk_numel, places, resting, kept != 0)
        if carry is not None:
            keep(carry.new, places, resting, kept)
        resting &= kept == 0  # from the next step on

    def accumulate(self, payloads: Tensor, chunk: Chunk, total: Tensor) -> None:
        """Set `total` (float32 [chunk_numel]) to the sum of the decoded rows, less what rests in each."""
        row = torch.empty_like(total)
        total.zero_()
        for number, known in enumerate(self._known.received):
            payload, places = payloads[number : number + 1], known.places
            self._kind.compressor.decompress(payload, row, chunk.chunk_numel)
            row[places] = row[places].masked_fill(known.resting, 0.0)
            total.add_(row)
            known.resting &= ~self._signs.read(payload, chunk.chunk_numel, places)
            known.look()

    def look(self) -> None:
        """See whether anything is left that rests."""
        self._known.sent.look()


def _exchanged(kind: Kind, touched: Tensor, team: Team, store: ResidualStore) -> Tensor:
    """Return what each rank has touched of this rank's shard: bool [ranks, elements]. Collective."""
    nbytes = max(-(-(chunk.end - chunk.begin) // 8) for chunk in kind.chunks)
    sent = torch.zeros(team.size, nbytes, dtype=torch.uint8, device=touched.device)
    for chunk in kind.chunks:
        sent[chunk.row] = packed_bits(touched[chunk.begin : chunk.end], nbytes)
    received = torch.empty_like(sent)
    store.beside += team.wire.all_to_all(sent.nbytes)
    team.all_to_all(received.view(-1), sent.view(-1))
    own = next((chunk.end - chunk.begin for chunk in kind.chunks if chunk.row == team.rank), 0)
    return unpacked_bits(received).view(team.size, -1)[:, :own]
