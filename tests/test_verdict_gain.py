# SPDX-License-Identifier: Apache-2.0
"""What a model would gain, and what a link should carry: from figures made up here, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from commopt.aggregate.learning import LEARNED, LEARNED_LOCAL
from commopt.cost import Curve, LinkKey, Links, LinksHeader, Speeds, nominal_links
from commopt.doctor.machine import Machine
from commopt.doctor.network import interfaces
from commopt.doctor.verdict.expected import MACHINES, interface_rate
from commopt.doctor.verdict.facts import Gain, Measurements, Training
from commopt.doctor.verdict.gain import SHOWN, Used, learned, predict, shown, sized_model, workload_of
from commopt.doctor.verdict.measure import Found, curve_of, levels_of, with_all
from commopt.groups import TeamShape
from commopt.hooks import build_preset
from tests.machines import Tree

SHAPE = TeamShape.of((8, 8))


def found(nic_gbps: float) -> Found:
    links = nominal_links(SHAPE, Speeds(nic_gbps, 200.0))
    return Found(Measurements(("a", "b"), (8, 8), "nccl"), links)


def test_on_a_slow_network_strategies_save_most_of_what_is_exposed() -> None:
    training = predict(workload_of("gpt2", None, None, "NVIDIA A100", 1.0), SHAPE, found(1.0), "NVIDIA A100")
    assert training.exposed_share > 0.5
    assert len(training.gains) == SHOWN
    saved = [training.step_ms - gain.step_ms for gain in training.gains]
    assert all(0 < each <= training.exposed_ms * 1.01 for each in saved)


def test_on_a_fast_network_nothing_is_promised() -> None:
    training = predict(workload_of("gpt2", None, None, "NVIDIA A100", 1.0), SHAPE, found(3200.0), "NVIDIA A100")
    assert training.exposed_share < 0.05
    assert training.gains == ()


@pytest.mark.parametrize("slower", [0.6, 1.0, 2.5])
def test_a_recorded_step_stands_and_corrects_messages_but_no_computing(slower: float) -> None:
    """On links so many times slower, the recorded step is enough to predict what would be predicted from them."""
    workload = workload_of("gpt2", None, None, "NVIDIA A100", 1.0)
    truth = predict(workload, SHAPE, found(1.0 / slower), "NVIDIA A100")
    recorded = Training("mine", True, truth.step_ms, truth.compute_ms, truth.exposed_ms)
    training = predict(workload, SHAPE, found(1.0), "NVIDIA A100", recorded)
    assert (training.name, training.step_ms, training.recorded) == ("mine", recorded.step_ms, True)
    steps = {gain.strategy: gain.step_ms for gain in training.gains}
    assert steps == pytest.approx({gain.strategy: gain.step_ms for gain in truth.gains}, rel=0.03)


def test_what_learns_as_exact_averages_do_is_among_those_shown() -> None:
    weak = [Gain(f"weak{place}", 10.0 + place, False, (1.2, 1.2)) for place in range(4)]
    safe = Gain("safe", 30.0, False, (1.0, 1.0))
    assert [gain.strategy for gain in shown([*weak, safe])] == ["weak0", "weak1", "safe"]
    assert [gain.strategy for gain in shown([weak[0], safe, *weak[1:]])] == ["weak0", "safe", "weak1"]
    assert shown(weak) == tuple(weak[:SHOWN])
    assert shown([safe]) == (safe,)


def test_strategies_are_compared_with_the_one_in_use() -> None:
    """Nothing that is no faster is named, and the strategy itself is not."""
    workload = workload_of("gpt2", None, None, "NVIDIA A100", 1.0)
    every = predict(workload, SHAPE, found(1.0), "NVIDIA A100", most=99)
    groups = [[name] for unit in workload.units for name in unit.names]
    for gain in (every.gains[0], every.gains[-1]):
        used = Used(build_preset(gain.strategy), groups)
        better = predict(workload, SHAPE, found(1.0), "NVIDIA A100", used=used, most=99)
        assert gain.strategy not in {each.strategy for each in better.gains}
        assert all(each.step_ms < better.step_ms for each in better.gains)


def test_a_curve_is_through_long_messages_whatever_short_ones_took() -> None:
    """A buffer that swallows the shortest must not make all of them look short."""
    curve = curve_of([(2**14, 30.0), (2**18, 16_000.0), (2**22, 178_000.0)])
    assert curve.time_us(2**22) == pytest.approx(178_000.0, rel=0.01)
    assert curve.time_us(2**20) == pytest.approx(48_000.0, rel=0.05)
    assert curve.points[0] == (2**14, 30.0)


@pytest.mark.parametrize("numel", [1, 1000, 124_000_000, 7_000_000_000])
def test_a_model_of_a_size_has_exactly_that_many_parameters(numel: int) -> None:
    assert sized_model(numel).numel == numel


def test_what_strategies_do_to_learning_is_what_was_measured() -> None:
    assert learned("hierarchical", build_preset("hierarchical"), SHAPE) == (1.0, 1.0)
    assert (
        learned("hierarchical_powersgd", build_preset("hierarchical_powersgd"), SHAPE)
        == LEARNED["PowerSGD(matrix_rank=4)"][1:]
    )
    assert learned("onebit_local", build_preset("onebit_local"), SHAPE) == next(iter(LEARNED_LOCAL.values()))[1:]


def test_collectives_that_are_not_measured_follow_from_rings() -> None:
    key = LinkKey("inter", "all_reduce", 4)
    curves = with_all({key: Curve.linear(60.0, 1.5)})
    halves = curves[key._replace(primitive="reduce_scatter")].segments[0]
    assert (halves.alpha_us, halves.beta_us_per_byte) == (30.0, 0.75)
    assert "from all_reduce" in curves[key._replace(primitive="reduce_scatter")].note


def test_the_rate_of_a_level_is_what_a_node_sends() -> None:
    """All_reduce of 4 MB between two nodes sends 4 MB out of each: 1 Gb/s if it takes 32 ms."""
    curve = Curve.fit([(1e6, 8000.0), (4e6, 32000.0)])
    links = Links(LinksHeader(nodes=(1, 1)), {LinkKey("world", "all_reduce", 2): curve})
    (level,) = levels_of(links)
    assert dict(level.rates) == pytest.approx({"all_reduce": 1.0})
    assert level.between_nodes
    (inside,) = levels_of(Links(LinksHeader(nodes=(2,)), links.curves))
    assert not inside.between_nodes


# ----------------------------------------------------------------------------------- what should be


def machine(root: Path, product: str = "", **environ: str) -> Machine:
    tree = Tree(root)
    for name, speed in (("eth0", 100_000), ("veth9", 10_000), ("eth1", -1)):
        tree.write(f"sys/class/net/{name}/operstate", "up")
        tree.write(f"sys/class/net/{name}/speed", speed)
    for name in ("eth0", "eth1"):
        tree.write(f"sys/class/net/{name}/device/vendor", "0x15b3")
    tree.write("sys/class/dmi/id/product_name", product)
    return Machine(root, environ)


def rate(one: Machine, name: str) -> tuple[float, str] | None:
    (interface,) = [each for each in interfaces(one) if each.name == name]
    return interface_rate(one, interface)


def test_an_adapter_should_carry_its_speed_or_what_its_lanes_do(tmp_path: Path) -> None:
    one = machine(tmp_path)
    assert rate(one, "eth0") == (100, "the adapter's speed")
    device = tmp_path / "sys/class/net/eth0/device"
    (device / "current_link_speed").write_text("8.0 GT/s PCIe")
    (device / "current_link_width").write_text("4")
    lanes = rate(one, "eth0")
    assert lanes is not None
    assert lanes[0] == pytest.approx(28.4, rel=0.01)
    assert "PCIe" in lanes[1]


def test_a_made_up_speed_and_an_unknown_one_promise_nothing(tmp_path: Path) -> None:
    one = machine(tmp_path)
    assert rate(one, "veth9") is None
    assert rate(one, "eth1") is None


@pytest.mark.parametrize("name", ["g5.48xlarge", "NVIDIA DGX Spark"])
def test_a_known_machine_type_stands_in_for_a_speed_that_is_not_stated(name: str, tmp_path: Path) -> None:
    expected = MACHINES[name.replace(" ", "_")]
    assert rate(machine(tmp_path, name), "eth1") == (expected.gbps, f"{expected.source}, this machine type")


def test_on_emulated_nodes_the_emulator_knows(tmp_path: Path) -> None:
    one = machine(tmp_path, BENCH_CLUSTER_RATE="50mbit/10mbit")
    assert rate(one, "eth0") == (0.01, "commopt cluster --rate")
    assert rate(one, "eth1") is None
