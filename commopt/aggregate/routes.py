"""The ways of a buffer over two levels: up inside the node, across the network, down inside the node."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from commopt.aggregate.base import Aggregator
from commopt.aggregate.compressed import Compressed
from commopt.aggregate.division import division
from commopt.feedback import Account, Layout
from commopt.groups import Team, apply_scale


class Route(ABC):
    """One buffer (or chunk of one) on its way; the stages run once each, in this order.

    `up` and `down` use the `intra` team only, `across` the `inter` team only. `name` tells ways to divide a buffer
    apart.
    """

    name: str

    def __init__(self, buffer: Tensor, inter_aggregator: Aggregator, scale: float, account: Account) -> None:
        self._buffer = buffer
        self._aggregator = inter_aggregator
        self._scale = scale
        self._account = account

    @property
    def crosses(self) -> bool:
        """Whether this rank goes across at all."""
        return True

    @property
    @abstractmethod
    def mine(self) -> Layout | None:
        """What this rank takes across; None when it does not."""

    @abstractmethod
    def up(self) -> None:
        """Scale, and add up inside the node."""

    @abstractmethod
    def across(self) -> None:
        """Add up over the nodes."""

    @abstractmethod
    def down(self) -> Tensor:
        """Spread the sums inside the node; return elements of the result that are not finite if any is not."""

    def _scaled(self) -> Tensor:
        """Return `scale * buffer`: in place, or in float32 where feedback has to know of every rounding."""
        if self._aggregator.residual_paths and self._buffer.dtype.itemsize < torch.float32.itemsize:
            return self._buffer.float().mul_(self._scale)
        apply_scale(self._buffer, self._scale)
        return self._buffer

    def _send(self, values: Tensor, inter: Team, layout: Layout, result_dtype: torch.dtype | None) -> None:
        account = self._account.within("inter", layout, result_dtype)
        self._aggregator.all_reduce(values, inter, 1.0, account)


class ThroughLeader(Route):
    """Reduce to one rank, which alone talks to those of other nodes, then broadcast."""

    name = "leader"

    def __init__(
        self,
        buffer: Tensor,
        intra: Team,
        inter: Team | None,
        inter_aggregator: Aggregator,
        scale: float,
        account: Account,
    ) -> None:
        super().__init__(buffer, inter_aggregator, scale, account)
        self._intra = intra
        self._inter = inter if intra.rank == 0 else None

    @property
    def crosses(self) -> bool:
        """See Route."""
        return self._inter is not None

    @property
    def mine(self) -> Layout | None:
        """See Route."""
        return self._account.layout if self.crosses else None

    def up(self) -> None:
        """See Route."""
        self._work = self._scaled()
        self._intra.reduce(self._work, dst=0)

    def across(self) -> None:
        """See Route."""
        if self._inter is not None:
            self._send(self._work, self._inter, self._account.layout, self._buffer.dtype)

    def down(self) -> Tensor:
        """See Route."""
        if self._work is not self._buffer and self._intra.rank == 0:
            self._buffer.copy_(self._work)
        del self._work  # chunks that have come down keep nothing
        self._intra.broadcast(self._buffer, src=0)
        return self._buffer[:1]


class ThroughShards(Route):
    """Reduce inside the node and keep one shard per rank, which talks to those at its place, then gather.

    keep_all: by an all_reduce of which each rank takes a slice, rather than a reduce_scatter.
    """

    def __init__(
        self,
        buffer: Tensor,
        intra: Team,
        inter: Team,
        inter_aggregator: Aggregator,
        scale: float,
        account: Account,
        *,
        keep_all: bool,
    ) -> None:
        super().__init__(buffer, inter_aggregator, scale, account)
        self._intra, self._inter, self._keep_all = intra, inter, keep_all
        self._divided = division(inter_aggregator, account.layout, buffer.dtype, intra.size)
        self.name = self._divided.name

    @property
    def mine(self) -> Layout:
        """See Route; the last ranks of a node may have nothing but padding, on every node alike."""
        return self._divided.layouts[self._intra.rank]

    def up(self) -> None:
        """See Route."""
        scratch, numel, rank = self._account.scratch, self._divided.shard_numel, self._intra.rank
        # The bucket cannot be padded; where it does not divide, a padded copy goes round instead.
        work = self._divided.laid_out(self._scaled(), scratch)
        if self._keep_all:
            self._intra.all_reduce(work)
            self._shard = work[rank * numel : (rank + 1) * numel]
        else:
            self._shard = scratch.take("shard", numel, work.dtype, work.device)
            self._intra.reduce_scatter(self._shard, work)

    def across(self) -> None:
        """See Route."""
        numel = self.mine.numel
        if numel:
            self._send(self._shard[:numel], self._inter, self.mine, self._buffer.dtype)

    def down(self) -> Tensor:
        """See Route."""
        whole = self._divided.target(self._buffer, self._account.scratch)
        self._intra.all_gather(whole, self._shard.to(self._buffer.dtype))
        del self._shard
        self._divided.put_back(whole, self._buffer)
        return whole[:: self._divided.shard_numel]


class ThroughShares(Route):
    """The two halves of a compressed all_reduce inside the node; in between each rank takes its share across."""

    def __init__(
        self,
        buffer: Tensor,
        intra: Team,
        inter: Team,
        intra_aggregator: Compressed,
        inter_aggregator: Aggregator,
        scale: float,
        account: Account,
        replicas: int,
    ) -> None:
        super().__init__(buffer, inter_aggregator, scale, account)
        self._intra, self._inter = intra, inter
        self._intra_aggregator = intra_aggregator
        self._account_intra = account.within("intra", account.layout, replicas=replicas)
        self.name = f"shares of {intra_aggregator} from step {intra_aggregator.phase(account.step)}"

    @property
    def mine(self) -> Layout:
        """See Route."""
        account = self._account
        return self._intra_aggregator.share_layout(account.layout, self._buffer.dtype, self._intra, account.step)

    def up(self) -> None:
        """See Route."""
        self._share, self._layout = self._intra_aggregator.reduce_scatter(
            self._buffer, self._intra, self._scale, self._account_intra
        )

    def across(self) -> None:
        """See Route."""
        if self._layout.numel:
            self._send(self._share, self._inter, self._layout, None)

    def down(self) -> Tensor:
        """See Route."""
        self._intra_aggregator.all_gather(self._share, self._buffer, self._intra, self._account_intra)
        del self._share
        return self._buffer
