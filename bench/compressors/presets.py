"""commopt's presets as contenders: the aggregator's own steps, in a team of 2 nodes x 2 ranks that sends nothing."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

import torch

from bench.compressors.contender import Contender, Start
from bench.compressors.gradients import Gradients
from bench.mute import LoneRank
from commopt import Aggregator, build_preset
from commopt.aggregate import Call

RANKS_PER_NODE = (2, 2)
_TURNS = 2  # alternating PowerSGD refreshes its two factors in turns


def preset(text: str) -> Contender:
    """Return the contender that "name" or "name:option=value" describes; raises ConfigurationError as build_preset."""
    aggregator = build_preset(text)

    def enter(gradients: Gradients) -> Start:
        rank = LoneRank(aggregator, gradients.layouts, RANKS_PER_NODE, device=gradients.device)

        def start(number: int) -> Callable[[], None]:
            rank.reduce(number, gradients.buffers[number])
            return _nothing_to_wait_for

        return start

    return Contender(text, enter, lambda gradients: _payload_nbytes(aggregator, gradients))


def _nothing_to_wait_for() -> None:
    """The next step's work follows on the same stream."""


def _payload_nbytes(aggregator: Aggregator, gradients: Gradients) -> float:
    team = LoneRank(aggregator, gradients.layouts, RANKS_PER_NODE, device=gradients.device).team
    first = aggregator.start_step
    return mean(
        sum(
            each.nbytes
            for layout in gradients.layouts
            for each in aggregator.calls(layout, torch.float32, team, gradients.device, step)
            if isinstance(each, Call) and each.level != "intra"
        )
        for step in range(first, first + _TURNS)
    )
