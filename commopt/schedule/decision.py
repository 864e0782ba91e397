# SPDX-License-Identifier: Apache-2.0
"""What rank 0 tells the others: when to measure, what to follow, what tuning has come to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from commopt.document import load, read_as, read_text, require_text, require_whole
from commopt.errors import ConfigurationError
from commopt.schedule.plan import Plan, Prediction

_FORMAT = 2


@dataclass(frozen=True)
class Calendar:
    """Steps measure_from..meet_at are measured; after the last of them rank 0 decides. Steps count from 0."""

    measure_from: int
    meet_at: int

    def __post_init__(self) -> None:
        require_whole(self.measure_from, 0, "calendar: measure_from")
        require_whole(self.meet_at, 0, "calendar: meet_at")
        if self.measure_from > self.meet_at:
            raise ConfigurationError(
                f"calendar: measures from step {self.measure_from}, but meets after step {self.meet_at}; "
                f"measure_from must not be later"
            )

    def meets(self, step: int) -> bool:
        """Return whether the ranks meet when `step` is done."""
        return step >= self.meet_at


WINDOW_STEPS = 7
FIRST_CALENDAR = Calendar(3, 3 + WINDOW_STEPS - 1)  # DDP makes its buckets anew after the first step


@dataclass(frozen=True)
class Option:
    """A strategy to choose from; error: the share of the gradient's L2 norm that one encoding leaves out.

    lossy: whether it is only worth its error where it pays against what is exact. steps: to a loss, over those of exact
    averages.
    """

    name: str
    strategy: str
    error: float = 0.0
    lossy: bool = False
    steps: float = 1.0


@dataclass(frozen=True)
class Tried:
    """One candidate: what was predicted of a step, and what was measured; None where it was not tried.

    error: the share of the gradient's L2 norm that one encoding leaves out, 0 for an exact average. steps: to a loss,
    over those of exact averages, as measured with the optimizer (commopt/schedule/learning.py).
    """

    name: str
    strategy: str
    error: float
    predicted_step_us: float
    predicted_exposed_us: float
    step_us: float | None = None
    exposed_us: float | None = None
    steps: float = 1.0


@dataclass(frozen=True)
class Tuned:
    """The outcome of tuning; `save` it, commit it, and pass it to attach(ddp, "auto", tuned=...) next time.

    name: of what is used, one of `considered`, whose first entry is what ran before.
    allow: the families that were allowed. nodes: ranks on each node. steps: how many it took.
    plan: what is followed; None where DDP's own buckets are, by an exact average.
    reason: why it is used. optimizer: "adamw" for any that is like Adam, "sgd" for others; "" where none was known.
    """

    name: str
    allow: tuple[str, ...]
    nodes: tuple[int, ...]
    steps: int
    considered: tuple[Tried, ...]
    plan: Plan | None
    reason: str
    optimizer: str = ""

    def __post_init__(self) -> None:
        require_text(self.reason, "tuned: reason")
        require_whole(self.steps, 0, "tuned: steps")
        for ranks in self.nodes:
            require_whole(ranks, 1, "tuned: ranks of a node")
        if self.name not in [tried.name for tried in self.considered]:
            raise ConfigurationError(f"tuned: {self.name!r} is used, but it is none of those considered")

    @property
    def used(self) -> Tried:
        """What is used now."""
        return next(tried for tried in self.considered if tried.name == self.name)

    def to_json(self) -> str:
        """Return a text from which `from_json` makes an equal outcome."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Tuned:
        """Read what `to_json` wrote; raises ConfigurationError for anything else."""
        tuned: Tuned = read_as(cls, load(text, "tuned", _FORMAT), "tuned")
        return tuned

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Tuned:
        """Read what `save` wrote. Raises ConfigurationError, naming what is wrong, for anything else."""
        text = read_text(path)
        try:
            return cls.from_json(text)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}") from None


@dataclass(frozen=True)
class Decision:
    """What rank 0 tells the others at a meeting: a plan from the next step on, or None to go on; and the next dates.

    predicted: without a plan, what is now expected of the one that goes on; nothing else of that plan changes.
    tuned: what tuning has come to, if it has now. try_out: whether to try out what messages cost before the next one.
    warning: what the user can do about it, said once.
    """

    plan: Plan | None
    calendar: Calendar
    reason: str
    predicted: Prediction | None = None
    tuned: Tuned | None = None
    try_out: bool = False
    warning: str = ""

    def __post_init__(self) -> None:
        require_text(self.reason, "decision: reason")
        if self.plan is not None and self.predicted is not None:
            raise ConfigurationError("decision: a plan and a prediction; give one, a plan brings its own")

    def updated(self, running: Plan) -> Plan:
        """Return the plan that goes on, with the prediction that holds from now on.

        One that DDP's buckets do not follow keeps its own: what is predicted has other messages.
        """
        if self.predicted is None or len(self.predicted.group_finish_us) != len(running.groups):
            return running
        return replace(running, predicted=self.predicted)

    def to_json(self) -> str:
        """Return a text from which `from_json` makes an equal decision."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Decision:
        """Read what `to_json` wrote; raises ConfigurationError for anything else."""
        decision: Decision = read_as(cls, load(text, "decision", _FORMAT), "decision")
        return decision
