# SPDX-License-Identifier: Apache-2.0
"""The verdict in at most 25 lines of 80 columns, and what changed since an earlier one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap

from commopt.display import WIDTH, aligned, significant
from commopt.doctor.verdict.facts import Gain, Measurements
from commopt.doctor.verdict.judge import Row, Verdict
from topology.network import rate_text

MOST_LINES = 25
_MOST_ROWS, _MOST_CAUSES, _MOST_GAINS = 6, 2, 3
_MOST_ELSEWHERE = 2  # commands for other hosts
_LEAST_ROWS = 2  # a row, and how many there are more
_SENTENCE_LINES, _CAUSE_LINES, _OTHER_LINES = 3, 2, 1
_LONGEST_NAME, _LONGEST_CELL = 29, 15
_LONGEST_LEG, _LONGEST_SENT, _LONGEST_RATE, _LONGEST_SHARE = 13, 16, 10, 6  # 80 columns with a verdict
LEARNED = "docs/evidence/convergence.md"


def lines_of(verdict: Verdict) -> list[str]:
    """Return the verdict's lines, with empty ones between its parts where there is room."""
    sentence, others = (
        _clipped(verdict.sentence, _SENTENCE_LINES),
        [_causes(verdict), _training(verdict), _endings(verdict)],
    )
    left = MOST_LINES - len(sentence) - sum(map(len, others))
    parts = [part for part in (sentence, _table(verdict.rows, left - 1), *others) if part]
    spare = MOST_LINES - sum(map(len, parts))
    lines: list[str] = []
    for number, part in enumerate(parts):
        lines += [""] if 0 < number <= spare else []
        lines += part
    return lines


def changes(now: Measurements, before: Measurements) -> list[str]:
    """Return what is slower or faster than in an earlier measurement, the largest change first."""
    rates = [{name: gbps for name, gbps in _rates(each)} for each in (now, before)]
    both = [(rates[0][name] / rates[1][name], name) for name in rates[0] if rates[1].get(name)]
    both.sort(key=lambda each: -abs(each[0] - 1))
    lines = [
        f"{name}: {rate_text(rates[0][name])}, was {rate_text(rates[1][name])} ({times:.2f} times)"
        for times, name in both
        if abs(times - 1) > 0.1
    ]
    told = lines[:_MOST_ROWS] or ["no rate differs by more than 10 %"]
    return _fit([f"Since {before.date or 'then'}:", *(f"  {line}" for line in told)])


def _rates(found: Measurements) -> Iterable[tuple[str, float]]:
    for level in found.levels:
        yield from ((f"{level.level} {name}", gbps) for name, gbps in level.rates if gbps > 0)
    for site in found.network.levels if found.network is not None else ():
        yield f"between {site.name}s", site.across_gbps
    for wire in found.wires:
        if wire.gbps:
            yield f"{wire.node} {wire.interface}", wire.gbps


def _fit(lines: Iterable[str]) -> list[str]:
    return [_cut(line, WIDTH) for line in lines]


def _cut(text: str, width: int) -> str:
    text = text.replace("\n", " ")
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."


def _clipped(text: str, most: int, first: str = "", rest: str = "") -> list[str]:
    """Return a text in at most `most` lines; what does not fit ends in dots."""
    lines = wrap(" ".join(text.split()), WIDTH, initial_indent=first, subsequent_indent=rest)
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1][: WIDTH - 3].rstrip(" .") + "..."]
    return lines


def _columns(rows: Sequence[Row]) -> list[tuple[str, str, int]]:
    """Return field, heading and width of what some row has."""
    of_legs = any(row.sent for row in rows)
    columns = [
        ("link", "leg" if of_legs else "link", _LONGEST_LEG if of_legs else _LONGEST_NAME),
        ("sent", "a step", _LONGEST_SENT),
        ("measured", "measured", _LONGEST_RATE if of_legs else _LONGEST_CELL),
        ("should_be", "should be", _LONGEST_RATE if of_legs else _LONGEST_CELL),
        ("hidden", "hidden", _LONGEST_SHARE),
        ("verdict", "verdict", _LONGEST_CELL),
    ]
    return [each for each in columns if any(getattr(row, each[0]) for row in rows)]


def _table(rows: Sequence[Row], most: int) -> list[str]:
    most = min(most, _MOST_ROWS)
    if not rows or most < _LEAST_ROWS:
        return []
    shown = rows if len(rows) <= most else rows[: most - 1]
    columns = [
        [heading, *(_cut(getattr(row, field), longest) for row in shown)] for field, heading, longest in _columns(rows)
    ]
    headings, *cells = map(list, zip(*columns, strict=True))
    lines = aligned(headings, cells, left=len(headings))
    if len(shown) < len(rows):
        lines.append(f"and {len(rows) - len(shown)} more (--json)")
    return _fit(lines)


def _causes(verdict: Verdict) -> list[str]:
    lines: list[str] = []
    for number, cause in enumerate(verdict.causes[:_MOST_CAUSES], 1):
        lines += _clipped(cause.text, _CAUSE_LINES, f"{number}. ", "   ")
        if cause.remedy:
            lines.append(_cut(f"   $ {cause.remedy}", WIDTH))
        lines += _fit(f"   $ {command}" for command in cause.elsewhere[:_MOST_ELSEWHERE])
        if (more := len(cause.elsewhere) - _MOST_ELSEWHERE) > 0:
            lines.append(f"   and {more} more (--json)")
    return lines


def _training(verdict: Verdict) -> list[str]:
    one = verdict.training
    if one is None:
        return []
    name, used = _cut(one.name, _LONGEST_NAME), _cut(one.strategy, _LONGEST_NAME) or "stock DDP"
    share = f"{one.exposed_share:.0%} of it exposed communication."
    if (overlap := verdict.overlap) is None:
        how = "recorded" if one.recorded else "predicted"
        lines = _clipped(f"{name}, {how}: {significant(one.step_ms)} ms a step with {used}, {share}", 2)
    else:
        several = f"{overlap.messages} messages" if overlap.messages > 1 else "one message"
        text = f"Transfer in {several}: {significant(overlap.transfer_ms)} ms, {overlap.hidden_share:.0%} hidden."
        step = f"Recorded: {significant(one.step_ms)} ms a step of {name} with {used}, {share}"
        lines = _clipped(f"{step} {text}", _SENTENCE_LINES)
    rows = [
        [
            _cut(gain.strategy, _LONGEST_NAME),
            _cut(f"{significant((one.step_ms - gain.step_ms) / 1e3)} s", _LONGEST_CELL),
            learns(gain),
        ]
        for gain in one.gains[:_MOST_GAINS]
    ]
    if rows:
        lines += _fit(aligned(["strategy", "saves a step", "steps to a loss"], rows, left=3))
    return lines


def learns(gain: Gain) -> str:
    """Return how many steps to a loss a strategy needs, over those of exact averages, by optimizer."""
    if gain.exact:
        return "the same"
    texts = [f"{name} x {steps:.2f}" for name, steps in zip(("SGD", "AdamW"), gain.steps, strict=True) if steps]
    return _cut(", ".join(texts), _LONGEST_NAME) or "not measured"


def _endings(verdict: Verdict) -> list[str]:
    lines: list[str] = []
    if verdict.training is not None and any(not gain.exact for gain in verdict.training.gains):
        lines.append(f"Steps to a loss, over those of exact averages: {LEARNED}")
    if verdict.first:
        again = bool(verdict.causes) and verdict.first == verdict.causes[0].remedy
        text = "the command of 1, and measure again" if again else " ".join(verdict.first.split())
        one_line = len(text) <= WIDTH - len("Try first: ")
        lines += [f"Try first: {text}"] if one_line else ["Try first:", _cut(f"  {text}", WIDTH)]
    if verdict.not_expected:
        lines += _clipped(f"Do not expect {verdict.not_expected}.", 2)
    for note in verdict.notes[:2]:
        lines += _clipped(note, _OTHER_LINES)
    return lines
