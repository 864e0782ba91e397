# SPDX-License-Identifier: Apache-2.0
"""Ranks that hang: the operation of each and the ranks behind, from torch's watchdog and flight recorder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from commopt.doctor.finding import Finding, error, info, warning
from commopt.doctor.flight_recorder import Dump, GroupProgress, RecordedCollective

MOST = 100_000
MOST_GROUPS = 4
MOST_SHOWN = 8
PAIRED = ("SEND", "RECV", "RECVANYSOURCE", "UNKNOWN")
"""Operations between two ranks, whose numbers need not agree."""
_CAUGHT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d{1,18}), OpType=(\w{1,60})"
    r"(?:, NumelIn=(\d{1,18}), NumelOut=(\d{1,18}))?"
)
_STATUS = re.compile(r"last enqueued (?:NCCL )?work: (-?\d{1,18}), last completed (?:NCCL )?work: (-?\d{1,18})", re.I)
_AT = re.compile(r"(?:at work|at work sequence id|at NCCL work): (\d{1,18})")
_WHO = re.compile(r"\[(?:PG (?:ID )?(\d+)(?: PG GUID ([\w.\-]+)(?:\(([^)\]]*)\))?)?[^\]]*? )?Rank (\d{1,7})\]")
_GLOBAL = re.compile(r"\[rank(\d{1,7})\]:")
_BARRIER = re.compile(r"\[Rank \d+\]: Ranks? ([\d, ]{1,200}) failed to pass monitoredBarrier in (\d+) ms")
_MISMATCH = re.compile(r"Detected mismatch between collectives on ranks\. (.{1,1000})")
_STUCK = re.compile(r"watchdog (?:thread )?got stuck for|Heartbeat monitor timed out", re.I)
_WORDS = (
    "atchdog",
    "ed NCCL work: ",
    "ed work: ",
    "monitoredBarrier",
    "Detected mismatch between",
    "Heartbeat monitor",
)

TRACE = "TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 (torch before 2.8: TORCH_NCCL_TRACE_BUFFER_SIZE)"
SAME_CALLS = (
    "make every rank call the same operations in the same order: look for a call under `if rank == 0`, loaders of "
    "unequal length, a branch that depends on data; TORCH_DISTRIBUTED_DEBUG=DETAIL for one run names the call"
)
LOST = "py-spy dump --pid PID on the ranks behind: loading data, saving, an exception, a rank of another length"
SILENT = f"python -m commopt doctor --log with the logs or dumps of all ranks; for dumps: {TRACE}"


@dataclass
class Hang:
    """Facts about a hang; false if there are none."""

    groups: dict[str, dict[int, GroupProgress]] = field(default_factory=dict)
    """Progress of the ranks by group; "" if a line does not name the group."""
    members: dict[str, list[int]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    reports: dict[str, tuple[str, str]] = field(default_factory=dict)
    """torch's own diagnoses, with remedies."""
    stuck: set[int] = field(default_factory=set)
    """Ranks whose watchdog itself was stuck; -1 for an unnamed one."""
    caught: dict[int, list[RecordedCollective]] = field(default_factory=dict)
    """Operations stopped by the watchdog, by rank: these lines do not name the group."""
    pairs: dict[str, list[int]] = field(default_factory=dict)
    """Unfinished messages between two ranks ("send 0->1", "SEND SeqNum 4"), and the ranks that wait in them."""
    doings: dict[int, str] = field(default_factory=dict)
    """What ranks did, by their flight records or by their last heartbeat."""
    reasons: dict[str, list[int]] = field(default_factory=dict)
    """Reasons of flight records, and the ranks that give them."""
    _cut: str = ""
    """The beginning of a line broken by a terminal."""

    def __bool__(self) -> bool:
        return bool(self.groups or self.reports or self.stuck or self.caught or self.pairs or self.doings)

    def add_dump(self, dump: Dump) -> None:
        """Add the dump of one rank's flight recorder."""
        for group, place in dump.groups.items():
            self.groups.setdefault(group, {})[dump.rank] = place
        for pair in dump.pairs:
            self.pairs.setdefault(pair, []).append(dump.rank)
        self.members.update(dump.members)
        self.names.update(dump.names)

    def add_line(self, line: str) -> None:
        """Add a line of a log, if it is a line of torch about a hang."""
        line, self._cut = self._cut + line, ""
        if not any(word in line for word in _WORDS):
            return
        if "WorkNCCL(" in line and ")" not in line.rpartition("WorkNCCL(")[2].replace("(ms)", "") and len(line) < 4000:
            self._cut = line.rstrip("\n")
            return
        for found in _CAUGHT.finditer(line):
            rank, _, _ = _origin_of(line[: found.start()])
            numels = [int(number) if number else None for number in found.groups()[2:]]
            if rank is not None and found[2] in PAIRED and len(self.pairs) < MOST:
                self.pairs.setdefault(f"{found[2]} SeqNum {found[1]}", []).append(rank)
            elif rank is not None and len(self.caught) < MOST:
                self.caught.setdefault(rank, []).append(RecordedCollective(int(found[1]), found[2], *numels))
        for found in _STATUS.finditer(line):
            self._status(line[: found.start()], int(found[1]), int(found[2]))
        for found in _BARRIER.finditer(line):
            remedy = f"{LOST}; a process that ended: look for its traceback"
            self.reports.setdefault(f"rank {found[1].strip()} did not reach the barrier in {found[2]} ms", ("", remedy))
        for found in _MISMATCH.finditer(line):
            self.reports.setdefault(found[1].strip(), ("", SAME_CALLS)) if len(self.reports) < MOST_GROUPS else None
        if _STUCK.search(line):
            rank, _, _ = _origin_of(line)
            self.stuck.add(-1 if rank is None else rank)

    def _status(self, before: str, enqueued: int, completed: int) -> None:
        rank, group, name = _origin_of(before)
        if rank is None or (group not in self.groups and len(self.groups) >= MOST):
            return
        at = _AT.search(before)
        if at is not None and any(rank in ranks and pair.endswith(f" {at[1]}") for pair, ranks in self.pairs.items()):
            return  # a message between two ranks, which count separately
        if name:
            self.names[group] = name
        place = self.groups.setdefault(group, {}).setdefault(rank, GroupProgress())
        if place.enqueued is None:  # the first line counts: later ones are written while the process ends
            place.enqueued = enqueued
            place.completed = completed
        if at is not None and place.waits is None and int(at[1]) <= enqueued:
            stopped = [one for one in self.caught.get(rank, []) if one.seq == int(at[1])]
            place.waits = stopped[0] if stopped else RecordedCollective(int(at[1]), "operation")

    def merged_groups(self) -> dict[str, dict[int, GroupProgress]]:
        """Return the groups with the operations stopped by the watchdog, which are logged in separate lines."""
        found = {group: dict(ranks) for group, ranks in self.groups.items()}
        for rank, stopped in self.caught.items():
            known = [ranks[rank] for ranks in found.values() if rank in ranks]
            for one in stopped[:1]:
                same = [place for place in known if place.next == one.seq]
                if not same:
                    found.setdefault("", {})[rank] = GroupProgress(one)
                elif same[0].waits is None or same[0].waits.name == "operation":
                    same[0].waits = one
        return found


def _origin_of(text: str) -> tuple[int | None, str, str]:
    """Return rank, group and group name of the last message that begins in `text`; the rank may be None."""
    found = list(_WHO.finditer(text))
    own = list(_GLOBAL.finditer(text))
    if not found:
        return (int(own[-1][1]) if own else None), "", ""
    last = found[-1]
    # The line begins with the rank in the job; the brackets contain the rank in the group.
    return int(own[-1][1] if own else last[4]), last[2] or last[1] or "", last[3] or ""


def hangs(hang: Hang) -> Iterator[Finding]:
    """Yield findings about the ranks' operations, groups with differences first."""
    for text, (_, remedy) in hang.reports.items():
        yield error(text[:400], "all ranks in the same operation", remedy)
    groups = hang.merged_groups().items()
    found = [finding for group, ranks in groups if (finding := _group(hang, group, ranks)) is not None]
    found.sort(key=lambda finding: finding.confidence != "high")
    yield from found[:MOST_GROUPS]
    if found[MOST_GROUPS:]:
        yield info(f"{len(found) - MOST_GROUPS} more groups of ranks that wait", "no rank that waits")
    if hang.pairs:
        shown = "; ".join(f"rank {_list(sorted(set(ranks)))} waits in {pair}" for pair, ranks in hang.pairs.items())
        expected = "each send to meet its receive: the rank at the other end is elsewhere, or has ended"
        yield (info if found else error)(shown[:400], expected, f"{LOST}; {SILENT}", "medium")
    if hang.stuck:
        ranks = ", ".join(map(str, sorted(rank for rank in hang.stuck if rank >= 0))) or "not named"
        expected = "a running watchdog: a call of CUDA did not return, or a thread holds Python's lock"
        remedy = "py-spy dump --native --pid PID; dmesg | grep -i xid; TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, if it is slow"
        yield warning(f"torch's own watchdog was stuck (rank {ranks})", expected, remedy, "medium")
    yield from _records(hang)


def _records(hang: Hang) -> Iterator[Finding]:
    """Yield what flight records say: their reasons, and what ranks did, those that were alone in it first."""
    for reason, ranks in list(hang.reasons.items())[:MOST_GROUPS]:
        yield info(f"rank {_list(sorted(ranks))} wrote: {reason}", "for reference")
    alike: dict[str, list[int]] = {}
    for rank, doing in sorted(hang.doings.items()):
        alike.setdefault(doing, []).append(rank)
    for doing, ranks in sorted(alike.items(), key=lambda each: len(each[1]))[:MOST_SHOWN]:
        yield info(f"rank {_list(ranks)}: {doing}", "for reference")


def _group(hang: Hang, group: str, ranks: Mapping[int, GroupProgress]) -> Finding | None:
    """Return the finding of one group; None if no rank waits."""
    at = {rank: place.next for rank, place in ranks.items() if place.next is not None}
    waiting = {rank: place.waits for rank, place in ranks.items() if place.waits is not None}
    if not waiting:
        return None
    name = f"group {hang.names.get(group) or group}: " if group not in ("", "0") else ""
    lowest = min(at.values())
    behind = sorted(rank for rank, seq in at.items() if seq == lowest)
    absent = [rank for rank in behind if ranks[rank].waits is None]
    shown = name + _shown(ranks)
    if first := _first_difference(ranks):
        return error(f"{shown}; the first difference: {first}", "the same operations on every rank", SAME_CALLS)
    if absent and len(absent) < len(ranks):
        expected = f"ranks in one operation: rank {_list(absent)} is behind, and has not called SeqNum {lowest}"
        return error(shown, expected, f"{LOST}; {SAME_CALLS}")
    if len(behind) < len(at):
        called = "; ".join(f"rank {rank} {one.shown}" for rank in behind[:2] if (one := waiting.get(rank)))
        expected = f"the same operations on every rank: rank {_list(behind)} is behind"
        return error(f"{shown}; the first difference: at SeqNum {lowest} or before it ({called})", expected, SAME_CALLS)
    silent = _silent(hang, group, ranks)
    one = next(iter(waiting.values()))
    if silent:
        expected = f"every rank in {one.shown}: nothing is known of rank {_list(silent)}"
        return error(shown, expected, f"{LOST}; {SILENT}", "medium")
    if len(ranks) == 1:
        expected = "every rank in the same operation: the other ranks are not in this log"
        return error(shown, expected, SILENT, "medium")
    expected = "it to end: all these ranks are in the same operation, so the network, or a rank without a log, is slow"
    remedy = f"NCCL_DEBUG=INFO for one run, and its log to the doctor; python -m commopt probe; {SILENT}"
    return error(shown, expected, remedy, "medium")


def _silent(hang: Hang, group: str, ranks: Mapping[int, GroupProgress]) -> list[int]:
    """Return the members without a log line: from the members in the dumps, else from gaps in the rank numbers."""
    # gloo's recorder gives the group of all ranks no name.
    members: Iterable[int] = hang.members.get(group) or (hang.members.get("", []) if group == "0" else [])
    if not members and group in ("", "0"):
        members = range(max(ranks) + 1)
    return sorted(set(members) - set(ranks))


def _first_difference(ranks: Mapping[int, GroupProgress]) -> str | None:
    """Return the first operation at which two ranks are known to differ."""
    called: dict[int, dict[int, RecordedCollective]] = {}
    for rank, place in ranks.items():
        for seq, one in (place.history or ({} if place.waits is None else {place.waits.seq: place.waits})).items():
            called.setdefault(seq, {})[rank] = one
    for _, by_rank in sorted(called.items()):
        kinds: dict[tuple[object, ...], list[int]] = {}
        for rank, one in by_rank.items():
            if one.name != "operation":
                # Unequal lengths are wrong in some operations only.
                numels = (one.numel_in, one.numel_out) if one.kind in ("ALLREDUCE", "BROADCAST", "REDUCE") else ()
                kinds.setdefault((one.kind, *numels), []).append(rank)
        if len(kinds) > 1:
            return "; ".join(f"rank {_list(some)} {by_rank[some[0]].shown}" for some in list(kinds.values())[:3])
    return None


def _shown(ranks: Mapping[int, GroupProgress]) -> str:
    """As in "rank 1 waits in SeqNum 5 ALLREDUCE of 1 element; rank 0 has called nothing after SeqNum 4"."""
    alike: dict[str, list[int]] = {}
    for rank, place in sorted(ranks.items()):
        if place.waits is not None:
            alike.setdefault(f"waits in {place.waits.shown}", []).append(rank)
        elif place.completed is not None:
            alike.setdefault(f"has called nothing after SeqNum {place.completed}", []).append(rank)
    parts = [f"rank {_list(some)} {words}" for words, some in alike.items()]
    return "; ".join(parts[:6]) + (f"; and {len(parts) - 6} more" if len(parts) > 6 else "")


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
