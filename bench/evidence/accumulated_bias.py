# SPDX-License-Identifier: Apache-2.0
"""What compression loses for good: `python -m bench.evidence.accumulated_bias --json FILE`, seconds.

Trains the small GPT of bench.evidence.convergence in this process and sends each of its gradients through each
compressor, with the residual in float32, in bfloat16 (rounded stochastically, as commopt.Feedback keeps it, and to the
nearest, for comparison), and without. What was delivered is summed
over all steps and compared with the sum of the gradients: the L2 norm of the difference, relative to that of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

import torch
from torch import Tensor

from bench.command_line import measure_or_report
from bench.document import table
from bench.evidence.compression_error import flat_gradients
from commopt import Cast, Compressor, OneBit, Quantize
from commopt.document import parse, read_text
from commopt.feedback.residual import round_stochastically
from commopt.kernels.codec import Encoding, ErrorFeedback, RngKey

_COMPRESSORS = (Cast(), Cast(rounding="stochastic"), Quantize(8), Quantize(4), Quantize(2), OneBit())
Keep = Callable[[Tensor, int], Tensor]
"""Returns a residual as it is kept, given the step."""
RESIDUALS: dict[str, Keep | None] = {
    "no residual": None,
    "bfloat16, nearest": lambda values, step: values.to(torch.bfloat16),
    "bfloat16, stochastic": round_stochastically,
    "float32": lambda values, step: values,
}
_LAYERS, _WIDTH, _CONTEXT, _BATCH = 2, 64, 32, 8


@dataclass(frozen=True)
class Loss:
    """What one way to compress has lost after all steps."""

    compressor: str
    residual: str
    relative: float
    """L2 norm of what was not delivered, relative to that of the sum of all gradients."""


class Channel:
    """Sends gradients through a compressor and adds up what arrives."""

    def __init__(self, compressor: Compressor, keep: Keep | None, like: Tensor) -> None:
        self.compressor = compressor
        self.keep = keep
        self._chunk_numel = -(-like.numel() // compressor.granularity) * compressor.granularity
        self._payload = torch.empty(1, compressor.payload_nbytes(self._chunk_numel), dtype=torch.uint8)
        self._decoded, self.residual, self.total = (torch.zeros_like(like) for _ in range(3))

    def send(self, values: Tensor, step: int) -> Tensor:
        """Encode and decode `values`, with what was left out before; keep what is left out now. Return what arrives."""
        feedback = None if self.keep is None else ErrorFeedback(self.residual, torch.empty_like(values))
        encoding = Encoding(self._chunk_numel, 1.0, feedback, RngKey(step=step))
        self.compressor.compress(values, self._payload, encoding)
        if self.keep is not None and feedback is not None:
            self.residual = self.keep(feedback.new, step).float()
        self.compressor.decompress(self._payload, self._decoded, self._chunk_numel)
        self.total += self._decoded
        return self._decoded


def measure(steps: int) -> list[Loss]:
    """Train for so many steps; return what each compressor with each residual has lost."""
    first, *others = islice(flat_gradients(_BATCH, _LAYERS, _WIDTH, _CONTEXT), steps)
    total = torch.stack([first, *others]).sum(0, dtype=torch.float64)
    found = []
    for compressor, (name, keep) in product(_COMPRESSORS, RESIDUALS.items()):
        channel = Channel(compressor, keep, first)
        for step, values in enumerate([first, *others]):
            channel.send(values, step)
        found.append(Loss(repr(compressor), name, float((total - channel.total).norm() / total.norm())))
    return found


def markdown(path: Path) -> str:
    """Return a row for each compressor of a file, a column for each residual."""
    document = parse(read_text(path), str(path))
    found = [Loss(**row) for row in document["rows"]]
    relative = {(each.compressor, each.residual): each.relative for each in found}
    rows = [
        [f"`{compressor}`", *(f"{100 * relative[compressor, name]:.3f} %" for name in RESIDUALS)]
        for compressor in dict.fromkeys(each.compressor for each in found)
    ]
    steps = document["environment"]["steps"]
    caption = f"Missing from the sum of {steps} gradients that were encoded once each, L2 norm, relative to the sum's."
    return f"{table(['compressor', *RESIDUALS], rows)}\n\n{caption}"


if __name__ == "__main__":
    measure_or_report("bench.evidence.accumulated_bias", __doc__ or "", markdown, measure, steps=300)
