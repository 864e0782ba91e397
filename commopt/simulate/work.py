"""What compressing takes on a GPU, from the bandwidth of its memory: an estimate for when nothing was measured."""

from __future__ import annotations

from collections.abc import Iterable

from commopt.aggregate import Aggregator, WorkKind
from commopt.compress import Passes
from commopt.cost import Curve, WorkKey
from commopt.simulate.gpus import Gpu

MEMORY_EFFICIENCY = 0.7
"""The share of the memory's data sheet that a fused kernel reaches."""
LAUNCH_US = 5.0
"""From one kernel to the next."""

_VALUE = 4  # bytes; work is counted as float32


def gpu_work(gpu: Gpu, aggregators: Iterable[Aggregator], rows: int) -> dict[WorkKey, Curve]:
    """Return curves for all work that these aggregators do after warm-up.

    rows: how many messages an owner adds up.
    """
    passes: dict[tuple[WorkKind, str], Passes] = {("copy", ""): Passes(2 * _VALUE, 1)}
    for aggregator in aggregators:
        passes |= aggregator.passes(rows)
    return {WorkKey(*key): _curve(each, gpu) for key, each in passes.items()}


def _curve(passes: Passes, gpu: Gpu) -> Curve:
    """Return the time by bytes of float32."""
    gb_per_s = MEMORY_EFFICIENCY * gpu.memory_gb_per_s
    return Curve.linear(passes.kernels * LAUNCH_US, passes.nbytes / _VALUE / gb_per_s * 1e-3)
