"""Which steps are measured and after which one the ranks meet; the same on all of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from commopt.document import field, load, require_text, require_whole
from commopt.errors import ConfigurationError
from commopt.plan.plan import Plan, Prediction
from commopt.plan.tuned import Tuned

_FORMAT = 1


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

    def measures(self, step: int) -> bool:
        """Return whether `step` is measured."""
        return self.measure_from <= step <= self.meet_at

    def meets(self, step: int) -> bool:
        """Return whether the ranks meet when `step` is done."""
        return step >= self.meet_at


@dataclass(frozen=True)
class Decision:
    """What rank 0 tells the others at a meeting: a plan from the next step on, or None to go on; and the next dates.

    predicted: without a plan, what is now expected of the one that goes on; nothing else of that plan changes.
    tuned: what tuning has come to, if it has now. try_out: whether to try out what messages cost before the next one.
    leave_to_ddp: whether no hook is needed until the next window, since DDP by itself does as well.
    """

    plan: Plan | None
    calendar: Calendar
    reason: str
    predicted: Prediction | None = None
    tuned: Tuned | None = None
    try_out: bool = False
    leave_to_ddp: bool = False

    def __post_init__(self) -> None:
        require_text(self.reason, "decision: reason")
        if self.plan is not None and self.predicted is not None:
            raise ConfigurationError("decision: a plan and a prediction; give one, a plan brings its own")

    def updated(self, running: Plan) -> Plan:
        """Return the plan that goes on, with the prediction that holds from now on."""
        return running if self.predicted is None else replace(running, predicted=self.predicted)

    def to_json(self) -> str:
        """Return a text from which `from_json` makes an equal decision."""
        plan = None if self.plan is None else self.plan.to_json()
        predicted = None if self.predicted is None else asdict(self.predicted)
        tuned = None if self.tuned is None else self.tuned.to_json()
        document = {"format": _FORMAT, "plan": plan, "predicted": predicted, "tuned": tuned}
        flags = {"try_out": self.try_out, "leave_to_ddp": self.leave_to_ddp}
        return json.dumps({**document, "reason": self.reason, **flags, **asdict(self.calendar)})

    @classmethod
    def from_json(cls, text: str) -> Decision:
        """Read what `to_json` wrote; raises ConfigurationError for anything else."""
        document = load(text, "decision", _FORMAT)
        plan, predicted, tuned = (document.get(name) for name in ("plan", "predicted", "tuned"))
        calendar = Calendar(
            field(document, "measure_from", int, "decision"), field(document, "meet_at", int, "decision")
        )
        return cls(
            plan=None if plan is None else Plan.from_json(plan),
            calendar=calendar,
            reason=field(document, "reason", str, "decision"),
            predicted=None if predicted is None else Prediction.from_entry(predicted, "decision, predicted"),
            tuned=None if tuned is None else Tuned.from_json(tuned),
            try_out=field(document, "try_out", bool, "decision"),
            leave_to_ddp=field(document, "leave_to_ddp", bool, "decision"),
        )
