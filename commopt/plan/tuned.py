"""What tuning came to: which ways of averaging were considered, what they did, and which one is used now."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from commopt.document import field, load, read_text, require_text, require_time, require_whole
from commopt.errors import ConfigurationError
from commopt.plan.plan import Plan

_FORMAT = 1


@dataclass(frozen=True)
class Tried:
    """One way of averaging: what was predicted of a step, and what was measured; None where it was not tried.

    error: the share of the gradient's L2 norm that one encoding leaves out, 0 for an exact average.
    strategies: what it uses, each with the bytes of the gradients that go by it.
    """

    name: str
    strategies: tuple[tuple[str, int], ...]
    error: float
    predicted_step_us: float
    predicted_exposed_us: float
    step_us: float | None = None
    exposed_us: float | None = None

    def __post_init__(self) -> None:
        require_text(self.name, "tuned: a name")
        for name in ("error", "predicted_step_us", "predicted_exposed_us"):
            require_time(getattr(self, name), f"tuned, {self.name}: {name}")
        for name in ("step_us", "exposed_us"):
            if getattr(self, name) is not None:
                require_time(getattr(self, name), f"tuned, {self.name}: {name}")

    @classmethod
    def from_entry(cls, entry: Any) -> Tried:
        """Read it out of a JSON document; raises ConfigurationError for anything else."""
        where = "tuned, a way that was considered"
        pairs = field(entry, "strategies", list, where)
        if any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
            raise ConfigurationError(f'{where}: "strategies" is {pairs!r}; it must be pairs of a name and bytes')
        for name, nbytes in pairs:
            require_text(name, f"{where}: a strategy")
            require_whole(nbytes, 0, f"{where}: bytes by {name!r}")
        return cls(
            name=field(entry, "name", str, where),
            strategies=tuple((name, nbytes) for name, nbytes in pairs),
            error=field(entry, "error", float, where),
            predicted_step_us=field(entry, "predicted_step_us", float, where),
            predicted_exposed_us=field(entry, "predicted_exposed_us", float, where),
            step_us=None if entry.get("step_us") is None else field(entry, "step_us", float, where),
            exposed_us=None if entry.get("exposed_us") is None else field(entry, "exposed_us", float, where),
        )


@dataclass(frozen=True)
class Tuned:
    """The outcome of tuning; `save` it, commit it, and pass it to attach(ddp, "auto", tuned=...) next time.

    name: of what is used, one of `considered`, whose first entry is what ran before.
    allow: the families that were allowed. nodes: ranks on each node. steps: how many it took.
    plan: the buckets and how each is averaged; None where DDP's own are, by an exact average.
    reason: why it is used.
    """

    name: str
    allow: tuple[str, ...]
    nodes: tuple[int, ...]
    steps: int
    considered: tuple[Tried, ...]
    plan: Plan | None
    reason: str

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
        plan = None if self.plan is None else json.loads(self.plan.to_json())
        return json.dumps({"format": _FORMAT, **asdict(self), "plan": plan}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Tuned:
        """Read what `to_json` wrote; raises ConfigurationError for anything else."""
        document = load(text, "tuned", _FORMAT)
        plan = document.get("plan")
        return cls(
            name=field(document, "name", str, "tuned"),
            allow=tuple(field(document, "allow", list, "tuned")),
            nodes=tuple(field(document, "nodes", list, "tuned")),
            steps=field(document, "steps", int, "tuned"),
            considered=tuple(Tried.from_entry(entry) for entry in field(document, "considered", list, "tuned")),
            plan=None if plan is None else Plan.from_json(json.dumps(plan)),
            reason=field(document, "reason", str, "tuned"),
        )

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
