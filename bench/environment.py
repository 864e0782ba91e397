# SPDX-License-Identifier: Apache-2.0
"""Where, when and by which command numbers are made: the header of every result."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from commopt.cluster import cluster_options, link_rate
from commopt.document import read_text
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
    """The version."""
    revision: str | None = field(default=None, kw_only=True)
    """`commopt.version.revision`; None where it is not known."""


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
        command = ["-m", "bench.cluster", *shape, *cluster_options(), *command]
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


@dataclass(frozen=True)
class Revision:
    """The revision that a result was made at."""

    name: str | None
    """A short hash; None where it was not recorded."""
    is_clean: bool
    """Whether its code was committed."""

    @classmethod
    def all_in(cls, recorded: str | None) -> list[Revision]:
        """Return those that a header names: several where a file was continued, "7fb5530 and 8fceb94-dirty"."""
        names = re.split(r", | and ", recorded or UNRECORDED)
        return [
            cls(None, is_clean=False)
            if name == UNRECORDED
            else cls(name.removesuffix("-dirty"), is_clean=not name.endswith("-dirty"))
            for name in names
        ]


UNRECORDED = "an unrecorded one"
"""Stands in a header among revisions, where part of the file was made at one that nobody recorded."""


def headers(path: Path) -> list[dict[str, Any]]:
    """Return the headers in a file of results: one, or one for each run."""
    text = read_text(path)
    try:
        documents = [json.loads(text)]
    except ValueError:
        documents = [json.loads(line) for line in text.splitlines()]
    found = []
    for document in documents:
        if {"format", "links"} <= document.keys():  # commopt.cost wrote it, which knows no benchmarks
            found.append({"kind": "probe", **document["header"]})
        elif document.get("record") != "step":
            found.append(document.get("environment") or document.get("header") or document)
    return [each for each in found if {"kind", "date", "command"} & each.keys()]


def kind_in(header: Mapping[str, Any]) -> str | None:
    """Return which benchmark made a result: its "kind", or else the name of the module in its command."""
    kind = header.get("kind")
    if kind is None:
        words = shlex.split(header.get("command", ""))
        modules = [word for word in words if word.startswith(("bench.", "tests.")) and word not in _LAUNCHERS]
        kind = modules[0].rpartition(".")[2] if modules else None
    return kind if isinstance(kind, str) else None


_LAUNCHERS = ("bench.cluster",)


def origin(paths: Sequence[Path]) -> str:
    """Return a sentence: when and at which revisions the results in some files were made; "" of no files."""
    found = [header for path in paths for header in headers(path)]
    if not found:
        return ""
    days = sorted({header["date"][:10] for header in found if header.get("date")})
    when = f" {days[0]}" if len(days) == 1 else f" {days[0]} to {days[-1]}" if days else " on an unrecorded day"
    versions = sorted({header.get("commopt") or header.get("version") or "" for header in found} - {""})
    version = f" with commopt {', '.join(versions)}" if versions else ""
    revisions = {each for header in found for each in Revision.all_in(header.get("revision"))}
    clean = sorted(each.name for each in revisions if each.name and each.is_clean)
    changed = sorted(each.name for each in revisions if each.name and not each.is_clean)
    places = [f"at {', '.join(clean)}"] if clean else []
    places += [f"with uncommitted changes at {', '.join(changed)}"] if changed else []
    places += ["at a revision that was not recorded"] if Revision(None, is_clean=False) in revisions else []
    return f"Made{when}{version} {places[0] if len(places) == 1 else 'partly ' + ', partly '.join(places)}."


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
