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

from commopt.aggregate.base import Call
from commopt.aggregate.matrices import Plan
from commopt.aggregate.rows import Region
from commopt.aggregate.sums import Sums, add_up, calls_of_sum
from commopt.compress import ErrorFeedback
from commopt.feedback import BufferContext, ResidualStore
from commopt.groups import Team, TeamShape, WireBytes
from commopt.kernels.codec import Codec

_MOST_PATIENCE = 64  # steps from one exchange of what factors touch to the next


# ----------------------------------------------------------------------------------------- elements with a sign bit


class Untouched:
    """The elements of one region of a buffer that rest, by their places (int64, ascending).

    resting: which of these do still, bool, as only a host can leave out the others. none: whether there are none.
    """

    def __init__(self, resting: Tensor) -> None:
        self._looks = 0
        self._keep(resting.nonzero().view(-1))

    def _keep(self, places: Tensor) -> None:
        self.places = places
        self.resting = torch.ones_like(places, dtype=torch.bool)
        self.none = not len(places)
        self._spans: dict[tuple[int, int], slice] = {}

    def look(self) -> None:
        """Leave out what rests no more: at once on a CPU; on a GPU, where the host waits for it, ever more rarely."""
        self._looks += 1
        if self.places.is_cuda and not (_is_power_of_two(self._looks) and not torch.cuda.is_current_stream_capturing()):
            return
        if not bool(self.resting.all()):
            self._keep(self.places[self.resting])

    def within(self, begin: int, end: int) -> slice:
        """Return which places are of elements from `begin` to `end`."""
        if (begin, end) not in self._spans:
            bounds = torch.tensor([begin, end], device=self.places.device)
            self._spans[begin, end] = slice(*torch.searchsorted(self.places, bounds).tolist())
        return self._spans[begin, end]


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


@dataclass(frozen=True)
class SignBits:
    """The sign bits in packed codes: of elements that rest they tell which are touched, and all else of these is 0."""

    codec: Codec

    def write(self, rows: Tensor, chunk_numel: int, places: Tensor, resting: Tensor, touched: Tensor) -> None:
        """Put them into rows of payload, chunk after chunk, in place. resting, touched: bool [places]."""
        codes, row, byte, shift = self._find(rows, chunk_numel, places)
        everything, sign = (1 << self.codec.bits) - 1, 1 << (self.codec.bits - 1)
        now = codes[row, byte].bitwise_right_shift(shift) & everything
        # Codes of one byte are added up by turns: what is added is the difference to what stands there, modulo 256.
        change = torch.where(resting, touched.to(torch.uint8) * sign - now, 0).bitwise_left_shift(shift)
        codes.index_put_((row, byte), change, accumulate=True)

    def read(self, rows: Tensor, chunk_numel: int, places: Tensor) -> Tensor:
        """Return those of the elements at places: bool."""
        codes, row, byte, shift = self._find(rows, chunk_numel, places)
        return codes[row, byte].bitwise_right_shift(shift).bitwise_and(1 << (self.codec.bits - 1)).ne(0)

    def any_of(self, rows: Tensor, chunk_numel: int, places: Tensor) -> Tensor:
        """Return whether those of any row are set, each of which is of the same elements."""
        found = self.read(rows[:1], chunk_numel, places)
        for number in range(1, len(rows)):
            found |= self.read(rows[number : number + 1], chunk_numel, places)
        return found

    def _find(self, rows: Tensor, chunk_numel: int, places: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the codes of rows, and of each place its row, its byte there and how far left its code is in that."""
        bits = self.codec.bits
        inside = places % chunk_numel
        shift = (inside % (8 // bits) * bits).to(torch.uint8)
        return rows[:, : self.codec.codes_nbytes(chunk_numel)], places // chunk_numel, inside // (8 // bits), shift


class RestingSigns:
    """Those of a region in one step of one rank; made before it is encoded.

    `values`, scaled, and what `carry` brings are what is to be sent.
    """

    def __init__(self, codec: Codec, known: Untouched, kept: Tensor) -> None:
        self._signs = SignBits(codec)
        self._known = known
        self._kept = kept
        self._places = known.places
        self._resting = known.resting.clone()  # in this step, whatever is touched in it

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
        if known is None:
            known = Untouched(~_agree(what_is_to_be_sent(values, scale, carry) != 0, team, store))
            store.untouched[context.path, region.layout] = known
        if known.none:
            return None
        return cls(codec, known, what_is_to_be_sent(values, scale, carry, known.places))

    def encoded(self, payload: Tensor, chunk_numel: int, carry: ErrorFeedback | None) -> None:
        """Tell by sign bits which resting elements are touched here; what they are stays in the residual."""
        self._signs.write(payload, chunk_numel, self._places, self._resting, self._kept != 0)
        if carry is not None:
            keep(carry.new, self._places, self._resting, self._kept)

    def summed(
        self, received: Tensor, payload: Tensor, chunk_numel: int, begin: int, end: int, carry: ErrorFeedback | None
    ) -> None:
        """Tell in the encoded sum of the elements from `begin` to `end` which of them any rank has touched."""
        here = self._known.within(begin, end)
        places, resting = self._places[here] - begin, self._resting[here]
        touched = self._signs.any_of(received, chunk_numel, places)
        if carry is not None:
            old = carry.old[places]
            touched |= old != 0
            keep(carry.new, places, resting, old)
        self._signs.write(payload, chunk_numel, places, resting, touched)

    def clear(self, values: Tensor, begin: int = 0) -> None:
        """Set what rests among `values`, the elements from `begin` on, to zero."""
        here = self._known.within(begin, begin + values.numel())
        places = self._places[here] - begin
        values[places] = values[places].masked_fill(self._resting[here], 0.0)

    def arrived(self, rows: Tensor, chunk_numel: int, *, chunks: bool) -> None:
        """Take note, last of all, of what the rows of all ranks tell: of everything, or with `chunks` of one each."""
        read = self._signs.read if chunks else self._signs.any_of
        self._known.resting &= ~read(rows, chunk_numel, self._places)
        self._known.look()


def keep(residual: Tensor, places: Tensor, resting: Tensor, kept: Tensor) -> None:
    """Put `kept` in the places of a residual whose elements rest."""
    residual[places] = torch.where(resting, kept, residual[places])


def what_is_to_be_sent(
    values: Tensor, scale: float, carry: ErrorFeedback | None, places: Tensor | None = None
) -> Tensor:
    """Return `values`, scaled, and what `carry` brings, in units of the residual: float32; of some places, or all."""
    old = None if carry is None else carry.old
    if places is not None:
        values, old = values[places], None if old is None else old[places]
    sent = values.float() * (scale if carry is None or carry.loss_scale is None else scale / carry.loss_scale)
    return sent if carry is None or old is None else sent.add_(old, alpha=carry.decay)


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


def _agree(touched: Tensor, team: Team, store: ResidualStore) -> Tensor:
    """Return which elements are touched on any rank of `team`: a bit each, to a server of each part and back."""
    size = team.size
    part = -(-touched.numel() // (8 * size))
    mine = packed_bits(touched, part * size)
    received = torch.empty_like(mine)
    store.beside += team.wire.all_to_all(mine.nbytes) + team.wire.all_gather(part)
    team.all_to_all(received, mine)
    team.all_gather(mine, _any_of(received.view(size, part)))
    return unpacked_bits(mine)[: touched.numel()]


# -------------------------------------------------------------------------------------------- elements of matrices


@dataclass(eq=False)
class _Masked:
    """Which elements of the stacked matrices rest, bool [numel], and when ranks may exchange that again."""

    resting: Tensor
    none: bool
    patience: int = 1
    next_step: int = 0


class RestingElements:
    """Those of a buffer's matrices, whose rows and columns do not rest; these need nothing, as factors keep them zero.

    matrices: all of them, stacked, with what is kept from before. New ones are told by a number beside the first
    message; when it arrives, or in a later step, ranks exchange which they are.
    """

    def __init__(self, known: _Masked, plan: Plan, matrices: Tensor) -> None:
        self._known = known
        self._plan = plan
        self._matrices = matrices
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
        resting = _resting_elements(plan, stacked, team, context)
        known = _Masked(resting, not bool(resting.any()))
        store.untouched[context.path, plan.stacked] = known
        return None if known.none else cls(known, plan, stacked)

    def touched(self) -> Tensor:
        """Return how many of them are touched here for the first time, for the first message: float32 [1]."""
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
            known.none = not bool(self.resting.any())
            known.next_step = context.step + known.patience
            known.patience = min(2 * known.patience, _MOST_PATIENCE)

    def keep(self, residual: Tensor) -> None:
        """Leave in `residual`, of the stacked matrices, what this rank has of them."""
        torch.where(self.resting, self._matrices, residual, out=residual)


def _resting_elements(plan: Plan, matrices: Tensor, team: Sums, context: BufferContext) -> Tensor:
    """Return which elements are zero on all ranks in rows and columns that are not. Collective."""
    touched = (matrices != 0).float()
    if context.store is not None:
        context.store.beside += _bytes_of_sum(touched.nbytes, team)
    add_up(touched, 0, team, context.scratch)
    resting = touched == 0
    for group in plan.groups:
        stack = group.stack(resting)
        stack &= ~stack.all(1, keepdim=True) & ~stack.all(2, keepdim=True)
    return resting


def count_beside(factors: int, others: int, team: Sums, context: BufferContext) -> None:
    """Count the number beside a first message of so many elements of factors, and of others."""
    if context.store is not None:
        with_it, without = (_bytes_of_sum(4 * (others + more), team, factors) for more in (1, 0))
        context.store.beside += WireBytes(with_it.intra - without.intra, with_it.inter - without.inter)


def _bytes_of_sum(nbytes: int, team: Sums, factors: int = 0) -> WireBytes:
    """Return what this rank sends for a sum of so many bytes, beside so many elements of factors."""
    teams = {each.level: each for each in (team, team.intra, team.inter) if isinstance(each, TeamShape)}
    steps = calls_of_sum(factors, nbytes, team, None)
    sent = WireBytes()
    for each in steps:
        if isinstance(each, Call):
            root = () if each.root is None else (each.root,)
            sent += getattr(teams[each.level].wire, each.primitive)(each.nbytes, *root)
    return sent
