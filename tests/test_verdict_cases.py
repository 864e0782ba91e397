# SPDX-License-Identifier: Apache-2.0
"""Ten public questions of the kind "why is the second machine no help?", and the sentence that answers each.

The figures are those of the threads where these have some. Six of the cases are measured on emulated nodes too
(test_verdict_cluster.py, test_cluster_links.py), and broken peer access in real processes (test_verdict_direct.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from commopt.doctor.verdict.facts import (
    HANGS,
    Direct,
    Gain,
    InterfaceRates,
    Level,
    Measurements,
    Pace,
    Problem,
    Training,
    TrialOutcome,
)
from commopt.doctor.verdict.judge import AS_IT_SHOULD_BE, NOT_MEASURED, SLOWER, judge
from commopt.doctor.verdict.show import MOST_LINES, lines_of

TWO = ("host-a", "host-b")


def wire(node: str, gbps: float | None, expected: float | None, **others: object) -> InterfaceRates:
    """Return an interface that carries `gbps` in both directions, with one connection and with four."""
    made = InterfaceRates(node, "eth0", True, 1, gbps, gbps, gbps, 90.0, expected, "the adapter's speed")
    return replace(made, **others)  # type: ignore[arg-type]


def cluster(gbps: float, expected: float, *, ranks: int = 8, backend: str = "nccl") -> Measurements:
    """Return two healthy nodes: collectives reach what the wires carry."""
    level = Level("inter", 2, (("all_reduce", gbps), ("all_to_all", gbps)), 60.0, expected, "its interface")
    return Measurements(
        TWO,
        (ranks, ranks),
        backend,
        wires=tuple(wire(node, gbps, expected) for node in TWO),
        levels=(level,),
        paces=tuple(Pace(rank, TWO[rank // ranks], 80.0) for rank in range(2 * ranks)),
    )


@dataclass(frozen=True)
class Case:
    """A question. first: the beginning of what to try first."""

    found: Measurements
    status: int
    sentence: str
    first: str


def slow_link() -> Case:
    """Two nodes take 52 h where one takes 24: nothing is broken, the model is too large for 10 Gb/s."""
    gains = (Gain("hierarchical_quantized:bits=4", 480.0, False, (1.01, 1.0)),)
    training = Training("LlamaForCausalLM", True, 1730.0, 410.0, 1320.0, gains=gains)
    found = replace(cluster(9.4, 10.0), training=training)
    return Case(
        found, AS_IT_SHOULD_BE, "9.40 Gb/s of 10.0 Gb/s between nodes", "torchrun ... -m commopt run --strategy"
    )


def one_of_four_adapters() -> Case:
    """20 GB/s where four EFA ports carry 78: one port of the machine is used."""
    level = Level("inter", 2, (("all_reduce", 160.0),), 40.0, 624.0, "the node's ports")
    found = replace(cluster(160.0, 624.0), wires=(), levels=(level,))
    return Case(
        found, SLOWER, "NCCL reaches 160 Gb/s between nodes of 624 Gb/s (the node's ports)", "python -m commopt"
    )


def small_packets() -> Case:
    """A 25 Gb/s adapter whose path carries packets of 1500 bytes."""
    mtu = Problem("mtu", "warning", "1500", "sudo ip link set eth0 mtu 9000; then: ping OTHER")
    found = replace(cluster(9.1, 25.0), problems=(mtu,))
    return Case(found, SLOWER, "carries 9.10 Gb/s of 25.0 Gb/s (the adapter's speed); likely: mtu 1500", "sudo ip link")


def wrong_interface() -> Case:
    """NCCL took the management port, and the fast network idles."""
    slow = tuple(wire(node, 0.94, 1.0) for node in TWO)
    fast = tuple(wire(node, 93.0, 100.0, interface="ens5", used=False) for node in TWO)
    found = replace(cluster(0.94, 1.0), wires=(*slow, *fast))
    sentence = "NCCL uses eth0 (940 Mb/s); ens5 carries 93.0 Gb/s between the same nodes"
    return Case(found, SLOWER, sentence, "export NCCL_SOCKET_IFNAME==ens5")


def loopback() -> Case:
    """The host's own name stands for 127.0.1.1 in /etc/hosts, so the others connect to themselves."""
    silent = Problem("nodes-reach", "error", "127.0.1.1 of host-b; refused", "name the interface; export ...")
    wires = tuple(wire(node, None, 10.0, interface="lo") for node in TWO)
    other = tuple(wire(node, 9.4, 10.0, used=False) for node in TWO)
    found = replace(cluster(9.4, 10.0, backend="gloo"), wires=(*wires, *other), levels=(), problems=(silent,))
    return Case(found, NOT_MEASURED, "loopback is offered to other nodes", "export GLOO_SOCKET_IFNAME=eth0")


def peer_access() -> Case:
    """Consumer cards whose driver says that peer access works, and then hangs in it."""
    hung = Direct("host-a", "peer access", "NCCL_P2P_DISABLE", "1", TrialOutcome(None, HANGS), TrialOutcome(64.0), True)
    found = replace(cluster(9.4, 10.0), direct=(hung,))
    sentence = (
        "Broken: NCCL between GPUs of host-a hangs with peer access; without it (NCCL_P2P_DISABLE=1) it reaches 64"
    )
    return Case(found, SLOWER, sentence, "export NCCL_P2P_DISABLE=1")


def one_stream() -> Case:
    """Two regions: the path carries 5 Gb/s, and one connection 1.3."""
    wires = tuple(wire(node, 1.3, None, several_gbps=4.9, latency_us=41_000.0) for node in TWO)
    level = Level("inter", 2, (("all_reduce", 1.2),), 41_000.0)
    found = replace(cluster(1.2, 10.0), wires=wires, levels=(level,))
    return Case(
        found,
        SLOWER,
        "1.30 Gb/s is reached over eth0 by one stream on a path of 41 ms, and 4 connections carry 3.8 times as much",
        "export NCCL",
    )


def slow_rank() -> Case:
    """One GPU of sixteen runs at a third of its clock, too hot."""
    healthy = cluster(94.0, 100.0)
    paces = tuple(replace(pace, tflops=27.0) if pace.rank == 11 else pace for pace in healthy.paces)
    sentence = "rank 11 on host-b computes 3.0 times slower than the others, which wait for it"
    return Case(replace(healthy, paces=paces), SLOWER, sentence, "nvidia-smi -q -d PERFORMANCE,CLOCK")


def data_loader() -> Case:
    """All wait for the rank whose data come from a slow disk, in what looks like communication."""
    training = Training("ResNet", True, 640.0, 230.0, 390.0, late_rank=3, late_ms=350.0)
    sentence = "rank 3 on host-a is ready 350 ms after the others in a step of 640 ms: its data, its device"
    return Case(replace(cluster(94.0, 100.0), training=training), SLOWER, sentence, "py-spy top")


def nothing_wrong() -> Case:
    """A network that is fine, and a model that hides it: nothing is to be won."""
    training = Training("ResNet", True, 240.0, 236.0, 4.0)
    found = replace(cluster(94.0, 100.0), training=training)
    return Case(found, AS_IT_SHOULD_BE, "As it should be: 2 nodes of 8, 16 ranks, 94.0 Gb/s of 100 Gb/s", "")


CASES = {
    "ms-swift#4291, verl#1574, LlamaGen#78": slow_link,
    "skypilot#8391": one_of_four_adapters,
    "small packets": small_packets,
    "wrong interface": wrong_interface,
    "loopback by host name": loopback,
    "nccl#1637, nccl-tests#307": peer_access,
    "pytorch#22978": one_stream,
    "a slow rank": slow_rank,
    "a data loader": data_loader,
    "nothing wrong": nothing_wrong,
}


@pytest.mark.parametrize("name", CASES)
def test_the_sentence_answers_the_question(name: str) -> None:
    case = CASES[name]()
    verdict = judge(case.found)
    assert verdict.status == case.status, verdict.sentence
    assert case.sentence in verdict.sentence
    assert verdict.first.startswith(case.first)
    lines = lines_of(verdict)
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= 80
