"""How much a strategy leaves out of each parameter's gradient: measured once, on this rank, without communication.

What counts is one encoding without feedback, in squared L2 norm, after all warm-up. It says how strategies compare on
this gradient; what a training feels is less where feedback sends the rest later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite

import torch
from torch import Tensor

from commopt.aggregate import Aggregator, Compressed, Hierarchical, PowerSGD
from commopt.aggregate.matrices import Matrix, Rule, plan
from commopt.aggregate.rows import split
from commopt.compress import DGC, Compressor
from commopt.errors import ConfigurationError
from commopt.feedback import Layout, Piece
from commopt.tuning.spectrum import beyond_rank

Gradients = Sequence[tuple[Layout, Tensor]]
Energies = dict[str, float]  # by parameter
Lossy = Compressed | PowerSGD

SAMPLE_NUMEL = 65_536
_RUN_NUMEL = 4096


def unit_energies(
    strategies: Mapping[str, Aggregator], gradients: Gradients, names: Sequence[tuple[str, ...]]
) -> tuple[dict[str, list[float]], list[float]]:
    """Return for every strategy the squared error it makes in each unit, and the squared norm of each unit.

    gradients: flat buffers, with what lies where. names: the parameters of each unit.
    Compressors encode and decode up to 65,536 elements of each parameter, 16 runs of whole blocks spread evenly over
    it; their error is multiplied by numel / sample. Each parameter counts alone, though blocks and DGC's choice reach
    across neighbours in a bucket. What rounds to inf has the error inf. PowerSGD leaves out what is beyond the best
    matrix_rank directions of whole matrices; it comes near that once its factors are warm. Errors of both levels of
    Hierarchical add up.
    Raises FloatingPointError when a gradient is not finite, or all are zero: such a step tells nothing, measure another
    one. Raises ConfigurationError for a strategy whose error cannot be measured, and for a parameter in no buffer.
    """
    squares = _squares(gradients)
    if not any(squares.values()):
        raise FloatingPointError("all gradients are zero; measure another step")
    for unit in names:
        for name in unit:
            if name not in squares:
                raise ConfigurationError(f"unit_energies: {name!r} is in no buffer; give the gradients of all units")
    parts = {strategy: _lossy_parts(aggregator) for strategy, aggregator in strategies.items()}
    # Flat and hierarchical forms of one compression lose the same.
    measured = _measured({part for each in parts.values() for part in each}, gradients)
    energies = {
        strategy: [sum(measured[part].get(name, 0.0) for part in each for name in unit) for unit in names]
        for strategy, each in parts.items()
    }
    return energies, [sum(squares[name] for name in unit) for unit in names]


def _lossy_parts(aggregator: Aggregator) -> tuple[Lossy, ...]:
    """Return what loses something, level by level; what only differs in feedback and warm-up is alike."""
    if isinstance(aggregator, Hierarchical):
        return (*_lossy_parts(aggregator.intra), *_lossy_parts(aggregator.inter))
    if isinstance(aggregator, Compressed):
        # min_elements is of a message, not of each parameter in it.
        compressor = aggregator.compressor
        if isinstance(compressor, DGC):
            compressor = DGC(compressor.density, value_dtype=compressor.value_dtype)
        return (Compressed(compressor, None, aggregator.dense),)
    if isinstance(aggregator, PowerSGD):
        rate, dense = aggregator.min_compression_rate, aggregator.dense
        return (PowerSGD(aggregator.matrix_rank, rate, feedback=None, dense=dense),)
    if aggregator.lossless:
        return ()
    raise ConfigurationError(
        f"unit_energies: what {aggregator!r} leaves out cannot be measured on one gradient; give Compressed, PowerSGD, "
        f"exact averages, or Hierarchical of them"
    )


def _squares(gradients: Gradients) -> Energies:
    """Return the squared norm of each parameter; raises FloatingPointError where it is not finite."""
    squares: defaultdict[str, float] = defaultdict(float)
    for layout, buffer in gradients:
        for piece, values in _pieces(layout, buffer):
            # float32 would overflow where values do not.
            squares[piece.name] += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
            if not isfinite(squares[piece.name]):
                raise FloatingPointError(f"the gradient of {piece.name!r} is not finite; measure another step")
    return squares


def _measured(wanted: set[Lossy], gradients: Gradients) -> dict[Lossy, Energies]:
    energies: dict[Lossy, Energies] = {part: defaultdict(float) for part in wanted}
    low_rank = [part for part in wanted if isinstance(part, PowerSGD)]
    encoded = [part for part in wanted if isinstance(part, Compressed)]
    for layout, buffer in gradients:
        _add_beyond_rank(layout, buffer, low_rank, energies)
        samples: dict[int, list[_Sample]] = {}
        for part in encoded:
            run_numel = _run_numel(part.compressor)
            if run_numel not in samples:
                samples[run_numel] = [_Sample.of(piece, values, run_numel) for piece, values in _pieces(layout, buffer)]
            _add_coding_errors(part, layout, buffer.dtype, samples[run_numel], energies[part])
    return energies


# ---------------------------------------------------------------------------------------- compressors


@dataclass(frozen=True)
class _Sample:
    """Elements of a piece, float32; `share`: how many of its elements each stands for."""

    piece: Piece
    values: Tensor
    share: float

    @classmethod
    def of(cls, piece: Piece, values: Tensor, run_numel: int) -> _Sample:
        """Take everything of a short piece, else runs at equal distances."""
        runs = SAMPLE_NUMEL // run_numel
        if values.numel() > SAMPLE_NUMEL:
            distance = values.numel() // runs
            values = values[: runs * distance].view(runs, distance)[:, :run_numel].reshape(-1)
        return cls(piece, values.float(), piece.numel / max(values.numel(), 1))


def _run_numel(compressor: Compressor) -> int:
    """Return the elements of a run: whole blocks."""
    return max(_RUN_NUMEL // compressor.granularity, 1) * compressor.granularity


def _add_coding_errors(
    part: Compressed, layout: Layout, dtype: torch.dtype, samples: Sequence[_Sample], energies: Energies
) -> None:
    """Encode and decode; samples of equal length are rows of one payload."""
    compressed = layout.select(split(layout, part.compressor, dtype, part.dense)[0]).names
    by_numel: dict[int, list[_Sample]] = defaultdict(list)
    for sample in samples:
        if sample.piece.name in compressed:
            by_numel[sample.values.numel()].append(sample)
    for rows in by_numel.values():
        found = _squared_errors(part.compressor, torch.stack([sample.values for sample in rows]))
        for sample, error in zip(rows, found, strict=True):
            energies[sample.piece.name] += error * sample.share


def _squared_errors(compressor: Compressor, rows: Tensor) -> list[float]:
    """Return what one encoding of each row of float32 [rows, numel] leaves out; inf where it decodes to no number."""
    granularity = compressor.granularity
    chunk_numel = ceil(rows.shape[1] / granularity) * granularity
    values = torch.nn.functional.pad(rows, (0, chunk_numel - rows.shape[1]))
    payload = torch.empty(len(rows), compressor.payload_nbytes(chunk_numel), dtype=torch.uint8, device=rows.device)
    decoded = torch.empty_like(values)
    compressor.compress(values.view(-1), payload, chunk_numel, 1.0)
    compressor.decompress(payload, decoded.view(-1), chunk_numel)
    missing = rows - decoded[:, : rows.shape[1]]  # what pads a block need not decode to zeros
    errors = torch.linalg.vector_norm(missing, dim=1, dtype=torch.float64).square()
    return [float(error) if isfinite(error) else inf for error in errors.tolist()]


# ------------------------------------------------------------------------------------------- low rank


def _add_beyond_rank(
    layout: Layout, buffer: Tensor, parts: Sequence[PowerSGD], energies: Mapping[Lossy, Energies]
) -> None:
    """Add what lies beyond each one's rank, of every matrix that it compresses; the largest rank knows them all."""
    takers: dict[Matrix, list[PowerSGD]] = defaultdict(list)
    for part in parts:
        for matrix in plan(layout, Rule(part.matrix_rank, part.min_compression_rate, part.dense)).matrices:
            takers[matrix].append(part)
    for matrix, takes in takers.items():
        values = buffer[matrix.begin : matrix.end].view(matrix.rows, matrix.cols)
        errors = beyond_rank(values, max(part.matrix_rank for part in takes))
        for part in takes:
            energies[part][matrix.piece.name] += errors[min(part.matrix_rank, len(errors)) - 1]


def _pieces(layout: Layout, buffer: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    return zip(layout.pieces, buffer.split([piece.numel for piece in layout.pieces]), strict=True)
