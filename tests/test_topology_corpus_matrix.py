"""Recorded matrices of real machines, with what a person read from each (COMMOPT_TOPOLOGIES names the folder)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from topology.files import read
from topology.model import TopologyError
from topology.queries import direct_links, links_per_gpu, nearest_nics, nvlink_kind, rings

FOLDER = os.environ.get("COMMOPT_TOPOLOGIES")
INDEX: dict[str, Any] = json.loads((Path(FOLDER) / "INDEX.json").read_text()) if FOLDER else {}
KINDS = {
    "pair": "pairs",
    "direct_pairs": "pairs",
    "direct_full_mesh": "mesh",
    "direct_full_mesh_unequal": "mesh",
    "not_in_file": "unknown",
}
FILES = sorted(name for name in INDEX if name.startswith("smi_matrix/"))
NEGATIVE = [name for name in FILES if "/negative/" in name]
# The index calls some matrices in which every cell is NV# no matrix; its own description of the machine is right.
ALL_NVLINK = [name for name in FILES if name not in NEGATIVE and "error" in INDEX[name]["truth"]]
READABLE = [name for name in FILES if name not in NEGATIVE and name not in ALL_NVLINK]

pytestmark = pytest.mark.skipif(FOLDER is None, reason="COMMOPT_TOPOLOGIES is not set")


def path(name: str) -> Path:
    return Path(FOLDER or "") / name


@pytest.mark.parametrize("name", READABLE)
def test_every_recorded_fact(name: str) -> None:
    truth = INDEX[name]["truth"]
    topology = read(path(name))
    numas = truth["gpu_numa"] or [None] * truth["gpus"]
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
    assert [gpu.numa for gpu in topology.gpus] == [int(numa) if numa and numa.isdigit() else None for numa in numas]
    nearest = [nearest_nics(topology, place) for place in range(truth["gpus"])]
    assert [
        found and {"level": found[1].value, "nics": [topology.nics[nic].name for nic in found[0]]} for found in nearest
    ] == truth["closest_nics"]
    assert bool(topology.warnings) >= bool(truth["warnings"])
    assert all(sorted(ring) == list(range(truth["gpus"])) for ring in rings(topology))


@pytest.mark.parametrize("name", ALL_NVLINK)
def test_matrices_of_nvlink_only(name: str) -> None:
    topology = read(path(name))
    assert INDEX[name]["machine"].startswith(f"{len(topology.gpus)}x ")
    assert nvlink_kind(topology) == "switch"
    assert len(set(links_per_gpu(topology))) == 1
    assert topology.warnings == ()


@pytest.mark.parametrize("name", NEGATIVE)
def test_what_is_no_matrix_is_refused(name: str) -> None:
    with pytest.raises(TopologyError) as caught:
        read(path(name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in FILES if "/partial/" in name])
def test_cut_files_say_what_is_missing(name: str) -> None:
    warnings = read(path(name)).warnings
    assert any("GPU rows present" in warning for warning in warnings)


def test_every_file_of_the_folder_is_in_the_index() -> None:
    assert sorted(str(file.relative_to(path(""))) for file in path("smi_matrix").rglob("*.txt")) == FILES
