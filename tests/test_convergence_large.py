# SPDX-License-Identifier: Apache-2.0
"""The larger models of the convergence benchmark: their plan, table, picture and a short run; the accumulated bias."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import commopt
from bench.evidence.accumulated_bias import RESIDUALS, Channel
from bench.evidence.convergence import large, large_table, plan, report, resnet
from bench.evidence.convergence.report import Point, Run
from bench.plot.large import draw, front_of
from commopt import OneBit, Quantize
from tests.test_convergence_bench import ENVIRONMENT

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"


def test_each_method_is_trained_at_its_best_rate() -> None:
    runs = report.read(RESULTS / "convergence_large_rates.json")[1]
    losses = {(run.task, run.optimizer, run.strategy): run.loss for run in runs}
    for entry in large.ENTRIES:
        (task,), (optimizer,) = entry.tasks, entry.optimizers
        same = (entry.kind, entry.tasks, entry.optimizers)
        tried = [each.name for each in large.RATE_ENTRIES if (each.kind, each.tasks, each.optimizers) == same]
        assert len(tried) == 4
        best = min(tried, key=lambda name: losses[task, optimizer, name])
        assert best == entry.name
        assert best not in (tried[0], tried[-1])


def test_every_strategy_exists() -> None:
    for entry in large.ENTRIES:
        assert entry.strategy == "ddp" or commopt.build_preset(entry.strategy)


def test_images_are_of_their_class() -> None:
    known = resnet.textures()
    images, labels = resnet.draw_images(known, 64, torch.Generator().manual_seed(1))
    again, _ = resnet.draw_images(known, 64, torch.Generator().manual_seed(1))
    assert torch.equal(images, again)
    # A shift around the edges leaves the size of a texture's frequencies as they are, and noise adds the same to all.
    spectra, those = (torch.fft.rfft2(each).abs().flatten(1) for each in (known, images))
    spectra = spectra - spectra.mean(0)
    right = (those @ spectra.T).argmax(1) == labels
    assert right.float().mean() > 0.5  # of ten classes


def made(task: str, strategy: str, losses: list[float], sent: float | None, accuracy: float | None = None) -> Run:
    curve = [Point(10 * (index + 1), loss, accuracy) for index, loss in enumerate(losses)]
    return Run(task, "adamw", strategy, 0, 1000, 12.5, sent, curve, learning_rate=1e-3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    environment = replace(
        ENVIRONMENT, ranks_per_node=[1, 1], settings=plan.settings(large.TASKS), kind="convergence_large"
    )
    runs = [
        made("gpt-5m", "ddp", [3.0, 2.0], None),
        made("gpt-5m", "hierarchical_powersgd", [3.0, 2.01], 80.0),
        made("gpt-5m", "hierarchical_dgc:adam=True", [3.0, 2.1], 8.0),
        made("resnet18", "ddp", [2.0, 1.0], None, 0.8),
        made("resnet18", "hierarchical_powersgd", [2.0, 1.0], 80.0, 0.79),
    ]
    runs += [replace(run, seed=1) for run in runs[:2]]
    report.write(tmp_path / "out.json", environment, runs)
    return tmp_path / "out.json"


def test_the_table_says_what_was_sent_and_how_many_seeds_there_are(file: Path) -> None:
    rows = [line.strip("| ").split(" | ") for line in large_table.markdown(file).splitlines() if "AdamW" in line]
    assert rows == [
        ["gpt-5m, AdamW", "`ddp`", "1.0000", "0.001", "2", "2.000 (+0.0 ±0.0 %)"],
        ["gpt-5m, AdamW", "`hierarchical_powersgd`", "0.0100", "0.001", "2", "2.010 (+0.5 ±0.0 %)"],
        ["gpt-5m, AdamW", "`hierarchical_dgc:adam=True`", "0.0010", "0.001", "1", "2.100 (+5.0 %) !"],
        ["resnet18, AdamW", "`ddp`", "1.0000", "0.001", "1", "80.0 (+0.0)"],
        ["resnet18, AdamW", "`hierarchical_powersgd`", "0.0100", "0.001", "1", "79.0 (-1.0) !"],
    ]


def test_the_picture(file: Path, tmp_path: Path) -> None:
    draw(file, tmp_path / "out.svg")
    text = (tmp_path / "out.svg").read_text()
    assert text.count('id="axes_') == 6  # for each model, what is lost by bytes, and loss by steps and by bytes
    points = {"a": (1.0, 3.0), "b": (2.0, 1.0), "c": (3.0, 2.0), "d": (4.0, 0.0)}
    assert front_of(points) == ["a", "b", "d"]


def test_a_short_run(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ["--large", "--quick", "--no-link", "--task", "resnet18", "--only", "onebit", "--json", str(path)]
    command = [sys.executable, "-m", "bench.evidence.convergence", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    environment, runs = report.read(path)
    assert (environment.kind, environment.ranks_per_node) == ("convergence_large", [1, 1])
    assert done.stdout == f"{large_table.markdown(path)}\n"
    stock, compressed = (run for run in runs if run.optimizer == "sgd")
    assert (stock.strategy, compressed.strategy) == ("ddp", "hierarchical_onebit, rate x 0.5")
    assert compressed.inter_bytes_per_step is not None
    assert 1 / 32 < compressed.inter_bytes_per_step / large_table.dense_bytes(compressed, 2) < 0.1
    assert (stock.learning_rate, compressed.learning_rate) == (0.2, 0.1)


# ------------------------------------------------------------------------------ the accumulated bias


@pytest.mark.parametrize("compressor", [Quantize(2), OneBit()])
def test_with_a_residual_only_the_last_one_is_missing(compressor: commopt.Compressor) -> None:
    draws = torch.Generator().manual_seed(0)
    gradients = [0.1 + torch.randn(2000, generator=draws) ** 3 for _ in range(60)]
    total, lost = torch.stack(gradients).sum(0), {}
    for name, keep in RESIDUALS.items():
        channel = Channel(compressor, keep, gradients[0])
        for step, values in enumerate(gradients):
            channel.send(values, step)
        missing = total - channel.total
        lost[name] = float(missing.norm())
        if name == "float32":
            assert float((missing - channel.residual).norm()) < 1e-5 * float(total.norm())
    assert lost["float32"] < 0.5 * lost["no residual"]
    assert lost["bfloat16, stochastic"] < 1.1 * lost["float32"]
