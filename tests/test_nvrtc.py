# SPDX-License-Identifier: Apache-2.0
"""Device code compiled at run time: as nvcc does it, once for each architecture, kept on disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commopt.kernels import nvrtc, sources
from commopt.kernels.loader import Nvrtc
from commopt.kernels.nvrtc import CompileError, compile_file, compiled

FILE = "lowrank.cuh"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library = pytest.importorskip("cupy").cuda.nvrtc
    try:
        library.getVersion()
    except RuntimeError as error:
        pytest.skip(f"CuPy finds no NVRTC: {error}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "commopt" / "kernels"


def intermediate(options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what NVRTC makes of the selection before it becomes machine code."""
    from cupy.cuda import nvrtc as library

    monkeypatch.setattr(library, "getCUBIN", library.getPTX)
    code, _ = compile_file("sparse_accumulate.cuh", "compute_80", *options)
    return code.decode()


def test_denormals_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "mul.rn.f32" in intermediate((), monkeypatch)
    assert ".ftz" not in intermediate((), monkeypatch)
    assert ".ftz" in intermediate(("-ftz=true",), monkeypatch), "the test must be able to fail"


def test_what_was_compiled_is_read_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled(FILE, "sm_80")
    assert first.parent == cache
    assert first.read_bytes().startswith(b"\x7fELF")
    assert compiled(FILE, "sm_90") != first
    assert len(list(cache.iterdir())) == 2  # nothing unfinished is left
    monkeypatch.setattr(nvrtc, "compile_file", None)
    assert compiled(FILE, "sm_80") == first


def test_an_edit_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiled(FILE, "sm_80")
    unit = sources.translation_unit(FILE)
    monkeypatch.setattr(sources, "translation_unit", lambda file: unit + "// an edit\n")
    assert compiled(FILE, "sm_80") != before


def test_a_gpu_that_this_nvrtc_does_not_know() -> None:
    with pytest.raises(CompileError, match=rf"NVRTC [\d.]+ cannot compile {FILE} for sm_199: .*gpu-architecture"):
        compile_file(FILE, "sm_199")


def test_each_gpu_gets_code_for_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    capabilities, current, launched = {0: (8, 0), 1: (9, 0)}, [0], []

    class Module:
        def __init__(self, path: str) -> None:
            self.name = Path(path).name

        def get_function(self, kernel: str) -> Any:
            return lambda grid, block, arguments: launched.append((self.name.rsplit("_", 1)[0], kernel, arguments))

    class Stream:
        def __init__(self, address: int) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(cupy, "RawModule", Module)
    monkeypatch.setattr(cupy.cuda, "ExternalStream", Stream)
    fake = SimpleNamespace(current_device=lambda: current[0], get_device_capability=capabilities.__getitem__)
    monkeypatch.setattr(torch, "cuda", fake)
    loader = Nvrtc()
    for current[0] in (0, 1, 0):
        loader.launch("lowrank_decode", 1, 32, 0, (1, 2))
    assert launched == [(f"lowrank_sm_{arch}", "lowrank_decode", (1, 2)) for arch in (80, 90, 80)]
