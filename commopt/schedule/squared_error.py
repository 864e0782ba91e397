"""How much one average leaves out of a gradient: estimated on this rank, from samples, without communication."""

from __future__ import annotations

from collections import defaultdict
from math import ceil, inf, isfinite

import torch
from torch import Tensor

from commopt.aggregate import Aggregator, Compressed, Hierarchical, PowerSGD
from commopt.aggregate.matrices import Rule, plan
from commopt.compress import Compressor
from commopt.feedback import Layout, split

SAMPLE_NUMEL = 65_536
_RUN_NUMEL = 4096
_OVERSAMPLING = 8


def squared_error(aggregator: Aggregator, layout: Layout, buffer: Tensor) -> float:
    """Return the squared L2 norm of what one average of `buffer` leaves out without feedback, after all warm-up.

    Compressors encode and decode up to 65,536 elements of each parameter, 16 runs of whole blocks spread evenly over
    it; the error is multiplied by numel / sample. PowerSGD leaves out what is beyond the best matrix_rank directions
    of whole matrices; it comes near that once its factors are warm. Errors of both levels of Hierarchical add up.
    inf where a value decodes to no number.
    """
    if aggregator.lossless:
        return 0.0
    if isinstance(aggregator, Hierarchical):
        return sum(squared_error(level, layout, buffer) for level in (aggregator.intra, aggregator.inter))
    if isinstance(aggregator, PowerSGD):
        rule = Rule(aggregator.matrix_rank, aggregator.min_compression_rate, aggregator.dense)
        return sum(
            _beyond_rank(buffer[matrix.begin : matrix.end].view(matrix.rows, matrix.cols), aggregator.matrix_rank)
            for matrix in plan(layout, rule).matrices
        )
    assert isinstance(aggregator, Compressed)
    compressed = layout.select(split(layout, aggregator.compressor, buffer.dtype, aggregator.dense)[0]).names
    by_numel: dict[int, list[tuple[Tensor, float]]] = defaultdict(list)
    pieces = zip(layout.pieces, buffer.split([piece.numel for piece in layout.pieces]), strict=True)
    for piece, values in pieces:
        if piece.name in compressed:
            sample = _sampled(values, aggregator.compressor)
            by_numel[len(sample)].append((sample, piece.numel / max(len(sample), 1)))
    total = 0.0
    for rows in by_numel.values():
        errors = _coding_errors(aggregator.compressor, torch.stack([sample for sample, _ in rows]))
        total += sum(error * share for error, (_, share) in zip(errors, rows, strict=True))
    return total


def _sampled(values: Tensor, compressor: Compressor) -> Tensor:
    """Take everything of a short piece, else runs of whole blocks at equal distances; float32."""
    run_numel = max(_RUN_NUMEL // compressor.granularity, 1) * compressor.granularity
    runs = SAMPLE_NUMEL // run_numel
    if values.numel() > SAMPLE_NUMEL:
        distance = values.numel() // runs
        values = values[: runs * distance].view(runs, distance)[:, :run_numel].reshape(-1)
    return values.float()


def _coding_errors(compressor: Compressor, rows: Tensor) -> list[float]:
    """Return what one encoding of each row of float32 [rows, numel] leaves out; inf where it decodes to no number."""
    chunk_numel = ceil(rows.shape[1] / compressor.granularity) * compressor.granularity
    values = torch.nn.functional.pad(rows, (0, chunk_numel - rows.shape[1]))
    payload = torch.empty(len(rows), compressor.payload_nbytes(chunk_numel), dtype=torch.uint8, device=rows.device)
    decoded = torch.empty_like(values)
    compressor.compress(values.view(-1), payload, chunk_numel, 1.0)
    compressor.decompress(payload, decoded.view(-1), chunk_numel)
    missing = rows - decoded[:, : rows.shape[1]]  # what pads a block need not decode to zeros
    errors = torch.linalg.vector_norm(missing, dim=1, dtype=torch.float64).square()
    return [float(error) if isfinite(error) else inf for error in errors.tolist()]


@torch.no_grad()
def _beyond_rank(matrix: Tensor, rank: int) -> float:
    """Return about the squared error of the best approximation by `rank`, by randomized subspace iteration.

    Halko, Martinsson, Tropp, "Finding structure with randomness", SIAM Review 2011, arXiv 0909.4061, algorithm 4.4.
    """
    largest = float(matrix.abs().amax()) or 1.0
    values = matrix.float() / largest  # squares neither overflow nor vanish
    draws = torch.Generator(values.device).manual_seed(0)
    columns = min(rank + _OVERSAMPLING, *values.shape)
    start = torch.randn(values.shape[1], columns, generator=draws, dtype=torch.float32, device=values.device)
    basis = torch.linalg.qr(values.mT @ torch.linalg.qr(values @ start).Q).Q
    inside = values.mT @ torch.linalg.qr(values @ basis).Q
    squares = torch.linalg.eigvalsh((inside.mT @ inside).double()).flip(0)[:rank]
    whole = torch.linalg.vector_norm(values, dtype=torch.float64).square()
    return float((whole - squares.sum()).clamp(min=0.0)) * largest**2
