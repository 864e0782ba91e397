"""The work that aggregators do between messages: encoding and decoding, and PowerSGD's factors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from math import ceil, sqrt

import torch
from torch import Tensor

from commopt.compress import COMPRESSORS, Cast, Compressor, Dice, ErrorFeedback, Exact, Quantize
from commopt.cost import WorkKey
from commopt.hooks.presets import PRESETS
from commopt.kernels import lowrank
from commopt.probe.settings import Settings

_ROWS = 4  # whose sum an owner encodes
_LEAST_NBYTES, _MOST_NBYTES = 2**14, 2**26
_SIDE = 1024
_MATRIX_RANKS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Job:
    """Work of one kind: `prepare(numel, device)` returns a call that does it for so many float32 elements.

    least_nbytes: less of it is never done.
    """

    key: WorkKey
    prepare: Callable[[int, torch.device], Callable[[], None]]
    least_nbytes: int = _LEAST_NBYTES

    def sizes(self, settings: Settings) -> tuple[int, ...]:
        """Return the bytes to time, two or more."""
        suited = tuple(nbytes for nbytes in settings.sizes(_MOST_NBYTES) if nbytes >= self.least_nbytes)
        if len(suited) > 1:
            return suited
        first = max(self.least_nbytes, settings.min_nbytes)
        return (first, round(first * settings.factor))


def known_compressors() -> tuple[Compressor, ...]:
    """Return what the presets compress with, every compressor as it is by default, and quantization to all widths."""
    found: list[Compressor] = [Exact(), Cast(), Cast(torch.float16), Quantize(8), Quantize(4), Quantize(2)]
    found += [kind() for kind in COMPRESSORS.values()]
    for preset in PRESETS.values():
        found += [each for each in _inside(preset.build()) if isinstance(each, Compressor)]
    return tuple(dict.fromkeys(found))


def jobs_of(compressors: Iterable[Compressor]) -> list[Job]:
    """Return the work that these compressors make, and that which does not depend on them."""
    jobs = [Job(WorkKey("copy"), _copy)]
    for compressor in compressors:
        jobs += compression_jobs(compressor)
    return jobs + [job for matrix_rank in _MATRIX_RANKS for job in low_rank_jobs(matrix_rank)]


def compression_jobs(compressor: Compressor) -> list[Job]:
    """Return the work that one compressor makes."""

    def encode(numel: int, device: torch.device) -> Callable[[], None]:
        values, carry = _normal(numel, device), _carry(numel, device)
        chunk_numel, payload = _rows(compressor, numel, 1, device)
        return lambda: compressor.compress(values, payload, chunk_numel, 1 / _ROWS, carry, Dice(seed=1))

    def decode(numel: int, device: torch.device) -> Callable[[], None]:
        values, decoded = _normal(numel, device), torch.zeros(numel, dtype=torch.float32, device=device)
        chunk_numel, payload = _rows(compressor, numel, 1, device)
        compressor.compress(values, payload, chunk_numel, 1.0)
        return lambda: compressor.decompress(payload, decoded, chunk_numel)

    def recode(numel: int, device: torch.device) -> Callable[[], None]:
        chunk_numel, payloads = _rows(compressor, numel, _ROWS, device)
        compressor.compress(_normal(numel, device), payloads, chunk_numel, 1.0)
        sums, sent = min(chunk_numel, numel), torch.zeros_like(payloads[:1])
        carry = _carry(sums, device)
        return lambda: compressor.recompress(payloads, sent, chunk_numel, sums, carry, Dice(seed=1))

    what = repr(compressor)
    return [
        Job(WorkKey(kind, what), prepare)
        for kind, prepare in (("encode", encode), ("decode", decode), ("recode", recode))
    ]


def low_rank_jobs(matrix_rank: int) -> list[Job]:
    """Return what PowerSGD does to matrices: for one message (fill, project, subtract, the next basis, the product).

    And what a second message adds: project and orthogonalize once more. The matrices are square, up to 1024 x 1024; of
    those there are several.
    """

    def stacks(numel: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        side = min(round(sqrt(numel)), _SIDE)
        count = max(numel // side**2, 1)
        basis = lowrank.orthogonalize(_normal(count * side * matrix_rank, device).view(count, side, matrix_rank))
        return _normal(count * side**2, device).view(count, side, side), basis, torch.zeros_like(basis)

    def factor(numel: int, device: torch.device) -> Callable[[], None]:
        matrices, basis, product = stacks(numel, device)
        result = matrices.clone()

        def step() -> None:
            torch.add(matrices, result, out=matrices)
            lowrank.project(matrices, basis, product)
            lowrank.subtract(matrices, product, basis)
            lowrank.orthogonalize(product)
            lowrank.decode(product, basis, result)

        return step

    def refresh(numel: int, device: torch.device) -> Callable[[], None]:
        matrices, basis, product = stacks(numel, device)

        def step() -> None:
            lowrank.project(matrices, basis, product, transposed=True)
            lowrank.orthogonalize(product)

        return step

    what = f"PowerSGD({matrix_rank})"
    least_nbytes = max(4 * (4 * matrix_rank + 1) ** 2, _LEAST_NBYTES)  # a smaller matrix is not worth its factors
    return [Job(WorkKey("factor", what), factor, least_nbytes), Job(WorkKey("refresh", what), refresh, least_nbytes)]


def _copy(numel: int, device: torch.device) -> Callable[[], None]:
    values, copied = _normal(numel, device), torch.zeros(numel, dtype=torch.float32, device=device)

    def copy() -> None:
        copied.copy_(values)

    return copy


def _inside(value: object) -> Iterator[object]:
    """Yield a configuration and everything it is made of."""
    yield value
    if is_dataclass(value):
        for field in fields(value):
            yield from _inside(getattr(value, field.name))


def _rows(compressor: Compressor, numel: int, count: int, device: torch.device) -> tuple[int, Tensor]:
    """Return the elements of a chunk, and that many rows of payload."""
    chunk_numel = ceil(numel / (count * compressor.granularity)) * compressor.granularity
    nbytes = compressor.payload_nbytes(chunk_numel)
    return chunk_numel, torch.zeros(count, nbytes, dtype=torch.uint8, device=device)


def _normal(numel: int, device: torch.device) -> Tensor:
    return torch.randn(numel, generator=torch.Generator(device).manual_seed(0), dtype=torch.float32, device=device)


def _carry(numel: int, device: torch.device) -> ErrorFeedback:
    return ErrorFeedback(_normal(numel, device) / 8, torch.zeros(numel, dtype=torch.float32, device=device))
