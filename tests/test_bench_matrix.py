"""Matrices of benchmark runs: what is run, what is left out, and what comes of failures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.evidence import matrix
from bench.evidence.matrix import UNUSABLE, EmulatedCluster, Matrix
from commopt.cluster import ClusterUnavailableError

PLACES = EmulatedCluster(2, 1, "50mbit"), EmulatedCluster(2, 2, "none"), EmulatedCluster(4, 1, "50mbit")


@dataclass(frozen=True)
class Line:
    """Done once a file has its line."""

    place: EmulatedCluster

    def __str__(self) -> str:
        return str(self.place)

    @property
    def command(self) -> list[str]:
        return ["bench.something", "--nodes", str(self.place.nodes)]

    def is_in(self, runs: list[str]) -> bool:
        return str(self.place) in runs


def read(paths: Sequence[Path]) -> list[str]:
    found = [line for path in paths for line in path.read_text().splitlines()]
    if "nonsense" in found:
        raise ValueError(f"{paths[0]} is of another kind")
    return found


SHOWN = Matrix("bench.lines", "Lines.", [Line(place) for place in PLACES], read, lambda runs: print(*runs), 7.0)


def test_resumes_and_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    file.write_text(f"{PLACES[1]}\n")
    asked: list[tuple[EmulatedCluster, list[str], float]] = []

    def run_at(place: EmulatedCluster, command: list[str], timeout_s: float) -> int:
        asked.append((place, command, timeout_s))
        return 3 if place == PLACES[0] else 0

    monkeypatch.setattr(matrix, "run_at", run_at)
    monkeypatch.setattr(sys, "argv", ["lines", "--json", str(file), "--seconds", "1"])
    assert SHOWN.main() == 3  # one failed; the others ran
    options = ["--json", str(file), "--seconds", "1"]
    assert asked == [
        (place, ["bench.something", "--nodes", str(place.nodes), *options], 7.0) for place in (PLACES[0], PLACES[2])
    ]
    assert f"{PLACES[1]}: in {file} already" in capsys.readouterr().out


def test_another_file_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    file.write_text("nonsense\n")
    monkeypatch.setattr(matrix, "run_at", lambda *_: pytest.fail("ran"))
    monkeypatch.setattr(sys, "argv", ["lines", "--json", str(file)])
    assert SHOWN.main() == UNUSABLE
    assert f"bench.lines: {file} is of another kind" in capsys.readouterr().err


def test_without_emulated_clusters_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none_to_be_had(*_: object) -> int:
        raise ClusterUnavailableError("no root here")

    monkeypatch.setattr(matrix, "run_at", none_to_be_had)
    monkeypatch.setattr(sys, "argv", ["lines", "--json", str(tmp_path / "a.json")])
    assert SHOWN.main() == UNUSABLE
    assert "bench.lines: no root here" in capsys.readouterr().err
