"""Who the others wait for: ranks whose gradients are late in most steps, by more than the noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# A rank is named when it is late by each of these, in the median over steps at its worst bucket:
_OF_A_STEP = 0.05  # times the step
_STANDARD_ERRORS = 6.0  # times how well that median is known, from how lateness differs from step to step,
_OF_STEP_SPREAD = 1.0  # times how much steps differ in length,
_OF_CLOCKS = 2.0  # times the uncertainty of the clocks.
_FEWEST_STEPS = 5

_SIGMA_PER_MAD = 1.4826  # of normally distributed values
_MEDIAN_ERROR = 1.2533  # standard error of a median in those of a mean


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for: it is `late_us` behind the median of the others.

    Half of that or more is there when `bucket` (DDP's number) is ready. None: already when the first bucket is, so that
    it comes from data loading, the forward pass or the start of backward.
    """

    rank: int
    late_us: float
    bucket: int | None
    label: str

    def __str__(self) -> str:
        if self.bucket is None:
            place = "before backward: already its first bucket is late (data loading, forward, start of backward)"
        else:
            place = f"in backward, by half of that or more up to bucket {self.bucket} ({self.label})"
        return f"rank {self.rank} is {self.late_us / 1000:.2f} ms behind the others; it falls behind {place}"


def lateness_us(ready_us: Array) -> Array:
    """Return `[step, rank, bucket]` ready times less the median of the other ranks' ready times."""
    ranks = ready_us.shape[1]
    if ranks == 1:
        return np.zeros_like(ready_us)
    order = np.sort(ready_us, axis=1)
    place = ready_us.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    others = ranks - 1

    def other(number: int) -> Array:
        """The others' ready times in order: that of the rank itself is passed over."""
        low, high = order[:, number : number + 1], order[:, number + 1 : number + 2]
        return np.where(place > number, low, high)

    median_of_others = (other((others - 1) // 2) + other(others // 2)) / 2
    return ready_us - median_of_others


def stand_out(ready_us: Array, step_us: Array, uncertainty_us: Array) -> list[tuple[int, int, float]]:
    """Return (rank, bucket by which half of the delay is there, lateness) of the ranks that are late, latest first.

    ready_us: [step, rank, bucket], buckets in the order in which they become ready. step_us: length of each step.
    uncertainty_us: of each rank's clock. All that is compared is a median or a median distance from it, so that
    single slow steps count for nothing.
    """
    steps = len(ready_us)
    if steps < _FEWEST_STEPS:
        return []
    late = lateness_us(ready_us)
    typical: Array = np.median(late, axis=0)
    spread = _SIGMA_PER_MAD * np.median(np.abs(late - typical), axis=0)
    step_spread = _SIGMA_PER_MAD * float(np.median(np.abs(step_us - np.median(step_us))))
    floor = max(_OF_A_STEP * float(np.median(step_us)), _OF_STEP_SPREAD * step_spread)
    found = []
    for rank, profile in enumerate(typical):
        worst = int(profile.argmax())
        amount = float(profile[worst])
        noise = max(float(spread[rank, worst]), float(np.median(spread)))
        needed = max(
            floor,
            noise * _STANDARD_ERRORS * _MEDIAN_ERROR / steps**0.5,
            _OF_CLOCKS * float(uncertainty_us[rank] + np.median(uncertainty_us)),
        )
        if amount > needed:
            found.append((rank, int((profile >= amount / 2).argmax()), amount))
    return sorted(found, key=lambda entry: -entry[2])
