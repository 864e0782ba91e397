# SPDX-License-Identifier: Apache-2.0
"""Which gradients travel together, and by which strategy: data that rank 0 makes and every rank follows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256

from commopt.document import load, read_as, require_text, require_time, require_whole
from commopt.errors import ConfigurationError

_FORMAT = 2


@dataclass(frozen=True)
class Unit:
    """The smallest thing that a plan can move: one gradient, or one of DDP's buckets where these have to stay.

    names: its parameters.
    nbytes: of their gradients together.
    ready_us: when they are, from the beginning of the step, on the slowest rank.
    dtype: only units of equal dtype share a message. Any text that differs where units cannot lie in one buffer.
    """

    names: tuple[str, ...]
    nbytes: int
    ready_us: float
    dtype: str

    def __post_init__(self) -> None:
        _require_names(self.names, "unit")
        require_whole(self.nbytes, 0, f"unit {self.names[0]!r}: nbytes")
        require_time(self.ready_us, f"unit {self.names[0]!r}: ready_us")
        require_text(self.dtype, f"unit {self.names[0]!r}: dtype")


@dataclass(frozen=True)
class Prediction:
    """The expected times of a step, from its beginning.

    compute_us: when the last gradient is ready.
    finish_us: when the step is done.
    exposed_us: from the last gradient to the end.
    communication_us: for how long the lane is busy.
    group_finish_us: when each message is done, in the order of the plan's groups.
    """

    compute_us: float
    finish_us: float
    exposed_us: float
    communication_us: float
    group_finish_us: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    """Which gradients travel together, and the strategy that averages all of them.

    Raises ConfigurationError when a name occurs twice.

    groups: names of parameters, a group for each message, in the order in which they lie in it.
    strategy: the repr of an aggregator.
    origin: "given", "found" (DDP's own buckets), or "measured".
    predicted: the expected times of a step.
    """

    groups: tuple[tuple[str, ...], ...]
    strategy: str
    origin: str = "given"
    predicted: Prediction | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.groups, tuple) or not self.groups:
            raise ConfigurationError(
                f"plan: groups are {self.groups!r:.80}; give a tuple of at least one group of names"
            )
        for group in self.groups:
            _require_names(group, "plan: a group")
        require_text(self.strategy, "plan: strategy")
        require_text(self.origin, "plan: origin")
        twice = [name for name, times in Counter(self.names).items() if times > 1]
        if twice:
            raise ConfigurationError(f"plan: {_listed(twice)} is in it more than once; name every parameter once")
        if self.predicted is not None and len(self.predicted.group_finish_us) != len(self.groups):
            raise ConfigurationError(
                f"plan: {len(self.groups)} groups, but {len(self.predicted.group_finish_us)} predicted finish times; "
                f"give one for each group"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Every parameter, group by group."""
        return tuple(name for group in self.groups for name in group)

    @property
    def contents(self) -> tuple[frozenset[frozenset[str]], str]:
        """Equal for plans that differ only in the order of groups and of the parameters in them."""
        return frozenset(map(frozenset, self.groups)), self.strategy

    def require_names(self, names: Iterable[str], optional: Iterable[str] = ()) -> None:
        """Raise ConfigurationError unless the plan is for exactly these parameters, and any of the `optional` ones."""
        own = set(self.names)
        wanted = set(names) | own.intersection(optional)
        differences = [
            f"{what} {_listed(sorted(which))}"
            for what, which in (("it lacks", wanted - own), ("it has but the model does not train", own - wanted))
            if which
        ]
        if differences:
            raise ConfigurationError(f"plan: made for other parameters: {'; '.join(differences)}; make a new plan")

    def digest(self) -> str:
        """Return the SHA-256 of groups and strategy, which ranks must agree on, without origin and prediction."""
        agreed = {"groups": self.groups, "strategy": self.strategy}
        return sha256(json.dumps(agreed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> str:
        """Return a text from which `from_json` makes an equal plan."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a text of `to_json`; raises ConfigurationError for anything else."""
        plan: Plan = read_as(cls, load(text, "plan", _FORMAT), "plan")
        return plan


def digest_of_names(names: Iterable[str]) -> str:
    """Return a short digest that tells models apart by their parameters' names, in whatever order."""
    return sha256(json.dumps(sorted(names)).encode()).hexdigest()[:16]


def _require_names(names: object, what: str) -> None:
    if not isinstance(names, tuple) or not names:
        raise ConfigurationError(f"{what}: names are {names!r}; give a tuple of at least one parameter name")
    for name in names:
        require_text(name, f"{what}: a parameter name")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
