# SPDX-License-Identifier: Apache-2.0
"""What was decided, in words."""

from __future__ import annotations

from collections.abc import Sequence

from commopt.aggregate import Aggregator
from commopt.aggregate.auto import LOCAL
from commopt.display import aligned
from commopt.schedule.decision import Decision, Tried, Tuned
from commopt.schedule.estimate import LEAST_GAIN, ms
from commopt.schedule.plan import Plan

_COLUMNS = ("candidate", "leaves out", "steps to a loss", "step", "exposed", "expected", "")
_SLOW = 0.5  # of a step, where that much of it is communication that nothing hides


def explain(aggregator: Aggregator | None, tuned: Tuned | None, decisions: Sequence[Decision]) -> str:
    """Return what is used, what it was compared with, what each message does, and the last decision if any is taken."""
    lines = [f"asked for: {aggregator if aggregator is not None else 'what the hook stands for'}"]
    if tuned is not None:
        table = aligned(_COLUMNS, [_row(tried, tuned) for tried in tuned.considered], left=len(_COLUMNS))
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


def _row(tried: Tried, tuned: Tuned) -> tuple[str, ...]:
    mark = "used" if tried.name == tuned.name else "" if tried.step_us is not None else "not tried"
    if _is_local(tried):
        mark = "never switched to"
    return (
        tried.name,
        f"{tried.error:.1%}" if tried.error else "other nodes, in between" if _is_local(tried) else "nothing",
        f"x {tried.steps:.2f}",
        "" if tried.step_us is None else ms(tried.step_us),
        "" if tried.exposed_us is None else ms(tried.exposed_us),
        f"{ms(tried.predicted_step_us)}, {ms(tried.predicted_exposed_us)} exposed",
        mark,
    )


def _is_local(tried: Tried) -> bool:
    return tried.strategy.startswith("LocalSGD(")


def _advice(tuned: Tuned) -> list[str]:
    """Say what `auto` cannot choose: another optimizer, on a slow link where this is like Adam; and a LocalSGD."""
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
    """Compare the time to a loss of the best LocalSGD, by prices, with that of what is used."""
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
