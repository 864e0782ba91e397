"""What an aggregator costs on this model's own gradients: short trials between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, count
from math import ceil
from time import perf_counter_ns
from typing import TypeVar

import torch

from commopt.aggregate import Aggregator
from commopt.feedback import Account, Layout, Ledger
from commopt.groups import Team
from commopt.kernels.pack import pack, unpack

Name = TypeVar("Name")

_FIRST_NBYTES = 4 * 1024
_GROWTH = 4
LARGEST_NBYTES = 128 * 1024**2  # bandwidth is reached, and a few buffers of it fit beside any training
_PACKED_NBYTES = 16 * 1024**2  # more than fits in a cache
_FEWEST_CALLS, _MOST_CALLS = 3, 100
_LONG_ENOUGH_US = 30_000.0  # buffers on the way swallow short messages; a lane that is behind sees what is behind them
_LEAST_LAYOUTS = 3  # two points make a line, and a third says whether it is one

Points = list[tuple[int, float]]  # bytes, microseconds


def samples_of(layout: Layout, itemsize: int) -> list[Layout]:
    """Return beginnings of `layout` of 4 KiB, 16 KiB, ... and all of it, up to 128 MiB: real shapes, of any length."""
    layout = layout.cut(0, min(layout.numel, LARGEST_NBYTES // itemsize))
    ends = list(accumulate(piece.numel for piece in layout.pieces))
    samples: list[Layout] = []
    nbytes = _FIRST_NBYTES
    while 2 * nbytes <= layout.numel * itemsize:
        whole = next(number for number, end in enumerate(ends) if end * itemsize >= nbytes)
        # A large first parameter is cut, or there would be no small sample.
        end = ends[whole] if ends[whole] * itemsize < 2 * nbytes else nbytes // itemsize
        samples.append(layout.cut(0, end))
        nbytes *= _GROWTH
    return [*samples, layout]


def calibrate(
    aggregators: Mapping[Name, Aggregator], samples: Sequence[Layout], dtype: torch.dtype, team: Team, budget_s: float
) -> dict[Name, Points]:
    """Return by name what all_reduce of each sample takes, in microseconds, on the slowest rank.

    Runs on the lane, collectively. Stops before the samples that would break the budget, which is shared evenly; the
    smallest are always run. Ranks decide by the same times, so that they stop alike.
    """
    points: dict[Name, Points] = {}
    for name, aggregator in aggregators.items():
        left_us = budget_s * 1e6 / len(aggregators)
        points[name] = []
        for place, layout in enumerate(samples):
            nbytes = layout.numel * dtype.itemsize
            expected_us = points[name][-1][1] * nbytes / points[name][-1][0] if points[name] else 0.0
            if place >= _LEAST_LAYOUTS and _would_break(left_us, expected_us):
                break
            trial = _Trial(aggregator, layout, dtype, team)
            if team.default_device.type == "cuda":
                trial.mean_us(1)  # the first collective of a level takes NCCL longer than any budget
            (once_us,) = _slowest([trial.mean_us(1)], team)
            calls = _calls(once_us)
            (mean_us,) = _slowest([trial.mean_us(calls)], team)
            points[name].append((nbytes, mean_us))
            left_us -= once_us + calls * mean_us
    return points


def expected_us(samples: Sequence[Layout], itemsize: int, us_per_byte: float, budget_us: float) -> float:
    """Return about how long `calibrate` tries out one aggregator, within its share of the budget.

    us_per_byte: what a byte takes; inf where that is not known.
    """
    spent_us = 0.0
    for place, layout in enumerate(samples):
        once_us = max(us_per_byte * layout.numel * itemsize, 1.0)
        if place >= _LEAST_LAYOUTS and _would_break(budget_us - spent_us, once_us):
            break
        spent_us += once_us * (1 + _calls(once_us))
    return min(spent_us, budget_us)


def _calls(once_us: float) -> int:
    return min(_MOST_CALLS, max(_FEWEST_CALLS, ceil(_LONG_ENOUGH_US / once_us)))


def _would_break(left_us: float, once_us: float) -> bool:
    return once_us * (1 + _FEWEST_CALLS) > left_us


def packing_us_per_byte(dtype: torch.dtype, team: Team) -> float:
    """Return what it takes the slowest rank to copy a byte into a message and back; collective, on a lane."""
    message = torch.zeros(_PACKED_NBYTES // dtype.itemsize, dtype=dtype, device=team.default_device)
    parts = list(message.clone().tensor_split(2))
    pack(parts, message)
    _finish(message.device)
    begun_ns = perf_counter_ns()
    for _ in range(_FEWEST_CALLS):
        pack(parts, message)
        unpack(message, parts)
    _finish(message.device)
    (mean_us,) = _slowest([(perf_counter_ns() - begun_ns) / 1000 / _FEWEST_CALLS], team)
    return mean_us / message.nbytes


class _Trial:
    """One sample, sent again and again as a lane would."""

    def __init__(self, aggregator: Aggregator, layout: Layout, dtype: torch.dtype, team: Team) -> None:
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(layout.numel, generator=generator, dtype=torch.float32, device="cpu")
        self._buffer = values.to(team.default_device, dtype)
        self._layout = Layout.anonymous(layout.numel) if aggregator.lossless else layout
        self._aggregator, self._team = aggregator, team
        self._ledger, self._steps = Ledger(), count(aggregator.start_step)

    def mean_us(self, calls: int) -> float:
        """Return what each of so many calls takes on this rank; without pauses, in which a network would recover."""
        self._team.all_reduce(torch.zeros(1, dtype=torch.float32, device=self._buffer.device))
        _finish(self._buffer.device)
        begun_ns = perf_counter_ns()
        for _ in range(calls):
            self._ledger.begin_step()
            account = Account(self._layout, next(self._steps), ledger=self._ledger)
            self._aggregator.all_reduce(self._buffer, self._team, 1.0 / self._team.size, account)
            self._ledger.end_bucket(last=True)
        _finish(self._buffer.device)
        return (perf_counter_ns() - begun_ns) / 1000 / calls


def _slowest(own_us: Sequence[float], team: Team) -> list[float]:
    """Return the largest of all ranks' times, each for itself."""
    mine = torch.tensor(own_us, dtype=torch.float64, device=team.default_device)
    everyone = mine.new_empty(team.size * len(own_us))
    team.all_gather(everyone, mine)
    slowest: list[float] = everyone.view(team.size, len(own_us)).amax(0).tolist()
    return slowest


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
