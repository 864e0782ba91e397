"""What kernels are asked to achieve, and whether they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Figures:
    """What was measured of a case: its kernel, the copy beside it, and everything else, in microseconds of a call."""

    nbytes: int
    copy_gbps: float
    kernel_us: float
    others_us: Mapping[str, float]


@dataclass(frozen=True)
class Verdict:
    """Whether a kernel achieves something; `found` and `met` are None where what it is compared with is missing."""

    what: str
    relation: str
    limit: float
    found: float | None
    met: bool | None


@dataclass(frozen=True)
class Asked:
    """Something that is asked of a case's kernel."""

    what: str
    relation: Literal[">=", "<="]
    limit: float
    find: Callable[[Figures], float | None]

    def judge(self, figures: Figures) -> Verdict:
        """Compare what was measured with the limit."""
        found = self.find(figures)
        met = None if found is None else found >= self.limit if self.relation == ">=" else found <= self.limit
        return Verdict(self.what, self.relation, self.limit, found, met)


def of_copy(least: float) -> Asked:
    """Ask for a share of the rate of a device copy."""
    return Asked("of copy", ">=", least, lambda figures: _copy_us(figures, figures.nbytes) / figures.kernel_us)


def times_copy_of(most: float, nbytes: int, what: str) -> Asked:
    """Ask for at most `most` times as long as a device copy moves `nbytes` bytes, which are `what`."""
    return Asked(f"times a copy of {what}", "<=", most, lambda figures: figures.kernel_us / _copy_us(figures, nbytes))


def microseconds(most: float) -> Asked:
    """Ask for a time."""
    return Asked("us", "<=", most, lambda figures: figures.kernel_us)


def times_faster(least: float, than: str) -> Asked:
    """Ask for a ratio to the time of another contender."""

    def find(figures: Figures) -> float | None:
        return figures.others_us[than] / figures.kernel_us if than in figures.others_us else None

    return Asked(f"times faster than {than}", ">=", least, find)


def _copy_us(figures: Figures, nbytes: int) -> float:
    return nbytes / figures.copy_gbps / 1000
