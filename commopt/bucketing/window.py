"""What the ranks measured in some steps: for each time, that of the last rank, known to the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from commopt.groups import Team, gather_bytes
from commopt.recording import StepRecord
from commopt.timeline import measure_offsets

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Latest:
    """Times of the last rank that knows, one row for each step, NaN where none does; microseconds.

    begin_us: when the step before was reduced. ready_us: a column for each gradient (or bucket).
    started_us, finished_us: a column for each message. It could start when it was ready and the one before was done.
    """

    begin_us: Times  # [steps]
    compute_end_us: Times  # [steps]
    started_us: Times  # [steps, messages]
    finished_us: Times  # [steps, messages]
    ready_us: Times  # [steps, units]


def latest(team: Team, own: Latest) -> tuple[Latest, tuple[float, ...]]:
    """Return the latest times of all ranks, and by how much each rank's backward ends after the first rank's.

    Right on the team's first rank, the others get those of a part. Collective, on a lane. A collective can begin when
    the last rank is ready for it, which is why the latest times count.
    """
    offset_us = measure_offsets(team).offset_us[team.rank]
    columns = [own.begin_us[:, None], own.compute_end_us[:, None], own.started_us, own.finished_us, own.ready_us]
    table = np.concatenate(columns, axis=1) + offset_us
    ends_us = [np.frombuffer(part) for part in gather_bytes(team, table[:, 1].tobytes())]
    for level in (team,) if team.intra is None else (team.intra, team.inter):
        if level is not None:
            parts = gather_bytes(level, table.tobytes())
            table = np.fmax.reduce([np.frombuffer(part).reshape(table.shape) for part in parts])
    begin_us, messages = table[:, 0], own.started_us.shape[1]
    ready_us = table[:, 2 + 2 * messages :]
    # DDP takes a gradient that no rank has used in a step to be there from the start.
    ready_us = np.where(np.isnan(ready_us), begin_us[:, None], ready_us)
    times = Latest(
        begin_us, table[:, 1], table[:, 2 : 2 + messages], table[:, 2 + messages : 2 + 2 * messages], ready_us
    )
    return times, _lateness_us(ends_us)


def _lateness_us(ends_us: Sequence[Times]) -> tuple[float, ...]:
    lateness = [end - ends_us[0] for end in ends_us]
    known = [late[~np.isnan(late)] for late in lateness]
    return tuple(float(np.median(late)) if len(late) else 0.0 for late in known)


def own_times(
    records: Mapping[int, StepRecord],
    ready_us: Mapping[int, Mapping[str, float]],
    steps: Sequence[int],
    units: Sequence[Sequence[str]],
    messages: int,
) -> Latest:
    """Return this rank's own times of `steps`, on its own clock.

    records: the recorded steps, and the one before the first. ready_us: by step and parameter. A unit is ready with the
    last of its parameters. messages: in the last step. A step that was not recorded, or went otherwise than the last,
    is NaN throughout.
    """
    table = Latest(
        np.full(len(steps), np.nan),
        np.full(len(steps), np.nan),
        np.full((len(steps), messages), np.nan),
        np.full((len(steps), messages), np.nan),
        np.full((len(steps), len(units)), np.nan),
    )
    last = records.get(steps[-1])
    if last is None or len(last.messages) != messages:
        return table
    for row, step in enumerate(steps):
        record, before = records.get(step), records.get(step - 1)
        if record is None or before is None or record.layout != last.layout:
            continue
        known = ready_us.get(step, {})
        table.begin_us[row] = max(message.finished_us for message in before.messages)
        table.compute_end_us[row] = record.compute_end_us
        finished_us = [message.finished_us for message in record.messages]
        bucket_us = {bucket.number: bucket.ready_us for bucket in record.buckets}
        message_us = [max(bucket_us[number] for number in message.buckets) for message in record.messages]
        table.started_us[row] = np.maximum(message_us, [0.0, *finished_us[:-1]])
        table.finished_us[row] = finished_us
        table.ready_us[row] = [max((known.get(name, np.nan) for name in names), default=np.nan) for names in units]
    return table
