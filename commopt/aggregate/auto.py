# SPDX-License-Identifier: Apache-2.0
"""The request of `commopt.auto`: the strategies that a tuner may choose from, and how many it may try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from commopt.aggregate.base import Aggregator, Flat
from commopt.aggregate.compressed import Compressed
from commopt.compress import COMPRESSORS, Candidates
from commopt.errors import ConfigurationError, did_you_mean
from commopt.feedback import Feedback, checked_patterns
from commopt.groups import TeamShape

LOSSLESS = "lossless"
LOCAL = "local"


def families() -> dict[str, Candidates[Aggregator]]:
    """Return the settings a tuner may try beside the exact averages, by family: of all registered classes."""
    from commopt.aggregate import AGGREGATORS

    found: dict[str, Candidates[Aggregator]] = {}
    for compressor in COMPRESSORS.values():
        declared = compressor.candidates()
        if declared is not None:
            feedback = Feedback() if declared.feedback else None
            strengths = tuple(Compressed(each, feedback) for each in declared.strengths)
            found[declared.family] = Candidates(declared.family, strengths, declared.usual, declared.feedback)
    of_aggregators = [aggregator.candidates() for aggregator in AGGREGATORS.values()]
    return found | {declared.family: declared for declared in of_aggregators if declared is not None}


@dataclass(frozen=True, repr=False)
class Auto(Flat):
    """Measure, then send all buckets by the one strategy that pays; Flat() until that is known, and where none does.

    For DDP models only: commopt.attach(ddp, "auto", ...) tries the families in `allow` on live steps.

    allow: "lossless" (always in it) and any of `families()`: "bf16", "bf16_packed" (the same in fewer bytes, on the
        CPU), "quantized" (8, 4, 2 bits), "dgc" (5, 1, 0.1 % of the elements), "powersgd" (rank 16 to 1) and so on; a
        tuple, or a text such as "quantized+powersgd". "local": predict the step of a LocalSGD. It is never switched
        to: nodes would come to hold different parameters.
    max_trials: the most strategies that are tried, each for nine steps.
    optimizer: "adamw" for one that is like Adam, "sgd" for others: strategies learn differently well with them
        (docs/tuning.md). None: the optimizer that steps on the parameters.
    dense: patterns of parameter names that are never compressed ("*.bias").
    """

    allow: tuple[str, ...] | str = ("lossless",)
    max_trials: int = 4
    optimizer: str | None = None
    dense: tuple[str, ...] = ()

    tunes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        names = self.allow.split("+") if isinstance(self.allow, str) else self.allow
        known = (LOSSLESS, *families(), LOCAL)
        if not isinstance(names, (tuple, list)) or not all(name in known for name in names):
            unknown = [name for name in names if name not in known] if isinstance(names, (tuple, list)) else []
            meant = did_you_mean(unknown[0], known) if unknown else ""
            raise ConfigurationError(
                f"Auto(allow={self.allow!r}) must name some of {', '.join(known)}{meant or ','} for example "
                f"allow=('lossless', 'quantized') or allow='quantized+powersgd'"
            )
        wanted = {LOSSLESS, *names}
        object.__setattr__(self, "allow", tuple(family for family in known if family in wanted))
        if not isinstance(self.max_trials, int) or isinstance(self.max_trials, bool) or self.max_trials < 1:
            raise ConfigurationError(f"Auto(max_trials={self.max_trials!r}) must be a whole number, 1 or more")
        if self.optimizer not in (None, "sgd", "adamw"):
            raise ConfigurationError(
                f"Auto(optimizer={self.optimizer!r}) must be 'adamw' for what is like Adam, 'sgd' for others, "
                f"or None to see what steps"
            )
        object.__setattr__(self, "dense", checked_patterns("Auto", self.dense))

    @property
    def lossless(self) -> bool:
        """Whether nothing else can be chosen."""
        return set(self.allow) <= {LOSSLESS, LOCAL}

    @property
    def residual_paths(self) -> tuple[str, ...]:
        """The paths of all strategies that may be chosen."""
        known = families()
        keeping = any(known[family].feedback for family in self.allow if family in known)
        return ("", "inter") if keeping else ()

    def residual_paths_on(self, team: TeamShape) -> tuple[str, ...]:
        """No paths: sums are exact while nothing is chosen."""
        return ()

    def with_dense(self, patterns: Sequence[str]) -> Auto:
        """Return the same with more patterns in `dense`."""
        return replace(self, dense=(*self.dense, *patterns))


def auto_of(aggregator: object) -> Auto | None:
    """Return `aggregator` if it is an Auto: only a hook can choose."""
    return aggregator if isinstance(aggregator, Auto) else None
