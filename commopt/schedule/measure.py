# SPDX-License-Identifier: Apache-2.0
"""When gradients were ready and messages ran, in a window of steps: of one rank, then of the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from commopt.groups import Team, gather_bytes
from commopt.recording import StepRecord
from commopt.schedule.plan import Unit

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepTable:
    """The latest times over the ranks, a row for each step, in microseconds on one clock; NaN where no rank has one.

    A message could start on a rank when its last gradient was ready and the message before it had finished there.

    begin_us: when the step before was reduced.
    compute_end_us: when the last gradient was ready.
    started_us: when each message could start on the last rank, in the order of the lane.
    finished_us: when each message finished, in the order of the lane.
    ready_us: when each unit was ready.
    """

    begin_us: Times  # [steps]
    compute_end_us: Times  # [steps]
    started_us: Times  # [steps, messages]
    finished_us: Times  # [steps, messages]
    ready_us: Times  # [steps, units]

    def table(self) -> Times:
        """Return all columns side by side."""
        columns = [self.begin_us[:, None], self.compute_end_us[:, None], self.started_us, self.finished_us]
        return np.concatenate([*columns, self.ready_us], axis=1)

    @classmethod
    def of_table(cls, table: Times, messages: int) -> StepTable:
        """Take the columns of `table` apart."""
        started, finished, ready = np.split(table[:, 2:], [messages, 2 * messages], axis=1)
        return cls(table[:, 0], table[:, 1], started, finished, ready)


def own_times(
    records: Mapping[int, StepRecord],
    ready_us: Mapping[int, Mapping[str, float]],
    steps: Sequence[int],
    units: Sequence[Unit],
    messages: int,
) -> StepTable:
    """Return this rank's own times of `steps`, on its own clock.

    A unit is ready with the last of its parameters. A step is NaN throughout if it was not recorded, or had other
    messages than the last one.

    records: the recorded steps, and the one before the first.
    ready_us: by step and parameter.
    messages: their number in the last step.
    """
    table = np.full((len(steps), 2 + 2 * messages + len(units)), np.nan)
    last = records.get(steps[-1])
    if last is None or len(last.messages) != messages:
        return StepTable.of_table(table, messages)
    for row, step in enumerate(steps):
        record, before = records.get(step), records.get(step - 1)
        if record is None or before is None or record.layout != last.layout:
            continue
        known = ready_us.get(step, {})
        bucket_us = {bucket.number: bucket.ready_us for bucket in record.buckets}
        finished_us = [message.finished_us for message in record.messages]
        message_us = [max(bucket_us[number] for number in message.buckets) for message in record.messages]
        table[row] = [
            max(message.finished_us for message in before.messages),
            record.compute_end_us,
            *np.maximum(message_us, [0.0, *finished_us[:-1]]),
            *finished_us,
            *(max((known.get(name, np.nan) for name in unit.names), default=np.nan) for unit in units),
        ]
    return StepTable.of_table(table, messages)


def latest(team: Team, own: StepTable) -> StepTable:
    """Return the latest times over all ranks; collective, on a lane.

    Only the team's first rank gets those of all; the others get the latest of some. The latest times count because a
    collective can begin only when the last rank is ready for it.
    """
    from commopt.timeline import measure_offsets

    table = own.table() + measure_offsets(team).offset_us[team.rank]
    for level in (team,) if team.intra is None else (team.intra, team.inter):
        if level is not None:
            parts = gather_bytes(level, table.tobytes())
            table = np.fmax.reduce([np.frombuffer(part).reshape(table.shape) for part in parts])
    times = StepTable.of_table(table, own.started_us.shape[1])
    # A gradient that no rank has used in a step is there from the start, for DDP.
    unused = np.isnan(times.ready_us)
    return replace(times, ready_us=np.where(unused, times.begin_us[:, None], times.ready_us))
