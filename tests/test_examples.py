# SPDX-License-Identifier: Apache-2.0
"""The tutorials run as a newcomer runs them: under torchrun, from the command line."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch

from bench.demo import local_ranks
from examples import train_digits, train_gpt
from tests.ranks import run

ROOT = Path(__file__).parents[1]
TINY = ["--layers", "1", "--width", "32", "--context", "16"]


def example(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run an example on two ranks of two emulated nodes."""
    done = subprocess.run(
        [sys.executable, "-m", *local_ranks(1, 2)[0], f"examples/{name}.py", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COMMOPT_RANKS_PER_NODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_gpt_from_the_command_line() -> None:
    done = example("train_gpt", "--steps", "5", "--look-every", "2", *TINY)
    looks = re.findall(r"hierarchical: step (\d+), held-out loss [\d.]+ nats per byte", done.stderr)
    assert looks == ["2", "4", "5"]
    assert done.stdout.startswith("hierarchical: step 5, held-out loss ")
    assert "aggregator: Hierarchical" in done.stdout
    assert "cluster: 2 nodes x 1 rank(s) (emulated)" in done.stdout
    assert "steps: 5\n" in done.stdout


def losses(rank: int, world_size: int, strategies: list[str]) -> list[float]:
    parser = argparse.ArgumentParser()
    train_gpt.add_model_options(parser)
    options = parser.parse_args([*TINY, "--learning-rate", "0.01"])
    found = []
    for strategy in strategies:
        training = train_gpt.Training(options, torch.device("cpu"))
        train_gpt.choose_averaging(training.model, strategy)
        for _ in range(15):
            training.step()
        found.append(training.held_out_loss())
    return found


def test_gpt_learns_alike_with_every_exact_strategy() -> None:
    (ddp, flat, hierarchical, noop), other_rank = run(losses, 2, ["ddp", "flat", "hierarchical", "noop"], nodes=(1, 1))
    assert other_rank == [ddp, flat, hierarchical, noop]
    assert ddp < 4.5  # guessing costs ln 256 = 5.55
    assert [flat, hierarchical] == pytest.approx([ddp, ddp], abs=1e-4)
    assert noop != pytest.approx(ddp, abs=1e-4)


def fractions(rank: int, world_size: int) -> list[float]:
    clock = argparse.Namespace(steps=None, seconds=60.0)
    count = argparse.Namespace(steps=8, seconds=60.0)
    started = time.monotonic() - 30 * (rank + 1)  # the ranks' clocks disagree
    return [train_gpt.fraction_done(budget, 2, started, torch.device("cpu")) for budget in (clock, count)]


def test_all_ranks_stop_by_the_clock_of_rank_0() -> None:
    first, second = run(fractions, 2)
    assert first == second
    assert first == [pytest.approx(0.5, abs=0.1), 0.25]


def test_corpus_holds_out_whole_files_and_is_capped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for index in range(20):
        (tmp_path / f"m{index:02}.py").write_bytes(bytes([index]) * 10)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "big.py").write_bytes(b"\xff")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    train_text, held_out = train_gpt.load_corpus()
    assert held_out.unique().tolist() == [0, 10]
    assert train_text.unique().tolist() == [index for index in range(20) if index % 10]
    assert len(held_out) == 20
    assert len(train_text) == 180

    monkeypatch.setattr(train_gpt, "CORPUS_BYTES", 115)
    assert [len(text) for text in train_gpt.load_corpus()] == [95, 20]  # the budget ends within m11


def test_gpt_has_five_million_parameters_and_sees_no_future() -> None:
    torch.manual_seed(0)
    assert sum(p.numel() for p in train_gpt.GPT(layers=6, width=256, context=64).parameters()) == pytest.approx(
        5e6, rel=0.05
    )
    model = train_gpt.GPT(layers=2, width=32, context=8)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 5:], after[0, 5:])


def test_digits_from_the_command_line() -> None:
    done = example("train_digits", "--hook", "hierarchical_quantized:bits=4", "--steps", "60")
    looks = re.findall(r"hierarchical_quantized:bits=4: step (\d+), ([\d.]+) % right, loss [\d.]+", done.stdout)
    assert [step for step, _ in looks] == ["50", "60"]
    assert float(looks[-1][1]) > 70  # guessing gives 10


def digits_learned(rank: int, world_size: int) -> tuple[list[list[int]], dict[str, tuple[float, float]]]:
    parser = argparse.ArgumentParser()
    train_digits.add_model_options(parser)
    options = parser.parse_args(["--steps", "20", "--batch", "8"])
    found = {}
    for optimizer in ("sgd", "adamw"):
        options.optimizer = optimizer
        training = train_digits.Training(options, torch.device("cpu"))
        for _ in range(20):
            training.step()
        found[optimizer] = training.held_out_accuracy()
        assert training.optimizer.param_groups[0]["lr"] == 0.0
    fresh = train_digits.Training(options, torch.device("cpu"))
    return [next(fresh.batches).tolist() for _ in range(80)], found


def test_digits_ranks_share_every_epoch_and_the_evaluation() -> None:
    (first, found), (second, other) = run(digits_learned, 2)
    assert found == other  # one model, one held-out set
    assert all(accuracy > 0.2 for accuracy, _ in found.values())
    per_epoch = 1198 // 16
    epoch = [index for rank in (first, second) for batch in rank[:per_epoch] for index in batch]
    assert len(set(epoch)) == len(epoch) == 16 * per_epoch  # no image twice


def test_digits_hold_out_a_third() -> None:
    (images, labels), (held_out, held_out_labels) = train_digits.load_images()
    assert images.shape == (1198, 1, 8, 8)
    assert held_out.shape == (599, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert len(labels) + len(held_out_labels) == 1797
    assert sum(parameter.numel() for parameter in train_digits.build_model().parameters()) == 151_306


def test_the_page_shows_lines_of_the_example_for_ray() -> None:
    page, example = ((ROOT / name).read_text() for name in ("docs/frameworks.md", "examples/train_ray.py"))
    shown = page.partition("\n## Ray Train\n")[2].partition("```python\n")[2].partition("```")[0].splitlines()
    assert len(shown) > 3
    assert set(shown) <= {line.strip() for line in example.splitlines()}
