"""Build the device code for the CPU and launch it like any other loader."""

from __future__ import annotations

import ctypes
import fcntl
import re
import subprocess
from pathlib import Path
from shutil import which

import pytest

from commopt.kernels import sources
from commopt.kernels.loader import Arguments, Loader

_RUN = """
extern "C" void run_{kernel}({parameters}, unsigned grid, unsigned block) {{
    emulator::{launch}(grid, block, [&] {{ {kernel}({names}); }});
}}
"""

_INSTRUCTIONS = {
    'asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));': "result = half_to_float(value.bits);",
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));': "result.bits = float_to_half(value);",
    'asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));': "result.bits = float_to_bfloat16(value);",
}

# A product and a sum are two roundings on every processor. The handler of the alignment check is in the header.
_FLAGS = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-fno-strict-aliasing", "-ffp-contract=off"]
_FLAGS += ["-fsanitize=alignment", "-U_FORTIFY_SOURCE"]  # fibers jump from stack to stack


def signature(kernel: str) -> list[str]:
    """Return a kernel's parameters, as written."""
    text = (sources.directory() / sources.file_of_kernel()[kernel]).read_text()
    found = re.search(rf'extern "C" __global__ void {kernel}\(([^)]*)\)', text)
    assert found
    return [" ".join(parameter.split()) for parameter in found[1].split(",")]


class Emulator(Loader):
    """Runs kernels on the CPU, one file at a time, built on first use in `folder`.

    `last_first` says which warp of a block gets ahead of the others.
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
        for name in ("misaligned", "divergent"):
            assert ctypes.c_int.in_dll(library, name).value == 0, f"{kernel}: {name}"

    def library(self, file: str) -> ctypes.CDLL:
        """Return a file's kernels, built unless a process that shares the folder has done so."""
        if file not in self._libraries:
            with open(self.folder / f"{file}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                built = self.folder / f"{file}.so"
                entries = "".join(map(_run, _kernels(file)))
                self._libraries[file] = ctypes.CDLL(str(built)) if built.exists() else self.build(file, entries)
        return self._libraries[file]

    def build(self, file: str, entries: str) -> ctypes.CDLL:
        """Compile a file of device code with C++ `entries` behind it."""
        code = sources.translation_unit(file)
        for instruction, replacement in _INSTRUCTIONS.items():
            code = code.replace(instruction, replacement)
        assert "asm(" not in code
        header = Path(__file__).with_suffix(".hpp")
        source, library = self.folder / f"{file}.cpp", self.folder / f"{file}.so"
        source.write_text(f'#include "{header}"\n{code}\n{entries}')
        subprocess.run(["g++", *_FLAGS, "-o", str(library), str(source)], check=True, timeout=120)
        return ctypes.CDLL(str(library))


def _kernels(file: str) -> list[str]:
    return [kernel for kernel, home in sources.file_of_kernel().items() if home == file]


def _run(kernel: str) -> str:
    parameters = signature(kernel)
    names = [parameter.split()[-1].lstrip("*") for parameter in parameters]
    unit = sources.translation_unit(sources.file_of_kernel()[kernel])
    together = "_sync(" in unit or "__syncthreads(" in unit
    launch = "launch" if together else "launch_in_turn"
    return _RUN.format(kernel=kernel, parameters=", ".join(parameters), names=", ".join(names), launch=launch)
