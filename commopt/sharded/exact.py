# SPDX-License-Identifier: Apache-2.0
"""Second copies that follow shards bit for bit: differences of 16-bit floats, packed, in rows of unequal length."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.feedback import Scratch
from commopt.groups import Team
from commopt.kernels.differences import HEAD_NBYTES, largest_nbytes, memory_nbytes, pack_difference, unpack_difference

_FIRST_SHARE = 4  # of the numbers' bytes: what is expected before anything was sent
_SPARE_SHARE = 64  # of what is expected: what a message may be longer
_SPARE_NBYTES = 64


class Differences:
    """Brings the differences of one group's shards to all copies.

    How long a message is depends on the numbers, and all ranks must send equally much. So all send as much as the
    longest message had the last time or the time before, whichever was shorter, and a bit more. The head tells how long
    each is, and if one is longer, all send the rest of the longest. A jump, or an evaluation that finds no change,
    therefore makes no other message longer.

    lengths: bytes of each of the messages that the last exchange sent.
    """

    def __init__(self) -> None:
        self.lengths: tuple[int, ...] = ()
        self._longest: tuple[int, ...] = ()  # of the last two exchanges

    def exchange(self, source: Tensor, copy: Tensor, across: Team, scratch: Scratch) -> None:
        """Let every row of `copy` [ranks, n] follow the `source` [n] of its rank, of which it holds the last one.

        Every rank of `across` calls it. Raises ValueError where a row is not what its rank has packed.
        """
        numel, device = source.numel(), source.device
        first, memory = self._expected(numel), memory_nbytes(numel)
        sent = scratch.take("packed difference", memory, torch.uint8, device)
        nbytes = pack_difference(source, copy[across.rank], sent)
        sent[nbytes:first] = 0
        received = scratch.take("packed differences", (across.size, first), torch.uint8, device)
        across.all_gather(received.view(-1), sent[:first])
        told = received[:, 8:HEAD_NBYTES].contiguous().view(torch.int64).view(-1).tolist()
        most = max(told)
        rest = scratch.take("rest of differences", (across.size, max(most - first, 0)), torch.uint8, device)
        self.lengths = (first,)
        if most > first:
            sent[nbytes:most] = 0
            across.all_gather(rest.view(-1), sent[first:most])
            self.lengths = first, most - first
        for rank in range(across.size):
            if rank == across.rank:
                copy[rank].copy_(source)
                continue
            message = received[rank, : told[rank]]
            if told[rank] > first:
                message = torch.cat([received[rank], rest[rank, : told[rank] - first]])
            unpack_difference(message, copy[rank])
        self._longest = (*self._longest[-1:], most)

    def _expected(self, numel: int) -> int:
        """Return how many bytes are sent first."""
        expected = min(self._longest, default=largest_nbytes(numel) // _FIRST_SHARE)
        expected += max(expected // _SPARE_SHARE, _SPARE_NBYTES)
        return min(-(-expected // HEAD_NBYTES) * HEAD_NBYTES, largest_nbytes(numel))
