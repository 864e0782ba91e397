# SPDX-License-Identifier: Apache-2.0
"""What was exactly zero on all ranks in every step so far stays exactly zero, also where a payload has no such value.

Signs with a magnitude, and levels that are none of them zero, make of a zero plus or minus something, and a product of
factors is zero in whole rows and columns only. An optimizer that divides by a norm of its own would move such elements
by whole learning rates. So all ranks know, alike, which elements were ever touched, that is not zero on some rank. The
others decode to zero, and what a rank has of them stays in its residual.

In the first step of a buffer ranks exchange which are touched. Later ones that are touched for the first time take no
message where elements have a sign bit: that of an element which rests tells whether it was touched on this rank, and
from the next step on it is a sign. Where nothing rests, or the host does not know better, nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.aggregate.matrices import Plan
from commopt.aggregate.rows import Region
from commopt.aggregate.sums import Sums, add_up
from commopt.compress import ErrorFeedback
from commopt.feedback import BufferContext
from commopt.groups import Team
from commopt.kernels.codec import Codec

_MOST_PATIENCE = 64  # steps from one exchange of what factors touch to the next


@dataclass(eq=False)
class Untouched:
    """The elements of one region of a buffer, or of its matrices, that rest: bool [numel].

    none: whether the host knows that there are none. asked: how often it has looked.
    """

    resting: Tensor
    none: bool = False
    asked: int = 0
    patience: int = 1
    next_step: int = 0

    def look(self) -> None:
        """See whether any are left: at once on a CPU; on a GPU, where the host waits for it, ever more rarely."""
        self.asked += 1
        on_host = self.resting.device.type == "cpu"
        if on_host or (_is_power_of_eight(self.asked) and not torch.cuda.is_current_stream_capturing()):
            self.none = not bool(self.resting.any())


def _is_power_of_eight(number: int) -> bool:
    while number % 8 == 0:
        number //= 8
    return number == 1


# ----------------------------------------------------------------------------------------- elements with a sign bit


@dataclass(frozen=True)
class SignBits:
    """The sign bits in packed codes: of elements that rest they tell which are touched, and all else of these is 0."""

    codec: Codec

    def write(self, payload: Tensor, chunk_numel: int, resting: Tensor, touched: Tensor) -> None:
        """Put them into rows of payload, in place. resting, touched: bool [elements in all rows, or fewer]."""
        codes = self.codes(payload, chunk_numel)
        flat = torch.zeros(codes.numel() * 8 // self.codec.bits, dtype=torch.bool, device=codes.device)
        flat[: resting.numel()] = resting
        codes &= ~self._packed(flat, (1 << self.codec.bits) - 1).view(codes.shape)
        flat[: resting.numel()] &= touched
        codes |= self._packed(flat, 1 << (self.codec.bits - 1)).view(codes.shape)

    def read(self, codes: Tensor) -> Tensor:
        """Return those in packed codes [bytes]: bool, one for each element."""
        shifts = torch.arange(0, 8, self.codec.bits, dtype=torch.uint8, device=codes.device)
        places = torch.full_like(shifts, 1 << (self.codec.bits - 1)) << shifts
        return (codes.unsqueeze(1) & places).ne(0).view(-1)

    def codes(self, rows: Tensor, chunk_numel: int) -> Tensor:
        """Return the packed codes of rows of payload: uint8 [rows, bytes]."""
        return rows[:, : self.codec.codes_nbytes(chunk_numel)]

    def _packed(self, flags: Tensor, code: int) -> Tensor:
        """Return bytes of codes: `code` where an element's flag is set, else 0."""
        shifts = torch.arange(0, 8, self.codec.bits, dtype=torch.uint8, device=flags.device)
        return (flags.view(-1, len(shifts)) * (torch.full_like(shifts, code) << shifts)).sum(1, dtype=torch.uint8)


class RestingSigns:
    """Those of a region in one step of one rank; made before it is encoded.

    `values`, scaled, and what `carry` brings are what is to be sent.
    """

    def __init__(self, codec: Codec, known: Untouched, kept: Tensor) -> None:
        self._signs, self._known, self._kept = SignBits(codec), known, kept
        self.resting = known.resting.clone()  # in this step, whatever is touched in it

    @classmethod
    def of(
        cls,
        region: Region,
        values: Tensor,
        scale: float,
        carry: ErrorFeedback | None,
        team: Team,
        context: BufferContext,
    ) -> RestingSigns | None:
        """Return them; None where nothing rests, or nothing is remembered. Collective the first time."""
        codec, store = region.compressor.codec_without_zero, context.store
        if codec is None or store is None:
            return None
        known = store.untouched.get((context.path, region.layout))
        if known is not None and known.none:
            return None
        kept = what_is_to_be_sent(values, scale, carry)
        if known is None:
            known = Untouched(~_agree(kept != 0, team))
            store.rest(context.path, region.layout, known)
            known.look()
            if known.none:
                return None
        return cls(codec, known, kept)

    def encoded(self, payload: Tensor, chunk_numel: int, carry: ErrorFeedback | None) -> None:
        """Tell by sign bits which resting elements are touched here; what they are stays in the residual."""
        self._signs.write(payload, chunk_numel, self.resting, self._kept != 0)
        if carry is not None:
            torch.where(self.resting, self._kept, carry.new, out=carry.new)

    def summed(
        self, received: Tensor, payload: Tensor, chunk_numel: int, begin: int, end: int, carry: ErrorFeedback | None
    ) -> None:
        """Tell in the encoded sum of the elements from `begin` to `end` which of them any rank has touched."""
        resting = self.resting[begin:end]
        touched = self._signs.read(_any_of(self._signs.codes(received, chunk_numel)))[: end - begin]
        if carry is not None:
            touched |= carry.old != 0
            torch.where(resting, carry.old, carry.new, out=carry.new)
        self._signs.write(payload, chunk_numel, resting, touched)

    def arrived(self, rows: Tensor, chunk_numel: int, *, chunks: bool) -> None:
        """Take note of what was touched, by all ranks' rows: of everything, or with `chunks` of one chunk each."""
        codes = self._signs.codes(rows, chunk_numel)
        signs = self._signs.read(codes.reshape(-1) if chunks else _any_of(codes))
        self._known.resting &= ~signs[: self.resting.numel()]
        self._known.look()

    def clear(self, values: Tensor, begin: int = 0) -> None:
        """Set what rests among `values`, the elements from `begin` on, to zero."""
        resting = self.resting[begin : begin + values.numel()]
        values[: resting.numel()].masked_fill_(resting, 0.0)


def what_is_to_be_sent(values: Tensor, scale: float, carry: ErrorFeedback | None) -> Tensor:
    """Return `values`, scaled, and what `carry` brings: float32, in units of the residual."""
    sent = values.float() * (scale if carry is None or carry.loss_scale is None else scale / carry.loss_scale)
    return sent if carry is None else sent.add_(carry.old, alpha=carry.decay)


def packed_bits(flags: Tensor, nbytes: int) -> Tensor:
    """Return flags [n] as bits, in `nbytes` bytes or more than they take."""
    padded = torch.zeros(8 * nbytes, dtype=torch.bool, device=flags.device)
    padded[: flags.numel()] = flags
    return (padded.view(-1, 8) * _weights(flags.device)).sum(1, dtype=torch.uint8)


def unpacked_bits(packed: Tensor) -> Tensor:
    """Return the bits of bytes [n]: bool [8 n]."""
    return (packed.unsqueeze(-1) & _weights(packed.device)).ne(0).view(-1)


def _weights(device: torch.device) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    return torch.ones_like(shifts) << shifts


def _any_of(codes: Tensor) -> Tensor:
    found = codes[0].clone()
    for row in codes[1:]:
        found |= row
    return found


def _agree(touched: Tensor, team: Team) -> Tensor:
    """Return which elements are touched on any rank of `team`: a bit each, to a server of each part and back."""
    size = team.size
    part = -(-touched.numel() // (8 * size))
    mine = packed_bits(touched, part * size)
    received = torch.empty_like(mine)
    team.all_to_all(received, mine)
    team.all_gather(mine, _any_of(received.view(size, part)))
    return unpacked_bits(mine)[: touched.numel()]


# -------------------------------------------------------------------------------------------- elements of matrices


class RestingElements:
    """Those of a buffer's matrices, whose rows and columns do not rest; these need nothing, as factors keep them zero.

    matrices: all of them, stacked, with what is kept from before. New ones are told by a number beside the first
    message; when it arrives, or in a later step, ranks exchange which they are.
    """

    def __init__(self, known: Untouched, plan: Plan, matrices: Tensor) -> None:
        self._known, self._plan, self._matrices = known, plan, matrices
        self.resting = known.resting

    @classmethod
    def of(
        cls, plan: Plan, matrices: Callable[[], Tensor], team: Sums, context: BufferContext
    ) -> RestingElements | None:
        """Return them; None where nothing rests, or nothing is remembered. Collective the first time."""
        store = context.store
        if store is None or not plan.groups:
            return None
        known = store.untouched.get((context.path, plan.stacked))
        if known is not None:
            return None if known.none else cls(known, plan, matrices())
        stacked = matrices()
        known = Untouched(_resting_elements(plan, stacked, team, context))
        store.rest(context.path, plan.stacked, known)
        known.look()
        return None if known.none else cls(known, plan, stacked)

    def touched(self) -> Tensor:
        """Return how many of them are touched here for the first time: float32 [1]."""
        return (self.resting & (self._matrices != 0)).sum(dtype=torch.float32).view(1)

    def arrived(self, touched: Tensor, team: Sums, context: BufferContext) -> None:
        """Ask which, where there are any on any rank; not in every step. Collective, alike on all ranks."""
        known = self._known
        if context.step < known.next_step:
            return
        if touched.is_cuda and (context.step % 8 or torch.cuda.is_current_stream_capturing()):
            return  # the host waits for the answer
        if float(touched):
            self.resting = self.resting & _resting_elements(self._plan, self._matrices, team, context)
            known.resting = self.resting
            known.next_step = context.step + known.patience
            known.patience = min(2 * known.patience, _MOST_PATIENCE)
            known.look()

    def keep(self, residual: Tensor) -> None:
        """Leave in `residual`, of the stacked matrices, what this rank has of them."""
        torch.where(self.resting, self._matrices, residual, out=residual)


def _resting_elements(plan: Plan, matrices: Tensor, team: Sums, context: BufferContext) -> Tensor:
    """Return which elements are zero on all ranks in rows and columns that are not. Collective."""
    touched = (matrices != 0).float()
    add_up(touched, 0, team, context.scratch)
    resting = touched == 0
    for group in plan.groups:
        stack = group.stack(resting)
        stack &= ~stack.all(1, keepdim=True) & ~stack.all(2, keepdim=True)
    return resting
