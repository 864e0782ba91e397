# SPDX-License-Identifier: Apache-2.0
"""Matrices of benchmark runs: what is run, what is left out, and what comes of failures."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.evidence import matrix
from bench.evidence.matrix import UNUSABLE, ClusterShape, Entry, Matrix
from commopt.cluster import ClusterUnavailableError

PLACES = ClusterShape(2, 1, "50mbit"), ClusterShape(2, 2, "none"), ClusterShape(4, 1, "50mbit")


class World(NamedTuple):
    """Where the runs of a file were made, as far as a matrix asks."""

    nodes: list[int]
    emulated_rate: str
    sites: str = ""


def read(paths: Sequence[Path]) -> list[tuple[World, list[str]]]:
    found = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    if "nonsense" in found:
        raise ValueError(f"{paths[0]} is of another kind")
    return [(World(nodes, rate), ["one"]) for nodes, rate in found]


ENTRIES = [Entry(place, ("bench.something", "--nodes", str(place.nodes))) for place in PLACES]
SHOWN = Matrix("bench.lines", "Lines.", ENTRIES, read, repr, 7.0)


def test_resumes_and_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    file.write_text('[[2, 2], "none"]\n')
    asked: list[tuple[ClusterShape, list[str], float]] = []

    def run_at(place: ClusterShape, command: list[str], timeout_s: float) -> int:
        asked.append((place, command, timeout_s))
        return 3 if place == PLACES[0] else 0

    monkeypatch.setattr(matrix, "run_at", run_at)
    monkeypatch.setattr(sys, "argv", ["lines", "--json", str(file), "--seconds", "1"])
    assert SHOWN.main() == 3  # one failed; the others ran
    options = ["--json", str(file), "--seconds", "1"]
    assert asked == [
        (place, ["bench.something", "--nodes", str(place.nodes), *options], 7.0) for place in (PLACES[0], PLACES[2])
    ]
    assert f"{ENTRIES[1]}: in {file} already" in capsys.readouterr().out


def test_another_file_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    file.write_text('"nonsense"\n')
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
