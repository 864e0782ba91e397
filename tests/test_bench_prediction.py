# SPDX-License-Identifier: Apache-2.0
"""Predictions against measurements: what is probed, how a prediction is made of it, and the files and figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import commopt
from bench.evidence.models import MODELS, Subject, subject
from bench.evidence.prediction import __main__ as prediction
from bench.evidence.prediction import report
from bench.evidence.prediction.__main__ import hold
from bench.evidence.prediction.predict import predict
from bench.evidence.prediction.probe import Probe, Probed, Processors, Wanted, delayed, wanted
from bench.evidence.prediction.report import Configuration, Environment
from bench.evidence.training_run import Profile
from commopt import ConfigurationError
from commopt.cost import Curve, LinkKey, Links, LinksHeader, cost
from commopt.feedback import Layout
from commopt.groups import TeamShape, join
from commopt.schedule import Unit
from commopt.simulate import Bucket, Workload
from tests.ranks import run

# ----------------------------------------------------------------------------------------- the models


@pytest.mark.parametrize("name", MODELS)
def test_models_are_of_the_promised_kind(name: str) -> None:
    made = subject(name)
    model = made.make()
    assert 3e6 < sum(parameter.numel() for parameter in model.parameters()) < 30e6
    assert list(model.buffers()) == []  # DDP would broadcast them
    outputs = model(made.inputs(made.batch))
    outputs.float().square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# ------------------------------------------------------------------------------------ what is probed

LAYOUT = Layout.of_parameters([("weight", (64, 64)), ("bias", (64,))])  # 16,640 bytes


def test_what_exact_averages_need_by_hand() -> None:
    flat, hierarchical = commopt.Flat(), commopt.Hierarchical(form="reduce_scatter")
    nbytes = 4 * LAYOUT.numel
    assert wanted([flat], [LAYOUT], TeamShape.of((2, 2))) == Wanted({LinkKey("world", "all_reduce", 4): nbytes}, {})
    assert wanted([hierarchical], [LAYOUT], TeamShape.of((2, 2, 2))).links == {
        LinkKey("intra", "reduce_scatter", 2, 3): nbytes,
        LinkKey("inter", "all_reduce", 3, 2): nbytes // 2,
        LinkKey("intra", "all_gather", 2, 3): nbytes // 2,
    }


@pytest.mark.parametrize("nodes", [(1, 1), (2, 2), (2, 2, 2), (1, 1, 1, 1), (2, 1)])
@pytest.mark.parametrize("strategy", prediction.STRATEGIES)
def test_prices_need_what_is_probed_and_no_more(strategy: str, nodes: tuple[int, ...]) -> None:
    aggregator, shape = commopt.build_preset(strategy), TeamShape.of(nodes)
    needed = wanted([aggregator], [LAYOUT], shape)
    curve = Curve.linear(10.0, 0.01)
    links = Links(LinksHeader(), dict.fromkeys(needed.links, curve), dict.fromkeys(needed.work, curve))
    # Nothing is scaled, nothing counted as nothing.
    assert notes_on(aggregator, shape, links) == ()
    lacking = [replace(links, curves={other: curve for other in needed.links if other != key}) for key in needed.links]
    lacking += [replace(links, work={other: curve for other in needed.work if other != key}) for key in needed.work]
    assert all(notes_on(aggregator, shape, fewer) for fewer in lacking)


def notes_on(aggregator: commopt.Aggregator, shape: TeamShape, links: Links) -> tuple[str, ...]:
    try:
        return cost(aggregator, LAYOUT, torch.float32, shape, links).notes
    except ConfigurationError as error:
        return (str(error),)


# --------------------------------------------------------------------------- processors that are shared


def unit(name: str, ready_us: float, numel: int = 256) -> Unit:
    return Unit((name,), 4 * numel, ready_us, "torch.float32")


def test_gradients_that_are_not_ready_are_delayed() -> None:
    units = [unit("a", 100), unit("b", 150), unit("c", 400)]
    buckets = [Bucket((name,), 1024) for name in "abc"]
    found = delayed(units, buckets, lane_us=[100, 200, 50], busy_us=[20, 40, 9], load=2.0)
    # a is on the lane from 100 to 200: half of it is before b (20 us of delay at load 2), all of it before c (40 us).
    # b is ready at 170, on the lane from 200 to 400: all of it before c, which comes at 440 + 80.
    assert [each.ready_us for each in found] == [100, 170, 520]
    assert delayed(units, buckets, [100, 200, 50], [20, 40, 9], load=0.0) == tuple(units)


def linear(alpha_us: float, beta_us_per_byte: float) -> Links:
    """Return what all_reduce of two ranks takes."""
    return Links(LinksHeader(), {LinkKey("world", "all_reduce", 2): Curve.linear(alpha_us, beta_us_per_byte)})


def test_a_prediction_by_hand() -> None:
    numel = 300_000  # more than DDP's first bucket of 1 MiB, so that there are two
    workload = Workload(
        "hand-made",
        (unit("a", 1000, numel), unit("b", 5000, numel)),
        Layout.of_parameters([("a", (numel,)), ("b", (numel,))]),
        samples=1,
    )
    probed = Probed(time=linear(0, 0.005), processor=linear(0, 0.001), spent_s=1.0)
    found = predict(workload, commopt.Flat(), TeamShape.of((1, 1)), probed, load=1.0)
    message_us, overhead_us = 4 * numel * 0.005, 100
    # Alone the first ends at 7100, after b is ready.
    assert found.apart.step_us == pytest.approx(1000 + 2 * (overhead_us + message_us))
    # It takes 1200 us of a core, two thirds of them (by the time that passes) before b would be ready, at 5800 now.
    assert found.shared.compute_us == pytest.approx(5000 + 1200 * 4000 / 6000)
    assert found.shared.step_us == found.apart.step_us  # which the lane hides
    alone = predict(workload, commopt.Flat(), TeamShape.of((1, 1)), probed, load=0.0)
    assert alone.shared == alone.apart


# --------------------------------------------------------------------------------------------- on ranks

TINY = Subject("tiny", lambda: torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 32)), torch.randn, 4)


def tiny() -> Subject:
    return replace(TINY, inputs=lambda count: torch.randn(count, 64))


def profile_a_model(rank: int, world_size: int) -> tuple[Workload, list[int], list[float], float]:
    profile = Profile(tiny())
    profile.turn(2, counts=False)
    profile.turn(4)
    workload = profile.workload()
    return workload, [bucket.numel for bucket in profile.buckets], profile.step_s, profile.tail_us(workload)


def test_a_profile_is_the_same_on_all_ranks() -> None:
    found = run(profile_a_model, 2)
    assert found[0] == found[1]
    workload, buckets, step_s, tail_us = found[0]
    numels = {"1.bias": 32, "1.weight": 4096, "0.bias": 128, "0.weight": 8192}
    assert {unit.names[0]: unit.nbytes for unit in workload.units} == {name: 4 * n for name, n in numels.items()}
    assert {unit.names[0][0] for unit in workload.units[:2]} == {"1"}  # the last layer's come first
    assert sum(buckets) == sum(numels.values())
    assert len(step_s) == 4
    assert 0 < workload.units[0].ready_us < workload.compute_us <= 1e6 * max(step_s)
    assert 0 <= tail_us < 1e6 * max(step_s)


def probe_and_compare(rank: int, world_size: int) -> tuple[list[Configuration], Environment]:
    strategies = ["flat", "hierarchical_quantized", "hierarchical_powersgd:start_step=0"]
    made = tiny()
    profile = Profile(made)
    profile.turn(3, counts=False)
    membership = join()
    shape = TeamShape.of(tuple(len(node) for node in membership.cluster.nodes))
    aggregators = [commopt.build_preset(strategy) for strategy in strategies]
    needed = wanted(aggregators, profile.buckets, shape)
    probed = Probe(membership, needed, Processors.of_this_machine(world_size), budget_s=1.0).run()
    contest = hold(made, strategies, seconds=0.1, profile=profile)
    return prediction.compare(made, contest, shape, probed), prediction.describe(shape, probed)


def test_the_whole_on_ranks() -> None:
    results = run(probe_and_compare, 4, nodes=(2, 2))
    found, environment = results[0]
    assert all(each[0] == found for each in results)
    assert environment.nodes == [2, 2]
    assert {name.partition(",")[0] for name in environment.links} >= {
        "world all_reduce of 4 ranks",
        "inter all_gather of 2 ranks",
        "encode Quantize(bits=8)",
        "factor PowerSGD(4)",
    }
    assert [each.strategy for each in found] == ["flat", "hierarchical_quantized", "hierarchical_powersgd:start_step=0"]
    for each in found:
        assert each.parameters == 12_448
        assert each.buckets == each.simulated_buckets == [4 * 12_448]
        assert len(each.steps_ms) >= 4
        assert min(each.steps_ms) <= each.measured_ms <= max(each.steps_ms)
        assert each.predicted_ms > each.communication_ms > 0
        assert each.predicted_ms >= each.apart_ms
        assert all("times the probe's, as on this model" in note for note in each.notes)
        assert each.lane_ms > 0
        assert each.cpu_ms > 0
        assert each.compute_cpu_ms > 0


# --------------------------------------------------------------------------------- files and summaries

ENVIRONMENT = Environment(
    date="2026-01-01T00:00:00+00:00",
    torch="2",
    python="3",
    cpu_count=2,
    command="python",
    world_size=2,
    emulated_rate="50mbit",
    nodes=[1, 1],
    probe_s=12.0,
    links={"world all_reduce of 2 ranks": [1024, 2000.0, 10.0]},
)


def made(measured_ms: float, predicted_ms: float, strategy: str = "flat", model: str = "gpt") -> Configuration:
    return Configuration(
        model=model,
        parameters=10,
        batch=1,
        strategy=strategy,
        measured_ms=measured_ms,
        predicted_ms=predicted_ms,
        apart_ms=predicted_ms / 2,
        compute_ms=1.0,
        exposed_ms=1.0,
        communication_ms=1.0,
        lane_ms=1.0,
        cpu_ms=1.0,
        compute_cpu_ms=1.0,
        steps_ms=[measured_ms] * 4,
        buckets=[40],
        simulated_buckets=[40],
        notes=["a note"],
    )


def test_files_hold_several_runs(tmp_path: Path) -> None:
    file, other = tmp_path / "a.json", replace(ENVIRONMENT, nodes=[2, 2])
    report.append(file, ENVIRONMENT, [made(100, 90), made(100, 110)])
    report.append(file, other, [made(50, 50)])
    assert report.read([file]) == [(ENVIRONMENT, [made(100, 90), made(100, 110)]), (other, [made(50, 50)])]
    assert report.read([file, file]) == 2 * report.read([file])
    header = json.loads(file.read_text().splitlines()[0])
    assert (header["record"], header["kind"]) == ("environment", "prediction")


def test_the_table_has_steps_and_errors() -> None:
    runs = [
        (ENVIRONMENT, [made(100, 90), made(100, 105, "hierarchical")]),
        (replace(ENVIRONMENT, nodes=[2, 2]), [made(100, 120, model="vgg")]),
    ]
    sentence, _, header, _, *rows = report.markdown(runs).splitlines()
    assert sentence == "3 steps on 2 clusters: median error 10.0 %, worst +20 %; 2 within 10 %, 3 within 25 %."
    assert header == "| cluster, link | model | `flat` | `hierarchical` |"
    assert rows[0] == "| 1+1 ranks, 50mbit | gpt | 100 (-10 %) | 100 (+5 %) |"
    assert rows[1] == "| 2+2 ranks, 50mbit | vgg | 100 (+20 %) | - |"
