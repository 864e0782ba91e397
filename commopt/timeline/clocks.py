"""By how much the clocks of the ranks differ, found out with collectives alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt
import torch

from commopt.groups import Team

_WARM_UP_ROUNDS = 4


@dataclass(frozen=True)
class Offsets:
    """Microseconds to add to each rank's clock to get rank 0's, and by how much they may be wrong either way."""

    offset_us: tuple[float, ...]
    uncertainty_us: tuple[float, ...]


def offsets_from(entered_us: Sequence[Sequence[float]], left_us: Sequence[Sequence[float]]) -> Offsets:
    """Return the offsets that follow from `[round][rank]` times, each on the rank's own clock.

    Nobody leaves a collective before the last rank has entered it. So with o the offsets, left_i + o_i >= entered_j +
    o_j for any two ranks, which bounds o_j - o_i from above; the tightest bounds of all rounds, also by way of third
    ranks (shortest paths), leave an interval around each offset. Its middle is taken. The clocks must not drift while
    the rounds last.
    """
    entered, left = np.asarray(entered_us, dtype=np.float64), np.asarray(left_us, dtype=np.float64)
    world_size = entered.shape[1]
    bound = np.full((world_size, world_size), np.inf)  # [i, j]: o_j - o_i is at most this
    for enters, leaves in zip(entered, left, strict=True):
        np.minimum(bound, leaves[:, None] - enters[None, :], out=bound)
    np.fill_diagonal(bound, 0.0)
    upper, lower = _shortest(bound), -_shortest(bound.T)
    middle, half = (upper + lower) / 2, (upper - lower) / 2
    return Offsets(tuple(middle.tolist()), tuple(half.tolist()))


def _shortest(length: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the length of the shortest path from 0 to every place (Bellman and Ford)."""
    distance: npt.NDArray[np.float64] = length[0].copy()
    for _ in range(len(length)):
        shorter = np.minimum(distance, (distance[:, None] + length).min(axis=0))
        if (shorter == distance).all():
            break
        distance = shorter
    return distance


def measure_offsets(team: Team, rounds: int = 32) -> Offsets:
    """Compare the clocks (perf_counter) of all ranks of `team`; collective, on a lane."""
    source = torch.zeros(1, dtype=torch.float32, device=team.default_device)
    output = source.new_empty(team.size)
    times_ns = []
    for number in range(_WARM_UP_ROUNDS + rounds):
        entered_ns = perf_counter_ns()
        team.all_gather(output, source)
        output.cpu()  # on CUDA the collective has only been queued
        if number >= _WARM_UP_ROUNDS:
            times_ns.append((entered_ns, perf_counter_ns()))
    own = torch.tensor(times_ns, device=team.default_device)
    everyone = own.new_empty(team.size * own.numel())
    team.all_gather(everyone, own.flatten())
    table = everyone.cpu().view(team.size, rounds, 2).numpy().astype(np.float64) / 1000
    return offsets_from(table[:, :, 0].T.tolist(), table[:, :, 1].T.tolist())
