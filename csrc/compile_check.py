# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel for every supported architecture, through each compiler found, without a GPU.

    python -m csrc.compile_check

Prints registers and spilled bytes per kernel. Exits with 1 when something does not compile or spills.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from shutil import which

from commopt.kernels import nvrtc, sources
from commopt.kernels.nvrtc import CompileError

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")

Compile = Callable[[str, str], str]  # (file, architecture) -> the assembler's report; raises CompileError

_REPORT = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Usage:
    """What one kernel takes on one architecture."""

    kernel: str
    architecture: str
    compiler: str
    registers: int
    spilled_bytes: int


def parse(report: str, architecture: str, compiler: str) -> list[Usage]:
    """Read the usage of every kernel from an assembler's verbose report."""
    return [
        Usage(
            found["kernel"],
            architecture,
            compiler,
            int(found["registers"]),
            int(found["stores"]) + int(found["loads"]),
        )
        for found in _REPORT.finditer(report)
    ]


def compile_with_nvrtc(file: str, architecture: str) -> str:
    """Compile exactly what the run-time loader compiles."""
    return nvrtc.compile_file(file, architecture, "--ptxas-options=-v")[1]


def compile_with_nvcc(file: str, architecture: str) -> str:
    """Compile the file as the build does: includes, the host's pass and all."""
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder, "unit.cu")
        unit.write_text(f'#include "{file}"\n', encoding="utf-8")
        command = ["nvcc", "-c", f"-arch={architecture}", "-std=c++17", "-Xptxas", "-v"]
        command += [f"-I{sources.directory()}", "-o", str(unit.with_suffix(".o")), str(unit)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(done.stderr)
    return done.stderr


def compilers() -> dict[str, Compile]:
    """Return the compilers present, and say which are not."""
    found: dict[str, Compile] = {}
    try:
        from cupy.cuda import nvrtc as library  # optional; needs no driver

        library.getVersion()
        found["nvrtc"] = compile_with_nvrtc
    except (ImportError, RuntimeError) as error:
        print(f"nvrtc: skipped ({str(error).splitlines()[0]}; pip install cupy-cuda13x nvidia-cuda-nvrtc)")
    if which("nvcc"):
        found["nvcc"] = compile_with_nvcc
    else:
        print("nvcc: skipped (not on PATH)")
    return found


def main() -> int:
    """Compile everything, print the table and return the exit status."""
    found = compilers()
    if not found:
        print("no kernel was checked")
        return 0
    expected = sources.file_of_kernel()
    failures: list[str] = []
    usages: list[Usage] = []
    files = sorted(set(expected.values()))  # the other files are included by these
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = [
            (compiler, file, architecture, pool.submit(compile_file, file, architecture))
            for (compiler, compile_file), file, architecture in product(found.items(), files, ARCHITECTURES)
        ]
    for compiler, file, architecture, report in reports:
        where = f"{compiler} {file} {architecture}"
        wanted = {kernel for kernel, home in expected.items() if home == file}
        try:
            seen = parse(report.result(), architecture, compiler)
        except CompileError as error:
            failures.append(f"{where}: {error}")
            continue
        usages += seen
        if {usage.kernel for usage in seen} != wanted:
            failures.append(f"{where}: reported {sorted(u.kernel for u in seen)}, expected {sorted(wanted)}")
    print(f"{'kernel':<28}{'compiler':<10}{'arch':<8}{'registers':>10}{'spilled bytes':>15}")
    for usage in sorted(usages, key=lambda u: (u.kernel, u.compiler, ARCHITECTURES.index(u.architecture))):
        print(
            f"{usage.kernel:<28}{usage.compiler:<10}{usage.architecture:<8}"
            f"{usage.registers:>10}{usage.spilled_bytes:>15}"
        )
        if usage.spilled_bytes:
            failures.append(f"{usage.kernel} spills {usage.spilled_bytes} bytes on {usage.architecture}")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
