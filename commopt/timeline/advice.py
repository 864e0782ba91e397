# SPDX-License-Identifier: Apache-2.0
"""Advice from a report: rules over its figures."""

from __future__ import annotations

from commopt.timeline.analysis import typical_step
from commopt.timeline.recordings import STAGES, WAITING, Timeline, last_starts_us, stages_us
from commopt.timeline.text import Report, mb

_WORTH_IT = 0.03  # of a step: smaller gains are lost in noise
_MOST = 0.5  # of the exposed communication, or of all transfer
_FEW_HIDDEN = 0.2
_MISPREDICTED = 0.5
_MOST_RANKS = 3

_LESS = 0.8  # of the present bytes: more is no gain
_INSIDE = (
    "inside the nodes, where compression between nodes changes nothing. commopt doctor shows which links GPUs use."
)
_LOCAL = "packing, compressing and adding up. commopt --version says whether compiled kernels do it (docs/install.md)."


def advice(timeline: Timeline, report: Report) -> list[str]:
    """Return advice in sentences, the most certain first; at least one."""
    found, times = report.analysis, report.analysis.mean
    said = [
        f"{straggler}. The others wait for it for {straggler.late_us / times.step_us:.0%} of a step, and no strategy "
        f"changes that: check its data, its processor and its clock first."
        for straggler in found.stragglers[:_MOST_RANKS]
    ]
    exposed = times.exposed_us / times.step_us
    if exposed < _WORTH_IT:
        return [*said, f"Exposed communication is {exposed:.1%} of a step: nothing to gain. Leave it as it is."]
    without = f"{times.compute_us / 1000:.1f} ms instead of {times.step_us / 1000:.1f} ms, {exposed:.0%} less"
    said.append(f"Without exposed communication a step would take {without}. No strategy can gain more.")
    waiting = times.exposed_waiting_us / times.exposed_us
    if waiting > _MOST:
        said.append(f"{waiting:.0%} of the exposed time is waiting for slower ranks, not communication.")
        if not found.stragglers:
            said.append("No rank is late in every step: check for uneven batches and for other programs.")
        return said
    transfer_us = _transfer_us(timeline)
    most = max(transfer_us, key=lambda stage: transfer_us[stage])
    if transfer_us[most] > _MOST * sum(transfer_us.values()):
        share, nodes = transfer_us[most] / sum(transfer_us.values()), len({rank.node for rank in found.ranks})
        less = smaller_strategies(report)
        where = {"inter": f"between nodes. {less}", "intra": _INSIDE, "local": _LOCAL}
        over_all = f"one collective over all ranks of {nodes} nodes. {less}" if nodes > 1 else _INSIDE
        said.append(f"{share:.0%} of the transfer is {where.get(most, over_all)}")
    if len(found.messages) == 1 and times.hidden_us < _FEW_HIDDEN * times.communication_us:
        said.append(
            "The only message cannot begin before the last gradient. Several messages hide behind backward: use a "
            "smaller bucket_cap_mb in DDP, or plan='adaptive'."
        )
    predicted_us, measured_us = report.predicted_exposed_us, found.last_exposed_us
    if predicted_us is not None and abs(predicted_us - measured_us) > _MISPREDICTED * measured_us:
        said.append(
            f"The plan predicted {predicted_us / 1000:.1f} ms of exposed communication, and {measured_us / 1000:.1f} "
            f"ms are measured: the cost of messages has changed. auto and plan='adaptive' measure again regularly."
        )
    return said


def smaller_strategies(report: Report) -> str:
    """Return a sentence with the strategies that send less to other nodes, and the bytes of each."""
    subject, now = report.subject, report.sent_per_step.inter
    tunes = subject is not None and subject.strategy.startswith("Auto(")
    auto = "" if tunes else ' Or let auto measure: commopt.attach(ddp, "auto:allow=quantized+powersgd").'
    if subject is None or not subject.inter_bytes:
        return f"Send less there.{auto}"
    fewer = {name: nbytes for name, nbytes in subject.inter_bytes.items() if nbytes < _LESS * now}
    if not fewer:
        further = {
            "adam=": "one bit of Adam's directions, for AdamW (docs/adamw.md)",
            "LocalSGD(": "updates every few steps (docs/periodic.md)",
        }
        left = [what for sign, what in further.items() if sign not in subject.strategy]
        down = f"; these send still less: {', '.join(left)}" if left else ""
        return f"No preset sends much less than the present {mb(now)} a step{down}."
    named = ", ".join(f"{name} {mb(nbytes)}" for name, nbytes in fewer.items())
    return f"This rank sends {mb(now)} there in a step. Presets that send less, the most exact first: {named}.{auto}"


def _transfer_us(timeline: Timeline) -> dict[str, float]:
    """Return the time of each stage but waiting in a typical step. Each message counts on a rank that leaves its node.

    The other ranks of its node wait meanwhile.
    """
    step = timeline.steps[typical_step(timeline)]
    rows = zip(step, last_starts_us(step, timeline.nodes), strict=True)
    by_rank = [[stages_us(*each) for each in zip(record.messages, starts, strict=True)] for record, starts in rows]
    leading = [max(same, key=lambda each: each["inter"]) for same in zip(*by_rank, strict=True)]
    return {stage: sum(each[stage] for each in leading) for stage in STAGES if stage != WAITING}
