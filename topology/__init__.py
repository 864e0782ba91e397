# SPDX-License-Identifier: Apache-2.0
"""The topology of machines. Needs only Python's standard library, neither torch nor commopt.

python -m topology                  this machine; also: show FILE, --json, --plot FILE

machine = topology.discover()       or topology.read("topo.xml"), of NCCL's XML or `nvidia-smi topo -m`
topology.nearest_nics(machine, 0)   of the first GPU, and how far they are

Readers, queries and pictures are imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from topology.cluster import Cluster, HostIdentity, read_host_identity

if TYPE_CHECKING:
    from topology.files import read as read
    from topology.machine import discover as discover
    from topology.matrix import read_matrix as read_matrix
    from topology.model import *  # noqa: F403
    from topology.queries import *  # noqa: F403
    from topology.text import as_json as as_json
    from topology.xml_reader import read_nccl_xml as read_nccl_xml

_NAMES = {
    "files": ("read",),
    "machine": ("discover",),
    "matrix": ("read_matrix",),
    "model": ("Cpu", "Distance", "Gpu", "Nic", "NvLinks", "PciDevice", "PciLink", "Topology", "TopologyError"),
    "queries": (
        "gpu_distance",
        "links_per_gpu",
        "nearest_nics",
        "nic_distance",
        "node_nic_gbps",
        "nvlink_kind",
        "peer_bandwidth_gbps",
        "rail_nics",
    ),
    "text": ("as_json",),
    "xml_reader": ("read_nccl_xml",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["Cluster", "HostIdentity", "read_host_identity", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = found
    return found
