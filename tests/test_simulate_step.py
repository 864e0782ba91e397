"""A simulated step: by hand, against closed forms, and against what training plans and predicts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from statistics import fmean

import pytest
import torch

from commopt import Flat, Hierarchical, PowerSGD
from commopt.aggregate import Aggregator
from commopt.cost import Links, cost, cost_us, price
from commopt.cost.formulas import Link, ring_over_nodes_us, sharded_us
from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.plan import Bucket, Costs, PriceTable, Unit, best_plan, simulate
from commopt.plan.adapt import SPARE
from commopt.simulate import Cluster, Network, Stragglers, Workload, gpu, model, of_model, simulate_step
from commopt.simulate.step import Simulation

NETWORK = Network(10, 50, efficiency=1.0, trees=False)
CLUSTER = Cluster(4, gpu("v100"), NETWORK)
INTRA, NODE = Link(3, 1 / 50e3), Link(15, 8e-4)
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


def whole_buckets(aggregator: Aggregator, groups: list[list[int]], chunks: int = 1) -> list[Bucket]:
    units = workload().units
    return [Bucket.of([units[place] for place in group], repr(aggregator), chunks) for group in groups]


def test_one_bucket_after_backward_is_a_ring_over_nodes() -> None:
    shape, links = links_for(Flat(), 3)
    (bucket,) = whole_buckets(Flat(), [[0, 1, 2, 3, 4]])
    found = simulate_step(workload(), Flat(), shape, links, buckets=[bucket], overhead_us=70.0)
    expected = 70 + ring_over_nodes_us(bucket.nbytes, 3, 4, INTRA, NODE)
    assert found.compute_us == 20_000
    assert found.exposed_us == found.communication_us == pytest.approx(expected)
    assert found.step_us == pytest.approx(20_000 + expected)
    assert found.waiting_us == 0
    assert found.buckets == (bucket,)
    sent = 2 * (12 - 1) / 12 * bucket.nbytes  # out of a node, from its last rank
    assert found.inter_bytes_per_node == pytest.approx(sent, rel=1e-6)


def test_buckets_by_hand() -> None:
    """The first is hidden behind backward, the second begins when the first is through, the third when it is ready."""
    aggregator = Hierarchical(form="reduce_scatter")
    shape, links = links_for(aggregator, 2)
    groups = [[0, 1], [2, 3], [4]]
    found = simulate_step(
        workload(), aggregator, shape, links, buckets=whole_buckets(aggregator, groups), overhead_us=100.0
    )
    inter = Link(15, 4 * 8e-4)
    time_us = [100 + sharded_us(4 * sum(NUMEL[i] for i in group), 2, 4, INTRA, inter) for group in groups]
    first = 14_000 + time_us[0]
    second = max(18_000, first) + time_us[1]
    third = max(20_000, second) + time_us[2]
    assert found.step_us == pytest.approx(third)
    assert found.exposed_us == pytest.approx(third - 20_000)
    assert found.communication_us == pytest.approx(sum(time_us))
    assert found.inter_bytes_per_node == 4 * sum(NUMEL)  # 2 (N - 1) / N of everything


def test_communication_that_is_hidden_costs_nothing() -> None:
    shape, links = links_for(Flat(), 2)
    slow = workload(gap_us=1e6)
    last = 100 + cost_us(Flat(), NUMEL[-1], torch.float32, shape, links)
    found = simulate_step(slow, Flat(), shape, links, buckets=whole_buckets(Flat(), [[i] for i in range(5)]))
    assert found.exposed_us == pytest.approx(last)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("aggregator", [Flat(), Hierarchical(), Hierarchical(form="leader")], ids=repr)
def test_a_step_is_what_the_plan_predicts(aggregator: Aggregator, lanes: int) -> None:
    """Stage by stage, the event loop comes to what `plan.simulate` makes of whole messages at `cost`'s prices."""
    shape, links = links_for(aggregator, 4)
    buckets = whole_buckets(aggregator, [[0], [1, 2], [3, 4]])
    prices = {
        (bucket.strategy, 1): PriceTable(
            tuple(sorted({each.nbytes for each in buckets})),
            tuple(
                cost_us(aggregator, nbytes // 4, torch.float32, shape, links, lanes=lanes)
                for nbytes in sorted({each.nbytes for each in buckets})
            ),
        )
        for bucket in buckets
    }
    expected = simulate(workload().units, buckets, Costs(prices, overhead_us=100.0))
    found = simulate_step(workload(), aggregator, shape, links, buckets=buckets, lanes=lanes)
    assert found.step_us == pytest.approx(expected.finish_us)
    assert found.exposed_us == pytest.approx(expected.exposed_us)
    assert found.communication_us == pytest.approx(expected.communication_us)


def test_planned_buckets_are_those_of_training() -> None:
    aggregator = Hierarchical(form="reduce_scatter")
    shape, links = links_for(aggregator, 4)
    job = workload()
    by_bytes = price(aggregator, shape, links, job.layout)
    costs = Costs({(repr(aggregator), 1): PriceTable.of(by_bytes, job.nbytes)}, overhead_us=100.0)
    plan = best_plan(job.units, costs, spare=SPARE)
    found = simulate_step(job, aggregator, shape, links, buckets="planned")
    assert found.buckets == plan.buckets
    assert plan.predicted is not None
    # Prices are tables of lengths that no number of ranks divides, which need a copy; these buckets need none.
    assert found.step_us <= plan.predicted.finish_us
    assert found.step_us == pytest.approx(plan.predicted.finish_us, rel=0.01)


def test_planned_hierarchical_may_send_a_bucket_flat() -> None:
    """As in training: an exact average takes the cheaper way, here by prices that make either one cheaper."""
    names = set()
    for intra_gb_per_s in (0.2, 400):
        cluster = Cluster(4, gpu("v100"), Network(100, intra_gb_per_s))
        shape = cluster.shape(2)
        links = cluster.links_for(shape, [Hierarchical()])
        found = simulate_step(workload(), Hierarchical(), shape, links, buckets="planned")
        names |= {bucket.strategy for bucket in found.buckets}
    assert names == {repr(Flat()), repr(Hierarchical())}


def test_planned_is_no_worse_than_any_buckets_but_for_what_it_spares() -> None:
    aggregator = Flat()
    shape, links = links_for(aggregator, 3)
    planned = simulate_step(workload(), aggregator, shape, links, buckets="planned").step_us
    for cuts in product((False, True), repeat=4):
        ends = [place + 1 for place, cut in enumerate(cuts) if cut] + [5]
        groups = [list(range(begin, end)) for begin, end in zip([0, *ends], ends, strict=False)]
        other = simulate_step(workload(), aggregator, shape, links, buckets=whole_buckets(aggregator, groups)).step_us
        assert planned <= other * (1 + SPARE) * (1 + 1e-9)


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


def test_a_16_bit_gradient_sends_half() -> None:
    layout = workload().layout
    half = Workload(
        "half",
        tuple(replace(unit, nbytes=unit.nbytes // 2, dtype="torch.float16") for unit in workload().units),
        layout,
        1,
    )
    shape, links = links_for(Flat(), 2)
    sent = [simulate_step(job, Flat(), shape, links).inter_bytes_per_node for job in (half, workload())]
    assert sent[1] == pytest.approx(2 * sent[0], rel=1e-6)


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
    differing = []
    for gap_us in (1e3, 3e3, 1e4, 2e4, 3e4, 5e4):
        job = workload(gap_us)
        later = replace(job, units=tuple(replace(u, ready_us=factor * u.ready_us) for u in job.units))
        quiet, slow = (simulate_step(each, Flat(), shape, links, buckets="planned").buckets for each in (job, later))
        assert simulate_step(job, Flat(), shape, links, buckets="planned", stragglers=spread).buckets == slow
        differing.append(quiet != slow)
    assert any(differing)


def test_plans_give_up_one_percent_for_fewer_buckets() -> None:
    job = of_model(model("resnet50"), gpu("v100"), 64)
    shape = TeamShape.of((8,), backends={"cpu": "gloo", "cuda": "nccl"})
    links = Network(25, 200).links(shape)
    table = PriceTable.of(price(Flat(), shape, links, job.layout), job.nbytes)
    exact, spared = (best_plan(job.units, Costs({(repr(Flat()), 1): table}, 100.0), spare=s) for s in (0.0, SPARE))
    assert len(spared.buckets) < len(exact.buckets)
    assert simulate_step(job, Flat(), shape, links, buckets="planned").buckets == spared.buckets


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
    buckets = whole_buckets(Flat(), [[0, 1, 2, 3]])
    with pytest.raises(ConfigurationError, match="it lacks 'p4'"):
        simulate_step(workload(), Flat(), shape, links, buckets=buckets)
    with pytest.raises(ConfigurationError, match="the hook averages with Flat"):
        simulate_step(workload(), Flat(), shape, links, buckets=whole_buckets(Hierarchical(), [[0, 1, 2, 3, 4]]))
    with pytest.raises(ConfigurationError, match="buckets='best' must be 'ddp', 'planned', or buckets"):
        simulate_step(workload(), Flat(), shape, links, buckets="best")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="overhead_us=-1"):
        simulate_step(workload(), Flat(), shape, links, overhead_us=-1)
    with pytest.raises(ConfigurationError, match="dtype 'float33'"):
        simulate_step(workload(dtype="float33"), Flat(), shape, links)
    with pytest.raises(ConfigurationError, match="no figures for all_reduce at level 'world'"):
        simulate_step(workload(), Flat(), shape, Links(links.header, {}))
