# SPDX-License-Identifier: Apache-2.0
"""The convergence benchmark: what it compares, its file, its tables and picture, and one short real run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch

import commopt
from bench.evidence.convergence import local_table, plan, report, sparse, sparse_table
from bench.evidence.convergence.ranks import parse_options
from bench.evidence.convergence.report import Environment, Point, Run
from bench.training.report import Look, Outcome
from bench.training.strategies import require_known
from commopt.aggregate import Buffer, Call
from commopt.feedback import Layout
from commopt.groups import TeamShape

ROOT = Path(__file__).parents[1]
ENVIRONMENT = Environment(
    date="2030-01-01T00:00:00+00:00",
    torch="2.13.0",
    python="3.11.7",
    cpu_count=2,
    command="python -m bench.evidence.convergence",
    ranks_per_node=[2, 2],
    settings=plan.settings(plan.TASKS),
)


def made(
    task: str,
    strategy: str,
    losses: list[float | None],
    accuracy: float | None = None,
    seed: int = 0,
    inter_bytes: float | None = None,
) -> Run:
    curve = [Point(10 * (index + 1), loss, accuracy) for index, loss in enumerate(losses)]
    return Run(task, "sgd", strategy, seed, 1000, 12.5, inter_bytes, curve)


RUNS = [
    made("gpt", "ddp", [4.0, 3.0, 2.0]),
    made("gpt", "hierarchical", [4.0, 3.0, 2.0], inter_bytes=800.0),
    made("gpt", "hierarchical_onebit", [5.0, 3.0, 2.02], inter_bytes=25.0),
    made("gpt", "hierarchical_onebit:feedback=None", [5.0, 4.0, 2.5], inter_bytes=25.0),
    made("gpt", "hierarchical_dgc", [5.0, None, None], inter_bytes=8.0),
    made("digits", "ddp", [2.0, 0.2], accuracy=0.98),
    made("digits", "ddp", [2.0, 0.2], accuracy=0.96, seed=1),
    made("digits", "hierarchical_onebit", [2.0, 0.2], accuracy=0.976),
    made("digits", "hierarchical_onebit", [2.0, 0.2], accuracy=0.96, seed=1),
    made("digits", "hierarchical_onebit:feedback=None", [2.0, 0.3], accuracy=0.9),
]
OUTCOMES = [
    Outcome(strategy, 10, 6.0, step_ms, step_ms, 0.0, None, None, None, [Look(10, 6.0, 3.0)])
    for strategy, step_ms in (("ddp", 2000.0), ("hierarchical_onebit", 100.0))
]


# ----------------------------------------------------------------------------------------- the plan


def test_every_preset_is_compared_and_every_strategy_exists() -> None:
    strategies = [entry.strategy for entry in plan.ENTRIES]
    assert len(set(strategies)) == len(strategies)
    # Each as it is by default; what auto takes depends on the clock, so that no two of its trainings are alike.
    assert set(commopt.PRESETS) - {"auto"} <= set(strategies)
    for entry in plan.ENTRIES[1:]:
        assert entry.aggregator or commopt.build_preset(entry.strategy)
    assert strategies[0] == "ddp"
    without_feedback = [strategy for strategy in strategies if strategy.endswith(plan.NO_FEEDBACK)]
    assert {strategy.removesuffix(plan.NO_FEEDBACK) for strategy in without_feedback} <= set(strategies)
    for family in ("onebit", "dgc", "powersgd"):
        assert any(family in strategy for strategy in without_feedback)


def test_options_of_the_ranks_are_those_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ["--quick", "--task", "gpt", "--only", "onebit", "--json", str(tmp_path / "a.json")]
    monkeypatch.setattr(sys, "argv", ["bench.evidence.convergence", *arguments])
    options = parse_options()
    assert [(task.name, task.steps) for task in options.tasks] == [("gpt", 20)]
    assert set(options.settings) == {"digits", "gpt"}  # one task now, the other later, in one file
    assert list(options.seeds) == [0]
    assert options.link_json == tmp_path / "a_50mbit.json"
    assert options.command == f"python -m bench.evidence.convergence {' '.join(arguments)}"


def test_sharded_strategies_are_those_of_their_mesh(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {task.name: task.model[task.model.index("--parallel") + 1] for task in plan.SHARDED_TASKS}
    for case in plan.cases(plan.SHARDED_TASKS, plan.SHARDED_ENTRIES, range(2)):
        require_known(case.entry.strategy, known[case.task.name])
        assert case.seed == 0 or not case.task.one_seed
    monkeypatch.setattr(sys, "argv", ["bench.evidence.convergence", "--task", "hsdp"])
    with pytest.raises(SystemExit):
        parse_options()
    assert "--task hsdp is not among digits, gpt" in capsys.readouterr().err


# ------------------------------------------------------------------------------ the file


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    report.write(path, ENVIRONMENT, RUNS)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # no NaN: any reader of JSON can read it
    assert report.read(path) == (ENVIRONMENT, RUNS)
    assert [entry.name for entry in path.parent.iterdir()] == ["out.json"]


def test_a_file_is_gone_on_with_only_when_it_was_made_alike(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert report.resume(path, ENVIRONMENT) == (ENVIRONMENT, [])
    report.write(path, ENVIRONMENT, RUNS)
    assert report.resume(path, replace(ENVIRONMENT, date="later", cpu_count=8)) == (ENVIRONMENT, RUNS)
    other = replace(ENVIRONMENT, settings=plan.settings(plan.quick(plan.TASKS)))
    with pytest.raises(ValueError, match=r"was made with settings .* so nothing can be added to it; remove it"):
        report.resume(path, other)


# ----------------------------------------------------------------------------------- what follows


def test_summaries_compare_with_stock_ddp_seed_by_seed() -> None:
    summaries = {(summary.task, summary.strategy): summary for summary in report.summarize(RUNS)}
    onebit = summaries["gpt", "hierarchical_onebit"]
    assert onebit.percent_of_loss == pytest.approx(1.0)
    assert onebit.points is onebit.accuracy is None
    assert onebit.acceptable == (onebit.percent_of_loss <= 1.0)
    assert onebit.steps_to_target == pytest.approx(20 + 10 * (3.0 - 2.1) / (3.0 - 2.02))
    assert not summaries["gpt", "hierarchical_onebit:feedback=None"].acceptable
    diverged = summaries["gpt", "hierarchical_dgc"]
    assert diverged.loss == inf
    assert not diverged.acceptable
    assert diverged.steps_to_target is None
    digits = summaries["digits", "hierarchical_onebit"]
    assert digits.each == pytest.approx((-0.4, 0.0))
    assert digits.points == pytest.approx(-0.2)
    assert digits.acceptable
    alone = summaries["digits", "hierarchical_onebit:feedback=None"]
    assert alone.points == pytest.approx(-8.0)  # against the one seed it was run with
    assert report.summarize([made("gpt", "flat", [2.0])]) == []  # nothing to compare with


def test_table() -> None:
    found = {row["strategy"].strip("`"): row for row in report.rows(RUNS, OUTCOMES)}
    assert list(found) == [c.strategy for c in plan.ENTRIES if c.strategy in {r.strategy for r in RUNS}]
    onebit = found["hierarchical_onebit"]
    assert onebit["digits SGD"] == "96.8 (-0.2 ±0.3)"
    assert "digits AdamW" not in onebit  # nobody was trained so
    assert onebit["bytes of hierarchical's"] == "0.031"
    assert onebit["step ms"] == "100"
    assert onebit["s to loss, SGD"] == "2.9"
    assert found["hierarchical_onebit:feedback=None"]["gpt SGD"] == "2.500 (+25.0 %) !"
    assert found["hierarchical_dgc"]["gpt SGD"] == "diverged !"
    assert found["hierarchical_dgc"]["s to loss, SGD"] == "-"


def test_local_sgd_by_period(tmp_path: Path) -> None:
    strategies = [entry.strategy for entry in plan.LOCAL_ENTRIES]
    assert len(set(strategies)) == len(strategies)
    one_bit = "LocalSGD(period=16, compressor=OneBit(block=512))"
    assert one_bit in strategies
    runs = [
        made("gpt", "ddp", [4.0, 3.0, 2.0]),
        made("gpt", "hierarchical", [4.0, 3.0, 2.0], inter_bytes=800.0),
        made("gpt", one_bit, [5.0, 2.1, 2.05], inter_bytes=4.0),
    ]
    report.write(tmp_path / "out.json", ENVIRONMENT, runs)
    lines = local_table.markdown(tmp_path / "out.json").splitlines()
    assert lines[0] == "|  | every step | period=4 | period=16 | period=64 |"
    row = next(line for line in lines if line.startswith("| `LocalSGD(compressor=OneBit(block=512))`"))
    assert row.endswith("| - | - | 2.050 (+2.5 %) !; x 0.69; 0.0050 | - |")


def test_parameters_that_end_as_stocks_are_said_to() -> None:
    exact, other, stock = (
        replace(made("hsdp", name, [2.0]), optimizer="adamw", digest=digest)
        for name, digest in (("flat", "a"), ("hierarchical_bf16", "b"), ("hsdp", "a"))
    )
    cells = [row["hsdp AdamW"] for row in report.rows([exact, other, stock], [])]
    assert cells == ["2.000 (the same bits)", "2.000 (+0.0 %)", "2.000 (+0.0 %)"]


# ----------------------------------------------------------------------------------- the real thing


def trained(*arguments: str) -> str:
    """Return what the benchmark writes to stderr beside its table, which it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.evidence.convergence", "--quick", "--no-link", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{report.markdown(Path(arguments[-1]))}\n"
    return done.stderr


def test_a_short_sharded_run(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    trained("--sharded", "--task", "fsdp", "--only", "weights8", "--json", str(file))
    stock, compressed = report.read(file)[1]
    assert (stock.strategy, compressed.strategy) == ("fsdp", "hierarchical_quantized+weights8")
    assert stock.parameters == compressed.parameters == 134_656
    assert stock.digest != compressed.digest
    assert compressed.loss == pytest.approx(stock.loss, rel=0.05)
    # A byte of each gradient, and of each weight, which leave both nodes once.
    assert compressed.inter_bytes_per_step == pytest.approx(2 * stock.parameters, rel=0.1)


def test_a_short_run_goes_on_with_a_file(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    settings = plan.settings(plan.quick(plan.TASKS))
    known = made("digits", "ddp", [2.0, 1.9], accuracy=0.2)
    report.write(file, replace(ENVIRONMENT, torch=torch.__version__, settings=settings), [known])
    assert "3 trainings, 1 done before" in trained("--task", "digits", "--only", "bf16", "--json", str(file))
    first, *added = report.read(file)[1]
    assert first == known
    names = [f"{run.optimizer} {run.strategy}" for run in added]
    assert names == ["sgd hierarchical_bf16", "adamw ddp", "adamw hierarchical_bf16"]
    for run in added:
        assert [point.step for point in run.curve] == [10, 20]
        assert run.parameters == 151_306
    _, stock, bf16 = added
    assert stock.inter_bytes_per_step is None
    assert bf16.inter_bytes_per_step == pytest.approx(2 * 2 * bf16.parameters, rel=0.01)  # two nodes, two bytes each
    assert bf16.loss == pytest.approx(stock.loss, rel=0.05)


def test_servers_are_compared_with_rows_to_all_seed_by_seed(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    losses = {"ddp": (2.0, 3.0, 4.0), "ToAll": (2.0, 4.0, 5.0), "ThroughServers": (2.02, 4.08, 5.15)}
    runs = [
        replace(made("gpt", entry.strategy, [loss], seed=seed, inter_bytes=100.0), optimizer=optimizer)
        for optimizer in plan.OPTIMIZERS
        for entry in sparse.ENTRIES
        for seed, loss in enumerate(losses[entry.strategy.split("(")[0]])
    ]
    report.write(path, replace(ENVIRONMENT, ranks_per_node=[1] * 8), runs)
    shown = sparse_table.markdown(path)
    # 1, 2 and 3 %: the mean of three has an error of 1 / sqrt(3), times 4.30 for 95 %.
    assert "| `DGC(density=0.05)`, SGD | 3.000 | 3.667 | 3.750 | +2.0 ±2.5 % | 1.00 |" in shown
    assert shown.count("±2.5 %") == 4
    assert "GPT, 8 ranks, 400 steps, 3 seeds" in shown
    report.write(path, ENVIRONMENT, runs[:-1])
    with pytest.raises(ValueError, match=r"no training of .*0.01.* with adamw, seed 2"):
        sparse_table.markdown(path)


def test_each_way_of_sparse_rows_is_taken_throughout() -> None:
    assert [entry.strategy for entry in sparse.ENTRIES] == [
        "ddp",
        *(each.strategy for pair in sparse.PAIRS for each in pair),
    ]
    for numel in (1000, 10_000_000):
        for to_all, servers in sparse.PAIRS:
            assert to_all.aggregator
            assert servers.aggregator
            for ranks in (3, 8):
                team, layout = TeamShape.of((1,) * ranks), Layout.anonymous(numel)
                calls = [
                    [
                        each.primitive
                        for each in aggregator.calls(Buffer(layout, torch.float32), team)
                        if isinstance(each, Call)
                    ]
                    for aggregator in (to_all.aggregator, servers.aggregator)
                ]
                assert calls == [["all_gather"], ["all_to_all", "all_gather"]]
