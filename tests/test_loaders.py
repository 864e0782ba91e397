# SPDX-License-Identifier: Apache-2.0
"""Which loader runs the kernels: what is forced, what is there, and what works once it is tried."""

from __future__ import annotations

import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch

from commopt.errors import ConfigurationError
from commopt.kernels import loader, sources
from tests.emulator import Emulator

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


@pytest.fixture(autouse=True)
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, and nothing chosen yet."""
    monkeypatch.delenv(loader.VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    loader._choose.cache_clear()
    loader._load.cache_clear()


class TestAbsent:
    """Where neither loader is installed."""

    @pytest.fixture(autouse=True)
    def without(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "commopt._C", None)
        monkeypatch.setattr(sys, "path", [])
        monkeypatch.setitem(sys.modules, "cupy", None)

    @pytest.mark.parametrize(
        ("name", "capability", "message"),
        [
            ("native", (9, 0), "COMMOPT_KERNELS=native cannot work on cuda:0.*with nvcc on PATH"),
            ("nvrtc", (9, 0), "COMMOPT_KERNELS=nvrtc cannot work on cuda:0.*cupy-cuda12x"),
            ("cuda", (9, 0), "COMMOPT_KERNELS=cuda is unknown; set native, nvrtc or torch"),
            ("native", (7, 5), r"compute capability 7\.5 and the kernels need 8\.0.*V100, T4"),
        ],
    )
    def test_what_is_forced_and_cannot_be(
        self, monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], message: str
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setenv(loader.VARIABLE, name)
        with pytest.raises(ConfigurationError, match=message):
            loader.loader_for(GPU)

    def test_torch_is_silent_and_the_last_resort_is_logged_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert loader.loader_for(CPU) is None
        assert loader.loader_for(GPU, torch.float64) is None
        monkeypatch.setenv(loader.VARIABLE, "torch")
        assert loader.loader_for(GPU) is None
        assert not caplog.records
        monkeypatch.delenv(loader.VARIABLE)
        for _ in range(2):
            assert loader.loader_for(GPU) is None
        (message,) = caplog.messages
        assert "nvcc" in message
        assert "cupy-cuda12x" in message


class TestInstalled:
    """What a source tree without compiled kernels finds in the installed package; a Python file stands for them."""

    @pytest.fixture(autouse=True)
    def installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "commopt"
        shutil.copytree(sources.directory(), folder / "csrc", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        (folder / "_C.py").write_text("launched = []\ndef launch(*arguments): launched.append(arguments)\n")
        others = [each for each in sys.path if not list(Path(each, "commopt").glob("_C.*"))]
        monkeypatch.setattr(sys, "path", [*others, str(tmp_path)])
        monkeypatch.setitem(sys.modules, "commopt._C", None)  # the source tree's; put back at the end
        return folder

    def test_of_the_same_sources_is_used(self) -> None:
        loader.Native().launch("kernel", 1, 2, 3, (4,))
        assert sys.modules["commopt._C"].launched == [("kernel", 1, 2, 3, (4,))]

    @pytest.mark.parametrize("changed", ["lowrank.cuh", "other.cuh", "cpu/lowrank.hpp"])
    def test_of_other_sources_is_not(self, installed: Path, changed: str) -> None:
        (installed / "csrc" / changed).write_text("// an edit")
        with pytest.raises(ImportError, match="compiled from other sources"):
            loader.Native()

    def test_of_an_editable_installation_that_is_older_is_not(
        self, installed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = ModuleType("commopt._C")
        module.__file__ = str(installed / "_C.py")
        monkeypatch.setitem(sys.modules, "commopt._C", module)
        loader.Native()
        (installed / "csrc" / "lowrank.cuh").write_text("// an edit")
        with pytest.raises(ImportError, match="compiled from other sources"):
            loader.Native()

    def test_without_compiled_kernels(self, installed: Path) -> None:
        (installed / "_C.py").unlink()
        with pytest.raises(ModuleNotFoundError, match=r"commopt\._C"):
            loader.Native()


class Broken(loader.Loader):
    """Imports, and then does what a loader does that does not suit the driver, or the GPU."""

    fix = "reinstall it"

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def launch(self, kernel: str, grid: int, block: int, stream: int, arguments: loader.Arguments) -> None:
        if self._error is not None:
            raise self._error  # else it launches what does nothing


class TestTrial:
    """What is chosen on the CPU, where the emulator's kernels work and others do not."""

    @pytest.fixture(autouse=True)
    def on_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        for name in ("_cuda_exchangeDevice", "_cuda_getCurrentRawStream", "_cuda_maybeExchangeDevice"):
            monkeypatch.setattr(torch._C, name, lambda index: 0, raising=False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def install(self, patch: pytest.MonkeyPatch, **loaders: loader.Loader | Exception) -> None:
        def make(name: str) -> loader.Loader:
            made = loaders[name]
            if isinstance(made, Exception):
                raise made
            return made

        patch.setattr(loader, "_load", make)

    def test_one_that_works_is_chosen_in_silence(
        self, emulator: Emulator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        absent = ModuleNotFoundError("No module named 'commopt._C'")
        for native in (emulator, absent):
            loader._choose.cache_clear()
            self.install(monkeypatch, native=native, nvrtc=emulator)
            assert loader._choose("", CPU) is emulator
        assert not caplog.records

    @pytest.mark.parametrize(
        "native",
        [
            Broken(RuntimeError("the provided PTX was compiled with an unsupported toolchain")),
            Broken(None),
            ImportError("libcudart.so.13: cannot open shared object file"),
        ],
        ids=["launch", "result", "import"],
    )
    def test_the_next_one_serves_and_one_warning_says_why(
        self,
        emulator: Emulator,
        native: loader.Loader | Exception,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        self.install(monkeypatch, native=native, nvrtc=emulator)
        for _ in range(2):
            assert loader._choose("", CPU) is emulator
        (message,) = caplog.messages
        assert re.search(r"run by nvrtc \(native: .*(unsupported|instead of|libcudart).*nvcc", message)

    def test_none_works(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.install(monkeypatch, native=Broken(RuntimeError("too old")), nvrtc=Broken(None))
        assert loader._choose("", CPU) is None
        (message,) = caplog.messages
        assert re.search(r"slower plain torch.*native: too old;.*nvrtc: a kernel made \[0", message)
        with pytest.raises(ConfigurationError, match="COMMOPT_KERNELS=native cannot work on cpu: native: too old"):
            loader._choose("native", CPU)

    def test_nothing_waits_while_a_graph_is_captured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        self.install(monkeypatch, native=(never := Broken(AssertionError("launched"))))
        assert loader._choose("", CPU) is never
