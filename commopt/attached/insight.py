# SPDX-License-Identifier: Apache-2.0
"""Where the time went: the recordings of all ranks as a timeline, and a report on it, also as a page."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.aggregate import Aggregator, Compressed, Hierarchical, PowerSGD
from commopt.attached.registration import Registration
from commopt.compress import Cast, Quantize
from commopt.errors import ConfigurationError
from commopt.groups import WireBytes, broadcast_bytes
from commopt.schedule import Plan
from commopt.timeline import Report, Subject, Timeline, TrafficOutside, gather
from commopt.timeline import report as _report


def timeline_of(
    registration: Registration, write: Callable[[Timeline, Path], None], file: str | Path | None, what: str
) -> Timeline:
    """Return what all ranks have recorded; the first of all writes it into `file`, if there is one. Collective.

    what: the call that was made, for messages. Raises ConfigurationError, on every rank, when nothing was recorded or
    the file could not be written, and MismatchError when not all ranks have made this call.
    """
    registration.require_open(what)
    found: list[Timeline] = []
    client, recorder, all_ranks = registration.recorded_with, registration.recorder, registration.client
    all_ranks.agree(f"{what} after {registration.steps} steps").wait()
    client.run(lambda: found.append(gather(client.team, recorder.steps())), what).wait()
    timeline = found[0]
    if not timeline.steps:
        raise ConfigurationError(
            "no step was recorded yet; train for a few steps with attach(..., record=True) (where there are several "
            "ranks, plan='adaptive' records the steps it measures, from the fourth on)"
        )
    problem, heard = "", list[bytes]()
    try:
        if file is not None and all_ranks.team.rank == 0:
            write(timeline, Path(file))
    except Exception as error:  # whatever it is, the other ranks wait for the news
        reason = getattr(error, "strerror", None) or repr(error)
        problem = f"{file} cannot be written: {reason}; pass another file, or make room for it"
    say = partial(broadcast_bytes, all_ranks.team, problem.encode(), 0)
    all_ranks.run(lambda: heard.append(say()), "outcome of writing it").wait()
    if heard[0]:
        raise ConfigurationError(heard[0].decode())
    return timeline


def report_on(timeline: Timeline, registration: Registration, plan: Plan | None) -> Report:
    """Return the report of a timeline, with what this rank of a registration sends in a step, past a dense start."""
    ddp = registration.model()
    per_step = registration.usual_bytes() or WireBytes()
    outside = TrafficOutside() if ddp is None else outside_of(ddp)
    report = partial(_report, subject=subject_of(registration, plan))
    if plan is None or plan.predicted is None:
        return report(timeline, per_step, outside, None if plan is None else plan.origin)
    what, finish_us = f"{len(plan.groups)} buckets, {plan.origin}", list(plan.predicted.group_finish_us)
    if len(timeline.steps[-1][0].messages) != len(finish_us):  # DDP's own buckets do not let it be followed exactly
        return report(timeline, per_step, outside, what)
    return report(timeline, per_step, outside, what, plan.predicted.exposed_us, finish_us)


# What an advice may name, by the presets' names; the least loss first.
_OTHERS: dict[str, Aggregator] = {
    "hierarchical": Hierarchical(),
    "hierarchical_bf16": Hierarchical(inter=Compressed(Cast(torch.bfloat16), feedback=None)),
    "hierarchical_quantized": Hierarchical(inter=Compressed(Quantize())),
    "hierarchical_quantized:bits=4": Hierarchical(inter=Compressed(Quantize(bits=4))),
    "hierarchical_powersgd": Hierarchical(inter=PowerSGD()),
}


def subject_of(registration: Registration, plan: Plan | None) -> Subject:
    """Return what a report is of, and what other strategies would send to other nodes for the same buffers."""
    numel = sum(registration.numels.values())
    strategy = registration.aggregator_name
    if plan is not None and plan.strategy not in (None, strategy):
        strategy = f"{strategy}, now {plan.strategy}"
    others = {}
    for name, aggregator in _OTHERS.items():
        usual = registration.usual_bytes(aggregator) if _can(aggregator, registration) else None
        if usual is not None:
            others[name] = usual.inter
    when = datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    return Subject(registration.title, numel, strategy, when, others)


def _can(aggregator: Aggregator, registration: Registration) -> bool:
    try:
        aggregator.check(registration.recorded_with.team)
    except ConfigurationError:
        return False
    return True


def outside_of(ddp: TorchDDP) -> TrafficOutside:
    """Return what DDP itself broadcasts from rank 0: everything when it is made, buffers before each forward."""
    buffers = sum(buffer.nbytes for buffer in ddp.modules_buffers) if ddp.broadcast_buffers else 0
    state = [*ddp.module.parameters(), *ddp.module.buffers()]
    return TrafficOutside(sum(tensor.nbytes for tensor in state), buffers)
