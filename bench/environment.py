"""Where, when and by which command numbers are made: the header of every result."""

from __future__ import annotations

import os
import platform
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from commopt.cluster import link_rate


@dataclass(frozen=True)
class Header:
    """Where, when and by which command the numbers of a file were made; its first line."""

    date: str
    command: str
    torch: str
    python: str
    cpu_count: int


def machine() -> dict[str, Any]:
    """Return when and with what numbers are made, as records of an environment have it."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu_count": os.cpu_count() or 0,
    }


def command_of(module: str, ranks_per_node: Sequence[int]) -> str:
    """Return the command that runs `module` as this process does, on emulated nodes if that is where it runs."""
    command = ["-m", module, *sys.argv[1:]]
    rate = link_rate()
    if rate:
        counts = ",".join(map(str, ranks_per_node))
        shape = ["--nodes", str(len(ranks_per_node)), "--ranks-per-node", counts, "--rate", rate]
        command = ["-m", "bench.cluster", *shape, *command]
    return shlex.join(["python", *command])


def run_of(module: str) -> dict[str, Any]:
    """Return `machine()`, the command that runs `module` as this process does, and the world it runs in."""
    world_size = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {
        **machine(),
        "command": command_of(module, [local] * (world_size // local)),
        "world_size": world_size,
        "emulated_rate": link_rate(),
    }


T = TypeVar("T")


def gather(value: T) -> list[T]:
    """Return every rank's value, on every rank."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]  # all are filled


def from_rank_0(value: T) -> T:
    """Return rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def slowest_rank_ms(step_s: Sequence[float]) -> list[float]:
    """Return for each step the time of its slowest rank."""
    return [1000 * max(times) for times in zip(*gather(step_s), strict=True)]


def end_when_told() -> None:
    """Let SIGTERM and SIGHUP end this process as errors do, so that what it started is taken down."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
