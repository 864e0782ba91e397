# SPDX-License-Identifier: Apache-2.0
"""Records some steps of a user's script with stock DDP's average, and stops it inside its process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.attached.insight import timeline_of
from commopt.doctor.verdict.facts import Training
from commopt.doctor.verdict.measure import Found
from commopt.errors import ConfigurationError
from commopt.hooks import CommState
from commopt.run.models import Models, watching
from commopt.run.recorded import waited_us
from commopt.run.script import Choice, Script, ended_well
from commopt.simulate import Parameter, Workload
from commopt.timeline import Timeline, analyse

LEAST_STEPS, MOST_STEPS = 6, 24
"""That are recorded; fewer than the first tell no late rank from a disturbed one."""

Say = Callable[[str], None]


class Enough(BaseException):
    """Ends the script on all ranks before the same forward; no script catches it by mistake."""


class _Recording(Models):
    """Attaches stock's average to every model, and records the first one that takes steps."""

    def __init__(self, found: Found, budget_s: float) -> None:
        super().__init__(Choice.read("flat", ["record=True", "plan=ddp"]))
        self._found = found
        self._budget_s = budget_s
        self._begun = time.monotonic()
        self._last_step = 0
        self._waited_before_us: float | None = None
        self._farthest: TorchDDP | None = None  # held, since the script's end may be that of its models

    def before_forward(self, model: nn.Module) -> None:
        """Attach, and after enough steps read them and end the script."""
        super().before_forward(model)
        if not isinstance(model, TorchDDP) or not torch.is_grad_enabled():
            return
        state, most = self._state_of(model), self._steps_of(self._farthest)
        if state is None:
            return
        steps = state._registration.steps
        if most <= steps and most < LEAST_STEPS:
            self._farthest = model
        if steps < LEAST_STEPS:
            return
        if not self._last_step:  # agreed once: a meeting in every step would be part of what is recorded
            spent_s = time.monotonic() - self._begun
            affordable = int(steps * min(self._budget_s / max(spent_s, 1e-3), MOST_STEPS / steps))
            self._begun, self._waited_before_us = time.monotonic(), waited_us()
            answers = state.membership.exchange("steps to record", last=max(affordable, steps + 1))
            self._last_step = min(answer["last"] for answer in answers)
        if steps >= self._last_step:
            self._read(state, model)
            raise Enough

    def average(self) -> None:
        """Read what was recorded before the script ends its process group, and end it here if that is enough."""
        model, state = self._farthest, self._state_of(self._farthest)
        if model is None or state is None or not state.membership.alive:
            return
        if state._registration.steps >= LEAST_STEPS:
            self._read(state, model)
            raise Enough

    def _busy(self) -> float | None:
        """Return the share of the recorded time in which a program of this host waited for a CPU."""
        waited, spent_s = waited_us(), time.monotonic() - self._begun
        if waited is None or self._waited_before_us is None or spent_s <= 0:
            return None
        return min((waited - self._waited_before_us) / (spent_s * 1e6), 1.0)

    def _state_of(self, model: TorchDDP | None) -> CommState | None:
        states = (each() for each in self._states if model is not None)
        return next((one for one in states if one is not None and one._registration.model() is model), None)

    def _steps_of(self, model: TorchDDP | None) -> int:
        state = self._state_of(model)
        return 0 if state is None else state._registration.steps

    def _read(self, state: CommState, model: TorchDDP) -> None:
        timeline = timeline_of(state._registration, lambda timeline, path: None, None, "doctor --measure --script")
        name = type(model.module).__name__
        training = training_of(timeline, name)
        answers = state.membership.exchange("programs that wait for a CPU", share=self._busy())
        busy = {rank: answer["share"] for rank, answer in zip(state.membership.ranks, answers, strict=True)}
        self._found.add(training=replace(training, late_host_busy=busy.get(training.late_rank)))
        self._found.workload = workload_of(timeline, model.module, name)


def script_of(words: Sequence[str]) -> Script:
    """Return the script of --script. Raises ConfigurationError when none is named, or there is no such file."""
    module = words[:1] == ["-m"]
    if len(words) <= module:
        raise ConfigurationError("--script names no script; write --script train.py ARGS as the last option")
    script = Script(words[module], tuple(words[module + 1 :]), module)
    script.require_there()
    return script


def record(words: Sequence[str], found: Found, budget_s: float, say: Say) -> None:
    """Run a script until enough steps were recorded, or the time is over; collective. Its process group stays.

    Raises ConfigurationError if it trains no DDP model for LEAST_STEPS steps. Its own exceptions pass through, but for
    SystemExit without an error.
    """
    script = script_of(words)
    say(f"steps of {Path(script.target).name}")
    recording = _Recording(found, budget_s)
    try:
        try:
            with watching(recording):
                script.run()
        except SystemExit as error:
            if not ended_well(error):
                raise
        recording.average()
    except Enough:
        return
    raise ConfigurationError(
        f"{script.target} ended before a model of DistributedDataParallel had taken {LEAST_STEPS} steps; "
        f"let it train longer, or pass --model or --params"
    )


def training_of(timeline: Timeline, name: str) -> Training:
    """Return the mean step and the rank that delays the others most."""
    found = analyse(timeline)
    late = next(iter(found.stragglers), None)
    mean = found.mean
    return Training(
        name,
        True,
        mean.step_us / 1e3,
        mean.compute_us / 1e3,
        # Waiting for a slow rank is no communication.
        min(found.last_exposed_us, mean.step_us) / 1e3,
        -1 if late is None else late.rank,
        0.0 if late is None else late.late_us / 1e3,
        note="recorded",
    )


def workload_of(timeline: Timeline, model: nn.Module, name: str) -> Workload:
    """Return the model's gradients with the times at which they were ready, between those of the recorded buckets.

    Gradients become ready in the reverse order of the parameters, as far as DDP's buckets do not say otherwise.
    """
    analysis = analyse(timeline)
    ready = sorted((bucket.ready_us, bucket.nbytes) for bucket in analysis.buckets)
    marks = [(0.0, ready[0][0] * 0.5)]
    for ready_us, nbytes in ready:
        marks.append((marks[-1][0] + nbytes, ready_us))
    gradients, sent = [], 0.0
    for parameter_name, parameter in reversed(list(model.named_parameters())):
        if not parameter.requires_grad:
            continue
        sent += parameter.numel() * parameter.itemsize
        part = Parameter(parameter_name, tuple(parameter.shape))
        gradients.append((part, _between(marks, sent), parameter.dtype))
    return Workload.of(name, gradients, 0, f"recorded, {median(at for at, _ in ready) / 1e3:.3g} ms to a usual bucket")


def _between(marks: Sequence[tuple[float, float]], sent: float) -> float:
    """Return the time at which so many bytes were ready, on the line through the marks."""
    for (before, before_us), (after, after_us) in pairwise(marks):
        if sent <= after:
            return before_us + (after_us - before_us) * (sent - before) / max(after - before, 1.0)
    return marks[-1][1]
