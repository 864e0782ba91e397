"""One thing that a session on a GPU does, and what it came to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from bench.gpu.found import Found, Read, nothing
from bench.gpu.mps import shared
from bench.gpu.place import Place, environment
from bench.gpu.record import Outcome, Verdict
from bench.gpu.runner import Ended, run

LEAST_S = 15.0  # with less time left a step is not begun
_WHY_CHARACTERS = 300


@dataclass(frozen=True)
class Step:
    """What to run and for how long at most; words of the command may hold what `Place.filled` fills in."""

    name: str
    shows: str
    command: tuple[str, ...]
    limit_s: float
    read: Read = nothing
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of the environment."""
    missing: Callable[[], str | None] = lambda: None
    """Asked just before: why it cannot run on this machine, None when it can."""
    refusal: str | None = None
    """What the program says on a machine that it cannot serve."""
    ranks: int = 1
    """That share the GPU."""
    beside: str | None = None
    """The step at whose side it runs where it follows that one."""
    part: int = 1
    """What is to be done first, in one call of eight minutes, or second."""

    @property
    def results(self) -> list[str]:
        """Files that it writes into the folder of results."""
        return [word.removeprefix("{out}/") for word in self.command if word.startswith("{out}/")]


def take(step: Step, place: Place, left_s: float) -> Outcome:
    """Run a step in what is left of the time, and never raise for what goes wrong in it."""
    if left_s < min(LEAST_S, step.limit_s):
        return _outcome(step, place, 0.0, "skipped", f"{max(left_s, 0):.0f} s were left")
    if why := step.missing():
        return _outcome(step, place, 0.0, "skipped", why)
    limit_s = min(step.limit_s, left_s)
    for file in step.results:
        (place.files / file).unlink(missing_ok=True)  # what an earlier session left is no result of this one
    log = log_of(step.name, place)
    settings = shared(place) if step.ranks > 1 else {}
    started = time.monotonic()
    try:
        ended = run(place.filled(step.command), {**environment(), **settings, **step.settings}, log, limit_s)
    except OSError as error:  # a program that is not there
        return _outcome(step, place, time.monotonic() - started, "failed", str(error))
    if ended.status is not None and (why := _refusal(step, log)):
        return _outcome(step, place, ended.seconds, "skipped", why)
    found, unread = _found(step, place)
    verdict, why = _verdict(ended, limit_s, found.why or _last_line(log), found.why or unread)
    if place.takes_turns(step.ranks) and _only_late(verdict, found):
        verdict, why = "not judged", f"time-sliced, not judged: {step.ranks} ranks took turns on a GPU; {why}"
    return _outcome(step, place, ended.seconds, verdict, why, found)


def log_of(name: str, place: Place) -> Path:
    """Return where all that a step prints goes."""
    return place.files / f"{name}.log"


def _found(step: Step, place: Place) -> tuple[Found, str]:
    """Return what the results say, and why they say nothing."""
    try:
        return step.read(place), ""
    except Exception as error:  # whatever a program that was stopped, or is new, has written
        return Found(), f"its results cannot be read: {type(error).__name__}: {error}"


def _verdict(ended: Ended, limit_s: float, said: str, wrong: str) -> tuple[Verdict, str]:
    """said: what explains best why it came to no good end. wrong: what is, whatever the exit status."""
    if ended.status is None:
        return "timed out", f"stopped after {limit_s:.0f} s; {said}"
    if ended.status != 0:
        return "failed", f"exit status {ended.status}; {said}"
    return ("failed", wrong) if wrong else ("passed", "")


def _only_late(verdict: Verdict, found: Found) -> bool:
    """Tell whether nothing is known to be wrong but the time it took."""
    failures, late = (found.tests.failures, found.tests.late) if found.tests else ([], [])
    return failures == late and (verdict == "timed out" or (verdict == "failed" and bool(late)))


def _refusal(step: Step, log: Path) -> str | None:
    """Return the line in which the program says that it cannot serve this machine, None when it does not."""
    refusal = step.refusal
    return None if refusal is None else next((line for line in _lines(log) if refusal in line), None)


def _last_line(log: Path) -> str:
    lines = _lines(log)
    return lines[-1][-_WHY_CHARACTERS:] if lines else "it printed nothing"


def _lines(log: Path) -> list[str]:
    return [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]


def _outcome(
    step: Step, place: Place, seconds: float, verdict: Verdict, why: str = "", found: Found | None = None
) -> Outcome:
    found = found or Found()
    settings = "".join(f"{name}={value} " for name, value in step.settings.items())
    return Outcome(
        name=step.name,
        command=settings + place.shown(step.command),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=round(seconds, 1),
        verdict=verdict,
        why=why,
        tests=found.tests,
        asked=found.asked,
        facts=found.facts,
    )
