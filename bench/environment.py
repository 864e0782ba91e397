# SPDX-License-Identifier: Apache-2.0
"""Where, when and by which command numbers are made: the header of every result."""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from commopt.cluster import link_rate
from commopt.version import __version__, revision


@dataclass(frozen=True)
class Header:
    """Where, when and by which command the numbers of a file were made; its first line."""

    date: str
    command: str
    torch: str
    python: str
    cpu_count: int
    commopt: str | None = field(default=None, kw_only=True)
    """The version; None in files older than this field, as `revision` is."""
    revision: str | None = field(default=None, kw_only=True)
    """As `commopt.version.revision` has it."""


def machine() -> dict[str, Any]:
    """Return when and with what numbers are made, as records of an environment have it."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commopt": __version__,
        "revision": revision(),
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


def origin(paths: Sequence[Path]) -> str:
    """Say when, and with which commopt, the results in some files were made, whoever wrote them; "" of no files."""
    headers = [header for path in paths for header in _headers(path.read_text())]
    days = sorted({header["date"][:10] for header in headers if header.get("date")})
    revisions: dict[str | None, set[str]] = {}
    for header in headers:
        known = revisions.setdefault(header.get("commopt") or header.get("version"), set())
        known.update([header["revision"]] if header.get("revision") else ())
    made = [_with(version, sorted(revisions[version])) for version in sorted(revisions, key=str)]
    when = "" if not days else f" {days[0]}" if len(days) == 1 else f" {days[0]} to {days[-1]}"
    return f"Made{when or ' on a day that was not recorded'}{'; '.join(made)}." if headers else ""


def _headers(text: str) -> list[dict[str, Any]]:
    """Return what a result says of its environment: in one document, or in lines that may be of several runs."""
    try:
        documents = [json.loads(text)]
    except ValueError:
        documents = [json.loads(line) for line in text.splitlines()]
    found = [document.get("environment") or document.get("header") or document for document in documents]
    return [each for each in found if {"date", "command"} & each.keys()]


def _with(version: str | None, revisions: Sequence[str]) -> str:
    shown = f" with commopt {version}" if version else ""
    if version not in (None, __version__):
        shown += f", which was before {__version__},"
    return shown + (f" at {', '.join(revisions)}" if revisions else ", revision not recorded")


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
