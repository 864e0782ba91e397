# SPDX-License-Identifier: Apache-2.0
"""When gradients were ready, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from commopt.recording.recorder import Mark, clock_for


class GradientTimes:
    """The times at which gradients were accumulated last before each step's last bucket.

    A gradient hook costs a microsecond or two, so hooks exist only between `start` and `stop`. The parameters hold the
    hooks and these hold this object, so it must not hold the parameters: no collector sees through autograd's side.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_for(device)
        self._handles: list[Any] = []
        self._marks: dict[str, Mark] = {}
        self._steps: dict[int, dict[str, Mark]] = {}

    def start(self, parameters: Mapping[str, Tensor]) -> None:
        """Begin to take times of `parameters`, except those that are frozen now."""
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._marker(name)))

    def _marker(self, name: str) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            if not self._clock.is_capturing():
                self._marks[name] = self._clock.mark()

        return note

    def end_step(self, step: int) -> None:
        """Note that all gradients of `step` are there; a parameter without a time has none in this step."""
        if self._handles:
            self._steps[step], self._marks = self._marks, {}

    def stop(self) -> None:
        """Remove the hooks, and forget the times."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._steps = {}

    def times_us(self) -> dict[int, dict[str, float]]:
        """Return the times by step and name, in microseconds; waits for the device."""
        steps = {step: marks for step, marks in self._steps.items() if marks}
        times = self._clock.times_us([list(marks.values()) for marks in steps.values()])
        return {step: dict(zip(steps[step], values, strict=True)) for step, values in zip(steps, times, strict=True)}
