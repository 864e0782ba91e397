"""`commopt cluster`: run a script on emulated nodes."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import asdict
from types import FrameType
from typing import Any

from commopt.cluster.launch import Cluster, Result
from commopt.cluster.network import ClusterUnavailableError
from commopt.command_line import output_file, refuse, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the emulated cluster."""
    parser.description = "Run a script under torchrun on emulated nodes joined by a slow network (needs root)."
    parser.epilog = "The exit status is that of the rank that failed first."
    parser.add_argument("--nodes", type=whole(1), default=2, help="number of nodes (default 2)")
    parser.add_argument(
        "--ranks-per-node",
        default="2",
        metavar="L[,L...]",
        help="ranks on every node, or one number per node",
    )
    parser.add_argument(
        "--rate", default="200mbit", help="of every node's link, each way: 1gbit, none (default 200mbit)"
    )
    parser.add_argument("--delay", default="0ms", help="one-way delay of the network: 500us, 5ms (default 0ms)")
    parser.add_argument(
        "--burst", default="auto", help="bytes a node may send at once: 64kib (default: 2 ms of the rate)"
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write what was run and each node's traffic to FILE"
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in `python -m`")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)


def _ranks_per_node(text: str) -> int | list[int]:
    try:
        counts = [int(count) for count in text.split(",")]
    except ValueError:
        raise ValueError(f"ranks_per_node {text!r} must be a number such as 2, or one per node such as 2,1") from None
    return counts if "," in text else counts[0]


def _report(cluster: Cluster, command: list[str], result: Result) -> dict[str, Any]:
    return {
        "command": command,
        "ranks_per_node": cluster.ranks_per_node,
        **asdict(cluster.link),
        "returncode": result.returncode,
        "seconds": round(result.seconds, 3),
        "nodes": [asdict(node) for node in result.nodes],
    }


def _print_table(cluster: Cluster, result: Result) -> None:
    title = f"{len(result.nodes)} nodes at {cluster.rate}, {result.seconds:.1f} s"
    headings = ("node", "ranks", "sent MiB", "packets", "received MiB", "packets", "inside the node MiB")
    rows = []
    for node in result.nodes:
        link, inside = node.traffic.link, node.traffic.loopback
        sent, received, kept = (f"{n / 2**20:.2f}" for n in (link.tx_bytes, link.rx_bytes, inside.tx_bytes))
        cells = (node.node_rank, node.ranks, sent, link.tx_packets, received, link.rx_packets, kept)
        rows.append([str(cell) for cell in cells])
    try:
        from rich.console import Console
        from rich.table import Column, Table
    except ImportError:
        print(title, "\t".join(headings), *("\t".join(row) for row in rows), sep="\n", file=sys.stderr)
        return
    table = Table(*(Column(heading, justify="right") for heading in headings), title=title)
    for row in rows:
        table.add_row(*row)
    Console(stderr=True).print(table)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def run(arguments: argparse.Namespace) -> int:
    """Run the script; return the exit status of the rank that failed first."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    command = [*(["-m"] if arguments.module else []), arguments.script, *arguments.arguments]
    try:
        ranks = _ranks_per_node(arguments.ranks_per_node)
        with Cluster(arguments.nodes, ranks, arguments.rate, arguments.delay, arguments.burst) as cluster:
            result = cluster.run(command, capture=False)
    except (ClusterUnavailableError, ValueError) as error:
        return refuse("commopt cluster", error)
    _print_table(cluster, result)
    if arguments.json:
        arguments.json.write_text(json.dumps(_report(cluster, command, result), indent=2) + "\n")
    return result.returncode
