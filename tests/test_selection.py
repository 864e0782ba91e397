# SPDX-License-Identifier: Apache-2.0
"""The rule by which `make test` leaves tests out."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.selection import Duration, Stopwatch, left_out, longest_first, read, summarize, text_of


def items(name: str, *values: int) -> list[Any]:
    """Return the cases of a test with so many values for each of its parameters."""
    return [
        SimpleNamespace(
            path=Path(name.partition("::")[0]),
            nodeid=f"tests/{name}[{'-'.join(map(str, indices))}]" if values else f"tests/{name}",
            get_closest_marker=lambda mark: mark if mark in name else None,
            callspec=SimpleNamespace(indices=dict(zip("abc", indices, strict=False))),
        )
        for indices in product(*map(range, values))
    ]


def kept(tests: list[Any], durations: dict[str, Duration], promised: set[str], seconds: float) -> list[str]:
    out = left_out(tests, durations, promised, seconds)
    return [test.nodeid.removeprefix("tests/") for test in tests if test.nodeid not in out]


def test_all_run_where_all_fit() -> None:
    tests = items("test_a.py::test_x", 3) + items("test_a.py::test_y")
    assert left_out(tests, {"test_a.py::test_x": Duration(0, 1)}, set(), 3) == set()


def test_cases_that_fit_try_every_value_first() -> None:
    tests = items("test_a.py::test_x", 4, 3)
    names = kept(tests, {"test_a.py::test_x": Duration(1, 1)}, set(), 5.0)
    assert len(names) == 4
    cases = [name[-4:-1].split("-") for name in names]
    assert {case[0] for case in cases} == set("0123")
    assert {case[1] for case in cases} == set("012")


def test_every_function_gets_the_same_time() -> None:
    tests = items("test_a.py::test_x", 10) + items("test_a.py::test_new", 9) + items("test_a.py::test_long")
    durations = {f"test_a.py::test_{name}": Duration(0, s) for name, s in (("x", 1), ("long", 9))}
    names = [name.partition("[")[0] for name in kept(tests, durations, set(), 6.0)]
    assert names == ["test_a.py::test_x"] * 6 + ["test_a.py::test_new"] * 9


def test_benchmarks_get_less_time_and_comparisons_of_times_none() -> None:
    tests = items("test_bench_x.py::test_x", 3) + items("test_a.py::test_alone", 3) + items("test_a.py::test_y", 3)
    durations = {
        f"{file}::test_{name}": Duration(0, 0.2) for file, name in (("test_bench_x.py", "x"), ("test_a.py", "y"))
    }
    names = [name.partition("[")[0] for name in kept(tests, durations, set(), 9.0)]
    assert names == ["test_bench_x.py::test_x"] * 2 + ["test_a.py::test_y"] * 3
    slow = {"test_bench_x.py::test_x": Duration(0, 4.0)}
    assert kept(tests[:3], slow, set(), 9.0) == []
    assert kept(tests[:3], slow, {"test_bench_x.py::test_x[1]"}, 9.0) == ["test_bench_x.py::test_x[1]"]


def test_promises_run_whatever_they_take() -> None:
    tests = items("test_a.py::test_x", 10) + items("test_a.py::test_y", 3)
    durations = {"test_a.py::test_x": Duration(0, 100), "test_a.py::test_y": Duration(100, 1)}
    names = kept(tests, durations, {"test_a.py::test_x[7]", "test_a.py::test_y"}, 10)
    assert names == ["test_a.py::test_x[7]", "test_a.py::test_y[0]"]


def test_each_process_begins_with_long_tests_and_none_is_lost() -> None:
    tests = [test for name in "abcd" for test in items(f"test_{name}.py::test_x", 2)]
    durations = {f"test_{name}.py::test_x": Duration(0, s) for name, s in (("a", 1), ("b", 9), ("d", 5))}
    assert [test.path.name[5] for test in longest_first(tests, durations, 2)[::2]] == ["b", "a", "d", "c"]
    assert len({test.nodeid for test in longest_first(tests, durations, 3)}) == len(tests)


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    measured = {
        "tests/test_a.py::test_x[0]": {"setup": 5.0, "call": 1.0, "teardown": 0.0},
        "tests/test_a.py::test_x[1]": {"setup": 0.0, "call": 1.0, "teardown": 0.0},
        "tests/test_a.py::test_x[2]": {"setup": 0.0, "call": 4.0, "teardown": 0.0},
        "tests/test_a.py::test_short": {"setup": 0.0, "call": 0.1, "teardown": 0.0},
    }
    durations = summarize(measured)
    assert durations == {"test_a.py::test_x": Duration(5.0, 2.0)}
    (tmp_path / "durations.txt").write_text(text_of(durations))
    assert read(tmp_path / "durations.txt") == durations
    assert read(tmp_path / "none.txt") == {}


def test_runs_add_up(tmp_path: Path) -> None:
    file = tmp_path / "build" / "durations.json"
    for name, seconds in (("x", 1.0), ("y", 2.0), ("x", 3.0)):
        stopwatch = Stopwatch(file)
        report: Any = SimpleNamespace(nodeid=name, when="call", duration=seconds)
        stopwatch.pytest_runtest_logreport(report)
        stopwatch.pytest_sessionfinish()
    assert summarize({"x": {"call": 3.0}, "y": {"call": 2.0}}) == summarize(json.loads(file.read_text()))
