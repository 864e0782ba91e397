"""Compile device code at run time through CuPy's binding of NVRTC, and keep on disk what comes out.

CuPy's own `RawModule(code=...)` adds -ftz=true to all options: denormals would then count as zeros in every product,
sum and comparison, and the bits differ from nvcc's.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from hashlib import sha256
from pathlib import Path

from commopt.kernels import sources

_log = logging.getLogger("commopt")

_OPTIONS = ("--std=c++17",)


class CompileError(RuntimeError):
    """A compiler's complaint about device code."""


def compile_file(file: str, architecture: str, *options: str) -> tuple[bytes, str]:
    """Return the machine code of a file of csrc for an architecture such as "sm_90", and the compiler's log.

    Needs CuPy and NVRTC but no GPU. Raises CompileError.
    """
    from cupy.cuda import nvrtc  # optional

    program = nvrtc.createProgram(sources.translation_unit(file), file, (), ())
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture={architecture}", *_OPTIONS, *options))
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        said = nvrtc.getProgramLog(program) or str(error)
        version = ".".join(map(str, nvrtc.getVersion()))
        raise CompileError(f"NVRTC {version} cannot compile {file} for {architecture}: {said}") from error
    finally:
        nvrtc.destroyProgram(program)


def compiled(file: str, architecture: str) -> Path:
    """Return a file with the machine code, compiled now unless some process did before. Raises CompileError."""
    from cupy.cuda import nvrtc

    made_of = (sources.translation_unit(file), architecture, nvrtc.getVersion(), _OPTIONS)
    name = f"{Path(file).stem}_{architecture}_{_digest(repr(made_of).encode())}"
    folder = _folder()
    for path in folder.glob(f"{name}-*.cubin"):
        if _is_whole(path):
            return path
    code, _ = compile_file(file, architecture)
    try:
        return _write(folder, name, code)
    except OSError as error:  # full, or over quota
        return _write(_own_folder(str(error)), name, code)


def _write(folder: Path, name: str, code: bytes) -> Path:
    path = folder / f"{name}-{_digest(code)}.cubin"
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as unfinished:
        try:
            unfinished.write(code)
            unfinished.flush()
            os.fsync(unfinished.fileno())
            os.replace(unfinished.name, path)  # other ranks see all of it or nothing
        except BaseException:
            os.unlink(unfinished.name)
            raise
    return path


def _is_whole(path: Path) -> bool:
    """Return whether a file holds what its name says: a disk may lose what a machine that went down had written."""
    try:
        return path.stem.endswith(f"-{_digest(path.read_bytes())}")
    except OSError:
        return False


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()[:24]


def _folder() -> Path:
    """Return where machine code is kept: the user's cache, or a folder of this process where that cannot be used.

    What lies in it is run on the GPU: nobody else may write there.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "commopt", "kernels")
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (owner := cache.stat().st_uid) != os.geteuid():
            return _own_folder(f"{cache} belongs to user {owner} and this is {os.geteuid()}")
        cache.chmod(0o700)
        with tempfile.TemporaryFile(dir=cache):
            return cache
    except (OSError, RuntimeError) as error:  # RuntimeError: neither HOME nor an entry in the list of users
        return _own_folder(str(error))


_own_folders: dict[int, Path] = {}  # by process: a forked one must not use what its parent removes


def _own_folder(why: str) -> Path:
    """Return a folder of this process, which is removed when it exits, and say once why there is one."""
    process = os.getpid()
    if process not in _own_folders:
        _own_folders[process] = Path(tempfile.mkdtemp(prefix="commopt-kernels-"))
        atexit.register(_remove, process, _own_folders[process])
        _log.warning(
            "no place to keep compiled kernels, so every process compiles them (%s); set XDG_CACHE_HOME to a folder "
            "of yours that can be written",
            why,
        )
    return _own_folders[process]


def _remove(process: int, folder: Path) -> None:
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
