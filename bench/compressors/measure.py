"""What one contender takes for whole steps of one model: time, the host's part of it, and memory."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from math import inf
from statistics import median
from time import perf_counter

import torch

from bench.compressors.contender import Contender, Start
from bench.compressors.gradients import Gradients
from commopt.feedback import Layout

_WARM_UP_STEPS = 2  # alternating PowerSGD refreshes its two factors in turns
_REHEARSAL = (Layout.of_parameters([("weight", (512, 512)), ("bias", (512,))]),)


class TooSlowError(Exception):
    """The steps before those that count have taken all the time there was."""


@dataclass(frozen=True)
class Measurement:
    """Of one contender on one model.

    host_ms: until the last kernel of a step was launched, median; on a CPU all of the step. peak_bytes: allocated at
    most beyond the gradients, residuals and all that is kept included; None on a CPU, which does not count it.
    """

    model: str
    contender: str
    device: str
    steps: int
    median_ms: float
    best_ms: float
    host_ms: float
    peak_bytes: int | None
    payload_bytes: float


def measure(contender: Contender, gradients: Gradients, steps: int, limit_s: float) -> Measurement:
    """Time up to `steps` steps, as many as begin within `limit_s` seconds, but one at least.

    Raises TooSlowError when the limit is over before the first of them.
    """
    device = gradients.device
    _warm_up(contender, Gradients("rehearsal", _REHEARSAL, device), inf)  # libraries are loaded, kernels compiled
    allocated = _start_counting(device)
    deadline_s = perf_counter() + limit_s
    start = _warm_up(contender, gradients, deadline_s)
    taken_ms: list[float] = []
    host_ms: list[float] = []
    while len(taken_ms) < steps and not (taken_ms and perf_counter() > deadline_s):
        step_ms, launch_ms = _step_ms(start, gradients)
        taken_ms.append(step_ms)
        host_ms.append(launch_ms)
    peak = None if allocated is None else torch.cuda.max_memory_allocated(device) - allocated
    return Measurement(
        model=gradients.model,
        contender=contender.name,
        device=device.type,
        steps=len(taken_ms),
        median_ms=median(taken_ms),
        best_ms=min(taken_ms),
        host_ms=median(host_ms),
        peak_bytes=peak,
        payload_bytes=contender.payload_nbytes(gradients),
    )


def _warm_up(contender: Contender, gradients: Gradients, deadline_s: float) -> Start:
    """Take the steps that do not count, a bucket at a time."""
    start, count = contender.enter(gradients), len(gradients.buffers)
    for step in range(contender.lead_steps + _WARM_UP_STEPS):
        gradients.renew()
        for number in range(count):
            start(number)()
            _finish(gradients.device)
            if perf_counter() > deadline_s:
                raise TooSlowError(f"no time left after bucket {number + 1} of {count} of step {step + 1}")
    return start


def _step_ms(start: Start, gradients: Gradients) -> tuple[float, float]:
    """Return how long a step took, by the clock of the device, and how long the host was at it."""
    numbers = range(len(gradients.buffers))
    gradients.renew()
    if gradients.device.type != "cuda":
        begun_s = perf_counter()
        for number in numbers:
            start(number)()  # not all at once: hooks wait in gloo's threads, of which there are two
        taken_ms = 1000 * (perf_counter() - begun_s)
        return taken_ms, taken_ms
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _finish(gradients.device)
    begun_s = perf_counter()
    begin.record()
    for wait in [start(number) for number in numbers]:
        wait()
    end.record()
    host_ms = 1000 * (perf_counter() - begun_s)
    end.synchronize()
    return float(begin.elapsed_time(end)), host_ms


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _start_counting(device: torch.device) -> int | None:
    """Return the bytes allocated now, from where on the peak counts; None where nobody counts them."""
    if device.type != "cuda":
        return None
    gc.collect()  # what the contender before has left
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
