"""What the machines are: a leaf package of standard-library Python that knows nothing of torch or commopt.

python -m topology                  this machine; also: show FILE, --json, --plot FILE

machine = topology.discover()       or topology.read("topo.xml"), of NCCL's XML or `nvidia-smi topo -m`
topology.nearest_nics(machine, 0)   of the first GPU, and how far they are
"""

from topology.cluster import Cluster
from topology.errors import TopologyError
from topology.fabric import Fabric, Rail
from topology.facts import (
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
from topology.files import read
from topology.host import HostIdentity, read_host_identity
from topology.live import discover
from topology.model import Cpu, Distance, Gpu, Nic, NvLinks, PciDevice, PciLink, Topology
from topology.nccl_xml import read_nccl_xml, write_nccl_xml
from topology.nvidia_smi import read_matrix
from topology.show import as_json

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
