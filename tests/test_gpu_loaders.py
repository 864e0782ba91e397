"""Both loaders compile one source: on a GPU every kernel of theirs must write the same bytes, and no others.

Each kernel is launched by one loader, its memory is put back, and it is launched by the other; then all memory that the
test holds is compared, the guards around results included. The inputs are those of the comparison with the reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from commopt.kernels import loader as loaders
from commopt.kernels import quantize, sources
from commopt.kernels.loader import Arguments, Loader
from commopt.kernels.pack import _launch, _table
from commopt.kernels.sparse import SparseRow
from tests import lowrank_cases, quantize_cases, sparse_cases
from tests.emulator import Emulator
from tests.quantize_cases import DTYPES, Carrying
from tests.test_kernels import awkward
from tests.twins import Memory, Twins

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# ------------------------------------------------------------------------------ what every kernel is given


def transfer(kernel: str, twins: Twins, device: str) -> None:
    """Pack and unpack values of every kind at odd offsets."""
    kind = kernel.removeprefix("transfer_")
    named = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    if kind == "bits_32":
        pairs, scales = [(torch.float32, torch.float32)], [1.0]
    elif kind == "bits_16":
        pairs, scales = [(dtype, dtype) for dtype in (torch.float16, torch.bfloat16)], [1.0]
    else:
        source, target = kind.split("_")
        pairs, scales = [(named[source], named[target])], [1 / 3, -7.0, 3e38]
    for source_dtype, target_dtype in pairs:
        values = awkward(source_dtype).to(device)
        for scale, offset in zip(scales, (1, 2, 3), strict=False):
            pieces = [piece.clone() for piece in values.split(4099)]
            arena = torch.full((values.numel() + 8,), 7.0, dtype=target_dtype, device=device)
            flat = arena[offset : offset + values.numel()]
            _launch(twins, pieces, flat, scale, to_flat=True)
            arenas = [torch.full((piece.numel() + 8,), 7.0, dtype=target_dtype, device=device) for piece in pieces]
            targets = [arena[offset:][: len(piece)] for arena, piece in zip(arenas, pieces, strict=True)]
            _launch(twins, targets, values, scale, to_flat=False)


def block_codes(kernel: str, twins: Twins, device: str) -> None:
    """Encode, decode and recode with every codec that the kernel serves, with every kind of block."""
    check = quantize_cases.Check(twins, device)
    step, name = kernel.split("_", 1)
    for codec in quantize_cases.codecs(64, 192, 1088):
        served = quantize._decoder(codec) if step == "decode" else quantize._encoder(codec)
        if served != name:
            continue
        full = 2 * 5 * codec.block
        for offset, (dtype, carrying) in enumerate(zip(DTYPES, _CARRYING, strict=True)):
            if step == "encode":
                values = quantize_cases.random_values(codec, 10, full - 3 * offset, dtype)
                check.encode(codec, values, 2, 5, scale=1 / 3, carrying=carrying, offset=offset, fuzzy=True)
                check.not_finite(codec, dtype, float("nan"), 7)
            elif step == "decode":
                check.decode(codec, 2, 5, full - 70 * offset, dtype, offset)
                check.accumulate(codec, 1 + offset, 5)
            else:
                check.recode(codec, 1 + 3 * offset, 10, full - 5 * offset, carrying, fuzzy=True)


_CARRYING = (None, Carrying(1024.0, 0.9), Carrying(3.0, 0.5, old_offset=1, new_offset=2))


def sparse_rows(kernel: str, twins: Twins, device: str) -> None:
    """Select, scatter and sum rows of every content."""
    check = sparse_cases.Check(twins, device)
    contents = [make(3 * 9000 - 5) for make in sparse_cases.CONTENTS.values()]
    for number, values in enumerate(contents):
        value_dtype = sparse_cases.VALUE_DTYPES[number % 3]
        row = SparseRow(9000, (90, 2000, 9000)[number // 2], value_dtype)
        check.select(row, values, 3, scale=-1 / 3, carrying=sparse_cases.CARRYING[number + 2], offset=number % 4)
        check.scatter(row, 3, 20_000, DTYPES[number % 3], offset=number % 4)
        check.accumulate(row, 1 + number)
    spoilt = torch.randn(2 * 70_000)
    spoilt[70_123] = float("inf")
    check.select(SparseRow(70_000, 500, torch.float32), spoilt, 2, carrying=sparse_cases.Carrying(), spoilt=1)


def low_rank(kernel: str, twins: Twins, device: str) -> None:
    """Orthogonalize and multiply factors of all shapes."""
    check = lowrank_cases.Check(twins, device)
    if kernel.startswith("lowrank"):
        for count, rows, cols, matrix_rank in ((1, 1, 1, 1), (3, 65, 129, 4), (2, 100, 300, 32), (1, 130, 300, 33)):
            check.multiply(count, rows, cols, matrix_rank)
        return
    for shape in lowrank_cases.SHAPES:
        factors = lowrank_cases.spread(*shape, smallest=0.1)
        check.like_the_reference(factors, lowrank_cases.orthonormal(*shape))
        factors[0] = 0.0
        factors[-1, -1, -1] = float("nan")
        check.orthogonalize(factors)


CASES: dict[str, Callable[[str, Twins, str], None]] = {
    "transfer": transfer,
    **dict.fromkeys(("encode", "decode", "recode"), block_codes),
    "sparse": sparse_rows,
    **dict.fromkeys(("factor", "lowrank"), low_rank),
}


# ------------------------------------------------------------------------------ on a GPU


@pytest.fixture
def twins() -> Iterator[Twins]:
    try:
        pair = loaders._load("native"), loaders._load("nvrtc")
    except ImportError as error:
        pytest.skip(f"there are not two loaders to compare: {error}")
    torch.manual_seed(0)
    _table.cache_clear()  # so that its tables are memory of this test
    with Memory("cuda") as memory:
        yield Twins(*pair, memory)


@gpu
@needs_gpu
@pytest.mark.parametrize("kernel", sources.file_of_kernel())
def test_both_loaders_write_the_same_bytes(twins: Twins, kernel: str) -> None:
    CASES[kernel.split("_", 1)[0]](kernel, twins, "cuda")
    assert kernel in twins.compared, f"{kernel} was not launched"


@gpu
@needs_gpu
def test_the_compiled_module_has_the_same_kernels() -> None:
    native = pytest.importorskip("commopt._C")
    assert set(native.names()) == set(sources.file_of_kernel())


def against_float64(check: lowrank_cases.Check, shape: tuple[int, int, int]) -> None:
    """Orthogonalize, and ask in float64 whether columns are orthonormal and span what they did."""
    factors = lowrank_cases.spread(*shape, smallest=0.1)
    bases, values = check.orthogonalize(factors).double(), factors.double()
    identity = torch.eye(shape[2], dtype=torch.float64).expand(shape[0], -1, -1)
    torch.testing.assert_close(bases.mT @ bases, identity, rtol=0.0, atol=1e-4)
    torch.testing.assert_close(bases @ (bases.mT @ values), values, rtol=0.0, atol=1e-4 * values.abs().max().item())


@gpu
@needs_gpu
@pytest.mark.parametrize("name", ["native", "nvrtc"])
@pytest.mark.parametrize("shape", [(3, 40, 4), (50, 2048, 4), (2, 2048, 32)], ids=str)
def test_factors_agree_with_float64(name: str, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    try:
        loader = loaders._load(name)
    except ImportError as error:
        pytest.skip(f"{name}: {error}")
    against_float64(lowrank_cases.Check(loader, "cuda"), shape)


# ------------------------------------------------------------------------------ the comparison itself, on the CPU


def test_every_kernel_has_a_case() -> None:
    assert {kernel.split("_", 1)[0] for kernel in sources.file_of_kernel()} == CASES.keys()


class Filling(Loader):
    """Stands for a kernel that fills memory: arguments are an address and a number of bytes."""

    fix = ""

    def __init__(self, value: int, past: int = 0) -> None:
        self._value, self._past = value, past

    def launch(self, kernel: str, grid: int, block: int, stream: int, arguments: Arguments) -> None:
        address, nbytes = map(int, arguments)
        assert ctypes.c_uint8.from_address(address).value == 7, "not what was there before"
        ctypes.memset(address, self._value, nbytes + self._past)


@pytest.mark.parametrize(
    ("other", "nbytes", "message"),
    [
        (Filling(9), 100, None),
        (Filling(8), 100, "100 of 128 bytes differ"),
        (Filling(9, past=1), 100, "1 of 128 bytes differ"),
        (Filling(8), 0, None),
    ],
)
def test_any_byte_that_differs_is_found(other: Loader, nbytes: int, message: str | None) -> None:
    with Memory("cpu") as memory:
        arena = torch.full((128,), 7, dtype=torch.uint8)
        twins = Twins(Filling(9), other, memory)
        arguments = (arena[10:].data_ptr(), nbytes)
        if message is None:
            twins.launch("fill", 1, 1, 0, arguments)
        else:
            with pytest.raises(AssertionError, match=message):
                twins.launch("fill", 1, 1, 0, arguments)
    assert twins.compared == ({"fill"} if nbytes and message is None else set())


@pytest.mark.parametrize("kernel", ["lowrank_decode", "encode_uniform4"])
def test_cases_on_the_cpu(kernel: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator against itself: whether a case reaches its kernel, and whether all it holds is seen."""
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    with Memory("cpu") as memory:
        twins = Twins(emulator, emulator, memory)
        CASES[kernel.split("_", 1)[0]](kernel, twins, "cpu")
    assert kernel in twins.compared
