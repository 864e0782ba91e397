# SPDX-License-Identifier: Apache-2.0
"""What one method takes for whole steps of one model; its records, their file and the table."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bench.compressors.baselines import METHODS
from bench.compressors.methods import Gradients, Method, Start
from bench.document import table
from bench.output import print_rows, write_lines, written_by
from commopt.display import significant
from commopt.feedback import Layout

_WARM_UP_STEPS = 2
_REHEARSAL = (Layout.of_parameters([("weight", (512, 512)), ("bias", (512,))]),)


class TooSlowError(Exception):
    """The steps before those that count have taken all the time there was."""


@dataclass(frozen=True)
class Measurement:
    """Of one method on one model.

    host_ms: until the last kernel of a step was launched, median; on a CPU all of the step. copy_ms: what a copy of all
    gradients took before each step, median. peak_bytes: allocated at
    most beyond the gradients, residuals and all that is kept included; None on a CPU, which does not count it.
    """

    model: str
    method: str
    device: str
    steps: int
    median_ms: float
    best_ms: float
    host_ms: float
    copy_ms: float
    peak_bytes: int | None
    payload_bytes: float


def measure(method: Method, gradients: Gradients, steps: int, limit_s: float) -> Measurement:
    """Time up to `steps` steps, as many as begin within `limit_s` seconds, but one at least.

    Raises TooSlowError when the limit is over before the first of them.
    """
    device = gradients.device
    _warm_up(method, Gradients("rehearsal", _REHEARSAL, device), inf)  # libraries are loaded, kernels compiled
    allocated = _start_counting(device)
    deadline_s = perf_counter() + limit_s
    start = _warm_up(method, gradients, deadline_s)
    found: list[tuple[float, float, float]] = []
    while len(found) < steps and not (found and perf_counter() > deadline_s):
        found.append(_step_ms(start, gradients))
    taken_ms, host_ms, copy_ms = zip(*found, strict=True)
    peak = None if allocated is None else torch.cuda.max_memory_allocated(device) - allocated
    return Measurement(
        model=gradients.model,
        method=method.name,
        device=device.type,
        steps=len(taken_ms),
        median_ms=median(taken_ms),
        best_ms=min(taken_ms),
        host_ms=median(host_ms),
        copy_ms=median(copy_ms),
        peak_bytes=peak,
        payload_bytes=method.payload_nbytes(gradients),
    )


def _warm_up(method: Method, gradients: Gradients, deadline_s: float) -> Start:
    """Take the steps that do not count, a bucket at a time."""
    start, count = method.enter(gradients), len(gradients.buffers)
    for step in range(method.lead_steps + _WARM_UP_STEPS):
        gradients.renew()
        for number in range(count):
            start(number)()
            _finish(gradients.device)
            if perf_counter() > deadline_s:
                raise TooSlowError(f"no time left after bucket {number + 1} of {count} of step {step + 1}")
    return start


def _step_ms(start: Start, gradients: Gradients) -> tuple[float, float, float]:
    """Return how long a step took, by the clock of the device, how long the host was at it, and a copy before it."""
    numbers = range(len(gradients.buffers))
    if gradients.device.type != "cuda":
        before_s = perf_counter()
        gradients.renew()
        begun_s = perf_counter()
        for number in numbers:
            start(number)()  # not all at once: hooks wait in gloo's threads, of which there are two
        taken_ms = 1000 * (perf_counter() - begun_s)
        return taken_ms, taken_ms, 1000 * (begun_s - before_s)
    before, copied, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    before.record()
    gradients.renew()
    copied.record()
    _finish(gradients.device)
    begun_s = perf_counter()
    begin.record()
    for wait in [start(number) for number in numbers]:
        wait()
    end.record()
    host_ms = 1000 * (perf_counter() - begun_s)
    end.synchronize()
    return float(begin.elapsed_time(end)), host_ms, float(before.elapsed_time(copied))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _start_counting(device: torch.device) -> int | None:
    """Return the bytes allocated now, from where on the peak counts; None where nobody counts them."""
    if device.type != "cuda":
        return None
    gc.collect()  # what the method before has left
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


KIND = "compressors"
_MIB = 2**20


@dataclass(frozen=True)
class Failure:
    """Why there is no measurement of a method."""

    model: str
    method: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """A preset beside the hook of torch that does what it does; target, met: None where there is none."""

    beside: str
    times_as_fast: float
    target: float | None
    met: bool | None

    def __str__(self) -> str:
        found = f"{self.times_as_fast:.2f} x {self.beside.removeprefix('torch.')}"
        return found if self.target is None else f"{found} (target {self.target:g}: {'met' if self.met else 'missed'})"


def compare(found: Measurement, among: Sequence[Measurement]) -> Comparison | None:
    """Return how fast a preset is beside torch's hook on the same model; None where nothing is to be compared."""
    beside = METHODS.get(found.method)
    if beside is None:
        return None
    theirs = [each for each in among if (each.model, each.method) == (found.model, beside.hook)]
    if not theirs:
        return None
    times_as_fast = theirs[0].median_ms / found.median_ms
    target = beside.target if found.device == "cuda" else None
    return Comparison(beside.hook, times_as_fast, target, None if target is None else times_as_fast >= target)


def write(path: Path, environment: dict[str, Any], found: Sequence[Measurement], failed: Sequence[Failure]) -> None:
    """Write one JSON object per line, each naming its kind under "record"; a killed writer leaves the old file."""
    records: list[dict[str, Any]] = [{"record": "environment", "kind": KIND, **environment}]
    for each in found:
        comparison = compare(each, found)
        records.append({"record": "step", **asdict(each), **(asdict(comparison) if comparison else {})})
    records += [{"record": "failure", **asdict(each)} for each in failed]
    write_lines(path, records)


def markdown(path: Path) -> str:
    """Return a table of the steps in a file; raises ValueError."""
    with written_by("bench.compressors --json", path):
        _, *rows = (json.loads(line) for line in path.read_text().splitlines())
        steps = [row for row in rows if row["record"] == "step"]
        on_gpu = any(row["device"] == "cuda" for row in steps)
        lines = [
            [
                row["model"],
                f"`{row['method']}`",
                significant(row["median_ms"], 2),
                *([significant(row["host_ms"], 2), f"{row['peak_bytes'] / _MIB:.0f}"] if on_gpu else []),
                f"{row['median_ms'] / row['copy_ms']:.1f}",
                f"{row['times_as_fast']:.1f}" if "times_as_fast" in row else "-",
            ]
            for row in steps
        ]
    more = ["host ms", "peak MiB"] if on_gpu else []
    return table(["model", "method", "ms", *more, "copies", "times as fast as torch's hook"], lines)


def print_table(title: str, found: Sequence[Measurement], failed: Sequence[Failure]) -> None:
    """Print a row for each measurement of a model, and under them what could not be measured."""
    headings = ["method", "ms", "copies", "best ms", "host ms", "peak MiB", "payload MiB", "times as fast as"]
    rows = [
        [
            each.method,
            f"{each.median_ms:.2f}",
            f"{each.median_ms / each.copy_ms:.1f}",
            f"{each.best_ms:.2f}",
            f"{each.host_ms:.2f}",
            "-" if each.peak_bytes is None else f"{each.peak_bytes / _MIB:.0f}",
            f"{each.payload_bytes / _MIB:.2f}",
            str(compare(each, found) or ""),
        ]
        for each in found
    ]
    missing = [f"{each.method}: {each.reason}" for each in failed]
    print_rows(title, headings, rows, "\n".join(missing))
