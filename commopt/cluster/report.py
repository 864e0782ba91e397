# SPDX-License-Identifier: Apache-2.0
"""The outcome of a run on emulated nodes, and its report: bytes, packets and retransmissions of every node."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from commopt.cluster.network import Counters, LinkTraffic
from commopt.cluster.relay import RelayCounters
from commopt.cluster.sites import EmulatedSites
from commopt.display import show_table


@dataclass(frozen=True)
class NodeTraffic:
    """Traffic of one node during a run."""

    node_rank: int
    ranks: int
    traffic: LinkTraffic


@dataclass(frozen=True)
class Result:
    """Outcome of one run.

    returncode: exit status of the rank that failed first; 124 after a timeout.
    stdout: output of node 0; empty if the run was not captured.
    stderr: stderr of node 0, and both streams of the other nodes with `[node i] ` before each line; empty if the run
        was not captured.
    seconds: duration.
    nodes: traffic of each node.
    sites: traffic over each site's link to the others; none without sites.
    relays: what the relay of each node did that has one.
    has_netem: whether the kernel made delay and loss.
    """

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    nodes: tuple[NodeTraffic, ...]
    sites: tuple[Counters, ...] = ()
    relays: Mapping[int, RelayCounters] = field(default_factory=dict)
    has_netem: bool = False


def show(result: Result, rate: str, sites: EmulatedSites) -> None:
    """Print the report on stderr."""
    headings = "node,ranks,sent MiB,sent packets,received MiB,received packets,inside MiB,sent again"
    rows = [headings.split(",")]
    for node in result.nodes:
        link, inside = node.traffic.link, node.traffic.loopback
        sent, received, kept = (f"{n / 2**20:.2f}" for n in (link.tx_bytes, link.rx_bytes, inside.tx_bytes))
        again = f"{node.traffic.retransmissions} ({node.traffic.retransmitted_share:.2%})"
        figures = (node.node_rank, node.ranks, sent, link.tx_packets, received, link.rx_packets, kept, again)
        rows.append([*map(str, figures)])
    title = f"{len(result.nodes)} nodes at {rate}, {result.seconds:.1f} s"
    caption = "inside: between the ranks of a node. sent again: TCP segments, and their share of packets"
    show_table(title, rows, 0, caption, sys.stderr)
    if result.sites:
        rows = [["site", "nodes", "sent MiB", "received MiB"]]
        for site, (count, link) in enumerate(zip(sites.nodes, result.sites, strict=True)):
            rows.append([str(site), str(count), f"{link.tx_bytes / 2**20:.2f}", f"{link.rx_bytes / 2**20:.2f}"])
        show_table(f"{len(result.sites)} sites at {sites.rate}", rows, 0, "", sys.stderr)
    for line in path_lines(result):
        print(line, file=sys.stderr)


def path_lines(result: Result) -> Iterator[str]:
    """Yield what made delay and loss, and how well."""
    if result.has_netem:
        yield "delay and loss: by the kernel's netem"
    done = result.relays.values()
    if done:
        sent, lost = sum(each.sent for each in done), sum(each.lost for each in done)
        late_ms, latest_ms = sum(each.late_us for each in done) / 1e3, max(each.latest_us for each in done) / 1e3
        share = lost / max(sent + lost, 1)
        yield f"delay and loss: by relays, for want of netem: {sent} packets carried, {lost} lost ({share:.3%})"
        yield f"relays: packets were {late_ms / max(sent, 1):.2f} ms late on average, {latest_ms:.1f} ms at most"
    for node_rank, each in result.relays.items():
        if missed := each.missed + each.overflowed:
            yield (
                f"warning: the relay of node {node_rank} did not keep up, and lost {missed} more packets; pass a lower "
                "--rate, or load netem (`modprobe sch_netem`)"
            )
