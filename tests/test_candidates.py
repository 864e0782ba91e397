# SPDX-License-Identifier: Apache-2.0
"""What `auto` may choose from, and how much of a gradient each of them leaves out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.evidence.convergence import report
from commopt import DGC, Aggregator, Auto, Compressed, Flat, Hierarchical, OneBit, PowerSGD, Quantize, build_preset
from commopt.aggregate.auto import families
from commopt.aggregate.learning import (
    LEARNED,
    LEARNED_LOCAL,
    LEARNED_THROUGH_SERVERS,
    steps_to_loss,
    strength_of,
)
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.schedule.candidates import allowed_families, alternatives, one_of_each
from commopt.schedule.config import makes_plans

NODES, NODE, TWO = TeamShape.of((2, 2)), TeamShape.of((4,)), TeamShape.of((1, 1))


def gradient() -> tuple[Layout, Tensor]:
    layout = Layout.of_parameters([("w", (64, 100)), ("b", (1000,))])
    return layout, torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))


def test_only_what_is_exact_and_not_asked_for_in_one_form_may_be_replaced() -> None:
    plain = Hierarchical()
    assert list(alternatives(plain, NODES).values()) == [plain, Flat()]
    for aggregator, shape in ((plain, NODE), (Flat(), NODES), (Compressed(Quantize(4)), NODES)):
        assert alternatives(aggregator, shape) == {repr(aggregator): aggregator}
    assert list(alternatives(Auto(), NODES).values()) == [Flat(), Hierarchical()]
    assert list(alternatives(Auto(), NODE).values()) == [Flat()]


def test_where_sites_are_told_exact_sums_are_timed_both_ways() -> None:
    told = TeamShape.of((1, 1, 1, 1), sites=((0, 0, 1, 1),))
    assert makes_plans(None, Hierarchical(), told)
    assert not makes_plans("ddp", Hierarchical(), told)
    assert list(alternatives(Hierarchical(), told).values()) == [Hierarchical(), Flat()]
    for aggregator, shape in (
        (Hierarchical(), NODES),  # between two levels sums in nodes are never slower
        (Flat(), told),
        (Hierarchical(inter=Hierarchical()), told),  # asked for in this form
    ):
        assert not makes_plans(None, aggregator, shape)
    assert makes_plans(None, Auto(), NODE)


def test_each_family_has_one_candidate_in_each_form() -> None:
    auto = Auto("quantized+powersgd+bf16")
    families = allowed_families(auto, NODES)
    found = one_of_each(families, [gradient()], "", NODES)
    names = ["bf16", "quantized", "powersgd"]
    assert {each.name for each in found} == {*names, *(f"hierarchical {name}" for name in names)}
    usual = {each.name: each.strategy for each in found}
    assert usual["quantized"] == repr(Compressed(Quantize(4)))
    assert usual["powersgd"] == repr(PowerSGD(16))
    assert allowed_families(Auto(), NODES) == ()


def test_over_told_sites_a_family_may_still_go_between_all_nodes_at_once() -> None:
    """Between single ranks that is its flat form; between nodes of several, never each rank with each."""
    single, several = (TeamShape.of((ranks,) * 4, sites=((0, 0, 1, 1),)) for ranks in (1, 2))
    for shape, other in (
        (single, Compressed(Quantize(4))),
        (several, Hierarchical(Compressed(Quantize(4)), sites=False)),
    ):
        found = one_of_each(allowed_families(Auto("quantized"), shape), [gradient()], "", shape)
        assert {each.strategy for each in found} == {repr(other), repr(Hierarchical(Compressed(Quantize(4))))}
        assert len({each.name for each in found}) == 2


@pytest.mark.parametrize(
    ("optimizer", "chosen"),
    [
        ("sgd", {"quantized": (4, 1.01), "powersgd": (16, 1.01), "dgc": (0.05, 1.23), "onebit": (512, 2.37)}),
        ("adamw", {"quantized": (2, 1.03), "powersgd": (16, 1.01), "dgc": (0.05, 1.21), "onebit": (512, 1.33)}),
        ("", {"quantized": (4, 1.01), "powersgd": (16, 1.01), "dgc": (0.05, 1.23), "onebit": (512, 2.37)}),
    ],
)
def test_the_strength_is_the_strongest_that_learns_nearly_as_fast(
    optimizer: str, chosen: dict[str, tuple[float, float]]
) -> None:
    made: dict[str, Callable[[Any], Aggregator]] = {
        "quantized": lambda bits: Compressed(Quantize(bits)),
        "powersgd": PowerSGD,
        "dgc": lambda density: Compressed(DGC(density)),
        "onebit": lambda block: Compressed(OneBit(block)),
    }
    auto = Auto("quantized+powersgd+dgc+onebit", dense=("*.bias",))
    found = {each.name: each for each in one_of_each(allowed_families(auto, NODES), [gradient()], optimizer, TWO)}
    assert set(found) == {form + name for form in ("", "hierarchical ") for name in chosen}
    for name, (strength, steps) in chosen.items():
        plain = made[name](strength).with_dense(("*.bias",))
        assert (found[name].strategy, found[name].steps) == (repr(plain), steps)
        hierarchical = found[f"hierarchical {name}"]
        assert (hierarchical.strategy, hierarchical.steps) == (repr(Hierarchical(plain)), steps)


def test_of_a_family_that_nobody_measured_the_usual_strength_is_tried() -> None:
    unknown = tuple(Compressed(Quantize(8, block)) for block in (64, 128))
    assert strength_of(unknown, 1, "adamw") == (1, 1.0)
    assert steps_to_loss(unknown[0], "sgd") is None


def test_what_is_said_of_learning_was_measured() -> None:
    runs, steps = measured_runs("convergence.json")
    strengths = [repr(each) for family in families().values() for each in family.strengths]
    assert set(LEARNED) <= set(strengths)
    assert all(build_preset(learned.preset) == average for average, learned in LEARNED_LOCAL.items())
    for optimizer in ("sgd", "adamw"):
        for learned in (*LEARNED.values(), *LEARNED_LOCAL.values()):
            if getattr(learned, optimizer) is None:
                assert learned not in LEARNED.values()
                continue
            measured = max(1.0, measured_steps(runs, steps, optimizer, learned.preset))
            assert getattr(learned, optimizer) == pytest.approx(measured, abs=0.006), learned


def measured_runs(name: str) -> tuple[list[report.Run], int]:
    environment, runs = report.read(Path(__file__).parents[1] / "bench/results" / name)
    return runs, environment.settings["gpt"]["steps"]


def measured_steps(runs: list[report.Run], steps: int, optimizer: str, strategy: str) -> float:
    """Return the steps to a loss over stock DDP's, as LEARNED has them."""
    mine = [run for run in runs if (run.task, run.optimizer) == ("gpt", optimizer)]
    dense = {run.seed: run for run in mine if run.strategy == "ddp"}
    took = [run for run in mine if run.strategy == strategy]
    assert len(took) >= 3, strategy
    loss = 1.05 * mean(dense[run.seed].loss for run in took)
    to_dense = mean(dense[run.seed].steps_to(loss) or steps for run in took)
    return mean(run.steps_to(loss) or steps for run in took) / to_dense


def test_sparse_rows_by_way_of_servers_count_with_what_was_measured_there() -> None:
    files = [measured_runs(f"convergence_sparse_{nodes}.json") for nodes in (4, 8)]
    assert set(LEARNED_THROUGH_SERVERS) < set(LEARNED)
    for learned in LEARNED_THROUGH_SERVERS.values():
        for optimizer in ("sgd", "adamw"):
            measured = max(measured_steps(*found, optimizer, learned.preset) for found in files)
            assert getattr(learned, optimizer) == pytest.approx(measured, abs=0.006), learned


@pytest.mark.parametrize(
    ("nodes", "sites", "flat", "hierarchical"),
    [
        ((1, 1), (), 1.21, 1.21),
        ((2, 2), (), 1.89, 1.21),
        ((1,) * 4, (), 1.89, 1.89),
        ((1,) * 4, ((0, 0, 1, 1),), 1.89, 1.21),
    ],
)
def test_it_counts_how_many_ranks_exchange_rows(
    nodes: tuple[int, ...], sites: tuple[tuple[int, ...], ...], flat: float, hierarchical: float
) -> None:
    shape, average = TeamShape.of(nodes, sites=sites), Compressed(DGC(0.05))
    assert steps_to_loss(average, "adamw", shape) == flat
    assert steps_to_loss(Hierarchical(average), "adamw", shape) == hierarchical
    assert steps_to_loss(Compressed(Quantize(4)), "adamw", shape) == 1.00
    assert steps_to_loss(Compressed(DGC(0.001)), "adamw", shape) == (2.08 if shape.size == 2 else None), "not measured"


def test_a_gradient_that_tells_nothing_is_refused() -> None:
    layout, values = gradient()
    families = allowed_families(Auto("quantized"), NODE)
    for bad, words in ((torch.zeros_like(values), "all gradients are zero"), (values / 0, "not finite")):
        with pytest.raises(FloatingPointError, match=words):
            one_of_each(families, [(layout, bad)], "", NODE)


def test_what_is_left_out_of_a_matrix_is_beyond_the_rank() -> None:
    layout, values = gradient()
    exact_error = float(torch.linalg.svdvals(values[:6400].view(64, 100).double())[4:].square().sum())
    assert PowerSGD(4).squared_error(layout, values) == pytest.approx(exact_error, rel=0.05)
    assert Hierarchical(PowerSGD(4)).squared_error(layout, values) == PowerSGD(4).squared_error(layout, values)
    assert Hierarchical().squared_error(layout, values) == 0.0
