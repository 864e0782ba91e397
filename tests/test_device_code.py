"""The device code itself: the packing kernels run on the CPU, and rules that the text of all kernels must keep."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from commopt.kernels import sources
from commopt.kernels.loader import Arguments
from commopt.kernels.nvrtc import CompileError
from commopt.kernels.pack import _rows, pack_with_torch, unpack_with_torch
from csrc import compile_check
from tests.emulator import Emulator, signature

EMULATED = {
    "transfer_bits_16": (torch.bfloat16, torch.bfloat16, 1.0),
    "transfer_bits_32": (torch.float32, torch.float32, 1.0),
    "transfer_f32_f32": (torch.float32, torch.float32, 1 / 3),
    "transfer_f32_f16": (torch.float32, torch.float16, 1 / 3),
    "transfer_f16_f32": (torch.float16, torch.float32, 1 / 3),
    "transfer_bf16_f16": (torch.bfloat16, torch.float16, 1 / 3),
    "transfer_f32_bf16": (torch.float32, torch.bfloat16, 1 / 3),
}

NUMELS = (0, 1, 5000, 7, 64, 0, 4096, 33, 12_301, 3)


@pytest.mark.parametrize("tensor_offset", [0, 1, 3])
@pytest.mark.parametrize("flat_offset", [0, 1, 4, 7])
@pytest.mark.parametrize("block", [32, 96])
@pytest.mark.parametrize("kernel", EMULATED)
def test_device_code_on_the_cpu(
    emulator: Emulator, kernel: str, block: int, flat_offset: int, tensor_offset: int
) -> None:
    """Values, order, and not one byte written outside, both ways, at every alignment."""
    source, target, scale = EMULATED[kernel]
    chunk_numel = 2048  # several chunks in the longer tensors, batches and remainders in each
    for to_flat in (True, False):
        tensor_dtype, flat_dtype = (source, target) if to_flat else (target, source)
        arenas = [torch.full((numel + 16,), 7.0, dtype=tensor_dtype) for numel in NUMELS]
        tensors = [a[tensor_offset : tensor_offset + n] for a, n in zip(arenas, NUMELS, strict=True) if n]
        numel = sum(NUMELS)
        flat_arena = torch.full((numel + 16,), 7.0, dtype=flat_dtype)
        flat = flat_arena[flat_offset : flat_offset + numel]
        for readable in tensors if to_flat else [flat]:
            readable.copy_(torch.randn(readable.numel()))
        expected = [t.clone() for t in [flat, *tensors]]
        if to_flat:
            pack_with_torch(tensors, expected[0], scale)
        else:
            unpack_with_torch(flat, expected[1:], scale)

        rows = torch.from_numpy(
            _rows(chunk_numel, tuple(t.data_ptr() for t in tensors), tuple(t.numel() for t in tensors))
        )
        arguments: Arguments = (rows.data_ptr(), len(tensors), flat.data_ptr(), chunk_numel, int(to_flat))
        emulator.launch(kernel, int(rows[-1, 2]), block, 0, arguments if "bits" in kernel else (*arguments, scale))

        for actual, want in zip([flat, *tensors], expected, strict=True):
            assert torch.equal(actual, want)
        for arena, begin, count in [
            (flat_arena, flat_offset, numel),
            *((arena, tensor_offset, n) for arena, n in zip(arenas, NUMELS, strict=True)),
        ]:
            assert (arena[:begin] == 7).all()
            assert (arena[begin + count :] == 7).all()


def test_rows_count_chunks_and_elements() -> None:
    rows = _rows(100, (8, 16, 24), (100, 101, 1))
    assert rows.tolist() == [[8, 0, 0], [16, 100, 1], [24, 201, 3], [0, 202, 4]]


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
    unit = sources.translation_unit("pack.cuh")
    assert unit.count("struct Half {") == 1
    assert "#include" not in unit


REPORT = """ptxas info    : Compiling entry function '{kernel}' for 'sm_90'
ptxas info    : Function properties for {kernel}
    8 bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""


@pytest.mark.parametrize(
    ("spilled", "left_out", "status", "message"),
    [(0, "", 0, ""), (4, "", 1, "transfer_f32_f32 spills 8 bytes"), (0, "transfer_f32_f32", 1, "reported")],
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
            REPORT.format(kernel=kernel, spilled=spilled if kernel == "transfer_f32_f32" else 0) for kernel in kernels
        )

    monkeypatch.setattr(compile_check, "compilers", lambda: {"fake": compile_file})
    assert compile_check.main() == status
    printed = capsys.readouterr()
    assert message in printed.err
    assert "transfer_bits_32" in printed.out


def test_compile_check_reports_what_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compile_file(file: str, architecture: str) -> str:
        raise CompileError("unknown instruction")

    monkeypatch.setattr(compile_check, "compilers", lambda: {"fake": compile_file})
    assert compile_check.main() == 1
    assert "fake pack.cuh sm_100: unknown instruction" in capsys.readouterr().err


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
            ((1, 2), "transfer_f32_f32 takes 6 arguments, got 2"),
            ((1, 2, 3, 4, 5, 6), "transfer_f32_f32: argument 5 must be a float"),
            ((1, 2, 3, 4.0, 5, 6.0), "transfer_f32_f32: argument 3 must be an int"),
        ],
    )
    def test_wrong_arguments(self, arguments: tuple[int | float, ...], message: str) -> None:
        from commopt import _C

        with pytest.raises(TypeError, match=message):
            _C.launch("transfer_f32_f32", 1, 32, 0, arguments)

    def test_unknown_kernel(self) -> None:
        from commopt import _C

        with pytest.raises(KeyError, match="no kernel is named nothing"):
            _C.launch("nothing", 1, 32, 0, ())

    @pytest.mark.skipif(torch.cuda.is_available(), reason="would launch on the GPU")
    def test_failed_launch_names_the_kernel(self) -> None:
        from commopt import _C

        with pytest.raises(RuntimeError, match=r"launch of kernel transfer_f32_f32 \(grid 1, block 32\) failed: "):
            _C.launch("transfer_f32_f32", 1, 32, 0, (0, 0, 0, 1, 1, 1.0))
