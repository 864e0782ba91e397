# SPDX-License-Identifier: Apache-2.0
"""The tuner against every choice it had: what is tried, how the choice is awaited, and the files and figures."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import commopt
from bench.evidence.matrix import World
from bench.evidence.models import Subject
from bench.evidence.tuning import report
from bench.evidence.tuning.__main__ import FAMILIES, candidates
from bench.evidence.tuning.comparison import Choice, compare, tune
from bench.evidence.tuning.report import Configuration
from tests.ranks import run
from tests.test_bench_prediction import ENVIRONMENT

# -------------------------------------------------------------------------------------- candidates


def test_lossless_is_always_among_them() -> None:
    assert candidates([], two_levels=False) == ["flat"]
    assert candidates(["lossless"], two_levels=True) == ["flat", "hierarchical"]
    assert candidates(["quantized"], two_levels=False) == ["flat", "quantized", "quantized:bits=4"]
    assert candidates(["quantized"], two_levels=True) == [
        "flat",
        "hierarchical",
        "quantized",
        "hierarchical_quantized",
        "quantized:bits=4",
        "hierarchical_quantized:bits=4",
    ]


@pytest.mark.parametrize("two_levels", [False, True])
def test_every_candidate_can_be_built(two_levels: bool) -> None:
    found = candidates(FAMILIES, two_levels=two_levels)
    assert len(set(found)) == len(found)
    assert len({repr(commopt.build_preset(text)) for text in found}) == len(found)


# ------------------------------------------------------------------------------------------ on ranks


def tiny() -> Subject:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 32))

    return Subject("tiny", model, lambda count: torch.randn(count, 64), 4)


@dataclass
class StandIn:
    """Stands for the state of a tuner that has chosen after so many steps; one rank hears of it a step later."""

    ddp: DistributedDataParallel
    after: int
    steps: int = 0

    def __post_init__(self) -> None:
        self.ddp.register_forward_pre_hook(self.count)

    def count(self, *_: object) -> None:
        self.steps += 1

    @property
    def tuned(self) -> SimpleNamespace | None:
        return SimpleNamespace(name="quantized") if self.steps >= self.after else None

    def explain(self) -> str:
        return f"{self.steps} steps"


def attach_stand_in(after: int) -> Any:
    real = commopt.attach

    def attach(ddp: DistributedDataParallel, choice: str, **options: Any) -> Any:
        if choice != "auto":
            return real(ddp, choice, **options)
        assert options == {"allow": ("lossless", "quantized")}
        real(ddp, "flat", plan="ddp")
        return StandIn(ddp, after + torch.distributed.get_rank())

    return attach


def tune_with_a_stand_in(rank: int, world_size: int, after: int, most_steps: int) -> Choice:
    with patch("commopt.attach", attach_stand_in(after)):
        choice = tune(tiny(), ["lossless", "quantized"], most_steps)
    return replace(choice, training=None)  # type: ignore[arg-type]  # a model does not travel


@pytest.mark.parametrize(
    ("after", "most_steps", "name", "steps"),
    [(7, 60, "quantized", 9), (9, 60, "quantized", 12), (100, 10, "", 10)],
)
def test_the_choice_is_awaited_on_all_ranks(after: int, most_steps: int, name: str, steps: int) -> None:
    found = run(tune_with_a_stand_in, 2, after, most_steps)
    assert [(each.name, each.steps, each.explanation) for each in found] == 2 * [(name, steps, f"{steps} steps")]


def compare_with_a_stand_in(rank: int, world_size: int) -> Configuration:
    with patch("commopt.attach", attach_stand_in(4)), patch("bench.evidence.tuning.comparison._SETTLING", 6):
        return compare(
            tiny(),
            ["lossless", "quantized"],
            ["flat", "quantized", "quantized:bits=4"],
            seconds=0.1,
            most_steps=60,
            show=lambda message: None,
        )


def test_the_whole_on_ranks() -> None:
    found, other = run(compare_with_a_stand_in, 2, nodes=(1, 1))
    assert found == other
    assert (found.model, found.parameters, found.batch) == ("tiny", 12_448, 4)
    assert set(found.candidates_ms) >= {"flat (ddp)", "quantized (ddp)", "quantized:bits=4 (ddp)"}
    assert found.best == min(found.candidates_ms, key=lambda name: found.candidates_ms[name])
    assert (found.tuned, found.steps) == ("quantized", 6)
    assert found.explanation == "6 steps"
    assert min(found.compute_ms, found.stock_ms, found.best_ms, found.tuned_ms) > 0


# --------------------------------------------------------------------------------- files and summaries

WORLD = World(**{each.name: getattr(ENVIRONMENT, each.name) for each in fields(World)})


def made(tuned_ms: float, best_ms: float = 100.0, tuned: str = "quantized") -> Configuration:
    return Configuration(
        model="gpt:layers=4:width=128",
        parameters=10,
        batch=1,
        allow=["lossless", "quantized"],
        compute_ms=50.0,
        stock_ms=250.0,
        best="quantized (adaptive)",
        best_ms=best_ms,
        tuned=tuned,
        tuned_ms=tuned_ms,
        steps=30,
        candidates_ms={"flat (ddp)": 240.0, "quantized (adaptive)": best_ms},
        explanation="because\nit is so",
    )


def test_the_table_compares_with_the_fastest_and_with_stock_ddp(tmp_path: Path) -> None:
    report.append(tmp_path / "a.json", WORLD, [made(110), made(99, tuned="")])
    header, _, first, second = report.markdown(report.read([tmp_path / "a.json"])).splitlines()
    assert header.count("|") == first.count("|")
    assert "| 110: quantized | 1.10 | 0.44 | 0.300 | 30 |" in first
    assert "99: nothing yet" in second
    (tmp_path / "a.json").write_text('{"record": "environment", "kind": "prediction"}')
    with pytest.raises(
        ValueError, match=r"a\.json is not a file that bench\.evidence\.tuning --json wrote: its kind is"
    ):
        report.read([tmp_path / "a.json"])


# ------------------------------------------------------------------------------------------ the matrix
