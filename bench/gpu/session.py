# SPDX-License-Identifier: Apache-2.0
"""Steps on a GPU: run one, judge it, and take all of them, one after the other or in groups."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from threading import Event, Lock
from typing import Any

from bench.gpu.mps import mps
from bench.gpu.parse_results import Parsed, Read, nothing
from bench.gpu.report import FILE, Outcome, Verdict, merged, read, write
from bench.gpu.runner import Ended, Place, environment, run

ARCHIVE = "results.tar.gz"
LEAST_S = 15.0  # with less time left a step is not begun
_WHY_CHARACTERS = 300
_BUSY = ("cudaErrorDevicesUnavailable", "busy or unavailable")
_HOLDERS = re.compile(r"Process \d+ has \S+ \S+ memory in use")


@dataclass(frozen=True)
class Step:
    """A command and its time limit; `Place.filled` fills in placeholders in its words."""

    name: str
    shows: str
    command: tuple[str, ...]
    limit_s: float
    read: Read = nothing
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment."""
    group: str = ""
    """Neighbours of one group are taken at the same time: they time nothing. "": it is taken alone."""
    shares_gpu: bool = False
    """Its ranks, and those of its group, use the GPU at the same time (by MPS), where else they would take turns."""

    @property
    def results(self) -> list[str]:
        """Files that it writes into the folder of results."""
        return [word.removeprefix("{out}/") for word in self.command if word.startswith("{out}/")]


def take(
    step: Step, place: Place, left_s: float, told: Event | None = None, variables: Mapping[str, str] | None = None
) -> Outcome:
    """Run a step in the time that is left, or until `told` is set; never raise for a fault in it.

    variables: of the environment, beside the step's own.
    """
    if left_s < min(LEAST_S, step.limit_s):
        return _outcome(step, place, 0.0, "skipped", f"{max(left_s, 0):.0f} s were left")
    limit_s = min(step.limit_s, left_s)
    for file in step.results:
        (place.out / file).unlink(missing_ok=True)  # of an earlier session
    log = log_of(step.name, place)
    started = time.monotonic()
    try:
        surroundings = {**environment(), **(variables or {}), **step.variables}
        ended = run(place.filled(step.command), surroundings, log, limit_s, told=told)
    except OSError as error:  # a program that is not there
        return _outcome(step, place, time.monotonic() - started, "failed", str(error))
    found, unread = _found(step, place)
    verdict, why = _verdict(ended, limit_s, found.why or _last_line(log), found.why or unread)
    if verdict != "passed" and (busy := busy_device(_lines(log))):
        why = f"{why}; {busy}"
    return _outcome(step, place, ended.seconds, verdict, why, found)


def busy_device(lines: Iterable[str]) -> str | None:
    """Return the line that shows that other processes kept the device busy, None when there is none.

    lines: of a step that fell through. When memory runs out torch names the processes that hold some; ranks of the
    step itself may be among them.
    """
    for line in lines:
        if any(sign in line for sign in _BUSY):
            return f"the device was busy with other processes' work, so take this step again: {line[:_WHY_CHARACTERS]}"
        if "out of memory" in line and (others := _HOLDERS.findall(line)):
            return f"the device's memory ran out while other processes held some of it: {', '.join(others)}"
    return None


def log_of(name: str, place: Place) -> Path:
    """Return where all that a step prints goes."""
    return place.out / f"{name}.log"


def _found(step: Step, place: Place) -> tuple[Parsed, str]:
    """Return the parsed results, or why they cannot be read."""
    try:
        return step.read(place), ""
    except Exception as error:  # whatever a program that was stopped, or is new, has written
        return Parsed(), f"its results cannot be read: {type(error).__name__}: {error}"


def _verdict(ended: Ended, limit_s: float, said: str, wrong: str) -> tuple[Verdict, str]:
    """said: the best explanation of a bad end. wrong: a failure in the results, whatever the exit status."""
    if ended.status is None:
        return "timed out", f"stopped after {limit_s:.0f} s; {said}"
    if ended.status != 0:
        return "failed", f"exit status {ended.status}; {said}"
    return ("failed", wrong) if wrong else ("passed", "")


def _last_line(log: Path) -> str:
    lines = _lines(log)
    return lines[-1][-_WHY_CHARACTERS:] if lines else "it printed nothing"


def _lines(log: Path) -> list[str]:
    return [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]


def _outcome(
    step: Step, place: Place, seconds: float, verdict: Verdict, why: str = "", found: Parsed | None = None
) -> Outcome:
    found = found or Parsed()
    variables = "".join(f"{name}={value} " for name, value in step.variables.items())
    return Outcome(
        name=step.name,
        command=variables + place.shown(step.command),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=round(seconds, 1),
        verdict=verdict,
        why=why,
        tests=found.tests,
        targets=found.targets,
        facts=found.facts,
        table=found.table,
    )


_SHOWN_LINES = 12  # of one that fell through


def session(
    steps: Sequence[Step],
    place: Place,
    limit_s: float | None,
    environment: dict[str, Any],
    order: Sequence[str],
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Take all steps within `limit_s`, write the files after each, and return the outcomes of these steps.

    Steps that follow each other in one group are taken at the same time. Outcomes of other steps that the file has from
    before stay in it; `order` names all that are known.
    """
    file, lock = place.out / FILE, Lock()
    before = read(file)[1] if file.exists() else []
    started, told = clock(), Event()
    outcomes: dict[str, Outcome] = {}

    def one(step: Step, variables: Mapping[str, str]) -> None:
        left_s = float("inf") if limit_s is None else limit_s - (clock() - started)
        outcome = take(step, place, left_s, told, variables)
        if told.is_set():  # it has not ended by itself
            return
        with lock:
            outcomes[step.name] = outcome
            _say(outcome, place)
            known = merged(before, list(outcomes.values()), order)
            facts = next((each.facts for each in known if each.name == "machine"), {})
            write(file, {**environment, **facts}, known)
            pack(place)

    try:
        for group in groups(steps):
            for step in group:
                number = steps.index(step) + 1
                print(f"[{number}/{len(steps)}] {step.name}: {step.shows}", file=sys.stderr, flush=True)
            with _sharing(group) as variables, ThreadPoolExecutor(len(group)) as pool, _ending_all(told):
                for done in [pool.submit(one, step, variables) for step in group]:
                    done.result()
    finally:
        pack(place)
    return [outcomes[step.name] for step in steps]


@contextmanager
def _sharing(group: Sequence[Step]) -> Iterator[Mapping[str, str]]:
    """Yield the variables by which the group's processes share the GPU; where that fails, they take turns."""
    if not all(step.shares_gpu for step in group):
        yield {}
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mps-")))
        variables: Mapping[str, str] = {}
        try:
            variables = stack.enter_context(mps(folder))
        except (OSError, subprocess.SubprocessError) as error:
            print(f"    the ranks take turns on the GPU: {error}", file=sys.stderr, flush=True)
        yield variables


@contextmanager
def _ending_all(told: Event) -> Iterator[None]:
    """Tell the steps under way to end when this one thread is told so."""
    try:
        yield
    except BaseException:
        told.set()
        raise


def groups(steps: Sequence[Step]) -> list[list[Step]]:
    """Return the steps in their order, those together that are neighbours in one group."""
    found: list[list[Step]] = []
    for step in steps:
        if found and step.group and step.group == found[-1][0].group:
            found[-1].append(step)
        else:
            found.append([step])
    return found


def pack(place: Place) -> None:
    """Put all results into one archive; a writer that is killed leaves the old one."""
    packed = place.archive or place.out / ARCHIVE
    unfinished = packed.with_name(f"{packed.name}.unfinished")
    with tarfile.open(unfinished, "w:gz") as archive:
        for file in sorted(place.out.iterdir()):
            if file.is_file() and not file.name.endswith(".unfinished") and file.name != packed.name:
                archive.add(file, file.name)
    unfinished.replace(packed)


def _say(outcome: Outcome, place: Place) -> None:
    """Print how a step ended, and the end of what it printed when that was no good end."""
    log = log_of(outcome.name, place)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    shown = [f"      {line}" for line in lines[-_SHOWN_LINES:]] if outcome.fell_through else []
    why = f": {outcome.why}" if outcome.why else ""
    end = f"    {outcome.name}: {outcome.verdict} in {outcome.seconds:.0f} s{why}"
    print(end, *shown, sep="\n", file=sys.stderr, flush=True)
