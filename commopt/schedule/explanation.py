# SPDX-License-Identifier: Apache-2.0
"""Decisions in words."""

from __future__ import annotations

from collections.abc import Sequence

from commopt.aggregate import Aggregator
from commopt.aggregate.auto import LOCAL
from commopt.display import aligned
from commopt.schedule.decision import Decision, Outcome, Tuned
from commopt.schedule.measurement import LEAST_GAIN, ms
from commopt.schedule.plan import Plan

_COLUMNS = ("candidate", "leaves out", "steps to a loss", "step", "exposed", "expected", "")
_SLOW = 0.5  # of a step, where that much of it is communication that nothing hides


def explain(aggregator: Aggregator | None, tuned: Tuned | None, decisions: Sequence[Decision]) -> str:
    """Return the candidate in use, the ones it was compared with, the messages of a step, and the last decision."""
    lines = [f"asked for: {aggregator if aggregator is not None else 'the preset of the hook'}"]
    if tuned is not None:
        table = aligned(_COLUMNS, [_row(outcome, tuned) for outcome in tuned.considered], left=len(_COLUMNS))
        known = tuned.optimizer or "not known, so that the worse of SGD and AdamW counts"
        lines += [
            f"used: {tuned.reason}",
            f"optimizer: {known}",
            *_advice(tuned),
            "",
            *table,
            "",
            *_messages(tuned.plan),
            "",
        ]
    if decisions or (aggregator is not None and aggregator.tunes):  # others decide nothing
        lines.append(f"last decision: {decisions[-1].reason if decisions else 'nothing was decided yet'}")
    return "\n".join(lines).rstrip()


def _row(outcome: Outcome, tuned: Tuned) -> tuple[str, ...]:
    mark = "used" if outcome.name == tuned.name else "" if outcome.step_us is not None else "not tried"
    if _is_local(outcome):
        mark = "never switched to"
    return (
        outcome.name,
        f"{outcome.error:.1%}" if outcome.error else "other nodes, in between" if _is_local(outcome) else "nothing",
        f"x {outcome.steps:.2f}",
        "" if outcome.step_us is None else ms(outcome.step_us),
        "" if outcome.exposed_us is None else ms(outcome.exposed_us),
        f"{ms(outcome.predicted_step_us)}, {ms(outcome.predicted_exposed_us)} exposed",
        mark,
    )


def _is_local(outcome: Outcome) -> bool:
    return outcome.strategy.startswith("LocalSGD(")


def _advice(tuned: Tuned) -> list[str]:
    """Advise what `auto` cannot choose: local SGD, and another optimizer if this one is like Adam on a slow link."""
    said = _advice_of_local(tuned) if LOCAL in tuned.allow else []
    exact = [each for each in tuned.considered if not each.error and each.step_us]
    shares = [(each.exposed_us or 0.0) / each.step_us for each in exact if each.step_us]
    if tuned.optimizer == "adamw" and len(tuned.nodes) > 1 and shares and min(shares) >= _SLOW:
        said.append(
            "stronger on a link so slow: commopt.attach(ddp, 'hierarchical_onebit', adam=commopt.Adam()), with "
            "comm.optimizer(...) in place of yours (docs/adamw.md)"
        )
    return said


def _advice_of_local(tuned: Tuned) -> list[str]:
    """Compare the time to a loss of the best local SGD, by prices, with that of the candidate in use."""
    local = [each for each in tuned.considered if _is_local(each)]
    if not local:
        why = "there is one node" if len(tuned.nodes) < 2 else "how they learn was measured with AdamW only"
        return [f"of local SGD nothing can be said: {why}"]
    used_us = tuned.used.steps * (tuned.used.step_us or tuned.used.predicted_step_us)
    best = min(local, key=lambda each: each.steps * each.predicted_step_us)
    best_us = best.steps * best.predicted_step_us
    if best_us > (1 - LEAST_GAIN) * used_us:
        return [f"local SGD should not be faster to a loss: {best.name} takes {ms(best_us)} for each {ms(used_us)}"]
    return [
        f"faster to a loss, by prices: commopt.attach(ddp, {best.name!r}), {ms(best_us)} for each {ms(used_us)}; nodes "
        f"hold different parameters then, so auto does not switch to it (docs/periodic.md)"
    ]


def _messages(plan: Plan | None) -> list[str]:
    """Return the messages of a step, and when each is expected to be reduced."""
    if plan is None:
        return ["messages: DDP's own buckets"]
    lines = [f"messages by {plan.strategy}, in the order of backward:"]
    for number, group in enumerate(plan.groups):
        text = f"  {number}: {group[0]} .. {group[-1]}"
        if plan.predicted is not None:
            late_us = plan.predicted.group_finish_us[number] - plan.predicted.compute_us
            text += f"; {ms(late_us)} after backward" if late_us > 0 else f"; hidden, {ms(-late_us)} before its end"
        lines.append(text)
    return lines
