# SPDX-License-Identifier: Apache-2.0
"""The page with sliders: its figures are those of the files, and in a browser it follows its controls."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.evidence import explorer
from bench.evidence.scaling.presets import Cell
from bench.evidence.scaling.presets import read as read_cells
from bench.gpu.exposed import read as read_exposed

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explorer.html"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
PLACES = {1: 0, 10: 1, 100: 2}  # of the slider, by Gb/s


def cells() -> dict[tuple[str, int, int, float], Cell]:
    """Return all predictions by model, GPUs of a node, nodes and rate."""
    found: dict[tuple[str, int, int, float], Cell] = {}
    for path in explorer.FILES:
        given, read = read_cells(ROOT / path)
        found |= {(each.model, given.gpus_per_node, each.nodes, each.gbps): each for each in read}
    return found


def data_of(text: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert match is not None
    data: dict[str, Any] = json.loads(match[1])
    return data


def test_the_page_of_the_documentation_is_of_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    explorer.write(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == PAGE.read_text(), (
        "python -m bench.evidence.explorer docs/explorer.html"
    )


def test_every_prediction_is_on_the_page() -> None:
    points = data_of(PAGE.read_text())["points"]
    found = {(each["model"], each["gpus"], each["nodes"], each["gbps"]): each["steps"] for each in points}
    assert found.keys() == cells().keys()
    for key, cell in cells().items():
        predicted = {each["preset"]: each["step_ms"] for each in cell.presets}
        assert {"stock", "hierarchical_powersgd"} < found[key].keys() <= predicted.keys()
        assert all(abs(ms - predicted[name]) < 0.01 for name, ms in found[key].items())


def test_it_asks_the_network_for_nothing() -> None:
    text = PAGE.read_text().replace("http://www.w3.org/2000/svg", "")  # a name
    assert not re.search(r"https?:|url\(|@import|\bsrc=|\bhref=|fetch\(|XMLHttp", text)


def shown(folder: Path, controls: Mapping[str, str | float]) -> str:
    """Return the page as a browser shows it after these controls were moved."""
    assert BROWSER is not None
    moves = "".join(
        f'$("{name}").value = {json.dumps(str(value))}; $("{name}").dispatchEvent(new Event("input"));'
        for name, value in controls.items()
    )
    moved = folder / "moved.html"
    moved.write_text(PAGE.read_text().replace("</body>", f"<script>{moves}</script></body>"))
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder}/profile",
        "--dump-dom",
    ]
    done = subprocess.run([*command, moved.as_uri()], capture_output=True, text=True, check=True, timeout=100)
    return re.sub("<script.*?</script>", "", done.stdout, flags=re.DOTALL)


def rows_of(text: str) -> dict[str, list[str]]:
    rows = re.findall(r'<tr data-strategy="([^"]*)">(.*?)</tr>', text, re.DOTALL)
    return {name: re.findall(r"<td[^>]*>([^<]*)</td>", row) for name, row in rows}


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium or chrome")
@pytest.mark.parametrize(
    ("model", "gpus", "place", "nodes", "gbps"),
    [("gpt2", 8, 1, 4, 10), ("bert-large", 1, 2, 8, 1), ("resnet50", 8, 3, 16, 100), ("gpt2", 1, 0, 2, 10)],
)
def test_a_browser_shows_the_prediction_for_its_controls(
    model: str, gpus: int, place: int, nodes: int, gbps: int, tmp_path: Path
) -> None:
    where: dict[str, str | float] = {
        "gpus": gpus,
        "model": model,
        "nodes": place,
        "gbps": PLACES[gbps],
        "optimizer": "sgd",
    }
    text = shown(tmp_path, where)
    rows, cell = rows_of(text), cells()[model, gpus, nodes, gbps]
    steps = explorer.steps_to_a_loss() | (explorer.steps_of_many() if nodes > 2 else {})
    assert {"stock", "flat", "hierarchical_onebit"} < rows.keys()
    ratios = []
    for name, (_, ms, told_steps, ratio, *_) in rows.items():
        predicted = next(each["step_ms"] for each in cell.presets if each["preset"] == name)
        assert float(ms) == pytest.approx(predicted, abs=0.51)
        assert float(told_steps) == pytest.approx(steps[name]["sgd"], abs=0.006)
        ratios.append(float(ratio))
        assert ratios[-1] == pytest.approx(predicted * steps[name]["sgd"] / cell.stock_ms, abs=0.006)
    assert ratios == sorted(ratios)
    assert f"{nodes} ({nodes * gpus} GPUs)" in text
    assert text.count("<polyline") >= 5


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium or chrome")
def test_between_two_rates_times_lie_between_and_measured_points_are_drawn(tmp_path: Path) -> None:
    where: dict[str, str | float] = {"gpus": 1, "model": "gpt2", "nodes": 0}
    between = rows_of(shown(tmp_path, {**where, "gbps": 0.5}))
    here = shown(tmp_path, {**where, "gbps": 1})
    slow, fast = (cells()["gpt2", 1, 2, gbps] for gbps in (1, 10))
    for name, (_, ms, *_) in between.items():
        at = [next(each["step_ms"] for each in cell.presets if each["preset"] == name) for cell in (slow, fast)]
        assert min(at) - 0.51 <= float(ms) <= max(at) + 0.51
    _, measured = read_exposed(ROOT / explorer.MEASURED)
    for each in measured:
        if each.strategy in rows_of(here) and each.replay is not False:
            assert f"{each.exposed_ms:.2f}".rstrip("0").rstrip(".") + " ms exposed, measured on" in here
    assert "ms exposed, measured on" not in shown(tmp_path, {**where, "gbps": 1, "model": "resnet50"})
