# SPDX-License-Identifier: Apache-2.0
"""The device code itself: rules that the text of all kernels must keep, and the compile check."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from commopt.kernels import sources
from commopt.kernels.nvrtc import CompileError
from csrc import compile_check
from tests.emulator import signature


@pytest.mark.parametrize("kernel", sorted(sources.file_of_kernel()))
def test_every_parameter_is_eight_bytes(kernel: str) -> None:
    for parameter in signature(kernel):
        kind = parameter.rsplit(" ", 1)[0]
        assert kind in ("long long", "double") or kind.endswith("*"), parameter


def test_no_system_include() -> None:
    files = sorted(sources.directory().glob("*.cuh"))
    assert files
    for path in files:
        for line in path.read_text().splitlines():
            if line.lstrip().startswith("#include"):
                assert re.fullmatch(r'#include "\w+\.cuh"', line), f"{path.name}: {line}"


def test_every_entry_point_is_found() -> None:
    """A kernel written in another form would be unknown to both loaders."""
    text = "".join(path.read_text() for path in sources.directory().glob("*.cuh"))
    assert len(sources.file_of_kernel()) == text.count("__global__")


def test_translation_unit_holds_every_include_once() -> None:
    unit = sources.translation_unit("quantize.cuh")
    assert unit.count("struct Half {") == 1
    assert "#include" not in unit


REPORT = """ptxas info    : Compiling entry function '{kernel}' for 'sm_90'
ptxas info    : Function properties for {kernel}
    8 bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""


@pytest.mark.parametrize(
    ("spilled", "left_out", "status", "message"),
    [(0, "", 0, ""), (4, "", 1, "lowrank_decode spills 8 bytes"), (0, "lowrank_decode", 1, "reported")],
)
def test_compile_check(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spilled: int,
    left_out: str,
    status: int,
    message: str,
) -> None:
    def compile_file(file: str, architecture: str) -> str:
        homes = sources.file_of_kernel().items()
        kernels = [kernel for kernel, home in homes if home == file and kernel != left_out]
        return "".join(
            REPORT.format(kernel=kernel, spilled=spilled if kernel == "lowrank_decode" else 0) for kernel in kernels
        )

    monkeypatch.setattr(compile_check, "compilers", lambda: {"fake": compile_file})
    assert compile_check.main() == status
    printed = capsys.readouterr()
    assert message in printed.err
    assert "lowrank_subtract" in printed.out


def test_compile_check_reports_what_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compile_file(file: str, architecture: str) -> str:
        raise CompileError("unknown instruction")

    monkeypatch.setattr(compile_check, "compilers", lambda: {"fake": compile_file})
    assert compile_check.main() == 1
    assert "fake lowrank.cuh sm_100: unknown instruction" in capsys.readouterr().err


def test_host_table_lists_every_kernel() -> None:
    module = Path(__file__).parent.parent / "csrc" / "module.cu"
    assert set(re.findall(r"KERNEL\((\w+)\)", module.read_text())) - {"name"} == set(sources.file_of_kernel())


@pytest.mark.skipif(find_spec("commopt._C") is None, reason="commopt._C is not built")
class TestNativeModule:
    def test_names(self) -> None:
        from commopt import _C

        assert _C.names() == sorted(sources.file_of_kernel())

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((1, 2), "factor_solve takes 7 arguments, got 2"),
            ((1, 2, 3, 4, 5, 6, 7), "factor_solve: argument 5 must be a float"),
            ((1, 2, 3, 4.0, 5, 6.0, 7), "factor_solve: argument 3 must be an int"),
        ],
    )
    def test_wrong_arguments(self, arguments: tuple[int | float, ...], message: str) -> None:
        from commopt import _C

        with pytest.raises(TypeError, match=message):
            _C.launch("factor_solve", 1, 32, 0, arguments)

    def test_unknown_kernel(self) -> None:
        from commopt import _C

        with pytest.raises(KeyError, match="no kernel is named nothing"):
            _C.launch("nothing", 1, 32, 0, ())

    @pytest.mark.skipif(torch.cuda.is_available(), reason="would launch on the GPU")
    def test_failed_launch_names_the_kernel(self) -> None:
        from commopt import _C

        with pytest.raises(RuntimeError, match=r"launch of kernel lowrank_decode \(grid 1, block 32\) failed: "):
            _C.launch("lowrank_decode", 1, 32, 0, (0, 0, 1, 1, 1, 0))
