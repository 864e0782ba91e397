"""What surrounds the rows: the circumstances of the run, what the numbers mean, and the JSON file."""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commopt.bandwidth.contenders import TORCH, Contender
from commopt.bandwidth.pattern import Pattern
from commopt.bandwidth.settings import Settings
from commopt.bandwidth.table import Row, average_busbw_gbps
from commopt.cluster import link_rate
from commopt.command_line import require_writable
from commopt.errors import ConfigurationError, MismatchError
from commopt.version import __version__
from topology import Cluster


def preamble(settings: Settings, cluster: Cluster, device: torch.device) -> str:
    """Return the lines above the table; collective over the world."""
    mine = (socket.gethostname(), os.getpid(), _device_name(device))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    by_factor = settings.step_factor > 1
    lines = [
        f"# Collective: {settings.collective.name} over {cluster}, {_backend(device)}",
        f"# minBytes {settings.min_nbytes} maxBytes {settings.max_nbytes} "
        f"step: {settings.step_factor if by_factor else settings.step_nbytes}({'factor' if by_factor else 'bytes'}) "
        f"warmup iters: {settings.warm_up_iterations} iters: {settings.iterations} validation: {int(settings.check)}",
        "#",
        "# Using devices",
    ]
    for rank, (host, pid, name) in enumerate(ranks):
        lines.append(f"#  Rank {rank:>2} Node {cluster.node_of(rank):>2} Pid {pid:>6} on {host:>10} device {name}")
    return "\n".join([*lines, "#"])


def notes(settings: Settings, contenders: Sequence[Contender], device: torch.device) -> list[str]:
    """Return one sentence for each thing a reader of this table could get wrong."""
    collective, op = settings.collective, settings.op
    world_size = dist.get_world_size()
    side = "in place" if collective.has_in_place else "out of place"
    lines = [
        "time: mean of a loop without barriers on the slowest rank; GB/s = 1e9 B/s.",
        f"p50, p99: of the loop's iterations {side}, each ending when the last rank has"
        f"{'; p99 of less than 100 is the maximum' if settings.iterations < 100 else ''}.",
    ]
    if not collective.has_in_place:
        lines.append(f"in-place N/A: {collective.name} needs two buffers.")
    elif collective.root >= 0:
        lines.append(f"out-of-place: rank {collective.root} copies its input first, {collective.name} works in place.")
    elif not collective.blocks:
        lines.append(f"out-of-place: the input is copied first, as {collective.name} works in place.")
    if collective.aggregates:
        lines.append("wire: payload bytes of one call by formula, added up over all ranks.")
    else:
        lines.append(f"wire n/a: only all_reduce has a formula, {collective.name} has none.")
    if any(contender.name == TORCH for contender in contenders):
        lines.append("torch: the backend's own collective, the yardstick; commopt has no formula for its wire bytes.")
        if collective.reduces and op == "avg" and _backend(device) == "gloo":
            lines.append("torch avg: gloo cannot average, so a sum and a division, as in stock DDP.")
    if settings.check:
        for bound in sorted({contender.error_bound for contender in contenders}):
            tolerance = Pattern(settings.dtype, world_size).tolerance(op, collective.reduces, bound)
            names = ", ".join(contender.name for contender in contenders if contender.error_bound == bound)
            of = f"the largest element, for {names}" if bound else "every element"
            lines.append(f"#wrong: error above {tolerance:.3g} of {of}." if tolerance else "#wrong: any difference.")
    if any(contender.error_bound for contender in contenders):
        lines.append("algbw and busbw of aggregators that round are effective: dense bytes, whatever was sent.")
    return lines


def require_same_everywhere(settings: Settings) -> None:
    """Raise MismatchError on every rank unless all were started with the same settings."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {field.name: str(getattr(settings, field.name)) for field in fields(settings)})
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0][name]:
                raise MismatchError(
                    f"rank {rank} was started with {name} {value}, rank 0 with {everyone[0][name]}; start all alike"
                )


def require_json(path: Path | None) -> None:
    """Raise ConfigurationError on every rank if rank 0 cannot write to `path`: now, not after the measurements."""
    if path is None:
        return
    problem: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            require_writable(path)
        except ConfigurationError as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise ConfigurationError(f"--json {problem[0]}")


def document(settings: Settings, cluster: Cluster, device: torch.device, rows: Sequence[Row]) -> dict[str, Any]:
    """Return everything as JSON values."""
    return {
        "environment": {
            "kind": "bandwidth",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": _command(sys.argv),
            "commopt": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "backend": _backend(device),
            "device": _device_name(device),
            "cpu_count": os.cpu_count(),
            "world_size": dist.get_world_size(),
            "nodes": cluster.nodes,
            "nodes_declared": cluster.emulated,
            "emulated_link_rate": link_rate(),
            "iterations": settings.iterations,
            "warm_up_iterations": settings.warm_up_iterations,
        },
        "rows": [asdict(row) for row in rows],
        "out_of_bounds_values": sum(row.wrong for row in rows) if settings.check else None,
        "average_busbw_gbps": average_busbw_gbps(rows),
    }


def _command(argv: Sequence[str]) -> str:
    """Return what was typed; `python -m bench.bandwidth` has no subcommand among its arguments."""
    arguments = argv[2:] if argv[1:2] == ["bandwidth"] else argv[1:]
    return shlex.join(["commopt", "bandwidth", *arguments])


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one JSON document."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device.index} {torch.cuda.get_device_name(device)}"
    return platform.machine() + " CPU"
