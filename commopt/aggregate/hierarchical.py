"""Reduce inside the node, aggregate between nodes, spread inside the node: the slow network sees each byte once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from commopt.aggregate.base import Aggregator, Flat, Step, TwoHalves, WorkKind, call, work
from commopt.aggregate.shards import division, reshard
from commopt.compress import Passes
from commopt.errors import ConfigurationError
from commopt.feedback import BufferContext, Layout, is_momentum
from commopt.groups import Team, TeamShape, apply_scale

Form = Literal["reduce_scatter", "leader"]

_SHARD_FROM_NBYTES = 64 * 1024


@dataclass(frozen=True, repr=False)
class Hierarchical(Aggregator):
    """Two-level all_reduce with `inter` between the nodes.

    Forms: "reduce_scatter" (reduce_scatter in the node, `inter` on this rank's shard, all_gather in the node),
    "leader" (reduce to one rank, `inter` on everything there, broadcast). None lets `choose_form` decide. On one node,
    or with one rank per node, only the level that exists is run.

    intra: Flat(), or a Compressed(...) that carries the reduce_scatter and the all_gather in the node, where its
    ranks are joined by PCIe rather than NVLink; it has that one form and needs equally many ranks on every node.
    """

    inter: Aggregator = field(default_factory=Flat)
    intra: Flat | TwoHalves = field(default_factory=Flat)
    form: Form | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.inter, Aggregator):
            raise ConfigurationError(
                f"Hierarchical(inter={self.inter!r}) needs an aggregator, for example "
                f"inter=Compressed(Cast(torch.bfloat16))"
            )
        if not isinstance(self.intra, (Flat, TwoHalves)):
            raise ConfigurationError(
                f"Hierarchical(intra={self.intra!r}) cannot be split in two halves; use Flat() or Compressed(...)"
            )
        if any(map(is_momentum, self.intra.residual_paths)):
            raise ConfigurationError(
                f"Hierarchical(intra={self.intra!r}) would lose its momentum where a node has one rank; give "
                f"the momentum to inter"
            )
        if self.inter.node_local:
            raise ConfigurationError(
                f"Hierarchical(inter={self.inter!r}): {type(self.inter).__name__} cannot be the step between nodes; "
                f"attach {self.inter!r} itself, with gradients=Hierarchical(...)"
            )
        if isinstance(self.inter, Hierarchical):
            raise ConfigurationError(
                f"Hierarchical(inter={self.inter!r}) nests two levels, and between nodes there is one; pass the inner "
                f"aggregator's own inter"
            )
        if self.form not in (None, *get_args(Form)):
            raise ConfigurationError(f"form {self.form!r} is unknown; use None or one of {', '.join(get_args(Form))}")
        if isinstance(self.intra, TwoHalves) and self.form == "leader":
            raise ConfigurationError(
                f"form {self.form!r} cannot be had with intra={self.intra}; use form=None or intra=Flat()"
            )

    def check(self, team: TeamShape) -> None:
        """Refuse shards on nodes of unequal length, and what `inter` refuses."""
        if (self.form == "reduce_scatter" or isinstance(self.intra, TwoHalves)) and not team.uniform:
            what = f"form {self.form!r}" if self.form else f"intra={self.intra}"
            raise ConfigurationError(
                f"{what} needs equally many ranks on every node, and nodes hold {_counts(team)}; "
                f"use form='leader' or None, with intra=Flat()"
            )
        inter = team if team.intra is None else team.inter
        if inter is not None:
            self.inter.check(inter)

    # --------------------------------------------------------------------------------- all_reduce

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        """Run the form for this buffer, or the only level there is."""
        if buffer.numel() == 0:
            return
        if team.intra is None:
            level, aggregator = self._single_level(team)
            aggregator.all_reduce(buffer, team, scale, context.within(level, context.layout, context.result_dtype))
            return
        if isinstance(self.intra, TwoHalves):
            seen = self._through_shares(self.intra, buffer, team, scale, context)
        elif (self.form or self._best_form(team, buffer.nbytes, team.backend(buffer.device))) == "leader":
            seen = self._through_leader(buffer, team, scale, context)
        else:
            seen = self._through_shards(buffer, team, scale, context)
        if self.inter.residual_paths:  # all ranks commit, or none does
            context.report(seen.isfinite().all())

    def _through_leader(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> Tensor:
        """Reduce to one rank, which alone talks to those of other nodes, then broadcast.

        Returns, as the other two do, elements of the result that are not finite if any is not.
        """
        intra, inter = team.intra, team.inter
        assert intra is not None
        leads = intra.rank == 0 and inter is not None  # an uneven node has one leader alone that has an inter level
        if self.inter.residual_paths and not context.memory.settled:
            reshard(self.inter, "leader", context.layout if leads else None, intra, context, buffer.device)
        values = self._scaled(buffer, scale)
        intra.reduce(values, dst=0)
        if leads:
            assert inter is not None
            self._exchange_inter(values, inter, context.layout, buffer.dtype, context)
        if values is not buffer and intra.rank == 0:
            buffer.copy_(values)
        intra.broadcast(buffer, src=0)
        return buffer[:1]

    def _through_shards(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> Tensor:
        """Reduce inside the node and keep one shard per rank, which talks to those at its place, then gather."""
        intra, inter = team.intra, team.inter
        assert intra is not None
        assert inter is not None  # check() refused unequal nodes
        divided = division(self.inter, context.layout, buffer.dtype, intra.size)
        mine = divided.layouts[intra.rank]  # the last ranks of a node may have nothing but padding, on every node
        if self.inter.residual_paths and not context.memory.settled:
            reshard(self.inter, divided.name, mine, intra, context, buffer.device)
        values = self._scaled(buffer, scale)
        # The bucket cannot be padded; where it does not divide, a padded copy goes round instead.
        source = values if divided.in_place else divided.laid_out(values, context.scratch)
        shard = context.scratch.take("shard", divided.shard_numel, source.dtype, source.device)
        intra.reduce_scatter(shard, source)
        if mine.numel:
            self._exchange_inter(shard[: mine.numel], inter, mine, buffer.dtype, context)
        whole = buffer
        if not divided.in_place:
            whole = context.scratch.take("gathered shards", divided.whole_numel, buffer.dtype, buffer.device)
        intra.all_gather(whole, shard.to(buffer.dtype))
        if not divided.in_place:
            divided.put_back(whole, buffer)
        return whole[:: divided.shard_numel]

    def _through_shares(
        self, halves: TwoHalves, buffer: Tensor, team: Team, scale: float, context: BufferContext
    ) -> Tensor:
        """Run the two halves of a compressed all_reduce inside the node; between them each share goes across."""
        intra, inter = team.intra, team.inter
        assert intra is not None
        assert inter is not None  # as above
        within = context.within("intra", context.layout, replicas=team.node_count)
        if self.inter.residual_paths and not context.memory.settled:
            mine = halves.share_layout(context.layout, buffer.dtype, intra, context.step)
            name = f"shares of {halves} from step {halves.phase(context.step)}"
            reshard(self.inter, name, mine, intra, context, buffer.device)
        share, layout = halves.reduce_scatter(buffer, intra, scale, within)
        if layout.numel:
            self._exchange_inter(share, inter, layout, None, context)
        halves.all_gather(share, buffer, intra, within)
        return buffer

    def _scaled(self, buffer: Tensor, scale: float) -> Tensor:
        """Return `scale * buffer`: in place, or in float32 where feedback has to know of every rounding."""
        if self.inter.residual_paths and buffer.dtype.itemsize < torch.float32.itemsize:
            return buffer.float().mul_(scale)
        return apply_scale(buffer, scale)

    def _exchange_inter(
        self, values: Tensor, inter: Team, layout: Layout, result_dtype: torch.dtype | None, context: BufferContext
    ) -> None:
        self.inter.all_reduce(values, inter, 1.0, context.within("inter", layout, result_dtype))

    # --------------------------------------------------------------------------------------- facts

    def calls(
        self,
        layout: Layout,
        dtype: torch.dtype,
        team: TeamShape,
        device: torch.device | None = None,
        step: int | None = None,
    ) -> tuple[Step, ...]:
        """Return the calls of the node, those between nodes, and those of the node again."""
        if layout.numel == 0:
            return ()
        intra, inter = team.intra, team.inter
        if intra is None:
            return self._single_level(team)[1].calls(layout, dtype, team, device, step)
        if isinstance(self.intra, TwoHalves):
            assert inter is not None  # check() refused unequal nodes
            first, second = self.intra.half_calls(layout, dtype, intra, step)
            shares = self.intra.share_layout(layout, dtype, intra, step)
            return first + self.inter.calls(shares, torch.float32, inter, device, step) + second
        # Feedback makes the way to the slow network float32.
        summed = torch.promote_types(dtype, torch.float32) if self.inter.residual_paths else dtype
        backend = team.backend(device or team.default_device)
        form = self.form or self._best_form(team, layout.numel * dtype.itemsize, backend)
        if form == "leader":
            leads = intra.rank == 0 and inter is not None
            across = self.inter.calls(layout, dtype, inter, device, step) if leads and inter else ()
            reduced = call(intra, "reduce", layout.numel * summed.itemsize, 0)
            return (*reduced, *across, *call(intra, "broadcast", layout.numel * dtype.itemsize, 0))
        assert inter is not None  # as above
        divided = division(self.inter, layout, dtype, intra.size)
        moved = () if divided.in_place else (work("copy", "", layout.numel),)
        reduced = call(intra, "reduce_scatter", divided.whole_numel * summed.itemsize)
        across = self.inter.calls(divided.layouts[intra.rank], dtype, inter, device, step)
        return (*moved, *reduced, *across, *call(intra, "all_gather", divided.shard_numel * dtype.itemsize), *moved)

    @cached_property
    def lossless(self) -> bool:
        """If both levels are."""
        return self.inter.lossless and self.intra.lossless

    @property
    def error_bound(self) -> float:
        """The bounds of both levels multiplied."""
        return (1 + self.inter.error_bound) * (1 + self.intra.error_bound) - 1

    @property
    def start_step(self) -> int:
        """The later one of both levels."""
        return max(self.inter.start_step, self.intra.start_step)

    def phase(self, step: int) -> int:
        """Return the earliest step at which no level's messages differ in length."""
        parts = (self.inter, self.intra)
        phases = [part.phase(step) for part in parts]
        earliest = max(phases)
        # Levels may take turns: then some step soon after has what each of them does now.
        alike = (at for at in range(earliest, min(step, earliest + 2)) if [part.phase(at) for part in parts] == phases)
        return next(alike, step)

    def check_capture(self, step: int, team: TeamShape) -> None:
        """Ask both levels; the level says what has to be changed."""
        if team.intra is None:
            self._single_level(team)[1].check_capture(step, team)
            return
        self.inter.check_capture(step, team.inter or team)  # also where only other ranks of the node talk across
        self.intra.check_capture(step, team.intra)

    @cached_property
    def residual_paths(self) -> tuple[str, ...]:
        """Those of both levels, by the name of the level."""
        return _paths("intra", self.intra) + _paths("inter", self.inter)

    def residual_paths_on(self, team: TeamShape) -> tuple[str, ...]:
        """Return those of the only level there is, or of both."""
        return self.residual_paths if team.intra is not None else _paths(*self._single_level(team))

    def with_dense(self, patterns: Sequence[str]) -> Aggregator:
        """Tell both levels."""
        inter, intra = self.inter.with_dense(patterns), self.intra.with_dense(patterns)
        assert isinstance(intra, (Flat, TwoHalves))  # it only has more patterns
        return replace(self, inter=inter, intra=intra)

    def variants(self) -> Mapping[str, Aggregator]:
        """Return both forms."""
        forms = get_args(Form) if isinstance(self.intra, Flat) else ()
        return {form: replace(self, form=form) for form in forms}

    def squared_error(self, layout: Layout, buffer: Tensor) -> float:
        """Return the sum of both levels' errors."""
        return self.inter.squared_error(layout, buffer) + self.intra.squared_error(layout, buffer)

    def passes(self, ranks: int) -> dict[tuple[WorkKind, str], Passes]:
        """Return those of both levels."""
        return self.intra.passes(ranks) | self.inter.passes(ranks)

    def _single_level(self, team: TeamShape) -> tuple[str, Aggregator]:
        if team.node_count > 1:
            return "inter", self.inter
        if any(map(is_momentum, self.inter.residual_paths)):
            return "inter", self.inter.with_dense(("*",))  # one node needs the momentum too
        return "intra", self.intra

    def _best_form(self, team: TeamShape, nbytes: int, backend: str) -> Form:
        return choose_form(backend, nbytes, uniform=team.uniform, lossless=self.inter.lossless)


@lru_cache(maxsize=1024)
def choose_form(backend: str, nbytes: int, *, uniform: bool, lossless: bool = True) -> Form:
    """Return the form for a buffer of `nbytes`: the rule behind Hierarchical(form=None).

    Unequal nodes: "leader", the only form they allow. Compression between the nodes: "reduce_scatter", so that the
    ranks of a node share its work and its residuals. Gloo: "leader", where one flow fills a slow link as well as
    several and the ranks of a node share its processors anyway. NCCL: "reduce_scatter" from 64 KiB, where every rank
    drives the NIC with its own shard; "leader" below, where one small message across beats several.
    """
    if not uniform:
        return "leader"
    sharded = not lossless or (backend != "gloo" and nbytes >= _SHARD_FROM_NBYTES)
    return "reduce_scatter" if sharded else "leader"


def _paths(level: str, part: Aggregator) -> tuple[str, ...]:
    return tuple(f"{level}.{path}".rstrip(".") for path in part.residual_paths)


def _counts(team: TeamShape) -> str:
    nodes = team.wire.nodes
    return "+".join(str(nodes.count(node)) for node in dict.fromkeys(nodes)) + " ranks"
