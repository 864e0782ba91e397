"""Compile device code at run time through CuPy's binding of NVRTC, and keep on disk what comes out.

CuPy's own `RawModule(code=...)` adds -ftz=true to all options: denormals would then count as zeros in every product,
sum and comparison, and the bits differ from nvcc's.
"""

from __future__ import annotations

import os
import tempfile
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
    """Return a file with the machine code, compiled now unless some process did before. Raises CompileError."""
    from cupy.cuda import nvrtc

    made_of = (sources.translation_unit(file), architecture, nvrtc.getVersion(), _OPTIONS)
    key = sha256(repr(made_of).encode()).hexdigest()[:24]
    path = _folder() / f"{Path(file).stem}_{architecture}_{key}.cubin"
    if not path.exists():
        code, _ = compile_file(file, architecture)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as unfinished:
            unfinished.write(code)
        os.replace(unfinished.name, path)  # other ranks see all of it or nothing
    return path


def _folder() -> Path:
    """Return where machine code is kept: the user's cache, or a folder of this process where that cannot be written."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "commopt", "kernels")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return cache
    except OSError:
        return Path(tempfile.mkdtemp(prefix="commopt-kernels-"))
