# SPDX-License-Identifier: Apache-2.0
"""The emulator with every access watched: races, accesses out of bounds, reads of what nobody wrote."""

from __future__ import annotations

import ctypes
import fcntl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from commopt.kernels import sources
from commopt.kernels.loader import Arguments
from tests.compare_loaders import Memory
from tests.emulator import FLAGS, Emulator

_WATCH = Path(__file__).with_name("emulator_races.cpp")
_BARRIER = "__syncthreads();"
_LINES_BEFORE = 2  # the code in what is compiled
_REPORT_NBYTES = 1 << 20


class WatchedEmulator(Emulator):
    """Launches each kernel forwards and backwards in turn, and keeps what the watch has found in `found`.

    memory: all that kernels may access beside their shared memory.
    """

    def __init__(self, folder: Path, memory: Memory) -> None:
        super().__init__(folder)
        self._memory = memory
        self.launches: dict[str, int] = {}
        self.found: list[str] = []

    def launch(self, kernel: str, grid: int, block: int, stream: int, arguments: Arguments) -> None:
        """See Loader. What is found is no error here; an access out of bounds is not made, but ends the launch."""
        file = sources.file_of_kernel()[kernel]
        library = self.library(file)
        with self._memory.unwatched():
            ends = [end for both in self._memory.ranges() for end in both]
        library.races_memory((ctypes.c_size_t * len(ends))(*ends), len(ends) // 2)
        self.launches[kernel] = self.launches.get(kernel, 0) + 1
        self.last_first = self.launches[kernel] % 2 == 0
        try:
            super().launch(kernel, grid, block, stream, arguments)
        except AssertionError as error:
            self.found.append(str(error))
        report = ctypes.create_string_buffer(_REPORT_NBYTES)
        if library.races_found(report, len(report)):
            for line in report.value.decode().splitlines():
                what, *places = line.split("|")
                lines = [self._code_at(file, int(at, 16)) for at in places if int(at, 16)]
                self.found.append(f"{kernel}: {what}: {' / '.join(lines)}")

    def compile(self, source: Path, library: Path) -> None:
        """Run the compiler. The watch, the same for all libraries, is not watched itself; libtsan is not linked."""
        instrumented, watch = source.with_suffix(".o"), self.folder / "watch.o"
        with open(self.folder / "watch.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not watch.exists():
                _run("g++", "-std=c++17", "-O2", "-fPIC", "-w", "-c", "-o", str(watch), str(_WATCH))
        _run("g++", *FLAGS, "-fsanitize=thread", "-g1", "-c", "-o", str(instrumented), str(source))
        _run("g++", "-shared", "-o", str(library), str(instrumented), str(watch))

    def leave_out(self, barrier: Barrier | None, file: str) -> None:
        """Let no thread of the kernels in `file` wait at a barrier from now on; None: let them wait at all."""
        line = 0 if barrier is None else _LINES_BEFORE + barrier.line_in(self.code(file))
        ctypes.c_int.in_dll(self.library(file), "without_barrier").value = line

    def _code_at(self, file: str, address: int) -> str:
        """Return the line of device code that the instruction before an address is of."""
        source = self.folder / f"{file}.cpp"
        command = ["addr2line", "-i", "-e", str(source.with_suffix(".so")), hex(address - 1)]
        for place in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
            name, _, line = place.split(" ")[0].rpartition(":")  # what is inlined first, then what it is in
            if Path(name).name == source.name and line.isdigit():
                return source.read_text().splitlines()[int(line) - 1].strip()
        return hex(address)


class Barrier(NamedTuple):
    """A barrier of the device code: its file and its line there, from 1."""

    file: str
    line: int

    def line_in(self, unit: str) -> int:
        """Return which line it is of a file that includes its own, where what follows the includes is found again."""
        text = (sources.directory() / self.file).read_text()
        before = text[: text.rindex("#include")].count("\n") + 1 if "#include" in text else 1
        body = "".join(text.splitlines(keepends=True)[before:])
        assert unit.count(body) == 1
        return self.line - before + unit[: unit.index(body)].count("\n")


def barriers() -> Iterator[Barrier]:
    """Yield all barriers of the device code."""
    for path in sorted(sources.directory().glob("*.cuh")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if _BARRIER in line:
                yield Barrier(path.name, number)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=300)
