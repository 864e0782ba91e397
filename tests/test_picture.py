"""The picture: every part is in it, nothing overlaps, text fits its box."""

from __future__ import annotations

import builtins
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.machines import Tree, server
from topology.layout import Box, layout
from topology.model import Distance, Gpu, Nic, NvLinks, Topology, TopologyError
from topology.picture import draw
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
    for seen, nvlinks in ((topology, 0), (with_nvswitch(topology), gpus)):
        placed = layout(seen)
        parts = [box for box in placed.boxes if box.kind in ("gpu", "nic", "switch", "fabric")]
        assert overlapping(parts) == []
        nodes = [box for box in placed.boxes if box.kind == "node"]
        assert overlapping(nodes) == []
        assert all(sum(inside(box, node) for node in nodes) == 1 for box in parts if box.kind != "fabric")
        for kind, count in (("gpu", len(topology.gpus)), ("nic", len(topology.nics))):
            assert sorted(box.place for box in parts if box.kind == kind and box.place is not None) == [*range(count)]
        assert sum(wire.kind == "nvlink" for wire in placed.wires) == nvlinks
        left, _, right, _ = placed.span
        assert right - left < 1.7 * gpus + 4  # inches: eight are readable on one screen


def test_direct_nvlinks_are_arcs_with_ends_of_their_own() -> None:
    placed = layout(cube_mesh())
    assert len(placed.arcs) == 16
    ends = [round(x, 6) for arc in placed.arcs for x in (arc.x, arc.to_x)]
    assert len(set(ends)) == 32
    assert sorted({arc.links for arc in placed.arcs}) == [1, 2]


def test_distances_alone_make_groups() -> None:
    placed = layout(cube_mesh())
    [near] = [box for box in placed.boxes if box.text == ("PCIe switches",)]
    above = [wire for wire in placed.wires if near.x <= wire.x <= near.x + near.width]
    assert len(above) == 3  # two GPUs and the port


def test_inner_switches_are_in_a_box(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.numa(0, "0-7")
    outer = tree.switch("0000:11:00.0", "pci0000:10", numa=0)
    for number in (2, 3):
        inner = tree.switch(f"0000:{number}3:00.0", outer, numa=0)
        tree.gpu(f"0000:{number}5:00.0", inner, numa=0)
        tree.rdma(f"mlx5_{number}", f"0000:{number}6:00.0", inner, numa=0)
    placed = layout(read_sysfs(tmp_path))
    [around] = [box for box in placed.boxes if box.kind == "outer"]
    assert around.text == ("PCIe switch 11:00.0 · Gen5 x16",)
    assert all(inside(box, around) for box in placed.boxes if box.kind in ("gpu", "nic", "switch"))


def test_narrow_links_stand_out(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu("0000:01:00.0", "pci0000:00", width=8, max_width=16)
    tree.gpu("0000:02:00.0", "pci0000:00", gts=2.5, max_gts=32.0)
    assert [(wire.kind, wire.text) for wire in layout(read_sysfs(tmp_path)).wires] == [
        ("narrow", "Gen5 x8 (of x16)"),
        ("pcie", "Gen5 x16"),
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

    from topology.picture import _box

    figure = Figure(figsize=(4, 2))
    renderer = FigureCanvasAgg(figure).get_renderer()
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 4), ylim=(0, 2))
    for text in ("0107:00:00.0", "rdmap201s0", "mlx5_0 port 1", "enp129s0f0np0", "GeForce RTX 4090"):
        _box(axes, Box("nic", 0.5, 0.5, 1.0, 0.44, (text, text)))
    widths = [text.get_window_extent(renderer).width / figure.dpi for text in axes.texts]
    assert max(widths) <= 1.0


def test_an_empty_machine_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(Topology("nothing"), tmp_path / "nothing.png")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(TopologyError, match="pip install matplotlib"):
        draw(cube_mesh(), tmp_path / "machine.svg")
