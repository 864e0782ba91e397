"""Where a plan's prices come from: a probe's links when there are any, else short trials with the model's shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from commopt.aggregate import Aggregator
from commopt.bucketing.calibration import Points, calibrate, expected_us, samples_of
from commopt.bucketing.layouts import Layouts
from commopt.bucketing.units import Units
from commopt.cost import Curve, Links, price
from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.groups import Team, TeamShape
from commopt.plan import Key, PriceTable

_UNKNOWN_NUMEL = 2**22  # stands for a model whose parameters nobody has shown yet


def require_prices(strategies: Mapping[str, Aggregator], layouts: Layouts, team: TeamShape, links: Links) -> None:
    """Raise ConfigurationError, alike on all ranks, unless `links` has figures for all that the strategies send."""
    whole, dtype = Layout.anonymous(_UNKNOWN_NUMEL), torch.float32
    if layouts.parameters:
        whole = layouts.whole
        dtype = Units.of((whole,), layouts.parameters, single=True).dtype
    try:
        prices_from_links(strategies, whole, dtype, team, links)
    except ConfigurationError as error:
        nodes = " + ".join(map(str, team.ranks_per_node))
        raise ConfigurationError(
            f"links cannot price messages by {' or '.join(strategies)} on nodes with {nodes} ranks: {error}; or leave "
            f"links out, and messages are tried out instead"
        ) from None


def prices_from_links(
    strategies: Mapping[str, Aggregator], whole: Layout, dtype: torch.dtype, team: TeamShape, links: Links
) -> dict[Key, PriceTable]:
    """Return what every strategy costs by a probe's curves, without communication."""
    largest = whole.numel * dtype.itemsize
    return {
        (name, 1): PriceTable.of(price(aggregator, team, links, whole, dtype), largest)
        for name, aggregator in strategies.items()
    }


def measured_points(
    strategies: Mapping[str, Aggregator],
    in_chunks: Collection[str],
    budget_s: float,
    whole: Layout,
    dtype: torch.dtype,
    team: Team,
) -> dict[Key, Points]:
    """Return what every strategy takes in short trials; collective, on a lane."""
    trials: dict[Key, Aggregator] = {(name, 1): aggregator for name, aggregator in strategies.items()}
    return calibrate(trials, samples_of(whole, dtype.itemsize), dtype, team, budget_s)


def expected_s(
    strategies: Mapping[str, Aggregator],
    in_chunks: Collection[str],
    budget_s: float,
    whole: Layout,
    dtype: torch.dtype,
    team: Team,
    us_per_byte: float,
) -> float:
    """Return about how long `measured_points` takes where a byte takes us_per_byte, inf if that is not known."""
    samples, count = samples_of(whole, dtype.itemsize), len(strategies)
    return count * expected_us(samples, dtype.itemsize, us_per_byte, budget_s * 1e6 / count) / 1e6


def prices_from_points(points: Mapping[Key, Points], whole: Layout, dtype: torch.dtype) -> dict[Key, PriceTable]:
    """Return prices that follow from trials."""
    return {key: _table(measured, whole.numel * dtype.itemsize) for key, measured in points.items()}


def _table(points: Points, largest_nbytes: int) -> PriceTable:
    if len(points) == 1:  # so small a model is one sample
        return PriceTable(*zip(*points, strict=True))
    return PriceTable.of(Curve.fit(points).time_us, largest_nbytes)
