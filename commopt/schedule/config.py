"""What a user may ask for about buckets and tuning, and how the ranks settle on it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    """What to do about buckets: "ddp" leaves DDP's alone, "adaptive" measures and plans, a Plan is followed as it is.

    plan: None is "adaptive" for what tunes, else "ddp". links: prices, None to try out what messages cost.
    tuned: what an earlier tuning came to, None to tune anew.
    """

    plan: Plan | str | None = None
    links: Links | None = None
    tuned: Tuned | None = None

    @classmethod
    def read(cls, plan: Any, links: Any, needed_first: bool = False, tuned: Any = None) -> BucketConfig:
        """Check what a user passed; paths are read. Raises ConfigurationError."""
        if not isinstance(needed_first, bool):
            raise ConfigurationError(f"needed_first is {needed_first!r}; use True or False")
        if needed_first:
            warnings.warn(
                "needed_first=True changes nothing any more: DDP waits for every bucket before the optimizer, so no "
                "order of them is faster; leave it out",
                FutureWarning,
                stacklevel=2,
            )
        config = cls(_read_plan(plan), _read_links(links), _read_tuned(tuned))
        if isinstance(config.plan, Plan) and config.tuned is not None:
            raise ConfigurationError("plan= and tuned= both say what to send; pass one of them")
        return config

    def measures(self, aggregator: Aggregator) -> bool:
        """Return whether plans are to be made for what `aggregator` averages."""
        return self.plan == "adaptive" or (self.plan is None and aggregator.tunes)

    def settled(self, owner: str, membership: Membership) -> BucketConfig:
        """Return what all ranks follow; collective. Of different plans rank 0's counts; what else differs raises."""
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


def _read_plan(plan: Any) -> Plan | str | None:
    if plan is None or isinstance(plan, Plan) or plan in _KINDS:
        return plan  # type: ignore[no-any-return]  # checked
    if not isinstance(plan, (str, Path)):
        raise ConfigurationError(f"plan is a {type(plan).__name__}; use {_choices()}")
    try:
        return Plan.from_json(read_text(plan))
    except ConfigurationError as error:
        raise ConfigurationError(f"plan {str(plan)!r}: {error}; use {_choices()}") from None


def _read_links(links: Any) -> Links | None:
    if links is None:
        return None
    from commopt.cost import Links

    if isinstance(links, Links):
        return links
    if not isinstance(links, (str, Path)):
        raise ConfigurationError(
            f"links is a {type(links).__name__}; use commopt.Links, the path of a file that `python -m commopt probe` "
            f"wrote, or None to try out what messages cost"
        )
    return Links.load(links)


def _read_tuned(tuned: Any) -> Tuned | None:
    if isinstance(tuned, Tuned) or tuned is None:
        return tuned
    if not isinstance(tuned, (str, Path)):
        raise ConfigurationError(
            f"tuned is a {type(tuned).__name__}; use what HookState.tuned was, the path of a file it was saved to, or "
            f"None to tune anew"
        )
    return Tuned.load(tuned)


def _digest(links: Links) -> str:
    """Return what ranks compare: all that prices depend on, whether measured just now or read from a file."""
    table = [
        (key, [(float(s.from_nbytes), float(s.alpha_us), float(s.beta_us_per_byte)) for s in curve.segments])
        for curves in (links.curves, links.work)
        for key, curve in sorted(curves.items())
    ]
    return sha256(repr(table).encode()).hexdigest()[:16]


def _choices() -> str:
    return f"{', '.join(map(repr, _KINDS))}, a commopt.Plan, or the path of one written with to_json()"
