"""What some steps of a run measured, put together from all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isnan

import numpy as np

from commopt.errors import ConfigurationError
from commopt.plan.evidence import Estimate, ms
from commopt.plan.plan import Bucket, Unit
from commopt.plan.prices import Costs, Floats


@dataclass(frozen=True)
class Observed:
    """A message as it was run in every step.

    lane_us: for how long it kept the lane, from the moment it could have started: with all that goes by before it
        does start, and with packing. units: how many are packed into it.
    """

    bucket: Bucket
    lane_us: Estimate
    units: int = 1

    def expected_us(self, costs: Costs) -> float:
        """Return for how long it should keep the lane; raises ConfigurationError for a strategy without a price."""
        return costs.lane_us(self.bucket.nbytes, self.bucket.strategy, self.bucket.chunks, self.units)


@dataclass(frozen=True)
class Faithfulness:
    """How well compressed updates follow the gradients, on the first rank.

    cosine: of updates and the dense mean, sampled; None before the first sample. residual_norm: L2, of all that is kept
    for later.
    """

    cosine: float | None
    residual_norm: float


@dataclass(frozen=True)
class Window:
    """Measurements of a few steps, as rank 0 gets them.

    units: in the order of backward, `ready_us` the mean over usual steps (see `of`); ready_error_us its error for each.
    step_us, exposed_us: of each step, on the slowest rank. lateness_us: of each rank, how much later than on the first
        rank its backward ended; () when not known.
    """

    units: tuple[Unit, ...]
    ready_error_us: tuple[float, ...]
    step_us: tuple[float, ...]
    exposed_us: tuple[float, ...]
    observed: tuple[Observed, ...]
    lateness_us: tuple[float, ...] = ()
    fidelity: Faithfulness | None = None

    @classmethod
    def of(
        cls,
        units: Sequence[Unit],
        buckets: Sequence[Bucket],
        begin_us: Floats,
        compute_end_us: Floats,
        ready_us: Floats,
        started_us: Floats,
        finished_us: Floats,
        lateness_us: Sequence[float] = (),
    ) -> Window:
        """Reduce times of the last rank, on one clock, to means over usual steps.

        The usual steps are the smallest majority around the median length, so that a few wild steps move nothing. Means
        over the same steps add up to a step; medians do not, where each message is late now and then.

        begin_us, compute_end_us: [steps]. ready_us: [steps, units]; the units' own ready_us does not count.
        started_us, finished_us: [steps, buckets], in the order of the lane. A message could start, on a rank, when the
        one before it had finished there and its last gradient was ready; `started_us` is when it could on the last
        rank, whenever it did. Steps with a NaN in any of these are left out. A unit that is NaN in a step had no
        gradient there; if it never has one, it comes with the one before it.
        """
        columns = [begin_us[:, None], compute_end_us[:, None], started_us, finished_us]
        good = ~np.isnan(np.concatenate(columns, axis=1)).any(axis=1)
        begin, compute_end, end = begin_us[good], compute_end_us[good], finished_us[good].max(axis=1, initial=0.0)
        if not len(begin):
            return cls(tuple(units), (0.0,) * len(units), (), (), (), tuple(lateness_us))
        usual = _usual(np.maximum(end, compute_end) - begin)
        ready = _ready(ready_us[good] - begin[:, None], usual)
        lane_us = np.maximum(finished_us[good] - started_us[good], 0.0)
        lane = [Estimate.mean_of(column, usual) for column in lane_us.T.tolist()]
        home = {name: number for number, unit in enumerate(units) for name in unit.names}
        packed = [len({home.get(name) for name in bucket.names}) for bucket in buckets]
        measured = [replace(unit, ready_us=max(0.0, at.value)) for unit, at in zip(units, ready, strict=True)]
        return cls(
            units=tuple(measured),
            ready_error_us=tuple(at.error for at in ready),
            step_us=tuple((np.maximum(end, compute_end) - begin).tolist()),
            exposed_us=tuple(np.maximum(end - compute_end, 0.0).tolist()),
            observed=tuple(Observed(*row) for row in zip(buckets, lane, packed, strict=True)),
            lateness_us=tuple(lateness_us),
        )

    def __post_init__(self) -> None:
        if len(self.ready_error_us) != len(self.units) or len(self.exposed_us) != len(self.step_us):
            raise ConfigurationError(
                f"window: {len(self.units)} units with {len(self.ready_error_us)} errors, {len(self.step_us)} steps "
                f"with {len(self.exposed_us)} exposed times; give one for each"
            )

    @cached_property
    def step(self) -> Estimate:
        """Time of a step; there must be one."""
        return Estimate.of(self.step_us)

    @cached_property
    def exposed(self) -> Estimate:
        """What a usual step takes after its last gradient; there must be one."""
        return Estimate.mean_of(self.exposed_us, _usual(np.array(self.step_us)))

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The messages that were run."""
        return tuple(message.bucket for message in self.observed)

    def straggler(self, share: float) -> str:
        """Say which rank ends its backward later than the median rank by more than `share` of a step, or nothing."""
        if not self.lateness_us or not self.step_us:
            return ""
        rank = int(np.argmax(self.lateness_us))
        late_us = self.lateness_us[rank] - float(np.median(self.lateness_us))
        if late_us <= share * self.step.value:
            return ""
        return f"rank {rank} ends its backward {ms(late_us)} after the median rank, and the others wait for it"


def _usual(step_us: Floats) -> list[int]:
    """Return which steps are the smallest majority around the median length, in their order."""
    nearest = np.argsort(np.abs(step_us - np.median(step_us)), kind="stable")
    return sorted(nearest[: len(step_us) // 2 + 1].tolist())


def _ready(times_us: Floats, usual: Sequence[int]) -> list[Estimate]:
    """Return the mean of each column over usual steps.

    Where it is NaN throughout, that of the column before, or of the first.
    """
    known = [None if all(map(isnan, column)) else Estimate.mean_of(column, usual) for column in times_us.T.tolist()]
    last = next((estimate for estimate in known if estimate is not None), Estimate(0.0))
    ready = []
    for estimate in known:
        last = last if estimate is None else estimate
        ready.append(last)
    return ready
