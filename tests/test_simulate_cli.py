# SPDX-License-Identifier: Apache-2.0
"""The command: options, tables, files, pictures, and what it says of unusable input."""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest

from commopt.__main__ import main
from commopt.cost import Speeds, nominal_links
from commopt.groups import TeamShape
from commopt.simulate import ClusterSpec, NetworkSpec, gpu, model, of_model, simulate_step, strategy
from commopt.simulate.cli import parse_gb_per_s, parse_gbps, parse_nodes
from commopt.version import __version__

ROOT = Path(__file__).parents[1]
BASE = ["simulate", "--model", "resnet50", "--nic", "25gbps"]
QUICK = [*BASE, "--nodes", "1,4", "--strategies", "stock", "powersgd:matrix_rank=2"]


def test_an_output_without_room_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "-o", "/dev/full"]) == 2
    said = capsys.readouterr()
    assert "resnet50" in said.out
    assert said.err.startswith("commopt simulate: /dev/full cannot be written: No space left on device; pass another")
    assert said.err.count("\n") == 1


def test_output_has_inputs_and_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    assert main([*QUICK, "--gpus-per-node", "4", "--batch", "16", "--straggler", "0.02", "-o", str(target)]) == 0
    found = json.loads(target.read_text())
    assert (found["format"], found["version"]) == (1, __version__)
    assert found["inputs"]["options"]["batch"] == 16
    assert found["inputs"]["network"]["nic_gbps"] == 25
    assert found["inputs"]["network"]["socket_gbps"] is None
    assert found["inputs"]["computation"]["gradient_nbytes"] == 4 * 25_557_032
    rows = found["rows"]
    assert [(row["strategy"], row["nodes"], row["ranks"]) for row in rows] == [
        ("stock", 1, 4),
        ("powersgd:matrix_rank=2", 1, 4),
        ("stock", 4, 16),
        ("powersgd:matrix_rank=2", 4, 16),
    ]
    for row in rows:
        assert row["step_us"] == pytest.approx(row["compute_us"] + row["waiting_us"] + row["exposed_us"])
        assert sum(bucket["nbytes"] for bucket in row["buckets"]) == 4 * 25_557_032
        assert sum(bucket["parameters"] for bucket in row["buckets"]) == 161
    shown = capsys.readouterr().out
    assert "resnet50 on nodes of 4 GPUs, 16 samples per GPU, " in shown
    assert "Simulated, not measured." in shown
    told = "16 x image of 224 x 224 pixels at 0.194 of 312 TFLOP/s (a100, fp16), from 2470/s of"
    assert told in " ".join(shown.split())
    assert "network: NetworkSpec(nic_gbps=" in shown
    assert f"{rows[-1]['gpu_efficiency']:.1%}" in shown


def test_the_command_simulates_what_the_library_does(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    options = ["--nics", "2", "--intra", "pcie4", "--efficiency", "0.8", "--latency-us", "30", "--socket-gbps", "6"]
    options += ["--connections", "2", "--rings", "--gpu", "t4", "--precision", "fp32", "--batch", "4"]
    options += ["--straggler", "0", "--compute-efficiency", "0.5", "--buckets", "ddp", "--overhead-us", "250"]
    wanted = ["--nodes", "4", "--strategies", "hierarchical"]
    assert main([*BASE, *options, *wanted, "-o", str(target)]) == 0
    network = NetworkSpec(
        25, 20, nics=2, efficiency=0.8, inter_latency_us=30, socket_gbps=6, connections=2, trees=False
    )
    cluster = ClusterSpec(8, gpu("t4"), network)
    shape = cluster.shape(4)
    aggregator = strategy("hierarchical").choices[0].build()
    expected = simulate_step(
        of_model(model("resnet50"), gpu("t4"), 4, "fp32", 0.5),
        aggregator,
        shape,
        cluster.links_for(shape, [aggregator]),
        overhead_us=250,
    )
    row = json.loads(target.read_text())["rows"][0]
    assert row["step_us"] == expected.step_us
    assert row["inter_bytes_per_node"] == expected.inter_bytes_per_node


def test_it_says_of_a_cluster_what_the_page_of_presets_says(tmp_path: Path) -> None:
    """docs/presets.md is made from the file; the command's defaults are that page's assumptions."""
    known = [json.loads(line) for line in (ROOT / "bench/results/preset_by_cluster.json").read_text().splitlines()[1:]]
    for name, gbps, nodes in (("gpt2", 10, 2), ("gpt2", 25, 4), ("resnet50", 1, 2)):
        (cell,) = (each for each in known if (each["model"], each["gbps"], each["nodes"]) == (name, gbps, nodes))
        target = tmp_path / "out.json"
        command = ["simulate", "--model", name, "--nic", f"{gbps}gbps", "--nodes", str(nodes), "-o", str(target)]
        assert main([*command, "--strategies", "stock", "hierarchical_quantized"]) == 0
        stock, quantized = json.loads(target.read_text())["rows"]
        expected = next(each["step_ms"] for each in cell["presets"] if each["preset"] == "hierarchical_quantized")
        assert stock["step_us"] / 1000 == pytest.approx(cell["stock_ms"])
        assert quantized["step_us"] / 1000 == pytest.approx(expected)
        assert stock["batch"] == cell["batch"]


def test_large_rates_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--model", "gpt2", "--nic", "100", "--nodes", "32"]) == 0
    shown = capsys.readouterr().out
    assert "e+" not in shown
    shares = [float(share) for share in re.findall(r"([0-9.]+)%\n", shown)]
    assert len(shares) == 6
    assert max(shares) <= 100
    assert max(map(len, shown.splitlines())) <= 80


def test_measured_links_and_a_workload_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    links, workload, target = (tmp_path / name for name in ("links.json", "workload.json", "out.json"))
    nominal_links(TeamShape.of((2, 2)), Speeds(10, 20)).save(links)
    parameters = [{"name": "fc.weight", "shape": [1000, 100], "ready_us": 4000}]
    workload.write_text(json.dumps({"format": 1, "name": "mine", "samples": 8, "parameters": parameters}))
    command = ["simulate", "--model", str(workload), "--links", str(links), "--gpus-per-node", "2"]
    assert main([*command, "--nodes", "2,8", "--strategies", "stock", "-o", str(target)]) == 0
    rows = json.loads(target.read_text())["rows"]
    assert [row["batch"] for row in rows] == [8, 8]
    assert rows[0]["notes"] == []
    assert rows[1]["notes"] == ["all_reduce at level world: for 16 ranks from 4"]
    assert "note: all_reduce at level world: for 16 ranks from 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate", "--model", "resnet5", "--nic", "25"], "'resnet5' is no file, and none of resnet50"),
        (["simulate", "--model", "resnet50"], "the network is missing; pass --nic"),
        ([*BASE, "--nodes", "4..1"], "must count up from 1"),
        ([*BASE, "--nodes", "10000"], "makes 80000 GPUs"),
        ([*BASE, "--precision", "int8"], "has no figure for 'int8'"),
        ([*BASE, "--batch", "0"], "'0' is not a whole number from 1"),
        ([*BASE, "--connections", "4"], "needs --socket-gbps"),
        ([*BASE, "--nic", "25GB/s"], "write for example 25gbps"),
        ([*BASE, "--latency-us", "-1"], "'-1' is not a number that is at least 0 and at most"),
        ([*BASE, "--links", "links.json"], "--links describes the network"),
        ([*BASE, "--strategies", "magic"], "strategy 'magic' is unknown"),
        ([*BASE, "--strategies", "auto"], "chooses on live steps"),
        ([*BASE, "--straggler", "-1"], "sigma=-1.0"),
        ([*BASE, "--efficiency", "2"], "'2' is not a number"),
        ([*BASE, "-o", "no/such/folder/out.json"], "No such file or directory"),
        (["simulate", "--model", "resnet50", "--links", "missing.json"], "missing.json cannot be read"),
    ],
)
def test_unusable_input_is_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status: object = main(arguments)
    except SystemExit as leave:
        status = leave.code
    assert status == 2
    error = capsys.readouterr().err
    assert says in error
    assert "commopt simulate: " in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("parse", "texts", "value"),
    [
        (lambda text: parse_nodes(text, 8), ["1..4,2,7"], (1, 2, 4, 7)),
        (lambda text: parse_nodes(text, 8), ["3..9"], (3, 4, 8, 9)),
        (parse_gbps, ["25gbps", "25Gbps", "25", "25G", "25 Gbit/s", "25.0", "25Gb/s"], 25),
        (parse_gb_per_s, ["20GBps", "20 GB/s", "20.0", "pcie4"], 20),
    ],
)
def test_what_is_typed(parse: Callable[[str], object], texts: list[str], value: object) -> None:
    assert [parse(text) for text in texts] == [value] * len(texts)


def test_rates_in_other_units() -> None:
    for text in ("25GB/s", "25GBps", "fast", "", "-25", "25mbps"):
        with pytest.raises(ArgumentTypeError, match="write for example 25gbps"):
            parse_gbps(text)
    for text in ("200Gbps", "nvlink9", "", "-1"):
        with pytest.raises(ArgumentTypeError, match="or one of pcie3"):
            parse_gb_per_s(text)
