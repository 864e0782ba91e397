"""What to measure, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass

from commopt.errors import ConfigurationError

PARTS = ("intra", "inter", "world", "work")

_LEAST_NBYTES = 64
_MOST_NBYTES = 2**33


@dataclass(frozen=True)
class Settings:
    """All ranks must have the same; raises ConfigurationError for what cannot work.

    min_nbytes, max_nbytes, factor: messages grow from the first to the second, each `factor` times the one before. Both
        sides of a collective stay below the largest: all_gather over P ranks stops at a P-th of it.
    budget_s: seconds for everything. Messages stop growing where it ends.
    parts: what of PARTS is measured; "work" is compression.
    warm_up, iterations: calls before and while time is taken; long messages get fewer, at least 1 and 3.
    """

    min_nbytes: int = 2**10
    max_nbytes: int = 2**28
    factor: float = 2.0
    budget_s: float = 120.0
    parts: tuple[str, ...] = PARTS
    warm_up: int = 5
    iterations: int = 20

    def __post_init__(self) -> None:
        if not _LEAST_NBYTES <= self.min_nbytes <= self.max_nbytes:
            raise ConfigurationError(
                f"--min-bytes {self.min_nbytes} must be at least {_LEAST_NBYTES} and no more than --max-bytes "
                f"{self.max_nbytes}"
            )
        if self.max_nbytes > _MOST_NBYTES:
            raise ConfigurationError(
                f"--max-bytes {self.max_nbytes} is more than {_MOST_NBYTES} bytes; pass 8G or less"
            )
        if not 1.1 <= self.factor <= 64:
            raise ConfigurationError(f"--factor {self.factor:g} must be between 1.1 and 64, for example 2")
        if not 0 < self.budget_s < float("inf"):
            raise ConfigurationError(f"--budget {self.budget_s:g} must be a number of seconds above 0, for example 120")
        if not self.parts or not set(self.parts) <= set(PARTS):
            raise ConfigurationError(f"--only {','.join(self.parts)} must name some of {', '.join(PARTS)}")
        if self.warm_up < 1 or self.iterations < 3:
            raise ConfigurationError(
                f"warm_up={self.warm_up}, iterations={self.iterations}: at least 1 and 3 are needed for a median"
            )

    def sizes(self, most_nbytes: int | None = None) -> tuple[int, ...]:
        """Return the bytes of every message, smallest first, none above `most_nbytes` (but for the first)."""
        limit = self.max_nbytes if most_nbytes is None else min(most_nbytes, self.max_nbytes)
        found, exact = [self.min_nbytes], self.min_nbytes * self.factor
        while exact <= limit:
            found.append(round(exact))
            exact *= self.factor
        return tuple(found)


def nbytes_text(nbytes: float) -> str:
    """Return `nbytes` for people: "4 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"
