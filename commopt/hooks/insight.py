"""Where the time went: the recordings of all ranks as a timeline, and a report on it."""

from __future__ import annotations

from pathlib import Path

from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.errors import ConfigurationError
from commopt.groups import WireBytes, broadcast_bytes
from commopt.lanes import LaneClient
from commopt.recording import Recorder
from commopt.schedule import Plan
from commopt.timeline import Report, Timeline, TrafficOutside, draw, gather, report, write_trace


def timeline_of(recorder: Recorder, client: LaneClient, trace: str | Path | None, plot: str | Path | None) -> Timeline:
    """Return what all ranks have recorded; the first of them also writes a trace and draws a picture. Collective.

    Raises ConfigurationError, on every rank, when nothing was recorded or a file could not
    be written.
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
    problem = _write(timeline, trace, plot).encode() if team.rank == 0 else None
    heard: list[bytes] = []
    client.run(lambda: heard.append(broadcast_bytes(team, problem, 0)), "outcome of writing the timeline").wait()
    if heard[0]:
        raise ConfigurationError(heard[0].decode())
    return timeline


def _write(timeline: Timeline, trace: str | Path | None, plot: str | Path | None) -> str:
    """Write what is asked for; return what went wrong, whatever it is: the other ranks wait to hear of it."""
    try:
        if trace is not None:
            write_trace(timeline, trace)
        if plot is not None:
            draw(timeline, plot)
    except ConfigurationError as error:
        return str(error)
    except OSError as error:
        path = error.filename or trace or plot
        return f"{path} cannot be written: {error.strerror}; pass another file, or make room for it"
    except Exception as error:
        return f"the timeline could not be written: {error!r}"
    return ""


def report_on(timeline: Timeline, sent: WireBytes, steps: int, ddp: TorchDDP | None, plan: Plan | None) -> Report:
    """Return the report of a timeline; `sent` in `steps` steps by this rank, both since it began."""
    per_step = WireBytes(sent.intra // max(steps, 1), sent.inter // max(steps, 1))
    outside = TrafficOutside() if ddp is None else outside_of(ddp)
    if plan is None or plan.predicted is None:
        return report(timeline, per_step, outside, None if plan is None else plan.origin)
    finish_us = list(plan.predicted.group_finish_us)
    messages = len(timeline.steps[-1][0].messages)
    what = f"{len(plan.groups)} buckets, {plan.origin}"
    if messages != len(finish_us):  # DDP's own buckets do not let it be followed to the letter
        return report(timeline, per_step, outside, what)
    return report(timeline, per_step, outside, what, plan.predicted.exposed_us, finish_us)


def outside_of(ddp: TorchDDP) -> TrafficOutside:
    """Return what DDP itself broadcasts from rank 0: everything when it is made, buffers before each forward."""
    buffers = sum(buffer.nbytes for buffer in ddp.modules_buffers) if ddp.broadcast_buffers else 0
    state = [*ddp.module.parameters(), *ddp.module.buffers()]
    return TrafficOutside(sum(tensor.nbytes for tensor in state), buffers)
