# SPDX-License-Identifier: Apache-2.0
"""Measure what messages and compression cost on a cluster, within a budget of time."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import PurePath
from typing import Any, TextIO

import torch

from commopt import lanes
from commopt.compress import Compressor
from commopt.cost import Curve, LinkKey, Links, LinksHeader, WorkKey
from commopt.errors import ConfigurationError
from commopt.groups import Membership, join
from commopt.probe.collectives import COLLECTIVES, Collective
from commopt.probe.network import find_network, looks_for_sites
from commopt.probe.operations import (
    ConcurrentGroups,
    ProbeOptions,
    TimedWork,
    call_of,
    groups_of,
    known_compressors,
    work_of,
)
from commopt.probe.sites import LEAST_NODES
from commopt.probe.timing import LaneTimer, Measured, Repeats, sweep
from commopt.version import __version__, revision
from topology.network import Network

_WORK_SHARE = 0.3  # of the time; the links get the rest
_SITES_SHARE = 0.5  # at most, before all else
_US = 1e6
_CALL = "commopt.probe.probe()"
_TOLD_VARIABLES = ("BENCH_CLUSTER_RATE", "COMMOPT_RANKS_PER_NODE", "COMMOPT_SITE", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Survey:
    """The result of a probe, the same on every rank. `stopped`: the largest bytes of curves that ended early."""

    links: Links
    stopped: Mapping[str, int]


def probe(
    group: Any = None,
    options: ProbeOptions | None = None,
    *,
    compressors: Sequence[Compressor] | None = None,
    ranks_per_node: int | None = None,
    stream: TextIO | None = None,
) -> Links:
    """Measure every level of `group` (default: the world) and the compressors; collective, the same on all ranks.

    Alone in it, only compression is measured. compressors: None means all that the presets use. ranks_per_node: as in
    Communicator. stream: where rank 0 shows how far it is; default stderr.
    Raises ConfigurationError and MismatchError on every rank.
    """
    return survey(join(group, ranks_per_node), options or ProbeOptions(), _CALL, compressors, stream).links


def survey(
    membership: Membership,
    options: ProbeOptions,
    command: str,
    compressors: Sequence[Compressor] | None = None,
    stream: TextIO | None = None,
) -> Survey:
    """Measure as `probe` does; `command` is the one that the header shows."""
    compressors = known_compressors() if compressors is None else tuple(compressors)
    lanes.require_healthy()
    membership.agree("a probe", settings=repr(options), compressors=repr(compressors))
    prober = LinkProber(membership, options, compressors, sys.stderr if stream is None else stream)
    if not prober.curves and not prober.looks_for_sites:
        raise ConfigurationError(
            f"--only {','.join(options.parts)} leaves nothing to measure on {len(membership.ranks)} rank(s) like "
            f"these: add work, or start more ranks or nodes; sites are looked for from {LEAST_NODES} nodes on, where "
            f"nobody told any"
        )
    return prober.run(command)


class LinkProber:
    """One measurement of everything; collective over the membership."""

    def __init__(
        self, membership: Membership, options: ProbeOptions, compressors: Sequence[Compressor], stream: TextIO
    ) -> None:
        self._membership = membership
        self._options = options
        self._groups = [group for group in groups_of(membership.team) if group.level.partition(".")[0] in options.parts]
        self._work = work_of(compressors) if "work" in options.parts else []
        self._timer = LaneTimer(membership)
        self._left_us = options.budget_s * _US
        self._stopped: dict[str, int] = {}
        self._done = 0
        # The rank that is first in the group fits and reports.
        self._first_rank = membership.ranks[membership.cluster.order.index(0)]
        self._reports = membership.global_rank == self._first_rank
        self._stream = stream if self._reports else None

    @property
    def looks_for_sites(self) -> bool:
        """Whether sites are to be found."""
        return "sites" in self._options.parts and looks_for_sites(self._membership)

    @property
    def curves(self) -> int:
        """How many curves there will be."""
        return len(self._groups) * len(COLLECTIVES) + len(self._work)

    def run(self, command: str) -> Survey:
        """Measure, fit, and return the curves of the first rank, and the sites that all ranks found."""
        network = self._network()
        reserved_us = self._left_us * _WORK_SHARE if self._groups and self._work else 0.0
        self._left_us -= reserved_us
        links: dict[LinkKey, Curve] = {}
        curves = [(group, collective) for group in self._groups for collective in COLLECTIVES.values()]
        for place, (group, collective) in enumerate(curves):
            key = group.key(collective.name)
            sizes = self._options.sizes_of(collective, group.ranks)
            links[key] = self._fit(link_text(key), sizes, len(curves) - place, partial(self._time, collective, group))
        self._left_us += reserved_us
        work: dict[WorkKey, Curve] = {}
        for place, each in enumerate(self._work):
            sizes, measure = each.sizes(self._options), partial(self._time_work, each)
            work[each.key] = self._fit(work_text(each.key), sizes, len(self._work) - place, measure)
        # Fitted on every rank, so that an error is raised on all; other machines might round a fit differently.
        found = Links(read_header(self._membership, self._timer.device, command), links, work, network=network)
        mine: dict[str, Any] = {"links": found.as_text(), "stopped": self._stopped} if self._reports else {}
        everyone = self._membership.exchange("what a probe has found", **mine)
        first = everyone[self._membership.ranks.index(self._first_rank)]
        return Survey(Links.read(first["links"], "what the first rank has found"), dict(first["stopped"]))

    def _network(self) -> Network | None:
        if not self.looks_for_sites:
            return None
        share = _SITES_SHARE if self.curves else 1.0
        network = find_network(self._membership, share * self._left_us / _US, self._say)
        self._left_us -= network.seconds * _US
        return network

    def _say(self, text: str) -> None:
        if self._stream is not None:
            print(text, file=self._stream, flush=True)

    def _time(self, collective: Collective, group: ConcurrentGroups, nbytes: int, repeats: Repeats) -> Measured:
        what = f"{link_text(group.key(collective.name))}, {nbytes} bytes"
        bind = partial(call_of, collective, nbytes, self._timer.device)
        alone = group.groups == 1
        return self._timer.time_collective(bind, group.team, what, repeats, closed=collective.closed, alone=alone)

    def _time_work(self, work: TimedWork, nbytes: int, repeats: Repeats) -> Measured:
        return self._timer.time(partial(work.prepare, nbytes // torch.float32.itemsize, self._timer.device), repeats)

    def _fit(
        self, what: str, sizes: Sequence[int], curves_left: int, measure: Callable[[int, Repeats], Measured]
    ) -> Curve:
        """Measure one curve in its share of the time that is left."""
        wanted = Repeats(self._options.warm_up, self._options.iterations)
        found = sweep(sizes, self._left_us / curves_left, wanted, measure)
        self._left_us -= found.spent_us
        self._done += 1
        largest = found.points[-1][0]
        outcome = f"{len(found.points)} sizes up to {nbytes_text(largest)} in {found.spent_us / _US:.1f} s"
        if found.skipped:
            outcome += ", then its share of the time was used up"
            self._stopped[what] = largest
        self._say(f"[{self._done:{len(str(self.curves))}}/{self.curves}] {what}: {outcome}")
        return Curve.fit(found.points)


def read_header(membership: Membership, device: torch.device, command: str) -> LinksHeader:
    """Return the time, the place and the versions of a measurement; `command` as `command_line` returns it."""
    return LinksHeader(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        hosts=membership.cluster.names,
        nodes=tuple(len(node) for node in membership.cluster.nodes),
        backend=membership.team.backend(device),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
        torch=f"{torch.__version__}, Python {platform.python_version()}",
        command=command,
        commopt=__version__,
        revision=revision(),
    )


def command_line(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """Return how the probe was started: with the variables that tell what was measured, and no folder of this machine.

    BENCH_CLUSTER_RATE is the rate of an emulated network.
    """
    variables = [f"{name}={environ[name]}" for name in _TOLD_VARIABLES if environ.get(name)]
    shown = [PurePath(argument).name if "/" in argument else argument for argument in arguments]
    return " ".join([*variables, shlex.join(["python", "-m", "commopt", "probe", *shown])])


def link_text(key: LinkKey) -> str:
    """Return the name of a link's curve for people."""
    at_once = f", {key.groups} groups at once" if key.groups > 1 else ""
    return f"{key.level} {key.primitive} of {key.ranks} ranks{at_once}"


def work_text(key: WorkKey) -> str:
    """Return the name of a work's curve for people."""
    return f"{key.kind} {key.what}".rstrip()


def nbytes_text(nbytes: float) -> str:
    """Return `nbytes` for people: "4 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"
