"""Process groups of commopt's own: who is on which node, and teams of ranks for each level of the network."""

from commopt.groups.build import join, resolve_group
from commopt.groups.membership import FAILURE_KEY, Membership, checking, joined, memberships, was_joined
from commopt.groups.nccl import NcclByLevel, NcclOptions, copied_options
from commopt.groups.scaling import apply_scale
from commopt.groups.shape import TeamShape
from commopt.groups.store import LimitedStore, close_stores
from commopt.groups.team import Team, all_gather_single, close_together, keep_groups, reduce_scatter_single
from commopt.groups.wire import WireBytes, WireModel

__all__ = [
    "FAILURE_KEY",
    "LimitedStore",
    "Membership",
    "NcclByLevel",
    "NcclOptions",
    "Team",
    "TeamShape",
    "WireBytes",
    "WireModel",
    "all_gather_single",
    "apply_scale",
    "checking",
    "close_stores",
    "close_together",
    "copied_options",
    "join",
    "joined",
    "keep_groups",
    "memberships",
    "reduce_scatter_single",
    "resolve_group",
    "was_joined",
]
