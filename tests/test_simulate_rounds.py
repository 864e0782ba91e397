# SPDX-License-Identifier: Apache-2.0
"""LocalSGD simulated: a period by hand, the messages of a round, and the bytes that a training really sends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from commopt import DGC, LocalSGD, OneBit, Outer, PowerSGD, Quantize
from commopt.cost import Speeds, cost, nominal_links
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.schedule import Unit
from commopt.schedule.simulation import largest_sum, mean_step_us
from commopt.simulate import ClusterSpec, NetworkSpec, SimulatedStep, Stragglers, Workload, gpu, simulate_step, strategy
from tests.hook_training import Tower, seeded
from tests.ranks import run
from tests.test_local_sgd_deltas import NESTEROV, attached, train
from tests.test_wire_bytes import counting

CLUSTER = ClusterSpec(2, gpu("v100"), NetworkSpec(10, 50))


@pytest.mark.parametrize(
    ("average", "fragments_us", "buckets_us", "steps_us"),
    [
        # A bucket is ready after 10 us and takes 5; the forward begins after 1.
        (LocalSGD(2), [50], [5], [50 + 15, 15]),
        (LocalSGD(2, start_step=7), [50], [5], [50 + 15, 15]),
        (LocalSGD(3, fragments=2), [50, 20], [5], [50 + 15, 20 + 15, 15]),
        (LocalSGD(2, delay=1), [9], [5], [15, 15]),  # hidden behind the forward
        (LocalSGD(2, delay=1), [50], [5], [1 + 50 + 5, 15]),  # the bucket waits for the lane
        (LocalSGD(3, delay=1), [25], [], [10, 15 + 10, 10]),  # nothing else on the lane: the next forward waits
        (LocalSGD(3, delay=2), [25], [], [10, 10, 5 + 10]),
        (LocalSGD(1), [7], [5], [7 + 15]),
    ],
    ids=str,
)
def test_a_period_by_hand(
    average: LocalSGD, fragments_us: list[float], buckets_us: list[float], steps_us: list[float]
) -> None:
    found = mean_step_us(average, fragments_us, [10.0] * len(buckets_us), buckets_us, 10.0, 1.0)
    assert found == pytest.approx(sum(steps_us) / len(steps_us))


def test_the_step_that_sends_most() -> None:
    assert largest_sum(LocalSGD(4, fragments=2), [3, 5]) == 5
    assert largest_sum(LocalSGD(2, fragments=4), [3, 5, 1, 1]) == 8  # two fragments in each step


# ------------------------------------------------------------------------------------------- whole steps


def workload() -> Workload:
    numel = {"last": 50_000, "middle": 7_000_000, "first": 300_000}
    units = tuple(
        Unit((name,), 4 * each, 2_000 * place + 10_000, "torch.float32")
        for place, (name, each) in enumerate(numel.items())
    )
    return Workload("handmade", units, Layout.of_parameters((name, (each,)) for name, each in numel.items()), 32)


def simulated(average: LocalSGD, nodes: int = 3, stragglers: Stragglers | None = None) -> SimulatedStep:
    shape = CLUSTER.shape(nodes)
    return simulate_step(workload(), average, shape, CLUSTER.links_for(shape, [average]), stragglers=stragglers)


def test_without_delay_all_of_a_round_is_exposed() -> None:
    average, never = LocalSGD(5, compressor=Quantize(8)), LocalSGD(10**4)
    shape = CLUSTER.shape(3)
    links = CLUSTER.links_for(shape, [average])
    last, middle, first = workload().layout.pieces
    layouts = [Layout((first,)), Layout((middle,)), Layout((last,))]  # 25 MiB are the limit of one
    costs = [cost(average.parameters, each, torch.float32, shape, links) for each in layouts]
    assert not any(each.notes for each in costs)
    found, inside = simulated(average), simulated(never)
    took_us = sum(100 + each.total_us for each in costs)
    assert found.exposed_us - inside.exposed_us == pytest.approx(took_us / 5, rel=0.02)
    assert found.communication_us - inside.communication_us == pytest.approx(took_us / 5, rel=0.02)
    assert found.step_us == pytest.approx(found.compute_us + found.exposed_us)
    assert found.peak_inter_bytes_per_node == pytest.approx(5 * found.inter_bytes_per_node, rel=1e-3)
    later = simulated(LocalSGD(5, compressor=Quantize(8), delay=4, fragments=3))
    assert later.exposed_us <= inside.exposed_us < found.exposed_us / 2
    assert later.inter_bytes_per_node == pytest.approx(found.inter_bytes_per_node, rel=0.01)
    assert later.peak_inter_bytes_per_node < found.peak_inter_bytes_per_node


def test_one_node_averages_gradients_and_waits_for_all_its_ranks() -> None:
    alone = simulated(LocalSGD(), nodes=1, stragglers=Stragglers(0.05))
    assert (alone.inter_bytes_per_node, alone.peak_inter_bytes_per_node) == (0, 0)
    # A node waits in each step for its own ranks, however many nodes there are.
    assert simulated(LocalSGD(), stragglers=Stragglers(0.05)).waiting_us == pytest.approx(alone.waiting_us)


def test_the_presets_have_their_names() -> None:
    for name in ("diloco:period=50", "diloco:fragments=8:delay=1", "onebit_local:delay=4:fragments=4", "onebit_local"):
        assert isinstance(strategy(name).choices[0].build(), LocalSGD)
    chosen = strategy("diloco:period=4:compressor=PowerSGD(matrix_rank=8)").choices[0].build()
    assert chosen == LocalSGD(4, outer=NESTEROV, compressor=PowerSGD(8))


# --------------------------------------------------------------------------------------- beside training

PERIOD = 4
AVERAGES = (
    LocalSGD(PERIOD, compressor=OneBit(), fragments=3, delay=2),
    LocalSGD(PERIOD, outer=NESTEROV, fragments=2),
    LocalSGD(PERIOD, outer=Outer(0.7), compressor=DGC(1 / 64, min_elements=1), decay=0.95),
    LocalSGD(PERIOD, compressor=Quantize(4), fragments=6, delay=1, merge=0.5),
    LocalSGD(PERIOD, compressor=PowerSGD(2, start_step=0), fragments=2),
    LocalSGD(PERIOD),
)


def sent_in_a_period(rank: int, world_size: int) -> list[list[int]]:
    """Return what this rank sends to other nodes in each step of a period, by average."""
    found = []
    for average in AVERAGES:
        with counting() as sent:
            _, ddp, _, optimizer = attached(average)
            # In the first rounds nodes also tell each other which elements rest, once.
            train(ddp, optimizer, rank, range(3 * PERIOD))
            steps = []
            for step in range(3 * PERIOD, 4 * PERIOD):
                sent.clear()
                train(ddp, optimizer, rank, [step])
                steps.append(sum(each.inter for each in sent))
        found.append(steps)
    return found


@pytest.mark.parametrize("nodes", [(2, 2), (1, 1, 1)], ids=["2x2", "1+1+1"])
def test_predicted_bytes_are_sent(nodes: Sequence[int]) -> None:
    shape = TeamShape.of(nodes, backends={"cpu": "gloo"})
    parameters = [(name, tuple(each.shape)) for name, each in seeded(Tower).named_parameters()]
    layout = Layout.of_parameters(reversed(parameters))
    units = tuple(Unit((p.name,), 4 * p.numel, 1000.0, "torch.float32") for p in layout.pieces)
    links = nominal_links(shape, Speeds(1, 10))
    of_ranks = run(sent_in_a_period, sum(nodes), nodes=nodes)[: nodes[0]]
    for place, average in enumerate(AVERAGES):
        sent = [sum(of_step) for of_step in zip(*(found[place] for found in of_ranks), strict=True)]
        predicted = simulate_step(Workload("tower", units, layout, 1), average, shape, links)
        assert predicted.inter_bytes_per_node == round(sum(sent) / PERIOD) > 0, average
        assert predicted.peak_inter_bytes_per_node == max(sent), average
