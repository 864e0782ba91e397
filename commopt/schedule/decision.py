# SPDX-License-Identifier: Apache-2.0
"""Data that rank 0 sends to the others: which steps to measure, which plan to follow, the result of tuning."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from commopt.document import load, read_as, read_text, require_text, require_whole, write_whole
from commopt.errors import ConfigurationError
from commopt.schedule.plan import Plan, Prediction

_FORMAT = 2


@dataclass(frozen=True)
class Window:
    """The steps that are measured; after the last of them the ranks synchronise, and rank 0 decides.

    first_step: the first of them; steps count from 0.
    last_step: the last of them.
    """

    first_step: int
    last_step: int

    def __post_init__(self) -> None:
        require_whole(self.first_step, 0, "window: first_step")
        require_whole(self.last_step, 0, "window: last_step")
        if self.first_step > self.last_step:
            raise ConfigurationError(
                f"window: it begins with step {self.first_step} and ends with step {self.last_step}; first_step must "
                f"not be later"
            )

    @classmethod
    def ending_with(cls, last_step: int) -> Window:
        """Return the window of usual length that ends with a step."""
        return cls(last_step - WINDOW_STEPS + 1, last_step)

    @property
    def steps(self) -> int:
        """The number of its steps."""
        return self.last_step - self.first_step + 1

    def ends_with(self, step: int) -> bool:
        """Return whether the window is over when `step` is done."""
        return step >= self.last_step


WINDOW_STEPS = 7
FIRST_WINDOW = Window(3, 3 + WINDOW_STEPS - 1)  # DDP makes its buckets anew after the first step
FIRST_LOOK = Window(1, 1)  # before it, where compression may save so much that one step shows it


@dataclass(frozen=True)
class Outcome:
    """The predicted and the measured times of a candidate, as a user sees and saves them.

    name: of the candidate.
    strategy: the repr of the aggregator.
    error: the share of the gradient's L2 norm that one encoding leaves out, 0 for an exact average.
    predicted_step_us: the time of a step.
    predicted_exposed_us: the part of it after the last gradient.
    step_us: the measured time of a step; None if the candidate was not tried.
    exposed_us: the measured part of it after the last gradient.
    steps: to a loss, over those of exact averages, as measured with the optimizer (commopt/aggregate/learning.py).
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
    """The result of tuning; `save` it, commit it, and pass it to attach(ddp, "auto", tuned=...) next time.

    name: of the candidate that is used, one of `considered`.
    allow: the families that were allowed.
    nodes: ranks on each node.
    steps: for how many steps the search lasted.
    considered: all candidates; the first one ran before.
    plan: the plan that is followed; None for an exact average in DDP's own buckets.
    reason: why the candidate is used.
    optimizer: "adamw" for any that is like Adam, "sgd" for others; "" where none was known.
    parameters: a digest of their names; "" in a file of a version that wrote none.
    """

    name: str
    allow: tuple[str, ...]
    nodes: tuple[int, ...]
    steps: int
    considered: tuple[Outcome, ...]
    plan: Plan | None
    reason: str
    optimizer: str = ""
    parameters: str = ""

    def __post_init__(self) -> None:
        require_text(self.reason, "tuned: reason")
        require_whole(self.steps, 0, "tuned: steps")
        for ranks in self.nodes:
            require_whole(ranks, 1, "tuned: ranks of a node")
        if self.name not in [outcome.name for outcome in self.considered]:
            raise ConfigurationError(f"tuned: {self.name!r} is used, but it is none of those considered")

    @property
    def used(self) -> Outcome:
        """The outcome of the candidate that is used now."""
        return next(outcome for outcome in self.considered if outcome.name == self.name)

    def to_json(self) -> str:
        """Return a text from which `from_json` makes an equal result."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Tuned:
        """Read a text of `to_json`; raises ConfigurationError for anything else."""
        tuned: Tuned = read_as(cls, load(text, "tuned", _FORMAT), "tuned")
        return tuned

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        write_whole(path, f"{self.to_json()}\n".encode())

    @classmethod
    def load(cls, path: str | Path) -> Tuned:
        """Read a file of `save`. Raises ConfigurationError, naming the fault, for anything else."""
        text = read_text(path)
        try:
            return cls.from_json(text)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}") from None


@dataclass(frozen=True)
class Decision:
    """The decision of rank 0 at a synchronisation point, which all ranks follow.

    plan: to follow from the next step on; None to keep the one that is followed.
    window: the next steps to measure.
    reason: why, for the log.
    predicted: without a plan, the new prediction of the one that is kept; nothing else of that plan changes.
    tuned: the result of tuning, if there is a new one.
    retime: whether to time messages again before the next decision.
    warning: advice to the user, logged once.
    """

    plan: Plan | None
    window: Window
    reason: str
    predicted: Prediction | None = None
    tuned: Tuned | None = None
    retime: bool = False
    warning: str = ""

    def __post_init__(self) -> None:
        require_text(self.reason, "decision: reason")
        if self.plan is not None and self.predicted is not None:
            raise ConfigurationError("decision: a plan and a prediction; give one, a plan brings its own")

    def updated(self, running: Plan) -> Plan:
        """Return the plan that is kept, with the prediction that holds from now on.

        A plan that DDP's buckets do not follow keeps its own: the new prediction is of other messages.
        """
        if self.predicted is None or len(self.predicted.group_finish_us) != len(running.groups):
            return running
        return replace(running, predicted=self.predicted)

    def to_json(self) -> str:
        """Return a text from which `from_json` makes an equal decision."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Decision:
        """Read a text of `to_json`; raises ConfigurationError for anything else."""
        decision: Decision = read_as(cls, load(text, "decision", _FORMAT), "decision")
        return decision
