"""The steps that are measured, and what was measured in them: in all others there are no hooks and no records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from commopt.bucketing.readiness import Readiness
from commopt.plan import Calendar
from commopt.recording import Recorder, StepRecord

Measured = tuple[Sequence[StepRecord], Mapping[int, Mapping[str, float]]]
"""The steps recorded, and by step and parameter when gradients were ready, in microseconds."""


class Measuring:
    """Switches the recorder and the gradient hooks on and off, as `calendar` has it; steps count from 0.

    record: whether every step is recorded rather than those that are measured.
    """

    def __init__(self, recorder: Recorder, parameters: Mapping[str, Tensor], calendar: Calendar, *, record: bool):
        self.calendar = calendar
        self._recorder, self._parameters, self._record = recorder, parameters, record
        self._readiness: Readiness | None = None
        recorder.enabled = record

    def begin_step(self, step: int) -> None:
        """Record `step` if it is measured or the one before that: the measured ones begin where it ends."""
        if step + 1 >= self.calendar.measure_from:
            self._recorder.enabled = True

    def end_step(self, step: int, device: torch.device) -> None:
        """Note that all gradients of `step` are there, on `device`; take times of the next if it is measured."""
        if self._readiness is not None:
            self._readiness.end_step(step)
        elif self.calendar.measures(step + 1):
            self._readiness = Readiness(device)
            self._readiness.start(self._parameters)

    def reader(self) -> Callable[[], Measured]:
        """Return a function for the lane that reads what was measured up to now; it waits for the device."""
        recorder, readiness = self._recorder, self._readiness
        return lambda: (recorder.steps(), {} if readiness is None else readiness.times_us())

    def stop(self) -> None:
        """Measure no more, until the calendar says so again."""
        self._recorder.enabled = self._record
        if self._readiness is not None:
            self._readiness.stop()
            self._readiness = None

    def start_anew(self, calendar: Calendar) -> None:
        """Forget what was measured, and go by another calendar, which may count steps from another number."""
        self.stop()
        self._recorder.clear()
        self.calendar = calendar
