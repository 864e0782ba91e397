# SPDX-License-Identifier: Apache-2.0
"""The probe on ranks, and its command: what counts is the slowest rank, and what one meets all hear of."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from commopt.__main__ import main
from commopt.compress import Cast, Quantize
from commopt.cost import LinkKey, Links, WorkKey
from commopt.errors import MismatchError
from commopt.groups import Team, TeamShape, join
from commopt.probe import ProbeOptions, probe
from commopt.probe.collectives import COLLECTIVES
from commopt.probe.operations import TimedWork, work_of
from commopt.probe.timing import LaneTimer, Repeats, Sweep
from commopt.recording import Clock
from tests.ranks import run

TINY = ProbeOptions(256, 4096, factor=16, budget_s=0.5, parts=("inter", "work"), warm_up=1, iterations=3)

# ------------------------------------------------------------------------------ times and their shares

# When the marks of each rank are, in microseconds: of three calls in a row (the first four), or each from a barrier on.
SCRIPT_US = ([0, 10, 30, 60, 70, 75, 100], [0, 15, 45, 80, 120, 130, 190])


class Scripted(Clock):
    """A clock that shows what is written in SCRIPT_US, from some moment of its own on."""

    def __init__(self, rank: int) -> None:
        self._rank, self._marks = rank, count()

    def mark(self) -> int:
        return next(self._marks)

    def times_us(self, groups: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[1e6 * self._rank + SCRIPT_US[self._rank][mark] for mark in group] for group in groups]


def time_by_script(rank: int, world_size: int) -> tuple[list[float], float, int]:
    """Return the times of each kind of call, what they took in all beside what passed on this rank, and the calls."""
    timer, team, often = LaneTimer(join()), join().team, Repeats(1, 3)
    begun = time.perf_counter()

    calls: list[Tensor] = []

    def prepare(team: Team) -> Callable[[], None]:
        def call() -> None:
            calls.append(torch.ones(4))
            team.all_reduce(calls[-1])

        return call

    with patch("commopt.probe.timing.clock_for", lambda device: Scripted(rank)):
        found = [timer.time(lambda: lambda: None, often)]
        for closed in (True, False):
            found.append(timer.time_collective(prepare, team, "test", often, closed=closed, alone=True))
        only_first = cast(Team, TeamShape.of((1,)) if rank == 0 else None)
        idle = timer.time_collective(lambda team: lambda: None, only_first, "test", often, closed=False, alone=False)
    spent_us = sum(measured.spent_us for measured in (*found, idle))
    spent = spent_us / (time.perf_counter() - begun) / 1e6
    return [measured.time_us for measured in (*found, idle)], spent, len(calls)


def test_the_slowest_rank_counts_and_all_know_the_same() -> None:
    for times_us, spent, calls in run(time_by_script, 2):
        # By itself: medians 20 and 30. In a row: the last ends at 15, 45 and 80. From a barrier on: 30, 40 and 60 on
        # rank 1, which does not count where it only waits.
        assert times_us == [30, 30, 40, 20]
        assert 0 < spent < 1.5
        assert calls == 2 * (1 + 3)


def share_time(rank: int, world_size: int) -> list[float]:
    shares_us: list[float] = []

    def swept(sizes: Sequence[int], share_us: float, wanted: Repeats, measure: object) -> Sweep:
        shares_us.append(share_us)
        return Sweep(((1024, 1.0), (2048, 2.0)), (), 2e6 if len(shares_us) == 1 else 0.0)

    with patch("commopt.probe.prober.sweep", swept):
        probe(None, ProbeOptions(budget_s=10, parts=("world", "work")), compressors=[], stream=io.StringIO())
    return shares_us


def test_links_leave_compression_a_share_and_what_they_do_not_need() -> None:
    shares_us = run(share_time, 2)[0]
    assert len(COLLECTIVES) == 6
    assert shares_us[:7] == pytest.approx([7e6 / 6, *(5e6 / left for left in (5, 4, 3, 2, 1)), 8e6 / len(work_of([]))])


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
        probe(None, ProbeOptions(max_nbytes=4096 * (rank + 1)), compressors=[])
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
    for unusable in (tmp_path / "none" / "links.json", tmp_path / ("long" * 100)):
        assert run(command, 2, ["-o", str(unusable)]) == [2, 2]


def fail_at_work(rank: int, world_size: int) -> tuple[int, str]:
    def prepare(numel: int, device: torch.device) -> Callable[[], None]:
        if rank == 1 and numel > 2**12:
            raise MemoryError("no memory for this")
        return lambda: None

    stream = io.StringIO()
    job = TimedWork(WorkKey("copy"), prepare)
    with patch("commopt.probe.prober.work_of", lambda compressors: [job]), patch.object(sys, "stderr", stream):
        status = main(["probe", "-b", "16K", "-e", "64K", "--budget", "0.1", "--only", "work"])
    return status, stream.getvalue()


def test_every_rank_hears_of_one_that_cannot_prepare_its_work() -> None:
    for status, said in run(fail_at_work, 2, fresh=True):
        assert status == 1
        assert "rank 1" in said
        assert "no memory for this" in said


# ------------------------------------------------------------------------------ the command


def test_alone_only_compression_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("commopt.probe.prober.known_compressors", lambda: (Cast(), Quantize(4)))
    file = tmp_path / "links.json"
    assert main(["probe", "-b", "256", "-e", "1K", "--budget", "0.1", "-o", str(file)]) == 0
    output = capsys.readouterr()
    assert "one rank has nobody to send to" in output.err
    assert "torchrun" in output.err
    assert "Quantize(bits=4)" in output.out
    links = Links.load(file)
    assert not links.curves
    assert {key.kind for key in links.work} == {
        *("encode", "decode", "recode", "factor", "refresh", "copy", "pack", "unpack")
    }
    assert main(["probe", "-b", "256", "-e", "1K", "--budget", "0.1", "-o", "/dev/full"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("commopt probe: /dev/full cannot be written: No space left on device; pass another file")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-b", "2K", "-e", "1K"], "--min-bytes 2048 must be at least 64 and no more than --max-bytes 1024"),
        (["--only", "inter"], "--only inter leaves nothing to measure on 1 rank"),
        (["-o", "no/such/folder/links.json"], "no/such/folder/links.json cannot be written"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", *arguments]) == 2
    output = capsys.readouterr()
    *before, line = output.err.splitlines()
    assert line.startswith(f"commopt probe: {message}")
    assert all(each.startswith("commopt probe: one rank has nobody") for each in before)
    assert output.out == ""
