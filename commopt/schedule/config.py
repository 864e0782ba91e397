# SPDX-License-Identifier: Apache-2.0
"""The user's choices about buckets and tuning, and how the ranks agree on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commopt.aggregate import Aggregator
from commopt.document import read_text
from commopt.errors import ConfigurationError
from commopt.groups import Membership, TeamShape
from commopt.schedule.decision import Tuned
from commopt.schedule.plan import Plan

if TYPE_CHECKING:
    from commopt.cost import Links

_log = logging.getLogger("commopt")

_KINDS = ("adaptive", "ddp")


@dataclass(frozen=True)
class BucketConfig:
    """The user's choices about buckets and tuning.

    plan: "ddp" leaves DDP's buckets alone, "adaptive" measures and plans, a Plan is followed as it is. None is
        "adaptive" for an aggregator that tunes, else "ddp".
    links: prices of messages; None to time messages instead.
    tuned: the result of an earlier tuning; None to tune anew.
    """

    plan: Plan | str | None = None
    links: Links | None = None
    tuned: Tuned | None = None

    @classmethod
    def read(cls, plan: Any, links: Any, tuned: Any = None) -> BucketConfig:
        """Return the choices of a user, checked; paths are read. Raises ConfigurationError."""
        if links is not None:
            from commopt.cost import Links

            links = _given("links", links, Links, Links.load)
        if plan is not None and plan not in _KINDS:
            plan = _given("plan", plan, Plan, lambda path: Plan.from_json(read_text(path)))
        config = cls(plan, links, None if tuned is None else _given("tuned", tuned, Tuned, Tuned.load))
        if isinstance(config.plan, Plan) and config.tuned is not None:
            raise ConfigurationError("plan= and tuned= both say what to send; pass one of them")
        return config

    def measures(self, aggregator: Aggregator) -> bool:
        """Return whether plans are to be made for the messages of `aggregator`."""
        return self.plan == "adaptive" or (self.plan is None and aggregator.tunes)

    def settled(self, owner: str, membership: Membership) -> BucketConfig:
        """Return the choices that all ranks follow; collective. Rank 0's plan counts; any other difference raises."""
        given = isinstance(self.plan, Plan)
        membership.agree(
            f"{owner} plan",
            plan="a plan" if given else str(self.plan),
            links="none" if self.links is None else _digest(self.links),
            tuned="none" if self.tuned is None else sha256(self.tuned.to_json().encode()).hexdigest()[:16],
        )
        if not isinstance(self.plan, Plan):
            return self
        digest = self.plan.digest()
        text = self.plan.to_json() if membership.team.rank == 0 else ""
        plans = membership.exchange(f"{owner} plan itself", digest=digest, plan=text)
        if plans[0]["digest"] == digest:
            return self
        _log.warning("this rank was given another plan than rank %d, whose plan all follow", membership.ranks[0])
        return replace(self, plan=Plan.from_json(plans[0]["plan"]))


def require_strategy(plan: Plan, strategies: Mapping[str, Aggregator]) -> None:
    """Raise ConfigurationError when a plan is for an aggregator that is not available here."""
    if plan.strategy not in strategies:
        raise ConfigurationError(
            f"the plan is for {plan.strategy}, and the hook averages with {' or '.join(strategies)}; use the plan with "
            f"the aggregator it was made for, if that was 'auto' with the same allow="
        )


def require_fit(tuned: Tuned, aggregator: Aggregator, team: TeamShape) -> None:
    """Raise ConfigurationError when an earlier tuning was on another cluster, or the aggregator does not tune."""
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


_CHOICES = {
    "plan": "'adaptive', 'ddp', a commopt.Plan, or the path of one written with to_json()",
    "links": "commopt.Links, the path of a file that `python -m commopt probe` wrote, or None to time messages",
    "tuned": "a HookState.tuned, the path of a file it was saved to, or None to tune anew",
}


def _given(name: str, value: Any, kind: type, load: Callable[[str | Path], Any]) -> Any:
    """Return an option that is an object, or the path of a file that holds one."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, (str, Path)):
        raise ConfigurationError(f"{name} is a {type(value).__name__}; use {_CHOICES[name]}")
    try:
        return load(value)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}={str(value)!r}: {error}; use {_CHOICES[name]}") from None


def _digest(links: Links) -> str:
    """Return a digest of everything that prices depend on, for ranks to compare."""
    table = [
        (key, [tuple(map(float, astuple(segment))) for segment in curve.segments])
        for curves in (links.curves, links.work)
        for key, curve in sorted(curves.items())
    ]
    return sha256(repr(table).encode()).hexdigest()[:16]
