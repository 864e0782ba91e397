# SPDX-License-Identifier: Apache-2.0
"""bench.evidence.shapes: clusters as they are written, and shares of stock DDP's step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.evidence import shapes
from bench.output import write_results
from tests.ranks import run


@pytest.mark.parametrize(
    ("text", "nodes", "sites", "shown"),
    [
        ("2+2@100mbit", (2, 2), (), "2 x 2, 100mbit"),
        ("3+1@1gbit", (3, 1), (), "3+1, 1gbit"),
        ("1+1|1@500mbit/50mbit", (1, 1, 1), (2, 1), "3 x 1 in sites of 2+1, 500mbit, 50mbit between"),
        ("2|2@500mbit/50mbit:told", (2, 2), (1, 1), "2 x 2 in sites of 1+1, 500mbit, 50mbit between, told"),
    ],
)
def test_a_shape_is_what_is_written(text: str, nodes: tuple[int, ...], sites: tuple[int, ...], shown: str) -> None:
    shape = shapes.Shape.parse(text)
    cluster = shape.cluster()
    assert cluster.ranks_per_node == shape.nodes == nodes
    assert cluster.sites.nodes == sites
    assert cluster.sites.told == text.endswith("told")
    assert str(shape) == shown


@pytest.mark.parametrize("text", ["2x2", "2+2", "2+2@fast", "0+1@1gbit", "1+1@1gbit:told", "1|@1gbit"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        shapes.Shape.parse(text)


def test_a_share_is_that_of_steps_side_by_side(tmp_path: Path) -> None:
    """In the second turn the machine was ten times slower for both."""
    turns = {"ddp": [1.0, 10.0, 1.0], "flat": [2.0, 20.0, 2.5]}
    record = shapes.record_of(shapes.Shape.parse("2+2@100mbit"), turns)
    assert record["share"] == {"ddp": 1.0, "flat": 2.0}
    assert record["step_ms"] == {"ddp": 1000.0, "flat": 2500.0}
    written = tmp_path / "shapes.json"
    write_results(written, {"turns": 3, "steps": 1, "cpu_count": 2}, "shape", [record])
    assert "| 2 x 2, 100mbit | 1000 | 2.00 |" in shapes.markdown(*shapes.read(written))
    written.write_text(json.dumps({"record": "other"}))
    with pytest.raises(ValueError, match=r"bench\.evidence\.shapes"):
        shapes.read(written)


def test_files_are_shown_as_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a cluster that is in both, the later file has the row; what one has not measured is a dash."""
    files = []
    for number, clusters in enumerate((("2+2@100mbit", "1+1@1gbit"), ("2+2@100mbit", "3+1@1gbit"))):
        turns = {"ddp": [1.0], "flat": [1.5 + number], **({"hierarchical": [0.5]} if number else {})}
        records = [shapes.record_of(shapes.Shape.parse(each), turns) for each in clusters]
        files.append(str(tmp_path / f"{number}.json"))
        write_results(Path(files[-1]), {"turns": 3, "steps": 1, "cpu_count": 2}, "shape", records)
    shown = shapes.markdown(*shapes.parse_options(["--report", *files]).report).splitlines()
    assert shown[2:5] == [
        "| 2 x 2, 100mbit | 1000 | 2.50 | 0.50 |",
        "| 2 x 1, 1gbit | 1000 | 1.50 | - |",
        "| 3+1, 1gbit | 1000 | 2.50 | 0.50 |",
    ]
    options = shapes.parse_options(["--report", *files, "--strategies", "ddp,hierarchical"])
    header, records = options.report
    assert "| 3+1, 1gbit | 1000 | 0.50 |" in shapes.markdown(header, records, options.strategies)
    with pytest.raises(SystemExit):
        shapes.parse_options(["--report", *files, "--strategies", "ddp,torch_bf16"])
    assert "no file has torch_bf16" in capsys.readouterr().err
    write_results(tmp_path / "more.json", {"turns": 7, "steps": 1, "cpu_count": 2}, "shape", [])
    with pytest.raises(SystemExit):
        shapes.parse_options(["--report", *files, str(tmp_path / "more.json")])
    assert "differ in turns: 3, 7" in capsys.readouterr().err


def take_turns(rank: int, world_size: int, strategies: str) -> dict[str, list[float]]:
    options = shapes.parse_options(["--strategies", strategies, "--turns", "2", "--steps", "1"])
    return shapes.measure(options)


def test_every_strategy_has_a_time_in_every_turn() -> None:
    found = run(take_turns, 2, "ddp,torch_fp16,unoverlapped_powersgd,hierarchical_quantized", nodes=(1, 1))
    for turns in found:
        assert set(turns) == {"ddp", "torch_fp16", "unoverlapped_powersgd", "hierarchical_quantized"}
        assert all(len(each) == 2 and min(each) > 0 for each in turns.values())
