# SPDX-License-Identifier: Apache-2.0
"""What to try next: rules over what a report has measured, each with its figures."""

from __future__ import annotations

from commopt.timeline.analysis import typical_step
from commopt.timeline.recordings import STAGES, WAITING, Timeline, last_starts_us, stages_us
from commopt.timeline.text import Report, mb

_WORTH_IT = 0.03  # of a step: what could be won below is lost in noise
_MOST = 0.5  # of what is exposed, or of all transfer
_FEW_HIDDEN = 0.2
_MISPREDICTED = 0.5
_MOST_RANKS = 3

_LESS = 0.8  # of the bytes of now: more is no gain
_INSIDE = (
    "inside the nodes, where compression between nodes changes nothing. commopt doctor shows which links GPUs use."
)
_LOCAL = "packing, compressing and adding up. commopt --version says whether compiled kernels do it (docs/install.md)."


def advice(timeline: Timeline, report: Report) -> list[str]:
    """Return what the figures suggest, the most certain first; at least one sentence."""
    found, times = report.analysis, report.analysis.mean
    said = [
        f"{straggler}. The others wait for it, {straggler.late_us / times.step_us:.0%} of a step, and no strategy "
        f"changes that: look at its data, its processor and its clock first."
        for straggler in found.stragglers[:_MOST_RANKS]
    ]
    exposed = times.exposed_us / times.step_us
    if exposed < _WORTH_IT:
        return [*said, f"Exposed communication is {exposed:.1%} of a step: there is nothing to win. Leave it as it is."]
    without = f"{times.compute_us / 1000:.1f} ms instead of {times.step_us / 1000:.1f} ms, {exposed:.0%} less"
    said.append(f"Without exposed communication a step would take {without}. More cannot be won.")
    waiting = times.exposed_waiting_us / times.exposed_us
    if waiting > _MOST:
        said.append(f"{waiting:.0%} of what is exposed is waiting for ranks that are not there yet, not communication.")
        return said if found.stragglers else [*said, "None is late in every step: uneven batches, or other programs?"]
    transfer_us = _transfer_us(timeline)
    most = max(transfer_us, key=lambda stage: transfer_us[stage])
    if transfer_us[most] > _MOST * sum(transfer_us.values()):
        share, nodes = transfer_us[most] / sum(transfer_us.values()), len({rank.node for rank in found.ranks})
        where = {"inter": f"between nodes. {less(report)}", "intra": _INSIDE, "local": _LOCAL}
        over_all = f"one collective over all ranks of {nodes} nodes. {less(report)}" if nodes > 1 else _INSIDE
        said.append(f"{share:.0%} of the transfer is {where.get(most, over_all)}")
    if len(found.messages) == 1 and times.hidden_us < _FEW_HIDDEN * times.communication_us:
        said.append(
            "The one message cannot begin before the last gradient. Several hide behind backward: a smaller "
            "bucket_cap_mb in DDP, or plan='adaptive'."
        )
    predicted_us, measured_us = report.predicted_exposed_us, found.last_exposed_us
    if predicted_us is not None and abs(predicted_us - measured_us) > _MISPREDICTED * measured_us:
        said.append(
            f"The plan expected {predicted_us / 1000:.1f} ms exposed where {measured_us / 1000:.1f} ms are measured: "
            f"what messages cost has changed since. auto and plan='adaptive' measure again from time to time."
        )
    return said


def less(report: Report) -> str:
    """Say what would send less to other nodes than what is in use does, with the bytes of both."""
    subject, now = report.subject, report.sent_per_step.inter
    tunes = subject is not None and subject.strategy.startswith("Auto(")
    auto = "" if tunes else ' Or let auto measure: commopt.attach(ddp, "auto:allow=quantized+powersgd").'
    if subject is None or not subject.inter_bytes:
        return f"Send less there than now.{auto}"
    fewer = {name: nbytes for name, nbytes in subject.inter_bytes.items() if nbytes < _LESS * now}
    if not fewer:
        return (
            f"No preset sends much less than the {mb(now)} a step of now; further down go one bit of Adam's directions "
            f"(docs/adamw.md) and updates every so many steps (docs/periodic.md)."
        )
    named = ", ".join(f"{name} {mb(nbytes)}" for name, nbytes in fewer.items())
    return f"This rank sends {mb(now)} there in a step. Less, the most exact first: {named}.{auto}"


def _transfer_us(timeline: Timeline) -> dict[str, float]:
    """Return how long a typical step was in each stage but waiting: of each message, on a rank that left its node.

    The others of the node wait inside it meanwhile.
    """
    step = timeline.steps[typical_step(timeline)]
    rows = zip(step, last_starts_us(step, timeline.nodes), strict=True)
    by_rank = [[stages_us(*each) for each in zip(record.messages, starts, strict=True)] for record, starts in rows]
    leading = [max(same, key=lambda each: each["inter"]) for same in zip(*by_rank, strict=True)]
    return {stage: sum(each[stage] for each in leading) for stage in STAGES if stage != WAITING}
