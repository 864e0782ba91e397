"""Versions: does the driver fit, and is NCCL new enough for two communicators at a time?"""

from __future__ import annotations

from commopt.doctor.facts.machine import Machine, version_text
from commopt.doctor.finding import Check, Finding

VERSIONS = Check("versions", "Versions")


def versions(machine: Machine) -> list[Finding]:
    """Compare NCCL, CUDA and the driver with each other and with what needs them."""
    software, driver = machine.software, machine.nvml.cuda
    read = "torch.version.cuda, torch.cuda.nccl.version(), NVML"
    if software.torch is None:
        return [VERSIONS.unread("torch", "not looked at: these are another machine's files", "pip show torch")]
    shown = f"torch {software.torch}, CUDA {version_text(software.cuda)}, NCCL {version_text(software.nccl)}"
    found = []
    if machine.hardware.gpus and software.cuda is None:
        expected = "a torch built for CUDA: this one cannot use the GPUs"
        remedy = "pip install torch --index-url https://download.pytorch.org/whl/cu128"
        found.append(VERSIONS.error("torch.version.cuda", shown, expected, remedy))
    if driver is not None and software.cuda is not None and driver[0] < software.cuda[0]:
        expected = f"a driver for CUDA {software.cuda[0]} or newer"
        value = f"driver for CUDA {version_text(driver)}, torch for CUDA {version_text(software.cuda)}"
        found.append(
            VERSIONS.error("NVML", value, expected, "update the driver, or install a torch for the older CUDA")
        )
    if software.nccl is not None and software.nccl < (2, 26):
        expected = "NCCL 2.26: before it, operations of two communicators can deadlock on different orders"
        found.append(
            VERSIONS.info("torch.cuda.nccl.version()", shown, expected, "pip install --upgrade torch", "medium")
        )
    elif software.nccl is not None and machine.variable("NCCL_LAUNCH_ORDER_IMPLICIT") == "1":
        runtime = min(version for version in (software.cuda, driver) if version) if software.cuda or driver else None
        if runtime is not None and runtime < (12, 3):
            value = f"1 with CUDA {version_text(runtime)}"
            expected = "CUDA 12.3: before it implicit order keeps operations from overlapping"
            remedy = "update CUDA and the driver, or unset NCCL_LAUNCH_ORDER_IMPLICIT"
            found.append(VERSIONS.warning("NCCL_LAUNCH_ORDER_IMPLICIT", value, expected, remedy))
    return found or [VERSIONS.ok(read, shown, "driver, CUDA and NCCL fit")]
