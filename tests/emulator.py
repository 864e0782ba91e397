# SPDX-License-Identifier: Apache-2.0
"""Build the device code for the CPU and launch it like any other loader."""

from __future__ import annotations

import ctypes
import fcntl
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any
from unittest.mock import patch

import pytest
import torch

from commopt.kernels import loader, sources
from commopt.kernels.codec import DTYPES
from commopt.kernels.loader import Arguments, Loader

_HEADER = Path(__file__).with_suffix(".hpp")
_RUN = """
extern "C" void run_{kernel}({parameters}, unsigned grid, unsigned block) {{
    emulator::launch(grid, block, [&] {{ {kernel}({names}); }});
}}
"""

_INSTRUCTIONS = {
    'asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));': "result = half_to_float(value.bits);",
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));': "result.bits = float_to_half(value);",
    'asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));': "result.bits = float_to_bfloat16(value);",
    'asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));': (
        "result = permuted(low, high, selector);"
    ),
}

# A product and a sum are two roundings on every processor. The handlers of the sanitizers are in the header.
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-w", "-fno-strict-aliasing", "-ffp-contract=off"]
FLAGS += ["-fsanitize=alignment,bounds", "-U_FORTIFY_SOURCE"]  # fibers jump from stack to stack


def signature(kernel: str) -> list[str]:
    """Return a kernel's parameters, as written."""
    text = (sources.directory() / sources.file_of_kernel()[kernel]).read_text()
    found = re.search(rf'extern "C" __global__ void {kernel}\(([^)]*)\)', text)
    assert found
    return [" ".join(parameter.split()) for parameter in found[1].split(",")]


class Emulator(Loader):
    """Runs kernels on the CPU, one file at a time, built on first use in `folder`.

    `last_first`: the last of the blocks, warps and lanes gets ahead of the others, else the first.
    """

    fix = "install g++"

    def __init__(self, folder: Path) -> None:
        if which("g++") is None:
            pytest.skip("needs g++")
        self.folder = folder
        self._libraries: dict[str, ctypes.CDLL] = {}
        self.last_first = False

    def launch(self, kernel: str, grid: int, block: int, stream: int, arguments: Arguments) -> None:
        """See Loader. Raises AssertionError when a thread would stop a GPU, or wait for ever."""
        slots = [ctypes.c_double(a) if isinstance(a, float) else ctypes.c_longlong(a) for a in arguments]
        for parameter, argument in zip(signature(kernel), arguments, strict=True):
            kind = "double" if isinstance(argument, float) else "long long"
            assert parameter.startswith(kind) or "*" in parameter, f"{kernel}: {parameter} is handed a {kind}"
        library = self.library(sources.file_of_kernel()[kernel])
        ctypes.c_int.in_dll(library, "last_first").value = int(self.last_first)
        getattr(library, f"run_{kernel}")(*slots, ctypes.c_uint(grid), ctypes.c_uint(block))
        for name in ("misaligned", "out_of_bounds", "divergent"):
            fault = ctypes.c_int.in_dll(library, name)
            found, fault.value = fault.value, 0
            assert found == 0, f"{kernel}: {name}"

    def library(self, file: str) -> ctypes.CDLL:
        """Return a file's kernels, built unless a process that shares the folder has done so."""
        if file not in self._libraries:
            with open(self.folder / f"{file}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                built = self.folder / f"{file}.so"
                entries = "".join(map(_run, _kernels(file)))
                self._libraries[file] = _load(built) if built.exists() else self.build(file, entries)
        return self._libraries[file]

    def build(self, file: str, entries: str) -> ctypes.CDLL:
        """Compile a file of device code with C++ `entries` behind it."""
        source, library = self.folder / f"{file}.cpp", self.folder / f"{file}.so"
        # In a namespace without a name, static variables of templates too are this library's own.
        source.write_text(f'#include "{_HEADER}"\nnamespace {{\n{self.code(file)}\n}}\n{entries}')
        self.compile(source, library)
        return _load(library)

    def code(self, file: str) -> str:
        """Return a file of device code with its includes, as C++."""
        code = sources.translation_unit(file)
        for instruction, replacement in _INSTRUCTIONS.items():
            code = code.replace(instruction, replacement)
        assert "asm(" not in code
        return code

    def compile(self, source: Path, library: Path) -> None:
        """Run the compiler."""
        subprocess.run(["g++", *FLAGS, "-shared", "-o", str(library), str(source)], check=True, timeout=300)


def _load(built: Path) -> ctypes.CDLL:
    """Load a library and tell it where its shared memory is: the static variables of its functions."""
    library = ctypes.CDLL(str(built))
    ctypes.c_int.in_dll(library, "shared_count").value = 0  # it may have been loaded before
    for line in subprocess.run(
        ["nm", "-S", str(built)], capture_output=True, text=True, check=True
    ).stdout.splitlines():
        where, nbytes, kind, name = [*line.split(), "", ""][:4]
        if kind in ("b", "d") and name.startswith("_ZZ"):
            library.emulator_shared(ctypes.c_size_t(int(where, 16)), ctypes.c_size_t(int(nbytes, 16)))
    return library


def launched_by(kernels: Loader) -> Any:
    """Have the wrappers of all kernels launch with `kernels`, whatever the device."""
    return patch.object(loader, "loader_for", lambda device, dtype=torch.float32: kernels if dtype in DTYPES else None)


@contextmanager
def on_the_cpu(kernels: Loader) -> Iterator[None]:
    """Have the wrappers of all kernels launch with `kernels` what is on the CPU."""

    def device(index: int) -> int:
        return 0

    with (
        patch.object(torch._C, "_cuda_exchangeDevice", device, create=True),
        patch.object(torch._C, "_cuda_getCurrentRawStream", device, create=True),
        patch.object(torch._C, "_cuda_maybeExchangeDevice", device, create=True),
        patch.object(loader, "_cpu_kernels", lambda: None),
        launched_by(kernels),
    ):
        yield


def _kernels(file: str) -> list[str]:
    return [kernel for kernel, home in sources.file_of_kernel().items() if home == file]


def _run(kernel: str) -> str:
    parameters = signature(kernel)
    names = [parameter.split()[-1].lstrip("*") for parameter in parameters]
    return _RUN.format(kernel=kernel, parameters=", ".join(parameters), names=", ".join(names))
