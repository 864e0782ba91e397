# SPDX-License-Identifier: Apache-2.0
"""Figures of the steps under way for TensorBoard, W&B, a CSV file and whatever else writes: CommState.log_to."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commopt.attached.insight import report_on
from commopt.attached.registration import Registration
from commopt.command_line import require_writable
from commopt.document import require_whole
from commopt.errors import ConfigurationError
from commopt.groups.agreement import require_equal
from commopt.schedule import Plan
from commopt.schedule.reducer import is_capturing
from commopt.timeline import Report, Timeline, gather

_log = logging.getLogger("commopt")

_LATEST_STEPS = 8  # enough for medians, and a message of some kilobytes
# By name, what of StepBreakdown and of `stats`; CommState.log_to says what they are.
_TIMES = {
    **{f"{name}_ms": f"{name}_us" for name in ("step", "compute", "exposed", "hidden")},
    "waiting_ms": "exposed_waiting_us",
}
_STATS = ("plan_changes", "residual_norm", "compression_error")
SCALARS = tuple(f"comm/{name}" for name in (*_TIMES, "late_ms", "messages", "intra_bytes", "inter_bytes", *_STATS))


@dataclass(frozen=True)
class Logged:
    """The figures after `step` steps. report: of the last step in `timeline`, None where none was recorded."""

    step: int
    scalars: dict[str, float]
    timeline: Timeline
    report: Report | None


Write = Callable[[Logged], object]


class StepLog:
    """Calls what `make` returns, on the first rank, after every `every`-th step; collective. As CommState.log_to."""

    def __init__(
        self,
        registration: Registration,
        stats: Callable[[], Mapping[str, Any]],
        plan: Callable[[], Plan | None],
        every: int,
        make: Callable[[], Write],
    ) -> None:
        registration.require_open("log_to")
        everyone, problem = registration.everyone, None
        self._write: Write | None = None  # but on the first rank, until it has failed
        try:
            require_whole(every, 1, "log_to: every")
            if everyone.team.rank == 0:
                self._write = make()
        except Exception as error:  # perhaps of this rank alone: the others wait for the news
            problem = error
        answers = registration.client.agree("log_to", problem, every=every).wait()
        require_equal(everyone.ranks, answers, ("every",))
        self._registration = registration
        self._stats = stats
        self._plan = plan
        self._every = every
        self._before = registration.reduced_steps, registration.wire_bytes()
        registration.recorder.record_always()
        if everyone.ranks[0] in registration.recorded_with.team.ranks:  # nobody reads what other shards have recorded
            registration.logs.append(self)

    def __call__(self) -> None:
        """Meet, if it is time for it, and write."""
        registration = self._registration
        if registration.steps % self._every or is_capturing():
            return
        client, recorder = registration.recorded_with, registration.recorder
        # Nothing is lost by waiting: for all that is on the lane before, DDP and FSDP would wait now.
        what = f"log_to after {registration.steps} steps"
        timeline = client.together(what, lambda: gather(client.team, recorder.steps()[-_LATEST_STEPS:]))
        if self._write is None:
            return
        try:
            report = report_on(timeline, registration, self._plan()) if timeline.steps else None
            self._write(Logged(registration.steps, self._scalars(report), timeline, report))
        except Exception:
            step = registration.steps
            _log.warning("log_to: writing failed after step %d, and nothing more is written", step, exc_info=True)
            self._write = None

    def _scalars(self, report: Report | None) -> dict[str, float]:
        (steps, before), sent = self._before, self._registration.wire_bytes()
        self._before = self._registration.reduced_steps, sent
        steps = self._registration.reduced_steps - steps
        found = {**self._stats()}
        found.update(intra_bytes=(sent.intra - before.intra) / steps, inter_bytes=(sent.inter - before.inter) / steps)
        if report is not None:
            analysis = report.analysis
            found |= {name: getattr(analysis.mean, time_us) / 1000 for name, time_us in _TIMES.items()}
            found["late_ms"] = max(rank.late_us for rank in analysis.ranks) / 1000
            found["messages"] = len(analysis.messages)
        known = ((name, found.get(name.partition("/")[2])) for name in SCALARS)
        return {name: float(value) for name, value in known if value is not None}


# ------------------------------------------------------------------------------------------- targets


def writer_for(target: Any) -> Write:
    """Return what writes scalars to `target`, which CommState.log_to lists; raises ConfigurationError for others."""
    if isinstance(target, (str, os.PathLike)):
        return _csv_writer(Path(target))
    if _has(target, "add_scalar"):
        return lambda now: [target.add_scalar(name, value, now.step) for name, value in now.scalars.items()]
    if _has(target, "log_metrics"):
        return lambda now: target.log_metrics(now.scalars, step=now.step)
    if isinstance(target, logging.Logger) or _has(target, "log_dict"):
        raise ConfigurationError(
            f"log_to got a {type(target).__name__}, whose log() takes no dict of scalars; of Lightning's modules and "
            f"Fabric pass the .logger, for others a function of (step, scalars)"
        )
    if _has(target, "log"):
        if _has(target, "define_metric"):  # W&B's own step counts calls of log, and takes none that is lower
            target.define_metric("comm/*", step_metric="comm/step")
        return lambda now: target.log({**now.scalars, "comm/step": now.step})
    if callable(target):
        return lambda now: target(now.step, now.scalars)
    raise ConfigurationError(
        f"log_to got {target!r:.80}, which nothing can be written to; pass a SummaryWriter, a run of W&B, a logger of "
        f"Lightning, a Trainer, a path for a CSV file, or a function of (step, scalars)"
    )


def _has(target: object, name: str) -> bool:
    return callable(getattr(target, name, None))


def _csv_writer(path: Path) -> Write:
    header = ["step", *SCALARS]
    require_writable(path)
    if path.exists():  # of a run that this one continues, or another's
        with path.open(newline="") as file:
            if next(csv.reader(file), header) != header:
                raise ConfigurationError(f"log_to: {path} has other columns than {', '.join(header)}; pass a new file")

    def write(now: Logged) -> None:
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, header)
            if not file.tell():
                writer.writeheader()
            writer.writerow({"step": now.step, **now.scalars})

    return write
