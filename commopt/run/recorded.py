# SPDX-License-Identifier: Apache-2.0
"""What a model's training records for the verdict after it: blocks of steps, gathered once, where training ends."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import ref

import torch

from commopt.aggregate import Aggregator
from commopt.attached.insight import report_on
from commopt.cost import Links
from commopt.errors import TransportError
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.groups.agreement import exchange_facts
from commopt.hooks import CommState
from commopt.hooks.buckets import DDPRegistration
from commopt.sharded.one_dimension import OneDimension
from commopt.timeline import Report, Timeline, gather

BLOCK, PERIOD = 24, 192
"""Steps that are recorded, of so many: recorded steps are not replayed as CUDA graphs."""
WAIT_S = 60.0
"""How long ranks that have ended wait for the others; where one saves or evaluates for longer there is no verdict."""
_ROOM = "commopt run --report"
_END = "the end of the training (commopt run --report)"


@dataclass(frozen=True)
class Recorded:
    """A training as its ranks recorded it.

    model: the name of its class.
    strategy: as the command line names it.
    timeline: the steps of all ranks.
    shape: of these ranks.
    hosts: the names of their nodes, which may be alike.
    busy: the share of the time in which a program of a rank's host waited for a CPU, by rank; None: not known.
    aggregator: that averaged the last step; None where unknown.
    averages: whether each message is the average of a buffer, as with DDP and over FSDP2's replicas.
    planned: whether commopt chose the buckets.
    buffers: the layouts of the last step's messages, in order; empty where unknown.
    dtype: of the gradients; None where unknown.
    links: that the user gave.
    report: on the same steps; None where the model was gone by then.
    explanation, reasons: of the strategy in use and of the decisions about it, as the state puts them into words.
    """

    model: str
    strategy: str
    timeline: Timeline
    shape: TeamShape
    hosts: tuple[str, ...]
    busy: dict[int, float | None] = field(default_factory=dict)
    aggregator: Aggregator | None = None
    averages: bool = False
    planned: bool = False
    buffers: tuple[Layout, ...] = ()
    dtype: torch.dtype | None = None
    links: Links | None = None
    report: Report | None = None
    explanation: str = ""
    reasons: tuple[str, ...] = ()


class StepRecording:
    """Lets a model record blocks of steps from now on; `gather` brings those of all ranks together. Holds no model.

    recorded: what was gathered; None before, and where there was nothing.
    """

    def __init__(self, state: CommState, model: str, strategy: str) -> None:
        registration = state._registration
        self.recorded: Recorded | None = None
        self._model = model
        self._strategy = strategy
        self._state = ref(state)
        self._known: dict[str, Any] = {}
        self._client = registration.recorded_with
        self._recorder = registration.recorder
        self._begun_s, self._waited_us = time.monotonic(), waited_us()
        if not self._recorder.always:  # else every step is recorded already
            self._recorder.record_always()
            registration.logs.append(self)

    def __call__(self) -> None:
        """Begin or end a block, after a step."""
        state = self._state()
        if state is not None:
            self._recorder.always = state._registration.steps % PERIOD < BLOCK
            self._recorder.enabled = self._recorder.always  # a plan that measures enables it again

    def gather(self) -> None:
        """Set `recorded`; collective over the ranks of the model, which wait WAIT_S for each other.

        Raises CommoptError.
        """
        client, membership = self._client, self._client.membership
        if self.recorded is not None or client.closed or not membership.alive:
            return
        facts = {"steps": len(self._recorder.steps()), "busy": self._busy()}
        store, place = membership.store.within(_ROOM), client.team.rank
        answers = exchange_facts(
            store, membership.ranks, place, _END, facts, WAIT_S, self._notice_loss, patience_s=WAIT_S
        )
        if not all(answer["steps"] for answer in answers):
            return
        found: list[Timeline] = []
        client.run(lambda: found.append(gather(client.team, self._recorder.steps())), _END).wait()
        if found[0].steps:
            busy = {rank: answer["busy"] for rank, answer in zip(membership.ranks, answers, strict=True)}
            cluster = membership.cluster
            self.recorded = self._described(
                Recorded(self._model, self._strategy, found[0], client.team, tuple(cluster.names), busy)
            )

    def note(self, state: CommState) -> None:
        """Take note of what the state knows: the strategy and the buffers of its last step."""
        registration, dtypes = state._registration, {each.dtype for each in state._registration.parameters.values()}
        links = registration.options.links
        self._known = {
            "aggregator": (
                registration.controller.aggregator
                if isinstance(registration, DDPRegistration)
                else registration.aggregator
            ),
            "averages": not isinstance(registration, OneDimension),
            "planned": state.plan is not None,
            "buffers": tuple(registration.step.buffers),
            "dtype": dtypes.pop() if len(dtypes) == 1 else None,
            "links": links if isinstance(links, Links) else None,
            "explanation": state.explain(),
            "reasons": tuple(decision.reason for decision in state.decisions),
        }

    def _described(self, recorded: Recorded) -> Recorded:
        """Return a recording with what its state knows, or has known when its model ceased to exist."""
        state = self._state()
        if state is None:
            return replace(recorded, **self._known)
        self.note(state)
        report = report_on(recorded.timeline, state._registration, state.plan)
        return replace(recorded, report=report, **self._known)

    def _busy(self) -> float | None:
        now_us, spent_s = waited_us(), time.monotonic() - self._begun_s
        if now_us is None or self._waited_us is None or spent_s <= 0:
            return None
        return min((now_us - self._waited_us) / (spent_s * 1e6), 1.0)

    def _notice_loss(self) -> None:
        if lost := self._client.team.lost_ranks():
            raise TransportError(f"rank {', '.join(map(str, lost))} has left already")


def waited_us(root: Path = Path("/")) -> float | None:
    """Return how long some program of this host waited for a CPU, in microseconds; None where the kernel does not say.

    The kernel's pressure stall information: the first line of /proc/pressure/cpu.
    """
    try:
        found = re.match(r"some .*total=(\d+)", (root / "proc/pressure/cpu").read_text())
    except OSError:  # an older kernel, or one that was started without it
        return None
    return float(found[1]) if found else None
