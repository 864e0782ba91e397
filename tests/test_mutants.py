# SPDX-License-Identifier: Apache-2.0
"""The list of faults is whole, and the runner finds one and takes it back; the faults themselves take half an hour."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tests.copies import _FAILED, ROOT, Outcome
from tests.faults import FAULTS, Fault
from tests.mutants import Finding, find, table
from tests.promises import PROMISES

PACKAGES = sorted(file.parent.name for file in (ROOT / "commopt").glob("*/__init__.py"))
FAULT = Fault("a sign", "source.py", "1 - x", "1 + x", "right answer", ("test_first", "test_not_there"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_place_of_a_fault_is_one(fault: Fault) -> None:
    times = (ROOT / fault.file).read_text().count(fault.before)
    assert times == 1, f"{fault.before!r} stands {times} times in {fault.file}: see tests/faults.py"
    assert fault.after != fault.before
    assert 1 <= len(fault.tests) <= 3
    assert all((ROOT / "tests" / f"{name}.py").is_file() for name in fault.tests)


def test_names_tell_faults_apart() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30


def test_changed_python_can_be_compiled() -> None:
    for fault in FAULTS:
        if fault.file.endswith(".py"):
            source = (ROOT / fault.file).read_text().replace(fault.before, fault.after)
            compile(source, fault.file, "exec", dont_inherit=True)


@pytest.mark.parametrize("promise", PROMISES)
def test_every_promise_has_a_fault(promise: str) -> None:
    assert promise in {fault.promise for fault in FAULTS}


@pytest.mark.parametrize("folder", [*(f"commopt/{name}" for name in PACKAGES), "topology", "csrc", "csrc/cpu"])
def test_every_package_has_a_fault(folder: str) -> None:
    assert folder in {str(Path(fault.file).parent) for fault in FAULTS}


class FakeCopy:
    """A folder with one source; its tests fail while that has FAULT in it, if `sees` is among the files that run."""

    def __init__(self, folder: Path, sees: str = "") -> None:
        self.folder, self._sees = folder, sees
        self.ran: list[tuple[str, ...]] = []
        self.installed = 0
        (folder / "tests").mkdir()
        (folder / "tests" / "test_first.py").touch()
        self.source.write_text("def f(x):\n    return 1 - x\n")

    @property
    def source(self) -> Path:
        return self.folder / FAULT.file

    def install(self) -> None:
        self.installed += 1

    def test(self, *arguments: str, processes: int) -> Outcome:
        files = tuple(argument for argument in arguments if argument.startswith("tests/"))
        self.ran.append(files)
        everything = not files
        fails = FAULT.after in self.source.read_text() and (everything or self._sees in files) and bool(self._sees)
        return Outcome("failed", (f"{self._sees}::test_f",), "") if fails else Outcome("passed", (), "")


def found(copy: FakeCopy, fault: Fault = FAULT, selection: Sequence[str] = ()) -> Finding:
    before = copy.source.read_text()
    finding = find(cast(Any, copy), fault, selection)
    assert copy.source.read_text() == before
    return finding


def test_a_named_test_finds_a_fault_without_the_rest(tmp_path: Path) -> None:
    copy = FakeCopy(tmp_path, sees="tests/test_first.py")
    finding = found(copy)
    assert (finding.fault, finding.found_by) == ("a sign", "test_first.py::test_f")
    assert copy.ran == [("tests/test_first.py",)]


def test_what_no_named_test_finds_the_others_may(tmp_path: Path) -> None:
    copy = FakeCopy(tmp_path, sees="tests/test_second.py")
    assert found(copy).found_by == "test_second.py::test_f"
    assert copy.ran == [("tests/test_first.py",), ()]


def test_what_no_test_finds_is_told(tmp_path: Path) -> None:
    assert found(FakeCopy(tmp_path)).found_by == ""


@pytest.mark.parametrize("text", ["2 - x", "1 - x + 1 - x"])
def test_a_place_that_is_not_there_once_is_absent(tmp_path: Path, text: str) -> None:
    copy = FakeCopy(tmp_path)
    copy.source.write_text(text)
    assert found(copy).found_by == "absent"
    assert copy.ran == []


def test_a_fault_is_taken_back_where_tests_cannot_run(tmp_path: Path) -> None:
    copy = FakeCopy(tmp_path)
    before = copy.source.read_text()

    def stopped(*arguments: str, processes: int) -> Outcome:
        raise KeyboardInterrupt

    copy.test = stopped  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        find(cast(Any, copy), FAULT, ())
    assert copy.source.read_text() == before


def test_kernels_of_cpus_are_compiled_with_the_fault_and_again_without(tmp_path: Path) -> None:
    copy = FakeCopy(tmp_path)
    (tmp_path / "csrc" / "cpu").mkdir(parents=True)
    (tmp_path / "csrc" / "cpu" / "a.hpp").write_text("1 - x")
    found(copy, FAULT._replace(file="csrc/cpu/a.hpp"))
    assert copy.installed == 2


def test_a_failed_test_is_named_with_all_of_its_case() -> None:
    names = ["tests/test_a.py::test_b", "tests/test_a.py::test_c[3.7-Quantize(bits=8, block=64)]", "tests/test_a.py"]
    lines = [f"FAILED {names[0]} - assert 1 == 2", f"FAILED {names[1]} - KeyError: [1]", f"ERROR {names[2]}"]
    assert _FAILED.findall("\n".join(lines)) == names


def test_the_table_has_a_row_for_each_finding() -> None:
    rows = [Finding(name, "a.py", "accounting", by, 1.0) for name, by in (("x", "test_a.py::test_b"), ("y", ""))]
    lines = table(rows).splitlines()
    assert lines[2:] == [
        "| x | `a.py` | accounting | `test_a.py::test_b` |",
        "| y | `a.py` | accounting | **nothing** |",
    ]
