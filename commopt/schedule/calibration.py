# SPDX-License-Identifier: Apache-2.0
"""Prices of messages: timed between two steps with this model's own shapes, or computed from a probe's links."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, count
from math import ceil
from time import perf_counter_ns

import torch
from torch import Tensor

from commopt.aggregate import Aggregator, context_for
from commopt.cost import Curve, Links, PriceTable, price
from commopt.errors import ConfigurationError
from commopt.feedback import Layout, ResidualStore
from commopt.groups import Team, TeamShape

_FIRST_NBYTES = 4 * 1024
HURRIED_NBYTES = 256 * 1024
"""The first sample where time is short: shorter ones do not show what a message costs that is much longer."""
_GROWTH = 4
LARGEST_NBYTES = 128 * 1024**2  # bandwidth is reached, and a few buffers of it fit beside any training
_FEWEST_CALLS, _MOST_CALLS = 3, 100
_LONG_ENOUGH_US = 30_000.0  # buffers on the way swallow short messages; only a longer run sees past them
_HURRIED_US = 10_000.0
_LEAST_LAYOUTS = 3  # two points make a line, and a third says whether it is one
_UNKNOWN_NUMEL = 2**22  # stands for a model whose parameters are not known yet

Points = list[tuple[int, float]]  # bytes, microseconds


def samples_of(layout: Layout, itemsize: int, first_nbytes: int = _FIRST_NBYTES) -> list[Layout]:
    """Return the first 4 KiB, 16 KiB, ... of `layout`, and all of it up to 128 MiB: real shapes of several lengths.

    first_nbytes: of the shortest.
    """
    layout = layout.cut(0, min(layout.numel, LARGEST_NBYTES // itemsize))
    ends = list(accumulate(piece.numel for piece in layout.pieces))
    samples: list[Layout] = []
    nbytes = first_nbytes
    while 2 * nbytes <= layout.numel * itemsize:
        whole = next(number for number, end in enumerate(ends) if end * itemsize >= nbytes)
        # A large first parameter is cut, or there would be no small sample.
        end = ends[whole] if ends[whole] * itemsize < 2 * nbytes else nbytes // itemsize
        samples.append(layout.cut(0, end))
        nbytes *= _GROWTH
    return [*samples, layout]


def calibrate(
    aggregators: Mapping[str, Aggregator],
    samples: Sequence[Layout],
    dtype: torch.dtype,
    team: Team,
    budget_s: float,
    *,
    hurried: bool = False,
) -> dict[str, Points]:
    """Return, by name, the time of an all_reduce of each sample on the slowest rank, in microseconds.

    Runs on the lane, collectively. Stops before samples that would exceed the budget, which is shared evenly; the
    smallest always run. Ranks decide by the same times, so that they stop alike.

    hurried: two samples are enough, and a second call of a long one.
    """
    points: dict[str, Points] = {}
    fewest, least, enough_us = (1, 2, _HURRIED_US) if hurried else (_FEWEST_CALLS, _LEAST_LAYOUTS, _LONG_ENOUGH_US)
    for name, aggregator in aggregators.items():
        left_us = budget_s * 1e6 / len(aggregators)
        points[name] = []
        for place, layout in enumerate(samples):
            nbytes = layout.numel * dtype.itemsize
            if place >= least and _expected_us(points[name], nbytes) * (1 + fewest) > left_us:
                break
            mean_us = _sender(aggregator, layout, dtype, team)
            if team.default_device.type == "cuda":
                mean_us(1)  # the first collective of a level takes NCCL longer than any budget
            once_us = mean_us(1)
            left_us -= once_us
            calls = min(_MOST_CALLS, max(fewest, ceil(enough_us / once_us)))
            if place >= least and calls * once_us > left_us:  # longer than expected: that one call has to do
                points[name].append((nbytes, once_us))
                break
            points[name].append((nbytes, mean_us(calls)))
            left_us -= calls * points[name][-1][1]
            del mean_us  # before the next one takes memory
    return points


def _expected_us(points: Points, nbytes: int) -> float:
    """Return what a longer message should take, along the line through the last two: most of a short one is latency."""
    *_, (before_nbytes, before_us), (last_nbytes, last_us) = [(0, 0.0), *points]
    slope = (last_us - before_us) / (last_nbytes - before_nbytes)
    return last_us + max(0.0, slope) * (nbytes - last_nbytes)


def prices_from_points(points: Mapping[str, Points], whole: Layout, dtype: torch.dtype) -> dict[str, PriceTable]:
    """Return prices from timed messages."""
    largest_nbytes = whole.numel * dtype.itemsize
    return {
        # So small a model is one sample.
        name: PriceTable(*zip(*found, strict=True))
        if len(found) == 1
        else PriceTable.of(Curve.fit(found).time_us, largest_nbytes)
        for name, found in points.items()
    }


def prices_from_links(
    strategies: Mapping[str, Aggregator], whole: Layout, dtype: torch.dtype, team: TeamShape, links: Links
) -> dict[str, PriceTable]:
    """Return the prices of every strategy from a probe's curves, without communication."""
    largest_nbytes = whole.numel * dtype.itemsize
    return {
        name: PriceTable.of(price(aggregator, team, links, whole, dtype), largest_nbytes)
        for name, aggregator in strategies.items()
    }


def require_prices(
    strategies: Mapping[str, Aggregator], parameters: Mapping[str, Tensor], team: TeamShape, links: Links
) -> None:
    """Raise ConfigurationError, alike on all ranks, unless `links` has figures for all messages of the strategies.

    parameters: of the model, none where they are not known yet.
    """
    dtype = next((parameter.dtype for parameter in parameters.values()), torch.float32)
    try:
        whole = Layout.of_gradients(parameters) if parameters else Layout.anonymous(_UNKNOWN_NUMEL)
        prices_from_links(strategies, whole, dtype, team, links)
    except ConfigurationError as error:
        nodes = " + ".join(map(str, team.ranks_per_node))
        raise ConfigurationError(
            f"links cannot price messages by {' or '.join(strategies)} on nodes with {nodes} ranks: {error}; or leave "
            f"links out, and messages are timed instead"
        ) from None


def _sender(aggregator: Aggregator, layout: Layout, dtype: torch.dtype, team: Team) -> Callable[[int], float]:
    """Return what sends one sample so many times, as a lane would, and returns the mean time on the slowest rank.

    Without pauses, in which a network would recover.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(layout.numel, generator=generator, dtype=torch.float32, device="cpu")
    buffer = values.to(team.default_device, dtype)
    device = buffer.device
    sent = Layout.anonymous(layout.numel) if aggregator.lossless else layout
    store = ResidualStore()
    # From 1 on: in round 0 a LocalSGD's parameters stay where they are.
    steps = count(max(1, aggregator.start_step))

    def mean_us(calls: int) -> float:
        team.all_reduce(torch.zeros(1, dtype=torch.float32, device=device))
        _finish(device)
        begun_ns = perf_counter_ns()
        for _ in range(calls):
            store.transaction.begin_step()
            context = context_for(aggregator, sent, team, store, next(steps))
            aggregator.all_reduce(buffer, team, 1.0 / team.size, context)
            store.transaction.end_bucket(last=True)
        _finish(device)
        own_us = torch.tensor([(perf_counter_ns() - begun_ns) / 1000 / calls], dtype=torch.float64, device=device)
        everyone = own_us.new_empty(team.size)
        team.all_gather(everyone, own_us)
        return float(everyone.max())

    return mean_us


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
