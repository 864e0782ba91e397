# SPDX-License-Identifier: Apache-2.0
"""What one method takes for whole steps of one model; its records, their file and the table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bench.compressors.baselines import METHODS
from bench.compressors.lone_hook import in_backward
from bench.compressors.methods import Gradients, Method, Start
from bench.compressors.profiled import Profile, profile_of
from bench.document import table
from bench.gpu_memory import peak_nbytes, start_counting
from bench.output import print_rows, write_lines, written_by
from bench.replay import replay
from commopt.display import significant
from commopt.feedback import Layout

_WARM_UP_STEPS = 6  # buckets are captured in the third step that is like the others, and some are not
_REHEARSAL = (Layout.of_parameters([("weight", (512, 512)), ("bias", (512,))]),)
_CYCLES_PER_S = 2e9  # of a GPU that waits: at least as many as it makes
_HOLD_FACTOR = 1.5  # of the host's time
_QUEUED_STEPS = 3  # of which one may be unlike the others, and not replayed


class TooSlowError(Exception):
    """The steps before those that count have taken all the time there was."""


@dataclass(frozen=True)
class Measurement:
    """Of one method on one model.

    median_ms, best_ms: by the device's clock, from an idle device on. host_ms: until the last kernel of a step was
    launched, median; on a CPU all of the step. copy_ms: what a copy of all gradients took before each step, median.
    peak_bytes: allocated at most beyond the gradients, residuals and all that is kept included; None on a CPU, which
    does not count it.
    device_ms: by the device's clock where it finds all of a step in its queue; None where the host waits for it, and on
    a CPU. profile: None on a CPU. replay, replayed: as of Method.
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
    buckets: int = 1
    device_ms: float | None = None
    profile: Profile | None = None
    replay: bool | None = None
    replayed: int = 0

    @property
    def host_us_per_bucket(self) -> float:
        """Microseconds of the host that a bucket takes."""
        return 1000 * self.host_ms / self.buckets


def measure(method: Method, gradients: Gradients, steps: int, limit_s: float) -> Measurement:
    """Time up to `steps` steps, as many as begin within `limit_s` seconds, but one at least.

    Raises TooSlowError when the limit is over before the first of them.
    """
    with replay(method.replay is not False):
        return _measure(method, gradients, steps, limit_s)


def _measure(method: Method, gradients: Gradients, steps: int, limit_s: float) -> Measurement:
    device = gradients.device
    _warm_up(method, Gradients("rehearsal", _REHEARSAL, device), inf)  # libraries are loaded, kernels compiled
    before = start_counting(device)
    deadline_s = perf_counter() + limit_s
    start = _warm_up(method, gradients, deadline_s)
    found: list[tuple[float, float, float]] = []
    while len(found) < steps and not (found and perf_counter() > deadline_s):
        found.append(_step_ms(start, gradients))
    taken_ms, host_ms, copy_ms = zip(*found, strict=True)
    peak = peak_nbytes(device, before)
    on_gpu = device.type == "cuda"
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
        buckets=len(gradients.buffers),
        device_ms=_device_ms(start, gradients, median(host_ms)) if on_gpu else None,
        profile=_profiled(start, gradients) if on_gpu else None,
        replay=method.replay,
        replayed=method.replayed(),
    )


def _warm_up(method: Method, gradients: Gradients, deadline_s: float) -> Start:
    """Take the steps that do not count, a bucket at a time."""
    start, count = method.enter(gradients), len(gradients.buffers)
    for step in range(method.lead_steps + _WARM_UP_STEPS):
        gradients.renew()
        for number in range(count):
            _average(start, [number])
            _finish(gradients.device)
            if perf_counter() > deadline_s:
                raise TooSlowError(f"no time left after bucket {number + 1} of {count} of step {step + 1}")
    return start


def _average(start: Start, numbers: Sequence[int]) -> None:
    """Average some buckets as DDP does: begun inside a backward, and waited for at its end."""
    waits: list[Callable[[], object]] = []
    in_backward(lambda: waits.extend(start(number) for number in numbers))
    for wait in waits:
        wait()


def _step_ms(start: Start, gradients: Gradients) -> tuple[float, float, float]:
    """Return how long a step took, by the clock of the device, how long the host was at it, and a copy before it."""
    numbers = range(len(gradients.buffers))
    if gradients.device.type != "cuda":
        before_s = perf_counter()
        gradients.renew()
        begun_s = perf_counter()
        for number in numbers:
            _average(start, [number])  # not all at once: hooks wait in gloo's threads, of which there are two
        taken_ms = 1000 * (perf_counter() - begun_s)
        return taken_ms, taken_ms, 1000 * (begun_s - before_s)
    before, copied, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    before.record()
    gradients.renew()
    copied.record()
    _finish(gradients.device)
    begun_s = perf_counter()
    begin.record()
    _average(start, numbers)
    end.record()
    host_ms = 1000 * (perf_counter() - begun_s)
    end.synchronize()
    return float(begin.elapsed_time(end)), host_ms, float(before.elapsed_time(copied))


def _device_ms(start: Start, gradients: Gradients, host_ms: float) -> float | None:
    """Return the median of what steps take the device by itself; None where the host waits for it in most."""
    found = [_queued_ms(start, gradients, host_ms) for _ in range(_QUEUED_STEPS)]
    queued = [each for each in found if each is not None]
    return median(queued) if 2 * len(queued) > len(found) else None


def _queued_ms(start: Start, gradients: Gradients, host_ms: float) -> float | None:
    """Return what a step takes the device once the host has queued all of it; None where the host waits for it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    gradients.renew()
    _finish(gradients.device)
    torch.cuda._sleep(int(_HOLD_FACTOR * host_ms * _CYCLES_PER_S / 1000))
    begin.record()
    _average(start, range(len(gradients.buffers)))
    queued = not begin.query()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) if queued else None


def _profiled(start: Start, gradients: Gradients) -> Profile:
    gradients.renew()
    _finish(gradients.device)

    def step() -> None:
        _average(start, range(len(gradients.buffers)))
        _finish(gradients.device)

    return profile_of(step)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    target = beside.target if found.device == "cuda" and found.replay is not False else None
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
        split = any(row.get("profile") for row in steps)  # else the file is of before steps were split
        lines = [
            [
                row["model"],
                f"`{row['method']}`{', no replay' if row.get('replay') is False else ''}",
                significant(row["median_ms"], 2),
                *([significant(row["host_ms"], 2)] if on_gpu else []),
                *(_split(row) if split else []),
                *([f"{row['peak_bytes'] / _MIB:.0f}"] if on_gpu else []),
                f"{row['median_ms'] / row['copy_ms']:.1f}",
                f"{row['times_as_fast']:.1f}" if "times_as_fast" in row else "-",
            ]
            for row in steps
        ]
    more = [*(["host ms"] if on_gpu else []), *(_SPLIT if split else []), *(["peak MiB"] if on_gpu else [])]
    return table(["model", "method", "ms", *more, "copies", "times as fast as torch's hook"], lines)


_SPLIT = ["host us a bucket", "device ms", "launches", "replayed"]


def _split(row: dict[str, Any]) -> list[str]:
    device_ms, profile = row["device_ms"], row["profile"]
    return [
        f"{1000 * row['host_ms'] / row['buckets']:.0f}",
        "-" if device_ms is None else significant(device_ms, 2),
        "-" if profile is None else str(profile["launches"]),
        str(row["replayed"]) if row["replay"] else "",
    ]


def print_table(title: str, found: Sequence[Measurement], failed: Sequence[Failure]) -> None:
    """Print a row for each measurement of a model, and under them what could not be measured."""
    headings = ["method", "ms", "copies", "best ms", "host ms", "us /bucket", "device ms", "launches"]
    headings += ["peak MiB", "payload MiB", "times as fast as"]
    rows = [
        [
            f"{each.method}, no replay" if each.replay is False else each.method,
            f"{each.median_ms:.2f}",
            f"{each.median_ms / each.copy_ms:.1f}",
            f"{each.best_ms:.2f}",
            f"{each.host_ms:.2f}",
            f"{each.host_us_per_bucket:.0f}",
            "-" if each.device_ms is None else f"{each.device_ms:.2f}",
            "-" if each.profile is None else str(each.profile.launches),
            "-" if each.peak_bytes is None else f"{each.peak_bytes / _MIB:.0f}",
            f"{each.payload_bytes / _MIB:.2f}",
            str(compare(each, found) or ""),
        ]
        for each in found
    ]
    missing = [f"{each.method}: {each.reason}" for each in failed]
    print_rows(title, headings, rows, "\n".join(missing))
