"""Look at a machine once: everything that the checks will ask about."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from commopt.doctor.checks.configuration import effective
from commopt.doctor.checks.counters import read_counters
from commopt.doctor.facts.machine import Machine, Software, Version
from commopt.doctor.facts.nvml import NvmlFacts, read_nvml
from topology.machine import discover
from topology.sysfs import read_sysfs

LIVE = Path("/")


def observe(root: Path = LIVE, environ: Mapping[str, str] = os.environ) -> Machine:
    """Read the machine below `root`; NVML and the installed versions only for the live one."""
    environ = effective(root, environ)
    live = root == LIVE
    machine = Machine(
        root,
        environ,
        discover(root, environ),
        read_sysfs(root),
        read_nvml() if live else NvmlFacts(missing="not asked: these are another machine's files"),
        _software() if live else Software(),
    )
    return replace(machine, counters=read_counters(machine))


def _software() -> Software:
    import torch  # here, so that a fixture tree is examined without it

    try:
        nccl = tuple(torch.cuda.nccl.version())
    except (AttributeError, RuntimeError):  # torch without CUDA
        nccl = ()
    return Software(torch.__version__, _version(torch.version.cuda), nccl or None)


def _version(text: str | None) -> Version | None:
    parts = (text or "").split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else None
