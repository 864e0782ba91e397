"""The scaling benchmark: its arithmetic, its file, its command line and one real run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.scaling import report
from bench.scaling.__main__ import points_of
from bench.scaling.options import batch_per_rank, parse_modes, parse_options, parse_worlds
from bench.scaling.prediction import predicted_ms, workload_of
from bench.scaling.report import Environment, Point, base_of, efficiencies, efficiency
from bench.scaling.table import print_table
from bench.training.run import Run
from commopt.cluster import Cluster
from examples.train_gpt import add_model_options
from tests.ranks import run

ROOT = Path(__file__).parents[1]

ENVIRONMENT = Environment(
    date="2030-01-01T00:00:00+00:00",
    command="python -m bench.scaling",
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


def test_weak_efficiency_is_throughput_per_rank() -> None:
    assert FOUR.ranks == 4
    assert FOUR.samples_per_s == 4 * 8 / 0.4
    assert efficiency(FOUR, ONE) == pytest.approx((4 * 8 / 0.4 / 4) / (8 / 0.1))
    assert efficiencies(FOUR, POINTS) == (0.25, 125 / 400)
    assert FOUR.communication_efficiency == 0.5


def test_strong_efficiency_is_time_saved() -> None:
    """T(1) 1 / (T(4) 4) with 32 samples in all."""
    alone = replace(ONE, mode="strong", batch_per_rank=32, step_ms=360.0)
    shared = replace(FOUR, mode="strong", batch_per_rank=8, step_ms=120.0)
    assert efficiency(shared, alone) == pytest.approx(360 * 1 / (120 * 4))


def test_a_base_has_the_same_mode_and_strategy() -> None:
    strong = replace(ONE, mode="strong")
    flat = replace(ONE, strategy="flat")
    assert base_of(FOUR, [strong, flat], 1, 1) is None
    assert base_of(FOUR, [strong, flat, ONE], 1, 1) is ONE
    assert efficiencies(FOUR, [FOUR, ONE]) == (0.25, None)


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    report.write(path, ENVIRONMENT, POINTS)
    header, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert header["kind"] == "scaling"
    assert rows[2]["ranks"] == 4
    assert rows[2]["efficiency_of_1_rank"] == 0.25
    assert rows[2]["communication_efficiency"] == 0.5
    assert report.read(path) == (ENVIRONMENT, POINTS)


@pytest.mark.parametrize("text", ["", "not json\n", "[]\n", '{"record": "point"}\n', '{"record": "environment"}\n'])
def test_reading_something_else_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is not a file that bench\.scaling --json wrote"):
        report.read(path)


def test_table_says_that_ranks_share_processors(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(ENVIRONMENT, POINTS)
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.strip().startswith("ddp")]
    assert rows[2] == ["ddp", "2", "x", "2", "8", "400", "200", "80.0", "0.25", "0.31", "0.50", "3.00"]
    assert "Up to 4 ranks share 2 processors" in printed
    print_table(replace(ENVIRONMENT, cpu_count=8), POINTS)
    assert "share" not in capsys.readouterr().out.replace("as a share of", "")


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
    monkeypatch.setattr(sys, "argv", ["bench.scaling", *arguments.split()])
    with pytest.raises(SystemExit):
        parse_options()
    assert message in capsys.readouterr().err


def test_strong_scaling_shares_the_batch_of_the_largest_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.scaling", "--worlds", "1x1,4x2", "--batch", "3"])
    options = parse_options()
    assert options.global_batch == 24
    assert [batch_per_rank("strong", ranks, options) for ranks in (1, 2, 8)] == [24, 12, 3]
    assert batch_per_rank("weak", 8, options) == 3


def test_a_world_of_equal_batches_counts_in_both_modes() -> None:
    own = {"strategy": "ddp", "step_ms": 400.0, "inter_mib_per_step": 3.0}
    points = points_of((2, 2), ["weak", "strong"], 8, {"noop_ms": 200.0, "strategies": [own]})
    assert points == [FOUR, replace(FOUR, mode="strong")]


@pytest.mark.cluster
@pytest.mark.slow
def test_two_worlds_on_the_emulated_cluster(tmp_path: Path) -> None:
    if missing := Cluster.missing("1gbit"):
        pytest.skip(missing)
    tiny = ["--layers", "1", "--width", "64", "--context", "16", "--turns", "1", "--steps", "4"]
    options = ["--worlds", "1x1,2x1", "--modes", "weak", "--strategies", "ddp,hierarchical_bf16", "--rate", "1gbit"]
    file = tmp_path / "scaling.json"
    command = [sys.executable, "-m", "bench.scaling", *options, *tiny, "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    environment, points = report.read(file)
    assert environment.emulated_rate == "1gbit"
    assert [(point.nodes, point.strategy) for point in points] == [
        (nodes, strategy) for nodes in (1, 2) for strategy in ("ddp", "hierarchical_bf16")
    ]
    assert all(efficiencies(point, points)[0] == 1.0 for point in points[:2])
    assert all(point.step_ms > 0 and point.noop_ms > 0 for point in points)
    # Two nodes of one rank: each sends its whole gradient once, in float32 or bfloat16.
    gradient_mib = 4 * environment.parameters / 2**20
    assert points[0].inter_mib_per_step < 0.1 * gradient_mib
    assert points[2].inter_mib_per_step == pytest.approx(2 * gradient_mib, rel=0.2)
    assert points[3].inter_mib_per_step == pytest.approx(gradient_mib, rel=0.2)


# ------------------------------------------------------------------------------ predictions


def profile(rank: int, world_size: int) -> tuple[list[tuple[str, float]], list[float], list[tuple[str, int]]]:
    options = argparse.Namespace(model="gpt", plan="ddp", **vars(tiny_gpt()))
    noop = Run("noop", options, torch.device("cpu"))
    noop.step()
    workload = workload_of(noop, samples=2)
    parameters = [(name, p.nbytes) for name, p in noop.training.ddp.module.named_parameters()]
    return [(unit.names[0], unit.ready_us) for unit in workload.units], noop.step_s[1:], parameters


def tiny_gpt() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    return parser.parse_args(["--layers", "1", "--width", "64", "--context", "16"])


def test_a_workload_is_a_step_without_communication() -> None:
    """The optimizer's part comes first, so that the last gradient is ready when a step is over; all ranks agree."""
    (units, step_s, parameters), (other_units, _, _) = run(profile, 2)
    assert units == other_units
    assert sorted(name for name, _ in units) == sorted(name for name, _ in parameters)
    ready_us = [ready for _, ready in units]
    assert ready_us == sorted(ready_us)
    assert units[0][0].startswith("head")  # backward begins at the end of the model
    assert units[-1][0] in ("bytes.weight", "positions.weight")
    assert 0 < ready_us[0] < ready_us[-1]
    assert 1e6 * min(step_s) * 0.9 < ready_us[-1]


def predictions(rank: int, world_size: int) -> dict[str, float]:
    noop = Run("noop", argparse.Namespace(model="gpt", plan="ddp", **vars(tiny_gpt())), torch.device("cpu"))
    return dict(predicted_ms(["ddp", "flat", "torch_bf16", "quantized:bits=4", "auto"], noop, 12.5, 2, probe_s=1.0))


def test_ranks_predict_alike_and_communication_takes_time() -> None:
    first, second = run(predictions, 2, nodes=(1, 1))
    assert first == second
    assert set(first) == {"flat", "quantized:bits=4"}  # of what commopt does, and does the same in every step
    assert min(first.values()) > 12.5


def test_nothing_is_predicted_of_a_rank_alone() -> None:
    assert run(predictions, 1) == [{}]


def test_predictions_are_kept_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [ONE, NODE, replace(FOUR, predicted_ms=390.0)]
    report.write(tmp_path / "scaling.json", ENVIRONMENT, points)
    assert report.read(tmp_path / "scaling.json")[1] == points
    print_table(ENVIRONMENT, points)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("ddp")]
    assert [row[-1] for row in rows] == ["-", "-", "390"]
