"""What the machines are: a leaf package of standard-library Python that knows nothing of torch or commopt."""

from topology.cluster import Cluster
from topology.host import HostIdentity, read_host_identity

__all__ = ["Cluster", "HostIdentity", "read_host_identity"]
