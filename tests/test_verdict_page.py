# SPDX-License-Identifier: Apache-2.0
"""The verdict as a page: everything that the 25 lines leave out, and nothing that another host could write into it."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from commopt.doctor.verdict.facts import Gain, Measurements, Problem
from commopt.doctor.verdict.judge import judge
from commopt.doctor.verdict.page import write_verdict
from tests.html_pages import Page
from tests.test_verdict import HEALTHY, NODES, TRAINING, level, wire

MANY = tuple(f"host{number}" for number in range(12))
SLOW = replace(
    HEALTHY,
    wires=(wire("node0"), wire("node1", 2.0), wire("node2"), replace(wire("node0"), interface="eth9", used=False)),
    levels=(level(1.9), replace(level(110.0), level="intra", expected_gbps=None)),
    problems=(Problem("mtu", "warning", "1500", "sudo ip link set eth0 mtu 9000"),),
    training=replace(TRAINING, gains=(*TRAINING.gains, Gain("onebit_local", 210.0, False, (None, 1.18)))),
)
CASES = {
    "healthy": HEALTHY,
    "slow": SLOW,
    "many": replace(HEALTHY, nodes=MANY, ranks=(2,) * 12, wires=tuple(map(wire, MANY))),
    "nothing measured": Measurements(NODES[:1], (1,)),
    "silent": replace(HEALTHY, wires=(replace(wire("node0"), send_gbps=None, receive_gbps=None, several_gbps=None),)),
}


def page_of(found: Measurements, file: Path, changed: tuple[str, ...] = ()) -> Page:
    write_verdict(file, judge(found), found, changed)
    return Page(file)


@pytest.mark.parametrize("name", CASES)
def test_a_page_has_every_link_cause_and_command(name: str, tmp_path: Path) -> None:
    found = CASES[name]
    verdict, page = judge(found), page_of(found, tmp_path / "page.html", ("eth0: half",))
    text = "\n".join(page.texts)
    assert verdict.sentence in page.texts
    assert {row.link for row in verdict.rows} <= set(page.texts)
    for cause in verdict.causes:
        assert cause.text in text
        assert all(command in text for command in (cause.remedy, *cause.elsewhere))
    for problem in found.problems:
        assert problem.value in text
    for gain in () if found.training is None else found.training.gains:
        assert gain.strategy in page.texts
    assert "eth0: half" in page.texts
    places = [value for key, value in page.attributes if key in ("x", "x1", "x2", "width") and value.endswith("%")]
    assert all(0 <= float(value.rstrip("%")) <= 100 for value in places)


def test_the_longer_bar_is_the_faster_link(tmp_path: Path) -> None:
    page = page_of(SLOW, tmp_path / "page.html")
    bars = [pair for pair in page.attributes if pair[0] == "width" and pair[1].endswith("%")]
    links = [float(value.rstrip("%")) for _, value in bars[: len(judge(SLOW).rows)]]
    rates = [row.gbps or 0.0 for row in judge(SLOW).rows]
    assert len(links) == len(rates)
    for (rate, width), (other, another) in combinations(zip(rates, links, strict=True), 2):
        assert (rate < other) == (width < another)


def test_names_of_other_hosts_are_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>&\"'"
    found = replace(SLOW, nodes=(name, *NODES[1:]), wires=(wire(name), *SLOW.wires[1:]))
    page = page_of(found, tmp_path / "page.html")
    assert any(name in text for text in page.texts)
    assert "<script" not in (tmp_path / "page.html").read_text()
