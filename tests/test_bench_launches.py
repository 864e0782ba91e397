"""What a launch costs: what is launched has nothing to do, and the arithmetic of turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.clocks import Reading
from bench.kernels import launches
from tests import emulator


def test_the_idle_kernel_touches_no_memory(tmp_path: Path) -> None:
    """All addresses are null: a thread that used one would end this process."""
    emulator.Emulator(tmp_path).launch(launches.IDLE_KERNEL, 1, 256, 0, launches.IDLE_ARGUMENTS)


def test_triton_gets_as_many_arguments() -> None:
    parameters = emulator.signature(launches.IDLE_KERNEL)
    assert len(parameters) == len(launches.IDLE_ARGUMENTS) == len(signature(launches.nothing).parameters)
    reals = [isinstance(argument, float) for argument in launches.IDLE_ARGUMENTS]
    assert reals == [parameter.startswith("double") for parameter in parameters]


class FakeClock:
    """A queue that takes 2 us for a launch, and a host that takes 1 us for it, and 9 us in the first turn of all."""

    def __init__(self) -> None:
        self.launched = 0

    def __call__(self, operation: Callable[[], object], calls: int) -> Reading:
        first = self.launched == 0
        for _ in range(calls):
            operation()
        self.launched += calls
        return Reading(calls * 2e-6, calls * (9e-6 if first else 1e-6), queued=True)


def test_ten_thousand_launches_in_turns() -> None:
    counts = {"one": 0, "other": 0}

    def launch(name: str) -> Callable[[], object]:
        def count() -> None:
            counts[name] += 1

        return count

    costs = launches.measure({name: launch(name) for name in counts}, launches.LAUNCHES, FakeClock())
    assert counts == {"one": 10_250, "other": 10_250}  # a turn of each does not count
    for cost in costs:
        assert cost.launches == 10_000
        assert (cost.host_us, cost.device_us) == pytest.approx((1, 2))
        assert (cost.host_ms, cost.device_ms) == pytest.approx((10, 20))


def test_what_cannot_launch_is_left_out_and_told() -> None:
    def not_installed() -> launches.Launch:
        raise ImportError("no module of that name")

    def launches_nothing() -> launches.Launch:
        def launch() -> None:
            raise RuntimeError("no kernel image\nis available")

        return launch

    able, absent = launches.working({"a": not_installed, "b": launches_nothing, "c": lambda: list})
    assert able == {"c": list}
    assert absent == {
        "a": "ImportError: no module of that name",
        "b": "RuntimeError: no kernel image is available",
    }


def test_without_a_gpu_there_is_nothing_to_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["launches"])
    with pytest.raises(SystemExit) as left:
        launches.main()
    assert left.value.code == 2
    assert "nothing to measure: torch sees no CUDA device" in capsys.readouterr().err


def test_file_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    launched: list[tuple[object, ...]] = []

    class Loader:
        def launch(self, *arguments: object) -> None:
            launched.append(arguments)

    class Broken(Loader):
        def __init__(self) -> None:
            raise ImportError("no CuPy")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(launches, "GpuClock", lambda device, hold_s: FakeClock())
    monkeypatch.setattr(launches, "Native", Loader)
    monkeypatch.setattr(launches, "Nvrtc", Broken)
    monkeypatch.setattr(launches, "through_triton", lambda: list)
    file = tmp_path / "launches.json"
    monkeypatch.setattr(sys, "argv", ["launches", "--json", str(file)])
    launches.main()
    header, *rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert (header["kind"], header["device"]) == ("launches", "a GPU")
    assert header["command"] == f"python -m bench.kernels.launches --json {file}"
    assert [(row["record"], row["launcher"]) for row in rows] == [
        ("launcher", "_C"),
        ("launcher", "Triton"),
        ("missing", "CuPy"),
    ]
    assert set(launched) == {(launches.IDLE_KERNEL, 1, 256, 77, launches.IDLE_ARGUMENTS)}
    printed = " ".join(capsys.readouterr().out.split())
    assert "CuPy: ImportError: no CuPy" in printed
    assert "2.00" in printed
