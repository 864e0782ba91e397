"""Take steps one after the other, and keep what each came to."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.gpu.place import Place
from bench.gpu.record import Outcome, merged, read, write
from bench.gpu.step import Step, log_of, take

FILE = "gpu.json"
LOG = "gpu.log"
_LOG_LINES = 20_000  # of each step: there may be no second run
_SHOWN_LINES = 12  # of one that fell through


def session(
    steps: Sequence[Step],
    place: Place,
    limit_s: float | None,
    environment: dict[str, Any],
    order: Sequence[str],
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Take all steps within `limit_s`, write what is known after each, and return the outcomes of these steps.

    Outcomes of other steps that the file has from before stay in it; `order` names all that are known.
    """
    file = place.out / FILE
    before = read(file)[1] if file.exists() else []
    started = clock()
    outcomes: list[Outcome] = []
    for number, step in enumerate(steps, 1):
        print(f"[{number}/{len(steps)}] {step.name}: {step.shows}", file=sys.stderr, flush=True)
        left_s = float("inf") if limit_s is None else limit_s - (clock() - started)
        outcome = take(step, place, left_s)
        outcomes.append(outcome)
        _say(outcome, place)
        known = merged(before, outcomes, order)
        write(file, {**environment, **_machine(known)}, known)
    return outcomes


def _machine(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return next((outcome.facts for outcome in outcomes if outcome.name == "machine"), {})


def _say(outcome: Outcome, place: Place) -> None:
    """Print how a step ended, and keep the end of what it printed."""
    log = log_of(outcome.name, place)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    head = f"{outcome.name}: {outcome.verdict} in {outcome.seconds:.0f} s"
    with (place.out / LOG).open("a") as kept:
        kept.write("\n".join([f"===== {head}", outcome.command, *lines[-_LOG_LINES:], "", ""]))
    shown = [f"      {line}" for line in lines[-_SHOWN_LINES:]] if outcome.fell_through else []
    why = f": {outcome.why}" if outcome.why else ""
    print(f"    {outcome.verdict} in {outcome.seconds:.0f} s{why}", *shown, sep="\n", file=sys.stderr, flush=True)
