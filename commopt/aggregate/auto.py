"""What `commopt.auto` is asked for: which ways of averaging a tuner may choose from, and how hard it may try."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

import torch
from torch import Tensor

from commopt.aggregate.base import Aggregator
from commopt.aggregate.calls import Step
from commopt.aggregate.flat import Flat
from commopt.errors import ConfigurationError
from commopt.feedback import Account, Layout, checked_patterns
from commopt.groups import Team, TeamShape

FAMILIES = ("lossless", "bf16", "quantized", "onebit", "dgc", "powersgd")
_KEEPING_RESIDUALS = frozenset(FAMILIES) - {"lossless", "bf16"}


@dataclass(frozen=True, repr=False)
class Auto(Aggregator):
    """Measure, then let every bucket travel in the way that pays; Flat() until that is known, and where nothing pays.

    For DDP models only: commopt.attach(ddp, "auto", ...) tries what `allow` names on live steps.

    allow: of "lossless" (always in it), "bf16", "quantized" (8, 4, 2 bits), "onebit", "dgc" (5, 1, 0.1 % of the
        elements), "powersgd" (rank 16 to 1); a tuple, or a text such as "quantized+powersgd".
    max_trials: how many ways are tried at most, each for nine steps.
    max_error: how much of the gradient one encoding may leave out, as a share of its L2 norm, over all buckets
        together; None: what 4 bits, 1 % of the elements, or rank 4 leave out where they are used everywhere.
    dense: patterns of parameter names that are never compressed ("*.bias").
    """

    tunes: ClassVar[bool] = True

    allow: tuple[str, ...] | str = ("lossless",)
    max_trials: int = 4
    max_error: float | None = None
    dense: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = self.allow.split("+") if isinstance(self.allow, str) else self.allow
        if not isinstance(names, (tuple, list)) or not set(names) <= set(FAMILIES):
            raise ConfigurationError(
                f"Auto(allow={self.allow!r}) must name some of {', '.join(FAMILIES)}, for example "
                f"allow=('lossless', 'quantized') or allow='quantized+powersgd'"
            )
        wanted = {"lossless", *names}
        object.__setattr__(self, "allow", tuple(family for family in FAMILIES if family in wanted))
        if not isinstance(self.max_trials, int) or isinstance(self.max_trials, bool) or self.max_trials < 1:
            raise ConfigurationError(f"Auto(max_trials={self.max_trials!r}) must be a whole number, 1 or more")
        error = self.max_error
        if error is not None and not (isinstance(error, (int, float)) and isfinite(error) and 0 < error <= 1):
            raise ConfigurationError(
                f"Auto(max_error={error!r}) must be above 0 and at most 1, or None for that of the usual strengths"
            )
        object.__setattr__(self, "dense", checked_patterns("Auto", self.dense))

    @property
    def families(self) -> tuple[str, ...]:
        """What is allowed, by name."""
        return tuple(self.allow)

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, account: Account) -> None:
        """See Aggregator: what no plan has a way for yet goes as in stock DDP."""
        Flat().all_reduce(buffer, team, scale, account)

    def calls(
        self,
        layout: Layout,
        dtype: torch.dtype,
        team: TeamShape,
        device: torch.device | None = None,
        step: int | None = None,
    ) -> tuple[Step, ...]:
        """See Aggregator; of buckets that no plan has a way for."""
        return Flat().calls(layout, dtype, team, device, step)

    @property
    def lossless(self) -> bool:
        """See Aggregator: whether nothing else can be chosen."""
        return self.allow == ("lossless",)

    @property
    def error_bound(self) -> float:
        """See Aggregator: some of what may be chosen has none."""
        return 0.0 if self.lossless else 1.0

    @property
    def residual_paths(self) -> tuple[str, ...]:
        """See Aggregator: those of all that may be chosen."""
        return ("", "inter") if _KEEPING_RESIDUALS.intersection(self.allow) else ()
