"""The file for NCCL's example tuner plugin: read as the plugin reads it, and held against the formulas."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from commopt.cost import (
    Curve,
    Header,
    Link,
    LinkKey,
    Links,
    Segment,
    Speeds,
    nominal_links,
    ring_over_nodes_us,
    tree_us,
)
from commopt.errors import ConfigurationError
from commopt.groups import TeamShape
from commopt.schedule.nccl import FIELDS, PROTOCOLS, Row, tuner_rows, write_csv
from tests.closed_forms import ring_us

KIB, MIB = 2**10, 2**20
SPEEDS = Speeds(nic_gbps=100, intra_gb_per_s=200)
LENGTHS = [4**power for power in range(1, 15)]  # 4 bytes to 256 MiB


@dataclass(frozen=True)
class Config:
    """A line as the plugin keeps it."""

    collective: str
    min_nbytes: int
    max_nbytes: int
    algorithm: str
    protocol: str
    channels: int
    nodes: int
    ranks: int
    pipe_ops: int
    registered: int

    def matches(self, collective: str, nbytes: int, nodes: int, ranks: int) -> bool:
        return (
            self.collective == collective
            and self.min_nbytes <= nbytes <= self.max_nbytes
            and self.nodes in (-1, nodes)
            and self.ranks in (-1, ranks)
            and self.pipe_ops == self.registered == -1
        )


def read_as_the_plugin(path: Path) -> list[Config]:
    """fgets of 255 characters at a time; lines that begin with # or are empty do not count, others have 8-10 fields."""
    configs = []
    for line in path.read_text().splitlines(keepends=True):
        for piece in (line[at : at + 255] for at in range(0, len(line), 255)):
            if piece[0] in "#\n":
                continue
            fields = [field.strip(" \t") for field in piece.rstrip("\n").split(",")]
            assert 8 <= len(fields) <= 10, f"the plugin would skip {piece!r}"
            collective, low, high, algorithm, protocol, *counts = fields
            assert collective in ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
            assert algorithm in ("tree", "ring")
            assert protocol in ("ll", "ll128", "simple")
            numbers = [*map(int, counts), -1, -1][:5]
            configs.append(Config(collective, int(low), int(high), algorithm, protocol, *numbers))
    return configs


def first_match(configs: list[Config], collective: str, nbytes: int, nodes: int, ranks: int) -> Config:
    return next(each for each in configs if each.matches(collective, nbytes, nodes, ranks))


def written(tmp_path: Path, rows: list[Row]) -> list[Config]:
    write_csv(rows, tmp_path / "tuner.csv")
    return read_as_the_plugin(tmp_path / "tuner.csv")


def shape_of(*counts: int) -> TeamShape:
    return TeamShape.of(counts, backends={"cuda": "nccl"})


def under(link: Link, protocol: str, inter: bool, base: str = "simple") -> Link:
    """Return a link whose latency is that of `base` as another protocol has it."""
    wanted, given = (next(each for each in PROTOCOLS if each.name == name) for name in (protocol, base))
    times = wanted.inter_latency / given.inter_latency if inter else wanted.intra_latency / given.intra_latency
    return Link(link.alpha_us * times, link.beta_us_per_byte / wanted.bandwidth_share)


# ---------------------------------------------------------------------------------------------- the file


def test_a_row_has_the_fields_of_the_plugin_in_its_order() -> None:
    row = Row("allreduce", 0, 65536, "tree", "ll128", 4, 32)
    assert dict(zip(FIELDS.split(","), str(row).split(","), strict=True)) == {
        "collective_type": "allreduce",
        "min_bytes": "0",
        "max_bytes": "65536",
        "algorithm": "tree",
        "protocol": "ll128",
        "channels": "0",
        "nNodes": "4",
        "nRanks": "32",
        "numPipeOps": "-1",
        "regBuff": "-1",
    }


def test_what_is_written_is_what_the_plugin_reads(tmp_path: Path) -> None:
    shape = shape_of(8, 8, 8, 8)
    rows = tuner_rows(shape, nominal_links(shape, SPEEDS), LENGTHS)
    configs = written(tmp_path, rows)
    assert [(c.collective, c.min_nbytes, c.max_nbytes, c.algorithm, c.protocol, c.nodes, c.ranks) for c in configs] == [
        (r.collective, r.min_nbytes, r.max_nbytes, r.algorithm, r.protocol, r.nodes, r.ranks) for r in rows
    ]
    assert {c.channels for c in configs} == {0}, "NCCL takes 0 for its own number, and the plugin makes 1 of -1"


def test_the_comments_fit_a_line_of_the_plugin_and_say_what_the_file_is(tmp_path: Path) -> None:
    write_csv([], tmp_path / "tuner.csv")
    lines = (tmp_path / "tuner.csv").read_text().splitlines()
    assert all(line.startswith("#") and len(line) < 255 for line in lines)
    assert "prediction" in "\n".join(lines)
    assert f"# {FIELDS}" in lines


# -------------------------------------------------------------------------------------------- what is chosen


def test_between_ring_and_tree_the_choice_changes_where_they_cost_the_same(tmp_path: Path) -> None:
    """64 nodes of 1: 2 log2(64) steps of the tree against 2 x 63 of the ring, 2 S beta / 0.78 against 2 x 63/64 S beta.

    Both lengths are those of ll128, so that the algorithm alone differs.
    """
    shape = shape_of(*[1] * 64)
    configs = written(tmp_path, tuner_rows(shape, nominal_links(shape, SPEEDS), [4 * MIB, 32 * MIB]))
    short, long = (first_match(configs, "allreduce", length * MIB, 64, 64) for length in (4, 32))
    assert (short.algorithm, short.protocol) == ("tree", "ll128")
    assert (long.algorithm, long.protocol) == ("ring", "ll128")
    alpha, beta = 15.0 * 4.0 / 14.0, 8e-5 * 128 / 120
    crossing = (2 * 63 - 2 * 6) * alpha / ((2 / 0.78 - 2 * 63 / 64) * beta)
    assert (short.max_nbytes, long.min_nbytes) == (int(crossing), int(crossing) + 1)
    link = Link(alpha, beta)
    assert tree_us(crossing, 64, 1, link, link) == pytest.approx(ring_us(crossing, 64, link))


def test_between_protocols_the_choice_changes_where_they_cost_the_same(tmp_path: Path) -> None:
    """reduce_scatter in a node of 8: 7 steps, 7/8 S, by a ring whatever the protocol."""
    shape = shape_of(8, 8)
    configs = written(tmp_path, tuner_rows(shape, nominal_links(shape, SPEEDS), LENGTHS))
    found = [each for each in configs if each.collective == "reducescatter"]
    assert [each.protocol for each in found] == ["ll", "ll128", "simple"]
    assert {(each.algorithm, each.nodes, each.ranks) for each in found} == {("ring", 1, 8)}
    alpha_ll, beta = 3.0 * 0.6 / 3.4, 5e-6  # nominal latency is that of simple
    ll, ll128 = (7 * alpha_ll, 7 / 8 * beta / 0.5), (7 * alpha_ll * 1.9 / 0.6, 7 / 8 * beta * 128 / 120)
    simple = (7 * 3.0, 7 / 8 * beta)
    for row, (lower, upper) in zip(found, [(ll, ll128), (ll128, simple)], strict=False):
        crossing = (upper[0] - lower[0]) / (lower[1] - upper[1])
        assert row.max_nbytes == pytest.approx(crossing, abs=1)


def test_reduce_scatter_and_all_gather_are_halves_of_the_same_ring(tmp_path: Path) -> None:
    shape = shape_of(4, 4)
    configs = written(tmp_path, tuner_rows(shape, nominal_links(shape, SPEEDS), LENGTHS))
    halves = [
        [(each.min_nbytes, each.max_nbytes, each.protocol) for each in configs if each.collective == name]
        for name in ("reducescatter", "allgather")
    ]
    assert halves[0] == halves[1]


@pytest.mark.parametrize("counts", [(8,), (1, 1, 1), (8, 8), (4, 4, 4, 4), (3, 1)])
def test_the_first_match_is_the_cheapest_way_at_every_length_asked_for(tmp_path: Path, counts: tuple[int, ...]) -> None:
    shape = shape_of(*counts)
    configs = written(tmp_path, tuner_rows(shape, nominal_links(shape, SPEEDS), LENGTHS))
    nodes, per_node = len(counts), max(counts)
    intra, node = SPEEDS.intra, SPEEDS.inter(1 if counts == (3, 1) else per_node)
    if counts == (8,):
        node = intra
    shared = Link(node.alpha_us, node.beta_us_per_byte / (per_node if len(set(counts)) == 1 else 1))
    for length in LENGTHS:
        times = {
            (name, protocol.name): form(
                length, nodes, per_node, under(intra, protocol.name, False), under(shared, protocol.name, True)
            )
            for name, form in (("ring", ring_over_nodes_us), ("tree", tree_us))
            for protocol in PROTOCOLS
        }
        chosen = first_match(configs, "allreduce", length, nodes, sum(counts))
        assert times[chosen.algorithm, chosen.protocol] == pytest.approx(min(times.values()))


def test_every_communicator_has_ranges_that_follow_each_other(tmp_path: Path) -> None:
    shape = shape_of(8, 8, 8, 8)
    configs = written(tmp_path, tuner_rows(shape, nominal_links(shape, SPEEDS), LENGTHS))
    communicators: dict[tuple[str, int, int], list[Config]] = {}
    for each in configs:
        communicators.setdefault((each.collective, each.nodes, each.ranks), []).append(each)
    assert list(communicators) == [
        ("allreduce", 4, 32),
        ("reducescatter", 1, 8),
        ("allgather", 1, 8),
        ("allreduce", 4, 4),
    ]
    for rows in communicators.values():
        assert rows[0].min_nbytes == 0
        assert rows[-1].max_nbytes == 2**63 - 1
        for one, other in pairwise(rows):
            assert other.min_nbytes == one.max_nbytes + 1
            assert (one.algorithm, one.protocol) != (other.algorithm, other.protocol), "these are one range"


def test_only_lengths_that_occur_make_ranges() -> None:
    shape = shape_of(8, 8)
    links = nominal_links(shape, SPEEDS)
    halves = [row for row in tuner_rows(shape, links, [256 * MIB, 512 * MIB]) if row.collective == "allgather"]
    assert [row.protocol for row in halves] == ["ll", "simple"], "nothing is of the length for ll128"
    # ll until it costs what simple does: 7 (3 - 3 * 0.6 / 3.4) = 7/8 S (1 / 0.5 - 1) 5e-6
    assert halves[0].max_nbytes == int(8 * (3 - 3 * 0.6 / 3.4) / 5e-6)


def test_what_crosses_between_nodes_is_a_shard(tmp_path: Path) -> None:
    """A bucket of S bytes sends S / 8 between the nodes: its range is found there, not at S."""
    shape = shape_of(8, 8)
    links = nominal_links(shape, SPEEDS)
    across = [row for row in tuner_rows(shape, links, [64 * MIB]) if (row.nodes, row.ranks) == (2, 2)]
    alone = tuner_rows(shape_of(1, 1), nominal_links(shape_of(1, 1), Speeds(100 / 8, 200)), [8 * MIB])
    assert [str(row) for row in across] == [str(row) for row in alone]


def test_nodes_of_different_sizes_have_leaders() -> None:
    shape = shape_of(3, 1)
    rows = tuner_rows(shape, nominal_links(shape, SPEEDS), LENGTHS)
    assert {(row.collective, row.nodes, row.ranks) for row in rows} == {("allreduce", 2, 4), ("allreduce", 2, 2)}


def test_measured_curves_begin_with_ll_and_end_with_simple() -> None:
    """Of a curve in several segments the first has ll's latency and the last simple's bandwidth."""
    curve = Curve((Segment(0.0, 7 * 1.0, 7 / 8 * 4e-5), Segment(MIB, 7 * 6.0, 7 / 8 * 1e-5)))
    across = Curve.linear(1 * 4.0, 1 / 2 * 8e-4)
    keys = {
        LinkKey("intra", "reduce_scatter", 8, 2): curve,
        LinkKey("inter", "reduce_scatter", 2, 8): across,
    }
    links = Links(Header(nodes=(8, 8), backend="nccl"), keys)
    halves = [row for row in tuner_rows(shape_of(8, 8), links, LENGTHS) if row.collective == "reducescatter"]
    assert [row.protocol for row in halves] == ["ll", "ll128", "simple"]
    first = 7 * (1.9 / 0.6 - 1) / (7 / 8 * 1e-5 * (2 - 128 / 120))
    assert halves[0].max_nbytes == pytest.approx(first, abs=1)


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("nbytes", [[], [0], [1024, -1]])
def test_lengths_that_cannot_be(nbytes: list[int]) -> None:
    shape = shape_of(8)
    with pytest.raises(ConfigurationError, match="lengths of messages"):
        tuner_rows(shape, nominal_links(shape, SPEEDS), nbytes)


def test_links_of_another_backend_are_refused() -> None:
    keys = {LinkKey("world", "reduce_scatter", 2): Curve.linear(100.0, 1e-3)}
    with pytest.raises(ConfigurationError, match="measured over gloo"):
        tuner_rows(shape_of(1, 1), Links(Header(backend="gloo"), keys), [MIB])


def test_one_rank_has_nothing_to_tune() -> None:
    shape = shape_of(1)
    with pytest.raises(ConfigurationError, match="one rank"):
        tuner_rows(shape, nominal_links(shape, SPEEDS), [MIB])


def test_links_without_a_ring_say_what_is_missing() -> None:
    links = Links(Header(backend="nccl"), {LinkKey("world", "all_reduce", 8): Curve.linear(10.0, 1e-5)})
    with pytest.raises(ConfigurationError, match="no figures for reduce_scatter"):
        tuner_rows(shape_of(8), links, [KIB])
