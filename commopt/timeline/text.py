# SPDX-License-Identifier: Apache-2.0
"""The report: time and bytes of a step, as text and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from textwrap import wrap
from typing import Any

from commopt.display import WIDTH, aligned, significant
from commopt.errors import ConfigurationError
from commopt.groups import WireBytes
from commopt.timeline.analysis import Analysis, RankTimes, StepBreakdown, analyse
from commopt.timeline.recordings import STAGES, Timeline

_MOST_RANKS = 16
_LONGEST_NAME = 24


@dataclass(frozen=True)
class TrafficOutside:
    """Payload bytes that DDP sends outside the hook.

    start_up_broadcast_bytes: parameters and buffers at start-up.
    buffers_bytes_per_step: buffers (BatchNorm) before every forward.
    """

    start_up_broadcast_bytes: int = 0
    buffers_bytes_per_step: int = 0


@dataclass(frozen=True)
class Subject:
    """The subject of a report.

    model: class of the model.
    numel: number of its parameters.
    strategy: the strategy that averages the gradients.
    when: time of the report.
    inter_bytes: bytes that each preset would send to other nodes in a step, on this rank with these buffers.
    """

    model: str
    numel: int
    strategy: str
    when: str
    inter_bytes: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        size = f"{significant(self.numel / 1e6)} million parameters" if self.numel else "unknown size"
        return f"{self.model or 'a model'} of {size}, averaged by {self.strategy}; {self.when}"


@dataclass(frozen=True)
class Report:
    """Result of `report`. Times are means over typical steps, in microseconds, and printed in milliseconds.

    sent_per_step: payload bytes that this rank sends through the hook, after the dense steps that some strategies
        begin with.
    predicted_exposed_us: the plan's prediction for the last rank; None without a plan.
    predicted_finish_us: the plan's prediction for each message, from the start of the step; None without a plan.
    """

    analysis: Analysis
    uncertainty_us: float
    sent_per_step: WireBytes
    outside: TrafficOutside
    plan: str | None = None
    predicted_exposed_us: float | None = None
    predicted_finish_us: tuple[float, ...] | None = None
    subject: Subject | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, for JSON."""
        return asdict(self) | {"sent_per_step": self.sent_per_step.by_level()}

    def __str__(self) -> str:
        tables = ([each.title, *aligned(each.headings, each.rows, each.left)] for each in (ranks(self), messages(self)))
        said = (
            [line for text in part for line in wrap(text, WIDTH, subsequent_indent="  ")]
            for part in (head(self), words(self))
        )
        first, last = said
        return "\n\n".join("\n".join(part) for part in (first, *tables, last))


def report(
    timeline: Timeline,
    sent_per_step: WireBytes,
    outside: TrafficOutside,
    plan: str | None = None,
    predicted_exposed_us: float | None = None,
    predicted_finish_us: Sequence[float] | None = None,
    subject: Subject | None = None,
) -> Report:
    """Return the report of a timeline; see Report for the other arguments.

    Raises ConfigurationError when no step was recorded, or unless predicted_finish_us has one time per message.
    """
    analysis = analyse(timeline)
    if predicted_finish_us is not None and len(predicted_finish_us) != len(analysis.messages):
        raise ConfigurationError(
            f"predicted_finish_us has {len(predicted_finish_us)} times for {len(analysis.messages)} messages; "
            f"pass the prediction of the plan in use"
        )
    return Report(
        analysis,
        max(timeline.uncertainty_us),
        sent_per_step,
        outside,
        plan,
        predicted_exposed_us,
        None if predicted_finish_us is None else tuple(predicted_finish_us),
        subject,
    )


def head(report: Report) -> list[str]:
    """Return sentences about the mean over ranks, late ranks, and bytes."""
    found, times = report.analysis, report.analysis.mean
    nodes = len({rank.node for rank in found.ranks})
    lines = [str(report.subject)] if report.subject else []
    lines += [
        f"{_count(len(found.ranks), 'rank')} on {_count(nodes, 'node')}; steps {found.first_step} to "
        f"{found.last_step}: {found.compared_steps} compared of {found.recorded_steps} recorded, those with the "
        f"present buckets",
        f"step {_ms(times.step_us)} ms = compute {_ms(times.compute_us)} + exposed communication "
        f"{_ms(times.exposed_us)} (waiting {_ms(times.exposed_waiting_us)}, transfer {_ms(times.exposed_transfer_us)})",
        f"communication {_ms(times.communication_us)} ms, of which {_hidden_percent(times)} hidden behind compute",
    ]
    named = found.stragglers[:_MOST_RANKS] or ("no rank stands out",)
    lines += [f"slowest: {straggler}" for straggler in named]
    if len(found.stragglers) > _MOST_RANKS:
        lines.append(f"slowest: {_count(len(found.stragglers) - _MOST_RANKS, 'more rank')}, less late than these")
    if report.plan is not None:
        predicted = report.predicted_exposed_us
        against = (
            ""
            if predicted is None
            else f"; exposed after the last rank's last gradient: {_ms(predicted)} ms predicted, "
            f"{_ms(found.last_exposed_us)} measured"
        )
        lines.append(f"plan: {report.plan}{against}")
    sent, outside = report.sent_per_step, report.outside
    beyond = f", of that {', '.join(map(mb, sent.beyond))} to other sites" if sent.beyond else ""
    return [
        *lines,
        f"this rank sends per step: {mb(sent.intra)} inside its node, {mb(sent.inter)} to other nodes{beyond}; "
        f"outside the hook: {mb(outside.buffers_bytes_per_step)} of buffers per step, "
        f"{mb(outside.start_up_broadcast_bytes)} at start-up",
    ]


@dataclass(frozen=True)
class ReportTable:
    """A table of the report.

    headings: may have several lines.
    left: number of columns with text, which come first.
    """

    title: str
    headings: tuple[str, ...]
    rows: list[list[str]]
    left: int


def latest_ranks(report: Report, most: int) -> list[RankTimes]:
    """Return up to `most` of the latest ranks, in rank order."""
    latest = sorted(report.analysis.ranks, key=lambda rank: -rank.late_us)[:most]
    return sorted(latest, key=lambda rank: rank.rank)


def ranks(report: Report, most: int = _MOST_RANKS) -> ReportTable:
    """Return the table with up to `most` of the latest ranks."""
    found, shown = report.analysis, latest_ranks(report, most)
    rows = [_rank_row(str(rank.rank), str(rank.node), rank.times, rank) for rank in shown]
    rows.append(_rank_row("mean", "", found.mean, None))
    headings = (
        "rank",
        "node",
        "step",
        "compute",
        "hidden\nwaiting",
        "hidden\ntransfer",
        "exposed\nwaiting",
        "exposed\ntransfer",
        "late",
    )
    left_out = len(found.ranks) - len(shown)
    title = "Ranks, ms" + (f" (the {len(shown)} latest; {left_out} more)" if left_out else "")
    return ReportTable(title, headings, rows, 1)


def _rank_row(name: str, node: str, times: StepBreakdown, rank: RankTimes | None) -> list[str]:
    figures = (
        times.step_us,
        times.compute_us,
        times.hidden_waiting_us,
        times.hidden_transfer_us,
        times.exposed_waiting_us,
        times.exposed_transfer_us,
    )
    return [name, node, *map(_ms, figures), "" if rank is None else f"{rank.late_us / 1000:+.2f}"]


def messages(report: Report) -> ReportTable:
    """Return the table of the messages of a step."""
    found = report.analysis.messages
    used = [stage for stage in STAGES if any(message.stages_us[stage] for message in found)]
    predicted = report.predicted_finish_us or [None] * len(found)
    rows = [
        [
            numbers(message.buckets),
            _shortened(message.label),
            f"{message.nbytes / 1e6:.3g}",
            _ms(message.ready_us),
            _ms(message.queue_us),
            *(_ms(message.stages_us[stage]) for stage in used),
            *(_ms(time_us) for time_us in (message.finished_us, predicted_us) if time_us is not None),
        ]
        for message, predicted_us in zip(found, predicted, strict=True)
    ]
    last = ("end",) if report.predicted_finish_us is None else ("end", "plan")
    headings = ("buckets", "parameters", "MB", "ready", "queue", *used, *last)
    return ReportTable("Messages in the order of the lane, ms, mean over ranks", headings, rows, 2)


def _wrapped(lines: Sequence[str]) -> list[str]:
    return [line for text in lines for line in wrap(text, WIDTH, subsequent_indent="  ")]


def words(report: Report) -> list[str]:
    """Return the meaning of the words in the tables, a line each."""
    predicted = ["plan: the predicted end."] if report.predicted_finish_us else []
    return [
        *predicted,
        "step: from the end of the last message to the end of the next step's. compute: until the last gradient.",
        "hidden: communication while gradients are computed. exposed: communication after the last gradient.",
        "waiting: this rank has started a message, another of its ranks has not. transfer: the rest.",
        "late: delay of this rank's gradients behind the median of the other ranks, at its worst bucket.",
        "ready, end: from the start of the step. queue: behind other messages. local: packing, compressing, adding.",
        "intra, inter, world: collectives inside nodes, between nodes, over all ranks at once.",
        "Means over the half of the steps whose length is nearest to the median; late: median over all.",
        f"Uncertainty of the ranks' clocks against the first rank's, when compared: {report.uncertainty_us:.0f} us.",
    ]


def numbers(buckets: Sequence[int]) -> str:
    """Return bucket numbers in short form: 0-3,7."""
    runs: list[list[int]] = []
    for number in buckets:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _hidden_percent(times: StepBreakdown) -> str:
    return f"{100 * times.hidden_us / times.communication_us:.0f} %" if times.communication_us else "nothing"


def _shortened(label: str) -> str:
    """Return a label whose long names keep only their ends, the more specific part."""
    names = label.split(" .. ")
    return " .. ".join(name if len(name) <= _LONGEST_NAME else "..." + name[3 - _LONGEST_NAME :] for name in names)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _ms(time_us: float) -> str:
    return f"{time_us / 1000:.2f}"


def mb(nbytes: int) -> str:
    """Return bytes as text in MB."""
    return f"{nbytes / 1e6:.3g} MB"
