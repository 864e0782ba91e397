"""The machine this runs on: sysfs, the driver (NVML), and the file NCCL would read instead."""

from topology.live.machine import discover

__all__ = ["discover"]
