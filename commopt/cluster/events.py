# SPDX-License-Identifier: Apache-2.0
"""What happens to single nodes' links: from the start on, or at a time of the run, as texts and as plain data."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from commopt.cluster.link import EmulatedLink, duration_us
from commopt.cluster.network import EmulatedNetwork

SHORTEST_S = 0.1
"""Changes are made by commands, and not in time if they follow each other faster."""

_FORM = re.compile(r"([0-9]{1,6})(?:@([^@/+:]+)(?:/([^@/+:]+))?(?:\+([^@/+:]+))?)?(?::(.*))?")
_NODE, _CUT, _FLAP = "1:rate=50mbit,delay=5ms or 1@30s+5s:loss=1%", "1@30s or 1@30s+5s", "1@30s/2s or 1@30s/2s+20s"


@dataclass(frozen=True)
class LinkEvent:
    """Another state of one node's link, for a time.

    start_s: when it begins, in seconds after the ranks of all nodes were started.
    for_s: how long it lasts; infinite: until the run ends.
    link: the link meanwhile; None: it is down, and all packets are lost.
    period_s: how long it is so and then as before, in turn; 0: so all the time.
    """

    node_rank: int
    start_s: float
    for_s: float = math.inf
    link: EmulatedLink | None = None
    period_s: float = 0.0

    def is_on(self, elapsed_s: float) -> bool:
        """Return whether the link is so at this moment."""
        since_s = elapsed_s - self.start_s
        return 0 <= since_s < self.for_s and (not self.period_s or since_s // self.period_s % 2 == 0)


def read_links(
    options: Sequence[str], nodes: int, texts: Mapping[str, str]
) -> tuple[tuple[EmulatedLink, ...], tuple[LinkEvent, ...]]:
    """Return the links of all nodes at the start, and their changes. Raises ValueError, as the functions below do.

    options: such as "1:rate=50mbit" and "1@30s+5s:delay=5ms,loss=1%".
    texts: rate, delay and loss of every link of which no option says more.
    """
    read = [(*_read("--node", option, nodes, _NODE, has_state=True), option) for option in options]
    own: list[dict[str, str]] = [dict(texts) for _ in range(nodes)]
    for event, state, option in read:
        if "@" not in option.partition(":")[0]:
            own[event.node_rank].update(_assignments(option, state, texts))
    events = [
        LinkEvent(
            event.node_rank,
            event.start_s,
            event.for_s,
            EmulatedLink.parse(**{**own[event.node_rank], **_assignments(option, state, texts)}),
        )
        for event, state, option in read
        if "@" in option.partition(":")[0]
    ]
    return tuple(EmulatedLink.parse(**each) for each in own), tuple(events)


def read_cuts(cuts: Sequence[str], flaps: Sequence[str], nodes: int) -> tuple[LinkEvent, ...]:
    """Return the times at which links are down: "1@30s+5s", or again and again: "1@30s/2s+20s"."""
    return (
        *(_read("--cut", text, nodes, _CUT, is_timed=True)[0] for text in cuts),
        *(_read("--flap", text, nodes, _FLAP, is_timed=True, has_period=True)[0] for text in flaps),
    )


def _read(
    name: str,
    text: str,
    nodes: int,
    example: str,
    *,
    is_timed: bool = False,
    has_period: bool = False,
    has_state: bool = False,
) -> tuple[LinkEvent, str]:
    match = _FORM.fullmatch(text)
    if match is None or (is_timed and match[2] is None) or (bool(match[3]), bool(match[5])) != (has_period, has_state):
        raise ValueError(f"{name} {text!r:.60} is not of the form {example}")
    if int(match[1]) >= nodes:
        raise ValueError(f"{name} {text!r:.60} names node {match[1]} of {nodes}; pass one from 0 to {nodes - 1}")
    what = f"{name} {text!r:.60}: time"
    start, period, lasts = (duration_us(what, each or "0s", "30s") / 1e6 for each in match.group(2, 3, 4))
    for given, value in ((match[3], period), (match[4], lasts)):
        if given and value < SHORTEST_S:
            raise ValueError(f"{what} {given} is too short to be kept; pass {SHORTEST_S * 1000:g}ms or more")
    return LinkEvent(int(match[1]), start, lasts if match[4] else math.inf, None, period), match[5] or ""


def _assignments(option: str, state: str, known: Mapping[str, str]) -> dict[str, str]:
    found = dict(each.partition("=")[::2] for each in state.split(","))
    for name in found:
        if name not in known:
            raise ValueError(f"--node {option!r:.60} sets {name!r:.40}; it may set {', '.join(known)}, as in {_NODE}")
    return found


class StartSignal:
    """The moment at which all nodes have started their ranks: when no process has `writing` open any more."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._started_s: float | None = None

    def close_writing(self) -> None:
        """Leave `writing` to the nodes."""
        os.close(self.writing)
        self.writing = -1

    def elapsed_s(self) -> float | None:
        """Return how long ago it was, None before."""
        if self._started_s is None:
            with suppress(BlockingIOError):
                os.read(self._reading, 1)
                self._started_s = time.monotonic()
        return None if self._started_s is None else time.monotonic() - self._started_s

    def close(self) -> None:
        """Close what is open."""
        for descriptor in (self._reading, self.writing):
            if descriptor >= 0:
                os.close(descriptor)


@dataclass(frozen=True)
class _State:
    """Of one link; `link` is None while it is the one of the start."""

    is_up: bool = True
    link: EmulatedLink | None = None


class LinkTimeline:
    """Makes the events of a run come about."""

    def __init__(self, network: EmulatedNetwork, events: Sequence[LinkEvent]) -> None:
        self._network, self._events = network, events
        self._states = {event.node_rank: _State() for event in events}

    def follow(self, elapsed_s: float) -> Iterator[str]:
        """Give every link the state it has now; yield what was done, in words. Raises ClusterUnavailableError."""
        for node_rank in self._states:
            on = [event for event in self._events if event.node_rank == node_rank and event.is_on(elapsed_s)]
            links = [event.link for event in on if event.link is not None]
            yield from self._make(node_rank, _State(len(links) == len(on), links[-1] if links else None))

    def undo(self) -> None:
        """Give every link the state it had at the start."""
        for node_rank in self._states:
            list(self._make(node_rank, _State()))

    def _make(self, node_rank: int, state: _State) -> Iterator[str]:
        before, self._states[node_rank] = self._states[node_rank], state
        if state.is_up != before.is_up:
            self._network.connect(node_rank, up=state.is_up)
            yield f"link of node {node_rank} {'up' if state.is_up else 'down'}"
        if state.link != before.link:
            self._network.reshape(node_rank, state.link or self._network.links[node_rank])
            yield f"link of node {node_rank} {'changed' if state.link else 'as at the start'}"
