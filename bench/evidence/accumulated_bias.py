# SPDX-License-Identifier: Apache-2.0
"""What compression loses for good: `python -m bench.evidence.accumulated_bias --json FILE`, minutes.

Trains the demo's GPT in this process and sends each of its gradients through each compressor, with the residual in
float32, in bfloat16 (rounded stochastically, as commopt.Feedback keeps it), and without. What was delivered is summed
over all steps and compared with the sum of the gradients: the L2 norm of the difference, relative to that of the sum.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from bench.document import table
from bench.environment import machine
from bench.evidence.compression_error import BATCH, flat_gradients
from commopt import Compressor, OneBit, Quantize
from commopt.command_line import Parser, content_of, output_file, whole
from commopt.document import parse, read_text
from commopt.feedback.store import round_stochastically
from commopt.kernels.codec import ErrorFeedback

_COMPRESSORS = (Quantize(8), Quantize(4), Quantize(2), OneBit())
_RESIDUALS = {"none": None, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Loss:
    """What one way to compress has lost after all steps."""

    compressor: str
    residual: str
    relative: float
    """L2 norm of what was not delivered, relative to that of the sum of all gradients."""


class Channel:
    """Sends gradients through a compressor and adds up what arrives."""

    def __init__(self, compressor: Compressor, residual: torch.dtype | None, like: Tensor) -> None:
        self.compressor = compressor
        self._chunk_numel = -(-like.numel() // compressor.granularity) * compressor.granularity
        self._payload = torch.empty(1, compressor.payload_nbytes(self._chunk_numel), dtype=torch.uint8)
        self._residual = None if residual is None else torch.zeros_like(like, dtype=residual)
        self._decoded, self.total = torch.empty_like(like), torch.zeros_like(like)

    def send(self, values: Tensor, step: int) -> None:
        """Encode and decode `values`, with what was left out before; keep what is left out now."""
        carry = None
        if self._residual is not None:
            carry = ErrorFeedback(self._residual.float().clone(), torch.empty_like(values))
        self.compressor.compress(values, self._payload, self._chunk_numel, 1.0, carry)
        if self._residual is not None and carry is not None:
            half = self._residual.dtype == torch.bfloat16
            self._residual = round_stochastically(carry.new, seed=step) if half else carry.new
        self.compressor.decompress(self._payload, self._decoded, self._chunk_numel)
        self.total += self._decoded


def measure(steps: int, batch: int) -> list[Loss]:
    """Train for so many steps; return what each compressor with each residual has lost."""
    channels: dict[str, list[Channel]] = {}
    total = torch.zeros(())
    for step, values in enumerate(islice(flat_gradients(batch), steps)):
        if not channels:
            for name, dtype in _RESIDUALS.items():
                channels[name] = [Channel(compressor, dtype, values) for compressor in _COMPRESSORS]
        total = total + values
        for each in channels.values():
            for channel in each:
                channel.send(values, step)
    return [
        Loss(repr(channel.compressor), name, float((total - channel.total).norm() / total.norm()))
        for name, each in channels.items()
        for channel in each
    ]


def markdown(path: Path) -> str:
    """Return a row for each compressor of a file, a column for each residual."""
    document = parse(read_text(path), str(path))
    found = [Loss(**row) for row in document["rows"]]
    relative = {(each.compressor, each.residual): each.relative for each in found}
    rows = [
        [f"`{compressor}`", *(f"{100 * relative[compressor, name]:.2f} %" for name in _RESIDUALS)]
        for compressor in dict.fromkeys(each.compressor for each in found)
    ]
    headings = ["compressor", "no residual", "bfloat16 residual, stochastic", "float32 residual"]
    caption = (
        f"Missing from the sum of {document['environment']['steps']} gradients of the GPT after one encoding each, "
        "relative L2 norm."
    )
    return f"{table(headings, rows)}\n\n{caption}"


def main() -> None:
    """Measure and write, or print the table of a file."""
    parser = Parser(prog="python -m bench.evidence.accumulated_bias", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=whole(1), default=300, help="default 300")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--json", type=output_file, metavar="FILE", help="measure, and write this")
    what.add_argument("--report", type=content_of(markdown), metavar="FILE", help="print the table of a file")
    options = parser.parse_args()
    if options.report:
        print(options.report)
        return
    command = f"python -m bench.evidence.accumulated_bias --steps {options.steps}"
    environment = {**machine(), "command": command, "steps": options.steps}
    rows = [asdict(loss) for loss in measure(options.steps, BATCH)]
    options.json.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")
    print(markdown(options.json))


if __name__ == "__main__":
    main()
