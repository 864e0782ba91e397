# SPDX-License-Identifier: Apache-2.0
"""Where the time went: the recordings of all ranks as a timeline, and a report on it."""

from __future__ import annotations

from pathlib import Path

from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.errors import ConfigurationError
from commopt.groups import WireBytes, broadcast_bytes
from commopt.hooks.registration import Registration
from commopt.lanes import LaneClient
from commopt.recording import Recorder
from commopt.schedule import Plan
from commopt.timeline import Report, Timeline, TrafficOutside, gather, report, write_trace


def timeline_of(recorder: Recorder, client: LaneClient, trace: str | Path | None) -> Timeline:
    """Return what all ranks have recorded; the first of them also writes a trace. Collective.

    Raises ConfigurationError, on every rank, when nothing was recorded or the file could not be written.
    """
    found: list[Timeline] = []
    team = client.team
    client.run(lambda: found.append(gather(team, recorder.steps())), "timeline").wait()
    timeline = found[0]
    if not timeline.steps:
        raise ConfigurationError(
            "no step was recorded yet; train for a few steps with attach(..., record=True) (where there are several "
            "ranks, plan='adaptive' records the steps it measures, from the fourth on)"
        )
    problem, heard = "", list[bytes]()
    try:
        if trace is not None and team.rank == 0:
            write_trace(timeline, trace)
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        reason = getattr(error, "strerror", None) or repr(error)
        problem = f"{trace} cannot be written: {reason}; pass another file, or make room for it"
    client.run(lambda: heard.append(broadcast_bytes(team, problem.encode(), 0)), "outcome of writing the trace").wait()
    if heard[0]:
        raise ConfigurationError(heard[0].decode())
    return timeline


def report_on(timeline: Timeline, registration: Registration, plan: Plan | None) -> Report:
    """Return the report of a timeline, with what this rank of a registration has sent since it began."""
    sent, steps, ddp = registration.wire_bytes(), registration.reduced_steps, registration.model()
    per_step = WireBytes(sent.intra // max(steps, 1), sent.inter // max(steps, 1))
    outside = TrafficOutside() if ddp is None else outside_of(ddp)
    if plan is None or plan.predicted is None:
        return report(timeline, per_step, outside, None if plan is None else plan.origin)
    what, finish_us = f"{len(plan.groups)} buckets, {plan.origin}", list(plan.predicted.group_finish_us)
    if len(timeline.steps[-1][0].messages) != len(finish_us):  # DDP's own buckets do not let it be followed exactly
        return report(timeline, per_step, outside, what)
    return report(timeline, per_step, outside, what, plan.predicted.exposed_us, finish_us)


def outside_of(ddp: TorchDDP) -> TrafficOutside:
    """Return what DDP itself broadcasts from rank 0: everything when it is made, buffers before each forward."""
    buffers = sum(buffer.nbytes for buffer in ddp.modules_buffers) if ddp.broadcast_buffers else 0
    state = [*ddp.module.parameters(), *ddp.module.buffers()]
    return TrafficOutside(sum(tensor.nbytes for tensor in state), buffers)
