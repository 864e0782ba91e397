# SPDX-License-Identifier: Apache-2.0
"""What the probe says: the network beside its line rate, the report, the picture and the progress."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from commopt.cost import Curve, LineSegment, LinkKey, Links, LinksHeader, WorkKey
from commopt.probe import ProbeOptions, Survey, report
from commopt.probe.collectives import COLLECTIVES
from commopt.probe.operations import PARTS
from commopt.probe.report import LineRate, line_rate_gbps, node_factor, own_gbps
from topology import Cluster

MIB = 2**20

# ------------------------------------------------------------------------------ the network


@pytest.mark.parametrize(
    ("key", "factor"),
    [
        (LinkKey("intra", "all_reduce", 2, 2), 0.0),
        (LinkKey("inter", "all_reduce", 2), 1.0),
        (LinkKey("inter", "all_reduce", 2, 2), 2.0),
        (LinkKey("inter", "all_gather", 2, 2), 2.0),
        (LinkKey("inter", "all_to_all", 2), 0.5),
        (LinkKey("inter", "broadcast", 2, 2), 2.0),
        (LinkKey("world", "all_reduce", 4), 1.5),
        (LinkKey("world", "all_to_all", 4), 1.0),
    ],
)
def test_what_a_node_sends_for_a_byte(key: LinkKey, factor: float) -> None:
    assert node_factor(key, (2, 2)) == pytest.approx(factor)


def links_of(gbps: float = 0.2) -> Links:
    """Return what a probe of 2 x 2 ranks would find, on such a network."""
    header = LinksHeader("2025-01-02T03:04:05+00:00", ("a", "b"), (2, 2), "gloo", "x86_64 CPU", "2.7.0", "probe")
    sizes = ProbeOptions(1024, 16 * MIB, 4).sizes()
    curves = {}
    for primitive in COLLECTIVES:
        for level, ranks, groups in (("intra", 2, 2), ("inter", 2, 1), ("inter", 2, 2), ("world", 4, 1)):
            key = LinkKey(level, primitive, ranks, groups)
            beta = (node_factor(key, (2, 2)) or 0.01) * 8e-3 / gbps
            curves[key] = Curve.fit((nbytes, 50 * ranks + beta * nbytes) for nbytes in sizes)
    encoder = Curve.fit((nbytes, 10 + nbytes / 2000) for nbytes in sizes)
    return Links(header, curves, {WorkKey("encode", "Cast(dtype=torch.bfloat16)"): encoder})


def test_the_network_is_held_against_its_line_rate() -> None:
    network = LineRate.of(links_of(0.2), 0.2)
    assert network is not None
    assert network.measured_gbps == pytest.approx(0.2, rel=0.01)
    assert not network.slow
    assert LineRate.of(links_of(9.0), 25.0).slow  # type: ignore[union-attr]  # there is one
    assert LineRate.of(Links(LinksHeader(nodes=(1,)), {}), 25.0) is None


class Place:
    """A membership as far as its network cards go."""

    def __init__(self, emulated: bool) -> None:
        self.cluster = Cluster.from_ranks_per_node(2, 1)
        assert self.cluster.emulated
        if not emulated:
            self.cluster = Cluster(self.cluster.nodes, self.cluster.names)


def test_the_slowest_node_counts_if_all_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commopt.probe.report.own_gbps", lambda membership, environ: 25.0)
    for cards, gbps in (([25.0, 10.0, 40.0], 10.0), ([25.0, None, 40.0], None)):
        answers = [{"gbps": card} for card in cards]
        membership = cast(Any, SimpleNamespace(exchange=lambda *_, answers=answers, **__: answers))
        assert line_rate_gbps(membership, {}) == gbps


def test_the_line_rate_of_emulated_nodes_is_that_of_their_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commopt.probe.report.node_nic_gbps", lambda machine: 25.0)
    assert own_gbps(cast(Any, Place(False)), {}) == 25
    for rate, gbps in (("200mbit", 0.2), ("1gbit", 1.0), ("64kbit", 64e-6), ("none", None)):
        assert own_gbps(cast(Any, Place(False)), {"BENCH_CLUSTER_RATE": rate}) == gbps
    assert own_gbps(cast(Any, Place(True)), {}) is None


# ------------------------------------------------------------------------------ what is shown


def flat(text: str) -> str:
    """Return it without the breaks of lines."""
    return " ".join(text.split())


def text_of(links: Links, nominal_gbps: float | None, stopped: dict[str, int] | None = None) -> str:
    stream = io.StringIO()
    report.show(Survey(links, stopped or {}), LineRate.of(links, nominal_gbps), 120, stream)
    return stream.getvalue()


def test_the_report() -> None:
    text = text_of(links_of(), 0.2, {"inter reduce of 2 ranks": 4 * MIB, "world reduce of 4 ranks": 8 * MIB})
    row = next(line for line in text.splitlines() if "inter" in line and "reduce_scatter" in line).split()
    assert row[:5] == ["inter", "reduce_scatter", "2", "1", "100"]
    assert row[5:9] == ["0.0500", "0.200", "1.000", "0.0%"]
    assert "Cast(dtype=torch.bfloat16)" in text
    first, *others = (line for line in text.splitlines() if "reduce_scatter" in line)
    assert {line.index("reduce_scatter") for line in others} == {first.index("reduce_scatter")}
    levels = [line.split()[0] for line in text.splitlines() if line.split()[:1] and line.split()[0] in PARTS]
    assert levels == ["intra"] * 6 + ["inter"] * 12 + ["world"] * 6
    assert "--budget 120 ended 2 of 25 curves" in text
    assert "inter reduce of 2 ranks at 4 MiB" in flat(text)
    assert max(map(len, text.splitlines())) <= 80
    assert "100% of a line rate of 0.2 Gb/s" in text


def test_what_cannot_be_is_called_unreliable() -> None:
    """A message inside a burst is faster than the line; a curve that fits no better than a mean says nothing."""
    said = flat(text_of(links_of(0.25), 0.2))
    assert "WARN unreliable: 0.250 Gb/s out of a node" in said
    assert (
        "of a line rate of 0.2 Gb/s. More than a line carries: the largest message, 16 MiB, passes in one burst" in said
    )
    links = links_of(0.2)
    key = LinkKey("world", "all_reduce", 4, 1)
    links.curves[key] = Curve((LineSegment(0.0, 50.0, 1e-3),), ((1e4, 900.0), (1e5, 20.0), (1e6, 700.0)))  # type: ignore[index]
    assert links.curves[key].r_squared < 0
    text = text_of(links, 0.2)
    assert "1 of 24 curves fit badly (R^2 below 0.9): world all_reduce of 4 ranks" in flat(text)
    (row,) = [line.split() for line in text.splitlines() if line.startswith("world") and " all_reduce" in line]
    assert row[7] == "none"
    assert "unreliable" not in text_of(links_of(0.2), 0.2)


def test_slow_rates_keep_digits() -> None:
    text = text_of(links_of(0.0012), None)
    assert re.search(r"inter +all_reduce +2 +1 +100\S* +0\.00015\d +0\.00120", text), text


def test_a_network_below_half_its_line_rate_is_warned_of() -> None:
    slow = flat(text_of(links_of(9.0), 25.0))
    for part in (
        "WARN measured bandwidth",
        "36% of a line rate of 25 Gb/s",
        "one TCP connection",
        "MTU",
        "network card",
    ):
        assert part in slow
    assert "WARN" not in text_of(links_of(9.0), 10.0)
    assert "the line rate is not known here" in text_of(links_of(9.0), None)
