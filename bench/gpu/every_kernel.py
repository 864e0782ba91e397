# SPDX-License-Identifier: Apache-2.0
"""Launch every kernel on small and awkward shapes, with each loader: what compute-sanitizer looks at.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m bench.gpu.every_kernel

Without torch's cache of memory every tensor is an allocation of its own, so that what lies beyond it is out of bounds.
What the kernels compute is compared in the tests. Without a GPU the same calls go to the reference.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from commopt.aggregate.matrices import RankRule, matrix_plan
from commopt.command_line import CommandParser
from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.kernels import lowrank, quantize, sources, sparse
from commopt.kernels.codec import Codec, CodecName, Encoding, ErrorFeedback, RngKey
from commopt.kernels.loader import VARIABLE, loader_for
from commopt.kernels.residual import commit
from commopt.kernels.sparse import BLOCK, SparseRow

Call = Callable[[], object]

LOADERS = ("native", "nvrtc")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_KINDS: tuple[tuple[CodecName, int, bool], ...] = (
    *(("uniform", bits, stochastic) for bits in (8, 4, 2) for stochastic in (False, True)),
    ("companded", 4, False),
    ("centroids", 2, False),
    ("sign_mean", 1, False),
    ("sign_rms", 1, False),
)
_BLOCKS = (64, 192, 4096)  # a part of a warp's, an odd number of them, several warps together
_FACTORS = ((2, 37, 130, 1), (3, 70, 5, 4), (1, 3001, 65, 31), (1, 70, 130, 33))  # a second panel begins at rank 33
_PEERS = 3
_RNG = RngKey(seed=2**63 + 1, step=7, stream=3)


def _blocks(codec: Codec, device: torch.device) -> Iterator[Call]:
    chunk_numel = 5 * codec.block
    numel = _PEERS * chunk_numel - 37
    rows = partial(_rows, codec.payload_nbytes(chunk_numel), device)
    for dtype, with_residual in itertools.product(_DTYPES, (False, True)):
        values, payload, sent = _random(numel, device).to(dtype), rows(_PEERS), rows(1)
        residual, owned = (_residual(count, device) if with_residual else None for count in (numel, chunk_numel - 5))
        yield partial(quantize.encode, codec, values, payload, Encoding(chunk_numel, 0.5, residual, _RNG))
        yield partial(quantize.decode, codec, payload, torch.empty_like(values), chunk_numel)
        yield partial(quantize.accumulate, codec, payload, torch.empty(chunk_numel, device=device))
        yield partial(quantize.recode, codec, payload, sent, chunk_numel - 5, Encoding(chunk_numel, 1.0, owned, _RNG))


def _sparse(value_dtype: torch.dtype, device: torch.device) -> Iterator[Call]:
    row = SparseRow.of(BLOCK + 4465, 0.01, value_dtype)
    numel = 2 * row.chunk_numel - 11
    values, payload = _random(numel, device), _rows(row.nbytes, device, 2)
    residual = _residual(numel, device)
    residuals = [replace(residual, loss_scale=scale) for scale in (residual.loss_scale, None)]
    few = values[: row.chunk_numel - 4000]  # the second row is all padding
    for given in (values, torch.zeros_like(values)):  # a few candidates in each tile, and all that there are
        for taken in (None, *residuals):
            yield partial(sparse.select, row, given, payload, 0.5, taken)
    yield partial(sparse.select, row, few, payload, 0.5, None)
    for dtype in _DTYPES:
        yield partial(sparse.scatter, row, payload, torch.empty(numel, dtype=dtype, device=device))
    yield partial(sparse.accumulate, row, payload, torch.empty(row.chunk_numel, device=device))


def _cast(device: torch.device) -> Iterator[Call]:
    numel = 4099
    for dtype, with_residual in itertools.product(_DTYPES, (False, True)):
        values, residual = _random(numel, device).to(dtype), _residual(numel, device) if with_residual else None
        rounded = torch.empty(numel, dtype=torch.bfloat16, device=device)
        yield partial(quantize.round_stochastically, values, rounded, 0.5, residual, _RNG, 8)


def _low_rank(device: torch.device) -> Iterator[Call]:
    for count, rows, cols, matrix_rank in _FACTORS:
        left, right = _random((count, rows, matrix_rank), device), _random((count, cols, matrix_rank), device)
        matrices = _random((count, rows, cols), device)
        for initial in (None, left.clone()):
            yield partial(lowrank.orthogonalize, left, torch.empty_like(left), initial)
        yield partial(lowrank.project, matrices, right, torch.empty_like(left))
        yield partial(lowrank.decode, left, right, torch.empty_like(matrices))
        yield partial(lowrank.subtract, matrices, left, right)


def _matrices(device: torch.device) -> Iterator[Call]:
    parts = [("some", (70, 150)), ("bias", (3,)), ("others", (37, 5)), ("more", (9, 130))]
    plan = matrix_plan(Layout.of_parameters(parts), RankRule(1, 1.0, ()))
    table = lowrank.MatrixTable.of(plan.table, device)
    for matrix_rank, factor in ((1, 0.5), (4, torch.tensor(0.5, device=device)), (33, 0.5)):
        left, right = (_random((plan.rows[side], matrix_rank), device) for side in ("left", "right"))
        buffer, old = _random(plan.layout.numel, device), _random(plan.stacked.numel, device)
        for kept in (None, old):
            made = torch.empty_like(old)
            yield partial(lowrank.begin_all, table, buffer, kept, factor, right, torch.empty_like(left), made)
        yield partial(lowrank.multiply_all, "subtract", table, left, right, old)
        yield partial(lowrank.multiply_all, "decode", table, left, right, buffer)


def _commit(device: torch.device) -> Iterator[Call]:
    for numel, committed in ((4099, True), (4096, True), (5, False)):
        flag = torch.tensor(committed, device=device)
        yield partial(commit, flag, _random(numel, device), _random(numel, device))


# By what they are of. Calls of a group belong together: what one writes the next reads.
GROUPS: dict[str, list[Callable[[torch.device], Iterator[Call]]]] = {
    "quantize": [
        partial(_blocks, Codec(name, bits, block, stochastic))
        for (name, bits, stochastic), block in itertools.product(_KINDS, _BLOCKS)
    ],
    "cast": [_cast],
    "sparse": [partial(_sparse, dtype) for dtype in _DTYPES],
    "lowrank": [_low_rank, _matrices],
    "commit": [_commit],
}


def calls(device: torch.device) -> Iterator[Call]:
    """Yield calls that launch, all together, every kernel."""
    for group in itertools.chain(*GROUPS.values()):
        yield from group(device)


def _random(shape: int | tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(shape, device=device)


def _rows(nbytes: int, device: torch.device, count: int) -> Tensor:
    return torch.zeros(count, nbytes, dtype=torch.uint8, device=device)


def _residual(numel: int, device: torch.device) -> ErrorFeedback:
    loss_scale = torch.tensor(1024.0, device=device)
    return ErrorFeedback(_random(numel, device), torch.empty(numel, device=device), loss_scale, 0.9)


def launched(name: str, device: torch.device) -> set[str]:
    """Make all calls with one loader and return the kernels launched; raises ConfigurationError where it cannot."""
    os.environ[VARIABLE] = name
    loader = loader_for(device)
    if loader is None:
        raise ConfigurationError(f"{VARIABLE}={name} launches nothing on {device}; use a CUDA device")
    with patch.object(loader, "launch", wraps=loader.launch) as launch:
        for call in calls(device):
            call()
    torch.cuda.synchronize(device)
    return {arguments.args[0] for arguments in launch.call_args_list}


def main() -> int:
    """Launch everything with every loader; fail when one cannot be used or a kernel was left out."""
    parser = CommandParser(prog="python -m bench.gpu.every_kernel", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default cuda)")
    parser.add_argument("--loaders", nargs="+", choices=LOADERS, default=LOADERS, help="default: both")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type != "cuda":
        made = [call() for call in calls(device)]
        print(f"{device}: {len(made)} calls of the reference")
        return 0
    failures = []
    for name in options.loaders:
        try:
            left_out = set(sources.file_of_kernel()) - launched(name, device)
        except ConfigurationError as error:
            failures.append(str(error))
            continue
        print(f"{name}: {len(sources.file_of_kernel()) - len(left_out)} kernels", flush=True)
        if left_out:
            failures.append(f"{name}: never launched: {', '.join(sorted(left_out))}")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
