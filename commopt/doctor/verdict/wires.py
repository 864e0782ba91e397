# SPDX-License-Identifier: Apache-2.0
"""The rate of each interface by plain TCP between nodes: what the network carries, whatever gloo or NCCL make of it."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, ip_address
from typing import Any

from commopt.doctor.compare import ipv4_of, listener, own_offers
from commopt.doctor.machine import Machine
from commopt.doctor.network import candidates
from commopt.doctor.verdict.expected import interface_rate
from commopt.doctor.verdict.facts import InterfaceRates

CONNECTIONS = 4
MOST_PARTNERS, MOST_INTERFACES = 3, 4
SEND_S, LONGEST_S, ROUND_TRIPS = 0.6, 6.0, 150
"""For how long a connection sends: longer on a long path, where one stream is fast until its first packet is lost."""
TOGETHER_S = 24.0
"""All rounds, at most, unless SEND_S is more."""
SKIPPED = 3
"""One part in so many, at the beginning, does not count: TCP is slow until it knows the network."""
REACH_S = 2.0

_BLOCK = bytes(1 << 20)
_TOKEN_BYTES = 16
_HEADER_BYTES = _TOKEN_BYTES + 4  # and the number of the measurement
_MOST_NAME, _MOST_NODES = 15, 4096

Exchange = Callable[[str, Mapping[str, Any]], list[dict[str, Any]]]
"""Gives every rank the facts of all, in their order; collective."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Endpoint:
    """An interface of a node, with its address; `gbps` is what it should carry."""

    interface: str
    address: str
    used: bool
    gbps: float | None = None
    source: str = ""
    network: str = ""

    def leads_to(self, other: Endpoint) -> bool:
        """Return whether `other` is on a network that this interface reaches directly."""
        return bool(self.network) and IPv4Address(other.address) in IPv4Network(self.network)


def own_endpoints(machine: Machine) -> list[Endpoint]:
    """Return the interfaces of this machine that may lead to other nodes, those that are used first."""
    library = "NCCL" if machine.hardware.gpus else "gloo"
    offered = {offer.address for offer in own_offers(machine) if offer.library == library}
    found, possible = [], candidates(machine)
    for one in possible:
        address = ipv4_of(one.name)
        if address is None:
            continue
        rate = interface_rate(machine, one, len(possible))
        network = next((str(each) for each in one.networks if IPv4Address(address) in each), "")
        gbps, source = (None, "") if rate is None else rate
        found.append(Endpoint(one.name, address, address in offered, gbps, source, network))
    return sorted(found, key=lambda each: not each.used)[:MOST_INTERFACES]


class _Receiver:
    """Counts what arrives at a port of this node, by the number of the measurement."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._arrived: dict[int, list[tuple[float, int]]] = {}
        self._server = listener()
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def gbps(self, number: int) -> float | None:
        """Return the rate of all connections of a measurement together, None if nothing came."""
        arrived = sorted(self._arrived.get(number, []))
        if not arrived:
            return None
        first, last = arrived[0][0], min(arrived[-1][0], arrived[0][0] + LONGEST_S)
        first += (last - first) / SKIPPED
        nbytes = sum(count for at, count in arrived if first < at <= last)
        return nbytes * 8e-9 / (last - first) if last > first and nbytes else None

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        buffer = memoryview(bytearray(1 << 20))
        with suppress(OSError), connection:
            connection.settimeout(LONGEST_S + REACH_S)
            header = b""
            while len(header) < _HEADER_BYTES:
                part = connection.recv(_HEADER_BYTES - len(header))
                if not part:
                    return
                header += part
            if not secrets.compare_digest(header[:_TOKEN_BYTES], self._token):
                return
            arrived = self._arrived.setdefault(int.from_bytes(header[_TOKEN_BYTES:], "big"), [])
            while count := connection.recv_into(buffer):
                arrived.append((time.monotonic(), count))


def _send(source: Endpoint, target: Endpoint, port: int, header: bytes, longest_s: float) -> float | None:
    """Send for ROUND_TRIPS, but SEND_S at least and `longest_s` at most.

    Returns the microseconds that connecting took, None if nobody answered.
    """
    try:
        begun = time.monotonic()
        connection = socket.create_connection((target.address, port), REACH_S, (source.address, 0))
        latency_us = (time.monotonic() - begun) * 1e6
        with connection:
            connection.sendall(header)
            until = time.monotonic() + max(SEND_S, min(ROUND_TRIPS * latency_us / 1e6, longest_s))
            while time.monotonic() < until:
                connection.send(_BLOCK)
            # What waits in the buffers is not worth waiting for: the time is over.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    except OSError:
        return None
    return latency_us


@dataclass(frozen=True)
class _Node:
    """One node in the answers of all ranks: its first rank measures for it."""

    name: str
    leader: int
    port: int
    token: bytes
    endpoints: tuple[Endpoint, ...]


def _nodes(answers: Sequence[Mapping[str, Any]]) -> list[_Node]:
    found: dict[str, _Node] = {}
    for rank, answer in enumerate(answers):
        key = str(answer["key"])
        if key not in found and len(found) < _MOST_NODES:
            endpoints = tuple(
                Endpoint(
                    str(name)[:_MOST_NAME],
                    str(ip_address(address)),
                    used is True,
                    None if gbps is None else float(gbps),
                    str(source)[:40],
                    str(IPv4Network(network)) if network else "",
                )
                for name, address, used, gbps, source, network in answer["endpoints"][:MOST_INTERFACES]
            )
            token = bytes.fromhex(str(answer["token"]))
            found[key] = _Node(str(answer["name"])[:60], rank, int(answer["port"]), token, endpoints)
    return list(found.values())


def measure_wires(
    endpoints: Sequence[Endpoint], name: str, key: str, rank: int, exchange: Exchange, say: Say
) -> tuple[InterfaceRates, ...]:
    """Return all interfaces of all nodes, the same on every rank; collective. Only a node's first rank sends.

    In a round each node sends to another one and receives from a third, so all are measured at once.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    receiver = _Receiver(token)
    listed = [
        (one.interface, one.address, one.used, one.gbps, one.source, one.network)  # as JSON has them
        for one in endpoints
    ]
    try:
        answers = exchange(
            "interfaces",
            {"name": name, "key": key, "port": receiver.port, "token": token.hex(), "endpoints": listed},
        )
        nodes = _nodes(answers)
        mine = next((place for place, node in enumerate(nodes) if node.leader == rank), None)
        rounds = [
            (slot, shift, count)
            for slot in range(max((len(node.endpoints) for node in nodes), default=0))
            for shift in range(1, min(len(nodes) - 1, MOST_PARTNERS) + 1)
            for count in ((1, CONNECTIONS) if slot == 0 else (1,))
        ]
        longest_s = min(LONGEST_S, TOGETHER_S / max(len(rounds), 1))
        latencies: dict[str, float] = {}
        for number, (slot, shift, count) in enumerate(rounds):
            if rank == 0 and shift == 1:
                say(f"interface {slot + 1}, {count} connection(s)")
            if mine is not None:
                latency_us = _round(nodes, mine, (slot, shift, count), number, longest_s)
                if latency_us is not None:
                    latencies[str(slot)] = min(latency_us, latencies.get(str(slot), latency_us))
            exchange(f"round {number}", {})
        got = {} if mine is None else {str(number): receiver.gbps(number) for number in range(len(rounds))}
        results = exchange("rates", {"got": got, "latencies": latencies})
    finally:
        receiver.close()
    return _wires(nodes, rounds, results)


def _target(nodes: Sequence[_Node], place: int, slot: int, shift: int) -> tuple[_Node, Endpoint, Endpoint] | None:
    """Return whom a node sends to in a round: the other's interface on the same network, or of the same name."""
    node, other = nodes[place], nodes[(place + shift) % len(nodes)]
    if slot >= len(node.endpoints):
        return None
    source = node.endpoints[slot]
    near = [one for one in other.endpoints if source.leads_to(one)]
    alike = [one for one in other.endpoints if one.interface == source.interface]
    found = next(iter(near or alike), None)
    return None if found is None else (other, source, found)


def _round(
    nodes: Sequence[_Node], mine: int, turn: tuple[int, int, int], number: int, longest_s: float
) -> float | None:
    slot, shift, count = turn
    way = _target(nodes, mine, slot, shift)
    if way is None:
        return None
    other, source, target = way
    header = other.token + number.to_bytes(4, "big")
    with ThreadPoolExecutor(count) as pool:
        tries = [pool.submit(_send, source, target, other.port, header, longest_s) for _ in range(count)]
        return min((took for each in tries if (took := each.result()) is not None), default=None)


def _wires(
    nodes: Sequence[_Node], rounds: Sequence[tuple[int, int, int]], results: Sequence[Mapping[str, Any]]
) -> tuple[InterfaceRates, ...]:
    rates: dict[tuple[int, str, int, str], list[float]] = {}  # node, interface, connections, direction
    for number, (slot, shift, count) in enumerate(rounds):
        for place in range(len(nodes)):
            way = _target(nodes, place, slot, shift)
            if way is None:
                continue
            other, source, target = way
            got = results[other.leader]["got"].get(str(number))
            if got is not None:
                rates.setdefault((place, source.interface, count, "send"), []).append(float(got))
                there = (nodes.index(other), target.interface, count, "receive")
                rates.setdefault(there, []).append(float(got))
    found = []
    for place, node in enumerate(nodes):
        latencies = results[node.leader]["latencies"]
        for slot, one in enumerate(node.endpoints):

            def best(count: int, direction: str, at: tuple[int, str] = (place, one.interface)) -> float | None:
                return max(rates.get((*at, count, direction), []), default=None)

            several = [best(CONNECTIONS, direction) for direction in ("send", "receive")]
            both = [each for each in several if each is not None]
            latency = latencies.get(str(slot))
            found.append(
                InterfaceRates(
                    node.name,
                    one.interface,
                    one.used,
                    min(len(nodes) - 1, MOST_PARTNERS),
                    best(1, "send"),
                    best(1, "receive"),
                    min(both) if len(both) == 2 else None,
                    None if latency is None else float(latency),
                    one.gbps,
                    one.source,
                )
            )
    return tuple(found)
