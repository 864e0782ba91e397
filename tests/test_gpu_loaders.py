# SPDX-License-Identifier: Apache-2.0
"""Both loaders compile one source: on a GPU every kernel of theirs must write the same bytes, and no others.

Each kernel is launched by one loader, its memory is put back, and it is launched by the other; then all memory that the
test holds is compared.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from bench.gpu import every_kernel
from commopt.kernels import loader as loaders
from commopt.kernels import sources
from commopt.kernels.loader import Arguments, Loader
from tests.compare_loaders import CompareLoaders, Memory
from tests.emulator import Emulator, launched_by, on_the_cpu

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def both() -> Iterator[CompareLoaders]:
    try:
        pair = loaders._load("native"), loaders._load("nvrtc")
    except ImportError as error:
        pytest.skip(f"there are not two loaders to compare: {error}")
    torch.manual_seed(0)
    with Memory("cuda") as memory:
        yield CompareLoaders(*pair, memory)


@gpu
@needs_gpu
def test_both_loaders_write_the_same_bytes(both: CompareLoaders) -> None:
    with launched_by(both):
        for call in every_kernel.calls(torch.device("cuda")):
            call()
    assert both.compared == set(sources.file_of_kernel())


@gpu
@needs_gpu
def test_the_compiled_module_has_the_same_kernels() -> None:
    native = pytest.importorskip("commopt._C")
    assert set(native.names()) == set(sources.file_of_kernel())


# ------------------------------------------------------------------------------ the comparison itself, on the CPU


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
        both = CompareLoaders(Filling(9), other, memory)
        arguments = (arena[10:].data_ptr(), nbytes)
        if message is None:
            both.launch("fill", 1, 1, 0, arguments)
        else:
            with pytest.raises(AssertionError, match=message):
                both.launch("fill", 1, 1, 0, arguments)
    assert both.compared == ({"fill"} if nbytes and message is None else set())


def test_memory_of_the_calls_is_seen(emulator: Emulator) -> None:
    """The emulator against itself."""
    torch.manual_seed(0)
    with Memory("cpu") as memory:
        both = CompareLoaders(emulator, emulator, memory)
        with on_the_cpu(both):
            for group in every_kernel.GROUPS["lowrank"]:
                for call in group(torch.device("cpu")):
                    call()
    files = sources.file_of_kernel()
    assert both.compared == {kernel for kernel, file in files.items() if file in ("factors.cuh", "lowrank.cuh")}
