"""Where a plan's prices come from: a probe's links when there are any, else short trials with the model's shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from commopt.aggregate import Aggregator, Hierarchical
from commopt.bucketing.calibration import Points, calibrate, expected_us, samples_of, stages
from commopt.bucketing.layouts import Layouts
from commopt.bucketing.units import Units
from commopt.cost import Curve, Links, best_chunks, cost_us, pipelined_us, price
from commopt.cost.formulas import StageTimes
from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.groups import Team, TeamShape
from commopt.plan import Key, PriceTable

_MOST_CHUNKS = 16
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
    strategies: Mapping[str, Aggregator],
    whole: Layout,
    dtype: torch.dtype,
    team: TeamShape,
    links: Links,
    lanes: int | None = None,
) -> dict[Key, PriceTable]:
    """Return what every strategy costs by a probe's curves, also in chunks; without communication.

    lanes: as for `cost`, None for those of this process.
    """
    largest = whole.numel * dtype.itemsize
    lanes = _lanes(team) if lanes is None else lanes
    prices: dict[Key, PriceTable] = {}
    for name, aggregator in strategies.items():
        for chunks in {1, _best_by_links(aggregator, whole, dtype, team, links, lanes)}:
            by_bytes = price(aggregator, team, links, whole, dtype, chunks=chunks, lanes=lanes)
            prices[name, chunks] = PriceTable.of(by_bytes, largest)
    return prices


def measured_points(
    strategies: Mapping[str, Aggregator],
    in_chunks: Collection[str],
    budget_s: float,
    whole: Layout,
    dtype: torch.dtype,
    team: Team,
) -> dict[Key, Points]:
    """Return what every strategy takes in short trials; collective, on a lane.

    Of those named in `in_chunks` one that can be cut is also tried with as many chunks as the times of its stages
    recommend.
    """
    samples = samples_of(whole, dtype.itemsize)
    # A rank's environment has a say in this, and what hangs on it is collective.
    lanes = _lanes(team)
    if not team.all_equal(lanes, team.default_device):
        lanes = 1
    in_chunks = _tried_in_chunks(strategies, in_chunks, team, lanes)
    trials: dict[Key, Aggregator] = {(name, 1): aggregator for name, aggregator in strategies.items()}
    points = calibrate(trials, samples, dtype, team, budget_s)
    cut: dict[Key, Aggregator] = {}
    for name, aggregator in in_chunks.items():
        affordable = [sample for sample in samples if sample.numel * dtype.itemsize <= points[name, 1][-1][0]]
        chunks = _recommended(stages(aggregator, affordable[-1], dtype, team))
        if chunks > 1:
            cut[name, chunks] = replace(aggregator, chunks=chunks)
    return points | calibrate(cut, samples, dtype, team, budget_s)


def _tried_in_chunks(
    strategies: Mapping[str, Aggregator], names: Collection[str], team: Team, lanes: int
) -> dict[str, Hierarchical]:
    return {
        name: aggregator
        for name, aggregator in strategies.items()
        if name in names and isinstance(aggregator, Hierarchical) and _pipelines(aggregator, team, lanes)
    }


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
    samples = samples_of(whole, dtype.itemsize)
    rounds = [
        count for count in (len(strategies), len(_tried_in_chunks(strategies, in_chunks, team, _lanes(team)))) if count
    ]
    return sum(n * expected_us(samples, dtype.itemsize, us_per_byte, budget_s * 1e6 / n) / 1e6 for n in rounds)


def prices_from_points(points: Mapping[Key, Points], whole: Layout, dtype: torch.dtype) -> dict[Key, PriceTable]:
    """Return prices that follow from trials."""
    return {key: _table(measured, whole.numel * dtype.itemsize) for key, measured in points.items()}


def _table(points: Points, largest_nbytes: int) -> PriceTable:
    if len(points) == 1:  # so small a model is one sample
        return PriceTable(*zip(*points, strict=True))
    return PriceTable.of(Curve.fit(points).time_us, largest_nbytes)


def _pipelines(aggregator: Aggregator, team: TeamShape, lanes: int) -> bool:
    """Return whether two levels of the network can be busy with different chunks at once, and nobody said otherwise."""
    two_levels = isinstance(aggregator, Hierarchical) and aggregator.chunks == 1 and team.intra is not None
    return two_levels and lanes == 2


def _lanes(team: TeamShape) -> int:
    return 1


def _best_by_links(
    aggregator: Aggregator, whole: Layout, dtype: torch.dtype, team: TeamShape, links: Links, lanes: int
) -> int:
    if not _pipelines(aggregator, team, lanes):
        return 1
    return best_chunks(
        lambda chunks: cost_us(aggregator, whole, dtype, team, links, chunks=chunks, lanes=2), _MOST_CHUNKS
    )


def _recommended(whole: StageTimes) -> int:
    """Return how many chunks T(k) makes the best of these stages, if it is worth it; latency is left out."""

    def time_us(chunks: int) -> float:
        return pipelined_us(StageTimes(*(stage_us / chunks for stage_us in whole)), chunks)

    return best_chunks(time_us, _MOST_CHUNKS)
