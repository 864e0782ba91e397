"""Whether a plan did what was expected of it."""

from __future__ import annotations

from math import hypot

from commopt.plan.correction import ratios
from commopt.plan.evidence import DRIFT, LEAST_GAIN, WORSE, Estimate, ms
from commopt.plan.plan import Prediction
from commopt.plan.prices import Costs
from commopt.plan.window import Window


def of_messages(window: Window, costs: Costs) -> str:
    """Say which messages take 15 % more or less than `costs`, and more than noise explains, or nothing.

    Those of a strategy by their median, or all together. costs: as they were known when the plan was made.
    """
    for strategy, ratio in ratios(window.observed, costs).items():
        if ratio.drifted(Estimate(1.0), DRIFT):
            return f"messages by {strategy!r} take {ratio.value:.2f} times what was expected"
    expected_us = sum(message.expected_us(costs) for message in window.observed)
    lane_us = sum(message.lane_us.value for message in window.observed)
    lane = Estimate(lane_us, hypot(*(message.lane_us.error for message in window.observed)))
    if lane.drifted(Estimate(expected_us), DRIFT):
        return f"messages take {ms(lane_us)} together, {ms(expected_us)} expected"
    return ""


def of_step(window: Window, predicted: Prediction, error_us: float = 0.0) -> str:
    """Say in what a step differs from the prediction, by more than noise explains, or nothing.

    In its exposed part by 15 %, if they are 1 % of the step, or in all by 2 %. error_us: of the prediction, which is
    known no better than the step it was made from.
    """
    exposed, step = window.exposed, window.step
    expected = Estimate(predicted.exposed_us, error_us)
    if exposed.differs(expected, max(DRIFT * predicted.exposed_us, LEAST_GAIN * step.value)):
        return f"{ms(exposed.value)} of communication are exposed, {ms(predicted.exposed_us)} expected"
    if step.differs(Estimate(predicted.finish_us, error_us), WORSE * predicted.finish_us):
        return f"a step takes {ms(step.value)}, {ms(predicted.finish_us)} expected"
    return ""
