# SPDX-License-Identifier: Apache-2.0
"""Ratios of times on the emulated cluster, within one run: the gain that hierarchical averaging is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commopt.cluster import EmulatedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

RATE = "50mbit"


def median_us(tmp_path: Path, ranks_per_node: int, *arguments: str) -> dict[str, float]:
    """Run the bandwidth benchmark on two nodes; return the median time of each contender."""
    if (reason := EmulatedCluster.missing(RATE)) is not None:
        pytest.skip(reason)
    file = tmp_path / "bandwidth.json"
    with EmulatedCluster(nodes=2, ranks_per_node=ranks_per_node, rate=RATE) as cluster:
        command = ["-m", "commopt", "bandwidth", "-b", "1M", "-e", "1M", "-n", "11", "-w", "2", "--json", str(file)]
        done = cluster.run([*command, *arguments], timeout_s=300)
    assert done.returncode == 0, done.stderr
    records: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return {record["aggregator"]: record["in_place"]["timing"]["p50_us"] for record in records}


def test_hierarchical_all_reduce_takes_the_share_of_its_bytes(tmp_path: Path) -> None:
    times = median_us(tmp_path, 2, "--aggregator", "torch,flat,hierarchical,hierarchical_bf16")
    # Bytes between nodes: 1, 1, 2/3 and 1/3 of torch's; the margin is for a noisy machine.
    assert times["flat"] / times["torch"] < 1.15
    assert times["hierarchical"] / times["torch"] < 0.80
    assert times["hierarchical_bf16"] / times["torch"] < 0.50


def test_all_gather_uses_both_directions_of_the_link(tmp_path: Path) -> None:
    times = median_us(tmp_path, 1, "--collective", "all_gather", "--aggregator", "torch,commopt")
    assert times["commopt"] / times["torch"] < 0.90
