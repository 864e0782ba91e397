# SPDX-License-Identifier: Apache-2.0
"""Which tests `make test` runs, which the gate adds, and which wait for `make test-all`.

The rule, so that nobody has to keep a list:

- tests/durations.txt says what every test function takes. `make test-all` measures; `make durations` writes the file.
- Every function gets the same time, `MOST_S`. One that takes longer runs as many of its cases as fit, those first that
  try a value of a parameter which no case before them tried. If not even one case fits, it does not run.
- A test that is new or not in the file runs. The tests in `PROMISES` (tests/promises.py) run in any case.
- Tests of benchmark programs get `OF_BENCHMARKS_S` instead. Tests that compare times (marked `alone`) run in
  `make test-all` only.
- A test that `make test` leaves out is marked `slow`; a test may carry the marker by itself.
- Of the slow tests the gate runs those in `GATE` (tests/promises.py), which are marked `gate`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
DURATIONS = ROOT / "tests" / "durations.txt"
MEASURED = ROOT / "build" / "durations.json"
CHOSEN = pytest.StashKey[set[str]]()  # of the tests collected, those that `make test` runs, without `tests/`
IN_GATE = pytest.StashKey[set[str]]()  # those that the gate adds
MOST_S = 2.0  # of a function: lower it when `make test` takes too long
OF_BENCHMARKS_S = 0.5
OF_BENCHMARKS = ("test_bench_", "test_convergence_", "test_training_bench")
_WORTH_NOTING_S = 0.2  # a function that takes less is not in the file


class Duration(NamedTuple):
    """What one test function takes."""

    once_s: float  # fixtures that its cases share
    case_s: float  # each case, on average

    def of(self, cases: int) -> float:
        """Return the seconds that so many cases take."""
        return self.once_s + cases * self.case_s if cases else 0.0

    def cases_in(self, seconds: float) -> int:
        """Return how many cases fit."""
        return max(0, int((seconds - self.once_s) / max(self.case_s, 1e-3) + 1e-6))


def function_of(nodeid: str) -> str:
    """Return the name of a test without its case, and without `tests/`."""
    return nodeid.partition("[")[0].removeprefix("tests/")


def read(file: Path = DURATIONS) -> dict[str, Duration]:
    """Return the duration of every test function in the file."""
    if not file.exists():
        return {}
    lines = [line.split() for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return {name: Duration(float(once), float(case)) for once, case, name in lines}


def left_out(
    items: Collection[pytest.Item],
    durations: Mapping[str, Duration],
    promised: Collection[str],
    most_s: float = MOST_S,
) -> set[str]:
    """Return the ids of the tests that `make test` does not run.

    promised: what must run: ids of cases, or names of functions, of which then one case runs at least.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(function_of(item.nodeid), []).append(item)
    out: set[str] = set()
    for name, own in cases.items():
        needed = _needed(name, own, promised)
        given_s = OF_BENCHMARKS_S if name.startswith(OF_BENCHMARKS) else most_s
        fits = durations[name].cases_in(given_s) if name in durations else len(own)
        if own[0].get_closest_marker("alone"):
            fits = 0
        if (keep := max(fits, len(needed))) < len(own):
            order = [*needed, *(item for item in _telling_first(own) if item not in needed)]
            out |= {item.nodeid for item in order[keep:]}
    return out


def _needed(name: str, cases: list[pytest.Item], promised: Collection[str]) -> list[pytest.Item]:
    """Return the cases that run in any case."""
    if name in promised:
        return _telling_first(cases)[:1]
    return [item for item in cases if item.nodeid.removeprefix("tests/") in promised]


def _telling_first(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Put the cases first that try most values which none before them tried; else spread them over the whole list."""
    golden = (5**0.5 - 1) / 2  # its multiples, modulo 1, are spread evenly
    left = sorted(range(len(cases)), key=lambda index: (index * golden) % 1)
    values = [set(getattr(getattr(case, "callspec", None), "indices", {}).items()) for case in cases]
    seen: set[tuple[str, int]] = set()
    order: list[pytest.Item] = []
    while left:
        best = max(left, key=lambda index: len(values[index] - seen))  # the first of equals
        left.remove(best)
        seen |= values[best]
        order.append(cases[best])
    return order


def longest_first(items: Iterable[pytest.Item], durations: Mapping[str, Duration], processes: int) -> list[pytest.Item]:
    """Deal whole modules to so many processes, those with long tests first: short ones are left to steal in the end."""
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    each = {
        module: [durations.get(function_of(item.nodeid), Duration(0, 0)).case_s for item in own]
        for module, own in modules.items()
    }
    order = sorted(modules, key=lambda module: -fmean(each[module]))
    return [item for first in range(processes) for module in order[first::processes] for item in modules[module]]


class Stopwatch:
    """A pytest plugin: adds what this run's tests took to build/durations.json, by test and phase."""

    def __init__(self, file: Path = MEASURED) -> None:
        self._file = file
        self._measured: dict[str, dict[str, float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._measured.setdefault(report.nodeid, {})[report.when or ""] = round(report.duration, 3)

    def pytest_sessionfinish(self) -> None:
        before = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._file.parent.mkdir(exist_ok=True)
        self._file.write_text(json.dumps({**before, **self._measured}, indent=0))


def summarize(measured: Mapping[str, Mapping[str, float]]) -> dict[str, Duration]:
    """Return the duration of every function of which one is worth noting."""
    cases: dict[str, list[Mapping[str, float]]] = {}
    for nodeid, phases in measured.items():
        cases.setdefault(function_of(nodeid), []).append(phases)
    found = {}
    for name, own in cases.items():
        setups = [phases.get("setup", 0.0) for phases in own]
        once = max(setups) - median(setups)  # of one case alone: all in each
        each = (sum(sum(phases.values()) for phases in own) - once) / len(own)
        duration = Duration(round(once, 2), round(each, 3))
        if duration.of(len(own)) >= _WORTH_NOTING_S:
            found[name] = duration
    return found


def text_of(durations: Mapping[str, Duration]) -> str:
    """Return the file's text, the slowest first."""
    slowest = sorted(durations, key=lambda name: (-sum(durations[name]), name))
    lines = [f"{durations[name].once_s:g} {durations[name].case_s:g} {name}" for name in slowest]
    head = [
        "# What tests take: seconds once, seconds per case, test. Written by `make durations` after `make test-all`."
    ]
    return "\n".join([*head, *lines, ""])


def main(arguments: Iterable[str]) -> None:
    """Write tests/durations.txt from what the last full run measured."""
    measured: dict[str, dict[str, float]] = json.loads(MEASURED.read_text())
    DURATIONS.write_text(text_of(summarize(measured)))
    by_test = {name: sum(phases.values()) for name, phases in measured.items()}
    slowest = sorted(by_test, key=lambda name: -by_test[name])[: len(by_test) // 20]
    print(f"{len(by_test)} tests take {sum(by_test.values()):.0f} s; the slowest {len(slowest)}:")
    for name in slowest:
        print(f"{by_test[name]:7.1f}  {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
