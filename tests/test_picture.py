# SPDX-License-Identifier: Apache-2.0
"""The picture: every part is in it, nothing overlaps, text fits its box."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from tests.machines import Tree, server
from topology.model import Distance, Gpu, Nic, NvLinks, Topology, TopologyError
from topology.picture import Box, arcs_of, boxes_of, draw, draw_box
from topology.sysfs import read_sysfs


def with_nvswitch(topology: Topology) -> Topology:
    links = (NvLinks(place, None, 18, "0000:f1:00.0", "switch") for place in range(len(topology.gpus)))
    return replace(topology, nvlinks=tuple(links))


def cube_mesh() -> Topology:
    quads = [(a + first, b + first) for first in (0, 4) for a, b in combinations(range(4), 2)]
    pairs = quads + [(a, a + 4) for a in range(4)]
    return Topology(
        "matrix.txt",
        gpus=tuple(Gpu(place, None, place // 4) for place in range(8)),
        nics=(Nic("mlx5_0", None, None, None, None),),
        nvlinks=tuple(NvLinks(a, b, 1 + (a + b) % 2, kind="gpu") for a, b in pairs),
        stated=(
            *(
                (f"GPU{a}", f"GPU{b}", Distance.NVL if (a, b) in pairs else Distance.SYS)
                for a, b in combinations(range(8), 2)
            ),
            *((f"GPU{a}", "NIC0", Distance.PIX if a < 2 else Distance.SYS) for a in range(8)),
        ),
    )


def overlapping(boxes: list[Box]) -> list[tuple[Box, Box]]:
    slack = 1e-6
    return [
        (a, b)
        for a, b in combinations(boxes, 2)
        if a.x + a.width > b.x + slack
        and b.x + b.width > a.x + slack
        and a.y + a.height > b.y + slack
        and b.y + b.height > a.y + slack
    ]


def inside(inner: Box, outer: Box) -> bool:
    return (
        outer.x <= inner.x
        and inner.x + inner.width <= outer.x + outer.width
        and outer.y <= inner.y
        and inner.y + inner.height <= outer.y + outer.height
    )


@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 16])
def test_every_part_has_a_place_of_its_own(tmp_path: Path, gpus: int) -> None:
    topology = read_sysfs(server(tmp_path, gpus=gpus).root)
    for seen, fabrics in ((topology, 0), (with_nvswitch(topology), 1)):
        boxes = boxes_of(seen)
        parts = [box for box in boxes if box.kind in ("gpu", "nic", "fabric")]
        for kinds in (("gpu", "nic", "fabric"), ("node",), ("switch",)):
            assert overlapping([box for box in boxes if box.kind in kinds]) == []
        nodes = [box for box in boxes if box.kind == "node"]
        assert all(sum(inside(box, node) for node in nodes) == 1 for box in parts if box.kind != "fabric")
        for kind, count in (("gpu", len(topology.gpus)), ("nic", len(topology.nics))):
            assert sorted(box.place for box in parts if box.kind == kind and box.place is not None) == [*range(count)]
        assert sum(box.kind == "fabric" for box in boxes) == fabrics
        assert max(box.x + box.width for box in boxes) < 1.7 * gpus + 4  # inches: eight are readable on one screen


def test_direct_nvlinks_are_arcs_with_ends_of_their_own() -> None:
    arcs = arcs_of(cube_mesh(), boxes_of(cube_mesh()))
    assert len(arcs) == 16
    assert len({round(x, 6) for arc in arcs for x in (arc.x, arc.to_x)}) == 32
    assert sorted({arc.links for arc in arcs}) == [1, 2]


def test_distances_alone_make_groups() -> None:
    boxes = boxes_of(cube_mesh())
    [near] = [box for box in boxes if box.text == ("PCIe switches",)]
    assert [box.text[0] for box in boxes if box is not near and inside(box, near)] == ["GPU 0", "GPU 1", "mlx5_0"]


def test_inner_switches_are_in_a_box(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.numa(0, "0-7")
    outer = tree.switch("0000:11:00.0", "pci0000:10", numa=0)
    for number in (2, 3):
        inner = tree.switch(f"0000:{number}3:00.0", outer, numa=0)
        tree.gpu(f"0000:{number}5:00.0", inner, numa=0)
        tree.rdma(f"mlx5_{number}", f"0000:{number}6:00.0", inner, numa=0)
    boxes = boxes_of(read_sysfs(tmp_path))
    around, *inner_ones = [box for box in boxes if box.kind == "switch"]
    assert (around.text, len(inner_ones)) == (("PCIe switch 11:00.0", "Gen5 x16"), 2)
    assert overlapping(inner_ones) == []
    assert all(inside(box, around) for box in boxes if box.kind != "node")


def test_narrow_links_stand_out(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu("0000:01:00.0", "pci0000:00", width=8, max_width=16)
    tree.gpu("0000:02:00.0", "pci0000:00", gts=2.5, max_gts=32.0)
    assert [(box.narrow, box.text[-1]) for box in boxes_of(read_sysfs(tmp_path)) if box.kind == "gpu"] == [
        (True, "Gen5 x8 (of x16)"),
        (False, "Gen5 x16"),
    ]


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_a_file_in_each_format(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"machine{suffix}"
    draw(cube_mesh(), file)
    assert file.stat().st_size > 1000


def test_the_svg_holds_every_name_and_is_reproducible(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    topology = with_nvswitch(read_sysfs(server(tmp_path / "machine", gpus=4).root))
    texts = []
    for name in ("a.svg", "b.svg"):
        draw(replace(topology, warnings=("costs $5 and $6",)), tmp_path / name)
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    for label in ("GPU 3", "mlx5_3", "eth0", "NUMA 1", "NVSwitch", "25 Gb/s", "Gen5 x16", "PCIe switch 37:00.0"):
        assert label in texts[0]


def test_text_fits_its_box(tmp_path: Path) -> None:
    """Measured with the font of the picture: the longest labels that occur."""
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 2))
    renderer = FigureCanvasAgg(figure).get_renderer()
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 4), ylim=(0, 2))
    for text in ("0107:00:00.0", "rdmap201s0", "mlx5_0 port 1", "enp129s0f0np0", "GeForce RTX 4090"):
        draw_box(axes, Box("nic", 0.5, 0.5, 1.0, 0.44, (text, text)))
    widths = [text.get_window_extent(renderer).width / figure.dpi for text in axes.texts]
    assert max(widths) <= 1.0


def test_an_empty_machine_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(Topology("nothing"), tmp_path / "nothing.png")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(TopologyError, match="pip install matplotlib"):
        draw(cube_mesh(), tmp_path / "machine.svg")
