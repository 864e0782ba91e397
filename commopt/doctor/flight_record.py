# SPDX-License-Identifier: Apache-2.0
"""commopt's flight records: what each rank of a job did when it failed, or when ranks had waited for long.

A rank that wrote none, as it was stopped or killed, is known from its last heartbeat, which the others' files have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from commopt.doctor.flight_recorder import GroupProgress, RecordedCollective
from commopt.doctor.hang import Hang
from commopt.document import FLIGHT_FORMAT, FLIGHT_RECORD, parse, plain_file, read_as, read_text, reason_of
from commopt.errors import ConfigurationError

_MARK = f'"{FLIGHT_RECORD}"'.encode()
_LONGEST = 300
_LAUNCHED = "kernels"  # how the title of a task begins that is known by its kernels only


class RecordedTask(NamedTuple):
    """A task under way on a lane."""

    membership: str
    owner: str
    sequence: int
    title: str
    numel: int


@dataclass(frozen=True)
class Activity:
    """What a rank did, by its own record or by its last heartbeat."""

    phase: str
    stack: tuple[str, ...]
    clients: Any
    """Numbers of the latest task, step and bucket, by "membership client"."""
    lanes: Any
    """RecordedTask under way by device."""
    host: str = ""
    pid: int = 0
    number: int = 0
    silent_s: float | None = None


class FlightRecord(NamedTuple):
    """The flight record of one rank."""

    rank: int
    members: Any
    """Ranks by membership."""
    reasons: tuple[str, ...]
    own: Activity
    peers: Mapping[int, Activity]


def read_record(path: Path) -> FlightRecord | None:
    """Return a flight record; None for another file. Raises ConfigurationError for one that is damaged."""
    try:
        if str(path).startswith(("/dev/fd/", "/dev/stdin")):
            return None
        with plain_file(path).open("rb") as file:
            if _MARK not in file.read(64):
                return None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read ({reason_of(error)}); pass a flight record or a log") from None
    fix = "pass the file that a rank wrote"
    found = parse(read_text(path), str(path), fix)
    if not isinstance(found, dict) or found.get(FLIGHT_RECORD) != FLIGHT_FORMAT:
        version = found.get(FLIGHT_RECORD) if isinstance(found, dict) else None
        raise ConfigurationError(f"{path}: format {version!r}, but this commopt reads {FLIGHT_FORMAT}; {fix}")
    peers = {
        int(rank): read_as(Activity, beat, f"{path}, peers of rank {rank}")
        for rank, beat in _table(found.get("peers"), path)
        if rank.isdecimal() and isinstance(beat, dict) and "phase" in beat
    }
    rank = read_as(int, found.get("rank"), f"{path}, rank")
    reasons = read_as(tuple[str, ...], found.get("reasons"), f"{path}, reasons")
    members = dict(_table(found.get("members"), path))
    return FlightRecord(rank, members, reasons, read_as(Activity, found, str(path)), peers)


def _table(value: object, where: object) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{where}: {str(value)[:60]!r} instead of an object; pass the file that a rank wrote")
    yield from value.items()


def add_records(hang: Hang, records: Iterable[FlightRecord]) -> None:
    """Add the records of a job to what is known of its hang."""
    written = {record.rank: record for record in records}
    known = {rank: record.own for rank, record in written.items()}
    for record in written.values():
        for rank, beat in record.peers.items():
            if rank not in written and (rank not in known or beat.number > known[rank].number):
                known[rank] = beat
        for name, ranks in record.members.items():
            hang.members[name] = list(read_as(tuple[int, ...], ranks, f"members of {name}"))
        for reason in record.reasons:
            hang.reasons.setdefault(reason.partition("\n")[0][: 2 * _LONGEST], []).append(record.rank)
    tasks = {rank: list(_tasks(activity, f"rank {rank}")) for rank, activity in known.items()}
    farthest: dict[str, int] = {}
    for rank in written:
        for task in tasks[rank]:
            group = f"{task.membership} {task.owner}"
            farthest[group] = max(task.sequence, farthest.get(group, -1))
    for rank, activity in known.items():
        hang.doings[rank] = _doing(activity)
        for group, numbers in _table(activity.clients, f"clients of rank {rank}"):
            submitted = _numbers(numbers, f"clients of rank {rank}")[0]
            # A beat is older than a record: what its rank waited in then, it may have left since.
            at = [task for task in tasks[rank] if rank in written or task.sequence == farthest.get(group)]
            hang.groups.setdefault(group, {})[rank] = _progress(group, submitted, at)
            name = group.partition(" ")
            hang.names[group] = name[2]
            hang.members.setdefault(group, hang.members.get(name[0], []))


def _numbers(value: object, where: str) -> tuple[int, int, int]:
    found: tuple[int, int, int] = read_as(tuple[int, int, int], value, where)
    return found


def _tasks(activity: Activity, where: str) -> Iterator[RecordedTask]:
    for _, task in _table(activity.lanes, f"lanes of {where}"):
        yield read_as(RecordedTask, task, f"lanes of {where}")


def _progress(group: str, submitted: int, under_way: list[RecordedTask]) -> GroupProgress:
    mine = [task for task in under_way if f"{task.membership} {task.owner}" == group]
    if mine:
        task = mine[0]
        name = "operation" if task.title.startswith(_LAUNCHED) else task.title[:_LONGEST]
        waits = RecordedCollective(task.sequence, name, task.numel)
        return GroupProgress(waits, submitted, task.sequence - 1)
    return GroupProgress(None, submitted, None if under_way else submitted)


def _doing(activity: Activity) -> str:
    """As in "in phase evaluation, step 9, at evaluate (train.py:30) < main (train.py:50)"."""
    latest = max((_numbers(each, "clients")[1] for _, each in _table(activity.clients, "clients")), default=-1)
    step = f", step {latest}" if latest >= 0 else ""
    silent = f", last beat {activity.silent_s:.0f} s before" if activity.silent_s is not None else ""
    return f"phase {activity.phase}{step}, at {' < '.join(activity.stack[:6])[:_LONGEST]}{silent}"
