"""A search for the way that pays: what has become of it so far."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from commopt.plan import Measured
from commopt.tuning.verdict import choose, pays
from commopt.tuning.ways import Way

_LITTLE = 0.75  # of the step before: what leaves more of it is compared with it twice


@dataclass
class Round:
    """One search: from what ran before to a choice. began: after how many steps it did; why: what it is for.

    tried: what was measured. abandoned: what was not, though it had its trial. varied: which kinds were, and how.
    again: which of those tried had a second trial. confirmed: whether what ran before had one too, which is no trial.
    """

    before: Way
    waiting: list[Way]
    began: int
    why: str
    tried: list[Way]
    abandoned: list[Way] = field(default_factory=list)
    on_trial: Way | None = None
    varied: set[tuple[str, str]] = field(default_factory=set)
    again: set[str] = field(default_factory=set)
    confirmed: bool = False

    @property
    def trials(self) -> int:
        """How many trials are over."""
        return len(self.tried) - 1 + len(self.abandoned) + len(self.again)

    @property
    def base(self) -> Measured:
        """What everything is compared with."""
        assert self.before.measured is not None
        return self.before.measured

    @property
    def best_tried(self) -> Way | None:
        """What did best of all trials, if there was one: of those that pay, if any does."""
        best = choose(self.tried)
        return best if best is not self.before else min(self.tried[1:], key=lambda way: way.step_us, default=None)

    @property
    def least_us(self) -> float:
        """The shortest step that was measured."""
        return min(way.step_us for way in self.tried)

    @property
    def doubtful(self) -> Way | None:
        """What would be chosen if noise were nothing, and what ran before is instead: once for each way."""
        if choose(self.tried) is not self.before:
            return None
        seem = [way for way in self.tried[1:] if way.measured is not None and pays(self.base, way.measured, errors=0)]
        return min((way for way in seem if way.name not in self.again), key=lambda way: way.step_us, default=None)

    def second_look(self) -> Way | None:
        """Return what noise alone speaks against, to be measured once more."""
        way = self.doubtful
        if way is not None:
            self.again.add(way.name)
        return way

    def to_confirm(self) -> Way | None:
        """Return what ran before, once, where what would be chosen gains little."""
        best = choose(self.tried)
        if self.confirmed or best is self.before or best.step_us <= _LITTLE * self.base.step.value:
            return None
        self.confirmed = True
        return self.before

    def end_trial(self, measured: Measured | None) -> None:
        """Take note of what the trial that is on showed; None: nothing."""
        trial, self.on_trial = self.on_trial, None
        assert trial is not None  # a round without one is over
        if trial.measured is not None:
            if measured is not None:
                self._replace(trial, replace(trial, measured=measured.pooled(trial.measured)))
        elif measured is None:
            self.abandoned.append(trial)
        else:
            self.tried.append(replace(trial, measured=measured))

    def _replace(self, trial: Way, better_known: Way) -> None:
        self.tried[self.tried.index(trial)] = better_known
        if trial is self.before:
            self.before = better_known
