# SPDX-License-Identifier: Apache-2.0
"""Pictures of results: what is in a file, which pictures there are of it, and that they show what it says."""

from __future__ import annotations

import sys
from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from bench.evidence.convergence import report
from bench.plot import evidence, training
from bench.plot.__main__ import draw_all, main
from bench.plot.pictures import PICTURES, drawings, kind_of
from bench.plot.style import label_ends, panels, style_of
from bench.training.report import headline, is_ours
from bench.training.report import read as read_training
from commopt.cost import Curve, LinkKey, Links, LinksHeader

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"

KINDS = {
    "compression_error": "compression_error",
    "convergence": "convergence",
    "preset_by_cluster": "preset_by_cluster",
    "probe_200mbit": "probe",
    "training_50mbit": "training",
}


@pytest.mark.parametrize(("stem", "kind"), KINDS.items())
def test_a_file_says_which_benchmark_made_it(stem: str, kind: str) -> None:
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
    assert set(outputs) >= {"probe.png", "convergence.png", "training_50mbit.png", "time_to_loss.png"}
    known = {picture.kind for picture in PICTURES}
    with_picture = {file for file in RESULTS.glob("*.json") if kind_of(file) in known}
    assert {file for _, file, _ in planned} == with_picture


def test_what_pages_show_is_drawn_from_the_files_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, images = tmp_path / "results", tmp_path / "images"
    results.mkdir()
    images.mkdir()
    for name in ("training_50mbit.json", "packing.json", "probe_200mbit.json"):
        (results / name).write_text((RESULTS / name).read_text())
    (images / "training_50mbit.png").touch()
    draw_all(results, images)
    (drawn,) = images.iterdir()  # the others are on no page
    assert drawn.stat().st_size > 10_000
    assert capsys.readouterr().out == f"{drawn}: training_50mbit.json\n"


def test_every_picture_and_result_is_shown_or_read() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(path.read_text() for path in [*pages, *(ROOT / "tests").glob("*.py")])
    assert [path.name for path in (ROOT / "docs" / "images").glob("*.png") if f"images/{path.name}" not in text] == []
    assert [path.name for path in RESULTS.glob("*.json") if path.name not in text and path.stem not in KINDS] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["packing.json", "-o", "out.png"], "is no result of a benchmark that there is a picture of"),
        (["training_50mbit.json"], "name a file and, with -o"),
        (["-o", "out.png"], "name a file and, with -o"),
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


def test_learning_has_a_mark_for_each_preset_at_what_it_sent(figures: list[Figure]) -> None:
    file = RESULTS / "convergence.json"
    evidence.draw_learning(file, Path("unused.png"))
    titles = [axes.get_title(loc="left").partition(":")[0] for axes in figures[0].axes]
    assert titles == list(report.OPTIMIZER_TITLES.values())
    panel = figures[0].axes[0]
    labels = {text.get_text(): text for text in panel.texts}  # at the height of a mark, tied to it
    assert not any("feedback" in name or "rate x" in name for name in labels)
    strategy = "hierarchical_quantized:bits=2"
    (summary,) = (
        each for each in report.compared(*report.read(file)) if (each.optimizer, each.strategy) == ("sgd", strategy)
    )
    (found,) = (
        each
        for each in panel.lines
        if np.asarray(each.get_xdata()).tolist() == [summary.sent] and each.get_marker() == "o"
    )
    assert np.asarray(found.get_ydata()).item() == pytest.approx(summary.percent_of_loss)
    assert labels["quantized:bits=2"].get_color() == found.get_color() == style_of(strategy).colour


@pytest.mark.parametrize(("most_nbytes", "alpha_us"), [(2**12, 1000.0), (2**26, 10.0)])
def test_a_probe_has_several_ticks_however_little_was_measured(
    figures: list[Figure], tmp_path: Path, most_nbytes: int, alpha_us: float
) -> None:
    sizes = [2**exponent for exponent in range(10, 27) if 2**exponent <= most_nbytes]
    curve = Curve.fit((nbytes, alpha_us + nbytes / 1000) for nbytes in sizes)
    file = tmp_path / "links.json"
    header = LinksHeader("2030-01-02T03:04:05+00:00", ("a", "b"), (1, 1), "gloo", "CPU", "2.7.0", "probe")
    Links(header, {LinkKey("inter", "all_reduce", 2): curve}).save(file)
    evidence.draw_probe(file, tmp_path / "probe.png")
    (axes,) = figures[0].axes
    for ticks, (least, most) in ((axes.get_xticks(), axes.get_xlim()), (axes.get_yticks(), axes.get_ylim())):
        assert sum(least <= tick <= most for tick in ticks) >= 2


def test_time_to_a_loss_is_that_of_the_file_and_the_title_says_it(figures: list[Figure]) -> None:
    training.draw_file(RESULTS / "training_200mbit.json", Path("unused.png"))
    environment, outcomes = read_training(RESULTS / "training_200mbit.json")
    assert environment.target_loss == 2.7
    widths = [bar.get_width() for bar in figures[0].axes[1].patches]  # type: ignore[attr-defined]
    drawn = [outcome for outcome in outcomes if not outcome.strategy.startswith("auto")]  # in 20 s it only measures
    assert widths == [outcome.seconds_to(2.7) or environment.seconds for outcome in drawn]
    assert len(drawn) == len(outcomes) - 1
    taken = {each.strategy: each.seconds_to(2.7) or inf for each in outcomes}
    assert taken["ddp"] == inf
    ours = min((name for name in taken if is_ours(name)), key=taken.__getitem__)
    other = min((name for name in taken if not is_ours(name)), key=taken.__getitem__)
    title = f"To a held-out loss of 2.7: {taken[ours]:.3g} s with {ours}, {taken[other]:.3g} s with {other}, "
    assert headline(environment, outcomes) == title + "not in 20 s with ddp"


def test_a_method_has_one_colour_whoever_made_it() -> None:
    """And different methods that pictures show together have different ones."""
    alike = {"torch_powersgd", "unoverlapped_powersgd", "powersgd", "hierarchical_powersgd:matrix_rank=16"}
    assert {style_of(name).colour for name in alike} == {style_of("powersgd").colour}
    assert {style_of(name).line for name in alike} == {"--", ":", "-"}
    names = ("ddp", "flat", "hierarchical", "torch_fp16", "hierarchical_quantized", "quantized:bits=4", "powersgd")
    assert len({style_of(name).colour for name in (*names, "onebit", "dgc", "auto", "LocalSGD(period=2)")}) == 11


def test_labels_stay_apart_and_inside() -> None:
    _, (axes,) = panels(1, "a title", columns=1)
    axes.plot([0, 1], [0, 1])
    label_ends(axes, [(1, height, f"line {height}", "black") for height in (0.5, 0.51, 0.52, 0.99, 1.0)], gap=0.1)
    heights = [text.get_position()[1] for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == [f"line {height}" for height in (0.5, 0.51, 0.52, 0.99, 1.0)]
    assert all(upper - lower > 0.0999 for lower, upper in pairwise(heights))
    assert max(heights) <= 1.0
