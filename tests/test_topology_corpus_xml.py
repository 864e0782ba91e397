"""Recorded machines, where COMMOPT_TOPOLOGIES names their folder: every fact of its INDEX.json about NCCL's XML."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from topology.model import Topology, TopologyError
from topology.queries import direct_links, links_per_gpu, nearest_nics, node_nic_gbps, nvlink_kind
from topology.xml_reader import read_nccl_xml
from topology.xml_writer import write_nccl_xml

FOLDER = os.environ.get("COMMOPT_TOPOLOGIES")
KINDS = {"not_in_file": "unknown", "direct_pairs": "pairs", "direct_full_mesh": "mesh"}


def recorded() -> dict[str, dict[str, Any]]:
    if FOLDER is None:
        return {}
    index = json.loads((Path(FOLDER) / "INDEX.json").read_text())
    return {name: entry["truth"] for name, entry in index.items() if name.startswith("nccl_xml/")}


RECORDED = recorded()
READABLE = sorted(name for name, truth in RECORDED.items() if "error" not in truth)
REFUSED = sorted(name for name, truth in RECORDED.items() if "error" in truth)

pytestmark = pytest.mark.skipif(FOLDER is None, reason="COMMOPT_TOPOLOGIES names no folder of recorded machines")


def read(name: str) -> Topology:
    return read_nccl_xml((Path(FOLDER or "") / name).read_bytes(), Path(name).name)


def number(text: str | None) -> int | None:
    """The model has None for NUMA node -1."""
    return None if text is None or int(text) < 0 else int(text)


def ports_that_count(truth: dict[str, Any]) -> float | None:
    """GPUDirect ports, else those on PCI devices, else all."""
    for which in ("gdr1", "pci", "all"):
        gbps: float | None = truth[f"aggregate_Gbps_{which}_nets"]
        if gbps != 0:
            return gbps
    return None


@pytest.mark.parametrize("name", READABLE)
def test_every_recorded_fact(name: str) -> None:
    topology, truth = read(name), RECORDED[name]
    assert [gpu.busid for gpu in topology.gpus] == truth["gpu_busids"]
    assert [gpu.numa for gpu in topology.gpus] == [number(numa) for numa in truth["gpu_numa"]]
    assert len(topology.gpus) == truth["gpus"]
    for nic, wanted in zip(topology.nics, truth["nics"], strict=True):
        assert (nic.name, nic.busid, nic.speed_gbps) == (wanted["name"], wanted["pci"], wanted["speed_Gbps"])
        assert (nic.port, nic.numa) == (number(wanted["port"]), number(wanted["numa"]))
        assert nic.gdr == (None if wanted["gdr"] is None else wanted["gdr"] == "1")
    assert len(topology.nics) == truth["nic_count"]
    assert sum(nic.busid is not None for nic in topology.nics) == truth["physical_nic_ports"]
    assert len({(nic.busid or "")[:-2] for nic in topology.nics if nic.busid}) <= truth["nic_devices"]
    for place, wanted in enumerate(truth["closest_nics"]):
        found = nearest_nics(topology, place)
        assert found is not None
        assert ([topology.nics[nic].name for nic in found[0]], found[1].value) == (wanted["nics"], wanted["level"])
    assert node_nic_gbps(topology) == ports_that_count(truth)


@pytest.mark.parametrize("name", READABLE)
def test_recorded_nvlinks(name: str) -> None:
    topology, truth = read(name), RECORDED[name]
    kind = truth["nvlink_kind"]
    assert nvlink_kind(topology) == KINDS.get(kind, kind)
    if truth["nvlinks_per_gpu"] is not None:
        assert list(links_per_gpu(topology)) == truth["nvlinks_per_gpu"]
    switches = {link.target for link in topology.nvlinks or () if link.kind == "switch"}
    assert sorted(switches, key=str) == truth["nvswitch_targets"]
    wanted = {tuple(map(int, pair.split("-"))): count for pair, count in truth.get("direct_links", {}).items()}
    assert direct_links(topology) == wanted


@pytest.mark.parametrize("name", READABLE)
def test_recorded_machines_survive_writing(name: str) -> None:
    topology = read(name)
    again = read_nccl_xml(write_nccl_xml(topology), Path(name).name)
    assert replace(again, warnings=()) == replace(topology, warnings=())


@pytest.mark.parametrize("name", REFUSED)
def test_recorded_damage_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(TopologyError, match=rf"\A{Path(name).name}:\d+: [^\n]+\Z") as caught:
        read(name)
    assert RECORDED[name]["error"].split(":")[0] in str(caught.value)
