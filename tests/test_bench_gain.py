# SPDX-License-Identifier: Apache-2.0
"""bench.evidence.gain: predicted gains beside measured ones, and every miss in the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.evidence import gain
from bench.output import write_results
from commopt.doctor.verdict.facts import Gain, Training
from tests.ranks import run

STEP = Training("GPT", True, 100.0, 30.0, 70.0, gains=(Gain("hierarchical_bf16", 50.0, False, (1.0, 1.0)),))
FASTER = replace(STEP, gains=(Gain("hierarchical_bf16", 12.0, False, (1.0, 1.0)),))
HEADER = {"turns": 3, "steps": 1, "cpu_count": 2}


def test_a_gain_is_that_of_steps_side_by_side() -> None:
    """In the second turn the machine was ten times slower for both."""
    turns = {"ddp": [0.1, 1.0, 0.1], "hierarchical_bf16": [0.05, 0.5, 0.04]}
    record = gain.record_of("2 x 1", STEP, "hierarchical_bf16", turns)
    assert (record["predicted_gain"], record["measured_gain"]) == (2.0, 2.0)
    assert (record["recorded_ms"], record["predicted_ms"]) == (100.0, 50.0)
    assert (record["stock_ms"], record["strategy_ms"]) == (100.0, 50.0)


def test_misses_are_printed_and_counted(tmp_path: Path) -> None:
    turns = {"ddp": [0.1], "hierarchical_bf16": [0.05]}
    held = gain.record_of("2 x 1", STEP, "hierarchical_bf16", turns)
    missed = gain.record_of("2 x 2", STEP, "hierarchical_bf16", {**turns, "hierarchical_bf16": [0.06]})
    fast = gain.record_of("4 x 1", FASTER, "hierarchical_bf16", {**turns, "hierarchical_bf16": [0.01]})
    file = tmp_path / "gain.json"
    write_results(file, HEADER, "gain", [held, missed, fast])
    text = gain.markdown(*gain.read(file))
    assert "| 50, 50 | 50, 50 | +0% | 2.00, 2.00 | +0% |" in text
    assert "| 50, 60 | 50, 40 | +25%, missed | 2.00, 1.67 | +20%, missed |" in text
    assert "| 12, 10 | 88, 90 | -2% | 8.33, 10.00 | -17%, missed |" in text
    assert "2 of 3 in what a step saves, which is what the verdict says; 1 in how many times as fast" in text
    file.write_text(json.dumps({"record": "other"}))
    with pytest.raises(ValueError, match=r"bench\.evidence\.gain"):
        gain.read(file)


@pytest.mark.parametrize(("strategy_s", "misses"), [(0.2, False), (0.1, False), (0.05, True)])
def test_where_nothing_was_recommended_a_gain_is_a_miss(strategy_s: float, misses: bool) -> None:
    nothing = Training("GPT", True, 100.0, 99.0, 1.0)
    name = gain._CHECKED
    record = gain.record_of("2 x 1", nothing, name, {"ddp": [0.1], name: [strategy_s]})
    assert record["strategy"] == ""
    assert (abs(gain.error_of(record)) > gain.WITHIN) == misses


def test_clusters_differ_and_can_be_made() -> None:
    assert len(gain.CASES) == len(set(map(str, gain.CASES))) == 10
    assert all(case.cluster().ranks_per_node == case.nodes for case in gain.CASES)


def measure(rank: int, world_size: int, folder: str) -> None:
    options = gain.parse_options(["--turns", "2", "--steps", "1", "--samples", "2"])
    file = Path(folder, "turns.json")
    gain.take_turns("hierarchical_bf16", file, options)


def test_stock_and_the_strategy_have_a_time_in_every_turn(tmp_path: Path) -> None:
    run(measure, 2, str(tmp_path), nodes=(1, 1))
    turns = json.loads((tmp_path / "turns.json").read_text())
    assert set(turns) == {"ddp", "hierarchical_bf16"}
    assert all(len(each) == 2 and min(each) > 0 for each in turns.values())
