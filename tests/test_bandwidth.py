# SPDX-License-Identifier: Apache-2.0
"""commopt bandwidth: nccl-tests' table, its arithmetic, and that it notices wrong results and bad settings."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import commopt
from bench.demo import local_ranks
from commopt.__main__ import main
from commopt.bandwidth import cli
from commopt.bandwidth.collectives import COLLECTIVES, PERIOD, Pattern, count_wrong, fill, known_aggregators
from commopt.bandwidth.options import DTYPES, BandwidthOptions, options_of
from commopt.bandwidth.report import (
    BandwidthMeasurement,
    TableRow,
    Timing,
    footer,
    format_row,
    heading,
    short_heading,
    short_row,
)
from commopt.command_line import CommandParser
from commopt.groups import Team
from tests.ranks import RankError, run

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")

# ------------------------------------------------------------------------------ settings


def parse(arguments: list[str]) -> BandwidthOptions:
    cli.add_arguments(parser := CommandParser())
    return options_of(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("-b 8 -e 64 -f 2", [8, 16, 32, 64]),
        ("-b 8 -e 63 -f 2", [8, 16, 32]),
        ("-b 1K -e 3K -i 1K", [1024, 2048, 3072]),
        ("-b 1M -e 3M", [2**20, 2 * 2**20, 3 * 2**20]),
        ("", [32 * 2**20]),
    ],
)
def test_steps(flags: str, steps: list[int]) -> None:
    assert list(parse(flags.split()).steps_nbytes()) == steps


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-b 1K -e 8", "-b 1024 is more than -e 8 bytes; raise -e or lower -b"),
        ("-o avg -d int32", "-o avg of -d int32 is no integer; use -o sum"),
        (
            "--aggregator fast",
            "'fast' is unknown for all_reduce; .*known: torch, .*flat, hierarchical, .*hierarchical_bf16",
        ),
        ("--aggregator flat --collective all_gather", "'flat' is unknown for all_gather; known: torch, commopt"),
        ("--aggregator hierarchical_bf16 -d int64", "hierarchical_bf16 would round -d int64; use a floating-point"),
    ],
)
def test_settings_that_cannot_work(flags: str, message: str) -> None:
    with pytest.raises(commopt.ConfigurationError, match=message):
        parse(flags.split())


def test_every_preset_and_every_form_has_a_name() -> None:
    known = known_aggregators()
    assert {name: known[name] for name in commopt.PRESETS} == {n: p.build() for n, p in commopt.PRESETS.items()}
    assert known["hierarchical:leader"] == commopt.Hierarchical(form="leader")
    assert parse(["--aggregator", "quantized:bits=4"]).aggregators == ("quantized:bits=4",)


# ------------------------------------------------------------------------------ arithmetic


def test_conventions_are_those_of_nccl_tests() -> None:
    of_four = {name: (each.bus_factor(4), each.has_in_place) for name, each in COLLECTIVES.items()}
    assert of_four == {
        "all_reduce": (1.5, True),
        "reduce_scatter": (0.75, True),
        "all_gather": (0.75, True),
        "broadcast": (1.0, True),
        "all_to_all": (0.75, False),
    }


def test_iterations_add_up_to_the_loop() -> None:
    timing = Timing.of([10.0, 30.0, 35.0, 100.0])
    assert timing == Timing(mean_us=25.0, p50_us=10.0, p99_us=65.0)  # iterations of 10, 20, 5 and 65


# ------------------------------------------------------------------------------ known results


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("world_size", [1, 3, 8, 300])
def test_sums_are_exact_in_every_type(name: str, world_size: int) -> None:
    dtype = DTYPES[name]
    pattern = Pattern(dtype, world_size)
    inputs = [pattern.of_rank(rank).to(dtype) for rank in range(world_size)]
    total = torch.zeros(PERIOD, dtype=dtype)
    for values in reversed(inputs):
        total += values
    assert count_wrong(total, pattern.total("sum"), pattern.tolerance("sum", True, 0.0), True) == 0
    assert pattern.total("sum").min() > 0
    # Without the last rank's share, many elements must be wrong; on 200 ranks bfloat16 leaves a rank whole ones only.
    assert count_wrong(total - inputs[-1], pattern.total("sum"), 0.0, True) >= PERIOD // world_size


def test_wrong_elements_are_counted_where_they_are() -> None:
    period = torch.arange(1.0, PERIOD + 1).double()
    buffer = torch.empty(5 * PERIOD + 3)
    fill(buffer, period)
    assert count_wrong(buffer, period, 0.0, True) == 0
    assert count_wrong(buffer, period.roll(-1), 0.0, True) == buffer.numel()
    buffer[0], buffer[-1] = float("nan"), 0.0
    assert count_wrong(buffer, period, 0.0, True) == 2
    assert count_wrong(buffer, period, 2.0**-6, lossless=False) == 1  # 3 is little beside 1021; NaN never is
    assert count_wrong(buffer, period, 2.0**-6, lossless=True) == 2


# ------------------------------------------------------------------------------ table


def _row(**changes: Any) -> TableRow:
    side = BandwidthMeasurement(Timing(12.345, 11.0, 13.0), 1.0, 1.5, 0)
    values: dict[str, Any] = {
        "collective": "all_reduce",
        "nbytes": 1048576,
        "count": 262144,
        "type": "float",
        "redop": "sum",
        "root": -1,
        "aggregator": "flat",
        "wire_intra_bytes": 100,
        "wire_inter_bytes": 200,
        "out_of_place": side,
        "in_place": BandwidthMeasurement(Timing(123456.0, 123456.0, 1234.56), 2.0, 3.0, 7),
    }
    return TableRow(**(values | changes))


def test_heading_is_that_of_nccl_tests() -> None:
    places, names, units = heading(10).splitlines()
    assert places == "#" + " " * 62 + "out-of-place" + " " * 23 + "in-place"
    assert names == (
        "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw "
        "#wrong  aggregator    wire_intra    wire_inter       p50       p99"
    )
    assert " ".join(units.split()) == "# (B) (elements) (us) (GB/s) (GB/s) (us) (GB/s) (GB/s) (B) (B) (us) (us)"


def test_row_is_aligned_with_the_heading() -> None:
    assert format_row(_row(), 10) == (
        "     1048576        262144     float     sum      -1    12.35    1.00    1.50      0   123456    2.00    3.00"
        "      7        flat           100           200    123456    1234.6"
    )
    names = heading(10).splitlines()[1]
    assert len(format_row(_row(), 10)) == len(names)


def test_row_without_in_place_formula_or_check() -> None:
    unchecked = BandwidthMeasurement(Timing(1.0, 2.0, 3.0), 1.0, 1.0, None)
    row = _row(in_place=None, wire_intra_bytes=None, wire_inter_bytes=None, out_of_place=unchecked)
    fields = format_row(row, 10).split()
    assert fields[5:] == ["1.00", "1.00", "1.00", *["N/A"] * 5, "flat", "n/a", "n/a", "2.00", "3.00"]
    assert "# Out of bounds values : N/A" in footer([row], [])


def test_the_short_table_fits_a_terminal_and_keeps_small_rates() -> None:
    slow = BandwidthMeasurement(Timing(2_500_000.0, 1.0, 1.0), 0.000419, 0.000839, 0)
    for width, name in ((27, "hierarchical:reduce_scatter"), (4, "flat")):
        room = max(width, len("aggregator"))
        lines = [*short_heading(room).splitlines(), short_row(_row(in_place=slow, aggregator=name), room)]
        assert max(map(len, lines)) <= 80
        assert lines[-1].split() == ["1048576", name, "2500000", "0.00042", "0.00084", "0", "200"]
    assert max(map(len, known_aggregators())) <= 27
    assert short_row(_row(in_place=None), 10).split()[2] == "12.35", "there is no other side"
    assert " 0.0042  " in format_row(_row(out_of_place=replace(slow, algbw_gbps=0.0042)), 10)


def test_footer() -> None:
    lines = footer([_row()], ["a note"]).splitlines()
    assert lines == ["# a note", "# Out of bounds values : 7 FAILED", "# Avg bus bandwidth    : 2.25"]
    right = _row(in_place=None)
    assert "# Out of bounds values : 0 OK" in footer([right], [])
    assert "# Average busbw of each: flat 1.50, torch 2.25" in footer([right, _row(aggregator="torch")], [])


# ------------------------------------------------------------------------------ whole runs


@dataclass(frozen=True)
class FirstElementWrong(commopt.Flat):
    """Adds one where it must not."""

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: commopt.BufferContext) -> None:
        super().all_reduce(buffer, team, scale, context)
        buffer[0] += 1


def wrong() -> commopt.Aggregator:
    return FirstElementWrong()


def measure(rank: int, world_size: int, flags: str) -> tuple[int, str]:
    output = io.StringIO()
    with patch.dict(commopt.PRESETS, wrong=commopt.Preset(wrong)), redirect_stdout(output):
        status = cli.measure(parse(["--wide", *flags.split()]), CPU)
    return status, output.getvalue()


def measure_differently(rank: int, world_size: int) -> None:
    cli.measure(parse(["-b", "8", "-e", "8", "-n", str(1 + rank)]), CPU)


def _rows(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("nodes", [(2, 2), (2, 1), ((0, 2), (1, 3))])
def test_every_collective(name: str, nodes: Any) -> None:
    collective = COLLECTIVES[name]
    world_size = 3 if nodes == (2, 1) else 4
    names = ",".join(["torch", *(known_aggregators() if collective.aggregates else ["commopt"])])
    if nodes == (2, 1):  # unequal nodes do not allow every form
        names = "torch,flat,hierarchical,hierarchical_bf16" if collective.aggregates else "torch,commopt"
    flags = f"-b 5 -e 4100 -f 820 -n 2 -w 0 --collective {name} --aggregator {names}"
    results = run(measure, world_size, flags, nodes=nodes)
    assert [status for status, _ in results] == [0] * world_size
    assert [output for _, output in results[1:]] == [""] * (world_size - 1)
    rows = _rows(results[0][1])
    sizes = {int(row[0]) for row in rows}
    assert sizes == ({4, 4100} if not collective.blocks else {1025 // world_size * world_size * 4})
    assert ("bytes hold less than one float" in results[0][1]) == collective.blocks
    assert {row[13] for row in rows} == set(names.split(","))
    for row in rows:
        assert row[8] == "0"
        assert row[12] == ("0" if collective.has_in_place else "N/A")
        assert float(row[5]) > 0.0


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("flags", ["-o avg -d bfloat16", "-d uint8", "-d double"])
def test_types_and_averages(name: str, flags: str) -> None:
    results = run(measure, 3, f"-b 4K -e 4K -n 1 -w 0 {flags} --collective {name}", nodes=(2, 1))
    assert [status for status, _ in results] == [0] * 3
    assert [row[2:4] for row in _rows(results[0][1])] == [[flags.split()[-1], "avg" if "avg" in flags else "sum"]]


def test_wire_bytes_are_the_sum_over_ranks() -> None:
    _, output = run(measure, 4, "-b 4K -e 4K -n 1 -w 0 --aggregator flat,torch", nodes=(2, 2))[0]
    flat, torch_row = _rows(output)
    # Each of 4 ranks sends 1.5 x 4096 to its neighbour in the ring: two of these hops leave the node.
    assert flat[14:16] == ["12288", "12288"]
    assert torch_row[14:16] == ["n/a", "n/a"]


def test_wrong_results_are_counted_and_fail_every_rank() -> None:
    results = run(measure, 2, "-b 64 -e 64 -n 1 -w 0 --aggregator wrong")
    assert [status for status, _ in results] == [1, 1]
    assert [(row[8], row[12]) for row in _rows(results[0][1])] == [("2", "2")]  # one element on each of two ranks
    assert "# Out of bounds values : 4 FAILED" in results[0][1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--ranks-per-node 3", "world_size 2 is not a multiple of ranks_per_node 3"),
        ("--json /nonexistent/folder/x.json", "/nonexistent/folder/x.json cannot be written: .*No such file"),
    ],
)
def test_settings_this_world_cannot_do_raise_on_every_rank(flags: str, message: str) -> None:
    with pytest.raises(RankError, match=f"(?s)2 of 2 ranks.*ConfigurationError: {message}"):
        run(measure, 2, f"-b 8 -e 8 {flags}")


def test_ranks_with_different_settings_raise_on_every_rank() -> None:
    with pytest.raises(RankError, match=r"(?s)2 of 2 ranks.*disagree about iterations: rank 1 has 2, rank 0 has 1"):
        run(measure_differently, 2)


def without_room(rank: int, world_size: int) -> tuple[int, str]:
    said = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(said):
        status = cli.measure(parse(["-b", "8", "-e", "8", "-n", "1", "-w", "0", "--json", "/dev/full"]), CPU)
    return status, said.getvalue()


def test_a_file_without_room_is_one_line_of_the_rank_that_writes() -> None:
    why = "commopt bandwidth: /dev/full cannot be written: No space left on device; "
    assert run(without_room, 2) == [(2, f"{why}pass another file, or make room for it\n"), (0, "")]


def without_memory(rank: int, world_size: int, full_ones: tuple[int, ...]) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("can't allocate memory")

    with patch.object(Pattern, "buffers", full) if rank in full_ones else nullcontext():
        cli.measure(parse(["-b", "8", "-e", "8"]), CPU)


@pytest.mark.parametrize("full_ones", [(1,), (0, 1)])
def test_buffers_that_some_rank_cannot_allocate_raise_on_every_rank(full_ones: tuple[int, ...]) -> None:
    with pytest.raises(RankError) as failed:
        run(without_memory, 2, full_ones)
    for rank in range(2):
        why = r" \(can't allocate memory\)" if rank in full_ones else ""
        ranks = f"{len(full_ones)} of 2 ranks"
        message = rf"ConfigurationError: {ranks} cannot allocate buffers of 8 bytes{why}; pass a lower -e"
        assert re.search(message, failed.value.errors[rank])


def test_a_failure_on_some_rank_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise commopt.LaneError("rank 1 ended with an exception")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(cli, "start", lambda environ: CPU)
    monkeypatch.setattr(cli, "measure", fail)
    cli.add_arguments(parser := CommandParser())
    assert cli.run(parser.parse_args([])) == 3
    assert capsys.readouterr().err == "commopt bandwidth: rank 1 ended with an exception\n"


def _torchrun(ranks: int, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", *local_ranks(1, ranks)[0]]
    return subprocess.run(
        [*launcher, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_under_torchrun_with_json(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    flags = f"-b 1K -e 2K -f 2 -n 3 -w 1 --aggregator torch,hierarchical_bf16 --wide --json {path}".split()
    done = _torchrun(4, "-m", "commopt", "bandwidth", *flags, COMMOPT_RANKS_PER_NODE="2")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"# Avg bus bandwidth    : [\d.e-]+", done.stdout.splitlines()[-1])
    document = json.loads(path.read_text())
    environment = document["environment"]
    assert (environment["backend"], environment["world_size"]) == ("gloo", 4)
    assert environment["nodes"] == [[0, 1], [2, 3]]
    assert environment["nodes_declared"] is True
    assert environment["torch"] == torch.__version__
    assert environment["command"].endswith(" ".join(flags))
    assert [(row["nbytes"], row["aggregator"]) for row in document["rows"]] == [
        (nbytes, name) for nbytes in (1024, 2048) for name in ("torch", "hierarchical_bf16")
    ]
    for row, printed in zip(document["rows"], _rows(done.stdout), strict=True):
        assert printed[13] == row["aggregator"]
        for side in (row["out_of_place"], row["in_place"]):
            timing = side["timing"]
            assert 0 < timing["p50_us"] <= timing["p99_us"]
            assert side["algbw_gbps"] == pytest.approx(row["nbytes"] / timing["mean_us"] / 1e3)
            assert side["busbw_gbps"] == pytest.approx(1.5 * side["algbw_gbps"])
            assert side["wrong"] == 0
    assert document["rows"][0]["wire_inter_bytes"] is None
    assert document["rows"][1]["wire_inter_bytes"] == 1024  # half of 1024 bytes in bfloat16, from each of two nodes
    assert document["out_of_bounds_values"] == 0
    assert document["environment"]["command"].startswith("commopt bandwidth -")


def test_without_torchrun_it_says_how_to_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["bandwidth", "-b", "8", "-e", "8"]) == 2
    message = "commopt bandwidth: no rank: start it with torchrun --nproc-per-node 2 -m commopt bandwidth ..., or with "
    assert capsys.readouterr().err == message + "srun or mpirun python -m commopt bandwidth ...\n"
