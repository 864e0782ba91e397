"""Where machine code that was compiled at run time is kept, and when it is trusted; a pretended compiler will do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from commopt.kernels import nvrtc

FILE, ARCHITECTURE = "pack.cuh", "sm_90"
ROOT = Path(__file__).parent.parent


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
    monkeypatch.setattr(nvrtc, "_own_folders", {})
    return found


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "commopt" / "kernels"


def compiled() -> Path:
    return nvrtc.compiled(FILE, ARCHITECTURE)


def own_folders() -> list[Path]:
    return list(nvrtc._own_folders.values())


def test_code_is_kept_where_nobody_else_may_write(cache: Path, compiler: Compiler) -> None:
    cache.mkdir(parents=True, mode=0o777)
    cache.chmod(0o777)
    assert compiled() == compiled()
    assert (compiler.calls, own_folders(), list(cache.iterdir())) == (1, [], [compiled()])
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", [b"", b"\x7fELF machine c", b"\x7fELF Machine code of pack.cuh"])
def test_damaged_files_are_compiled_again(cache: Path, compiler: Compiler, damage: bytes) -> None:
    whole = compiled().read_bytes()
    compiled().write_bytes(damage)
    assert compiled().read_bytes() == whole
    assert (compiler.calls, len(list(cache.iterdir()))) == (2, 1)


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
    cache.parent.write_text("no folder")


def of_somebody_else(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)


def full(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def fsync(handle: int) -> None:
        monkeypatch.undo()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (homeless, "Could not determine home directory"),
        (unwritable, "Not a directory"),
        (of_somebody_else, "belongs to user .* and this is 4711"),
    ],
)
def test_without_a_cache_there_is_one_folder_for_the_process(
    trouble: Any,
    reason: str,
    cache: Path,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trouble(monkeypatch, cache)
    assert compiled() == compiled()
    assert nvrtc.compiled(FILE, "sm_80") != compiled()
    assert own_folders() == [compiled().parent]
    assert compiler.calls == 2
    (message,) = caplog.messages
    assert "set XDG_CACHE_HOME" in message
    assert re.search(reason, message)
    nvrtc._remove(os.getpid(), own_folders()[0])
    assert not own_folders()[0].exists()


def test_a_full_disk_leaves_nothing_unfinished(
    cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        full(patch, cache)
        path = compiled()
    assert [path.parent] == own_folders()
    assert list(cache.iterdir()) == []


SCRIPT = """
import os
from pathlib import Path
from commopt.kernels import nvrtc
os.environ["XDG_CACHE_HOME"] = "/dev/null"
folder = nvrtc._folder()
assert folder.is_dir()
child = os.fork()
if not child:
    mine = nvrtc._folder()
    assert mine != folder
    print(mine, flush=True)
    raise SystemExit
assert os.waitpid(child, 0)[1] == 0
assert folder.is_dir(), "removed by a forked process"
print(folder)
"""


def test_the_folder_of_a_process_goes_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folders = [Path(line) for line in done.stdout.splitlines()]
    assert len(folders) == 2
    assert not [folder for folder in folders if folder.exists()]
