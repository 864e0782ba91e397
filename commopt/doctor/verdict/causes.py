# SPDX-License-Identifier: Apache-2.0
"""Why a cluster is slow: a generator for each cause, from what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from commopt.display import significant
from commopt.doctor.verdict.facts import (
    Direct,
    InterfaceRates,
    Level,
    Measurements,
    TrialOutcome,
    median_of_others,
)
from commopt.doctor.verdict.wires import CONNECTIONS
from commopt.probe.network import level_text, settings
from topology.network import rate_text

LEAST_SHARE = 0.6
"""Of what a link should carry; TCP on a healthy network reaches more."""
LEAST_OF_TCP = 0.4
"""What collectives should reach of what plain TCP carries on the same interface."""
UNEQUAL = 0.67
"""Of the others' median: below it a node or a rank is called slow."""
MORE = 1.5
"""How much faster another interface, or several connections, must be to be worth a change."""
LONG_PATH_US = 5000.0
"""A round trip so long is said beside what one connection reaches: windows and losses bound it there."""
LATE_SHARE = 0.05
"""Of a step: by how much a rank must delay the others to be named."""
BUSY_SHARE = 0.25
"""Of the time: if longer, programs wait for a CPU, a late rank's host is what is slow."""

_NCCL_LOG = "export NCCL_DEBUG=INFO NCCL_DEBUG_FILE=nccl.%h.%p"


@dataclass(frozen=True)
class Cause:
    """Why something is slow.

    weight: how many times slower than it should be; None where nothing gets through, or nothing right.
    text: a sentence.
    remedy: a command that can be pasted, or "".
    elsewhere: commands for other hosts.
    """

    weight: float | None
    text: str
    remedy: str = ""
    elsewhere: tuple[str, ...] = ()


def silent_nodes(found: Measurements) -> Cause | None:
    """Return why ranks cannot meet at all."""
    problem = next((one for one in found.problems if one.check == "nodes-reach" and one.severity == "error"), None)
    if problem is None or found.levels:
        return None
    best = _best_interface(found)
    where = problem.value.partition("; ")[0]
    loopback = where.startswith(("127.", "::1"))
    text = f"{'loopback is' if loopback else 'an address is'} offered to other nodes, which get no answer: {where}"
    remedy = f"export {_variable(found)}={best}" if best else problem.remedy.partition(";")[0]
    return Cause(None, text, remedy)


def causes_of(found: Measurements) -> Iterator[Cause]:
    yield from _direct_access(found)
    other = _other_interface(found)
    slow_nodes = list(_slow_nodes(found))
    if other is not None:
        yield other
    yield from slow_nodes
    between_sites = list(_untold_sites(found))
    yield from between_sites
    if other is None and not slow_nodes and not between_sites:
        yield from _slow_wires(found)
    # Between sites nothing is as fast as the best connection inside one.
    yield from list(_one_connection(found)) or (() if between_sites else slow_collectives(found))
    yield from _slow_ranks(found)
    yield from late_rank(found)


def _variable(found: Measurements) -> str:
    return "NCCL_SOCKET_IFNAME" if found.backend == "nccl" else "GLOO_SOCKET_IFNAME"


def slowest(wires: Sequence[InterfaceRates]) -> float | None:
    rates = [wire.gbps for wire in wires]
    return None if not rates or None in rates else min(rate for rate in rates if rate is not None)


def _by_interface(found: Measurements) -> dict[str, float]:
    """Return the rate of the slowest node of each interface that all nodes have."""
    names: dict[str, list[InterfaceRates]] = {}
    for wire in found.wires:
        names.setdefault(wire.interface, []).append(wire)
    rates = {name: slowest(wires) for name, wires in names.items() if len(wires) == len(found.nodes)}
    return {name: rate for name, rate in rates.items() if rate is not None}


def _best_interface(found: Measurements) -> str | None:
    rates = _by_interface(found)
    return max(rates, key=lambda name: rates[name], default=None)


def _other_interface(found: Measurements) -> Cause | None:
    rates, used, best = _by_interface(found), slowest(found.used), _best_interface(found)
    if used is None or best is None or best in {wire.interface for wire in found.used}:
        return None
    if rates[best] < MORE * max(used, 1e-9):
        return None
    name = "NCCL" if found.backend == "nccl" else "gloo"
    shown = found.used[0].interface
    text = f"{name} uses {shown} ({rate_text(used)}); {best} carries {rate_text(rates[best])} between the same nodes"
    sign = "=" if found.backend == "nccl" else ""
    return Cause(rates[best] / max(used, 1e-9), text, f"export {_variable(found)}={sign}{best}")


def _slow_nodes(found: Measurements) -> Iterator[Cause]:
    """Nodes slower than the others; of two nodes neither is known to be."""
    rates = {wire.node: wire.gbps for wire in found.used}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    if len(known) < 3:
        return
    for name, rate in known.items():
        others = median_of_others(known, name)
        if others is not None and rate < UNEQUAL * others:
            interface = next(wire.interface for wire in found.used if wire.node == name)
            text = (
                f"{name} carries {rate_text(rate)} over {interface}, the other nodes {rate_text(others)}, and all wait"
            )
            remedy = f"ethtool {interface}   # on {name}: cable, port, other programs"
            yield Cause(others / max(rate, 1e-9), text, remedy)


def _slow_wires(found: Measurements) -> Iterator[Cause]:
    slow = [wire for wire in found.used if is_slow(wire)]
    if not slow:
        return
    worst = min(slow, key=lambda wire: (wire.gbps or 0.0) / (wire.expected_gbps or 1.0))
    rate, expected = worst.gbps or 0.0, worst.expected_gbps or 0.0
    where = "every node" if len(slow) == len(found.used) else " and ".join(wire.node for wire in slow[:2])
    likely = [one for one in found.problems if one.check in ("mtu", "tcp-buffers", "nic-speed", "pcie-link", "sockets")]
    reason = f"; likely: {likely[0].check} {likely[0].value}" if likely else "; others may share it"
    text = f"{worst.interface} of {where} carries {rate_text(rate)} of {rate_text(expected)} ({worst.source}){reason}"
    remedy = likely[0].remedy.partition(";")[0] if likely else f"ip -s link show {worst.interface}"
    yield Cause(expected / max(rate, 1e-9), text, remedy)


def is_slow(wire: InterfaceRates) -> bool:
    return wire.gbps is not None and wire.expected_gbps is not None and wire.gbps < LEAST_SHARE * wire.expected_gbps


def _one_connection(found: Measurements) -> Iterator[Cause]:
    gains = [
        wire.several_gbps / wire.one_gbps for wire in found.used if wire.several_gbps is not None and wire.one_gbps
    ]
    if not gains or len(gains) < len(found.used) or min(gains) < MORE:
        return
    name = found.used[0].interface
    nccl = found.backend == "nccl"
    # NCCL shares the sockets of a channel out to its threads: as many together as were measured.
    remedy = (
        f"export NCCL_SOCKET_NTHREADS=2 NCCL_NSOCKS_PERTHREAD={CONNECTIONS // 2}"
        if nccl
        else f"export GLOO_SOCKET_IFNAME={','.join([name] * CONNECTIONS)}"
    )
    one = min(wire.one_gbps or 0.0 for wire in found.used)
    latency_us = min((wire.latency_us for wire in found.used if wire.latency_us is not None), default=0.0)
    path = f" by one stream on a path of {latency_us / 1000:.0f} ms" if latency_us >= LONG_PATH_US else ""
    more = f"{CONNECTIONS} connections carry {min(gains):.1f} times as much"
    text = f"{rate_text(one)} is reached over {name}{path}, and {more}"
    yield Cause(min(gains), f"{text}; NCCL opens one a channel" if nccl else text, remedy)


def across(found: Measurements) -> Level | None:
    levels = [level for level in found.levels if level.between_nodes]
    return max(levels, key=lambda level: level.best_gbps, default=None)


def slow_collectives(found: Measurements) -> Iterator[Cause]:
    level, carried = across(found), slowest(found.used)
    name = "NCCL" if found.backend == "nccl" else "gloo"
    if level is not None and carried is not None and level.best_gbps < LEAST_OF_TCP * carried:
        text = f"{name} reaches {rate_text(level.best_gbps)} between nodes where plain TCP carries {rate_text(carried)}"
        remedy = "python -m commopt doctor --log nccl.*" if found.backend == "nccl" else ""
        yield Cause(carried / max(level.best_gbps, 1e-9), text, remedy)
    elif level is not None and not found.used and _below(level, LEAST_SHARE):
        stated = level.expected_gbps or 0.0
        text = f"{name} reaches {rate_text(level.best_gbps)} between nodes of {rate_text(stated)} ({level.source})"
        yield Cause(stated / max(level.best_gbps, 1e-9), text, "python -m commopt doctor")
    for inside in found.levels:
        if not inside.between_nodes and _below(inside, LEAST_SHARE / 2):
            stated = inside.expected_gbps or 0.0
            text = f"ranks of a node reach {rate_text(inside.best_gbps)} of {rate_text(stated)} ({inside.source})"
            weight = stated / max(inside.best_gbps, 1e-9)
            yield Cause(weight, f"{text}: peer access may be off", "nvidia-smi topo -p2p n")


def _direct_access(found: Measurements) -> Iterator[Cause]:
    """Direct access that breaks, or that makes slower; and where it is switched off, what it would gain."""
    told: set[tuple[str, str]] = set()
    for one in found.direct:
        now, other = (one.with_it, one.without) if one.used else (one.without, one.with_it)
        alike = [each for each in found.direct if each.what == one.what and now.fault in _faults(each)]
        if (one.what, now.fault) in told or not (now.fault or _pays(now, other)):
            continue
        told.add((one.what, now.fault))
        ways = [f"with {one.what}", f"without it ({one.variable}={one.off})"]
        here, there = ways if one.used else ways[::-1]
        more = f" and {len(alike) - 1} more" if now.fault and len(alike) > 1 else ""
        gpus, reached = f"NCCL between GPUs of {one.name}{more}", rate_text(other.gbps or 0.0)
        remedy = f"export {one.variable}={one.off}" if one.used else f"unset {one.variable}"
        if not now.fault:
            text = f"{gpus} reaches {rate_text(now.gbps or 0.0)} {here} and {reached} {there}"
            yield Cause((other.gbps or 0.0) / (now.gbps or 1.0), text, remedy)
        elif other.fault:
            yield Cause(None, f"{gpus} {now.fault} {here}, and {other.fault} {there}", _NCCL_LOG)
        else:
            yield Cause(None, f"{gpus} {now.fault} {here}; {there} it reaches {reached}", remedy)


def _faults(one: Direct) -> tuple[str, str]:
    return one.with_it.fault, one.without.fault


def _pays(now: TrialOutcome, other: TrialOutcome) -> bool:
    return not other.fault and bool(now.gbps and other.gbps) and (other.gbps or 0.0) >= MORE * (now.gbps or 0.0)


def _untold_sites(found: Measurements) -> Iterator[Cause]:
    network = found.network
    if network is not None and network.sites:
        weight = max(level.inside_gbps / max(level.across_gbps, 1e-9) for level in network.levels)
        text = f"nobody told the sites: {'; '.join(level_text(level) for level in network.levels)}"
        first, *others = settings(network)
        yield Cause(weight, text, first, tuple(others))


def _below(level: Level, share: float) -> bool:
    return level.expected_gbps is not None and level.best_gbps < share * level.expected_gbps


def _slow_ranks(found: Measurements) -> Iterator[Cause]:
    paces = {f"{pace.rank}": pace.tflops for pace in found.paces}
    for pace in found.paces:
        others = median_of_others(paces, str(pace.rank))
        if others is not None and pace.tflops < UNEQUAL * others:
            times = others / max(pace.tflops, 1e-9)
            text = (
                f"rank {pace.rank} on {pace.node} computes {times:.1f} times slower than the others, which wait for it"
            )
            gpu = "nvidia-smi -q -d PERFORMANCE,CLOCK" if found.backend == "nccl" else "top -b -n 1 | head -20"
            yield Cause(times, text, f"{gpu}   # on {pace.node}")


def late_rank(found: Measurements) -> Iterator[Cause]:
    """Yield the rank for which all others wait, if there is one."""
    one = found.training
    if one is None or one.late_rank < 0 or one.late_ms < LATE_SHARE * one.step_ms:
        return
    node = one.late_node or found.node_of(one.late_rank)
    where = f"rank {one.late_rank}" + (f" on {node}" if node else "")
    weight = 1 + one.late_ms / max(one.step_ms - one.late_ms, 1e-9)
    text = f"{where} is ready {significant(one.late_ms)} ms after the others in a step of {significant(one.step_ms)} ms"
    if one.late_host_busy is not None and one.late_host_busy > BUSY_SHARE:
        text += (
            f": not for the network, but in {one.late_host_busy:.0%} of the time a program of its host waits for a CPU"
        )
        yield Cause(weight, text, f"top -b -n 1 | head -20   # on {node or 'its host'}")
    else:
        text += ": its data, its device or its model, not the network"
        yield Cause(weight, text, "py-spy top --pid PID   # of that rank")
