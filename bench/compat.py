# SPDX-License-Identifier: Apache-2.0
"""Run the core tests with other versions of torch: `python -m bench.compat 2.7.1 2.12.1`, minutes and gigabytes each.

Each gets a virtual environment in build/compat, one after the other, which is removed afterwards; what pip and pytest
print stays beside it. pip looks for torch where it is set up to: with PIP_EXTRA_INDEX_URL an index of CPU builds.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.document import table
from bench.environment import Header, machine
from bench.gpu.parse_results import tests
from bench.gpu.runner import ROOT, Place, environment, run
from bench.output import write_lines, written_by
from commopt.command_line import CommandParser, content_of, output_file, whole
from tests.promises import promised

FOLDER = ROOT / "build" / "compat"
# Beside the tests of every promise: what leans on private names of torch.
CORE = ("test_sharded_attach.py", "test_sharded_1d.py", "test_hook_registration.py")
NOT_RUN = ("slow", "alone", "gpu", "cluster")
_INSTALL_S, _TESTS_S = 3600.0, 3600.0


@dataclass(frozen=True)
class Version(Header):
    """What the core tests came to with one version of torch; the header's `torch` and `python` are those tested."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    why: str = ""
    """Why there is nothing to count, or not all of it."""

    @property
    def order(self) -> tuple[list[int], ...]:
        """Newest last."""
        return tuple([int(number) for number in re.findall(r"\d+", text)] for text in (self.torch, self.python))


def read(path: Path) -> list[Version]:
    """Read what `main` wrote; raises ValueError when `path` holds something else."""
    with written_by("bench.compat --json", path):
        return [Version(**json.loads(line)) for line in path.read_text().splitlines()]


def measure(torch: str, base: str, processes: int) -> Version:
    """Install a version of torch beside this project, and run the core tests."""
    folder, out = FOLDER / f"torch-{torch}", FOLDER
    python = folder / "bin" / "python"
    variables = {**environment(), "PIP_CONSTRAINT": os.devnull, "PIP_QUIET": "1", "COMMOPT_CUDA": "OFF"}
    shutil.rmtree(folder, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    now = {
        **machine(),
        "command": shlex.join(["python", "-m", "bench.compat", torch]),
        "torch": torch,
        "python": Path(base).name,
    }

    def done(name: str, limit_s: float, *command: str) -> str:
        """Run a command; return the last error it printed where it failed."""
        log = out / f"{torch}.{name}.log"
        if run(command, variables, log, limit_s).status == 0:
            return ""
        text = log.read_text(errors="replace").replace(f"{ROOT}/", "")
        lines = [line for line in text.splitlines() if line.strip()] or ["no word"]
        return f"{name}: {([line for line in lines if 'error:' in line.lower()] or lines)[-1][:200]}"

    try:
        problem = done("venv", 300, base, "-m", "venv", str(folder))
        install = (str(python), "-m", "pip", "install")
        problem = problem or done("torch", _INSTALL_S, *install, f"torch=={torch}")
        problem = problem or done("commopt", _INSTALL_S, *install, f"torch=={torch}", ".[test]")
        say = "import platform, torch; print(torch.__version__, platform.python_version())"
        problem = problem or done("import", 300, str(python), "-c", say)
        if problem:
            return Version(**now, why=problem)
        now["torch"], now["python"] = (out / f"{torch}.import.log").read_text().split()[-2:]
        print(f"torch {now['torch']}, Python {now['python']}: testing", flush=True)
        core = sorted(f"tests/{name}" for name in {*promised(), *CORE})
        options = ["-q", "--tb=short", "-n", str(processes), "--dist", "worksteal", "-p", "no:cacheprovider"]
        options += ["-m", " and ".join(f"not {name}" for name in NOT_RUN), "--junitxml", str(out / f"{torch}.xml")]
        (out / f"{torch}.xml").unlink(missing_ok=True)
        problem = done("tests", _TESTS_S, str(python), "-m", "pytest", *options, *core)
        if not (out / f"{torch}.xml").exists():
            return Version(**now, why=problem)
        counted = tests(f"{torch}.xml")(Place(out)).tests
        assert counted is not None
        return Version(**now, **asdict(counted))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def markdown(found: Sequence[Version]) -> str:
    """Return a table of what a file has."""
    rows = []
    for each in found:
        said = each.why or ", ".join(f"`{name.removeprefix('tests.')}`" for name in each.failures[:5])
        said += f" and {len(each.failures) - 5} more" if len(each.failures) > 5 else ""
        rows.append([each.torch, each.python, *map(str, (each.passed, each.failed, each.skipped)), said or "-"])
    return table(["torch", "Python", "passed", "failed", "skipped", "what failed"], rows)


def main(arguments: Iterable[str] | None = None) -> int:
    """Test every version, add what was found to the file, and print it; return 1 when anything failed."""
    parser = CommandParser(prog="python -m bench.compat", description=(__doc__ or "\n").splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="of torch: 2.12.1")
    parser.add_argument("--python", default=sys.executable, metavar="PROGRAM", help="the Python to test with")
    processes = 2 * (os.cpu_count() or 1)
    parser.add_argument("-n", type=whole(1), default=processes, help="tests at a time (default: two per processor)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="JSON lines, one for each torch and Python")
    parser.add_argument("--show", type=content_of(read), metavar="FILE", help="print a table of such a file instead")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.show is not None:
        print(markdown(options.show))
        return 0
    if not options.versions:
        parser.error("name the versions of torch to test: python -m bench.compat 2.9.1 2.12.1")
    failed = False
    for version in options.versions:
        found = measure(version, options.python, options.n)
        failed |= bool(found.failed or found.why)
        if options.json:
            known = read(options.json) if options.json.exists() and options.json.stat().st_size else []
            kept = [each for each in known if each.order != found.order]
            write_lines(options.json, map(asdict, sorted([*kept, found], key=lambda each: each.order)))
        print(markdown([found]), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
