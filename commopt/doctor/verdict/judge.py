# SPDX-License-Identifier: Apache-2.0
"""From measurements to a verdict: a pure function, which needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from statistics import median
from typing import Any

from commopt.aggregate.learning import MOST_STEPS
from commopt.doctor.verdict.causes import (
    UNEQUAL,
    Cause,
    across,
    causes_of,
    is_slow,
    silent_nodes,
    slow_collectives,
    slowest,
)
from commopt.doctor.verdict.facts import (
    Gain,
    InterfaceRates,
    Measurements,
    Overlap,
    Training,
)
from topology.network import rate_text

AS_IT_SHOULD_BE, SLOWER, NOT_MEASURED = 0, 1, 2
"""Exit statuses."""

FINE, SLOW = "as it should be", "slow"


@dataclass(frozen=True)
class Row:
    """One link in the table.

    gbps, expected_gbps: the rates again, for a picture; None where they are not known.
    sent, hidden: of a leg of a training's messages, what goes over it in a step, and how much of that backward hides.
    """

    link: str
    measured: str
    should_be: str
    verdict: str
    gbps: float | None = None
    expected_gbps: float | None = None
    sent: str = ""
    hidden: str = ""


@dataclass(frozen=True)
class Verdict:
    """The result: `status` is the exit status. overlap: of a training that was recorded to its end."""

    status: int
    sentence: str
    rows: tuple[Row, ...]
    causes: tuple[Cause, ...]
    first: str
    not_expected: str
    training: Training | None = None
    notes: tuple[str, ...] = ()
    overlap: Overlap | None = None

    def as_document(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def judge(found: Measurements) -> Verdict:
    """Return the verdict on measurements: causes by weight, what to try first, and what not to expect."""
    found = replace(found, wires=tuple(_at_least(wire, found) for wire in found.wires))
    causes = tuple(sorted(causes_of(found), key=lambda cause: -(inf if cause.weight is None else cause.weight)))
    measured = bool(found.levels) or any(wire.gbps is not None for wire in found.wires)
    silent = silent_nodes(found)
    if silent is not None:
        causes = (silent, *causes)
    alone = sum(found.ranks) < 2
    if alone or silent is not None or not measured:
        status = NOT_MEASURED
    else:
        status = SLOWER if causes else NOT_MEASURED if found.unmeasured else AS_IT_SHOULD_BE
    return Verdict(
        status,
        _sentence(found, status, causes, alone),
        tuple(_rows(found)),
        causes,
        _first(found, causes, alone),
        _not_expected(found, status),
        found.training,
        tuple(_notes(found)),
    )


def _at_least(wire: InterfaceRates, found: Measurements) -> InterfaceRates:
    """Return the rates of an interface, no lower than what collectives got through it.

    A short test is easily disturbed. All nodes take part in collectives, so each carries what they reach; where nodes
    are unequal, that is not known.
    """
    level = across(found)
    if not wire.used or level is None or len(set(found.ranks)) > 1:
        return wire
    reached = level.best_gbps
    more = {
        name: max(rate, reached)
        for name in (() if found.split else ("send_gbps", "receive_gbps")) + ("several_gbps",)
        if (rate := getattr(wire, name)) is not None
    }
    return replace(wire, **more)


# ------------------------------------------------------------------------------------------ sentences


def _shape(found: Measurements) -> str:
    nodes, ranks = len(found.nodes), sum(found.ranks)
    each = f" of {found.ranks[0]}" if len(set(found.ranks)) == 1 and found.ranks else ""
    return f"{nodes} node{'s' * (nodes != 1)}{each}, {ranks} rank{'s' * (ranks != 1)}"


def _sentence(found: Measurements, status: int, causes: Sequence[Cause], alone: bool) -> str:
    if alone:
        return "Could not measure: one rank has nobody to send to."
    if status == NOT_MEASURED:
        why = causes[0].text if causes else found.unmeasured or "no link was measured"
        return f"Could not measure: {why}."
    if status == SLOWER:
        how = "Slower than it should be" if causes[0].weight is not None else "Broken"
        return f"{how}: {causes[0].text}."
    level, carried = across(found), slowest(found.used)
    if level is None:
        return f"As it should be: {_shape(found)}."
    rate = rate_text(level.best_gbps)
    against = f" of {rate_text(level.expected_gbps)}" if level.expected_gbps else ""
    tcp = f" (plain TCP: {rate_text(carried)})" if carried is not None and not against else ""
    return f"As it should be: {_shape(found)}, {rate}{against} between nodes{tcp}."


def _first(found: Measurements, causes: Sequence[Cause], alone: bool) -> str:
    if alone:
        return "torchrun --nproc-per-node 2 -m commopt doctor --measure"
    if causes and causes[0].remedy:
        return causes[0].remedy
    if found.training is not None and found.training.gains:
        return f"torchrun ... -m commopt run --strategy {tried_first(found.training.gains)} train.py"
    return ""


def tried_first(gains: Sequence[Gain]) -> str:
    """Return the best strategy that has learned in as many steps as exact averages, or else the best."""
    safe = (gain for gain in gains if all(steps is not None and steps <= MOST_STEPS for steps in gain.steps))
    return next(safe, gains[0]).strategy


def _not_expected(found: Measurements, status: int) -> str:
    training = found.training
    if training is None:
        return "a model's step: pass --model NAME, --params N or --script train.py" if found.levels else ""
    if not training.gains:
        return f"a gain from another strategy: {training.exposed_share:.0%} of a step is all there is to win"
    limit = training.step_ms / max(training.step_ms - training.exposed_ms, 1e-9)
    more = " before the causes above are gone" if status == SLOWER else ""
    return f"more than {limit:.2g} times the speed from any strategy{more}: the rest is not communication"


def _notes(found: Measurements) -> Iterator[str]:
    counts = {severity: sum(one.severity == severity for one in found.problems) for severity in ("error", "warning")}
    if any(counts.values()):
        told = " and ".join(f"{count} {name}(s)" for name, count in counts.items() if count)
        yield f"The checks found {told}: python -m commopt doctor"
    if found.connections > 1:
        by = "commopt chose" if found.split else "You have"
        yield f"{by} {found.connections} connections between two ranks; without them there is one."
    if found.unmeasured:
        yield f"Not everything was measured: {found.unmeasured}."


# ---------------------------------------------------------------------------------------------- table


def _rows(found: Measurements) -> Iterator[Row]:
    """Yield the table's rows, slow ones first."""
    rows = [row for row in (*_level_rows(found), *_wire_rows(found))]
    yield from sorted(rows, key=lambda row: row.verdict == FINE)


def _level_rows(found: Measurements) -> Iterator[Row]:
    for site in found.network.levels if found.network is not None else ():
        slower, faster = site.across_gbps, site.inside_gbps
        name = f"between {site.name}s, a node of all"
        yield Row(name, rate_text(slower), rate_text(faster), SLOW, slower, faster)
    slow = bool(list(slow_collectives(found)))
    for level in found.levels:
        where = {"intra": "inside a node", "inter": "between nodes", "world": "all ranks"}.get(level.level, level.level)
        for name, gbps in level.rates if level is across(found) else [max(level.rates, key=lambda each: each[1])]:
            should = rate_text(level.expected_gbps) if level.expected_gbps else "not known"
            verdict = SLOW if slow and level.between_nodes else FINE
            yield Row(f"{where}, {name}", rate_text(gbps), should, verdict, gbps, level.expected_gbps)


def _wire_rows(found: Measurements) -> Iterator[Row]:
    rates = {wire.node: wire.gbps for wire in found.used if wire.gbps is not None}
    middle = median(rates.values()) if len(rates) > 2 else None
    for wire in found.wires:
        name = f"{wire.node} {wire.interface}" + ("" if wire.used else " (not used)")
        should = rate_text(wire.expected_gbps) if wire.expected_gbps else "not known"
        if wire.gbps is None:
            yield Row(name, "no answer", should, "not reached" if wire.used else "-", None, wire.expected_gbps)
            continue
        behind = wire.used and middle is not None and wire.gbps < UNEQUAL * middle
        verdict = SLOW if is_slow(wire) or behind else FINE
        yield Row(name, rate_text(wire.gbps), should, verdict, wire.gbps, wire.expected_gbps)
