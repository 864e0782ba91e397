"""Reduce inside the node, aggregate between nodes, spread inside the node: the slow network sees each byte once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from commopt.aggregate.base import Aggregator
from commopt.aggregate.calls import Stages, Step, call, in_one_line, work
from commopt.aggregate.chunks import Chunk, cut
from commopt.aggregate.compressed import Compressed
from commopt.aggregate.division import division
from commopt.aggregate.flat import Flat
from commopt.aggregate.moving import bring_home
from commopt.aggregate.pipeline import follow
from commopt.aggregate.powersgd import PowerSGD
from commopt.aggregate.routes import Route, ThroughLeader, ThroughShards, ThroughShares
from commopt.errors import ConfigurationError
from commopt.feedback import Account, Layout
from commopt.groups import Team, TeamShape

Form = Literal["reduce_scatter", "all_reduce", "leader"]

_SHARD_FROM_NBYTES = 64 * 1024


@dataclass(frozen=True, repr=False)
class Hierarchical(Aggregator):
    """Two-level all_reduce with `inter` between the nodes.

    Forms: "reduce_scatter" (reduce_scatter in the node, `inter` on this rank's shard, all_gather in the node),
    "all_reduce" (all_reduce in the node and keep a slice, `inter` on the slice, all_gather), "leader" (reduce to one
    rank, `inter` on everything there, broadcast). None lets `choose_form` decide. On one node, or with one rank per
    node, only the level that exists is run.

    intra: Flat(), or a Compressed(...) that carries the reduce_scatter and the all_gather in the node, where its
    ranks are joined by PCIe rather than NVLink; it has that one form and needs equally many ranks on every node.

    chunks: how many parts a buffer is cut into, fewer where they would be shorter than 64 KiB: while one is on its way
    across, the next goes up in its node and the last comes down. That needs two lanes (see lanes_available); with one
    they take turns, and nothing is gained. It pays where both levels take about as long, on large buffers.
    """

    inter: Aggregator = field(default_factory=Flat)
    intra: Flat | Compressed = field(default_factory=Flat)
    form: Form | None = None
    chunks: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.inter, Aggregator):
            raise ConfigurationError(
                f"Hierarchical(inter={self.inter!r}) needs an aggregator, for example "
                f"inter=Compressed(Cast(torch.bfloat16))"
            )
        if not isinstance(self.intra, (Flat, Compressed)):
            raise ConfigurationError(
                f"Hierarchical(intra={self.intra!r}) cannot be split in two halves; use Flat() or Compressed(...)"
            )
        if isinstance(self.intra, Compressed) and self.intra.compressor.inertia is not None:
            raise ConfigurationError(
                f"Hierarchical(intra={self.intra!r}) would lose its momentum where a node has one rank; give "
                f"the momentum to inter"
            )
        if self.inter.node_local:
            raise ConfigurationError(
                f"Hierarchical(inter={self.inter!r}) would keep between nodes what belongs inside them; attach "
                f"{self.inter!r} itself, with gradients=Hierarchical(...)"
            )
        if isinstance(self.inter, Hierarchical):
            raise ConfigurationError(
                f"Hierarchical(inter={self.inter!r}) nests two levels, and between nodes there is one; pass the inner "
                f"aggregator's own inter"
            )
        if self.form not in (None, *get_args(Form)):
            raise ConfigurationError(f"form {self.form!r} is unknown; use None or one of {', '.join(get_args(Form))}")
        if not isinstance(self.chunks, int) or isinstance(self.chunks, bool) or self.chunks < 1:
            raise ConfigurationError(f"Hierarchical(chunks={self.chunks!r}) must be a whole number, 1 or more")
        if isinstance(self.intra, Compressed) and self.form not in (None, "reduce_scatter"):
            raise ConfigurationError(
                f"form {self.form!r} cannot be had with intra={self.intra}; use form=None or intra=Flat()"
            )

    def check(self, team: TeamShape) -> None:
        """See Aggregator."""
        sharded = self.form in ("reduce_scatter", "all_reduce") or isinstance(self.intra, Compressed)
        if sharded and not team.uniform:
            what = f"form {self.form!r}" if self.form else f"intra={self.intra}"
            raise ConfigurationError(
                f"{what} needs equally many ranks on every node, and nodes hold {_counts(team)}; "
                f"use form='leader' or None, with intra=Flat()"
            )
        across = team if team.intra is None else team.inter
        if across is not None:
            self.inter.check(across)

    # --------------------------------------------------------------------------------- all_reduce

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, account: Account) -> None:
        """See Aggregator."""
        if buffer.numel() == 0:
            return
        if team.intra is None:
            level, aggregator = self._with_residuals_of_both(team, account, buffer.device)
            aggregator.all_reduce(buffer, team, scale, account.within(level, account.layout, account.result_dtype))
        else:
            self._over_both_levels(buffer, team, scale, account)

    def _over_both_levels(self, buffer: Tensor, team: Team, scale: float, account: Account) -> None:
        assert team.intra is not None
        parts = self._cut(account.layout, buffer.dtype, team)
        form = self._form_on(team, buffer.numel() * buffer.element_size(), buffer.device)
        if len(parts) == 1:
            routes = [self._route(form, buffer, team, scale, account)]
        else:
            routes = [
                self._route(form, buffer[part.begin : part.end], team, scale, account.of_chunk(number, part.layout))
                for number, part in enumerate(parts, 1)
            ]
        if self.inter.residual_paths:
            ways = routes[0].name if len(routes) == 1 else f"{self.chunks} chunks of {routes[0].name}"
            bring_home(self.inter, ways, routes, team.intra, account, buffer.device)
        for marks in follow(routes):
            self._judge(marks, account)

    def _cut(self, layout: Layout, dtype: torch.dtype, team: TeamShape) -> tuple[Chunk, ...]:
        """Return the chunks of a buffer, cut between parameters if `inter` needs them whole."""
        if self.chunks == 1:
            return (Chunk(0, layout.numel, layout),)
        whole = self.inter.divide(layout, dtype, 1) is not None
        return cut(layout, dtype, self.chunks, max(team.ranks_per_node), between_pieces=whole)

    def _route(self, form: Form, buffer: Tensor, team: Team, scale: float, account: Account) -> Route:
        if isinstance(self.intra, Compressed):
            return ThroughShares(buffer, *_levels(team), self.intra, self.inter, scale, account, team.node_count)
        if form == "leader":
            assert team.intra is not None
            return ThroughLeader(buffer, team.intra, team.inter, self.inter, scale, account)
        keep_all = form == "all_reduce"
        return ThroughShards(buffer, *_levels(team), self.inter, scale, account, keep_all=keep_all)

    # ----------------------------------------------------------------------------------- residuals

    def _judge(self, marks: Tensor, account: Account) -> None:
        """Report whether the shards whose first elements are `marks` are finite: all ranks commit, or none does."""
        if self.inter.residual_paths:
            account.report(marks.isfinite().all())

    # --------------------------------------------------------------------------------------- facts

    def calls(
        self,
        layout: Layout,
        dtype: torch.dtype,
        team: TeamShape,
        device: torch.device | None = None,
        step: int | None = None,
    ) -> tuple[Step, ...]:
        """See Aggregator; the rare move of residuals to other ranks of the node is not counted."""
        return in_one_line(self.stages(layout, dtype, team, device, step))

    def stages(
        self,
        layout: Layout,
        dtype: torch.dtype,
        team: TeamShape,
        device: torch.device | None = None,
        step: int | None = None,
    ) -> tuple[Stages, ...]:
        """See Aggregator: chunks go up, across and down."""
        if layout.numel == 0:
            return ()
        if team.intra is None:
            return self._single_level(team)[1].stages(layout, dtype, team, device, step)
        form = self._form_on(team, layout.numel * dtype.itemsize, device or team.default_device)
        parts = self._cut(layout, dtype, team)
        return tuple(self._stages_of(part.layout, form, dtype, team, device, step) for part in parts)

    def _stages_of(
        self,
        layout: Layout,
        form: Form,
        dtype: torch.dtype,
        team: TeamShape,
        device: torch.device | None,
        step: int | None,
    ) -> Stages:
        intra, inter = team.intra, team.inter
        assert intra is not None
        # Feedback makes the way to the slow network float32.
        up_dtype = torch.promote_types(dtype, torch.float32) if self.inter.residual_paths else dtype
        if form == "leader" and not isinstance(self.intra, Compressed):
            leads = intra.rank == 0 and inter is not None
            across = self.inter.calls(layout, dtype, inter, device, step) if leads and inter else ()
            up = call(intra, "reduce", layout.numel * up_dtype.itemsize, 0)
            return Stages(up, across, call(intra, "broadcast", layout.numel * dtype.itemsize, 0))
        assert inter is not None  # check() refused unequal nodes
        if isinstance(self.intra, Compressed):
            shares = self.intra.share_layout(layout, dtype, intra, step)
            up_steps = self.intra.reduce_scatter_calls(layout, dtype, intra, step)
            across = self.inter.calls(shares, torch.float32, inter, device, step)
            return Stages(up_steps, across, self.intra.all_gather_calls(layout, dtype, intra, step))
        divided = division(self.inter, layout, dtype, intra.size)
        moved = () if divided.in_place else (work("copy", "", layout.numel),)
        primitive = "reduce_scatter" if form == "reduce_scatter" else "all_reduce"
        up = call(intra, primitive, divided.whole_numel * up_dtype.itemsize)
        across = self.inter.calls(divided.layouts[intra.rank], dtype, inter, device, step)
        return Stages(moved + up, across, call(intra, "all_gather", divided.shard_numel * dtype.itemsize) + moved)

    @property
    def lossless(self) -> bool:
        """See Aggregator."""
        return self.inter.lossless and self.intra.lossless

    @property
    def error_bound(self) -> float:
        """See Aggregator."""
        return (1 + self.inter.error_bound) * (1 + self.intra.error_bound) - 1

    @property
    def start_step(self) -> int:
        """See Aggregator."""
        return max(self.inter.start_step, self.intra.start_step)

    def phase(self, step: int) -> int:
        """See Aggregator: no level's messages may differ in length."""
        parts = (self.inter, self.intra)
        phases = [part.phase(step) for part in parts]
        earliest = max(phases)
        # Levels may take turns: then some step soon after has what each of them does now.
        alike = (at for at in range(earliest, min(step, earliest + 2)) if [part.phase(at) for part in parts] == phases)
        return next(alike, step)

    def check_capture(self, step: int, team: TeamShape) -> None:
        """See Aggregator; the level says what has to be changed."""
        if team.intra is None:
            self._single_level(team)[1].check_capture(step, team)
            return
        self.inter.check_capture(step, team.inter or team)  # also where only other ranks of the node talk across
        self.intra.check_capture(step, team.intra)

    @property
    def residual_paths(self) -> tuple[str, ...]:
        """See Aggregator."""
        levels = (("intra", self.intra), ("inter", self.inter))
        return tuple(f"{level}.{path}".rstrip(".") for level, part in levels for path in part.residual_paths)

    def _with_residuals_of_both(self, team: Team, account: Account, device: torch.device) -> tuple[str, Aggregator]:
        """Return the level to run, having seen to what a checkpoint of a larger cluster left at the other one."""
        level, aggregator = self._single_level(team)
        idle_level, idle = ("intra", self.intra) if level == "inter" else ("inter", self.inter)
        path, idle_path = (account.within(name, account.layout).path for name in (level, idle_level))
        ledger = account.ledger
        if ledger is None or not isinstance(idle, (Compressed, PowerSGD)):
            return level, aggregator
        if not ledger.holds(idle_path, account.layout):
            return level, aggregator
        if aggregator.residual_paths:
            ledger.redirect(idle_path, path, account.layout, device)
            return level, aggregator
        return idle_level, replace(idle, dense=("*",))  # exact, and takes along what is kept

    def _single_level(self, team: TeamShape) -> tuple[str, Aggregator]:
        if team.node_count > 1:
            return "inter", self.inter
        inter = self.inter
        if isinstance(inter, Compressed) and inter.compressor.inertia is not None:
            return "inter", replace(inter, dense=("*",))  # one node needs the momentum too
        return "intra", self.intra

    def _form_on(self, team: TeamShape, nbytes: int, device: torch.device) -> Form:
        if self.form is not None:
            return self.form
        return choose_form(team.backend(device), nbytes, uniform=team.uniform, lossless=self.inter.lossless)


def choose_form(backend: str, nbytes: int, *, uniform: bool, lossless: bool = True) -> Form:
    """Return the form for a buffer of `nbytes`: the rule behind Hierarchical(form=None).

    Unequal nodes: "leader", the only form they allow. Compression between the nodes: "reduce_scatter", so that the
    ranks of a node share its work and its residuals. Gloo: "leader", where one flow fills a slow link as well as
    several and the ranks of a node share its processors anyway. NCCL: "reduce_scatter" from 64 KiB, where every rank
    drives the NIC with its own shard; "leader" below, where one small message across beats several. "all_reduce" is
    there to be asked for, on backends without a good reduce_scatter.
    """
    if not uniform:
        return "leader"
    sharded = not lossless or (backend != "gloo" and nbytes >= _SHARD_FROM_NBYTES)
    return "reduce_scatter" if sharded else "leader"


def _levels(team: Team) -> tuple[Team, Team]:
    """Return the levels of a team whose nodes hold equally many ranks, several each: check() made sure."""
    assert team.intra is not None
    assert team.inter is not None
    return team.intra, team.inter


def _counts(team: TeamShape) -> str:
    nodes = team.wire.nodes
    return "+".join(str(nodes.count(node)) for node in dict.fromkeys(nodes)) + " ranks"
