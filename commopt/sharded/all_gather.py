# SPDX-License-Identifier: Apache-2.0
"""The weights of an FSDP2 parameter group come to every rank: compressed across nodes, exact inside.

Every rank computes with decoded weights, those of its own shard too, so all compute with equal weights. The shards that
the optimizer steps stay exact, so errors do not add up. With exact=True decoded weights are the shards' own bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from commopt.aggregate.base import Action, call, work
from commopt.aggregate.rows import ShardRows, shard_rows
from commopt.compress import Compressor, Encoding, Quantize
from commopt.concise_repr import ConciseRepr
from commopt.document import require_flags
from commopt.errors import ConfigurationError
from commopt.feedback import Scratch, checked_patterns
from commopt.groups import Team, TeamShape
from commopt.kernels.differences import MANTISSA
from commopt.sharded.exact import Differences
from commopt.sharded.shards import Parts, ShardOrder

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, repr=False)
class Weights(ConciseRepr):
    """How FSDP2's weights travel between nodes on a 1-D mesh, for `attach(weights=)`. None: exact, by FSDP.

    Weights(exact=True): exact too, in fewer bytes.

    Weights are of float32, bfloat16 or float16, the dtype that they are computed with; others are gathered exactly.

    compressor: encodes this rank's shard of a group, a 1-D tensor, once for each node; Quantize or Cast, rounding to
        nearest, without start_step.
    second_copy: keep the decoded weights (the elements of a group over the ranks of a node, in their dtype), as in
        ZeRO++ (Wang et al., arXiv 2306.10209, section 3.2): the gather before backward then stays inside the node.
        Every other gather crosses, whatever has changed.
    difference: send the difference to the second copy, in float32 (SDP4Bit, Jia et al., arXiv 2410.15526, section 3.1).
        The error of one crossing is in the next difference, so 4 bits suffice. The first crossing is exact, and so is
        the next one after `invalidate()` and `load_state_dict`.
    dense: patterns of parameter names, as in fnmatch, that travel uncompressed, beside those that would not shrink.
    exact: send the difference of bfloat16 or float16 weights to the second copy without loss, on CPUs: never more bytes
        than the weights have, and 16. Takes no other argument. Weights of other dtypes are gathered by FSDP.

    Raises ConfigurationError for anything else; `attach` does, on every rank, for nodes with unequal numbers of ranks.
    """

    compressor: Compressor = field(default_factory=lambda: Quantize(bits=8))
    second_copy: bool = True
    difference: bool = False
    dense: tuple[str, ...] = ()
    exact: bool = False

    def __post_init__(self) -> None:
        compressor = self.compressor
        require_flags(self, "second_copy", "difference", "exact")
        if self.exact and (compressor != Quantize(bits=8) or self.difference or self.dense or not self.second_copy):
            raise ConfigurationError(
                f"{super().__repr__()} asks for exact weights and more; pass Weights(exact=True) alone: it compresses "
                f"nothing, and always keeps the second copy"
            )
        if not isinstance(compressor, Compressor):
            raise ConfigurationError(
                f"Weights({compressor!r}) needs a Compressor, for example Weights(commopt.Quantize(bits=8))"
            )
        if compressor.stochastic:
            raise ConfigurationError(
                f"Weights({compressor}) would round otherwise in forward than in backward; use rounding='nearest'"
            )
        if compressor.sparse or compressor.start_step:
            raise ConfigurationError(
                f"Weights({compressor}) is for gradients only; use commopt.Quantize or commopt.Cast, without start_step"
            )
        if self.difference and not self.second_copy:
            raise ConfigurationError(
                "Weights(difference=True, second_copy=False) has nothing to take the difference to; leave out "
                "second_copy"
            )
        object.__setattr__(self, "dense", checked_patterns("Weights", self.dense))

    def __repr__(self) -> str:
        return "Weights(exact=True)" if self.exact else super().__repr__()


class AllGather:
    """Gathers the weights of one parameter group. Raises ConfigurationError, on all ranks, on nodes of unequal length.

    copy: the second copy [nodes, n], decoded from the shards at this rank's place on every node; None before the first
        crossing.
    base: this rank's row of the copy that a checkpoint was taken with, until it is gathered.
    crossings: how often shards went across.
    """

    def __init__(self, weights: Weights, team: TeamShape, ranks: tuple[int, ...], parts: Parts) -> None:
        if not team.uniform:
            raise ConfigurationError(
                f"{weights} needs equally many ranks on every node, and nodes hold "
                f"{', '.join(map(str, team.ranks_per_node))}; leave it out: weights are then exact"
            )
        self.weights = weights
        self.team = team
        self.parts = parts
        self.order = ShardOrder(team, ranks)
        self._inside = team.intra
        self._across = team.inter or team
        self.copy: Tensor | None = None
        self.base: Tensor | None = None
        self.crossings = 0
        self.differences = Differences() if weights.exact else None

    def takes(self, output: Tensor, source: Tensor) -> bool:
        """Return whether it can gather these: floats, laid out as FSDP does without extensions, over all ranks."""
        shard_numel = sum(part.padded for part in self.parts)
        dtypes = MANTISSA if self.weights.exact else _FLOATS
        return output.dtype in dtypes and (source.numel(), output.numel()) == (
            shard_numel,
            shard_numel * self.team.size,
        )

    def rows(self, dtype: torch.dtype) -> ShardRows:
        """Return the rows of the shards of the ranks at this rank's place on every node."""
        shards, inside = self.order.shards(self.parts), self._inside
        if inside is not None:
            shards = shards[inside.rank :: inside.size]
        return shard_rows(shards, self.weights.compressor, self.weights.dense, dtype)

    def calls(self, dtype: torch.dtype, *, crosses: bool = True, exact: bool = False) -> tuple[Action, ...]:
        """Return, in order, the actions of this rank in one gather, in the form of Aggregator.calls.

        crosses: not from the second copy. exact: the first crossing of differences. Of exact ones nobody knows before
        they are packed how long they are: `packed_calls` are for them.
        """
        inside, across = self._inside, self._across
        numel = sum(part.padded for part in self.parts)
        actions: tuple[Action, ...] = ()
        if crosses and exact:
            actions = call(across, "all_gather", numel * dtype.itemsize)
        elif crosses and not self.weights.exact:
            rows = self.rows(dtype)
            actions = (
                *(work("encode", each.compressor, each.layout.numel // across.size) for each in rows.regions),
                *call(across, "all_gather", rows.nbytes),
                *rows.work("decode"),
            )
        if inside is not None:
            actions = (*actions, *call(inside, "all_gather", across.size * numel * dtype.itemsize))
            actions = (*actions, work("copy", "", numel * self.team.size))
        return actions

    def packed_calls(self, nbytes: int) -> tuple[Action, ...]:
        """Return the call that sends so many bytes of packed differences."""
        return call(self._across, "all_gather", nbytes)

    @property
    def is_exact_next(self) -> bool:
        """Whether the next crossing sends the shards themselves."""
        return (self.weights.difference or self.weights.exact) and self.copy is None and self.base is None

    def own_row(self) -> Tensor | None:
        """Return this rank's row of the second copy, or what it begins with; None where there is none yet."""
        return self.base if self.copy is None else self.copy[self._across.rank]

    # ------------------------------------------------------------------------------------- the collective

    def __call__(self, output: Tensor, source: Tensor, scratch: Scratch, *, crosses: bool) -> None:
        """Fill `output` [size * n] with the decoded shards of all ranks; `source` [n] is this rank's.

        crosses: whether the shards go across anew, else the second copy is spread, which must be there. Runs on the
        lane; every rank must call it alike.
        """
        # The copy must be writable later, whatever mode an evaluation is in; `output` is of that mode.
        with torch.inference_mode(False), torch.no_grad():
            if crosses:
                copy = self._cross(source, scratch)
                self.crossings += 1
                self.copy = copy if self.weights.second_copy else None
            else:
                assert self.copy is not None
                copy = self.copy
            gathered, inside = copy, self._inside
            if inside is not None:
                assert isinstance(inside, Team)
                gathered = scratch.take("gathered in the node", (inside.size, *copy.shape), copy.dtype, copy.device)
                inside.all_gather(gathered.view(-1), copy.view(-1))
                gathered = gathered.transpose(0, 1)
        size, numel = self.team.size, source.numel()
        shards = output.view(size, numel)
        if self.order.is_groups_own:
            shards.view(gathered.shape).copy_(gathered)
        else:
            shards.index_copy_(0, self.order.index(shards.device), gathered.reshape(size, numel))

    def _cross(self, source: Tensor, scratch: Scratch) -> Tensor:
        """Return the copy of their shards that every rank at this rank's place now has."""
        across = self._across
        assert isinstance(across, Team)
        shape = (across.size, source.numel())
        if self.differences is not None:
            if self.copy is None:
                self.differences.lengths = ()
                across.all_gather((copy := source.new_empty(shape)).view(-1), source.contiguous())
                return copy
            self.differences.exchange(source.contiguous(), self.copy, across, scratch)
            return self.copy
        if self.weights.difference:
            if self.copy is None:
                copy, first = source.new_empty(shape), source if self.base is None else self.base.to(source)
                across.all_gather(copy.view(-1), first.contiguous())
                if self.base is None:
                    return copy
                self.copy = copy
                self.base = None
            # Elements that are no numbers are sent anew, or they would stay for ever.
            copy = self.copy.nan_to_num_(0.0, 0.0, 0.0)
        elif self.weights.second_copy:
            copy = source.new_zeros(shape) if self.copy is None or self.copy.dtype != source.dtype else self.copy
        else:
            copy = scratch.take("decoded shards", shape, source.dtype, source.device).zero_()
        self._exchange(source, copy, across, scratch)
        return copy

    def _exchange(self, source: Tensor, copy: Tensor, across: Team, scratch: Scratch) -> None:
        """Encode this rank's shard; decode all into `copy`, or add to it."""
        rows, base = self.rows(source.dtype), copy if self.weights.difference else None
        sent = rows.take(1, "sent", scratch, source.device)
        for region in rows.formats[across.rank].regions:
            values = region.read(source, scratch)
            if base is not None and not region.dense:
                values = values.float() - region.read(base[across.rank], scratch, "copy of the region")
            region.compressor.compress(values, region.payload(sent), Encoding(region.chunk_numel))
        received = rows.take(across.size, "received", scratch, source.device)
        across.all_gather(received.view(-1), sent.view(-1))
        for number, row in enumerate(rows.formats):
            row.decode(received[number : number + 1], copy[number], scratch, None if base is None else base[number])
