# SPDX-License-Identifier: Apache-2.0
"""The convergence benchmark: what it compares, its file, its tables, and one short real run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path

import pytest
import torch
from torch import nn

import commopt
from bench.evidence.convergence import local_table, plan, report, sparse, sparse_table
from bench.evidence.convergence.ranks import parse_options, reverse_windows
from bench.evidence.convergence.report import Environment, Point, Run
from bench.training.strategies import require_known
from commopt.aggregate import Buffer, Call
from commopt.feedback import Layout
from commopt.groups import TeamShape
from examples.train_gpt import GPT

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
ENVIRONMENT = Environment(
    date="2030-01-01T00:00:00+00:00",
    torch=torch.__version__,
    python="3.11.7",
    cpu_count=2,
    command="python -m bench.evidence.convergence",
    ranks_per_node=[1, 1],
    settings=plan.MAIN.settings(),
)
ONE_BIT = "hierarchical_onebit"


def made(
    strategy: str,
    losses: list[float | None],
    seed: int = 0,
    inter_bytes: float | None = None,
    task: str = "gpt",
    digest: str = "",
) -> Run:
    curve = [Point(10 * (index + 1), loss, None) for index, loss in enumerate(losses)]
    return Run(task, "sgd", strategy, seed, 1000, 12.5, inter_bytes, curve, digest, 0.2)


RUNS = [
    made("ddp", [4.0, 3.0, 2.0]),
    made("ddp", [4.0, 3.0, 4.0], seed=1),
    made(plan.NULL, [4.0, 3.0, 2.002]),
    made(plan.NULL, [4.0, 3.0, 3.996], seed=1),
    made("hierarchical_bf16", [4.0, 3.0, 2.002], inter_bytes=4000.0),
    made("hierarchical_bf16", [4.0, 3.0, 4.004], seed=1, inter_bytes=4000.0),
    made(ONE_BIT, [5.0, 4.0, 2.02], inter_bytes=400.0),
    made(ONE_BIT, [5.0, 3.0, 4.12], seed=1, inter_bytes=400.0),
    made("hierarchical_dgc:density=0.05", [5.0, None, None], inter_bytes=80.0),
    made("onebit_local", [5.0, 2.5, 2.1], inter_bytes=8.0),
]


# ----------------------------------------------------------------------------------------- the plan


def test_every_preset_is_compared_and_every_strategy_exists() -> None:
    names = [(entry.strategy, optimizer) for entry in plan.ENTRIES for optimizer in entry.optimizers]
    assert len(set(names)) == len(names)
    strategies = {strategy for strategy, _ in names}
    # Each as it is by default, but DGC's: what is sent of so small a model depends on more than that. What auto takes
    # depends on the clock.
    presets = {name for name in commopt.PRESETS if name.startswith("hierarchical_")}
    assert presets - {"hierarchical_dgc"} < strategies
    for strategy in strategies - {plan.STOCK, plan.NULL}:
        require_known(strategy)
    for family in ("onebit", "dgc", "powersgd"):
        assert any(family in strategy and strategy.endswith(plan.NO_FEEDBACK) for strategy in strategies)
    # What every table has at its head, with each optimizer.
    assert {(strategy, name) for strategy in (plan.STOCK, plan.NULL) for name in plan.OPTIMIZERS} < set(names)


def test_another_best_rate_than_stock_ddps_is_trained_with_beside_it() -> None:
    comparison = replace(plan.MAIN, entries=plan.chosen([ONE_BIT], plan.ENTRIES), seeds=2)
    losses = {case.key: abs(case.entry.rate - 1.0) for case in comparison.rate_cases()}  # all best at stock DDP's
    assert not [case for case in comparison.cases(losses) if case.entry.rate != 1]
    wants_more = {
        key: loss - 2 * (key[1] == "muon" and key[2] == f"{ONE_BIT}, rate x 2") for key, loss in losses.items()
    }
    cases = comparison.cases(wants_more)
    others = [case.key for case in cases if case.entry.rate != 1]
    assert others == [("gpt", "muon", f"{ONE_BIT}, rate x 2", seed) for seed in range(2)]
    assert len({case.key for case in cases}) == len(cases)
    assert all(case.task.steps == plan.PAIRED.rate_steps and case.seed > 2 for case in comparison.rate_cases())


def test_all_seeds_of_what_matters_come_before_the_rest() -> None:
    losses = {case.key: 1.0 for case in plan.MAIN.rate_cases()}
    order = [(case.entry.turn, case.seed) for case in plan.MAIN.cases(losses)]
    assert order == sorted(order)
    assert len(order) % plan.MAIN.seeds == 0


def test_options_of_the_ranks_are_those_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ["--quick", "--only", "onebit_local", "--json", str(tmp_path / "a.json"), "--jobs", "3"]
    monkeypatch.setattr(sys, "argv", ["bench.evidence.convergence", *arguments])
    options = parse_options()
    assert (options.comparison.task.steps, options.comparison.seeds, options.jobs) == (20, 1, 3)
    strategies = [entry.strategy for entry in options.comparison.entries]
    assert strategies == ["ddp", "onebit_local"]  # not onebit_local:delay=4:fragments=4
    assert options.command == f"python -m bench.evidence.convergence {' '.join(arguments)}"


def test_windows_in_reverse_are_the_same_sums_in_another_order() -> None:
    torch.manual_seed(0)
    plain = GPT(layers=1, width=32, context=8)
    other = GPT(layers=1, width=32, context=8)
    other.load_state_dict(plain.state_dict())
    reverse_windows(other)
    seen: list[torch.Tensor] = []
    other.bytes.register_forward_pre_hook(lambda module, tokens: seen.append(tokens[0]))
    tokens = torch.randint(256, (16, 8))
    grads = []
    for model in (plain, other):
        logits = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        grads.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
        assert torch.allclose(logits, plain(tokens), atol=1e-6)
    assert torch.equal(seen[0], tokens.flip(0))
    assert not torch.equal(*grads)
    assert float((grads[0] - grads[1]).norm() / grads[0].norm()) < 1e-6


# ------------------------------------------------------------------------------ the file


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    report.write(path, ENVIRONMENT, RUNS[:-1])
    report.add(path, RUNS[-1])
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # no NaN: any reader of JSON can read it
    assert report.read(path) == (ENVIRONMENT, RUNS)
    assert [entry.name for entry in path.parent.iterdir()] == ["out.json"]


def test_a_file_is_gone_on_with_only_when_it_was_made_alike(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert report.resume(path, ENVIRONMENT) == (ENVIRONMENT, [])
    report.write(path, ENVIRONMENT, RUNS)
    assert report.resume(path, replace(ENVIRONMENT, date="later", cpu_count=8)) == (ENVIRONMENT, RUNS)
    other = replace(ENVIRONMENT, settings=replace(plan.MAIN, task=plan.PAIRED.shortened).settings())
    with pytest.raises(ValueError, match=r"was made with settings .* so nothing can be added to it; remove it"):
        report.resume(path, other)


# ----------------------------------------------------------------------------------- what follows


@pytest.mark.parametrize(
    ("differences", "middle", "half"),
    [([1.0, 2.0, 3.0], 2.0, 4.30 / 3**0.5), ([1.0, 3.0], 2.0, 12.71), ([5.0], 5.0, inf), ([0.0] * 8, 0.0, 0.0)],
)
def test_the_interval_is_students(differences: list[float], middle: float, half: float) -> None:
    assert report.interval(differences) == pytest.approx((middle, half), rel=1e-3)


def test_gaps_are_paired_seed_by_seed_and_the_worse_end_counts() -> None:
    summaries = {summary.strategy: summary for summary in report.summarize(RUNS)}
    onebit = summaries[ONE_BIT]
    assert onebit.each == pytest.approx((1.0, 3.0))
    assert onebit.percent_at_worst == pytest.approx(2.0 + 12.71)
    assert onebit.sent == 400 / 8000
    assert not onebit.is_worse  # with two seeds it may be chance
    assert summaries["hierarchical_bf16"].acceptable  # 0.1 % twice
    worse = replace(onebit, each=(2.0, 3.0, 4.0, 3.0, 2.0, 3.0, 4.0, 3.0))
    assert worse.is_worse
    assert not replace(worse, each=(0.2, 0.3, 0.4)).is_worse  # for sure, and within what is promised
    null = summaries[plan.NULL]
    assert null.each == pytest.approx((0.1, -0.1))
    assert not null.acceptable  # two seeds that disagree prove nothing
    diverged = summaries["hierarchical_dgc:density=0.05"]
    assert (diverged.loss, diverged.steps_to_target, diverged.acceptable) == (inf, None, False)
    local = summaries["onebit_local"]
    assert local.percent_at_worst == pytest.approx(5.0)  # of its one seed
    assert local.steps_to_target == pytest.approx(30.0)  # 5 % above the 2.0 of that seed
    assert report.summarize([made("flat", [2.0])]) == []  # nothing to compare with


def test_table(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    tried = [
        made(f"{name}{rate}", [loss], 100, task="gpt-rates")
        for name, losses in (("ddp", (3.0, 2.0, 2.5)), (ONE_BIT, (3.0, 2.5, 2.1)))
        for rate, loss in zip((", rate x 0.5", "", ", rate x 2"), losses, strict=True)
    ]
    report.write(path, ENVIRONMENT, [*tried, *RUNS])
    lines = report.markdown(path).splitlines()
    assert lines[0] == "| strategy | SGD | bytes of float32's |"
    assert lines[2:8] == [
        "| `ddp` | 3.000 at 0.2 | - |",
        f"| `{plan.NULL}` | +0.00 ±1.27 % ! | - |",
        "| `hierarchical_bf16` | +0.10 ±0.00 % | 0.5000 |",
        f"| `{ONE_BIT}` | +2.00 ±12.71 % ! | 0.0500 |",
        "| `hierarchical_dgc:density=0.05` | diverged ! | 0.0100 |",
        "| `onebit_local` | +5.00 % (n = 1) ! | 0.0010 |",
    ]
    assert "n = 2 paired seeds" in lines[9]
    assert "256 held-out windows" in lines[9]
    assert lines[13:15] == ["| `ddp` | 3.000, **2.000**, 2.500 |", f"| `{ONE_BIT}` | 3.000, 2.500, **2.100** |"]


def test_what_was_measured_is_complete() -> None:
    """What matters has all its seeds; where the rest was published before its end, the table says so."""
    environment, runs = report.read(RESULTS / "convergence.json")
    rates = {run.key: run.loss for run in runs if run.task.endswith("-rates")}
    assert environment.settings == plan.MAIN.settings()
    wanted = {case.key for case in plan.MAIN.cases(rates) if case.entry.turn == 0}
    assert wanted <= {run.key for run in runs}
    # Stock DDP has the learning rate that it is best with, or one that is as good: gaps are not those of a poor rate.
    for optimizer, by_factor in {
        name: [rates["gpt-rates", name, replace(plan.ENTRIES[0], rate=factor).name, 100] for factor in plan.FACTORS]
        for name in plan.OPTIMIZERS
    }.items():
        assert by_factor[1] <= 1.025 * min(by_factor), optimizer


def test_local_sgd_by_period(tmp_path: Path) -> None:
    strategies = [entry.strategy for entry in plan.LOCAL_ENTRIES]
    assert len(set(strategies)) == len(strategies)
    one_bit = "LocalSGD(period=16, compressor=OneBit(block=512))"
    assert one_bit in strategies
    runs = [
        made("ddp", [4.0, 3.0, 2.0]),
        made("hierarchical", [4.0, 3.0, 2.0], inter_bytes=8000.0),
        made(one_bit, [5.0, 2.1, 2.05], inter_bytes=40.0),
    ]
    report.write(tmp_path / "out.json", replace(ENVIRONMENT, ranks_per_node=[2, 2]), runs)
    lines = local_table.markdown(tmp_path / "out.json").splitlines()
    assert lines[0] == "|  | every step | period=4 | period=16 | period=64 |"
    row = next(line for line in lines if line.startswith("| `LocalSGD(compressor=OneBit(block=512))`"))
    assert row.endswith("| - | - | +2.50 % !; x 0.69; 0.0050 | - |")


def test_parameters_that_end_as_stocks_are_said_to() -> None:
    runs = [made(name, [2.0], digest=digest) for name, digest in (("ddp", "a"), ("hierarchical", "a"), ("flat", "b"))]
    assert [row["SGD"] for row in report.rows(report.summarize(runs))] == ["2.000 at 0.2", "+0.00 %", "the same bits"]


# ----------------------------------------------------------------------------------- the real thing


def test_a_short_run_goes_on_with_a_file(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    comparison = replace(plan.MAIN, task=plan.PAIRED.shortened)
    # All rates of all that is tried, and all of stock DDP but one.
    entries = plan.chosen(["hierarchical_quantized:bits=4"], plan.ENTRIES)
    rates = [made(case.entry.name, [1.0], case.seed, task="gpt-rates") for case in comparison.rate_cases()]
    rates = [replace(run, optimizer=name) for run, name in product(rates, plan.OPTIMIZERS)]
    known = [*{run.key: run for run in rates}.values(), made("ddp", [2.0, 1.9])]
    known += [replace(known[-1], optimizer=name) for name in ("adamw", "adamw_short")]
    report.write(file, replace(ENVIRONMENT, settings=comparison.settings()), known)
    command = [sys.executable, "-m", "bench.evidence.convergence", "--quick", "--jobs", "2", "--json", str(file)]
    command += ["--only", entries[-1].strategy]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{report.markdown(file)}\n"
    runs = report.read(file)[1]
    assert runs[: len(known)] == known
    added = {(run.optimizer, run.strategy): run for run in runs[len(known) :]}
    four_bits = "hierarchical_quantized:bits=4"
    assert added.keys() == {("muon", "ddp"), *((name, four_bits) for name in ("sgd", "adamw", "muon"))}
    stock, compressed = added["muon", "ddp"], added["muon", four_bits]
    for run in (stock, compressed):
        assert [point.step for point in run.curve] == [10, 20]
        assert run.parameters == 134_656
    assert stock.inter_bytes_per_step is None
    assert compressed.inter_bytes_per_step == pytest.approx(report.dense_bytes(134_656, 2) / 8, rel=0.15)
    assert compressed.loss == pytest.approx(stock.loss, rel=0.05)


def test_servers_are_compared_with_rows_to_all_seed_by_seed(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    losses = {"ddp": (2.0, 3.0, 4.0), "ToAll": (2.0, 4.0, 5.0), "ThroughServers": (2.02, 4.08, 5.15)}
    runs = [
        replace(made(entry.strategy, [loss], seed=seed, inter_bytes=100.0), optimizer=optimizer)
        for optimizer in sparse.OPTIMIZERS
        for entry in sparse.ENTRIES
        for seed, loss in enumerate(losses[entry.strategy.split("(")[0]])
    ]
    environment = replace(ENVIRONMENT, ranks_per_node=[1] * 8, settings=sparse.comparison(8).settings())
    report.write(path, environment, runs)
    shown = sparse_table.markdown(path)
    # 1, 2 and 3 %: the mean of three has an error of 1 / sqrt(3), times 4.30 for 95 %.
    assert "| `DGC(density=0.05)`, SGD | 3.000 | 3.667 | 3.750 | +2.0 ±2.5 % | 1.00 |" in shown
    assert shown.count("±2.5 %") == 4
    assert "GPT, 8 ranks, 400 steps, 3 seeds" in shown
    report.write(path, environment, runs[:-1])
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
