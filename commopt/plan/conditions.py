"""The conditions a plan was made for, and whether they still hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from commopt.plan.correction import ratios
from commopt.plan.evidence import DRIFT, Estimate, ms
from commopt.plan.prices import Costs
from commopt.plan.window import Observed, Window


@dataclass(frozen=True)
class Conditions:
    """When gradients are ready and what messages cost, as far as a plan depends on it.

    span_us: from the first gradient to the last; what comes before changes no plan.
    positions: of each unit in that span, from 0 to 1. observed: the messages that ran.
    """

    span_us: Estimate
    positions: Mapping[tuple[str, ...], Estimate]
    observed: tuple[Observed, ...]

    @classmethod
    def of(cls, window: Window) -> Conditions:
        """Extract them from a window with at least one step."""
        times = [unit.ready_us for unit in window.units]
        first, last = min(times), max(times)
        error = window.ready_error_us[times.index(last)]
        span_us = Estimate(last - first, error)
        scale = span_us.value or 1.0
        positions = {
            unit.names: Estimate((unit.ready_us - first) / scale, (error + own) / scale)
            for unit, own in zip(window.units, window.ready_error_us, strict=True)
        }
        return cls(span_us, positions, window.observed)

    def drift_from(self, before: Conditions, costs: Costs) -> str:
        """Say what moved by more than 15 % and more than noise explains, or nothing.

        costs: what is known of messages now, so that others in size or number are not mistaken for slower ones.
        """
        if self.positions.keys() != before.positions.keys():
            return "other parameters train"
        if self.span_us.drifted(before.span_us, DRIFT):
            return (
                f"backward takes {ms(self.span_us.value)} from the first gradient on, {ms(before.span_us.value)} before"
            )
        for names, now in self.positions.items():
            then = before.positions[names]
            if now.differs(then, DRIFT):
                return f"{names[0]!r} is ready after {now.value:.0%} of backward, {then.value:.0%} before"
        observed, observed_before = ratios(self.observed, costs), ratios(before.observed, costs)
        for strategy in observed.keys() & observed_before.keys():
            now, then = observed[strategy], observed_before[strategy]
            if now.drifted(then, DRIFT):
                return f"messages by {strategy!r} take {now.value / then.value:.2f} times what they took"
        return ""
