# SPDX-License-Identifier: Apache-2.0
"""Dumps of torch's flight recorder: the last collective operations of one rank, as a pickle or as JSON.

torch writes them when its watchdog stops a job (`TORCH_NCCL_DUMP_ON_TIMEOUT=1`, `TORCH_FR_BUFFER_SIZE=2000`, in older
versions `TORCH_NCCL_TRACE_BUFFER_SIZE`). Most dumps are pickles, and the process that could have written JSON is gone,
so pickles are read; without pickle.load, which runs code that the file names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from commopt.doctor.plain_pickle import load_plain
from commopt.document import plain_file, reason_of
from commopt.errors import ConfigurationError

MOST_BYTES = 256 << 20
MOST_ENTRIES = 200_000
MOST_PAIRS = 100


class RecordedCollective(NamedTuple):
    """A collective operation of one group, as torch recorded it."""

    seq: int
    """Its number in the group, counted by each rank."""
    name: str
    """ "ALLREDUCE", "_ALLGATHER_BASE"; in dumps "all_reduce"."""
    numel_in: int | None = None
    numel_out: int | None = None

    @property
    def kind(self) -> str:
        """The name in a form for comparison: watchdog and recorder write it differently."""
        return self.name.replace("_", "").upper()

    @property
    def shown(self) -> str:
        """As in "SeqNum 5 ALLREDUCE of 1 element"."""
        numels = [number for number in dict.fromkeys((self.numel_in, self.numel_out)) if number is not None]
        of = f" of {' to '.join(map(str, numels))} element{'' if numels == [1] else 's'}" if numels else ""
        return f"SeqNum {self.seq} {self.name}{of}"


@dataclass
class GroupProgress:
    """Progress of one rank in a group."""

    waits: RecordedCollective | None = None
    """The operation that the rank waits in."""
    enqueued: int | None = None
    """Number of the last operation that it called."""
    completed: int | None = None
    history: dict[int, RecordedCollective] = field(default_factory=dict)
    """Operations that the recorder still had, by number."""

    @property
    def next(self) -> int | None:
        """The number of the operation that the rank waits in or must call next; None if unknown."""
        if self.waits is not None:
            return self.waits.seq
        return None if self.completed is None else self.completed + 1


class Dump(NamedTuple):
    """Content of one rank's recorder."""

    rank: int
    groups: dict[str, GroupProgress]
    """Progress by group ("0")."""
    members: dict[str, list[int]]
    """The ranks of each group, if the dump has them."""
    names: dict[str, str]
    """torch's name of each group: "default_pg"."""
    pairs: list[str]
    """Unfinished messages between two ranks: "send 0->1"."""


def read_dump(path: Path) -> Dump | None:
    """Return the content of a dump; None if the file is not a dump but, for example, a log.

    Raises ConfigurationError for a pickle or a recorder's JSON that cannot be read.
    """
    try:
        if str(path).startswith(("/dev/fd/", "/dev/stdin")):
            return None
        with plain_file(path).open("rb") as file:
            head = file.read(2)
            if not (head[:1] == b"\x80" and head[1:] <= b"\x05") and not head.lstrip().startswith(b"{"):
                return None
            data = head + file.read(MOST_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read ({reason_of(error)}); pass a log, or a dump") from None
    is_pickle = head[:1] == b"\x80"
    try:
        if len(data) > MOST_BYTES:
            raise ValueError(f"it is larger than {MOST_BYTES >> 20} MiB")
        content = load_plain(BytesIO(data)) if is_pickle else json.loads(data)
        if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
            raise ValueError("it has no entries of a flight recorder")
        return _dump(content, path.name)
    except (ValueError, RecursionError) as error:
        if not is_pickle and b'"pg_config"' not in data:
            return None  # a log whose first line is JSON
        why = str(error).splitlines()[0]
        raise ConfigurationError(
            f"{path} is no dump of torch's flight recorder: {why}; pass the file that torch wrote"
        ) from None


def _dump(content: Mapping[str, Any], name: str) -> Dump:
    numbers = re.findall(r"\d+", name.partition(".")[0] if re.search(r"\d", name.partition(".")[0]) else name)
    rank = _number(content.get("rank"))
    if rank is None:
        if not numbers:
            raise ValueError("neither its content nor its name has the number of the rank")
        rank = int(numbers[-1][:9])
    dump = Dump(rank, {}, {}, {}, [])
    for group, config in _items(content.get("pg_config")):
        ranks = config.get("ranks")
        found = re.findall(r"\d{1,9}", ranks) if isinstance(ranks, str) else ranks if isinstance(ranks, list) else []
        dump.members[group] = [int(one) for one in found[:MOST_ENTRIES] if isinstance(one, str | int)]
        dump.names[group] = str(config.get("desc") or config.get("name") or group)[:60]
    done: dict[str, int] = {}
    for entry in content["entries"][-MOST_ENTRIES:]:
        if not isinstance(entry, dict):
            continue
        done_with = entry.get("state") == "completed" or entry.get("retired") is True
        if entry.get("is_p2p") is True:
            if not done_with and len(dump.pairs) < MOST_PAIRS:
                dump.pairs.append(str(entry.get("profiling_name", "unknown")).rpartition(":")[2][:60])
            continue
        seq, group_of = _number(entry.get("collective_seq_id", entry.get("seq_id"))), entry.get("process_group")
        if seq is None or not isinstance(group_of, list | tuple) or not group_of:
            continue
        group = str(group_of[0])[:60]
        place = dump.groups.setdefault(group, GroupProgress())
        called = str(entry.get("profiling_name", "unknown")).rpartition(":")[2][:60]
        one = RecordedCollective(seq, called, _numel(entry.get("input_sizes")), _numel(entry.get("output_sizes")))
        place.history.setdefault(seq, one)
        place.enqueued = max(seq, place.enqueued or 0)
        if done_with:
            done[group] = max(seq, done.get(group, 0))
        elif place.waits is None or seq < place.waits.seq:
            place.waits = one
    for group, status in _items(content.get("pg_status")):
        place = dump.groups.setdefault(group, GroupProgress())
        place.enqueued = _number(status.get("last_enqueued_collective"), place.enqueued)
        place.completed = _number(status.get("last_completed_collective"))
    for group, place in dump.groups.items():
        place.completed = done.get(group) if place.completed is None else place.completed
    return dump


def _items(table: object) -> list[tuple[str, Mapping[str, Any]]]:
    found = table.items() if isinstance(table, dict) else ()
    return [(str(key)[:60], value) for key, value in found if isinstance(value, dict)]


def _number(value: object, otherwise: int | None = None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


def _numel(sizes: object) -> int | None:
    """Return the number of elements of all tensors together."""
    if not isinstance(sizes, list | tuple):
        return None
    shapes = [shape for shape in sizes if isinstance(shape, list | tuple)]
    if not all(isinstance(side, int) for shape in shapes for side in shape):
        return None
    return sum(prod(shape) for shape in shapes)
