"""pack and unpack against a NumPy oracle, their errors, and the GPU loaders against the reference."""

from __future__ import annotations

import itertools
import logging
import re
import shutil
import sys
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from commopt.errors import ConfigurationError, UnsupportedTensorError
from commopt.kernels import loader, pack, sources, unpack
from commopt.kernels.pack import pack_with_torch, unpack_with_torch
from commopt.version import __version__
from tests.emulator import Emulator

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PAIRS = list(itertools.product((*DTYPES, torch.float64), repeat=2))
SCALES = (1.0, 0.5, 1 / 3, 1e-5, 3e38, -7.0)
NUMELS = (0, 1, 7, 300, 0, 5, 1021, 2)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def to_float64(x: Tensor) -> npt.NDArray[np.float64]:
    if x.dtype == torch.bfloat16:
        bits = x.view(torch.int16).numpy().astype(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    return x.numpy().astype(np.float64)


def from_float64(x: npt.NDArray[np.float64], dtype: torch.dtype) -> Tensor:
    """Round to float32, then to a 16-bit float, in NumPy and integer arithmetic only."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == torch.float64:
            return torch.from_numpy(x)
        single = x.astype(np.float32)
        if dtype == torch.float32:
            return torch.from_numpy(single)
        if dtype == torch.float16:
            return torch.from_numpy(single.astype(np.float16))
    bits = single.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # ties to even; carries into infinity by itself
    rounded[np.isnan(single)] = 0x7FC0
    return torch.from_numpy(rounded.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def oracle(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if scale == 1.0 and x.dtype == dtype:
        return x.clone()
    wide = torch.float64 in (x.dtype, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        factor = np.float64(scale if wide else np.float32(scale))
        product = to_float64(x) * factor  # exact for two float32: 48 bits
    if wide and dtype not in (torch.float32, torch.float64):
        return torch.from_numpy(product).to(dtype)
    return from_float64(product, dtype)


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal bits, except that a NaN may be any NaN."""
    assert actual.dtype == expected.dtype
    wrong = (bits(actual) != bits(expected)) & ~(actual.isnan() & expected.isnan())
    assert not wrong.any(), f"{actual[wrong][:5]} instead of {expected[wrong][:5]}, {int(wrong.sum())} wrong"


def every_16_bit_value(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def awkward(dtype: torch.dtype) -> Tensor:
    """Values where rounding, overflow and underflow happen, NaN and infinities included."""
    if dtype in (torch.float16, torch.bfloat16):
        return every_16_bit_value(dtype)
    generator = torch.Generator().manual_seed(0)
    random_bits = torch.randint(-(2**31), 2**31, (20_000,), generator=generator, dtype=torch.int64)
    anything = random_bits.to(torch.int32).view(torch.float32)
    ties = (torch.randint(0, 2**16, (5_000,), generator=generator, dtype=torch.int32) << 16) | 0x8000
    near_half = torch.linspace(-70_000, 70_000, 5_001)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 65519.996, 65520.0, 3.4e38])
    return torch.cat([anything, ties.view(torch.float32), near_half, near_half * 1e-9, special]).to(dtype)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_transfer_matches_oracle(source: torch.dtype, target: torch.dtype, scale: float) -> None:
    values = awkward(source)
    expected = oracle(values, target, scale)
    pieces = list(values.split(4099))
    flat = torch.empty(values.numel(), dtype=target)
    pack(pieces, flat, scale)
    assert_same(flat, expected)

    unpacked = [torch.empty(piece.numel(), dtype=target) for piece in pieces]
    unpack(values, unpacked, scale)
    assert_same(torch.cat(unpacked), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_dtype_keeps_nan_payloads(dtype: torch.dtype) -> None:
    values = awkward(dtype)
    flat = torch.empty_like(values)
    pack(list(values.split(1000)), flat)
    assert torch.equal(bits(flat), bits(values))


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6),
    source=st.sampled_from(DTYPES),
    target=st.sampled_from(DTYPES),
    scale=st.sampled_from(SCALES),
)
def test_any_list_packs_in_order_and_unpacks(
    shapes: list[list[int]], source: torch.dtype, target: torch.dtype, scale: float
) -> None:
    tensors = [torch.randn(shape).to(source) for shape in shapes]
    joined = torch.cat([torch.empty(0, dtype=source), *(tensor.reshape(-1) for tensor in tensors)])
    flat = torch.empty(joined.numel(), dtype=target)
    pack(tensors, flat, scale)
    assert_same(flat, oracle(joined, target, scale))

    back = [torch.empty(shape, dtype=source) for shape in shapes]
    unpack(flat, back)
    for tensor, piece in zip(back, flat.split([t.numel() for t in back]), strict=True):
        assert_same(tensor.reshape(-1), piece.to(source))


def test_mixed_dtypes_and_layouts() -> None:
    tensors = [
        torch.randn(3, 4).t(),
        torch.randn(5).double(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ]
    flat = torch.empty(sum(tensor.numel() for tensor in tensors))
    pack(tensors, flat, 0.25)
    assert torch.equal(flat, torch.cat([tensor.float().reshape(-1) for tensor in tensors]) * 0.25)

    targets = [torch.zeros_like(tensor) for tensor in tensors]
    unpack(flat, targets, 4.0)
    for target, tensor in zip(targets, tensors, strict=True):
        assert target.stride() == tensor.stride()
        assert torch.equal(target, tensor.float().to(target.dtype))


def test_parameters_that_require_grad() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    flat = torch.empty(3)
    pack([parameter], flat, 2.0)
    unpack(flat, [parameter], 2.0)
    assert parameter.tolist() == [4.0] * 3
    assert not flat.requires_grad


def test_integers_copy() -> None:
    flat = torch.empty(3, dtype=torch.int64)
    pack([torch.tensor([2**60 + 1]), torch.tensor([2, 3])], flat)
    assert flat.tolist() == [2**60 + 1, 2, 3]


shared = torch.zeros(8)


@pytest.mark.parametrize(
    ("tensors", "flat", "scale", "error", "message"),
    [
        (
            [torch.ones(3)],
            torch.ones(4),
            1.0,
            ConfigurationError,
            "flat holds 4 elements and the 1 tensors 3; allocate",
        ),
        ([], torch.ones(2), 1.0, ConfigurationError, "flat holds 2 elements and the 0 tensors 0"),
        (
            [torch.ones(4)],
            torch.ones(2, 2),
            1.0,
            ConfigurationError,
            r"shape \(2, 2\).*must be 1-D and contiguous",
        ),
        (
            [torch.ones(2)],
            torch.ones(4)[::2],
            1.0,
            ConfigurationError,
            r"stride \(2,\).*must be 1-D and contiguous",
        ),
        (
            [torch.ones(2, device="meta")],
            torch.ones(2),
            1.0,
            ConfigurationError,
            "tensor 0 is on meta and flat on cpu",
        ),
        (
            [torch.ones(1), shared[3:5]],
            shared[2:5],
            1.0,
            ConfigurationError,
            "tensor 1 shares memory with flat",
        ),
        (
            [torch.ones(2).to_sparse()],
            torch.ones(2),
            1.0,
            UnsupportedTensorError,
            r"torch.sparse_coo.*to_dense\(\)",
        ),
        (
            [torch.ones(2, dtype=torch.int64)],
            torch.ones(2, dtype=torch.int64),
            0.5,
            UnsupportedTensorError,
            "int64.*0.5",
        ),
        (
            [torch.ones(2, dtype=torch.complex64)],
            torch.ones(2),
            1.0,
            UnsupportedTensorError,
            "complex64.*one dtype",
        ),
    ],
)
def test_bad_input(tensors: list[Tensor], flat: Tensor, scale: float, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pack(tensors, flat, scale)
    with pytest.raises(error, match=message):
        unpack(flat, tensors, scale)


def test_neighbours_in_one_buffer_do_not_overlap() -> None:
    buffer = torch.arange(6.0)
    pack([buffer[:3]], buffer[3:])
    assert buffer.tolist() == [0, 1, 2, 0, 1, 2]


def test_a_step_with_many_lists_uploads_each_table_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = import_module("commopt.kernels.pack")._table
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    table.cache_clear()
    for _ in range(2):
        for address in range(1000):
            table(torch.device("cpu"), 4096, (address,), (10,))
    assert table.cache_info().misses == 1000
    table.cache_clear()


class TestChoice:
    """`loader_for` on a pretended GPU."""

    device = torch.device("cuda:0")

    @pytest.fixture(autouse=True)
    def pretend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setitem(sys.modules, "commopt._C", None)
        monkeypatch.setattr(loader, "distributions", lambda name: ())
        monkeypatch.setitem(sys.modules, "cupy", None)
        loader._choose.cache_clear()
        loader._load.cache_clear()

    @pytest.mark.parametrize(("name", "fix"), [("native", "with nvcc on PATH"), ("nvrtc", "cupy-cuda12x")])
    def test_forced_but_absent(self, monkeypatch: pytest.MonkeyPatch, name: str, fix: str) -> None:
        monkeypatch.setenv(loader.VARIABLE, name)
        with pytest.raises(ConfigurationError, match=f"COMMOPT_KERNELS={name} cannot work on cuda:0.*{fix}"):
            loader.loader_for(self.device)

    def test_unknown_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(loader.VARIABLE, "cuda")
        with pytest.raises(ConfigurationError, match="COMMOPT_KERNELS=cuda is unknown; set native, nvrtc or torch"):
            loader.loader_for(self.device)

    def test_torch_is_silent(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setenv(loader.VARIABLE, "torch")
        assert loader.loader_for(self.device) is None
        assert not caplog.records

    def test_last_resort_is_logged_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.delenv(loader.VARIABLE, raising=False)
        with caplog.at_level(logging.WARNING, logger="commopt"):
            assert loader.loader_for(self.device) is None
            assert loader.loader_for(self.device) is None
        (record,) = caplog.records
        assert "nvcc" in record.getMessage()
        assert "cupy-cuda12x" in record.getMessage()

    def test_old_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        monkeypatch.setenv(loader.VARIABLE, "native")
        with pytest.raises(ConfigurationError, match=r"compute capability 7\.5 and the kernels need 8\.0.*V100, T4"):
            loader.loader_for(self.device)


class TestInstalled:
    """What a source tree without compiled kernels finds in the installed package; a Python file stands for them."""

    @pytest.fixture(autouse=True)
    def installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "commopt"
        shutil.copytree(sources.directory(), folder / "csrc", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        (folder / "_C.py").write_text("launched = []\ndef launch(*arguments): launched.append(arguments)\n")
        metadata = tmp_path / f"commopt-{__version__}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: commopt\nVersion: {__version__}\n")
        monkeypatch.setattr(loader, "distributions", lambda name: distributions(name=name, path=[str(tmp_path)]))
        monkeypatch.setitem(sys.modules, "commopt._C", None)  # the source tree's; put back at the end
        return folder

    def test_of_the_same_sources_is_used(self) -> None:
        loader.Native().launch("kernel", 1, 2, 3, (4,))
        assert sys.modules["commopt._C"].launched == [("kernel", 1, 2, 3, (4,))]

    @pytest.mark.parametrize("change", ["edited", "added", "version"])
    def test_of_other_sources_is_not(self, installed: Path, change: str) -> None:
        if change == "version":
            (metadata,) = installed.parent.glob("*.dist-info/METADATA")
            metadata.write_text("Metadata-Version: 2.1\nName: commopt\nVersion: 0.0.1\n")
        else:
            (installed / "csrc" / ("pack.cuh" if change == "edited" else "other.cuh")).write_text("// an edit")
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
    """`loader_for` on the CPU, where the emulator's kernels work and others do not."""

    device = torch.device("cpu")

    @pytest.fixture(autouse=True)
    def pretend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(loader.VARIABLE, raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        loader._choose.cache_clear()
        loader._load.cache_clear()

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
            assert loader.loader_for(self.device) is emulator
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
        with caplog.at_level(logging.WARNING, logger="commopt"):
            assert loader.loader_for(self.device) is emulator
            assert loader.loader_for(self.device) is emulator
        (record,) = caplog.records
        assert re.search(r"run by nvrtc \(native: .*(unsupported|instead of|libcudart).*nvcc", record.getMessage())

    def test_none_works(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.install(monkeypatch, native=Broken(RuntimeError("too old")), nvrtc=Broken(None))
        with caplog.at_level(logging.WARNING, logger="commopt"):
            assert loader.loader_for(self.device) is None
        (record,) = caplog.records
        assert re.search(r"slower plain torch.*native: too old;.*nvrtc: a kernel made \[0", record.getMessage())

    def test_a_forced_one_that_does_not_work_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(monkeypatch, native=Broken(RuntimeError("driver too old")))
        monkeypatch.setenv(loader.VARIABLE, "native")
        with pytest.raises(
            ConfigurationError, match="COMMOPT_KERNELS=native cannot work on cpu: native: driver too old"
        ):
            loader.loader_for(self.device)

    def test_nothing_waits_while_a_graph_is_captured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        self.install(monkeypatch, native=(never := Broken(AssertionError("launched"))))
        assert loader.loader_for(self.device) is never


@pytest.fixture(params=["native", "nvrtc"])
def forced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force one loader, or skip where it is not installed."""
    name: str = request.param
    try:
        loader._load(name)
    except ImportError as error:
        pytest.skip(f"{name}: {error}")
    monkeypatch.setenv(loader.VARIABLE, name)
    return name


@gpu
@pytest.mark.gpu
@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("source", "target"), list(itertools.product(DTYPES, repeat=2)))
class TestGpu:
    """Both loaders, bit for bit against the reference on the CPU."""

    def test_values(self, source: torch.dtype, target: torch.dtype, scale: float) -> None:
        values = awkward(source)
        expected = torch.empty(values.numel(), dtype=target)
        pack_with_torch([values], expected, scale)
        flat = torch.empty_like(expected, device="cuda")
        pack([piece.cuda() for piece in values.split(4099)], flat, scale)
        assert_same(flat.cpu(), expected)

    @pytest.mark.parametrize("offset", range(4))
    def test_alignment_and_guards(self, source: torch.dtype, target: torch.dtype, scale: float, offset: int) -> None:
        tensors = [torch.randn(numel + 9).to(source).cuda()[i % 5 : i % 5 + numel] for i, numel in enumerate(NUMELS)]
        tensors.append(torch.randn(100_003).to(source).cuda())
        numel = sum(tensor.numel() for tensor in tensors)
        arena = torch.full((numel + 16,), 7.0, dtype=target, device="cuda")
        flat = arena[offset : offset + numel]
        pack(tensors, flat, scale)
        expected = torch.empty(numel, dtype=target)
        pack_with_torch([tensor.cpu() for tensor in tensors], expected, scale)
        assert_same(flat.cpu(), expected)
        assert (arena[:offset] == 7).all()
        assert (arena[offset + numel :] == 7).all()

        outputs = [torch.zeros_like(tensor) for tensor in tensors]
        wanted = [torch.zeros_like(tensor, device="cpu") for tensor in tensors]
        unpack(flat, outputs, scale)
        unpack_with_torch(flat.cpu(), wanted, scale)
        for output, want in zip(outputs, wanted, strict=True):
            assert_same(output.cpu(), want)


@gpu
@pytest.mark.gpu
@pytest.mark.usefixtures("forced")
def test_gpu_layouts_and_streams() -> None:
    tensors = [torch.randn(64, 33, device="cuda").t(), torch.randn(5, device="cuda")]
    expected = torch.cat([tensor.reshape(-1) for tensor in tensors])
    for _ in range(3):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            flat = torch.empty_like(expected)
            pack(tensors, flat)
            outputs = [torch.zeros_like(tensor) for tensor in tensors]
            unpack(flat, outputs)
        stream.synchronize()
        assert torch.equal(flat, expected)
        assert all(torch.equal(output, tensor) for output, tensor in zip(outputs, tensors, strict=True))


@gpu
@pytest.mark.gpu
def test_gpu_capture_replays_after_the_table_is_gone() -> None:
    tensor = torch.ones(1000, device="cuda")
    flat = torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pack([tensor], flat, 3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (flat == 3).all()
