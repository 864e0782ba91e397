# SPDX-License-Identifier: Apache-2.0
"""Recorded machines, where COMMOPT_TOPOLOGIES names their folder: every fact a person read from each (INDEX.json)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from topology.__main__ import main
from topology.files import read
from topology.model import Topology, TopologyError
from topology.queries import direct_links, links_per_gpu, nearest_nics, node_nic_gbps, nvlink_kind

FOLDER = os.environ.get("COMMOPT_TOPOLOGIES")
INDEX: dict[str, Any] = json.loads((Path(FOLDER) / "INDEX.json").read_text()) if FOLDER else {}
KINDS = {
    "pair": "pairs",
    "direct_pairs": "pairs",
    "direct_full_mesh": "mesh",
    "direct_full_mesh_unequal": "mesh",
    "not_in_file": "unknown",
}
FILES = sorted(name for name in INDEX if not name.startswith("_"))
MATRICES = [name for name in FILES if name.startswith("smi_matrix/")]
# The index calls some matrices in which every cell is NV# no matrix; its own description of the machine is right.
ALL_NVLINK = [name for name in MATRICES if "/negative/" not in name and "error" in INDEX[name]["truth"]]
REFUSED = [name for name in FILES if "error" in INDEX[name]["truth"] and name not in ALL_NVLINK]
READABLE = [name for name in FILES if name not in REFUSED and name not in ALL_NVLINK]

pytestmark = pytest.mark.skipif(FOLDER is None, reason="COMMOPT_TOPOLOGIES names no folder of recorded machines")


def path(name: str) -> Path:
    return Path(FOLDER or "") / name


def near(topology: Topology) -> list[dict[str, Any] | None]:
    found = [nearest_nics(topology, place) for place in range(len(topology.gpus))]
    return [one and {"level": one[1].value, "nics": [topology.nics[nic].name for nic in one[0]]} for one in found]


def number(text: str | None) -> int | None:
    """The model has None for NUMA node -1, and of a list of nodes the first, that of the CPUs."""
    first = (text or "").replace(",", "-").partition("-")[0]
    return int(first) if first.isdigit() else None


@pytest.mark.parametrize("name", [name for name in READABLE if name in MATRICES])
def test_every_fact_of_a_matrix(name: str) -> None:
    truth = INDEX[name]["truth"]
    topology = read(path(name))
    assert len(topology.gpus) == truth["gpus"]
    assert [nic.name for nic in topology.nics] == truth["nics"]
    assert [nic.speed_gbps for nic in topology.nics] == [None] * truth["nic_count"]
    # The index takes what `topo -mp` hides for none.
    hidden = any("topo -mp" in warning for warning in topology.warnings)
    assert nvlink_kind(topology) == ("unknown" if hidden else KINDS.get(truth["nvlink_kind"], truth["nvlink_kind"]))
    assert list(links_per_gpu(topology)) == ([None] * truth["gpus"] if hidden else truth["nvlinks_per_gpu"])
    if truth["pair_links"] is not None:
        assert {f"{a}-{b}": count for (a, b), count in direct_links(topology).items()} == truth["pair_links"]
    assert [gpu.affinity for gpu in topology.gpus] == truth["cpu_affinity"]
    assert [gpu.numa for gpu in topology.gpus] == [*map(number, truth["gpu_numa"] or [None] * truth["gpus"])]
    assert near(topology) == truth["closest_nics"]
    assert bool(topology.warnings) >= bool(truth["warnings"])
    assert ("/partial/" in name) <= any("GPU rows present" in warning for warning in topology.warnings)


@pytest.mark.parametrize("name", ALL_NVLINK)
def test_matrices_of_nvlink_only(name: str) -> None:
    topology = read(path(name))
    assert INDEX[name]["machine"].startswith(f"{len(topology.gpus)}x ")
    assert nvlink_kind(topology) == "switch"
    assert len(set(links_per_gpu(topology))) == 1
    assert topology.warnings == ()


def ports_that_count(truth: dict[str, Any]) -> float | None:
    """GPUDirect ports, else those on PCI devices, else all."""
    rates = [truth[f"aggregate_Gbps_{which}_nets"] for which in ("gdr1", "pci", "all")]
    return next((gbps for gbps in rates if gbps != 0), None)


@pytest.mark.parametrize("name", [name for name in READABLE if name not in MATRICES])
def test_every_fact_of_an_xml_file(name: str) -> None:
    topology, truth = read(path(name)), INDEX[name]["truth"]
    assert [gpu.busid for gpu in topology.gpus] == truth["gpu_busids"]
    assert [gpu.numa for gpu in topology.gpus] == [*map(number, truth["gpu_numa"])]
    assert len(topology.gpus) == truth["gpus"]
    for nic, wanted in zip(topology.nics, truth["nics"], strict=True):
        assert (nic.name, nic.busid, nic.speed_gbps) == (wanted["name"], wanted["pci"], wanted["speed_Gbps"])
        assert (nic.port, nic.numa) == (number(wanted["port"]), number(wanted["numa"]))
        assert nic.gdr == (None if wanted["gdr"] is None else wanted["gdr"] == "1")
    assert len(topology.nics) == truth["nic_count"]
    assert sum(nic.busid is not None for nic in topology.nics) == truth["physical_nic_ports"]
    assert len({(nic.busid or "")[:-2] for nic in topology.nics if nic.busid}) <= truth["nic_devices"]
    closest = [{"level": wanted["level"], "nics": wanted["nics"]} for wanted in truth["closest_nics"]]
    assert near(topology)[: len(closest)] == closest
    assert node_nic_gbps(topology) == ports_that_count(truth)
    assert nvlink_kind(topology) == KINDS.get(truth["nvlink_kind"], truth["nvlink_kind"])
    if truth["nvlinks_per_gpu"] is not None:
        assert list(links_per_gpu(topology)) == truth["nvlinks_per_gpu"]
    switches = {link.target for link in topology.nvlinks or () if link.kind == "switch"}
    assert sorted(switches, key=str) == truth["nvswitch_targets"]
    wanted_links = {tuple(map(int, pair.split("-"))): count for pair, count in truth.get("direct_links", {}).items()}
    assert direct_links(topology) == wanted_links


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_damaged_or_something_else_is_refused(name: str) -> None:
    with pytest.raises(TopologyError, match=r"\A[^\n]+\Z") as caught:
        read(path(name))
    if name not in MATRICES:
        line, told = str(caught.value).removeprefix(f"{path(name)}:").split(":", 1)
        assert line.isdigit()
        assert INDEX[name]["truth"]["error"].split(":")[0] in told


@pytest.mark.parametrize("name", FILES)
def test_every_recorded_file_is_shown_or_refused_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--json"]):
        status = main(["show", str(path(name)), *options])
        out, err = capsys.readouterr()
        assert (status, bool(out), err.count("\n")) in ((0, True, 0), (2, False, 1))
        assert status == 0 or "negative" in name or "partial" in name


def test_every_matrix_of_the_folder_is_in_the_index() -> None:
    assert sorted(str(file.relative_to(path(""))) for file in path("smi_matrix").rglob("*.txt")) == MATRICES
