# SPDX-License-Identifier: Apache-2.0
"""Choose between kernels compiled at install time, kernels compiled at first use, and plain torch."""

from __future__ import annotations

import logging
import os
import sys
from abc import ABC, abstractmethod
from functools import cache, lru_cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch

from commopt.errors import ConfigurationError
from commopt.kernels.codec import DTYPES

VARIABLE = "COMMOPT_KERNELS"

Arguments: TypeAlias = tuple[int | float, ...]

_log = logging.getLogger("commopt")


class Loader(ABC):
    """A way to launch a kernel by its name; construction raises `ImportError` where it cannot work."""

    fix: ClassVar[str]  # what to do when the user asked for this loader and it is absent

    @abstractmethod
    def launch(self, kernel: str, grid: int, block: int, stream: int, arguments: Arguments) -> None:
        """Launch on the current device; `stream` is the address of a CUDA stream."""

    def queue(self, device: torch.device, kernel: str, grid: int, block: int, arguments: Arguments) -> None:
        """Launch on the current stream of a device, unless there is nothing to do."""
        if not grid:
            return
        before = torch._C._cuda_exchangeDevice(device.index)
        try:
            self.launch(kernel, grid, block, torch._C._cuda_getCurrentRawStream(device.index), arguments)
        finally:
            torch._C._cuda_maybeExchangeDevice(before)


class Native(Loader):
    """The module `commopt._C`, built by nvcc during installation."""

    fix = (
        "install commopt from source with nvcc on PATH, of a CUDA that the driver knows (COMMOPT_REQUIRE_CUDA=ON makes "
        "a failure visible)"
    )

    def __init__(self) -> None:
        self._module = _compiled("_C")

    def launch(self, kernel: str, grid: int, block: int, stream: int, arguments: Arguments) -> None:
        self._module.launch(kernel, grid, block, stream, arguments)


def _compiled(name: str) -> Any:
    """Import a compiled module; a source tree has none, and takes that of the installed commopt.

    What is run from a source tree imports that tree's package, whatever is installed. Raises ImportError for a module
    of other sources: an editable installation is older than its tree after `git pull`.
    """
    try:
        module = import_module(f"commopt.{name}")
    except ModuleNotFoundError:
        for folder in (Path(entry, "commopt") for entry in sys.path):
            spec = PathFinder.find_spec(f"commopt.{name}", [str(folder)])
            if spec is None or spec.loader is None:
                continue
            _require_same_sources(folder)
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[f"commopt.{name}"] = module
            return module
        raise
    if module.__file__ is not None:
        _require_same_sources(Path(module.__file__).parent)
    return module


def _require_same_sources(folder: Path) -> None:
    """Raise ImportError when the modules in `folder`, which has their sources beside them, are of other ones."""
    from commopt.kernels import sources

    if sources.contents(folder / "csrc") != sources.contents(sources.directory()):
        raise ImportError(
            f"{folder} was compiled from other sources than {sources.directory()}; install commopt again"
        ) from None


def kernels_wanted() -> str:
    """Return the value of COMMOPT_KERNELS, "" where it is not set. Raises ConfigurationError for an unknown one."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted and wanted not in (*_LOADERS, "torch"):
        raise ConfigurationError(f"{VARIABLE}={wanted} is unknown; set native, nvrtc or torch, or unset it")
    return wanted


def cpu_kernels() -> Any | None:
    """Return `commopt._cpu`, built at installation where there was a C++ compiler; None where plain torch computes."""
    return None if os.environ.get(VARIABLE) == "torch" else _cpu_kernels()


@cache
def _cpu_kernels() -> Any | None:
    try:
        return _compiled("_cpu")
    except ImportError as error:
        level = logging.INFO if isinstance(error, ModuleNotFoundError) else logging.WARNING
        _log.log(level, "kernels on the CPU run as slower plain torch operations (%s)", error)
        return None


def kernels_in_use() -> dict[str, str]:
    """Return a text: which kernels compute on the CPU and on the first GPU here."""
    without = f"{VARIABLE}=torch" if kernels_wanted() == "torch" else "commopt._cpu is not compiled"
    cpu = cpu_kernels()
    found = {"CPU": f"plain torch and NumPy ({without})" if cpu is None else f"compiled, for {_TARGETS[cpu.target()]}"}
    if not torch.cuda.is_available():
        return {**found, "GPU": "none, as torch sees no GPU here"}
    loader = loader_for(torch.device("cuda", torch.cuda.current_device()))
    kinds = {Native: "compiled by nvcc", Nvrtc: "compiled by NVRTC when first used"}
    return {**found, "GPU": "plain torch" if loader is None else kinds[type(loader)]}


_TARGETS = {"avx2": "AVX2", "baseline": "any processor (baseline)"}


def cpu_threads() -> int:
    """Return how many threads a CPU kernel may use: torch's, and no more than this rank's share of the processors."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun's; others may leave it empty
    return max(1, min(torch.get_num_threads(), processors // max(1, int(ranks) if ranks.isdecimal() else 1)))


class Nvrtc(Loader):
    """NVRTC, NVIDIA's run-time compiler, through CuPy: one file at a time, on first use, kept on disk."""

    fix = (
        "pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12, or cupy-cuda13x nvidia-cuda-nvrtc, as torch.version.cuda says"
    )

    def __init__(self) -> None:
        self._cupy: Any = import_module("cupy")
        try:
            self._cupy.cuda.nvrtc.getVersion()  # CuPy loads the library on the first call only
        except RuntimeError as error:
            raise ImportError(f"CuPy finds no NVRTC library: {error}") from error
        self._module = cache(self._load)
        self._function = cache(self._find)
        self._stream = cache(self._cupy.cuda.ExternalStream)  # CuPy 14 warns whenever one is made

    def launch(self, kernel: str, grid: int, block: int, stream: int, arguments: Arguments) -> None:
        function = self._function(kernel, torch.cuda.current_device())
        with self._stream(stream):
            function((grid,), (block,), arguments)

    def _load(self, file: str, architecture: str) -> Any:
        from commopt.kernels import nvrtc

        return self._cupy.RawModule(path=str(nvrtc.compiled(file, architecture)))

    def _find(self, kernel: str, device: int) -> Any:
        from commopt.kernels import sources

        major, minor = torch.cuda.get_device_capability(device)
        return self._module(sources.file_of_kernel()[kernel], f"sm_{major}{minor}").get_function(kernel)


_LOADERS: dict[str, type[Loader]] = {"native": Native, "nvrtc": Nvrtc}


def loader_for(device: torch.device, dtype: torch.dtype = torch.float32) -> Loader | None:
    """Return the loader of kernels for values of `dtype`, None for plain torch; COMMOPT_KERNELS forces one.

    A loader is chosen once one of its kernels has given the right result: one that imports may still meet a driver that
    is too old. Raises `ConfigurationError` when the forced one is unknown or cannot work here.
    """
    if device.type != "cuda" or dtype not in DTYPES:
        return None
    return _choose(kernels_wanted(), device)


@lru_cache
def _choose(wanted: str, device: torch.device) -> Loader | None:
    if wanted == "torch":
        return None
    failures = _obstacles(device)
    broken = False
    if not failures:
        for name in [wanted] if wanted else _LOADERS:
            try:
                loader = _load(name)
                _try(loader, device)
            except (ImportError, RuntimeError, OSError) as error:
                failures.append(f"{name}: {error}; {_LOADERS[name].fix}")
                broken |= not isinstance(error, ModuleNotFoundError)
                continue
            if broken:  # a loader that is merely absent is no news where another works
                _log.warning("kernels on %s run by %s (%s)", device, name, "; ".join(failures))
            return loader
    if wanted:
        raise ConfigurationError(f"{VARIABLE}={wanted} cannot work on {device}: {failures[0]}, or unset {VARIABLE}")
    _log.warning("kernels on %s run as slower plain torch operations (%s)", device, "; ".join(failures))
    return None


def _obstacles(device: torch.device) -> list[str]:
    """Tell why no compiled kernel can run on a device: ROCm, or a GPU older than the instructions used."""
    if torch.version.hip is not None:
        return ["the kernels are CUDA and this torch is built for ROCm; use a CUDA build"]
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return [
            f"the GPU has compute capability {major}.{minor} and the kernels need 8.0 (A100 and RTX 30 have it; V100, "
            f"T4 and RTX 20 do not); use a newer GPU"
        ]
    return []


def _try(loader: Loader, device: torch.device) -> None:
    """Launch a kernel that doubles three numbers, and wait for it. Raises RuntimeError unless it does."""
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return  # nobody may wait there
        values = torch.tensor([1.5, -2.0, 3.0], dtype=torch.float32, device=device)
        doubled = torch.zeros_like(values)
        two = torch.full((), 2.0, dtype=torch.float32, device=device)  # a factor of one row: left times right
        arguments = (values.data_ptr(), two.data_ptr(), values.numel(), 1, 1, doubled.data_ptr())
        loader.queue(values.device, "lowrank_decode", 1, 256, arguments)
        if not torch.equal(doubled, 2 * values):
            raise RuntimeError(f"a kernel made {doubled.tolist()} of {values.tolist()} instead of twice as much")


@cache
def _load(name: str) -> Loader:
    return _LOADERS[name]()
