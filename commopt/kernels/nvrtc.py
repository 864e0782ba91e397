# SPDX-License-Identifier: Apache-2.0
"""Compile device code at run time through CuPy's binding of NVRTC, and keep the result on disk.

CuPy's own `RawModule(code=...)` adds -ftz=true to all options: denormals would then count as zeros in every product,
sum and comparison, and the bits differ from nvcc's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from commopt.kernels import sources

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
    """Return a file with the machine code, compiled now unless some process did before.

    It is kept in the user's cache, or among temporary files where that cannot be written. What lies there is run on
    the GPU, so nobody else may write there. Raises CompileError, and OSError where nothing can be kept.
    """
    from cupy.cuda import nvrtc

    made_of = (sources.translation_unit(file), architecture, nvrtc.getVersion(), _OPTIONS)
    name = f"{Path(file).stem}_{architecture}_{sha256(repr(made_of).encode()).hexdigest()[:24]}.cubin"
    code, problems = b"", []
    for folder in _folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (owner := folder.lstat().st_uid) != os.geteuid():
                raise PermissionError(f"{folder} belongs to user {owner} and this is {os.geteuid()}")
            folder.chmod(0o700)
            path = folder / name
            if not path.exists():
                code = code or compile_file(file, architecture)[0]
                _write(path, code)
            return path
        except OSError as error:
            problems.append(str(error))
    raise OSError(f"no place to keep compiled kernels ({'; '.join(problems)}); set XDG_CACHE_HOME to a folder of yours")


def _folders() -> Iterator[Path]:
    with suppress(RuntimeError):  # neither HOME nor an entry in the list of users
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "commopt", "kernels")
    yield Path(tempfile.gettempdir(), f"commopt-kernels-{os.geteuid()}")


def _write(path: Path, code: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as unfinished:
        try:
            unfinished.write(code)
            unfinished.flush()
            os.fsync(unfinished.fileno())  # it must be whole before it has its name, also when the machine goes down
            os.replace(unfinished.name, path)  # other ranks see all of it or nothing
        except BaseException:
            os.unlink(unfinished.name)
            raise
