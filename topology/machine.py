# SPDX-License-Identifier: Apache-2.0
"""The machine that this process runs on: its files, its driver, and the NCCL topology file that takes precedence."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from topology.model import Gpu, Nic, NvLinks, Topology, TopologyError
from topology.nvml import add_nvml
from topology.sysfs import read_sysfs
from topology.xml_reader import read_nccl_xml

VIRTUAL_TOPOLOGY = "var/run/nvidia-topologyd/virtualTopology.xml"
"""Cloud images keep the topology that a virtual machine hides here; NCCL reads it if NCCL_TOPO_FILE is unset."""


def discover(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Topology:
    """Return the topology of this machine. Raises nothing: unreadable facts are None, or cause a warning.

    As in NCCL, the file of NCCL_TOPO_FILE (or VIRTUAL_TOPOLOGY) takes precedence over the system's own files, which
    then supply missing facts.

    root: folder with a copy of another machine's files, to read instead; NVML is then not used.
    """
    seen = read_sysfs(root)
    if root == Path("/"):
        seen = add_nvml(seen)
    named = environ.get("NCCL_TOPO_FILE")
    file = _below(root, named) if named else root / VIRTUAL_TOPOLOGY
    if not named and not file.is_file():
        return seen
    try:
        given = read_nccl_xml(file.read_bytes(), str(file))
    except OSError as error:
        why = f"cannot be read ({error.strerror}): NCCL continues without it"
        return replace(seen, warnings=(*seen.warnings, f"NCCL_TOPO_FILE={named} {why}" if named else f"{file} {why}"))
    except TopologyError as error:
        return replace(seen, warnings=(*seen.warnings, f"the topology file that NCCL reads is refused: {error}"))
    return _completed(given, seen, f"{file} ({'NCCL_TOPO_FILE' if named else 'where NCCL looks'}) and {seen.source}")


def _below(root: Path, named: str) -> Path:
    return Path(named) if root == Path("/") else root / named.lstrip("/")


def _completed(given: Topology, seen: Topology, source: str) -> Topology:
    """Return `given` with missing facts about its devices from `seen`."""
    gpus = {gpu.busid: gpu for gpu in seen.gpus}
    ports: dict[str | None, list[Nic]] = {}
    for nic in seen.nics:
        if nic.busid is not None:
            ports.setdefault(nic.busid, []).append(nic)
    return replace(
        given,
        source=source,
        gpus=tuple(_gpu(gpu, gpus[gpu.busid]) if gpu.busid in gpus else gpu for gpu in given.gpus),
        nics=tuple(port for nic in given.nics for port in _ports(nic, ports.get(nic.busid, []))),
        nvlinks=_nvlinks(given, seen) if given.nvlinks is None else given.nvlinks,
        warnings=(
            *(f"of the topology file alone: {warning}" for warning in given.warnings),
            *seen.warnings,
            *_differences(given, seen),
        ),
    )


def _gpu(given: Gpu, seen: Gpu) -> Gpu:
    missing = {name: value for name, value in vars(seen).items() if getattr(given, name) is None}
    return replace(given, index=seen.index, **missing)


def _ports(given: Nic, seen: list[Nic]) -> list[Nic]:
    """Return the ports of a card that the file has only as a PCI device; otherwise the file's own port."""
    return [replace(port, numa=given.numa) for port in seen] if seen and given.name == given.busid else [given]


def _nvlinks(given: Topology, seen: Topology) -> tuple[NvLinks, ...] | None:
    """Return the driver's NVLinks in the file's order of GPUs; None unless the driver knows all of them."""
    places = {gpu.busid: place for place, gpu in enumerate(given.gpus)}
    if seen.nvlinks is None or set(places) - {gpu.busid for gpu in seen.gpus}:
        return None
    moved = {old: places.get(gpu.busid) for old, gpu in enumerate(seen.gpus)}
    return tuple(
        replace(link, gpu=place, peer=None if link.peer is None else moved[link.peer])
        for link in seen.nvlinks
        if (place := moved[link.gpu]) is not None
    )


def _differences(given: Topology, seen: Topology) -> list[str]:
    in_file = {gpu.busid for gpu in given.gpus} | {nic.busid for nic in given.nics} | {nic.name for nic in given.nics}
    added = [gpu.busid for gpu in seen.gpus if gpu.busid not in in_file]
    added += [nic.name for nic in seen.nics if not nic.virtual and not in_file & {nic.busid or nic.name, nic.name}]
    absent = [gpu.busid or "?" for gpu in given.gpus if gpu.busid not in {gpu.busid for gpu in seen.gpus}]
    return [
        *([f"not in the topology file, yet on this machine: {', '.join(map(str, added))}"] if added else []),
        *([f"in the topology file, but no GPU of this machine: {', '.join(absent)}"] if absent else []),
    ]
