"""Measure what messages and compression cost on a cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist

from commopt import lanes
from commopt.compress import Compressor
from commopt.cost import Curve, LinkKey, Links, WorkKey
from commopt.errors import ConfigurationError
from commopt.groups import Membership, join
from commopt.probe.budget import Measured, Repeats, Sweep, sweep
from commopt.probe.header import read_header
from commopt.probe.operations import COLLECTIVES, Collective, Group, groups_of
from commopt.probe.progress import Progress, shown
from commopt.probe.settings import Settings, nbytes_text
from commopt.probe.timing import AloneTimer, LaneTimer
from commopt.probe.work import Job, jobs_of, known_compressors

_WORK_SHARE = 0.3  # of the time; the links get the rest
_US = 1e6
_CALL = "commopt.probe.probe()"

Key = TypeVar("Key")


@dataclass(frozen=True)
class Survey:
    """What was measured, the same on every rank. `stopped`: the largest bytes of curves that ended early, by name."""

    links: Links
    stopped: Mapping[str, int]


def probe(
    group: Any = None,
    settings: Settings | None = None,
    *,
    compressors: Sequence[Compressor] | None = None,
    ranks_per_node: int | None = None,
    stream: TextIO | None = None,
) -> Links:
    """Measure every level of `group` (default: the world) and the compressors; collective, the same on all ranks.

    Without a process group, or alone in it, only compression is measured. compressors: None means all that the presets
    use. ranks_per_node: as in Communicator. stream: where rank 0 shows how far it is; default stderr.
    Raises ConfigurationError and MismatchError on every rank.
    """
    settings = Settings() if settings is None else settings
    return survey(
        group, settings, compressors=compressors, ranks_per_node=ranks_per_node, stream=stream, command=_CALL
    ).links


def survey(
    group: Any,
    settings: Settings,
    *,
    command: str,
    compressors: Sequence[Compressor] | None = None,
    ranks_per_node: int | None = None,
    stream: TextIO | None = None,
) -> Survey:
    """See `probe`; `command` is what the header says was run."""
    compressors = known_compressors() if compressors is None else tuple(compressors)
    membership = None
    if group is not None or (dist.is_available() and dist.is_initialized()):
        lanes.require_healthy()
        membership = join(group, ranks_per_node)
        membership.agree("a probe", settings=repr(settings), compressors=repr(compressors))
    surveyor = Surveyor(membership, settings, compressors, command)
    if not surveyor.curves:
        ranks = 1 if membership is None else len(membership.ranks)
        raise ConfigurationError(
            f"--only {','.join(settings.parts)} leaves nothing to measure on {ranks} rank(s) like these: add work, or "
            f"start more ranks or nodes"
        )
    if membership is not None and membership.global_rank != first_rank(membership):
        return surveyor.run(Progress())
    with shown(surveyor.curves, sys.stderr if stream is None else stream) as progress:
        return surveyor.run(progress)


class Surveyor:
    """One measurement of everything; collective over the membership, which is None for a process by itself."""

    def __init__(
        self, membership: Membership | None, settings: Settings, compressors: Sequence[Compressor], command: str
    ) -> None:
        self._membership = membership
        self._settings = settings
        self._command = command
        groups = [] if membership is None else groups_of(membership.team)
        self._groups = [group for group in groups if group.level in settings.parts]
        self._jobs = jobs_of(compressors) if "work" in settings.parts else []
        self._timer = AloneTimer(alone_device()) if membership is None else LaneTimer(membership)
        self._left_us = settings.budget_s * _US
        self._stopped: dict[str, int] = {}

    @property
    def curves(self) -> int:
        """How many curves there will be."""
        return len(self._groups) * len(COLLECTIVES) + len(self._jobs)

    def run(self, progress: Progress) -> Survey:
        """Measure, fit, and return what the first rank makes of it."""
        reserved_us = self._left_us * _WORK_SHARE if self._groups and self._jobs else 0.0
        self._left_us -= reserved_us
        links = self._measure_links(progress)
        self._left_us += reserved_us
        work = self._measure_work(progress)
        header = read_header(self._membership, self._timer.device, self._command)
        # On every rank, so that an error is raised on all; other machines might round a fit differently.
        fitted = Links(header, _fitted(links), _fitted(work))
        result = [Survey(fitted, self._stopped)]
        if self._membership is not None:  # its lane is idle
            source = first_rank(self._membership)
            dist.broadcast_object_list(result, src=source, group=self._membership.parent())
        return result[0]

    def _measure_links(self, progress: Progress) -> dict[LinkKey, Sweep]:
        found: dict[LinkKey, Sweep] = {}
        left = len(self._groups) * len(COLLECTIVES)
        for group in self._groups:
            for collective in COLLECTIVES.values():
                key = group.key(collective.primitive)
                sizes = collective.sizes(self._settings, group.ranks)
                found[key] = self._sweep(
                    link_text(key), sizes, left, partial(self._time_link, collective, group), progress
                )
                left -= 1
        return found

    def _time_link(self, collective: Collective, group: Group, nbytes: int, repeats: Repeats) -> Measured:
        timer = self._timer
        assert isinstance(timer, LaneTimer)  # only memberships have groups
        what = f"{link_text(group.key(collective.primitive))}, {nbytes} bytes"
        bind = partial(collective.bind, nbytes=nbytes, device=timer.device)
        alone = group.groups == 1
        return timer.time_collective(bind, group.team, what, repeats, closed=collective.closed, alone=alone)

    def _measure_work(self, progress: Progress) -> dict[WorkKey, Sweep]:
        found: dict[WorkKey, Sweep] = {}
        for place, job in enumerate(self._jobs):
            left = len(self._jobs) - place
            measure = partial(self._time_work, job)
            found[job.key] = self._sweep(work_text(job.key), job.sizes(self._settings), left, measure, progress)
        return found

    def _time_work(self, job: Job, nbytes: int, repeats: Repeats) -> Measured:
        return self._timer.time(partial(job.prepare, nbytes // torch.float32.itemsize, self._timer.device), repeats)

    def _sweep(
        self,
        what: str,
        sizes: Sequence[int],
        curves_left: int,
        measure: Callable[[int, Repeats], Measured],
        progress: Progress,
    ) -> Sweep:
        """Measure one curve in its share of the time that is left."""

        def told(nbytes: int, repeats: Repeats) -> Measured:
            progress.measuring(nbytes_text(nbytes))
            return measure(nbytes, repeats)

        progress.begin(what)
        wanted = Repeats(self._settings.warm_up, self._settings.iterations)
        found = sweep(sizes, self._left_us / curves_left, wanted, told)
        self._left_us -= found.spent_us
        largest = nbytes_text(found.points[-1][0])
        outcome = f"{len(found.points)} sizes up to {largest} in {found.spent_us / _US:.1f} s"
        if found.skipped:
            outcome += ", then its share of the time was used up"
            self._stopped[what] = found.points[-1][0]
        progress.end(outcome)
        return found


def first_rank(membership: Membership) -> int:
    """Return the global rank of the group's rank 0: it fits and reports."""
    return membership.ranks[membership.cluster.order.index(0)]


def alone_device() -> torch.device:
    """Return where a process without a group compresses: on its current GPU, if it has one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _fitted(sweeps: dict[Key, Sweep]) -> dict[Key, Curve]:
    return {key: Curve.fit(found.points) for key, found in sweeps.items()}


def link_text(key: LinkKey) -> str:
    """Return the name of a link's curve for people."""
    at_once = f", {key.groups} groups at once" if key.groups > 1 else ""
    return f"{key.level} {key.primitive} of {key.ranks} ranks{at_once}"


def work_text(key: WorkKey) -> str:
    """Return the name of a work's curve for people."""
    return f"{key.kind} {key.what}".rstrip()
