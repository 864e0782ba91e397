# SPDX-License-Identifier: Apache-2.0
"""The shape in which NVLinks join GPUs, and what they carry."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest

from tests.matrices import CUBE_MESH, all_pairs, matrix, wired
from topology.matrix import read_matrix
from topology.model import Distance, Gpu, NvLinks, PciDevice, PciLink, Topology
from topology.queries import (
    NvlinkKind,
    links_between,
    links_per_gpu,
    nvlink_kind,
    peer_bandwidth_gbps,
)

Links = dict[tuple[int, int], int]


def machine(gpus: int, links: Links, other: str = "SYS") -> Topology:
    return read_matrix(matrix(gpus, wired(links, other)), "m.txt")


def of_links(gpus: int, *links: NvLinks, sm: int | None = None) -> Topology:
    return Topology("test", gpus=tuple(Gpu(place, None, None, sm) for place in range(gpus)), nvlinks=links)


def full(gpus: range, count: int) -> Links:
    return {pair: count for pair in combinations(gpus, 2)}


def renumbered(links: Links, seed: int) -> Links:
    order = list(range(8))
    random.Random(seed).shuffle(order)
    return {(min(order[a], order[b]), max(order[a], order[b])): count for (a, b), count in links.items()}


P100_CUBE = dict.fromkeys(CUBE_MESH, 1)
OTHER_CUBE = full(range(4), 1) | full(range(4, 8), 1) | {(0, 6): 2, (1, 7): 2, (2, 4): 1, (3, 5): 1}
RING_OF_EIGHT = {(a, (a + 1) % 8) if a < 7 else (0, 7): 2 for a in range(8)}
UNEQUAL = {(0, 1): 1, (0, 2): 1, (0, 3): 2, (1, 2): 2, (1, 3): 1, (2, 3): 2}

SHAPES: list[tuple[int, Links, NvlinkKind]] = [
    (1, {}, "none"),
    (8, {}, "none"),
    (2, {(0, 1): 2}, "pairs"),
    (4, {(0, 1): 3, (2, 3): 3}, "pairs"),
    (3, {(0, 2): 4}, "pairs"),
    (4, full(range(4), 4), "mesh"),
    (4, full(range(4), 6), "mesh"),
    (4, UNEQUAL, "mesh"),
    (3, full(range(3), 4), "mesh"),
    (5, full(range(4), 4), "mesh"),
    (8, full(range(4), 2) | full(range(4, 8), 2), "mesh"),
    (8, CUBE_MESH, "hybrid_cube_mesh"),
    (8, P100_CUBE, "hybrid_cube_mesh"),
    (8, OTHER_CUBE, "hybrid_cube_mesh"),
    (9, CUBE_MESH, "hybrid_cube_mesh"),
    *[(8, renumbered(CUBE_MESH, seed), "hybrid_cube_mesh") for seed in range(5)],
    (4, full(range(4), 18), "switch"),
    (3, full(range(3), 8), "switch"),
    (8, full(range(8), 8), "switch"),
    (8, full(range(8), 12), "switch"),
    (16, full(range(16), 6), "switch"),
    (8, full(range(4), 12) | full(range(4, 8), 12), "switch"),
    (8, RING_OF_EIGHT, "irregular"),
    (4, {(0, 1): 2, (1, 2): 2, (2, 3): 2}, "irregular"),
    (6, full(range(4), 4) | {(4, 5): 4}, "irregular"),
    (6, full(range(4), 12) | {(4, 5): 4}, "irregular"),
    (7, {pair: count for pair, count in CUBE_MESH.items() if 7 not in pair}, "irregular"),
]


@pytest.mark.parametrize(("gpus", "links", "kind"), SHAPES)
def test_kind_from_a_matrix(gpus: int, links: Links, kind: NvlinkKind) -> None:
    assert nvlink_kind(machine(gpus, links)) == kind


def test_kind_without_gpus_or_without_knowledge_is_unknown() -> None:
    assert nvlink_kind(Topology("test", nvlinks=())) == "unknown"
    assert nvlink_kind(Topology("test", gpus=(Gpu(0, None, None),))) == "unknown"
    assert nvlink_kind(of_links(2, NvLinks(0, None, 4), NvLinks(1, None, 4))) == "unknown"


def test_kind_from_links_with_their_ends() -> None:
    switches = [NvLinks(gpu, None, 5, f"0000:0{n}:00.0", "switch") for gpu in range(2) for n in range(2)]
    assert nvlink_kind(of_links(2, *switches)) == "switch"
    assert nvlink_kind(of_links(1, *switches[:2])) == "switch"
    assert nvlink_kind(of_links(4, *switches, NvLinks(2, 3, 2, kind="gpu"))) == "irregular"
    assert nvlink_kind(of_links(2, NvLinks(0, 1, 12, kind="gpu"), NvLinks(1, 0, 12, kind="gpu"))) == "pairs"
    assert nvlink_kind(of_links(2, NvLinks(0, 1, 12, kind="gpu"))) == "pairs"
    assert nvlink_kind(of_links(2, NvLinks(0, None, 3, kind="cpu"), NvLinks(1, None, 3, kind="cpu"))) == "none"


def test_links_per_gpu() -> None:
    assert links_per_gpu(machine(8, CUBE_MESH)) == (6,) * 8
    assert links_per_gpu(machine(8, full(range(8), 12))) == (12,) * 8
    assert links_per_gpu(machine(4, UNEQUAL)) == (4, 4, 5, 5)
    assert links_per_gpu(machine(3, {(0, 2): 4})) == (4, 0, 4)
    assert links_per_gpu(of_links(2, NvLinks(0, 1, 3), NvLinks(1, 0, 3), NvLinks(0, None, 3, kind="cpu"))) == (6, 3)
    assert links_per_gpu(Topology("test", gpus=(Gpu(0, None, None),))) == (None,)


def test_links_between() -> None:
    cube = machine(8, CUBE_MESH)
    assert [links_between(cube, 0, other) for other in range(1, 8)] == [1, 1, 2, 2, 0, 0, 0]
    assert links_between(cube, 4, 0) == 2
    assert links_between(machine(8, full(range(8), 18)), 2, 7) == 18
    uneven = of_links(2, NvLinks(0, None, 18, kind="switch"), NvLinks(1, None, 16, kind="switch"))
    assert links_between(uneven, 0, 1) == 16
    assert links_between(of_links(2, NvLinks(0, None, 18, kind="switch")), 0, 1) == 0
    assert links_between(Topology("test", gpus=(Gpu(0, None, None),) * 2), 0, 1) is None


@pytest.mark.parametrize(
    ("sm", "links", "gbps"), [(70, 2, 400), (80, 12, 2400), (86, 4, 450), (90, 18, 3600), (100, 18, 7200)]
)
def test_nvlink_bandwidth_by_generation(sm: int, links: int, gbps: float) -> None:
    assert peer_bandwidth_gbps(of_links(2, NvLinks(0, 1, links, kind="gpu"), sm=sm), 0, 1) == gbps


def test_nvlink_of_an_unknown_generation_has_no_known_bandwidth() -> None:
    for sm in (None, 137):
        assert peer_bandwidth_gbps(of_links(2, NvLinks(0, 1, 4, kind="gpu"), sm=sm), 0, 1) is None
    assert peer_bandwidth_gbps(machine(2, {}), 0, 1) is None, "a matrix tells nothing about PCIe links"


def test_a_gpu_has_no_link_to_itself() -> None:
    with pytest.raises(ValueError, match="GPU 1 has no link to itself"):
        peer_bandwidth_gbps(machine(2, {}), 1, 1)


def pcie(*devices: tuple[str, str | None, PciLink]) -> Topology:
    busids = [busid for busid, _, _ in devices if busid.startswith("gpu")]
    return Topology(
        "test",
        gpus=tuple(Gpu(place, busid, None) for place, busid in enumerate(busids)),
        pci=tuple(PciDevice(busid, "other", parent, 0, link=link) for busid, parent, link in devices),
        nvlinks=(),
    )


def test_pcie_bandwidth_is_the_slowest_link_on_the_way() -> None:
    gen4, gen3, gen4x8, unknown = PciLink(16, 16), PciLink(8, 16), PciLink(16, 8), PciLink(None, 16)
    machine = pcie(
        ("switch0", None, gen3),
        ("gpu0", "switch0", gen4),
        ("gpu1", "switch0", gen4x8),
        ("gpu2", "switch0", gen4),
        ("gpu3", None, gen4),
        ("gpu4", None, unknown),
    )
    assert peer_bandwidth_gbps(machine, 0, 2) == pytest.approx(252.06, abs=0.01), "the switch's own uplink is not used"
    assert peer_bandwidth_gbps(machine, 0, 1) == pytest.approx(126.03, abs=0.01)
    assert peer_bandwidth_gbps(machine, 2, 3) == pytest.approx(126.03, abs=0.01)
    assert peer_bandwidth_gbps(machine, 3, 4) is None
    assert peer_bandwidth_gbps(replace(machine, nvlinks=None), 0, 2) is None, "there may be NVLinks"


def test_an_idle_link_counts_at_its_best_speed_but_with_the_lanes_that_it_has() -> None:
    machine = pcie(("gpu0", None, PciLink(2.5, 8)), ("gpu1", None, PciLink(16, 16)))
    first, second = machine.pci
    machine = replace(machine, pci=(replace(first, link_max=PciLink(16, 16)), second))
    assert peer_bandwidth_gbps(machine, 0, 1) == pytest.approx(126.03, abs=0.01)


def test_all_pairs_of_a_mesh_in_a_matrix_are_near() -> None:
    stated = read_matrix(matrix(3, all_pairs("NV2")), "m.txt").stated
    assert stated == tuple((f"GPU{a}", f"GPU{b}", Distance.NVL) for a, b in combinations(range(3), 2))
