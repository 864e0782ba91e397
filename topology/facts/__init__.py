"""What follows from a topology: distances, the ports that count, NVLink's shape, bandwidth, rings."""

from topology.facts.bandwidth import peer_bandwidth_gbps
from topology.facts.nics import node_nic_gbps, rail_nics
from topology.facts.nvlink import links_per_gpu, nvlink_kind
from topology.facts.paths import gpu_distance, nearest_nics, nic_distance
from topology.facts.rings import rings

__all__ = [
    "gpu_distance",
    "links_per_gpu",
    "nearest_nics",
    "nic_distance",
    "node_nic_gbps",
    "nvlink_kind",
    "peer_bandwidth_gbps",
    "rail_nics",
    "rings",
]
