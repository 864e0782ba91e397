"""The probe: what it measures in how much time, the keys of its curves, its report and picture, and its command."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from commopt.__main__ import main
from commopt.compress import Cast, Quantize
from commopt.cost import Curve, Header, LinkKey, Links, WorkKey
from commopt.errors import ConfigurationError, MismatchError
from commopt.groups import Team, TeamShape
from commopt.probe import Settings, Survey, picture, probe, report
from commopt.probe.budget import Measured, Repeats, disturbed, repeats, sweep
from commopt.probe.header import command_line
from commopt.probe.linerate import Network, node_factor, own_gbps
from commopt.probe.operations import COLLECTIVES, groups_of
from commopt.probe.progress import shown
from commopt.probe.settings import nbytes_text, parse_nbytes
from commopt.probe.work import jobs_of, known_compressors
from tests.ranks import run
from topology import Cluster

WANTED = Repeats(5, 20)
TINY = Settings(256, 4096, factor=16, budget_s=0.5, parts=("inter", "work"), warm_up=1, iterations=3)
MIB = 2**20

# ------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize(("text", "nbytes"), [("64", 64), ("4K", 4096), ("1.5m", 3 * 2**19), ("2GiB", 2**31)])
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "-4K", "4T", "1e6"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is no number of bytes; write 1024, 4K"):
        parse_nbytes(text)


def test_sizes_for_people() -> None:
    assert [nbytes_text(nbytes) for nbytes in (64, 1024, 3 * 2**19, 2**33)] == ["64 B", "1 KiB", "1.5 MiB", "8 GiB"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"min_nbytes": 8}, "--min-bytes 8 must be at least 64"),
        ({"min_nbytes": 4096, "max_nbytes": 1024}, "no more than --max-bytes 1024"),
        ({"max_nbytes": 2**34}, "pass 8G or less"),
        ({"factor": 1.0}, "--factor 1 must be between"),
        ({"factor": float("nan")}, "--factor nan must be between"),
        ({"budget_s": 0}, "--budget 0 must be a number of seconds above 0"),
        ({"parts": ("inter", "outer")}, "--only inter,outer must name some of intra, inter, world, work"),
        ({"iterations": 2}, "needed for a median"),
    ],
)
def test_settings_that_cannot_work(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Settings(**wrong)


def test_messages_grow_by_the_factor() -> None:
    assert Settings(1024, 16384, 4).sizes() == (1024, 4096, 16384)
    assert Settings(1024, 16384, 4).sizes(5000) == (1024, 4096)
    assert len(Settings().sizes()) == 19
    assert Settings().sizes()[-1] == 256 * MIB


def test_messages_can_be_cut_for_all_ranks() -> None:
    settings = Settings(100, 4096, 8)
    assert COLLECTIVES["all_reduce"].sizes(settings, 3) == (100, 800)
    assert COLLECTIVES["reduce_scatter"].sizes(settings, 3) == (108, 804)
    # Its result, a block from each rank, is what must not grow too large; and one size makes no curve.
    assert COLLECTIVES["all_gather"].sizes(settings, 8) == (100, 200)


# ------------------------------------------------------------------------------ time


@pytest.mark.parametrize(
    ("predicted_us", "left_us", "expected"),
    [
        (1.0, 1e6, Repeats(5, 200)),  # short calls more often
        (1000.0, 1e6, Repeats(5, 30)),
        (1000.0, 80e3, Repeats(1, 19)),  # a quarter of what is left
        (1000.0, 17e3, Repeats(1, 3)),
        (1000.0, 5e3, Repeats(1, 3)),  # the last one may take all
        (1000.0, 3.9e3, None),
        (1000.0, -1.0, None),
    ],
)
def test_how_often_a_call_is_repeated(predicted_us: float, left_us: float, expected: Repeats | None) -> None:
    assert repeats(predicted_us, left_us, WANTED) == expected


class Link:
    """A link of one latency and bandwidth; `calls` are what was measured on it."""

    def __init__(self, alpha_us: float, bytes_per_us: float, disturbance: Callable[[int], float] = lambda _: 1) -> None:
        self.alpha_us, self.bytes_per_us, self.disturbance = alpha_us, bytes_per_us, disturbance
        self.calls: list[tuple[int, Repeats]] = []

    def measure(self, nbytes: int, often: Repeats) -> Measured:
        self.calls.append((nbytes, often))
        time_us = (self.alpha_us + nbytes / self.bytes_per_us) * self.disturbance(len(self.calls))
        return Measured(time_us, time_us * (often.warm_up + often.iterations))


@pytest.mark.parametrize("bytes_per_us", [1.0, 25.0, 1e3, 1e5])
@pytest.mark.parametrize("share_us", [5e5, 4e6, 1e8])
def test_a_sweep_keeps_to_its_time(bytes_per_us: float, share_us: float) -> None:
    link, sizes = Link(100.0, bytes_per_us), Settings().sizes()
    found = sweep(sizes, share_us, WANTED, link.measure)
    assert found.spent_us <= share_us
    assert [nbytes for nbytes, _ in found.points] + list(found.skipped) == list(sizes)
    assert all(often.iterations >= 3 and often.warm_up >= 1 for _, often in link.calls)
    assert all(time_us == link.alpha_us + nbytes / bytes_per_us for nbytes, time_us in found.points)
    if found.skipped:  # it stopped no earlier than it had to: four calls of the next would not have fitted
        assert 4 * found.skipped[0] / found.points[-1][0] * found.points[-1][1] > 0.85 * share_us - found.spent_us


def test_a_fast_link_is_measured_to_the_end_and_a_slow_one_has_a_curve() -> None:
    assert sweep(Settings().sizes(), 1e7, WANTED, Link(20.0, 1e5).measure).skipped == ()
    assert len(sweep(Settings().sizes(), 1.0, WANTED, Link(1e6, 1.0).measure).points) == 4


@pytest.mark.parametrize(
    ("disturbance", "measured"),
    [
        ({3: 2.0}, [1024, 1024, 2048, 4096, 2048]),  # longer than a larger one: in the end
        ({4: 30.0}, [1024, 1024, 2048, 4096, 4096]),  # far longer than predicted: at once, or the curve would end here
        ({}, [1024, 1024, 2048, 4096]),
    ],
)
def test_what_was_disturbed_is_measured_again(disturbance: dict[int, float], measured: list[int]) -> None:
    link = Link(1000.0, 2.0, lambda call: disturbance.get(call, 1.0))
    found = sweep((1024, 2048, 4096), 1e7, WANTED, link.measure)
    assert [time_us for _, time_us in found.points] == [1000 + nbytes / 2 for nbytes in (1024, 2048, 4096)]
    assert [nbytes for nbytes, _ in link.calls] == measured


def test_disturbed_is_what_takes_clearly_longer_than_more_bytes() -> None:
    assert disturbed({1: 10.0, 2: 10.5, 4: 10.0, 8: 30.0, 16: 20.0, 32: 40.0}) == [8]
    assert disturbed({1: 50.0, 2: 40.0, 4: 30.0}) == [1, 2]
    assert disturbed({}) == []


# ------------------------------------------------------------------------------ who measures what


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ((1,), []),
        ((3,), [("world", 3, 1, {0, 1, 2})]),
        ((1, 1), [("world", 2, 1, {0, 1})]),
        (
            (2, 2),
            [
                ("intra", 2, 1, {0, 1}),
                ("intra", 2, 2, {0, 1, 2, 3}),
                ("inter", 2, 1, {0, 2}),
                ("inter", 2, 2, {0, 1, 2, 3}),
                ("world", 4, 1, {0, 1, 2, 3}),
            ],
        ),
        ((1, 2), [("intra", 2, 1, {1, 2}), ("inter", 2, 1, {0, 1}), ("world", 3, 1, {0, 1, 2})]),
    ],
)
def test_who_is_at_work_when(nodes: tuple[int, ...], expected: list[tuple[str, int, int, set[int]]]) -> None:
    plans = [groups_of(cast(Team, TeamShape.of(nodes, rank))) for rank in range(sum(nodes))]
    for place, (level, ranks, groups, workers) in enumerate(expected):
        mine = [plan[place] for plan in plans]
        assert {(each.level, each.ranks, each.groups) for each in mine} == {(level, ranks, groups)}
        assert {rank for rank, each in enumerate(mine) if each.team is not None} == workers
    assert all(len(plan) == len(expected) for plan in plans)


def test_all_work_has_a_key_and_does_something() -> None:
    jobs = jobs_of([Cast(), Quantize(4)])
    keys = {job.key for job in jobs}
    assert {WorkKey(kind, "Quantize(bits=4)") for kind in ("encode", "decode", "recode")} < keys
    assert {WorkKey("copy"), WorkKey("factor", "PowerSGD(4)")} < keys
    for job in jobs:
        sizes = job.sizes(TINY)
        assert len(sizes) > 1
        job.prepare(sizes[0] // 4, torch.device("cpu"))()
    assert {repr(each) for each in known_compressors()} >= {"Exact()", "Quantize(bits=8)", "OneBit(block=512)"}


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
    ],
)
def test_what_a_node_sends_for_a_byte(key: LinkKey, factor: float) -> None:
    assert node_factor(key, (2, 2)) == pytest.approx(factor)


def links_of(gbps: float = 0.2) -> Links:
    """Return what a probe of 2 x 2 ranks would find, on such a network."""
    header = Header("2025-01-02T03:04:05+00:00", ("a", "b"), (2, 2), "gloo", "x86_64 CPU", "2.7.0", "probe")
    sizes = Settings(1024, 16 * MIB, 4).sizes()
    curves = {}
    for primitive in COLLECTIVES:
        for level, ranks, groups in (("intra", 2, 2), ("inter", 2, 1), ("inter", 2, 2), ("world", 4, 1)):
            key = LinkKey(level, primitive, ranks, groups)
            beta = (node_factor(key, (2, 2)) or 0.01) * 8e-3 / gbps
            curves[key] = Curve.fit((nbytes, 50 * ranks + beta * nbytes) for nbytes in sizes)
    encoder = Curve.fit((nbytes, 10 + nbytes / 2000) for nbytes in sizes)
    return Links(header, curves, {WorkKey("encode", "Cast(dtype=torch.bfloat16)"): encoder})


def test_the_network_is_held_against_its_line_rate() -> None:
    network = Network.of(links_of(0.2), 0.2)
    assert network is not None
    assert network.measured_gbps == pytest.approx(0.2, rel=0.01)
    assert not network.slow
    assert Network.of(links_of(9.0), 25.0).slow  # type: ignore[union-attr]  # there is one
    assert Network.of(Links(Header(nodes=(1,)), {}), 25.0) is None


class Place:
    """A membership as far as its network cards go."""

    def __init__(self, emulated: bool) -> None:
        self.cluster = Cluster.from_ranks_per_node(2, 1)
        assert self.cluster.emulated
        if not emulated:
            self.cluster = Cluster(self.cluster.nodes, self.cluster.names)


def test_the_line_rate_of_emulated_nodes_is_that_of_their_links() -> None:
    for rate, gbps in (("200mbit", 0.2), ("1gbit", 1.0), ("64kbit", 64e-6), ("none", None)):
        assert own_gbps(cast(Any, Place(False)), {"BENCH_CLUSTER_RATE": rate}) == gbps
    assert own_gbps(cast(Any, Place(True)), {}) is None


# ------------------------------------------------------------------------------ what is shown


def text_of(links: Links, nominal_gbps: float | None, stopped: dict[str, int] | None = None) -> str:
    stream = io.StringIO()
    report.show(Survey(links, stopped or {}), Network.of(links, nominal_gbps), 120, stream)
    return stream.getvalue()


@pytest.mark.parametrize("rich", [True, False])
def test_the_report(rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    text = text_of(links_of(), 0.2, {"inter reduce of 2 ranks": 4 * MIB})
    row = next(line for line in text.splitlines() if "inter" in line and "reduce_scatter" in line).split()
    assert row[:5] == ["inter", "reduce_scatter", "2", "1", "100"]
    assert row[5:9] == ["0.05", "0.2", "1.0000", "0.0%"]
    assert "Cast(dtype=torch.bfloat16)" in text
    assert "--budget 120 ended 1 of 25 curves" in text
    assert "inter reduce of 2 ranks at 4 MiB" in text
    assert "100% of a line rate of 0.2 Gb/s" in text


def test_a_network_below_half_its_line_rate_is_warned_of() -> None:
    slow = text_of(links_of(9.0), 25.0)
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


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_is_drawn(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"probe{suffix}"
    picture.draw(links_of(), path)
    assert path.stat().st_size > 20_000
    picture.draw(Links(Header(nodes=(1,)), {}, links_of().work), path)  # of one rank


def test_without_matplotlib_the_picture_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match="pip install"):
        picture.require_drawable(Path("probe.png"))


def test_progress_is_a_line_for_each_curve_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with shown(2, stream) as progress:
        for what in ("inter all_reduce", "copy"):
            progress.begin(what)
            progress.measuring("1 KiB")
            progress.end("3 sizes")
    assert stream.getvalue() == "[1/2] inter all_reduce: 3 sizes\n[2/2] copy: 3 sizes\n"


def test_progress_is_a_bar_on_a_terminal() -> None:
    pytest.importorskip("rich")
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    with shown(2, stream) as progress:
        progress.begin("inter all_reduce")
        progress.measuring("1 KiB")
        progress.end("3 sizes")
    assert "1/2" in stream.getvalue()


def test_the_command_is_written_down_without_folders() -> None:
    command = command_line(["-o", "/home/me/links.json", "-e", "16M"], {"BENCH_CLUSTER_RATE": "200mbit", "HOME": "/x"})
    assert command == "BENCH_CLUSTER_RATE=200mbit python -m commopt probe -o links.json -e 16M"


# ------------------------------------------------------------------------------ on ranks


def probe_tiny(rank: int, world_size: int) -> tuple[Links, str]:
    stream = io.StringIO()
    return probe(None, TINY, compressors=[Cast()], stream=stream), stream.getvalue()


def test_two_nodes_of_two_ranks(tmp_path: Path) -> None:
    results = run(probe_tiny, 4, nodes=(2, 2))
    links = results[0][0]
    assert all(other == links for other, _ in results)
    assert set(links.curves) == {LinkKey("inter", name, 2, groups) for groups in (1, 2) for name in COLLECTIVES}
    assert WorkKey("encode", "Cast(dtype=torch.bfloat16)") in links.work
    assert all(time_us > 0 for curve in links.curves.values() for _, time_us in curve.points)
    assert (links.header.nodes, links.header.backend) == ((2, 2), "gloo")
    assert not links.nominal
    assert len(results[0][1].splitlines()) == len(links.curves) + len(links.work)
    assert [text for _, text in results[1:]] == [""] * 3
    links.save(tmp_path / "links.json")
    assert Links.load(tmp_path / "links.json").curves.keys() == links.curves.keys()


def probe_differently(rank: int, world_size: int) -> str:
    with pytest.raises(MismatchError, match="ranks disagree about settings") as caught:
        probe(None, Settings(max_nbytes=4096 * (rank + 1)), compressors=[])
    return str(caught.value)


def command(rank: int, world_size: int, arguments: list[str]) -> int:
    return main(["probe", *arguments])


def test_ranks_with_other_settings_are_told() -> None:
    first, second = run(probe_differently, 2)
    assert first == second


def test_the_command_on_ranks(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    arguments = ["-b", "256", "-e", "1K", "--budget", "0.1", "--only", "world,intra", "-o", str(file)]
    assert run(command, 2, arguments) == [0, 0]
    links = Links.load(file)
    assert set(links.curves) == {LinkKey("world", name, 2) for name in COLLECTIVES}
    assert not links.work
    assert run(command, 2, ["-o", str(tmp_path / "none" / "links.json")]) == [64, 64]


# ------------------------------------------------------------------------------ the command


def test_alone_only_compression_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("commopt.probe.surveyor.known_compressors", lambda: (Cast(), Quantize(4)))
    file = tmp_path / "links.json"
    assert main(["probe", "-b", "256", "-e", "1K", "--budget", "0.1", "-o", str(file)]) == 0
    output = capsys.readouterr()
    assert "one rank has nobody to send to" in output.err
    assert "torchrun" in output.err
    assert "Quantize(bits=4)" in output.out
    links = Links.load(file)
    assert not links.curves
    assert {key.kind for key in links.work} == {"encode", "decode", "recode", "factor", "copy"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-e", "many"], "'many' is no number of bytes; write 1024, 4K, 32M or 1G"),
        (["-b", "2K", "-e", "1K"], "--min-bytes 2048 must be at least 64 and no more than --max-bytes 1024"),
        (["--budget", "-3"], "--budget -3 must be a number of seconds above 0, for example 120"),
        (["--only", "inter"], "--only inter leaves nothing to measure on 1 rank"),
        (["--plot", "probe.bmp"], "--plot probe.bmp: no format to draw in"),
        (["-o", "no/such/folder/links.json"], "no/such/folder/links.json cannot be written"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", *arguments]) == 64
    output = capsys.readouterr()
    *before, line = output.err.splitlines()
    assert line.startswith(f"commopt probe: {message}")
    assert all(each.startswith("commopt probe: one rank has nobody") for each in before)
    assert output.out == ""


def test_an_unknown_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["probe", "--factor", "two"])
    assert caught.value.code == 64
    assert capsys.readouterr().err.count("\n") == 1
