"""Which GPU does this process drive? Launchers tell it in two ways."""

from __future__ import annotations

from commopt.doctor.facts.machine import Machine


def visible(machine: Machine) -> list[str]:
    """Return the GPUs this process may use, as CUDA_VISIBLE_DEVICES names them, or by place when it is unset."""
    value = machine.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return [str(place) for place in range(len(machine.hardware.gpus))]
    return [item.strip() for item in value.split(",") if item.strip()]


def own_name(machine: Machine) -> str | None:
    """Return the GPU of this rank as `visible` names it; None when there is no launcher, or no such GPU.

    A launcher that shows each rank one GPU means that one; otherwise a rank takes the one of its local number.
    """
    rank, names = machine.environ.get("LOCAL_RANK", ""), visible(machine)
    if not rank.isdecimal() or not names:
        return None
    if len(names) == 1:
        return names[0]
    return names[int(rank)] if int(rank) < len(names) else None


def own_gpu(machine: Machine) -> int | None:
    """Return this rank's GPU as a place in `machine.hardware.gpus`; None when unknown."""
    name = own_name(machine)
    if name is None:
        return None
    for place, gpu in enumerate(machine.hardware.gpus):
        if name == str(place) or (gpu.uuid is not None and name.startswith("GPU-") and gpu.uuid.startswith(name)):
            return place
    return None
