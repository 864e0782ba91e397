# SPDX-License-Identifier: Apache-2.0
"""The network between nodes: read from a measurement's file, as text, and as a picture in which nothing overlaps."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from commopt.cost import Links, LinksHeader
from tests.test_picture import inside, overlapping
from topology.__main__ import main
from topology.network import Network, SiteLevel, level_names, read_network
from topology.network_picture import boxes_of_network
from topology.picture import Box

SITES = ("site0/rack0",) * 5 + ("site0/rack1",) * 2 + ("site1/rack0",) * 3
LEVELS = (
    SiteLevel("site", (7, 3), 9.0, 0.5, 2.0, 20.0, 900.0),
    SiteLevel("rack", (5, 2, 3), 9.5, 2.0, 2.1, 20.0, 25.0),
)
NETWORK = Network(tuple(f"n{node}" for node in range(10)), SITES, LEVELS, (9.0,) * 9 + (1.0,), ("n9",), 50, 9.5)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "links.json"
    Links(LinksHeader(), {}, network=NETWORK).save(path)
    return path


def test_what_the_probe_wrote_is_read_back(file: Path) -> None:
    assert read_network(file.read_text(), "f") == NETWORK
    assert Links.load(file).network == NETWORK
    assert Links.read(Links(LinksHeader(), {}).as_text(), "f").network is None


def test_the_command_shows_a_network(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "network.svg"
    assert main(["show", str(file), "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["10 nodes", "  site0", "    rack0", "      n0  9.00 Gb/s"]
    assert "      n9  1.00 Gb/s, slow" in lines
    assert lines[-2] == (
        "sites: 9.00 Gb/s a node inside, 500 Mb/s across while all send (2.00 Gb/s for one alone: they share a link)"
    )
    assert lines[-1] == "racks: 9.50 Gb/s a node inside, 2.00 Gb/s across while all send"
    assert "<svg" in picture.read_text()
    assert main(["show", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(asdict(NETWORK)))


def damaged(**parts: Any) -> str:
    return json.dumps({"network": json.loads(json.dumps(asdict(NETWORK))) | parts})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "has no network"),
        ('{"links": []}', "has no network"),
        ('{"network": null}', "nothing was looked for"),
        ('{"network": {}}', "its network is damaged"),
        (damaged(sites=["site0"]), "1 sites of 10 nodes"),
        (damaged(levels=[]), "has not 0 levels"),
        (damaged(nodes="n0"), "is no list"),
        (damaged(gbps=[True] * 10), "gbps is [True"),
    ],
)
def test_other_input_is_refused_in_one_line(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    assert main(["show", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize("network", [NETWORK, replace(NETWORK, sites=(), levels=())], ids=["sites", "none"])
def test_every_node_is_in_the_boxes_of_its_sites_and_nothing_overlaps(network: Network) -> None:
    found, lines = boxes_of_network(network)
    boxes = [Box(box.kind, box.x, -box.y, box.width, box.height, box.text, box.place, box.narrow) for box in found]
    nodes = {box.place: box for box in boxes if box.kind == "nic"}
    assert sorted(place for place in nodes if place is not None) == [*range(10)]
    assert overlapping([*nodes.values()]) == []
    assert [place for place, box in nodes.items() if box.narrow] == [9]
    around = {name: [box for box in boxes if box.text[0].startswith(name)] for name in ("site0", "site1", "rack0")}
    if network.sites:
        (site0,), (site1,), racks = around.values()
        assert overlapping([site0, site1]) == overlapping(racks) == []
        for node, site in enumerate(SITES):
            assert [inside(nodes[node], box) for box in (site0, site1)] == [site[4] == "0", site[4] == "1"]
        assert len(lines) == (1 + 2) + (1 + 2) + (1 + 1), "a link joins the parts of each box: two, two and one"
    else:
        assert lines == []


def test_levels_are_named_from_the_outside() -> None:
    assert [level_names(levels) for levels in range(4)] == [
        (),
        ("site",),
        ("site", "rack"),
        ("site", "pod", "rack"),
    ]
