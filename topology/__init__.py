"""What the machines are: a leaf package of standard-library Python that knows nothing of torch or commopt.

python -m topology                  this machine; also: show FILE, --json, --plot FILE

machine = topology.discover()       or topology.read("topo.xml"), of NCCL's XML or `nvidia-smi topo -m`
topology.nearest_nics(machine, 0)   of the first GPU, and how far they are

Readers, facts and pictures are loaded when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from topology.cluster import Cluster, HostIdentity, read_host_identity

if TYPE_CHECKING:
    from topology.fabric import Fabric, Rail
    from topology.files import read
    from topology.machine import discover
    from topology.matrix import read_matrix
    from topology.model import Cpu, Distance, Gpu, Nic, NvLinks, PciDevice, PciLink, Topology, TopologyError
    from topology.queries import (
        gpu_distance,
        links_per_gpu,
        nearest_nics,
        nic_distance,
        node_nic_gbps,
        nvlink_kind,
        peer_bandwidth_gbps,
        rail_nics,
        rings,
    )
    from topology.text import as_json
    from topology.xml_reader import read_nccl_xml
    from topology.xml_writer import write_nccl_xml

__all__ = [
    "Cluster",
    "Cpu",
    "Distance",
    "Fabric",
    "Gpu",
    "HostIdentity",
    "Nic",
    "NvLinks",
    "PciDevice",
    "PciLink",
    "Rail",
    "Topology",
    "TopologyError",
    "as_json",
    "discover",
    "gpu_distance",
    "links_per_gpu",
    "nearest_nics",
    "nic_distance",
    "node_nic_gbps",
    "nvlink_kind",
    "peer_bandwidth_gbps",
    "rail_nics",
    "read",
    "read_host_identity",
    "read_matrix",
    "read_nccl_xml",
    "rings",
    "write_nccl_xml",
]

_MODEL = ("Cpu", "Distance", "Gpu", "Nic", "NvLinks", "PciDevice", "PciLink", "Topology", "TopologyError")
_HOME = dict.fromkeys(_MODEL, "model") | {
    "Fabric": "fabric",
    "Rail": "fabric",
    "as_json": "text",
    "discover": "machine",
    "read": "files",
    "read_matrix": "matrix",
    "read_nccl_xml": "xml_reader",
    "write_nccl_xml": "xml_writer",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOME.get(name, 'queries')}"), name)
    globals()[name] = found
    return found
