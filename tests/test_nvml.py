# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's driver as a source of the topology and of the doctor, played by a module that answers like pynvml."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commopt.doctor.nvml import NvmlFacts, NvmlGpu, read_nvml
from tests.machines import plain, server
from topology.model import Distance, NvLinks
from topology.nvml import add_nvml
from topology.queries import gpu_distance, nvlink_kind
from topology.sysfs import read_sysfs

ESSENTIAL = ("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")
MASKED = "FFFFFFF:FF:FF.0"  # an NVSwitch that a virtual machine hides


class NVMLError(Exception):
    """As in pynvml."""


class NotSupported(NVMLError):
    """As in pynvml."""


class FabricInfo(ctypes.Structure):
    """As in pynvml, which fills it in."""

    _fields_ = [("clusterUuid", ctypes.c_uint8 * 16), ("status", ctypes.c_uint), ("state", ctypes.c_uint)]


class FakeDriver:
    """The functions of pynvml that are asked, for GPUs given as (bus id, links); a link is (bus id, kind).

    Of the two GPUs that the doctor looks at, the second has a process, MIG, a bad row, and is hot.
    """

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_InvalidArgument = NVMLError_FunctionNotFound = NotSupported
    NVMLError_NoPermission = NotSupported
    NVML_NVLINK_DEVICE_TYPE_GPU, NVML_NVLINK_DEVICE_TYPE_IBMNPU, NVML_NVLINK_DEVICE_TYPE_SWITCH = 0, 1, 2
    NVML_NVLINK_MAX_LINKS = 18
    NVML_FEATURE_ENABLED = 1
    c_nvmlGpuFabricInfoV_t = FabricInfo

    def __init__(self, gpus: list[tuple[str, list[tuple[str, int]]]], level: int = 50, p2p: int = 1) -> None:
        self.gpus, self.level, self.p2p = gpus, level, p2p
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, gpu: int) -> Any:
        return SimpleNamespace(busId=self.gpus[gpu][0])

    def nvmlDeviceGetCudaComputeCapability(self, gpu: int) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetName(self, gpu: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetUUID(self, gpu: int) -> str:
        raise NotSupported

    def nvmlDeviceGetNvLinkState(self, gpu: int, link: int) -> int:
        if link >= len(self.gpus[gpu][1]):
            raise NotSupported
        return int(self.gpus[gpu][1][link][0] != "")

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: int, link: int) -> Any:
        return SimpleNamespace(busId=self.gpus[gpu][1][link][0])

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: int, link: int) -> int:
        return self.gpus[gpu][1][link][1]

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:
        return self.level

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080

    def nvmlDeviceGetMigMode(self, gpu: int) -> list[int]:
        return [gpu, gpu]

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[Any]:
        return [SimpleNamespace(pid=1)] * gpu

    def nvmlDeviceGetGpuFabricInfoV(self, gpu: int, info: Any) -> int:
        info._obj.state = 3
        return 0

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: int) -> int:
        return (0x1, 0x45)[gpu]

    def nvmlDeviceGetRemappedRows(self, gpu: int) -> tuple[int, ...]:
        return (0, 1, gpu, 0)

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, kind: int) -> int:
        return self.p2p


Installer = Callable[[FakeDriver], FakeDriver]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Installer:
    def install(driver: FakeDriver) -> FakeDriver:
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        return driver

    return install


def test_the_real_module_has_every_name() -> None:
    pynvml = pytest.importorskip("pynvml")
    asked = {name for name in vars(FakeDriver) if name.lower().startswith("nvml")}
    assert {name for name in asked if not hasattr(pynvml, name)} == set()
    assert all(
        getattr(pynvml, name) == getattr(FakeDriver, name) for name in asked if name.startswith("NVML_NVLINK_DEVICE")
    )


def test_nvswitches(tmp_path: Path, install: Installer) -> None:
    links = [("0000:F1:00.0", 2)] * 2 + [("0000:F2:00.0", 2), ("", 2)]
    driver = install(FakeDriver([("00000000:19:00.0", links), ("00000000:1A:00.0", links)]))
    found = add_nvml(read_sysfs(server(tmp_path, gpus=2).root))
    assert found.nvlinks == tuple(
        NvLinks(gpu, None, count, target, "switch")
        for gpu in range(2)
        for target, count in (("0000:f1:00.0", 2), ("0000:f2:00.0", 1))
    )
    assert [(gpu.sm, gpu.name, gpu.numa) for gpu in found.gpus] == [(90, "NVIDIA H200", 0)] * 2
    assert found.gpus[0].uuid is not None  # from the files, since the driver has none
    assert nvlink_kind(found) == "switch"
    assert found.warnings == ()
    assert driver.open == 0


def test_direct_links_and_masked_switches(tmp_path: Path, install: Installer) -> None:
    install(
        FakeDriver([("0000:19:00.0", [("0000:1a:00.0", 255), (MASKED, 255)]), ("0000:1a:00.0", [("0000:19:00.0", 0)])])
    )
    found = add_nvml(read_sysfs(server(tmp_path, gpus=2).root))
    assert found.nvlinks == (
        NvLinks(0, 1, 1, "0000:1a:00.0", "gpu"),
        NvLinks(0, None, 1, "fffffff:ff:ff.0", "switch"),
        NvLinks(1, 0, 1, "0000:19:00.0", "gpu"),
    )


def test_links_that_lead_to_their_own_gpu_join_something_unknown(tmp_path: Path, install: Installer) -> None:
    install(FakeDriver([("0000:19:00.0", [("0000:19:00.0", 255)] * 12), ("0000:1a:00.0", [("0000:1a:00.0", 0)] * 12)]))
    found = add_nvml(read_sysfs(server(tmp_path, gpus=2).root))
    assert nvlink_kind(found) == "unknown"
    assert [(link.peer, link.count) for link in found.nvlinks or ()] == [(None, 12)] * 2


def test_gpus_that_the_process_may_not_use_are_left_out(tmp_path: Path, install: Installer) -> None:
    install(FakeDriver([("0000:3a:00.0", []), ("0000:19:00.0", [])]))
    found = add_nvml(read_sysfs(server(tmp_path, gpus=4).root))
    assert [(gpu.index, gpu.busid, gpu.numa) for gpu in found.gpus] == [(0, "0000:3a:00.0", 1), (1, "0000:19:00.0", 0)]
    assert {device.busid for device in found.pci if device.kind == "gpu"} == {"0000:3a:00.0", "0000:19:00.0"}
    assert found.stated is not None
    assert ("GPU0", "NIC2", Distance.PIX) in found.stated
    assert ("GPU1", "NIC0", Distance.PIX) in found.stated
    assert gpu_distance(found, 0, 1) is Distance.SYS
    assert any("2 more on the PCI bus are left out" in warning for warning in found.warnings)
    assert nvlink_kind(found) == "none"


def test_gpus_that_are_not_on_the_bus(tmp_path: Path, install: Installer) -> None:
    install(FakeDriver([("0000:01:00.0", []), ("0000:02:00.0", [])], level=40))
    found = add_nvml(read_sysfs(plain(tmp_path).root))
    assert [gpu.busid for gpu in found.gpus] == ["0000:01:00.0", "0000:02:00.0"]
    assert gpu_distance(found, 0, 1) is Distance.NODE


@pytest.mark.parametrize("method", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetNvLinkState"])
def test_a_driver_in_trouble_is_a_warning(
    tmp_path: Path, install: Installer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: object) -> None:
        raise NVMLError("Driver/library version mismatch")

    driver = install(FakeDriver([("0000:19:00.0", []), ("0000:1a:00.0", [])]))
    monkeypatch.setattr(driver, method, fail)
    seen = read_sysfs(server(tmp_path, gpus=2).root)
    found = add_nvml(seen)
    assert found.gpus == seen.gpus
    assert found.nvlinks is None
    assert found.warnings == ("NVLinks and compute capability unknown; NVML says: Driver/library version mismatch",)
    assert driver.open == 0


def test_without_pynvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    [warning] = add_nvml(read_sysfs(server(tmp_path / "gpus", gpus=2).root)).warnings
    assert "pip install nvidia-ml-py" in warning
    assert not any("nvml" in text for text in add_nvml(read_sysfs(plain(tmp_path / "plain").root)).warnings)
    assert "pip install nvidia-ml-py" in (read_nvml().missing or "")


PAIR = [("0000:19:00.0", [("0000:1a:00.0", 0)] * 4), ("0000:1a:00.0", [("0000:19:00.0", 0), *[("", 0)] * 3])]


def test_what_the_doctor_asks(install: Installer) -> None:
    install(FakeDriver(PAIR))
    assert read_nvml() == NvmlFacts(
        (
            NvmlGpu(0, False, 0, "completed", 0, False, 4, 0, False, False),
            NvmlGpu(1, True, 1, "completed", 0, False, 1, 0x44, True, False),
        ),
        ((0, 1, "chipset not supported"), (1, 0, "chipset not supported")),
        (12, 8),
    )
    for fine in (0, 6):  # and unknown
        install(FakeDriver(PAIR, p2p=fine))
        assert read_nvml().no_peer_access == ()


@pytest.mark.parametrize("error", [NotSupported, AttributeError])
def test_a_driver_that_tells_the_doctor_little(
    install: Installer, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(*_: object) -> None:
        raise error

    driver = install(FakeDriver(PAIR))
    for name in vars(FakeDriver):
        if name.startswith(("nvmlDevice", "nvmlSystem", "c_nvml")) and name not in ESSENTIAL:
            monkeypatch.setattr(driver, name, refuse)
    found = read_nvml()
    assert found.gpus[1] == NvmlGpu(1)
    assert (found.no_peer_access, found.cuda, found.missing) == ((), None, None)


@pytest.mark.parametrize("method", ["nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMigMode"])
def test_a_driver_in_trouble_tells_the_doctor_why(
    install: Installer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: object) -> None:
        raise NVMLError("GPU is lost")

    monkeypatch.setattr(install(FakeDriver(PAIR)), method, fail)
    assert read_nvml() == NvmlFacts(missing="NVML says: GPU is lost")
