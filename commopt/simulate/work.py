"""What compressing takes on a GPU, from the bandwidth of its memory: an estimate for when nothing was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass

from commopt.aggregate import Aggregator, PowerSGD
from commopt.compress import Compressor, Exact
from commopt.compress.plain import Plain
from commopt.cost import Curve, WorkKey
from commopt.simulate.gpus import Gpu

MEMORY_EFFICIENCY = 0.7
"""The share of the memory's data sheet that a fused kernel reaches."""
LAUNCH_US = 5.0
"""From one kernel to the next."""

_VALUE = 4  # bytes; work is counted as float32
_SAMPLE_NUMEL = 2**20


@dataclass(frozen=True)
class Passes:
    """Bytes of memory that work moves for each value, and the kernels it launches."""

    nbytes: float
    kernels: int

    def curve(self, gpu: Gpu) -> Curve:
        """Return the time by bytes of float32."""
        gb_per_s = MEMORY_EFFICIENCY * gpu.memory_gb_per_s
        return Curve.linear(self.kernels * LAUNCH_US, self.nbytes / _VALUE / gb_per_s * 1e-3)


def gpu_work(gpu: Gpu, aggregators: Iterable[Aggregator], rows: int) -> dict[WorkKey, Curve]:
    """Return curves for all work that these aggregators do after warm-up.

    rows: how many messages an owner adds up.
    """
    work = {WorkKey("copy"): Passes(2 * _VALUE, 1).curve(gpu)}
    for part in (part for aggregator in aggregators for part in _inside(aggregator)):
        if isinstance(part, PowerSGD):
            for kind, passes in _LOW_RANK.items():
                work[WorkKey(kind, f"PowerSGD({part.matrix_rank})")] = passes.curve(gpu)
        if isinstance(part, Compressor):
            for compressor in (part, Exact()):  # the latter for what is left dense beside it
                for kind, passes in _passes(compressor, rows).items():
                    work[WorkKey(kind, repr(compressor))] = passes.curve(gpu)
    return work


# Fill the matrices with gradients and residuals (three passes), read them for the product, subtract what travels (two),
# write the result; the factors themselves are small. Ten kernels, four of them for orthonormal columns. A second
# message reads the matrices once more, for another product and its orthonormal columns.
_LOW_RANK = {"factor": Passes(7 * _VALUE, 10), "refresh": Passes(_VALUE, 5)}


def _passes(compressor: Compressor, rows: int) -> dict[str, Passes]:
    """Return what the kernels of csrc/ move for each value; every compressor but a cast keeps a residual."""
    wire = compressor.payload_nbytes(_SAMPLE_NUMEL) / _SAMPLE_NUMEL
    if isinstance(compressor, Plain):
        # A sum is kept in memory while the rows are added to it, one after the other.
        return {
            "encode": Passes(_VALUE + wire, 1),
            "decode": Passes(wire + _VALUE, 1),
            "recode": Passes(wire + 2 * _VALUE, rows + 1),
        }
    if compressor.sparse:
        # Values and residual in, p out, and p read once more; what comes after reads the few that can be selected.
        encode = Passes(4 * _VALUE + wire, 9)
        # A message to all is decoded with those of all ranks into one result.
        decode = Passes(wire + _VALUE / rows, 1)
        return {"encode": encode, "decode": decode, "recode": Passes(wire + (_VALUE + encode.nbytes) / rows, 10)}
    # One pass: values and the old residual in, codes and the new one out. A recoded sum never leaves the registers.
    residuals = 2 * _VALUE
    return {
        "encode": Passes(_VALUE + residuals + wire, 1),
        "decode": Passes(wire + _VALUE, 1),
        "recode": Passes(wire + (residuals + wire) / rows, 1),
    }


def _inside(value: object) -> Iterator[object]:
    """Yield an aggregator and everything it is made of."""
    yield value
    if is_dataclass(value):
        for field in fields(value):
            yield from _inside(getattr(value, field.name))
