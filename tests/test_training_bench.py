# SPDX-License-Identifier: Apache-2.0
"""The training benchmark, its file, its picture and the demo around it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from bench import demo
from bench.training import measure, report
from bench.training.measure import steps_until_look
from bench.training.report import Environment, Look, Outcome
from bench.training.strategies import parse_options
from commopt.cluster import EmulatedCluster

ROOT = Path(__file__).parents[1]

ENVIRONMENT = Environment(
    date="2030-01-01T00:00:00+00:00",
    command="python -m bench.training",
    torch="2.13.0",
    python="3.11.7",
    cpu_count=2,
    device="cpu",
    backend="gloo",
    nodes=2,
    ranks_per_node=[2, 2],
    emulated_rate="200mbit",
    parameters=4_880_640,
    seconds=40.0,
    seed=0,
    compute_ms=200.0,
    evaluation="64 windows",
)


def outcome(strategy: str, steps: int, exposed_ms: float) -> Outcome:
    curve = [Look(step, step * 40 / steps, 5.5 - 3 * (step / 80) ** 0.5) for step in range(1, steps + 1, 4)]
    return Outcome(strategy, steps, 40.0, 200 + exposed_ms, 230 + exposed_ms, exposed_ms, 58.6, 55.9, None, curve)


OUTCOMES = [outcome("ddp", 30, 1200.0), outcome("hierarchical", 40, 800.0), outcome("hierarchical_bf16", 65, 400.0)]


# --------------------------------------------------------------------------------------- the clock


@pytest.mark.parametrize(
    ("step_s", "steps"),
    [
        ([], 3),  # nothing known yet
        ([2.0, 0.5, 0.5], 10),  # 5 s between looks
        ([2.0, *[0.5] * 73], 3),  # 1.5 s left
        ([10.0, 10.0, 10.0], 1),  # a step longer than the time between looks
        ([12.0, 12.0, 12.0], 0),  # a third of a step left: 36 s are nearer to 40 than 48 s
        ([20.0, 20.0, 20.0], 0),  # over
    ],
)
def test_steps_until_look(step_s: list[float], steps: int) -> None:
    assert steps_until_look(step_s, budget_s=40.0, look_every_s=5.0) == steps


# ------------------------------------------------------------------------------ file and table


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    report.write(path, ENVIRONMENT, OUTCOMES)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["record"] for record in records] == ["environment", "strategy", "strategy", "strategy"]
    assert report.read(path) == (ENVIRONMENT, OUTCOMES)


def test_reading_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text in ("", "not json\n", "[]\n", '{"record": "strategy"}\n', '{"record": "environment"}\n'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"other\.json is not a file that bench\.training --json wrote"):
            report.read(path)


def test_table_fits_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    longest = replace(OUTCOMES[1], strategy="hierarchical_quantized:bits=4", inter_predicted_mib_per_step=4.73)
    others = [replace(OUTCOMES[0], strategy="torch_fp16", inter_mib_per_step=None), longest]
    report.print_table(ENVIRONMENT, [*OUTCOMES, *others], ["a note of " + "many words " * 9])
    printed = capsys.readouterr().out
    assert "…" not in printed  # nothing is cut off
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.strip()}
    assert rows["hierarchical_bf16"] == ["600", "400", "0.33", "58.6", f"{OUTCOMES[2].held_out_loss:.3f}", "1.62"]
    assert max(map(len, printed.splitlines())) <= 80
    assert rows["torch_fp16"][3] == "-"
    assert "s to" not in printed


def test_table_says_when_a_loss_was_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    curve = [Look(2, 10.0, 5.0), Look(4, 20.0, 4.0), Look(6, 30.0, 2.0)]
    reached, missed = (
        replace(OUTCOMES[0], strategy=name, curve=curve[:end]) for name, end in (("ddp", 3), ("flat", 2))
    )
    assert reached.seconds_to(3.0) == 25.0
    assert reached.seconds_to(5.0) == 10.0
    assert missed.seconds_to(3.0) is None
    report.print_table(replace(ENVIRONMENT, target_loss=3.0), [reached, missed], ["a note below"])
    printed = capsys.readouterr().out
    assert {line.split()[0]: line.split()[-1] for line in printed.splitlines() if line.strip()}.items() >= {
        "ddp": "25.0",
        "flat": "-",
    }.items()
    assert "\na note below\n" in printed
    assert printed.rstrip().endswith("To a held-out loss of 3: not in 40 s with flat, 25 s with ddp")


# ------------------------------------------------------------------------------------ the picture


# ----------------------------------------------------------------------------------- the real thing

TINY = ["--layers", "1", "--width", "64", "--context", "16", "--noop-steps", "5", "--look-every", "0.5"]


def test_benchmark_on_local_ranks(tmp_path: Path) -> None:
    strategies = ["ddp", "hierarchical_bf16", "torch_bf16"]
    launcher = [sys.executable, "-m", *demo.local_ranks(1, 2)[0]]
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"), "--turns", "2"]
    done = subprocess.run(
        [*launcher, "-m", "bench.training", "--strategies", ",".join(strategies), "--seconds", "1.5", *files, *TINY],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COMMOPT_RANKS_PER_NODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "not on bench.cluster, so the bytes between nodes are unknown" in done.stderr
    assert f"picture: {tmp_path / 'out.png'}" in done.stdout
    assert imread(tmp_path / "out.png").std() > 0.05

    environment, outcomes = report.read(tmp_path / "out.json")
    assert environment.nodes == 2
    assert environment.ranks_per_node == [1, 1]
    assert environment.emulated_rate is None
    assert environment.command.startswith("python -m bench.training --strategies ddp,")
    assert [outcome.strategy for outcome in outcomes] == strategies
    for outcome in outcomes:
        assert outcome.inter_mib_per_step is outcome.inter_payload_mib_per_step is None
        # To the nearest step, where one at the end may take long on a machine that does other things too.
        assert 0.75 < outcome.seconds < 15
        assert outcome.curve[-1].step == outcome.steps
        alone_ms = outcome.step_ms - outcome.exposed_ms  # measured around it, all of which is in compute_ms
        assert environment.compute_ms / 4 < alone_ms < 4 * environment.compute_ms
        assert outcome.curve[0].held_out_loss == pytest.approx(outcomes[0].curve[0].held_out_loss, abs=0.01)
        assert outcome.held_out_loss < outcome.curve[0].held_out_loss
    # Two nodes of one rank: each sends the whole gradient once, in bfloat16.
    predicted = [outcome.inter_predicted_mib_per_step for outcome in outcomes]
    assert predicted == [None, pytest.approx(2 * 2 * environment.parameters / 2**20, rel=0.01), None]


@pytest.mark.cluster
def test_benchmark_counts_bytes_between_nodes(tmp_path: Path) -> None:
    if missing := EmulatedCluster.missing("1gbit"):
        pytest.skip(missing)
    options = ["--strategies", "ddp,hierarchical", "--seconds", "1", "--json", str(tmp_path / "out.json")]
    larger = [*TINY, "--turns", "2", "--layers", "4", "--width", "128"]  # gradients outweigh messages around them
    with EmulatedCluster(nodes=2, ranks_per_node=2, rate="1gbit") as cluster:
        result = cluster.run(["-m", "bench.training", *options, *larger], timeout_s=300)
    assert result.returncode == 0, result.stderr
    environment, (stock, hierarchical) = report.read(tmp_path / "out.json")
    assert environment.emulated_rate == "1gbit"
    assert environment.ranks_per_node == [2, 2]
    gradient_mib = 4 * environment.parameters / 2**20
    assert stock.inter_payload_mib_per_step == pytest.approx(2 * 1.5 * gradient_mib, rel=0.05)
    assert hierarchical.inter_payload_mib_per_step == pytest.approx(2 * gradient_mib, rel=0.05)
    assert hierarchical.inter_predicted_mib_per_step == pytest.approx(2 * gradient_mib, rel=0.02)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("parallel", "compressed", "most_of_stock"),
    [
        ("hsdp", "hierarchical_quantized", 0.3),  # float32 in 8 bits
        # Gradients and weights in 8 bits, and the weights cross once, not in forward and in backward.
        ("fsdp", "hierarchical_quantized+weights8", 0.2),
    ],
)
def test_sharded_models_send_what_is_predicted(
    tmp_path: Path, parallel: str, compressed: str, most_of_stock: float
) -> None:
    if missing := EmulatedCluster.missing("1gbit"):
        pytest.skip(missing)
    options = ["--parallel", parallel, "--strategies", f"{parallel},{compressed}", "--seconds", "1"]
    larger = ["--json", str(tmp_path / "out.json"), *TINY, "--layers", "4", "--width", "128"]
    with EmulatedCluster(nodes=2, ranks_per_node=2, rate="1gbit") as cluster:
        result = cluster.run(["-m", "bench.training", *options, *larger], timeout_s=300)
    assert result.returncode == 0, result.stderr
    environment, (stock, ours) = report.read(tmp_path / "out.json")
    assert environment.parallel == parallel
    assert stock.inter_payload_mib_per_step is not None
    assert ours.inter_payload_mib_per_step is not None
    assert ours.inter_payload_mib_per_step == pytest.approx(ours.inter_predicted_mib_per_step, rel=0.05)
    assert ours.inter_payload_mib_per_step < most_of_stock * stock.inter_payload_mib_per_step


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parallel", "hsdp", "--strategies", "ddp"], "torch's own is 'hsdp'"),
        (["--parallel", "hsdp", "--strategies", "torch_fp16"], "not for --parallel hsdp"),
        (["--parallel", "hsdp", "--strategies", "flat+weights8"], "only --parallel fsdp sends weights"),
        (["--parallel", "fsdp", "--strategies", "flat+weights3"], "weights8, weights4"),
        (["--parallel", "fsdp", "--model", "resnet50"], "trains --model gpt"),
        (["--model", "swin-t", "--pixels", "100"], "--pixels 100: swin-t needs a multiple of 32"),
    ],
)
def test_what_a_sharded_training_cannot_be_asked_for(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.training", *arguments])
    with pytest.raises(SystemExit):
        parse_options()
    assert words in " ".join(capsys.readouterr().err.split())


# ---------------------------------------------------------------------------------------- the demo


class Became(Exception):
    """Stands for the process that the demo turns into."""


@pytest.mark.parametrize("missing", [None, "user id 1000 may not"])
def test_demo_emulates_nodes_where_it_can_and_else_says_why_not(
    missing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def execve(path: str, arguments: list[str], environment: dict[str, str]) -> None:
        raise Became(arguments[1:], environment)

    monkeypatch.delenv("COMMOPT_RANKS_PER_NODE", raising=False)
    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(EmulatedCluster, "missing", staticmethod(lambda rate: missing))
    monkeypatch.setattr(sys, "argv", ["bench.demo", "--output", str(tmp_path / "demo"), "--seconds", "7"])
    with pytest.raises(Became) as became:
        demo.main()
    arguments, environment = became.value.args
    assert (tmp_path / "demo").is_dir()
    assert arguments[-2:] == ["--seconds", "7"]  # after the demo's own, which they replace
    (contest,) = (each.split("=", 1)[1] for each in arguments if each.startswith("--strategies="))
    assert {"torch_fp16", "torch_powersgd", "unoverlapped_powersgd"} < set(contest.split(","))
    printed = capsys.readouterr().out
    if missing is None:
        on_cluster = "-m bench.cluster --nodes 2 --ranks-per-node 2 --rate 200mbit -m bench.training --json"
        assert " ".join(arguments).startswith(on_cluster)
        assert "COMMOPT_RANKS_PER_NODE" not in environment
        assert "Emulating 2 nodes x 2 ranks joined by 200mbit links" in printed
    else:
        assert arguments[:3] == ["-m", "torch.distributed.run", "--standalone"]
        assert arguments[4:6] == ["--nproc-per-node=4", "-m"]
        assert environment["COMMOPT_RANKS_PER_NODE"] == "2"
        assert "Not emulating a slow network: user id 1000 may not" in printed
        assert "COMMOPT_RANKS_PER_NODE=2 OMP_NUM_THREADS=1 python -m torch.distributed.run" in printed


def test_steps_without_communication_count_from_before_a_strategy_and_from_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Run:
        """Whose steps take 1 s, 2 s, 3 s ..."""

        def __init__(self, strategy: str, options: argparse.Namespace, device: torch.device) -> None:
            self.step_s: list[float] = []

        def step(self) -> None:
            self.step_s.append(len(self.step_s) + 1)

    monkeypatch.setattr(measure, "Run", Run)
    monkeypatch.setattr(measure, "slowest_rank_ms", lambda step_s: [1000 * each for each in step_s])
    options = argparse.Namespace(noop_steps=7, strategies=["ddp", "flat"], turns=1)
    baseline = measure.Baseline(options, torch.device("cpu"))
    for _ in options.strategies:
        baseline.take_turn()
    assert baseline.step_ms == [1000 * step for step in (4, 5, 6, 7, 8, 9)]  # the first three do not count
    assert baseline.lately_ms() == [6000, 7000, 8000, 9000]
