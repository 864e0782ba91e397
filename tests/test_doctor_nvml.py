"""What the doctor asks the driver, with a binding that answers as real ones do, and as old ones do not."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from commopt.doctor.nvml import NvmlFacts, NvmlGpu, read_nvml


class Refused(Exception):
    """The binding's own error."""


class FabricInfo:
    """Filled in by the call, like the C structure."""

    state = 3
    status = 0
    clusterUuid = bytes(16)  # the structure's name for it


def binding(**changes: Any) -> ModuleType:
    """A machine of two GPUs: the second has a process, MIG, and only one NVLink; they cannot read each other."""
    answers: dict[str, Any] = {
        "NVMLError": Refused,
        "c_nvmlGpuFabricInfoV_t": FabricInfo,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
        "nvmlDeviceGetMigMode": lambda gpu: (gpu, gpu),
        "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [SimpleNamespace(pid=1)] * gpu,
        "nvmlDeviceGetGpuFabricInfoV": lambda gpu, info: 0,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: (0x1, 0x45)[gpu],
        "nvmlDeviceGetRemappedRows": lambda gpu: (0, 1, gpu, 0),
        "nvmlDeviceGetNvLinkState": _links,
        "nvmlDeviceGetP2PStatus": lambda a, b, kind: 1,
    }
    module = ModuleType("pynvml")
    for name, answer in {**answers, **changes}.items():
        if answer is not None:
            setattr(module, name, answer)
    return module


def _links(gpu: int, link: int) -> int:
    if link >= 4:
        raise Refused("not supported")
    return int(gpu == 0 or link == 0)


def refuse(*arguments: object) -> None:
    raise Refused("not supported")


@pytest.fixture(autouse=True)
def _plain_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commopt.doctor.nvml.byref", lambda structure: structure)


def facts(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> NvmlFacts:
    monkeypatch.setitem(sys.modules, "pynvml", binding(**changes))
    return read_nvml()


def test_everything_that_the_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts(monkeypatch) == NvmlFacts(
        (
            NvmlGpu(0, False, 0, "completed", 0, False, 4, 0, False, False),
            NvmlGpu(1, True, 1, "completed", 0, False, 1, 0x44, True, False),
        ),
        ((0, 1, "chipset not supported"), (1, 0, "chipset not supported")),
        (12, 8),
    )


def test_a_driver_that_tells_little(monkeypatch: pytest.MonkeyPatch) -> None:
    found = facts(
        monkeypatch,
        nvmlDeviceGetGpuFabricInfoV=None,
        nvmlDeviceGetMigMode=refuse,
        nvmlDeviceGetComputeRunningProcesses=refuse,
        nvmlDeviceGetNvLinkState=refuse,
        nvmlDeviceGetCurrentClocksEventReasons=refuse,
        nvmlDeviceGetRemappedRows=refuse,
        nvmlDeviceGetP2PStatus=refuse,
        nvmlSystemGetCudaDriverVersion_v2=refuse,
    )
    assert found.gpus[1] == NvmlGpu(1)
    assert (found.no_peer_access, found.cuda, found.missing) == ((), None, None)


def test_an_older_binding_has_an_older_name_for_the_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"EventReasons": None, "ThrottleReasons": lambda gpu: 0x20}
    found = facts(monkeypatch, **{f"nvmlDeviceGetCurrentClocks{name}": answer for name, answer in names.items()})
    assert [gpu.slowed_by for gpu in found.gpus] == [0x20, 0x20]


def test_peers_that_reach_each_other_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    for status in (0, 6):  # fine, and unknown
        assert facts(monkeypatch, nvmlDeviceGetP2PStatus=lambda a, b, kind, status=status: status).no_peer_access == ()


def test_without_the_binding_or_the_driver_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not start: not supported" in (facts(monkeypatch, nvmlInit=refuse).missing or "")
    assert "stopped answering" in (facts(monkeypatch, nvmlDeviceGetHandleByIndex=refuse).missing or "")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in (read_nvml().missing or "")
