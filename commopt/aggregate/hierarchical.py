"""Reduce inside the node, aggregate between nodes, spread inside the node: the slow network sees each byte once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from commopt.aggregate.base import Aggregator, apply_scale
from commopt.aggregate.compressed import Compressed
from commopt.aggregate.division import division
from commopt.aggregate.flat import Flat
from commopt.aggregate.powersgd import PowerSGD
from commopt.errors import ConfigurationError
from commopt.feedback import Account, Layout
from commopt.groups import Team, WireBytes

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
    """

    inter: Aggregator = field(default_factory=Flat)
    intra: Flat | Compressed = field(default_factory=Flat)
    form: Form | None = None

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
        if isinstance(self.inter, Hierarchical):
            raise ConfigurationError(
                f"Hierarchical(inter={self.inter!r}) nests two levels, and between nodes there is one; pass the inner "
                f"aggregator's own inter"
            )
        if self.form not in (None, *get_args(Form)):
            raise ConfigurationError(f"form {self.form!r} is unknown; use None or one of {', '.join(get_args(Form))}")
        if isinstance(self.intra, Compressed) and self.form not in (None, "reduce_scatter"):
            raise ConfigurationError(
                f"form {self.form!r} cannot be had with intra={self.intra}; use form=None or intra=Flat()"
            )

    def check(self, team: Team) -> None:
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
        elif isinstance(self.intra, Compressed):
            self._through_shares(self.intra, buffer, team, scale, account)
        elif self._form_on(team, buffer.numel() * buffer.element_size(), buffer.device) == "leader":
            self._through_leader(buffer, team.intra, team.inter, scale, account)
        else:
            self._through_shards(buffer, team, scale, account)

    def _through_leader(self, buffer: Tensor, intra: Team, inter: Team | None, scale: float, account: Account) -> None:
        leads = intra.rank == 0 and inter is not None
        self._bring_home("leader", account.layout if leads else None, intra, account, buffer.device)
        work = self._scaled(buffer, scale)
        intra.reduce(work, dst=0)
        if leads:
            assert inter is not None
            self.inter.all_reduce(work, inter, 1.0, account.within("inter", account.layout, buffer.dtype))
        if work is not buffer and intra.rank == 0:
            buffer.copy_(work)
        intra.broadcast(buffer, src=0)
        self._judge(buffer[:1], account)

    def _through_shards(self, buffer: Tensor, team: Team, scale: float, account: Account) -> None:
        intra, inter = _levels(team)
        divided = division(self.inter, account.layout, buffer.dtype, intra.size)
        shard_numel, layout = divided.shard_numel, divided.layouts[intra.rank]
        begin = intra.rank * shard_numel
        self._bring_home(divided.name, layout, intra, account, buffer.device)

        # The bucket cannot be padded; where it does not divide, a padded copy goes round instead.
        work = divided.laid_out(self._scaled(buffer, scale), account.scratch)
        if self._form_on(team, buffer.numel() * buffer.element_size(), buffer.device) == "reduce_scatter":
            shard = account.scratch.take("shard", shard_numel, work.dtype, buffer.device)
            intra.reduce_scatter(shard, work)
        else:
            intra.all_reduce(work)
            shard = work[begin : begin + shard_numel]
        if layout.numel:  # the last ranks may have nothing but padding, on every node alike
            inner = account.within("inter", layout, buffer.dtype)
            self.inter.all_reduce(shard[: layout.numel], inter, 1.0, inner)

        whole = divided.target(buffer, account.scratch)
        intra.all_gather(whole, shard.to(buffer.dtype))
        divided.put_back(whole, buffer)
        self._judge(whole[::shard_numel], account)

    def _through_shares(
        self, intra_aggregator: Compressed, buffer: Tensor, team: Team, scale: float, account: Account
    ) -> None:
        intra, inter = _levels(team)
        account_intra = account.within("intra", account.layout, replicas=team.node_count)
        share, layout = intra_aggregator.reduce_scatter(buffer, intra, scale, account_intra)
        stage = f"from step {intra_aggregator.phase(account.step)}"
        self._bring_home(f"shares of {intra_aggregator} {stage}", layout, intra, account, buffer.device)
        if layout.numel:
            self.inter.all_reduce(share, inter, 1.0, account.within("inter", layout))
        intra_aggregator.all_gather(share, buffer, intra, account_intra)
        self._judge(buffer, account)

    # ----------------------------------------------------------------------------------- residuals

    def _scaled(self, buffer: Tensor, scale: float) -> Tensor:
        """Return `scale * buffer`: in place, or in float32 where feedback has to know of every rounding."""
        if self.inter.residual_paths and buffer.dtype.itemsize < torch.float32.itemsize:
            return buffer.float().mul_(scale)
        apply_scale(buffer, scale)
        return buffer

    def _bring_home(
        self, division: str, mine: Layout | None, intra: Team, account: Account, device: torch.device
    ) -> None:
        """Move residuals inside the node when a buffer is new, or divided anew: this rank will need those of `mine`.

        Each rank adds what it holds of the buffer's parameters to zeros, so that adding up moves it exactly.
        """
        ledger, path = account.ledger, account.within("inter", account.layout).path
        if ledger is None or not self.inter.residual_paths or not ledger.place(path, account.layout, division):
            return
        paths = [f"{path}.{part}".rstrip(".") for part in self.inter.residual_paths]
        numel = account.layout.numel
        for each in paths:
            ledger.dissolve(each, account.layout)
        held = [ledger.collect(each, account.layout, device) for each in paths]
        factors = self.inter.shared_factors(account.layout)
        moving = torch.cat([*held, ledger.factors.first_rights(path, factors, device)])
        intra.all_reduce(moving)
        if mine is not None:
            spans = account.layout.spans_of(mine)
            for begin, each in zip(range(0, numel * len(paths), numel), paths, strict=True):
                parts = [moving[begin + first : begin + last] for first, last in spans]
                ledger.deposit(each, mine, torch.cat(parts) if parts else moving[:0])
        rights = moving[numel * len(paths) :]
        ledger.factors.keep_rights(path, factors, rights, mine.names if mine is not None else ())

    def _judge(self, marks: Tensor, account: Account) -> None:
        """Report whether the shards whose first elements are `marks` are finite: all ranks commit, or none does."""
        if self.inter.residual_paths:
            account.report(marks.isfinite().all())

    # --------------------------------------------------------------------------------------- facts

    def wire_bytes(
        self,
        layout: Layout,
        dtype: torch.dtype,
        team: Team,
        device: torch.device | None = None,
        step: int | None = None,
    ) -> WireBytes:
        """See Aggregator; the rare move of residuals to other ranks of the node is not counted."""
        if layout.numel == 0:
            return WireBytes()
        intra, inter = team.intra, team.inter
        if intra is None:
            return self._single_level(team)[1].wire_bytes(layout, dtype, team, device, step)
        if isinstance(self.intra, Compressed):
            shares = self.intra.share_layout(layout, dtype, intra, step)
            across = self.inter.wire_bytes(shares, torch.float32, _levels(team)[1], device, step)
            return self.intra.halves_wire_bytes(layout, dtype, intra, step) + across
        form = self._form_on(team, layout.numel * dtype.itemsize, device or team.default_device)
        # Feedback makes the way to the slow network float32.
        up_dtype = torch.promote_types(dtype, torch.float32) if self.inter.residual_paths else dtype
        if form == "leader":
            leads = intra.rank == 0 and inter is not None
            across = self.inter.wire_bytes(layout, dtype, inter, device, step) if leads and inter else WireBytes()
            up = intra.wire.reduce(layout.numel * up_dtype.itemsize, 0)
            return up + across + intra.wire.broadcast(layout.numel * dtype.itemsize, 0)
        assert inter is not None  # check() refused unequal nodes
        divided = division(self.inter, layout, dtype, intra.size)
        up_nbytes = divided.whole_numel * up_dtype.itemsize
        up = intra.wire.reduce_scatter(up_nbytes) if form == "reduce_scatter" else intra.wire.all_reduce(up_nbytes)
        across = self.inter.wire_bytes(divided.layouts[intra.rank], dtype, inter, device, step)
        return up + across + intra.wire.all_gather(divided.shard_numel * dtype.itemsize)

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

    def _single_level(self, team: Team) -> tuple[str, Aggregator]:
        if team.node_count > 1:
            return "inter", self.inter
        inter = self.inter
        if isinstance(inter, Compressed) and inter.compressor.inertia is not None:
            return "inter", replace(inter, dense=("*",))  # one node needs the momentum too
        return "intra", self.intra

    def _form_on(self, team: Team, nbytes: int, device: torch.device) -> Form:
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


def _counts(team: Team) -> str:
    nodes = team.wire.nodes
    return "+".join(str(nodes.count(node)) for node in dict.fromkeys(nodes)) + " ranks"
