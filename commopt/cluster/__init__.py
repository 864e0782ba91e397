# SPDX-License-Identifier: Apache-2.0
"""Emulate several nodes joined by a slow network on one machine.

    commopt cluster --nodes 2 --ranks-per-node 2 --rate 200mbit train.py --steps 10

Each node is a network namespace whose only external interface is `eth0`, one end of a veth pair. The other ends meet
in a bridge, in a namespace of its own. Both ends of each pair are shaped: a node sends and receives at `rate`, while
ranks on the same node communicate over `lo` at full speed. Since the bridge is inside a namespace too, nothing is added
to the host's interfaces, routes or firewall, and several clusters can run at the same time.

With `--sites 2 --site-rate 50mbit` nodes are divided among sites, whose bridges are joined by links of that rate.
`--tell-sites` sets COMMOPT_SITE.

Ranks get torchrun's variables and store; there are no restarts. Host name and boot id are the same on all nodes, so
NCCL_HOSTID tells the nodes apart.
"""

from commopt.cluster.cli import EmulatedCluster
from commopt.cluster.commands import ClusterUnavailableError
from commopt.cluster.link import EmulatedLink
from commopt.cluster.network import Counters, LinkTraffic, cluster_options, link_rate, traffic
from commopt.cluster.relay_process import RelayError
from commopt.cluster.report import NodeTraffic, Result
from commopt.cluster.sites import EmulatedSites

__all__ = [
    "ClusterUnavailableError",
    "Counters",
    "EmulatedCluster",
    "EmulatedLink",
    "EmulatedSites",
    "LinkTraffic",
    "NodeTraffic",
    "RelayError",
    "Result",
    "cluster_options",
    "link_rate",
    "traffic",
]
