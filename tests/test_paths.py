# SPDX-License-Identifier: Apache-2.0
"""Distances in NCCL's classes, which network ports are nearest, and what a node's ports carry together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from topology.model import Cpu, Distance, Gpu, Nic, NvLinks, PciDevice, Topology
from topology.queries import gpu_distance, nearest_nics, nic_distance, node_nic_gbps, rail_nics, usable_nics


def device(busid: str, parent: str | None = None, kind: str = "switch", cpu: int | None = 0) -> PciDevice:
    return PciDevice(busid, kind, parent, cpu)  # type: ignore[arg-type]


def gpu(place: int, busid: str | None = None) -> Gpu:
    return Gpu(place, busid or f"g{place}", 0)


def nic(name: str, **facts: object) -> Nic:
    known = {"busid": name, "port": 1, "numa": 0, "speed_gbps": 100.0} | facts
    return Nic(name=name, **known)  # type: ignore[arg-type]


def machine(*devices: PciDevice, nics: Sequence[Nic] = (), gpus: int = 1, **facts: object) -> Topology:
    cpus = (Cpu(0), Cpu(1))
    places = tuple(gpu(place) for place in range(gpus))
    return Topology("test", gpus=places, nics=tuple(nics), cpus=cpus, pci=devices, **facts)  # type: ignore[arg-type]


SWITCHED = machine(
    device("s0"),
    device("s1", "s0"),
    device("g0", "s1", "gpu"),
    device("near", "s1", "nic"),
    device("s2", "s0"),
    device("sibling", "s2", "nic"),
    device("above", "s0", "nic"),
    device("other", None, "nic"),
    device("far", None, "nic", cpu=1),
    nics=[nic(name) for name in ("far", "other", "above", "sibling", "near")],
)


@pytest.mark.parametrize(
    ("name", "distance"),
    [
        ("near", Distance.PIX),
        ("sibling", Distance.PXB),
        ("above", Distance.PXB),
        ("other", Distance.PHB),
        ("far", Distance.SYS),
    ],
)
def test_switches_and_cpus_on_the_way_decide(name: str, distance: Distance) -> None:
    place = [nic.name for nic in SWITCHED.nics].index(name)
    assert nic_distance(SWITCHED, 0, place) is distance


def test_nearest_nics_come_in_file_order_with_their_distance() -> None:
    assert nearest_nics(SWITCHED, 0) == ([4], Distance.PIX)
    hidden = [nic("c", busid=None, numa=1), nic("b", busid=None), nic("a", busid=None)]
    assert nearest_nics(machine(device("g0", None, "gpu"), nics=hidden), 0) == ([1, 2], Distance.PHB)


def test_nothing_is_guessed() -> None:
    lost = machine(
        device("g0", None, "gpu", cpu=None),
        device("n", None, "nic", cpu=None),
        nics=[nic("n"), nic("not in the tree"), nic("no cpu", busid=None, numa=7)],
        gpus=2,
    )
    assert [nic_distance(lost, 0, place) for place in range(3)] == [None, None, None]
    assert gpu_distance(lost, 0, 1) is None
    assert nearest_nics(lost, 0) is None
    assert nearest_nics(machine(device("g0", None, "gpu")), 0) is None


def test_a_common_switch_counts_even_where_the_cpu_is_unknown() -> None:
    below = machine(
        device("s0", cpu=None), device("g0", "s0", "gpu", None), device("n", "s0", "nic", None), nics=[nic("n")]
    )
    assert nic_distance(below, 0, 0) is Distance.PIX


def test_a_tree_that_bites_its_tail_ends() -> None:
    loop = machine(device("s0", "s1"), device("s1", "s0"), device("g0", "s0", "gpu"), device("g1", None, "gpu"), gpus=2)
    assert gpu_distance(loop, 0, 1) is Distance.PHB


def test_stated_distances_win_over_the_tree() -> None:
    stated = (("NIC0", "GPU0", Distance.NODE), ("GPU0", "GPU1", Distance.SYS))
    told = machine(
        device("s0"),
        device("g0", "s0", "gpu"),
        device("g1", "s0", "gpu"),
        device("n", "s0", "nic"),
        nics=[nic("n"), nic("unsaid", busid="n")],
        gpus=2,
        stated=stated,
    )
    assert nic_distance(told, 0, 0) is Distance.NODE
    assert nic_distance(told, 0, 1) is None
    assert gpu_distance(told, 1, 0) is Distance.SYS
    assert nearest_nics(told, 0) == ([0], Distance.NODE)
    assert nearest_nics(told, 1) is None


@pytest.mark.parametrize(
    ("links", "distance"),
    [
        ((NvLinks(0, 1, 4, kind="gpu"),), Distance.NVL),
        ((NvLinks(1, 0, 4, kind="gpu"),), Distance.NVL),
        ((NvLinks(0, None, 9, "a", "switch"), NvLinks(1, None, 9, "b", "switch")), Distance.NVL),
        ((NvLinks(0, None, 9, "a", "switch"),), Distance.PIX),
        ((NvLinks(0, None, 3, "a", "cpu"), NvLinks(1, None, 3, "a", "cpu")), Distance.PIX),
        ((), Distance.PIX),
        (None, Distance.PIX),
    ],
)
def test_nvlink_joins_gpus_directly_or_by_switches(links: tuple[NvLinks, ...] | None, distance: Distance) -> None:
    pair = machine(device("s0"), device("g0", "s0", "gpu"), device("g1", "s0", "gpu"), gpus=2, nvlinks=links)
    assert gpu_distance(pair, 0, 1) is distance


def test_a_gpu_and_itself_are_refused() -> None:
    with pytest.raises(ValueError, match="GPU 0 has no distance to itself"):
        gpu_distance(SWITCHED, 0, 0)


@pytest.mark.parametrize(
    ("nics", "usable", "gbps"),
    [
        ([], (), None),
        ([nic("a"), nic("b", speed_gbps=None)], (0, 1), 100.0),
        ([nic("a", speed_gbps=None)], (0,), None),
        ([nic("a"), nic("eth0", busid=None, speed_gbps=10.0)], (0,), 100.0),
        ([nic("veth1", busid=None, virtual=True), nic("eth0", busid=None, speed_gbps=10.0)], (1,), 10.0),
        ([nic("docker0", busid=None, virtual=True)], (), None),
        ([nic("a", virtual=True), nic("b")], (1,), 100.0),
        ([nic("a", gdr=True, speed_gbps=400.0), nic("storage", gdr=False)], (0, 1), 400.0),
        ([nic("a", gdr=True, speed_gbps=None), nic("storage", gdr=False)], (0, 1), None),
        ([nic("eth0", gdr=False), nic("b", gdr=None, speed_gbps=25.0)], (0, 1), 25.0),
    ],
)
def test_ports_that_count_and_their_sum(nics: list[Nic], usable: tuple[int, ...], gbps: float | None) -> None:
    topology = machine(nics=nics)
    assert usable_nics(topology) == usable
    gdr = [topology.nics[place].gdr for place in usable]
    best = True if True in gdr else None if None in gdr else False
    assert rail_nics(topology) == tuple(place for place, own in zip(usable, gdr, strict=True) if own is best)
    assert node_nic_gbps(topology) == gbps
