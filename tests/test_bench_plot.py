# SPDX-License-Identifier: Apache-2.0
"""Pictures of results: what is in a file, which pictures there are of it, and that they show what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from bench.plot import evidence, training
from bench.plot.__main__ import draw_all, main
from bench.plot.pictures import PICTURES, drawings, kind_of
from bench.training.report import read as read_training

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"

KINDS = {
    "all_gather_2x1_50mbit": "bandwidth",
    "bucketing": "bucketing",
    "compression_error": "compression_error",
    "convergence": "convergence",
    "convergence_50mbit": "training",
    "hook_overhead": "hook_overhead",
    "periodic": "periodic",
    "probe_200mbit": "probe",
    "recording_cost": "recording_cost",
    "training_50mbit": "training",
}


@pytest.mark.parametrize(("stem", "kind"), KINDS.items())
def test_files_from_before_there_were_kinds_are_known_by_their_command(stem: str, kind: str) -> None:
    assert kind_of(RESULTS / f"{stem}.json") == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"record": "environment", "kind": "scaling"}\n{}\n', "scaling"),
        ('{"environment": {"kind": "bandwidth", "command": "python -m bench.other"}}', "bandwidth"),
        ('{"command": "python -m bench.cluster --nodes 2 -m bench.training --json bench/out.json"}', "training"),
        ('{"command": "python -m other"}', None),
        ('{"environment": 3}', None),
        ("[]", None),
        ("", None),
        ("no json", None),
    ],
)
def test_kinds(text: str, kind: str | None, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text(text)
    assert kind_of(file) == kind


def test_every_file_of_results_that_has_a_picture_is_drawn_once() -> None:
    planned = drawings(RESULTS.glob("*.json"), Path("images"))
    outputs = [output.name for _, _, output in planned]
    assert len(set(outputs)) == len(outputs)
    assert set(outputs) >= {
        *("demo.png", "probe.png", "convergence.png", "bucketing.png", "busbw.png"),
        *("training_50mbit.png", "time_to_loss.png"),
    }
    drawn = {file for _, files, _ in planned for file in files}
    known = {picture.kind for picture in PICTURES}
    left_out = {file.name for file in RESULTS.glob("*.json") if kind_of(file) in known} - {file.name for file in drawn}
    assert left_out == set()


def test_all_is_drawn_from_the_files_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, images = tmp_path / "results", tmp_path / "images"
    results.mkdir()
    images.mkdir()
    for name in ("bucketing.json", "training_unshaped.json", "hook_overhead.json", "probe_200mbit.json"):
        (results / name).write_text((RESULTS / name).read_text())
    draw_all(results, images)
    assert sorted(path.name for path in images.iterdir()) == [
        "bucketing.png",
        "probe.png",
        "training_unshaped.png",
    ]
    assert "bucketing.png: bucketing.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hook_overhead.json", "-o", "out.png"], "is no result of a benchmark that there is a picture of"),
        (["bucketing.json", "convergence.json", "-o", "out.png"], "draw one kind at a time"),
        (["bucketing.json", "-o", "out.png", "--figure", "time_to_loss"], "known: bucketing"),
        (["training_50mbit.json", "demo_200mbit.json", "-o", "out.png"], "a picture of one file, not of 2"),
        (["bucketing.json"], "name the files and, with -o"),
        (["-o", "out.png"], "name the files and, with -o"),
        (["--figure", "busbw"], "name the files and, with -o"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(RESULTS)
    monkeypatch.setattr(sys, "argv", ["bench.plot", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------ what they show


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is saved while the test runs."""
    saved: list[Figure] = []
    for module in (evidence, training):
        monkeypatch.setattr(module, "save", lambda figure, path: saved.append(figure))
    return saved


def test_learning_has_a_mark_for_each_strategy_at_what_it_sent(figures: list[Figure]) -> None:
    evidence.draw_learning(RESULTS / "convergence.json", Path("unused.png"))
    titles = [axes.get_title(loc="left") for axes in figures[0].axes]
    assert titles == ["digits, SGD with momentum", "digits, AdamW", "gpt, SGD with momentum", "gpt, AdamW"]
    lines = {str(line.get_label()): line for line in figures[0].axes[2].lines}
    runs = [json.loads(text) for text in (RESULTS / "convergence.json").read_text().splitlines()[1:]]
    own = [run for run in runs if (run["task"], run["optimizer"], run["strategy"]) == ("gpt", "sgd", "hierarchical")]
    (mib,), (end,) = np.asarray(lines["hierarchical"].get_data())
    assert mib == pytest.approx(own[0]["inter_bytes_per_step"] * 400 / 2**20, rel=1e-3)
    assert end == pytest.approx(np.mean([run["curve"][-1]["held_out_loss"] for run in own]))


def test_time_to_a_loss_is_that_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(training, "save", lambda figure, path: saved.append(figure))
    training.draw_time_to_loss(RESULTS / "training_200mbit.json", Path("unused.png"))
    environment, outcomes = read_training(RESULTS / "training_200mbit.json")
    assert environment.target_loss == 2.7
    widths = [bar.get_width() for bar in saved[0].axes[1].patches]  # type: ignore[attr-defined]
    assert widths == [outcome.seconds_to(2.7) or environment.seconds for outcome in outcomes]
