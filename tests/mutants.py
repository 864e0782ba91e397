# SPDX-License-Identifier: Apache-2.0
"""Seed faults into a copy, one at a time, and see which test of the gate finds each.

    python -m tests.mutants                              # all, in half an hour; exits with 1 if more than one is missed
    python -m tests.mutants --only residual,stale        # those whose name contains one of the words
    python -m tests.mutants --json bench/results/mutants.json
    python -m tests.mutants --show bench/results/mutants.json      # the table of a file

A fault is a change of one place in a source file (tests/faults.py). The test files that it names run first, then all of
the gate; the first test that fails has found it. `--revision REVISION` takes the sources and all the tests of another
revision, in which a fault whose place is not there counts as absent.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.environment import machine
from bench.output import read_lines, write_results
from commopt.command_line import CommandParser, output_file
from tests.copies import GATE, Copy
from tests.faults import FAULTS, Fault

MOST_MISSED = 1
_CPU_KERNELS = "csrc/cpu/"
_NOT_THERE = "--ignore=tests/test_mutants.py"  # which wants every fault's place to be there: it would find all of them


@dataclass(frozen=True)
class Finding:
    """Which test found a fault; "" when none did, "absent" when its place is not in the sources."""

    fault: str
    file: str
    promise: str
    found_by: str
    seconds: float


def find(copy: Copy, fault: Fault, selection: Sequence[str]) -> Finding:
    """Apply a fault, run tests until one fails, and take the fault back."""
    file = copy.folder / fault.file
    source = file.read_text() if file.exists() else ""
    begun = time.monotonic()
    found_by = "absent"
    if source.count(fault.before) == 1:
        try:
            file.write_text(source.replace(fault.before, fault.after))
            if fault.file.startswith(_CPU_KERNELS):
                copy.install()
            found_by = _first_failure(copy, fault, selection)
        finally:
            file.write_text(source)
            if fault.file.startswith(_CPU_KERNELS):
                copy.install()
    return Finding(fault.name, fault.file, fault.promise, found_by, round(time.monotonic() - begun, 1))


def _first_failure(copy: Copy, fault: Fault, selection: Sequence[str]) -> str:
    known = [f"tests/{name}.py" for name in fault.tests if (copy.folder / "tests" / f"{name}.py").exists()]
    for files in ([known] if known else []) + [[]]:
        outcome = copy.test("--maxfail=1", _NOT_THERE, *selection, *files, processes=2 if files else 4)
        if outcome.failed:
            return outcome.failed[0].removeprefix("tests/")
    return ""


def table(findings: Sequence[Finding]) -> str:
    """Return the findings as a table in Markdown."""
    rows = ["| fault | in | of the promise | found by |", "| --- | --- | --- | --- |"]
    for finding in findings:
        test = f"`{finding.found_by}`" if finding.found_by not in ("", "absent") else finding.found_by or "**nothing**"
        rows.append(f"| {finding.fault} | `{finding.file}` | {finding.promise} | {test} |")
    return "\n".join(rows)


def read(file: Path | None) -> list[Finding]:
    """Return the findings in a file that --json wrote, none where there is no such file yet."""
    return [] if file is None or not file.exists() else [Finding(**row) for row in read_lines(file, "finding")[1]]


def run(faults: Sequence[Fault], revision: str | None) -> Iterator[Finding]:
    """Try the faults, one after the other, in one copy."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder, "copy"), revision)
        selection = [] if revision is not None else ["-m", GATE]
        for fault in faults:
            yield find(copy, fault, selection)


def main() -> int:
    """Try the chosen faults; print and write which test found each."""
    parser = CommandParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD,WORD", help="faults whose name contains one of the words")
    parser.add_argument("--revision", metavar="REVISION", help="sources and tests of this revision; all of its tests")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="written after each fault; one that it says was found is kept"
    )
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of a file that --json wrote")
    options = parser.parse_args()
    if options.show is not None:
        print(table(read(options.show)))
        return 0
    header = {**machine(), "command": f"python -m tests.mutants {' '.join(sys.argv[1:])}".strip()}
    words = options.only.split(",")
    chosen = [fault for fault in FAULTS if any(word in fault.name for word in words)]
    findings = {finding.fault: finding for finding in read(options.json) if finding.found_by}
    for finding in run([fault for fault in chosen if fault.name not in findings], options.revision):
        print(f"{finding.seconds:6.1f} s  {finding.fault}: {finding.found_by or 'NOT FOUND'}", flush=True)
        findings[finding.fault] = finding
        if options.json is not None:
            ordered = [findings[fault.name] for fault in FAULTS if fault.name in findings]
            write_results(options.json, header, "finding", map(asdict, ordered))
    missed = [finding.fault for finding in findings.values() if not finding.found_by]
    print(
        f"{len(findings) - len(missed)} of {len(findings)} faults are found; not found: {', '.join(missed) or 'none'}"
    )
    return len(missed) > MOST_MISSED


if __name__ == "__main__":
    sys.exit(main())
