# SPDX-License-Identifier: Apache-2.0
"""A links file: what is written is read again, what is broken is refused by name, what is missing estimated or said."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest

from commopt.cost import Curve, LinkKey, Links, LinksHeader, WorkKey
from commopt.errors import ConfigurationError

HEADER = LinksHeader("2025-01-31", ("a", "b"), (2, 2), "gloo", "cpu", "2.9.0", "python -m commopt probe")
SLOW = Curve.fit([(2**power, 100 + 2**power * 0.05) for power in range(10, 20)])
FAST = Curve.linear(5, 1e-4)


@pytest.fixture
def links() -> Links:
    curves = {
        LinkKey("inter", "all_reduce", 2): SLOW,
        LinkKey("inter", "all_reduce", 2, 2): SLOW.scaled(1, 2, ""),
        LinkKey("intra", "reduce_scatter", 4, 2): FAST,
    }
    return Links(HEADER, curves, {WorkKey("encode", "Quantize(8)"): FAST, WorkKey("copy"): FAST})


def test_what_is_saved_is_loaded(links: Links, tmp_path: Path) -> None:
    for nominal in (False, True):
        saved = Links(links.header, links.curves, links.work, nominal)
        saved.save(tmp_path / "links.json")
        assert Links.load(tmp_path / "links.json") == saved


def test_a_save_that_fails_leaves_the_file_before(
    links: Links, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, linked = tmp_path / "links.json", tmp_path / "linked.json"
    linked.symlink_to(path)
    links.save(linked)
    before = path.read_text()

    def full(handle: int) -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        Links(links.header, {}).save(linked)
    assert path.read_text() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["linked.json", "links.json"]


def test_a_file_has_a_line_for_every_curve_with_the_quality_of_its_fit(links: Links, tmp_path: Path) -> None:
    links.save(tmp_path / "links.json")
    lines = (tmp_path / "links.json").read_text().splitlines()
    assert sum('"primitive"' in line for line in lines) == 3
    entry = json.loads((tmp_path / "links.json").read_text())["links"][0]
    assert entry["r_squared"] == pytest.approx(1)
    assert entry["mape"] == pytest.approx(0, abs=1e-5)


def test_other_ranks_are_scaled_by_the_ring(links: Links) -> None:
    eight = links.curve("inter", "all_reduce", 8)
    assert eight.segments[0].alpha_us == pytest.approx(7 * SLOW.segments[0].alpha_us)
    assert eight.segments[0].beta_us_per_byte == pytest.approx(7 / 4 * SLOW.segments[0].beta_us_per_byte)
    assert eight.note == "for 8 ranks from 2"
    assert links.curve("intra", "reduce_scatter", 4, 1).note == "for 1 groups at once from 2"


def test_the_nearest_number_of_ranks_is_taken() -> None:
    curves = {LinkKey("inter", "all_gather", ranks): Curve.linear(ranks, 0) for ranks in (2, 16)}
    links = Links(HEADER, curves)
    assert links.curve("inter", "all_gather", 3).note == "for 3 ranks from 2"
    assert links.curve("inter", "all_gather", 6).note == "for 6 ranks from 16"  # of ratios: 3 and 2.7
    assert links.curve("inter", "all_gather", 12).note == "for 12 ranks from 16"


def test_what_is_missing_altogether_is_said_with_what_there_is(links: Links) -> None:
    with pytest.raises(ConfigurationError) as caught:
        links.curve("world", "all_reduce", 4)
    for part in ("all_reduce at level 'world'", "inter all_reduce (2, 2x2)", "intra reduce_scatter (2x4)"):
        assert part in str(caught.value)


def changed(content: dict[str, Any], *path: str | int, to: Any) -> None:
    for step in path[:-1]:
        content = content[step]  # type: ignore[index]
    content[path[-1]] = to  # type: ignore[index]


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another format": (lambda c: changed(c, "format", to=99), "format 99, but"),
    "no links": (lambda c: c.pop("links"), "links is None; it must be a list"),
    "links no list": (lambda c: changed(c, "links", to={}), "links is {}"),
    "unknown primitive": (lambda c: changed(c, "links", 0, "primitive", to="scan"), "'scan'.* cannot be"),
    "one rank": (lambda c: changed(c, "links", 0, "ranks", to=1), "ranks=1, groups=1.* cannot be"),
    "no groups": (lambda c: changed(c, "links", 2, "groups", to=0), "ranks=4, groups=0.* cannot be"),
    "the same twice": (lambda c: c["links"].append(c["links"][0]), r"links\[3\]: there are figures for \('inter'"),
    "no segments": (lambda c: changed(c, "links", 0, "segments", to=[]), "segments begin at"),
    "a short segment": (
        lambda c: changed(c, "links", 0, "segments", 0, to=[0, 1]),
        r"segments\[0\] is \[0, 1\]; it must be a list of 3",
    ),
    "negative bandwidth": (lambda c: changed(c, "links", 0, "segments", 0, to=[0, 1, -1]), "beta_us_per_byte"),
    "header of numbers": (lambda c: changed(c, "header", "date", to=5), "date is 5; it must be text"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_by_what_is_wrong(case: str, links: Links, tmp_path: Path) -> None:
    breaking, complaint = BROKEN[case]
    path = tmp_path / "links.json"
    links.save(path)
    content = json.loads(path.read_text())
    breaking(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=complaint) as caught:
        Links.load(path)
    assert str(path) in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Links.load(tmp_path / "nowhere.json")
    (tmp_path / "list").write_text("[]")
    with pytest.raises(ConfigurationError, match="a list instead of an object"):
        Links.load(tmp_path / "list")
