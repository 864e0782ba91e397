"""What a compressor costs on the CPU: `python -m bench.compression --json bench/results/compression.json`.

Each is timed on one gradient of normal values: encoding with a residual in and out, decoding, and encoding the sum of
four rows of a quarter of the elements each, which is what an owner among four ranks does with its bucket. Beside it, in
turns, four clones of the gradient are timed. All figures are per element of the gradient; GB/s count its 4 bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.document import table
from bench.environment import machine
from bench.table import print_rows
from bench.turns import times_s
from commopt.command_line import Parser, content_of, output_file, whole
from commopt.compress import COMPRESSORS, Cast, Compressor, Dice, ErrorFeedback, OneBit, Quantize
from commopt.document import parse, read_text

_ROWS = 4
_WIDTH = 150  # 80 columns are too few
_CLONES = 4

_CHOSEN: tuple[Compressor, ...] = (
    Cast(torch.bfloat16),
    Cast(torch.float16),
    Quantize(8),
    Quantize(4),
    Quantize(2),
    Quantize(8, rounding="stochastic"),
    Quantize(4, levels="uniform"),
    OneBit(),
)


@dataclass(frozen=True)
class Cost:
    """Of one operation: nanoseconds per element in the fastest and the median run, and the rate of the median."""

    best_ns: float
    median_ns: float
    gbps: float
    of_clones: float
    """Its fastest run over the fastest four clones beside it."""


@dataclass(frozen=True)
class Row:
    """What one compressor costs."""

    compressor: str
    bits_per_element: float
    encode: Cost
    decode: Cost
    recompress: Cost


def contenders() -> list[Compressor]:
    """Return what is timed: the choice above, and every other registered compressor as it is by default."""
    known = {type(compressor) for compressor in _CHOSEN}
    return [*_CHOSEN, *(kind() for kind in COMPRESSORS.values() if kind not in known)]


class Gradient:
    """The tensors that all compressors share."""

    def __init__(self, numel: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.values = torch.randn(numel, generator=generator)
        self.old = torch.randn(numel, generator=generator) / 8
        self.new = torch.zeros(numel)
        self.decoded = torch.zeros(numel)

    def clone(self) -> None:
        """Do what the compressors are compared with."""
        for _ in range(_CLONES):
            self.values.clone()

    def measure(self, compressor: Compressor, repeats: int) -> Row:
        """Time one compressor."""
        values, numel, dice = self.values, self.values.numel(), Dice(seed=1)
        chunk_numel, row = _rows(compressor, numel, 1)
        carry = ErrorFeedback(self.old, self.new)
        part_numel, parts = _rows(compressor, numel, _ROWS)
        compressor.compress(values, parts, part_numel, 1.0)
        sum_numel = min(part_numel, numel)
        part_carry = ErrorFeedback(self.old[:sum_numel], self.new[:sum_numel])
        sent = torch.zeros_like(parts[:1])
        operations: list[Callable[[], None]] = [
            self.clone,
            lambda: compressor.compress(values, row, chunk_numel, 1 / _ROWS, carry, dice),
            lambda: compressor.decompress(row, self.decoded, chunk_numel),
            lambda: compressor.recompress(parts, sent, part_numel, sum_numel, part_carry, dice),
        ]
        clones, *others = times_s(operations, repeats)
        costs = [_cost(times, clones, numel) for times in others]
        return Row(repr(compressor), row.numel() * 8 / chunk_numel, *costs)


def _rows(compressor: Compressor, numel: int, count: int) -> tuple[int, Tensor]:
    """Return the elements of a chunk, and that many rows of payload."""
    chunk_numel = ceil(numel / (count * compressor.granularity)) * compressor.granularity
    return chunk_numel, torch.zeros(count, compressor.payload_nbytes(chunk_numel), dtype=torch.uint8)


def _cost(times_s: list[float], clones_s: list[float], numel: int) -> Cost:
    best_ns, median_ns = (pick(times_s) / numel * 1e9 for pick in (min, median))
    return Cost(best_ns, median_ns, 4 / median_ns, min(times_s) / min(clones_s))


def print_table(rows: Sequence[Row], title: str) -> None:
    """Print a line per compressor."""
    headings = ["compressor", "bits per element"]
    for operation in ("encode", "decode", "recompress"):
        headings += [f"{operation} ns", f"{operation} GB/s", f"{operation} /clones"]
    lines = [
        [
            row.compressor,
            f"{row.bits_per_element:.3f}",
            *(
                figure
                for cost in (row.encode, row.decode, row.recompress)
                for figure in (f"{cost.best_ns:.2f}", f"{cost.gbps:.1f}", f"{cost.of_clones:.2f}")
            ),
        ]
        for row in rows
    ]
    print_rows(title, headings, lines, width=_WIDTH)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the rows of a file."""
    headings = ["compressor", "bits per element", "encode ns", "encode, of clones", "decode ns", "recompress ns"]
    lines = []
    for row in rows:
        encode, decode, again = (row[name] for name in ("encode", "decode", "recompress"))
        figures = (encode["best_ns"], encode["of_clones"], decode["best_ns"], again["best_ns"])
        lines.append(
            [f"`{row['compressor']}`", f"{row['bits_per_element']:.3f}", *(f"{figure:.2f}" for figure in figures)]
        )
    return table(headings, lines)


def _read(path: Path) -> list[dict[str, Any]]:
    document = parse(read_text(path), str(path))
    if not isinstance(document, dict) or not isinstance(document.get("rows"), list):
        raise ValueError(f"{path} is not a file that bench.compression --json wrote")
    rows: list[dict[str, Any]] = document["rows"]
    return rows


def main() -> None:
    """Measure every compressor, print and write the figures."""
    parser = Parser(prog="python -m bench.compression", description=__doc__)
    parser.add_argument("--numel", type=whole(1), default=25_000_000, help="elements of the gradient")
    parser.add_argument("--repeats", type=whole(1), default=7)
    parser.add_argument("--threads", type=whole(1), default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("--show", type=content_of(_read), metavar="FILE", help="print a table of such a file instead")
    options = parser.parse_args()
    if options.show:
        print(markdown(options.show))
        return
    torch.set_num_threads(options.threads)
    gradient = Gradient(options.numel)
    rows = [gradient.measure(compressor, options.repeats) for compressor in contenders()]
    print_table(rows, f"{options.numel:,} elements, {options.threads} threads; ns and clones: the fastest runs")
    if options.json is not None:
        environment = {
            "kind": "compression",
            **machine(),
            "command": f"python -m bench.compression --numel {options.numel} --repeats {options.repeats} "
            f"--threads {options.threads}",
        }
        records = [asdict(row) for row in rows]
        options.json.write_text(json.dumps({"environment": environment, "rows": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
