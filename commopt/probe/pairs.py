# SPDX-License-Identifier: Apache-2.0
"""Pairs of nodes that exchange at once, for a short time each: what `find_sites` asks for, over the ranks' groups."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from math import ceil
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from commopt import lanes
from commopt.groups import Membership, Team
from commopt.probe.matchings import Matching, Pair
from commopt.probe.nearness import PairRate

WINDOW_S = 0.14
"""For how long the pairs of a matching exchange. The first third does not count: TCP is slow until it knows the way."""
MARGIN_S = 0.03
"""What a matching takes beside that, where a message over the slowest link does not take longer."""

_WARM_UP = 1 / 3
_PINGS = 4
_LEAST_NBYTES, _MOST_NBYTES = 2**12, 2**23
_GROWS_BELOW_S = WINDOW_S / 24
_HEADER = torch.int64.itemsize
_OVER = 0  # in a header: no message follows


class PairProber:
    """Measures matchings of nodes; one rank of each node exchanges. Every method is collective over the membership.

    budget_s: when it is used up, no further matching begins.
    """

    def __init__(self, membership: Membership, budget_s: float) -> None:
        team = membership.team
        self._everyone = team
        self._across: Team | None = team
        if team.intra is not None:
            self._across = team.inter if team.intra.rank == 0 else None
        self._client = lanes.LaneClient(membership, f"probe of sites {next(membership.owners)}")
        self._device = team.default_device
        nbytes = 0 if self._across is None else _MOST_NBYTES
        self._leaving, self._arriving = (torch.zeros(nbytes, dtype=torch.uint8, device=self._device) for _ in range(2))
        self._until = perf_counter() + budget_s

    def measure(self, matchings: Sequence[Matching]) -> list[dict[Pair, PairRate]]:
        """Return what the pairs of each matching reached, the same on all ranks; fewer when the time was used up."""
        own: list[PairRate] = []
        if self._across is not None:
            for number, matching in enumerate(matchings):
                what = f"pairs of nodes, {number + 1} of {len(matchings)}"
                if not self._run(what, partial(self._at_once, self._across, matching, own)):
                    break
        # A node's row: the count of its matchings, then its rate and its latency in each.
        row = [float(len(own)), *(value for seen in own for value in seen)]
        mine = torch.zeros(1 + 2 * len(matchings), dtype=torch.float64, device="cpu")
        mine[: len(row)] = torch.tensor(row, dtype=torch.float64, device="cpu")
        rows = self._gathered(mine)
        return [
            {(a, b): PairRate(*rows[a][1 + 2 * number : 3 + 2 * number]) for a, b in matching}
            for number, matching in enumerate(matchings[: round(rows[0][0])])
        ]

    def _run(self, what: str, work: partial[bool]) -> bool:
        answer: list[bool] = []
        self._client.run(lambda: answer.append(work()), what, self._device).wait()
        return answer[0]

    def _gathered(self, mine: Tensor) -> list[list[float]]:
        """Return the rows of all nodes, on every rank."""
        team = self._everyone
        everyone = torch.empty(team.size * mine.numel(), dtype=torch.float64, device=self._device)
        self._client.run(
            lambda: team.all_gather(everyone, mine.to(self._device)), "rates of pairs of nodes", self._device
        ).wait()
        nodes = list(team.wire.nodes)
        table = everyone.view(team.size, -1).tolist()
        return [table[nodes.index(node)] for node in dict.fromkeys(nodes)]

    def _at_once(self, across: Team, matching: Matching, own: list[PairRate]) -> bool:
        """Exchange with this node's partner, and note what was reached; return False when time is over on any node."""
        over = torch.tensor([float(perf_counter() > self._until)], device=self._device)
        across.all_reduce(over)  # all pairs begin when the last node has come
        if over.item():
            return False
        pair = next((each for each in matching if across.rank in each), None)
        own.append(PairRate(0.0, 0.0) if pair is None else self._exchange(across, pair))
        return True

    def _exchange(self, across: Team, pair: Pair) -> PairRate:
        """Exchange messages until the window is over: each tells the length of the next, as the first node says."""
        leads = across.rank == pair[0]
        peer = pair[1] if leads else pair[0]
        latency_us = min(self._took_s(across, peer, _HEADER, _LEAST_NBYTES)[0] for _ in range(_PINGS)) * 1e6
        begun, nbytes, next_nbytes = perf_counter(), _LEAST_NBYTES, _LEAST_NBYTES
        messages: list[tuple[int, float]] = []
        fastest_s: dict[int, float] = {}
        while nbytes != _OVER:
            if perf_counter() - begun >= WINDOW_S:
                next_nbytes = _OVER
            elif fastest_s.get(next_nbytes, WINDOW_S) < _GROWS_BELOW_S:
                next_nbytes = min(2 * next_nbytes, _MOST_NBYTES)
            took_s, told = self._took_s(across, peer, nbytes, next_nbytes)
            messages.append((nbytes, took_s))
            fastest_s[nbytes] = min(took_s, fastest_s.get(nbytes, took_s))
            nbytes = next_nbytes if leads else told
        return PairRate(rate_gbps(messages), latency_us)

    def _took_s(self, across: Team, peer: int, nbytes: int, next_nbytes: int) -> tuple[float, int]:
        """Exchange messages of one length; return the time, and the length of the next one that the other tells."""
        begun = perf_counter()
        self._leaving[:_HEADER].view(torch.int64).fill_(next_nbytes)
        across.send_receive(self._arriving[:nbytes], self._leaving[:nbytes], peer)
        told = int(self._arriving[:_HEADER].view(torch.int64).item())  # waits for the device
        return perf_counter() - begun, told


def rate_gbps(messages: Sequence[tuple[int, float]]) -> float:
    """Return the rate in Gb/s from the bytes and the seconds of messages: the median of long ones after the warm-up.

    A rank that the machine stops for a moment delays few of them.
    """
    ends_s = list(accumulate(took_s for _, took_s in messages))
    longest = max(nbytes for nbytes, _ in messages)
    settled = [
        nbytes / max(took_s, 1e-9)
        for (nbytes, took_s), end_s in zip(messages, ends_s, strict=True)
        if end_s >= _WARM_UP * ends_s[-1] and 2 * nbytes >= longest
    ]
    mean = sum(nbytes for nbytes, _ in messages) / max(ends_s[-1], 1e-9)
    return 8e-9 * (median(settled) if settled else mean)


def predicted_s(matchings: int) -> float:
    """Return what so many matchings take."""
    return ceil(matchings * (WINDOW_S + MARGIN_S) * 10) / 10
