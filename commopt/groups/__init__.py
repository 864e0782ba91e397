# SPDX-License-Identifier: Apache-2.0
"""commopt's own process groups: the ranks of each node, and a team of ranks for each level of the network."""

from commopt.groups.build import join, read_arguments
from commopt.groups.connections import CONNECTIONS_VARIABLE, Connections
from commopt.groups.gloo import apply_scale
from commopt.groups.membership import FAILURE_KEY, HEARTBEAT_VARIABLE, Membership, joined, memberships
from commopt.groups.shape import TeamShape, WireBytes, WireModel
from commopt.groups.sites import SITE_VARIABLE, require_site
from commopt.groups.store import LimitedStore, close_stores
from commopt.groups.team import (
    Started,
    Team,
    all_gather_single,
    broadcast_bytes,
    close_together,
    gather_bytes,
    keep_groups,
    reduce_scatter_single,
)

__all__ = [
    "CONNECTIONS_VARIABLE",
    "FAILURE_KEY",
    "HEARTBEAT_VARIABLE",
    "SITE_VARIABLE",
    "Connections",
    "LimitedStore",
    "Membership",
    "Started",
    "Team",
    "TeamShape",
    "WireBytes",
    "WireModel",
    "all_gather_single",
    "apply_scale",
    "broadcast_bytes",
    "close_stores",
    "close_together",
    "gather_bytes",
    "join",
    "joined",
    "keep_groups",
    "memberships",
    "read_arguments",
    "reduce_scatter_single",
    "require_site",
]
