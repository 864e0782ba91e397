# SPDX-License-Identifier: Apache-2.0
"""What holds for the whole checkout: remedies that can be followed, where results come from."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from bench import compat, environment
from bench.environment import machine, origin
from bench.output import write_lines
from commopt import version
from commopt.version import __version__

ROOT = Path(__file__).parents[1]
CODE = ("commopt", "topology", "bench", "csrc", "examples", "tests")
SUFFIXES = (".py", ".pyi", ".cu", ".cuh", ".cpp", ".hpp")


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]


# --------------------------------------------------------------------- files


def test_every_source_names_its_licence_in_its_first_line() -> None:
    lines = {path: path.read_text().partition("\n")[0] for path in sources(*CODE)}
    assert not [path for path, line in lines.items() if not line.endswith(" SPDX-License-Identifier: Apache-2.0")]


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


# --------------------------------------------------------------------- remedies

PROJECT = (ROOT / "pyproject.toml").read_text().partition("[tool.")[0]
EXTRAS = set(re.findall(r"^([\w-]+) = \[", PROJECT.partition("[project.optional-dependencies]")[2], re.M))
REQUIRED = set(re.findall(r'"([A-Za-z][\w-]*)(?:[\[><=~ ,.\d\]]*)"', "".join(re.findall(r"= \[(.*)\]", PROJECT))))
HINT = re.compile(r"""pip install ((?:-[\w-]+ |constraints\.txt )*)['"]?(\.\[[\w,]+\]|\.|[\w-]+)""")


def unknown(text: str) -> list[str]:
    """Return what a text tells to install that pyproject.toml neither needs nor has as an extra."""
    found = []
    for match in HINT.finditer(text):
        name = match[2]
        known = set(name[2:-1].split(",")) <= EXTRAS if name.startswith(".[") else name == "." or name in REQUIRED
        found += [] if known else [match[0]]
    return found + [f"commopt[{extra}]" for extra in re.findall(r"commopt\[(?!\.)(\w+)\]", text)]


def test_remedies_name_packages_that_this_project_declares() -> None:
    """Nobody is sent to a name that is on no index, as commopt's own is: it would be somebody else's project."""
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    texts = {path: path.read_text() for path in (*sources(*CODE[:-1]), *documents)}
    assert sum(len(HINT.findall(text)) for text in texts.values()) >= 10
    assert {path: wrong for path, text in texts.items() if (wrong := unknown(text))} == {}


def test_remedies_that_cannot_be_followed_are_noticed() -> None:
    assert {"plot", "cuda13"} <= EXTRAS
    assert unknown("pip install commopt; pip install '.[plots]', pip install -U torchy") == [
        "pip install commopt",
        "pip install '.[plots]",
        "pip install -U torchy",
    ]
    assert unknown("use commopt[plot]") == ["commopt[plot]"]
    assert not unknown("pip install '.[plot,cli]', pip install . or pip install 'torch==2.13.*'")


def test_checks_have_their_titles_without_docstrings() -> None:
    program = "from commopt.doctor.host import memlock; print(memlock.title, memlock.expected, memlock.look.__doc__)"
    command = [sys.executable, "-OO", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert re.fullmatch(r"Locked memory unlimited where .* None\n", done.stdout)


# --------------------------------------------------------------------- where results come from


def test_results_say_when_and_with_what_they_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "revision", lambda: "0123456789-dirty")
    now = machine()
    header = {**now, "date": "2026-01-02T03:04:05+00:00", "command": "python -m bench.x"}
    told = f"with commopt {__version__} with uncommitted changes at 0123456789"
    lines, whole, old = (tmp_path / name for name in ("lines.json", "whole.json", "old.json"))
    lines.write_text("".join(json.dumps({**header, "date": f"2026-01-0{day}"}) + "\n" for day in (4, 2)) + '{"a": 1}\n')
    whole.write_text(json.dumps({"environment": header, "rows": [1]}, indent=1))
    old.write_text(json.dumps({"command": "python", "version": "0.0.1"}))
    assert origin([lines]) == f"Made 2026-01-02 to 2026-01-04 {told}."
    assert origin([whole]) == f"Made 2026-01-02 {told}."
    assert origin([old]) == "Made on an unrecorded day with commopt 0.0.1 at a revision that was not recorded."
    assert origin([]) == ""


def test_the_revision_is_that_of_this_checkout_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package inside of another project's repository has none."""
    assert shutil.which("git")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org", "-C", str(tmp_path)]
    (tmp_path / "commopt").mkdir()
    (tmp_path / "commopt" / "version.py").write_text("")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)

    def revision_in(folder: Path) -> str | None:
        monkeypatch.setattr(version, "__file__", str(folder / "commopt" / "version.py"))
        version.revision.cache_clear()
        return version.revision()

    assert re.fullmatch(r"[0-9a-f]{10}", revision_in(tmp_path) or "")
    (tmp_path / "commopt" / "new.py").write_text("")
    assert re.fullmatch(r"[0-9a-f]{10}-dirty", revision_in(tmp_path) or "")
    assert revision_in(tmp_path / "build") is None
    monkeypatch.undo()
    version.revision.cache_clear()


# --------------------------------------------------------------------- other versions of torch


def test_a_version_that_cannot_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "FOLDER", tmp_path / "compat")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    file = tmp_path / "compat.json"
    known = [compat.Version(**{**machine(), "command": "", "torch": torch}, passed=3) for torch in ("2.13.0", "2.7.1")]
    write_lines(file, map(asdict, known))
    assert compat.main(["0.0.1", "--json", str(file), "--python", sys.executable]) == 1
    failed, *known = compat.read(file)
    assert [each.torch for each in known] == ["2.7.1", "2.13.0"]
    assert "torch==0.0.1" in failed.why
    assert not list((tmp_path / "compat").glob("torch-*"))
