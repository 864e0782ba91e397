# SPDX-License-Identifier: Apache-2.0
"""No kernel races, leaves its memory or reads what nobody wrote; and whoever says so would see it.

Kernels run in processes of their own: what goes wrong in one that was made wrong on purpose stays there.
"""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from bench.gpu import every_kernel
from commopt.kernels import sources
from tests.compare_loaders import Memory
from tests.emulator import Emulator, on_the_cpu
from tests.races import Barrier, WatchedEmulator, barriers
from tests.ranks import run

CPU = torch.device("cpu")
WORLD_SIZE = 2
TIMEOUT_S = 280.0  # of a machine that has much else to do

# What launches the kernels of a file, and where those of files without kernels are compiled.
GROUPS = {
    **dict.fromkeys(("quantize", "requantize", "dequantize"), "quantize"),
    **dict.fromkeys(("sparse_accumulate", "sparse_decode", "sparse_select", "sparse_write"), "sparse"),
    **dict.fromkeys(("factors", "lowrank"), "lowrank"),
}
COMPILED_IN = {"team": "quantize", "scan": "sparse_select"}


@pytest.fixture
def folder(emulator: Emulator) -> Path:
    """Return where the watched kernels are built, once for all processes."""
    found = emulator.folder / "watched"
    found.mkdir(exist_ok=True)
    return found


# ------------------------------------------------------------------------------ the kernels as they are


def watch_every_kernel(rank: int, world_size: int, folder: Path) -> tuple[dict[str, int], list[str]]:
    """Launch every kernel with this rank's part of the inputs; return how often each, and what was found."""
    torch.manual_seed(rank)
    files = sorted(set(sources.file_of_kernel().values()))
    groups = [*itertools.chain(*every_kernel.GROUPS.values())]
    with Memory("cpu") as memory:
        emulator = WatchedEmulator(folder, memory)
        for file in (*files[rank::world_size], *files):  # each rank builds some
            emulator.library(file)
        with on_the_cpu(emulator):
            for call in itertools.chain(*(group(CPU) for group in groups[rank::world_size])):
                call()
    return emulator.launches, sorted(set(emulator.found))


def test_every_kernel(folder: Path) -> None:
    results = run(watch_every_kernel, WORLD_SIZE, folder, timeout_s=TIMEOUT_S)
    for kernel in sources.file_of_kernel():
        assert max(launches.get(kernel, 0) for launches, _ in results) >= 2, f"{kernel} did not run in both directions"
    assert [found for _, found in results] == [[]] * WORLD_SIZE


# ------------------------------------------------------------------------------ the kernels made wrong


def first_found(emulator: WatchedEmulator, group: str) -> str:
    """Launch until something is found; return that, or nothing."""
    with on_the_cpu(emulator):
        for calls in reversed(every_kernel.GROUPS[group]):
            for call in calls(CPU):
                call()
                if emulator.found:
                    return emulator.found[0]
    return ""


def without_barrier(rank: int, world_size: int, folder: Path, barrier: Barrier) -> str:
    """Launch kernels none of whose threads waits at a barrier; return what is found first."""
    name = barrier.file.removesuffix(".cuh")
    name = COMPILED_IN.get(name, name)
    with Memory("cpu") as memory:
        emulator = WatchedEmulator(folder, memory)
        emulator.leave_out(barrier, f"{name}.cuh")
        try:
            return first_found(emulator, GROUPS[name])
        finally:
            emulator.leave_out(None, f"{name}.cuh")


@pytest.mark.parametrize("barrier", list(barriers()), ids=lambda barrier: f"{barrier.file}:{barrier.line}")
def test_every_barrier_is_needed_and_missed(folder: Path, barrier: Barrier) -> None:
    (found,) = run(without_barrier, 1, folder, barrier, timeout_s=TIMEOUT_S)
    assert found, f"{barrier.file}:{barrier.line} is needless, or what needs it is not launched"


EDITS = {
    "an index too far": (
        "lowrank.cuh",
        "return left[row * stride + k];",
        "return left[row * stride + k + 1];",
        r"lowrank_\w+: read out of bounds: ",
    ),
    "shared memory that nobody wrote": (
        "lowrank.cuh",
        "    clear_from(left_panel, part.rows);\n",
        "",
        r"lowrank_\w+: shared memory read that the block has not written: ",
    ),
    "the order of blocks": (
        "factors.cuh",
        "largest[blockIdx.x] = bits;",
        "largest[0] = bits;",
        "factor_absmax: write after a write: ",
    ),
}


def edited(rank: int, world_size: int, folder: Path, file: str, old: str, new: str) -> str:
    """Launch kernels of another text; return what is found first."""
    code = sources.translation_unit(file)
    assert code.count(old) == 1
    with Memory("cpu") as memory:
        emulator = WatchedEmulator(folder, memory)
        with patch.object(sources, "translation_unit", lambda file: code.replace(old, new)):
            emulator.library(file)
        return first_found(emulator, GROUPS[file.removesuffix(".cuh")])


@pytest.mark.parametrize("edit", EDITS)
def test_what_is_wrong_is_found(folder: Path, tmp_path: Path, edit: str) -> None:
    *arguments, message = EDITS[edit]
    own = shutil.copytree(folder, tmp_path / "own", ignore=shutil.ignore_patterns(f"{arguments[0]}.*"))
    (found,) = run(edited, 1, own, *arguments, timeout_s=TIMEOUT_S)
    assert re.match(message, found)
