"""Take steps one after the other, and keep what each came to."""

from __future__ import annotations

import os
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.gpu import mps
from bench.gpu.place import Place
from bench.gpu.record import Outcome, merged, read, write
from bench.gpu.runner import stop_all
from bench.gpu.step import Step, log_of, take

FILE = "gpu.json"
ARCHIVE = "gpu.tar.gz"
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

    Outcomes of other steps that the file has from before stay in it; `order` names all that are known. The archive has
    every file and all that was printed, also of a step that was under way when this was told to end.
    """
    file = place.out / FILE
    before = read(file)[1] if file.exists() else []
    _unpack(place)
    started = clock()
    outcomes: list[Outcome] = []
    try:
        for group in together(steps):
            for number, step in enumerate(group, len(outcomes) + 1):
                print(f"[{number}/{len(steps)}] {step.name}: {step.shows}", file=sys.stderr, flush=True)
            left_s = float("inf") if limit_s is None else limit_s - (clock() - started)
            for outcome in _take_all(group, place, left_s):
                outcomes.append(outcome)
                _say(outcome, place)
            known = merged(before, outcomes, order)
            write(file, {**environment, **_machine(known)}, known)
            _pack(place)
    finally:
        mps.stop(place)
        _pack(place)
    return outcomes


def together(steps: Sequence[Step]) -> list[list[Step]]:
    """Return the steps in groups that run at the same time."""
    groups: list[list[Step]] = []
    for step in steps:
        if groups and groups[-1][0].name == step.beside:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def _take_all(group: Sequence[Step], place: Place, left_s: float) -> list[Outcome]:
    if len(group) == 1:
        return [take(group[0], place, left_s)]
    with ThreadPoolExecutor(len(group)) as pool:
        taken = [pool.submit(take, step, place, left_s) for step in group]
        try:
            return [each.result() for each in taken]
        except BaseException:  # a signal: the pool waits for its threads
            stop_all()
            raise


def _pack(place: Place) -> None:
    """Write the archive; whoever is killed meanwhile leaves the old one."""
    unfinished = place.out / f"{ARCHIVE}.new"
    with tarfile.open(unfinished, "w:gz") as archive:
        for file in sorted([*place.files.iterdir(), *place.out.glob(FILE)]):
            if file.is_file():
                archive.add(file, file.name)
    os.replace(unfinished, place.out / ARCHIVE)


def _unpack(place: Place) -> None:
    """Go on with the files of an earlier session."""
    file = place.out / ARCHIVE
    if not file.exists():
        return
    with tarfile.open(file) as archive:
        for member in archive:
            data = archive.extractfile(member)
            if data is not None and "/" not in member.name and member.name != FILE:
                (place.files / member.name).write_bytes(data.read())


def _machine(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return next((outcome.facts for outcome in outcomes if outcome.name == "machine"), {})


def _say(outcome: Outcome, place: Place) -> None:
    """Print how a step ended, and the end of what it printed when that was no good end."""
    log = log_of(outcome.name, place)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    shown = [f"      {line}" for line in lines[-_SHOWN_LINES:]] if outcome.fell_through else []
    why = f": {outcome.why}" if outcome.why else ""
    end = f"    {outcome.name}: {outcome.verdict} in {outcome.seconds:.0f} s{why}"
    print(end, *shown, sep="\n", file=sys.stderr, flush=True)
