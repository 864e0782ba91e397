"""Time everybody who can do a job, in turns with a device copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import ceil

import torch
from torch import Tensor

from bench.clocks import Clock
from bench.kernels.asked import Figures
from bench.kernels.case import KERNEL, REFERENCE, Case, Contender
from bench.kernels.report import Measurement, Missing, Record
from bench.turns import Turns, take_turns

_SMALL_S = 20e-6  # below, what events take now more and now less would count
_BATCH_S = 200e-6
_MOST_CALLS = 50
_POISONS = (0xA5, 0x5A)  # no byte equals both


class DeviceCopy:
    """A copy from memory to other memory of one device."""

    def __init__(self, device: torch.device) -> None:
        self._source = self._target = torch.empty(0, device=device)

    def moving(self, nbytes: int) -> tuple[Callable[[], object], int]:
        """Return what moves `nbytes` or a little less, half of them read, half written; and how many exactly."""
        numel = max(nbytes // 8, 1)
        if numel > self._source.numel():
            self._source = torch.randn(numel, device=self._source.device)
            self._target = torch.empty_like(self._source)
        return partial(self._target[:numel].copy_, self._source[:numel]), 8 * numel


def calls_for(taken_s: float) -> int:
    """Return how many calls to time together when one takes `taken_s`."""
    if taken_s >= _SMALL_S:
        return 1
    return _MOST_CALLS if taken_s * _MOST_CALLS <= _BATCH_S else ceil(_BATCH_S / taken_s)


def measure(case: Case, copy: DeviceCopy, device: torch.device, repeats: int, clock: Clock) -> Iterator[Record]:
    """Yield a record for each contender: what it takes, or why it cannot be measured."""
    missing = partial(Missing, case.name, case.variant)
    for absent in case.absent():
        yield missing(absent.name, failed=False, why=absent.why)
    able = []
    for contender in case.contenders(device):
        try:
            require_written(contender)
        except Exception as error:  # whatever is wrong with one, the others are measured
            yield missing(contender.name, failed=contender.name in (KERNEL, REFERENCE), why=described(error))
        else:
            able.append(contender)
    yield from _timed(case, able, copy, repeats, clock)


def require_written(contender: Contender) -> None:
    """Call a contender twice; raises RuntimeError when it leaves a byte of what it should overwrite as it was."""
    outputs = [tensor.view(-1).view(torch.uint8) for tensor in contender.overwritten]
    untouched = [torch.ones_like(output, dtype=torch.bool) for output in outputs]
    for poison in _POISONS:
        for output in outputs:
            output.fill_(poison)
        contender.call()
        for output, same in zip(outputs, untouched, strict=True):
            same &= output == poison
    nbytes = sum(int(same.sum()) for same in untouched)
    if nbytes:
        raise RuntimeError(f"{nbytes} of {sum(map(Tensor.numel, outputs))} bytes were not written")


def described(error: Exception) -> str:
    """Return an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _timed(
    case: Case, contenders: list[Contender], copy: DeviceCopy, repeats: int, clock: Clock
) -> Iterator[Measurement]:
    move, moved_nbytes = copy.moving(case.nbytes)
    operations = [move, *(contender.call for contender in contenders)]
    move()  # the only one that has not run yet
    calls = [calls_for(clock(operation, 1).taken_s) for operation in operations]
    copied, *taken = take_turns(operations, repeats, clock, calls)
    copy_gbps = moved_nbytes / copied.median_us / 1000
    by_name = {contender.name: turns for contender, turns in zip(contenders, taken, strict=True)}
    for name, turns in by_name.items():
        yield _measurement(case, name, turns, copy_gbps, {each: by_name[each].median_us for each in by_name})


def _measurement(case: Case, name: str, turns: Turns, copy_gbps: float, all_us: dict[str, float]) -> Measurement:
    figures = Figures(case.nbytes, copy_gbps, turns.median_us, all_us)
    return Measurement(
        case.name,
        case.variant,
        name,
        case.nbytes,
        turns.calls,
        turns.best_us,
        turns.median_us,
        turns.host_us if turns.queued else None,
        case.nbytes / turns.median_us / 1000,
        copy_gbps,
        tuple(asked.judge(figures) for asked in case.asked) if name == KERNEL else (),
    )
