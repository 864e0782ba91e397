# SPDX-License-Identifier: Apache-2.0
"""Which results can be trusted: they name a clean revision, and the code that they measure is known to have changed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench.environment import origin
from bench.evidence import check

ROOT = Path(__file__).parents[1]


def git(root: Path, *arguments: str) -> str:
    """Run git in a repository, as somebody, and return what it prints."""
    somebody = ["-c", "user.name=somebody", "-c", "user.email=somebody@localhost"]
    return subprocess.check_output(["git", "-C", str(root), *somebody, *arguments], text=True).strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one compressor and one result of it."""
    git(tmp_path, "init", "-q")
    (tmp_path / "commopt" / "compress").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "commopt" / "compress" / "cast.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "code")
    measured(tmp_path, git(tmp_path, "rev-parse", "--short=10", "HEAD"))
    return tmp_path


def measured(root: Path, revision: str | None) -> None:
    """Write a result that was made at `revision`."""
    header = {"date": "2030-01-02T03:04:05+00:00", "command": "python -m bench.evidence.compression_error"}
    document = {"environment": {**header, "commopt": "0.1.0", "revision": revision}, "rows": []}
    (root / "bench" / "results" / "compression_error.json").write_text(json.dumps(document))


def printed(root: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the check says."""
    check.report(root)
    return capsys.readouterr().out


def test_a_result_is_old_when_the_code_it_measures_has_changed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "docs" / "page.md").write_text("another page\n")  # which it does not measure
    assert "nothing\n\n1 files; 0 name no clean revision.\n0 are older" in printed(root, capsys)
    (root / "commopt" / "compress" / "cast.py").write_text("x = 2\n")
    git(root, "commit", "-qam", "other code")
    page = "<!-- begin: a (python -m bench.x bench/results/compression_error.json) -->\n<!-- end -->\n"
    (root / "docs" / "page.md").write_text(page)
    found = printed(root, capsys)
    assert "1 file changed, 1 insertion(+), 1 deletion(-)" in found
    assert "1 are older" in found
    again = "compression_error.json: docs/page.md\n    python -m bench.evidence.compression_error\n"
    assert found.endswith(again)


@pytest.mark.parametrize(
    ("revision", "told"),
    [
        (None, "not recorded"),
        ("0123456789", "unknown: 0123456789 is not in the history"),
        ("{head}-dirty", "uncommitted changes"),
        ("{head} and {head}-dirty", "uncommitted changes"),
    ],
)
def test_what_names_no_clean_revision(
    revision: str | None, told: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = git(root, "rev-parse", "--short=10", "HEAD")
    measured(root, revision and revision.format(head=head))
    found = printed(root, capsys)
    assert told in found
    assert ("1 name no clean revision" in found) == (told != "unknown: 0123456789 is not in the history")


def test_without_a_history_it_says_so(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / ".git").rename(tmp_path / "elsewhere")
    assert "What has changed since is unknown: no git history here: this is no clone." in printed(root, capsys)


def test_every_kind_has_its_paths_and_they_exist() -> None:
    for path in (ROOT / "bench" / "results").rglob("*.json"):
        assert check.Result.read(path).kind in check.MEASURES, path
    for kind, paths in check.MEASURES.items():
        assert [path for path in paths if not (ROOT / path).exists()] == [], kind


def test_new_results_name_a_clean_revision() -> None:
    results = map(check.Result.read, (ROOT / "bench" / "results").rglob("*.json"))
    assert {result.path.name for result in results if not result.is_trusted} == set(check.TO_MEASURE_AGAIN)


@pytest.mark.parametrize(
    ("revision", "sentence"),
    [
        ("7fb5530", "Made 2030-01-02 with commopt 0.1.0 at 7fb5530."),
        ("7fb5530-dirty", "Made 2030-01-02 with commopt 0.1.0 with uncommitted changes at 7fb5530."),
        ("7fb5530 and 8fceb94-dirty", "partly at 7fb5530, partly with uncommitted changes at 8fceb94."),
        (None, "Made 2030-01-02 with commopt 0.1.0 at a revision that was not recorded."),
        ("an unrecorded one, 7fb5530", "partly at 7fb5530, partly at a revision that was not recorded."),
    ],
)
def test_a_table_says_where_it_comes_from(revision: str | None, sentence: str, root: Path) -> None:
    measured(root, revision)
    assert origin([root / "bench" / "results" / "compression_error.json"]).endswith(sentence)
