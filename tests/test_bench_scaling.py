# SPDX-License-Identifier: Apache-2.0
"""The scaling benchmark: its arithmetic, its file, its command line and one real run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.evidence.scaling import report
from bench.evidence.scaling.report import Environment, Point, markdown
from bench.evidence.scaling.worker import batch_per_rank, parse_modes, parse_options, parse_worlds
from commopt.cluster import EmulatedCluster

ROOT = Path(__file__).parents[1]

ENVIRONMENT = Environment(
    date="2030-01-01T00:00:00+00:00",
    command="python -m bench.evidence.scaling",
    torch="2.13.0",
    python="3.11.7",
    cpu_count=2,
    emulated_rate="200mbit",
    model="gpt",
    parameters=4_880_640,
)
ONE = Point("weak", 1, 1, 8, "ddp", step_ms=100.0, noop_ms=90.0, inter_mib_per_step=0.0)
NODE = replace(ONE, ranks_per_node=2, step_ms=125.0, noop_ms=120.0)
FOUR = replace(ONE, nodes=2, ranks_per_node=2, step_ms=400.0, noop_ms=200.0, inter_mib_per_step=3.0)
POINTS = [ONE, NODE, FOUR]


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    report.write(path, ENVIRONMENT, POINTS)
    header, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert header["kind"] == "scaling"
    assert rows[2]["step_ms"] == 400.0
    assert report.read(path) == (ENVIRONMENT, POINTS)


def test_worlds_and_modes() -> None:
    assert parse_worlds("1x1,2x4") == [(1, 1), (2, 4)]
    assert parse_modes("strong") == ["strong"]
    for text in ("", "2", "0x1", "2x2,", "2x2x2"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no list of NODESxRANKS"):
            parse_worlds(text)
    with pytest.raises(argparse.ArgumentTypeError, match="must name some of weak, strong"):
        parse_modes("weak,other")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--global-batch 6 --worlds 1x1,2x2", "--global-batch 6 cannot be shared out over 4 ranks"),
        ("--strategies ddp,hierarchy", "strategy 'hierarchy' is unknown"),
    ],
)
def test_settings_that_cannot_work(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.evidence.scaling", *arguments.split()])
    with pytest.raises(SystemExit):
        parse_options()
    assert message in capsys.readouterr().err


def test_strong_scaling_shares_the_batch_of_the_largest_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.evidence.scaling", "--worlds", "1x1,4x2", "--batch", "3"])
    options = parse_options()
    assert options.global_batch == 24
    assert [batch_per_rank("strong", ranks, options) for ranks in (1, 2, 8)] == [24, 12, 3]
    assert batch_per_rank("weak", 8, options) == 3


@pytest.mark.cluster
@pytest.mark.slow
def test_two_worlds_on_the_emulated_cluster(tmp_path: Path) -> None:
    if missing := EmulatedCluster.missing("1gbit"):
        pytest.skip(missing)
    tiny = ["--layers", "1", "--width", "64", "--context", "16", "--turns", "1", "--steps", "4"]
    options = ["--worlds", "1x1,2x1", "--modes", "weak", "--strategies", "ddp,hierarchical_bf16", "--rate", "1gbit"]
    file = tmp_path / "scaling.json"
    command = [sys.executable, "-m", "bench.evidence.scaling", *options, *tiny, "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    environment, points = report.read(file)
    assert environment.emulated_rate == "1gbit"
    assert [(point.nodes, point.strategy) for point in points] == [
        (nodes, strategy) for nodes in (1, 2) for strategy in ("ddp", "hierarchical_bf16")
    ]
    assert all(point.step_ms > 0 and point.noop_ms > 0 for point in points)
    # Two nodes of one rank: each sends its whole gradient once, in float32 or bfloat16.
    gradient_mib = 4 * environment.parameters / 2**20
    assert points[0].inter_mib_per_step < 0.1 * gradient_mib
    assert points[2].inter_mib_per_step == pytest.approx(2 * gradient_mib, rel=0.2)
    assert points[3].inter_mib_per_step == pytest.approx(gradient_mib, rel=0.2)


def test_the_table_has_a_row_for_each_world() -> None:
    found = markdown([ONE, FOUR], "weak").splitlines()
    assert found[2:] == ["| 1 x 1, 8 | 90 | 100 |", "| 2 x 2, 8 | 200 | 400 |"]
