# SPDX-License-Identifier: Apache-2.0
"""fp8 beside 8-bit integers at the same bytes: `python -m bench.evidence.fp8 --json FILE`, a minute.

Trains the small GPT of bench.evidence.accumulated_bias in this process and sends each of its gradients through both, in
blocks of 256 with a float32 scale each, with error feedback. What is missing, as L2 norm relative to what should have
been sent: of a gradient that is encoded once, of a gradient plus the residual of the steps before, of the sum of all
steps; and of a normal and a Student's t distribution (3 degrees of freedom). And for how long one thread encodes and
decodes an element.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import mean, median
from time import thread_time

import torch
from torch import Tensor

from bench.command_line import measure_or_report
from bench.document import table
from bench.evidence.accumulated_bias import Channel
from bench.evidence.compression_error import flat_gradients, relative_error
from commopt import Compressor, Quantize
from commopt.compress import ErrorFeedback, RngKey
from commopt.document import parse, read_text
from commopt.kernels.codec import TINY
from commopt.kernels.residual import Residual, piece_numel

BLOCK = 256
_LAYERS, _WIDTH, _CONTEXT, _BATCH = 2, 64, 32, 8
_TIMED_NUMEL, _TIMES = 2**20, 15


@dataclass(frozen=True, repr=False)
class E4M3(Compressor):
    """Floats of 4 bits for the exponent and 3 for the mantissa, whose largest is the absmax of their block."""

    block: int = BLOCK

    @property
    def granularity(self) -> int:
        """Whole blocks."""
        return self.block

    def payload_nbytes(self, chunk_numel: int) -> int:
        """Return the bytes of codes and scales, as many as those of 8-bit integers."""
        return Quantize(8, self.block).payload_nbytes(chunk_numel)

    @torch.no_grad()
    def compress(
        self,
        values: Tensor,
        payload: Tensor,
        chunk_numel: int,
        scale: float,
        carry: ErrorFeedback | None = None,
        rng: RngKey = RngKey(),
    ) -> None:
        """Encode one row of whole blocks, in pieces that stay in the cache."""
        codes, scales = self._parts(payload, chunk_numel)
        residual = None if carry is None else Residual(carry)
        step = piece_numel(values.device)
        work = torch.empty(step)
        for begin in range(0, values.numel(), step):
            end = min(begin + step, values.numel())
            p = torch.zeros(-(-(end - begin) // self.block), self.block)
            torch.mul(values[begin:end], scale, out=p.view(-1)[: end - begin])
            if residual is not None:
                residual.add_old(begin, p.view(-1)[: end - begin], work[: end - begin])
            blocks = slice(begin // self.block, begin // self.block + len(p))
            absmax = p.abs().amax(1, keepdim=True)
            units = scales[blocks].copy_(absmax / torch.finfo(torch.float8_e4m3fn).max)
            codes[blocks].copy_(p / units.clamp_min(TINY))
            if residual is not None:
                decoded = codes[blocks].float().mul_(units).view(-1)[: end - begin]
                residual.write_new(begin, p.view(-1)[: end - begin], decoded)

    def decompress(self, payload: Tensor, values: Tensor, chunk_numel: int) -> None:
        """Decode one row."""
        codes, scales = self._parts(payload, chunk_numel)
        step = piece_numel(values.device)
        for begin in range(0, values.numel(), step):
            part = values[begin : begin + step]
            blocks = slice(begin // self.block, -(-(begin + part.numel()) // self.block))
            part.copy_(codes[blocks].float().mul_(scales[blocks]).view(-1)[: part.numel()])

    def _parts(self, payload: Tensor, chunk_numel: int) -> tuple[Tensor, Tensor]:
        """Return codes [blocks, block] and scales [blocks, 1] of the only row."""
        row, blocks = payload[0], chunk_numel // self.block
        scales = row[chunk_numel : chunk_numel + 4 * blocks].view(torch.float32)
        return row[:chunk_numel].view(torch.float8_e4m3fn).view(blocks, self.block), scales.view(-1, 1)


COMPRESSORS: tuple[Compressor, ...] = (Quantize(8, BLOCK), E4M3())


@dataclass(frozen=True)
class Missing:
    """What is missing of what, relative to it, and for how many ns of one thread an element takes."""

    what: str
    relative: dict[str, float]


def measure(steps: int) -> list[Missing]:
    """Train for so many steps; return what both have lost, and the times that they take."""
    gradients = list(islice(flat_gradients(_BATCH, _LAYERS, _WIDTH, _CONTEXT), steps))
    total = torch.stack(gradients).sum(0, dtype=torch.float64)
    channels = {repr(each): Channel(each, lambda values, step: values, gradients[0]) for each in COMPRESSORS}
    with_residual: dict[str, list[float]] = {name: [] for name in channels}
    for step, values in enumerate(gradients):
        for name, channel in channels.items():
            sent = values + channel.residual
            channel.send(values, step)
            with_residual[name].append(float(channel.residual.norm() / sent.norm()))
    draws = torch.Generator().manual_seed(0)
    normal = torch.randn(2**20, generator=draws)
    chi_square = torch.randn(3, 2**20, generator=draws).square().sum(0)
    alone = {repr(each): [relative_error(each, values) for values in gradients] for each in COMPRESSORS}
    sums = {name: float((total - channel.total).norm() / total.norm()) for name, channel in channels.items()}
    return [
        Missing("a gradient, mean of all steps", {name: mean(errors) for name, errors in alone.items()}),
        Missing("the worst gradient", {name: max(errors) for name, errors in alone.items()}),
        Missing("a gradient and the residual", {name: mean(errors) for name, errors in with_residual.items()}),
        Missing(f"the sum of {steps} steps", sums),
        *(
            Missing(what, {repr(each): relative_error(each, values) for each in COMPRESSORS})
            for what, values in (("normal", normal), ("Student's t, 3", normal / (chi_square / 3).sqrt()))
        ),
        Missing(_TIME, {repr(each): _ns(each, normal[:_TIMED_NUMEL]) for each in COMPRESSORS}),
    ]


_TIME = "ns of one thread, encode and decode"


def _ns(compressor: Compressor, values: Tensor) -> float:
    """Return what an element takes to be encoded with a residual and decoded: the processor's time, in ns."""
    torch.set_num_threads(1)
    channel = Channel(compressor, lambda values, step: values, values)
    times = []
    for step in range(_TIMES):
        begin = thread_time()
        channel.send(values, step)
        times.append(1e9 * (thread_time() - begin) / values.numel())
    return median(times)


def markdown(path: Path) -> str:
    """Return a row for each thing that was sent, a column for each compressor."""
    found = [Missing(**row) for row in parse(read_text(path), str(path))["rows"]]
    names = [repr(each) for each in COMPRESSORS]

    def shown(each: Missing) -> Iterable[str]:
        return (
            f"{each.relative[name]:.1f}" if each.what == _TIME else f"{100 * each.relative[name]:.3f} %"
            for name in names
        )

    return table(["missing of", *(f"`{name}`" for name in names)], [[each.what, *shown(each)] for each in found])


if __name__ == "__main__":
    measure_or_report("bench.evidence.fp8", __doc__ or "", markdown, measure, steps=300)
