# SPDX-License-Identifier: Apache-2.0
"""The weights of an FSDP2 parameter group come to every rank: compressed across nodes, exact inside.

Every rank computes with what was decoded, of its own shard too, so all compute with equal weights; the shards that the
optimizer steps stay exact, so errors do not add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from commopt.aggregate.base import Step, call, work
from commopt.compress import Compressor, Encoding, Quantize
from commopt.concise_repr import ConciseRepr
from commopt.errors import ConfigurationError
from commopt.feedback import Scratch, checked_patterns
from commopt.groups import Team, TeamShape
from commopt.sharded.reduce_scatter import Places
from commopt.sharded.rows import Parts, Rows, rows_of

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, repr=False)
class Weights(ConciseRepr):
    """How FSDP2's weights travel between nodes, on a 1-D mesh: what `attach(weights=)` takes. None: exact, by FSDP.

    Weights are of float32, bfloat16 or float16, the dtype that they are computed with; others are gathered exactly.

    compressor: encodes this rank's shard of a group, a 1-D tensor, once for each node; Quantize or Cast, rounding to
        nearest, without start_step.
    second_copy: keep what was decoded (the elements of a group over the ranks of a node, in the dtype of the weights),
        as in ZeRO++ (Wang et al., arXiv 2306.10209, section 3.2): the gather before backward then stays inside the
        node. Every other gather crosses, whatever has changed.
    difference: send the difference to the second copy, in float32 (SDP4Bit, Jia et al., arXiv 2410.15526, section 3.1).
        What one crossing leaves out is in the next difference, so 4 bits do; the first crossing is exact, and so is the
        next one after `invalidate()` and `load_state_dict`.
    dense: patterns of parameter names, as fnmatch has them, that travel as they are, beside what would not shrink.

    Raises ConfigurationError for anything else; `attach` does, on every rank, for nodes with unequal numbers of ranks.
    """

    compressor: Compressor = field(default_factory=lambda: Quantize(bits=8))
    second_copy: bool = True
    difference: bool = False
    dense: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        compressor = self.compressor
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


class AllGather:
    """Gathers the weights of one parameter group. Raises ConfigurationError, on all ranks, on nodes of unequal length.

    copy: the second copy [nodes, n], what was decoded of the shards at this rank's place on every node; None before the
    first crossing. base: this rank's row of the copy that a checkpoint was taken with, until it is gathered.
    crossings: how often shards went across.
    """

    def __init__(self, weights: Weights, team: TeamShape, order: tuple[int, ...], parts: Parts) -> None:
        if not team.uniform:
            raise ConfigurationError(
                f"{weights} needs equally many ranks on every node, and nodes hold "
                f"{', '.join(map(str, team.ranks_per_node))}; leave it out: weights are then exact"
            )
        self.weights = weights
        self.team = team
        self.parts = parts
        self.places = Places(team, order, levels=True)
        self.copy: Tensor | None = None
        self.base: Tensor | None = None
        self.crossings = 0

    def takes(self, output: Tensor, source: Tensor) -> bool:
        """Return whether it can gather these: floats, laid out as FSDP does without extensions, over all ranks."""
        shard_numel = sum(part.padded for part in self.parts)
        return output.dtype in _FLOATS and (source.numel(), output.numel()) == (
            shard_numel,
            shard_numel * self.team.size,
        )

    def rows(self, dtype: torch.dtype) -> Rows:
        """Return the rows that come in of the ranks at this one's place on every node."""
        weights = self.weights
        return rows_of(self.parts, self.places.alike, self.team.size, weights.compressor, weights.dense, dtype)

    def calls(self, dtype: torch.dtype, *, crosses: bool = True, exact: bool = False) -> tuple[Step, ...]:
        """Return, in order, what this rank does in one gather, in the form of Aggregator.calls.

        crosses: not from the second copy. exact: the first crossing of differences.
        """
        rows, inside, across = self.rows(dtype), self.places.inside, self.places.across
        assert across is not None
        numel = rows.shards[0].numel
        steps: tuple[Step, ...] = ()
        if crosses and exact:
            steps = call(across, "all_gather", numel * dtype.itemsize)
        elif crosses:
            steps = (
                *(work("encode", kind.compressor, kind.layout.numel // across.size) for kind in rows.kinds),
                *call(across, "all_gather", rows.nbytes),
                *(work("decode", kind.compressor, kind.layout.numel) for kind in rows.kinds),
            )
        if inside is not None:
            steps = (*steps, *call(inside, "all_gather", across.size * numel * dtype.itemsize))
            steps = (*steps, work("copy", "", numel * self.team.size))
        return steps

    @property
    def is_exact_next(self) -> bool:
        """Whether the next crossing sends the shards themselves."""
        return self.weights.difference and self.copy is None and self.base is None

    def own_row(self) -> Tensor | None:
        """Return this rank's row of the second copy, in host memory; None where there is none yet."""
        if self.copy is None:
            return None if self.base is None else self.base.to("cpu", copy=True)
        assert self.places.across is not None
        return self.copy[self.places.across.rank].to("cpu", copy=True)

    # ------------------------------------------------------------------------------------- the collective

    def __call__(self, output: Tensor, source: Tensor, scratch: Scratch, *, crosses: bool) -> None:
        """Fill `output` [size * n] with what all ranks decode of each rank's shard; `source` [n] is this rank's.

        crosses: whether the shards go across anew, else the second copy is spread, which must be there. Runs on the
        lane; every rank must call it alike.
        """
        # What stays must be writable later, whatever mode an evaluation is in; `output` is of that mode.
        with torch.inference_mode(False), torch.no_grad():
            if crosses:
                copy = self._cross(source, scratch)
                self.crossings += 1
                self.copy = copy if self.weights.second_copy else None
            else:
                assert self.copy is not None
                copy = self.copy
            gathered, inside = copy, self.places.inside
            if inside is not None:
                assert isinstance(inside, Team)
                gathered = scratch.take("gathered in the node", (inside.size, *copy.shape), copy.dtype, copy.device)
                inside.all_gather(gathered.view(-1), copy.view(-1))
                gathered = gathered.transpose(0, 1)
        size, numel = self.team.size, source.numel()
        shards = output.view(size, numel)
        if self.places.in_order:
            shards.view(gathered.shape).copy_(gathered)
        else:
            shards.index_copy_(0, self.places.index(shards.device), gathered.reshape(size, numel))

    def _cross(self, source: Tensor, scratch: Scratch) -> Tensor:
        """Return what every rank at this one's place now has of their shards."""
        across = self.places.across
        assert isinstance(across, Team)
        shape = (across.size, source.numel())
        if self.weights.difference:
            if self.copy is None:
                copy, first = source.new_empty(shape), source if self.base is None else self.base.to(source)
                across.all_gather(copy.view(-1), first.contiguous())
                if self.base is None:
                    return copy
                self.copy = copy
                self.base = None
            # What was no number is sent anew, or it would stay for ever.
            copy = self.copy.nan_to_num_(0.0, 0.0, 0.0)
        elif self.weights.second_copy:
            copy = source.new_zeros(shape) if self.copy is None or self.copy.dtype != source.dtype else self.copy
        else:
            copy = scratch.take("decoded shards", shape, source.dtype, source.device).zero_()
        self._exchange(source, copy, across, scratch)
        return copy

    def _exchange(self, source: Tensor, copy: Tensor, across: Team, scratch: Scratch) -> None:
        """Encode this rank's shard; decode all into `copy`, or add to it."""
        rows, difference = self.rows(source.dtype), self.weights.difference
        sent = rows.take(1, "sent", scratch, source.device)
        for kind in rows.kinds:
            for chunk in kind.chunks:
                if chunk.row == across.rank:
                    values = chunk.read(source, scratch)
                    if difference and not kind.dense:
                        values = values.float() - chunk.read(copy[chunk.row], scratch, "chunk of the copy")
                    kind.compressor.compress(values, chunk.payload(sent), Encoding(chunk.chunk_numel))
        received = rows.take(across.size, "received", scratch, source.device)
        across.all_gather(received.view(-1), sent.view(-1))
        for kind in rows.kinds:
            for chunk in kind.chunks:
                values = scratch.take("decoded", chunk.end - chunk.begin, torch.float32, source.device)
                kind.compressor.decompress(
                    chunk.payload(received[chunk.row : chunk.row + 1]), values, chunk.chunk_numel
                )
                if difference and not kind.dense:
                    values += chunk.read(copy[chunk.row], scratch)
                chunk.write(copy[chunk.row], values)
