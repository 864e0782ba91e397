# SPDX-License-Identifier: Apache-2.0
"""Where machine code that was compiled at run time is kept, and when it is trusted; a pretended compiler will do."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from commopt.kernels import nvrtc

FILE, ARCHITECTURE = "lowrank.cuh", "sm_90"


class Compiler:
    """Counts how often it compiles."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, file: str, architecture: str) -> tuple[bytes, str]:
        self.calls += 1
        return b"\x7fELF machine code of " + file.encode(), ""


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    cuda: Any = ModuleType("cupy.cuda")
    cuda.nvrtc = SimpleNamespace(getVersion=lambda: (13, 0))
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    found = Compiler()
    monkeypatch.setattr(nvrtc, "compile_file", found)
    return found


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    return tmp_path / "cache" / "commopt" / "kernels"


def compiled() -> Path:
    return nvrtc.compiled(FILE, ARCHITECTURE)


def test_code_is_kept_where_nobody_else_may_write(cache: Path, compiler: Compiler) -> None:
    cache.mkdir(parents=True, mode=0o777)
    cache.chmod(0o777)
    assert compiled() == compiled()
    assert nvrtc.compiled(FILE, "sm_80") != compiled()
    assert compiler.calls == 2
    assert compiled() in cache.iterdir()
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_file_is_on_disk_before_it_has_its_name(
    cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_fsync: list[tuple[list[str], int]] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        at_fsync.append(([path.suffix for path in cache.iterdir()], os.fstat(handle).st_size))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    assert at_fsync == [([""], compiled().stat().st_size)]


def homeless(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)


def unwritable(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    cache.parents[1].write_text("no folder")


def of_somebody_else(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    cache.mkdir(parents=True)
    os.chown(cache, 4711, 4711)


def a_link(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """As of_somebody_else: it is not asked where the link leads."""
    cache.parent.mkdir(parents=True)
    cache.symlink_to(tempfile.mkdtemp(dir=cache.parents[2]))
    os.chown(cache, 4711, 4711, follow_symlinks=False)


def full(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def fsync(handle: int) -> None:
        monkeypatch.undo()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)


ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files of another user")


@pytest.mark.parametrize(
    "trouble",
    [homeless, unwritable, *(pytest.param(each, marks=ROOT_ONLY) for each in (of_somebody_else, a_link))],
)
def test_without_a_cache_it_is_kept_among_temporary_files(
    trouble: Any, cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble(monkeypatch, cache)
    assert compiled() == compiled()
    assert compiled().parent == Path(tempfile.gettempdir(), f"commopt-kernels-{os.geteuid()}")
    assert compiled().parent.stat().st_mode & 0o777 == 0o700
    assert compiler.calls == 1


def test_a_full_disk_leaves_nothing_unfinished(cache: Path, compiler: Compiler, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        full(patch, cache)
        path = compiled()
    assert path.is_relative_to(tmp_path / "temporary")
    assert compiler.calls == 1
    assert list(cache.iterdir()) == []


def test_where_nothing_can_be_kept_that_is_said(
    cache: Path, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unwritable(monkeypatch, cache)
    (tmp_path / "temporary").rmdir()
    (tmp_path / "temporary").write_text("no folder")
    with pytest.raises(OSError, match=r"(?s)no place to keep.*Not a directory.*Not a directory.*set XDG_CACHE_HOME"):
        compiled()
    assert compiler.calls == 0
