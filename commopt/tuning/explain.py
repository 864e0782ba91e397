"""Why gradients are averaged as they are, in words and numbers."""

from __future__ import annotations

from collections.abc import Sequence

from commopt.aggregate import Aggregator
from commopt.plan import Bucket, Decision, Plan, Tried, Tuned
from commopt.plan.evidence import ms

_COLUMNS = ("way", "leaves out", "step", "exposed", "expected", "")


def explain(
    aggregator: Aggregator | None, tuned: Tuned | None, decisions: Sequence[Decision], *, by_ddp: bool = False
) -> str:
    """Return what is used, what it was compared with, what each bucket does, and the last decision.

    by_ddp: whether DDP averages by itself now.
    """
    lines = [f"asked for: {aggregator if aggregator is not None else 'what the hook stands for'}"]
    if tuned is not None:
        lines += [f"used: {tuned.reason}", "", *_table(tuned), "", *_buckets(tuned)]
    if by_ddp:
        lines += ["now: DDP averages by itself, without the hook", ""]
    last = decisions[-1].reason if decisions else "nothing was decided yet"
    return "\n".join([*lines, f"last decision: {last}"])


def _table(tuned: Tuned) -> list[str]:
    """Return what was considered, a line each; times in milliseconds."""
    rows = [_COLUMNS, *(_row(tried, tuned) for tried in tuned.considered)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(tried: Tried, tuned: Tuned) -> tuple[str, ...]:
    mark = "used" if tried.name == tuned.name else "" if tried.step_us is not None else "not tried"
    return (
        tried.name,
        f"{tried.error:.1%}" if tried.error else "nothing",
        "" if tried.step_us is None else ms(tried.step_us),
        "" if tried.exposed_us is None else ms(tried.exposed_us),
        f"{ms(tried.predicted_step_us)}, {ms(tried.predicted_exposed_us)} exposed",
        mark,
    )


def _buckets(tuned: Tuned) -> list[str]:
    """Return what each bucket goes by, neighbours alike in one line, and when it is expected to be reduced."""
    plan = tuned.plan
    if plan is None:
        return ["buckets: DDP's own"]
    lines, run = [], [0]
    for number in [*range(1, len(plan.buckets)), None]:
        if number is not None and _alike(plan.buckets[run[-1]], plan.buckets[number]):
            run.append(number)
            continue
        lines.append(_run(plan, run))
        run = [] if number is None else [number]
    return ["buckets, in the order of backward:", *lines]


def _run(plan: Plan, run: Sequence[int]) -> str:
    first, last = plan.buckets[run[0]], plan.buckets[run[-1]]
    nbytes = sum(plan.buckets[number].nbytes for number in run)
    numbers = f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}"
    chunks = f" in {first.chunks} chunks" if first.chunks > 1 else ""
    text = f"  {numbers}: {nbytes / 2**20:.2f} MiB, {first.names[0]} .. {last.names[-1]}, by {first.strategy}{chunks}"
    if plan.predicted is None:
        return text
    finish_us = max(plan.predicted.bucket_finish_us[number] for number in run)
    late_us = finish_us - plan.predicted.compute_us
    return text + (f"; {ms(late_us)} after backward" if late_us > 0 else f"; hidden, {ms(-late_us)} before its end")


def _alike(one: Bucket, other: Bucket) -> bool:
    return (one.strategy, one.chunks) == (other.strategy, other.chunks)
