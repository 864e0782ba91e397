# SPDX-License-Identifier: Apache-2.0
"""Racks: the bytes that cross a shared uplink, counted rank by rank, and what that does to times."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

import pytest
import torch

from commopt import Compressed, Flat, Hierarchical, Layout, LocalSGD, Quantize
from commopt.__main__ import main
from commopt.aggregate import Aggregator
from commopt.cost import LinkKey
from commopt.errors import ConfigurationError
from commopt.groups import TeamShape, WireModel
from commopt.simulate import NetworkSpec, model
from commopt.simulate.racks import Racks, crossing

MIB = 2**20
GPUS = {"cpu": "gloo", "cuda": "nccl"}
LAYOUT = Layout.anonymous(25_000_000)
COMMAND = [
    "simulate",
    "--model",
    "resnet50",
    "--nic",
    "25gbps",
    "--gpus-per-node",
    "1",
    "--buckets",
    "ddp",
    "--racks",
    "2",
]


@pytest.mark.parametrize("primitive", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
@pytest.mark.parametrize(("ranks", "inside"), [(4, 2), (12, 3), (24, 1), (10, 5), (5, 3)])
def test_what_leaves_a_rack_is_what_its_ranks_send_to_others(primitive: str, ranks: int, inside: int) -> None:
    """The wire model counts bytes between nodes; here a rack is one."""
    rack_of = [rank // inside for rank in range(ranks)]
    leaving = sum(getattr(WireModel(rank, rack_of), primitive)(MIB).inter for rank in range(inside))
    assert crossing(primitive, ranks, inside) * MIB == pytest.approx(leaving, rel=1e-4)


def test_one_rack_has_no_uplink() -> None:
    assert crossing("all_to_all", 8, 8) == crossing("all_reduce", 8, 8) == crossing("broadcast", 8, 8) == 0
    assert crossing("broadcast", 8, 4) == 1
    one = NetworkSpec(25, 200, oversubscription=8)
    shape = TeamShape.of((8,) * 4, backends=GPUS)
    assert one.links(shape) == NetworkSpec(25, 200).links(shape)


@pytest.mark.parametrize("nodes", [4, 12, 14])
def test_uplinks_without_oversubscription_limit_nothing(nodes: int) -> None:
    shape = TeamShape.of((8,) * nodes, backends=GPUS)
    assert NetworkSpec(25, 200, racks=4).links(shape) == NetworkSpec(25, 200).links(shape)


def test_an_oversubscribed_uplink_slows_exchanges_and_a_ring_only_when_it_is_slower_than_a_node() -> None:
    """Four racks of four nodes with eight GPUs, 4 : 1: an uplink carries as much as one node."""
    shape = TeamShape.of((8,) * 16, backends=GPUS)
    plain = NetworkSpec(25, 200, efficiency=1.0, trees=False)
    racks = NetworkSpec(25, 200, efficiency=1.0, trees=False, racks=4, oversubscription=4).links(shape)
    us_per_byte = 8e-3 / 25
    for groups in (1, 8):
        line = racks.curves[LinkKey("inter", "all_to_all", 16, groups)].segments[0]
        assert line.beta_us_per_byte == pytest.approx(groups * 4 * 12 / 16 * us_per_byte)
    assert racks.curves[LinkKey("world", "all_to_all", 128)].segments[0].beta_us_per_byte == pytest.approx(
        32 * 96 / 128 * us_per_byte
    )
    for level, ranks, groups in (("world", 128, 1), ("inter", 16, 8)):
        key = LinkKey(level, "all_reduce", ranks, groups)
        assert racks.curves[key] == plain.links(shape).curves[key]
    slower = NetworkSpec(25, 200, efficiency=1.0, racks=4, oversubscription=8).links(shape)
    line = slower.curve("world", "all_reduce", 128).segments[-1]
    assert line.beta_us_per_byte == pytest.approx(2 * 127 / 128 * 2 * us_per_byte)


def shape_of(nodes: int) -> TeamShape:
    return TeamShape.of((1,) * nodes, backends=GPUS)


@pytest.mark.parametrize(("bits", "racks"), [(8, 2), (4, 2), (8, 16), (2, 16)])
def test_from_how_many_nodes_on_a_rack_saves_nothing(bits: Literal[8, 4, 2], racks: int) -> None:
    """By the closed forms: rings cross once, 2 M (P-1)/P; exchanges n M (S-1)/S, and their rows go round a ring."""
    code = Quantize(bits).payload_nbytes(LAYOUT.numel) / (4 * LAYOUT.numel)

    def saves(in_each: int) -> bool:
        nodes = in_each * racks
        ring = (nodes - 1) / nodes
        return code * (in_each * (racks - 1) / racks + ring) < 2 * ring

    expected = next(in_each for in_each in range(1, 512) if not saves(in_each)) * racks
    for aggregator in (Compressed(Quantize(bits)), Hierarchical(Compressed(Quantize(bits)))):
        found = Racks(racks).saves_none_from(aggregator, LAYOUT, torch.float32, shape_of, 2048)
        assert found == expected
        assert Racks(racks).saves_none_from(aggregator, LAYOUT, torch.float32, shape_of, expected - racks) is None
    assert bits != 8 or racks != 2 or expected == 28


def test_a_single_rack_loses_nothing() -> None:
    assert Racks(1).saves_none_from(Compressed(Quantize(8)), LAYOUT, torch.float32, shape_of, 64) is None


@pytest.mark.parametrize(
    ("aggregator", "per_byte"),
    [
        (Flat(), 2 * 31 / 32),
        (Hierarchical(), 2 * 7 / 8),
        (LocalSGD(period=4), 2 * 7 / 8 / 4),
    ],
    ids=repr,
)
def test_uplink_bytes_of_all_ranks_of_a_rack(aggregator: Aggregator, per_byte: float) -> None:
    shape = TeamShape.of((4,) * 8, backends=GPUS)
    found = Racks(2).uplink_bytes(aggregator, LAYOUT, torch.float32, shape)
    assert found == pytest.approx(per_byte * 4 * LAYOUT.numel, rel=1e-6)


@pytest.mark.parametrize(
    ("count", "oversubscription", "says"),
    [(0, 1, "racks is 0"), (2, 0.5, "oversubscription 0.5 must be"), (2, float("inf"), "oversubscription inf")],
)
def test_racks_that_cannot_be(count: int, oversubscription: float, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        NetworkSpec(25, 200, racks=count, oversubscription=oversubscription)


def test_the_command_shows_uplinks_and_where_compression_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.json"
    wanted = ["--nodes", "4,28", "--strategies", "stock", "quantized", "-o", str(target)]
    assert main([*COMMAND, "--oversubscription", "4", *wanted]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "MB up: by a rack to others in a step." in shown
    assert "racks: from 28 nodes on, 14 in each, quantized sends as many bytes over an uplink as stock" in shown
    assert "told it sends" not in shown, "quantized has no levels"
    rows = json.loads(target.read_text())["rows"]
    up = {(row["strategy"], row["nodes"]): row["uplink_bytes_per_rack"] for row in rows}
    assert up["stock", 4] > 2 * up["quantized", 4]
    assert up["stock", 28] <= up["quantized", 28]
    plain = [word for word in COMMAND if word not in ("--racks", "2")]
    assert main([*plain, *wanted]) == 0
    shown = capsys.readouterr().out
    assert "MB up" not in shown
    assert "racks:" not in shown
    for slow, fast in zip(rows, json.loads(target.read_text())["rows"], strict=True):
        assert fast["uplink_bytes_per_rack"] == 0
        assert fast["step_us"] <= slow["step_us"]


def test_the_command_shows_what_telling_the_racks_saves(capsys: pytest.CaptureFixture[str]) -> None:
    """Of two racks each sends its own sum across, once, in 8 bits: M for S = 2, where each node's row went n times."""
    wanted = ["--nodes", "28", "--strategies", "hierarchical_quantized"]
    assert main([*COMMAND, "--oversubscription", "4", *wanted]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    numbers = re.search(r"from 28 nodes on.* told it sends ([\d.]+) MB a step there, in place of ([\d.]+)", shown)
    assert numbers is not None
    told, untold = map(float, numbers.groups())
    dense_mb = 4 * model("resnet50").numel / 1e6
    assert told == pytest.approx(dense_mb / 4, rel=0.05)
    assert untold == pytest.approx(dense_mb / 4 * (14 / 2 + 27 / 28), rel=0.05)


def test_oversubscription_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "--model", "resnet50", "--nic", "25gbps", "--oversubscription", "4"]
    assert main(command) == 2
    assert "--oversubscription needs --racks" in capsys.readouterr().err
