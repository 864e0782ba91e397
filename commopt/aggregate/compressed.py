"""All_reduce in compressed form: every element is encoded at most twice, whatever the number of ranks.

A ring that carries a 16-bit or quantized sum rounds it again at every hop, so its error grows with the ranks. Here
each rank owns one chunk: scatter the encoded chunks to their owners, add them in float32 in rank order, encode the
sum, gather. Between two ranks a single exchange of everything moves the same bytes in one message less and spares
the second rounding. With feedback every rounding is kept and sent later: a rank's own ("worker"), that of the sum
("owner", as in DoubleSqueeze, arXiv 1905.05957) and that of the final cast to a 16-bit buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.aggregate.base import Aggregator, apply_scale, mark_non_finite
from commopt.aggregate.rows import Region, RowFormat, row_format
from commopt.compress import Carry, Compressor, Exact
from commopt.errors import ConfigurationError
from commopt.feedback import Account, Feedback, Kind, Layout
from commopt.groups import Team, WireBytes

_EVERYTHING = ("*",)


@dataclass(frozen=True, repr=False)
class Compressed(Aggregator):
    """Exchange `compressor`'s payloads instead of the values.

    feedback: how what compression leaves out is kept for the next step; None forgets it. Only hooks remember: a
        standalone all_reduce does not know that two tensors are the same gradient a step apart.
    dense: patterns of parameter names that travel uncompressed ("*.bias"), beside those that would not shrink.
    """

    compressor: Compressor
    feedback: Feedback | None = Feedback()
    dense: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, Compressor):
            raise ConfigurationError(
                f"Compressed({self.compressor!r}) needs a Compressor, for example Compressed(Cast(torch.bfloat16))"
            )
        if not (self.feedback is None or isinstance(self.feedback, Feedback)):
            raise ConfigurationError(f"Compressed(feedback={self.feedback!r}) must be a Feedback(), or None for none")
        if isinstance(self.dense, str) or not all(isinstance(pattern, str) for pattern in self.dense):
            raise ConfigurationError(
                f"Compressed(dense={self.dense!r}) must be a tuple of patterns, for example dense=('*.bias',)"
            )
        object.__setattr__(self, "dense", tuple(self.dense))  # a list could not be hashed

    # --------------------------------------------------------------------------------- all at once

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, account: Account) -> None:
        """See Aggregator; one rank alone has nothing to send, hence nothing to lose."""
        if buffer.numel() == 0:
            return
        if team.size == 1:
            apply_scale(buffer, scale)
        elif team.size == 2:
            self._exchange(buffer, team, scale, account)
        else:
            self._scatter_gather(buffer, team, scale, account)

    def _exchange(self, buffer: Tensor, team: Team, scale: float, account: Account) -> None:
        rows = self._rows(account.layout, account.result_dtype or buffer.dtype, 1, account.step)
        mine = rows.take(1, "sent", account.scratch, buffer.device)
        carries = self._encode(rows, buffer, mine, team, scale, account)
        both = rows.take(2, "received", account.scratch, buffer.device)
        team.all_gather(both.view(-1), mine.view(-1))
        for region, carry in zip(rows.regions, carries, strict=True):
            total = region.target(buffer, torch.float32, region.chunk_numel, account.scratch)
            region.compressor.accumulate(region.payload(both), total)
            half = region.numel // 2
            own = slice(0, half) if team.rank == 0 else slice(half, region.numel)
            if carry is not None:
                _keep_rounding(total[own], rows.dtype, carry.new[own], carry)
            region.write(buffer, total[: region.numel])
        self._judge(rows, both, buffer, account)

    def _scatter_gather(self, buffer: Tensor, team: Team, scale: float, account: Account) -> None:
        rows, received = self._send_chunks(buffer, team, scale, account)
        owned = rows.take(1, "owned", account.scratch, buffer.device)
        carries = []
        for region in rows.regions:
            begin, end = region.chunk(team.rank)
            carry = self._carry(region, "owner", region.layout.cut(begin, end), account, buffer.device)
            carries.append(carry)
            sources, target = region.payload(received), region.payload(owned)
            region.compressor.recompress(
                sources, target, region.chunk_numel, end - begin, carry, account.dice("owner", team.rank)
            )
        self._send_sums(rows, owned, carries, buffer, team, account)

    # ------------------------------------------------------------------------- in two halves

    def reduce_scatter(self, buffer: Tensor, team: Team, scale: float, account: Account) -> tuple[Tensor, Layout]:
        """Return this rank's share of `scale * sum` (float32) and what lies in it: the first half of an all_reduce."""
        rows, received = self._send_chunks(buffer, team, scale, account)
        sums = []
        for region in rows.regions:
            begin, end = region.chunk(team.rank)
            total = torch.empty(region.chunk_numel, device=buffer.device)
            region.compressor.accumulate(region.payload(received), total)
            sums.append(total[: end - begin])
        return torch.cat(sums), self.share_layout(account.layout, rows.dtype, team, account.step)

    def all_gather(self, share: Tensor, buffer: Tensor, team: Team, account: Account) -> None:
        """Fill `buffer` with all ranks' shares, as `reduce_scatter` made them: the second half."""
        rows = self._rows(account.layout, account.result_dtype or buffer.dtype, team.size, account.step)
        owned = rows.take(1, "owned", account.scratch, buffer.device)
        carries = []
        offset = 0
        for region in rows.regions:
            begin, end = region.chunk(team.rank)
            carry = self._carry(region, "owner", region.layout.cut(begin, end), account, buffer.device)
            carries.append(carry)
            values = share[offset : offset + end - begin]
            offset += end - begin
            target = region.payload(owned)
            region.compressor.compress(values, target, region.chunk_numel, 1.0, carry, account.dice("owner", team.rank))
        self._send_sums(rows, owned, carries, buffer, team, account)

    # ----------------------------------------------------------------------------------- the parts

    def _send_chunks(self, buffer: Tensor, team: Team, scale: float, account: Account) -> tuple[RowFormat, Tensor]:
        """Encode a row for each rank and return those meant for this one."""
        rows = self._rows(account.layout, account.result_dtype or buffer.dtype, team.size, account.step)
        encoded = rows.take(team.size, "sent", account.scratch, buffer.device)
        self._encode(rows, buffer, encoded, team, scale, account)
        received = rows.take(team.size, "received", account.scratch, buffer.device)
        team.all_to_all(received.view(-1), encoded.view(-1))
        return rows, received

    def _encode(
        self, rows: RowFormat, buffer: Tensor, payload: Tensor, team: Team, scale: float, account: Account
    ) -> list[Carry | None]:
        carries = []
        for region in rows.regions:
            values = region.read(buffer, account.scratch)
            carry = self._carry(region, "worker", region.layout, account, buffer.device)
            carries.append(carry)
            target, dice = region.payload(payload), account.dice("worker", team.rank)
            region.compressor.compress(values, target, region.chunk_numel, scale, carry, dice)
            if carry is not None and region.compressor == self.compressor:
                account.sample(values, scale, carry)
        return carries

    def _send_sums(
        self,
        rows: RowFormat,
        owned: Tensor,
        carries: list[Carry | None],
        buffer: Tensor,
        team: Team,
        account: Account,
    ) -> None:
        """Gather the encoded sums of all owners and decode them into `buffer`."""
        gathered = rows.take(team.size, "sent", account.scratch, buffer.device)
        team.all_gather(gathered.view(-1), owned.view(-1))
        for region, carry in zip(rows.regions, carries, strict=True):
            begin, end = region.chunk(team.rank)
            if carry is not None and rows.rounds:
                exact = account.scratch.take("total", end - begin, torch.float32, buffer.device)
                region.compressor.decompress(region.payload(owned), exact, region.chunk_numel)
                _keep_rounding(exact, rows.dtype, carry.new, carry)
            # The owner, too, takes what it sent: otherwise its replica would differ from all others.
            values = region.target(buffer, rows.dtype, region.numel, account.scratch)
            region.compressor.decompress(region.payload(gathered), values, region.chunk_numel)
            region.write(buffer, values)
        self._judge(rows, gathered, buffer, account)

    def _judge(self, rows: RowFormat, payloads: Tensor, buffer: Tensor, account: Account) -> None:
        """Tell the account whether the result is finite, and show it in the buffer's first element."""
        if self.feedback is None or account.ledger is None:
            return
        flags = [region.compressor.finite(region.payload(payloads)) for region in rows.regions]
        if rows.rounds:  # the cast may overflow what was finite
            flags.append(buffer.to(rows.dtype).isfinite().all())
        finite = torch.stack(flags).all()
        mark_non_finite(buffer, finite)
        account.report(finite)

    def _carry(
        self, region: Region, kind: Kind, layout: Layout, account: Account, device: torch.device
    ) -> Carry | None:
        if isinstance(region.compressor, Exact):
            return account.leftover(layout, device) if kind == "worker" and self.feedback is not None else None
        return account.carry(kind, layout, self.feedback, device)

    def _rows(self, layout: Layout, dtype: torch.dtype, chunks: int, step: int | None) -> RowFormat:
        dense = self.dense if step is None or step >= self.start_step else _EVERYTHING
        return row_format(layout, chunks, self.compressor, dense, dtype)

    # -------------------------------------------------------------------------------------- facts

    def wire_bytes(
        self,
        layout: Layout,
        dtype: torch.dtype,
        team: Team,
        device: torch.device | None = None,
        step: int | None = None,
    ) -> WireBytes:
        """See Aggregator."""
        if layout.numel == 0 or team.size == 1:
            return WireBytes()
        if team.size == 2:
            return team.wire.all_gather(self._rows(layout, dtype, 1, step).nbytes)
        return self.halves_wire_bytes(layout, dtype, team, step)

    def halves_wire_bytes(self, layout: Layout, dtype: torch.dtype, team: Team, step: int | None) -> WireBytes:
        """Return what `reduce_scatter` and `all_gather` together send."""
        row_nbytes = self._rows(layout, dtype, team.size, step).nbytes
        return team.wire.all_to_all(row_nbytes * team.size) + team.wire.all_gather(row_nbytes)

    def share_layout(self, layout: Layout, dtype: torch.dtype, team: Team, step: int | None) -> Layout:
        """Return what lies in this rank's share after `reduce_scatter`."""
        regions = self._rows(layout, dtype, team.size, step).regions
        shares = (region.layout.cut(*region.chunk(team.rank)) for region in regions)
        return Layout(tuple(piece for share in shares for piece in share.pieces))

    @property
    def lossless(self) -> bool:
        """See Aggregator."""
        return False

    @property
    def error_bound(self) -> float:
        """See Aggregator: one encoding on the way to the owner, one of the sum."""
        return (1 + self.compressor.error_bound) ** 2 - 1

    @property
    def start_step(self) -> int:
        """See Aggregator."""
        return self.compressor.start_step

    @property
    def residual_paths(self) -> tuple[str, ...]:
        """See Aggregator."""
        return () if self.feedback is None else ("",)


def _keep_rounding(exact: Tensor, dtype: torch.dtype, residual: Tensor, carry: Carry) -> None:
    """Add to a part of the new residual what rounding `exact` to a 16-bit dtype takes away; one rank does."""
    if dtype.itemsize < exact.dtype.itemsize:
        lost = exact - exact.to(dtype)
        residual.add_(lost if carry.loss_scale is None else lost / carry.loss_scale)
