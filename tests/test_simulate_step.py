# SPDX-License-Identifier: Apache-2.0
"""A simulated step: by hand, against closed forms, and against what training plans and predicts."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from statistics import NormalDist, fmean

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from commopt import Flat, Hierarchical, PowerSGD
from commopt.aggregate import Aggregator
from commopt.cost import LinkCost, Links, PriceTable, cost, price
from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.schedule import SPARE, Costs, Unit, best_plan
from commopt.simulate import (
    ClusterSpec,
    NetworkSpec,
    Simulation,
    Stragglers,
    Workload,
    ddp_buckets,
    gpu,
    model,
    of_model,
    simulate_step,
)
from tests.closed_forms import ring_over_nodes_us, sharded_us

NETWORK = NetworkSpec(10, 50, efficiency=1.0, trees=False)
CLUSTER = ClusterSpec(4, gpu("v100"), NETWORK)
INTRA, NODE = LinkCost(3, 1 / 50e3), LinkCost(15, 8e-4)
NUMEL = [300_000, 1_000, 2_000_000, 7_000_000, 50_000]


def workload(gap_us: float = 2_000.0, dtype: str = "torch.float32") -> Workload:
    units = tuple(
        Unit((f"p{number}",), 4 * numel, 10_000 + gap_us * (number + 1), dtype) for number, numel in enumerate(NUMEL)
    )
    layout = Layout.of_parameters([(f"p{number}", (numel,)) for number, numel in enumerate(NUMEL)])
    return Workload("handmade", units, layout, 32)


def links_for(aggregator: Aggregator, nodes: int) -> tuple[TeamShape, Links]:
    shape = CLUSTER.shape(nodes)
    return shape, CLUSTER.links_for(shape, [aggregator])


def names(groups: list[list[int]]) -> list[list[str]]:
    return [[f"p{place}" for place in group] for group in groups]


def test_one_bucket_after_backward_is_a_ring_over_nodes() -> None:
    shape, links = links_for(Flat(), 3)
    found = simulate_step(workload(), Flat(), shape, links, buckets=names([[0, 1, 2, 3, 4]]), overhead_us=70.0)
    (bucket,) = found.buckets
    assert bucket.nbytes == 4 * sum(NUMEL)
    expected = 70 + ring_over_nodes_us(bucket.nbytes, 3, 4, INTRA, NODE)
    assert found.compute_us == 20_000
    assert found.exposed_us == found.communication_us == pytest.approx(expected)
    assert found.step_us == pytest.approx(20_000 + expected)
    assert found.waiting_us == 0
    sent = 2 * (12 - 1) / 12 * bucket.nbytes  # out of a node, from its last rank
    assert found.inter_bytes_per_node == pytest.approx(sent, rel=1e-6)


def test_buckets_by_hand() -> None:
    """The first is hidden behind backward, the second begins when the first is through, the third when it is ready."""
    aggregator = Hierarchical(form="reduce_scatter")
    shape, links = links_for(aggregator, 2)
    groups = [[0, 1], [2, 3], [4]]
    found = simulate_step(workload(), aggregator, shape, links, buckets=names(groups), overhead_us=100.0)
    inter = LinkCost(15, 4 * 8e-4)
    time_us = [100 + sharded_us(4 * sum(NUMEL[i] for i in group), 2, 4, INTRA, inter) for group in groups]
    first = 14_000 + time_us[0]
    second = max(18_000, first) + time_us[1]
    third = max(20_000, second) + time_us[2]
    assert found.step_us == pytest.approx(third)
    assert found.exposed_us == pytest.approx(third - 20_000)
    assert found.communication_us == pytest.approx(sum(time_us))
    assert found.inter_bytes_per_node == 4 * sum(NUMEL)  # 2 (N - 1) / N of everything


def test_planned_buckets_are_those_of_training() -> None:
    aggregator = Hierarchical(form="reduce_scatter")
    shape, links = links_for(aggregator, 4)
    job = workload()
    by_bytes = price(aggregator, shape, links, job.layout)
    costs = Costs({repr(aggregator): PriceTable.of(by_bytes, job.nbytes)}, overhead_us=100.0)
    plan = best_plan(job.units, costs, spare=SPARE)
    found = simulate_step(job, aggregator, shape, links, buckets="planned")
    assert [bucket.names for bucket in found.buckets] == list(plan.groups)
    assert plan.predicted is not None
    # Prices are tables of lengths that no number of ranks divides, which need a copy; these buckets need none.
    assert found.step_us <= plan.predicted.finish_us
    assert found.step_us == pytest.approx(plan.predicted.finish_us, rel=0.01)


def test_names_and_shapes_count_where_they_decide() -> None:
    """PowerSGD sends two 512 x 512 matrices as factors, and the vector as it is."""
    layout = Layout.of_parameters([("a", (512, 512)), ("b", (512, 512)), ("c", (512,))])
    units = tuple(Unit((piece.name,), 4 * piece.numel, 1000.0, "torch.float32") for piece in layout.pieces)
    job = Workload("matrices", units, layout, 1)
    aggregator = PowerSGD(4)
    shape, links = links_for(aggregator, 2)
    found = simulate_step(job, aggregator, shape, links)
    parts = [Layout(layout.pieces[:1]), Layout(layout.pieces[1:])]  # the first takes DDP's first bucket to its 1 MiB
    assert [bucket.names for bucket in found.buckets] == [("a",), ("b", "c")]
    expected = [100 + cost(aggregator, part, torch.float32, shape, links).total_us for part in parts]
    assert found.communication_us == pytest.approx(sum(expected))
    sent = 4 * (2 * (512 + 512) * 4 + 512)
    assert found.inter_bytes_per_node == pytest.approx(2 * 7 / 8 * sent, rel=1e-3)


def test_one_gpu_sends_nothing() -> None:
    found = simulate_step(workload(), Flat(), TeamShape.of((1,)), NETWORK.links(TeamShape.of((1,))))
    assert (found.step_us, found.exposed_us, found.communication_us, found.buckets) == (20_000, 0, 0, ())


def test_stragglers_cost_what_the_slowest_rank_does() -> None:
    shape, links = links_for(Flat(), 4)
    quiet = simulate_step(workload(), Flat(), shape, links)
    spread = simulate_step(workload(), Flat(), shape, links, stragglers=Stragglers(0.05))
    factors = Stragglers(0.05).slowest(16)
    assert spread.waiting_us == pytest.approx((fmean(factors) - 1) * 20_000)
    assert spread.step_us == pytest.approx(spread.compute_us + spread.waiting_us + spread.exposed_us)
    # Communication outlasts backward here: later gradients shift it as a whole, or hide less of it.
    assert quiet.step_us < spread.step_us <= quiet.step_us + spread.waiting_us + 1e-6
    steps = [
        simulate_step(
            replace(workload(), units=tuple(replace(u, ready_us=factor * u.ready_us) for u in workload().units)),
            Flat(),
            shape,
            links,
        ).step_us
        for factor in factors
    ]
    assert spread.step_us == pytest.approx(fmean(steps))


def test_plans_are_made_for_the_slowest_rank() -> None:
    """As in training, where ready times are those of the last rank; here later ones let more be sent apart."""
    shape, links = links_for(Flat(), 4)
    spread = Stragglers(0.5)
    found = simulate_step(workload(), Flat(), shape, links, buckets="planned", stragglers=spread)
    factor = fmean(spread.slowest(16))
    later = replace(workload(), units=tuple(replace(u, ready_us=factor * u.ready_us) for u in workload().units))
    assert found.buckets == simulate_step(later, Flat(), shape, links, buckets="planned").buckets


def test_a_simulation_gives_the_same_step_twice() -> None:
    job = of_model(model("resnet50"), gpu("v100"), 64)
    shape, links = links_for(Hierarchical(), 2)
    simulation = Simulation(job.layout, Hierarchical(), shape, links)
    smaller = job.scaled(8)
    first = simulation.step(job, "planned")
    other = simulation.step(smaller, "planned")
    assert (
        simulation.step(job, "planned") == first == simulate_step(job, Hierarchical(), shape, links, buckets="planned")
    )
    assert other == simulate_step(smaller, Hierarchical(), shape, links, buckets="planned")


def test_unequal_nodes_have_a_step_too() -> None:
    shape = TeamShape.of((3, 1, 2), backends={"cpu": "gloo", "cuda": "nccl"})
    found = simulate_step(workload(), Hierarchical(), shape, NETWORK.links(shape), buckets="ddp")
    assert found.step_us > found.compute_us
    with pytest.raises(ConfigurationError, match="equally many ranks"):
        simulate_step(workload(), Hierarchical(form="reduce_scatter"), shape, NETWORK.links(shape))


def test_what_is_left_out_is_said() -> None:
    shape = CLUSTER.shape(2)
    found = simulate_step(workload(), PowerSGD(4), shape, NETWORK.links(shape))
    assert found.notes == ()  # vectors only: no factors
    job = of_model(model("resnet50"), gpu("v100"), 1)
    found = simulate_step(job, PowerSGD(4), shape, NETWORK.links(shape))
    missing = "by PowerSGD(4): not measured, counted as nothing"
    assert found.notes == (f"factor {missing}", f"refresh {missing}")


def test_bad_input() -> None:
    shape, links = links_for(Flat(), 2)
    for groups in ([[0, 1, 2, 3]], [[0, 1, 2, 3, 4], [4]], [[0, 1, 2, 3, 5]]):
        with pytest.raises(ConfigurationError, match="name each parameter in one bucket"):
            simulate_step(workload(), Flat(), shape, links, buckets=names(groups))
    with pytest.raises(ConfigurationError, match="buckets='best' must be 'ddp', 'planned', or groups"):
        simulate_step(workload(), Flat(), shape, links, buckets="best")
    with pytest.raises(ConfigurationError, match="overhead_us is -1"):
        simulate_step(workload(), Flat(), shape, links, overhead_us=-1)
    with pytest.raises(ConfigurationError, match="dtype 'float33'"):
        simulate_step(workload(dtype="float33"), Flat(), shape, links)
    with pytest.raises(ConfigurationError, match="no figures for all_reduce at level 'world'"):
        simulate_step(workload(), Flat(), shape, Links(links.header, {}))


# --------------------------------------------------------------------------------------------- stragglers


@pytest.mark.parametrize("sigma", [0.01, 0.2])
def test_the_slower_of_two_takes_what_the_closed_form_says(sigma: float) -> None:
    """E max(X, Y) of two independent lognormals of mean 1 is 2 Phi(sigma / sqrt 2)."""
    expected = 2 * NormalDist().cdf(sigma / sqrt(2))
    assert fmean(Stragglers(sigma).slowest(2)) - 1 == pytest.approx(expected - 1, rel=0.02)


@pytest.mark.parametrize("ranks", [8, 1024])
def test_the_slowest_of_many_is_that_of_draws(ranks: int) -> None:
    sigma, steps = 0.03, 4000
    draws = np.random.default_rng(0).standard_normal((steps, ranks))
    slowest = np.exp(sigma * draws.max(axis=1) - sigma**2 / 2)
    found = Stragglers(sigma).slowest(ranks)
    assert fmean(found) - 1 == pytest.approx(slowest.mean() - 1, rel=0.02)
    assert found[len(found) // 2] == pytest.approx(float(np.median(slowest)), rel=0.002)
    assert list(found) == sorted(found)


def test_without_spread_nobody_waits_and_sigma_is_checked() -> None:
    assert Stragglers(0.0).slowest(4096) == (1.0,)
    assert fmean(Stragglers(0.05).slowest(1)) == pytest.approx(1.0, abs=2e-4)
    for sigma in (-0.1, 1.5, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match=r"between 0 and 1, for example 0\.02"):
            Stragglers(sigma)


# ------------------------------------------------------------------------------------------ DDP's buckets

DTYPES = (torch.float32, torch.float16)


def units_of(rows: list[tuple[int, torch.dtype]]) -> list[Unit]:
    return [
        Unit((f"p{number}",), numel * dtype.itemsize, float(number), str(dtype))
        for number, (numel, dtype) in enumerate(rows)
    ]


def by_torch(rows: list[tuple[int, torch.dtype]], first_nbytes: int, cap_nbytes: int) -> set[tuple[str, ...]]:
    tensors = [torch.empty(numel, dtype=dtype, device="meta") for numel, dtype in rows]
    groups, _ = dist._compute_bucket_assignment_by_size(
        tensors, [first_nbytes, cap_nbytes], [False] * len(rows), list(range(len(rows)))
    )
    return {tuple(f"p{number}" for number in group) for group in groups}


@given(st.lists(st.tuples(st.integers(0, 200_000), st.sampled_from(DTYPES)), min_size=1, max_size=40))
def test_buckets_are_those_of_torch(rows: list[tuple[int, torch.dtype]]) -> None:
    found = ddp_buckets(units_of(rows), cap_mb=0.5, first_mb=0.125)
    assert {tuple(unit.names[0] for unit in members) for members in found} == by_torch(rows, 2**17, 2**19)


def test_limits_are_checked() -> None:
    for limit in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ConfigurationError, match=r"ddp_buckets\(cap_mb=.* must be a finite number above 0"):
            ddp_buckets(units_of([(1, torch.float32)]), cap_mb=limit)
