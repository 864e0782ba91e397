"""Between which ways of sending a bucket a plan may choose, given what the user asked for."""

from __future__ import annotations

from collections.abc import Mapping

from commopt.aggregate import Aggregator, Flat, Hierarchical
from commopt.errors import ConfigurationError
from commopt.groups import TeamShape
from commopt.plan import Bucket, Plan, Tuned


def strategies_for(aggregator: Aggregator, team: TeamShape) -> dict[str, Aggregator]:
    """Return what a plan may choose from, by the name it has in plans: the first is what the user asked for.

    An exact average stays one whichever way it is taken, so plain Hierarchical() may give way to Flat() where that is
    faster. What rounds, or was asked for in one form, stays as it is.
    """
    known = {repr(aggregator): aggregator}
    if aggregator == Hierarchical() and team.intra is not None:
        known[repr(Flat())] = Flat()
    return known


def aggregator_of(bucket: Bucket, strategies: Mapping[str, Aggregator]) -> Aggregator:
    """Return what averages a bucket of a plan."""
    return strategies[bucket.strategy]


def require_strategies(plan: Plan, strategies: Mapping[str, Aggregator]) -> None:
    """Raise ConfigurationError when a plan uses an aggregator that is not to be had here."""
    for number, bucket in enumerate(plan.buckets):
        if bucket.strategy not in strategies:
            raise ConfigurationError(
                f"bucket {number} of the plan is for {bucket.strategy}, and the hook averages with "
                f"{' or '.join(strategies)}; use the plan with the aggregator it was made for, if that was 'auto' with "
                f"the same allow="
            )


def require_fit(tuned: Tuned, aggregator: Aggregator, team: TeamShape) -> None:
    """Raise ConfigurationError when an earlier tuning was of another cluster, or is for what tunes nothing."""
    if not aggregator.tunes:
        raise ConfigurationError(
            f"tuned= is for 'auto', and the hook averages with {aggregator}; use attach(ddp, 'auto', tuned=...)"
        )
    if tuned.nodes != team.ranks_per_node:
        here = " + ".join(map(str, team.ranks_per_node))
        there = " + ".join(map(str, tuned.nodes))
        raise ConfigurationError(
            f"tuned= was found on nodes with {there} ranks, and here they have {here}; tune again without it"
        )
