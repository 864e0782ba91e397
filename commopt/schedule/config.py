# SPDX-License-Identifier: Apache-2.0
"""The user's choices about buckets and tuning, and how the ranks agree on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from commopt.aggregate import Aggregator, auto_of
from commopt.aggregate.auto import LOSSLESS
from commopt.document import read_text
from commopt.errors import ConfigurationError
from commopt.groups import Membership, TeamShape
from commopt.schedule.candidates import alternatives
from commopt.schedule.decision import Tuned
from commopt.schedule.plan import Plan, digest_of_names

if TYPE_CHECKING:
    from commopt.cost import Links

_log = logging.getLogger("commopt")

_KINDS = ("adaptive", "ddp")
_Kind = TypeVar("_Kind")


def read_plan(plan: Any) -> Plan | str | None:
    """Return the choice of a user, checked; a path is read. Raises ConfigurationError.

    "ddp" leaves DDP's buckets alone, "adaptive" measures and plans, a Plan is followed as it is. None is "adaptive" for
    an aggregator that tunes, else "ddp".
    """
    if plan is None or plan in _KINDS:
        return plan  # type: ignore[no-any-return]
    return _given("plan", plan, Plan, lambda path: Plan.from_json(read_text(path)))


def read_links(links: Any) -> Links | None:
    """Return the prices that a user gave, checked; a path is read. None to time messages instead."""
    if links is None:
        return None
    from commopt.cost import Links

    return _given("links", links, Links, Links.load)


def read_tuned(tuned: Any) -> Tuned | None:
    """Return the result of an earlier tuning, checked; a path is read. None to tune anew."""
    return None if tuned is None else _given("tuned", tuned, Tuned, Tuned.load)


def makes_plans(plan: Plan | str | None, aggregator: Aggregator, team: TeamShape) -> bool:
    """Return whether plans are to be made for the messages of `aggregator`.

    Without a word from the user they are where there is a choice to make. Going site by site is faster only where the
    links between sites are slow enough for what is sent, and nobody has told how slow they are.
    """
    return plan == "adaptive" or (plan is None and (aggregator.tunes or _has_two_ways(aggregator, team)))


def _has_two_ways(aggregator: Aggregator, team: TeamShape) -> bool:
    return team.sites_above > 0 and len(alternatives(aggregator, team)) > 1


def agreed_plan(
    owner: str, membership: Membership, plan: Plan | str | None, links: Links | None, tuned: Tuned | None
) -> Plan | str | None:
    """Return the choice that all ranks follow; collective. Rank 0's plan counts; any other difference raises."""
    membership.agree(
        f"{owner} plan",
        plan="a plan" if isinstance(plan, Plan) else str(plan),
        links="none" if links is None else _digest(links),
        tuned="none" if tuned is None else sha256(tuned.to_json().encode()).hexdigest()[:16],
    )
    if not isinstance(plan, Plan):
        return plan
    digest = plan.digest()
    text = plan.to_json() if membership.team.rank == 0 else ""
    plans = membership.exchange(f"{owner} plan itself", digest=digest, plan=text)
    if plans[0]["digest"] == digest:
        return plan
    _log.warning("this rank was given another plan than rank %d, whose plan all follow", membership.ranks[0])
    return Plan.from_json(plans[0]["plan"])


def require_strategy(plan: Plan, strategies: Mapping[str, Aggregator]) -> None:
    """Raise ConfigurationError when a plan is for an aggregator that is not available here."""
    if plan.strategy not in strategies:
        raise ConfigurationError(
            f"the plan is for {plan.strategy}, and the hook averages with {' or '.join(strategies)}; use the plan with "
            f"the aggregator it was made for, if that was 'auto' with the same allow="
        )


def require_fit(tuned: Tuned, aggregator: Aggregator, team: TeamShape) -> None:
    """Raise ConfigurationError when an earlier tuning was on another cluster, or the aggregator would not repeat it."""
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
    if other := allow_mismatch(tuned, aggregator):
        raise ConfigurationError(f"tuned= {other}; pass the same allow=, or tune again without tuned=")


def allow_mismatch(tuned: Tuned, aggregator: Aggregator) -> str:
    """Return in words how an earlier tuning was allowed other families than `auto` is now, "" where it was not."""
    auto = auto_of(aggregator)
    if auto is None or {LOSSLESS, *tuned.allow} == {LOSSLESS, *auto.allow}:
        return ""
    return f"was found with allow={'+'.join(tuned.allow)!r}, and here it is allow={'+'.join(auto.allow)!r}"


def names_its_model(tuned: Tuned, names: Collection[str], optional: Collection[str] = ()) -> bool:
    """Return whether an earlier tuning tells whose parameters it was of; an exact choice in an old file does not.

    names: of the parameters here, none where they are not known. optional: of frozen ones, which DDP may show too.
    Raises ConfigurationError when it was of others.
    """
    if tuned.plan is not None and names:
        tuned.plan.require_names(names, optional)
    elif tuned.parameters and names and tuned.parameters not in map(digest_of_names, (names, {*names, *optional})):
        raise ConfigurationError(
            f"tuned= was found for a model with other parameters than this one's {len(names)} "
            f"({', '.join(map(repr, sorted(names)[:3]))}, ...); tune again without it"
        )
    return tuned.plan is not None or bool(tuned.parameters)


_CHOICES = {
    "plan": "'adaptive', 'ddp', a commopt.Plan, or the path of one written with to_json()",
    "links": "commopt.Links, the path of a file that `python -m commopt probe` wrote, or None to time messages",
    "tuned": "a HookState.tuned, the path of a file it was saved to, or None to tune anew",
}


def _given(name: str, value: Any, kind: type[_Kind], load: Callable[[str | Path], _Kind]) -> _Kind:
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
