# SPDX-License-Identifier: Apache-2.0
"""From a process group to a Team: the ranks of each node, and commopt's own groups for every level."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from commopt.errors import ConfigurationError, MismatchError
from commopt.groups.agreement import Facts, exchange_facts, require_equal
from commopt.groups.connections import CONNECTIONS_VARIABLE, asked_for, listed_interfaces
from commopt.groups.levels import LevelGroups, world_group
from commopt.groups.membership import (
    HEARTBEAT_VARIABLE,
    Membership,
    checking,
    failures_among,
    heartbeat_interval_s,
    paced_interval_s,
)
from commopt.groups.sites import SITE_VARIABLE, read_site
from commopt.groups.store import limited_store
from commopt.groups.team import is_alive
from commopt.version import __version__
from topology import Cluster, HostIdentity, read_host_identity

ENVIRONMENT_VARIABLE = "COMMOPT_RANKS_PER_NODE"
DEFAULT_TIMEOUT_S = 600.0  # if the process group does not tell its own
_LONGEST_TIMEOUT_S = 365 * 24 * 3600.0
# To this come ranks that make groups and, so that they meet, those that have some and compare what they ask for.
_SETUP = "commopt group setup"
_ANY = "process groups of commopt"
_THESE = "process groups of commopt with these settings"

_log = logging.getLogger("commopt")


_Arguments = tuple[int | None, float | None, str | None]
# Keyed weakly: a Membership must not keep a process group alive that its user destroyed.
_memberships: WeakKeyDictionary[dist.ProcessGroup, dict[_Arguments, Membership]] = WeakKeyDictionary()


def resolve_group(group: Any) -> dist.ProcessGroup:
    """Return the process group of None (the world), a ProcessGroup or a one-dimensional DeviceMesh.

    Raises ConfigurationError if there is none, if it was destroyed, or if this rank is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigurationError(
            "torch.distributed is not initialized; call torch.distributed.init_process_group() before commopt"
        )
    if group is None:
        return world_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigurationError(
            f"rank {dist.get_rank()} is not a member of the process group it was given; "
            f"create the HookState or Communicator only on the group's own ranks"
        )
    if not isinstance(group, dist.ProcessGroup) and hasattr(group, "get_group"):
        group = group.get_group()  # a DeviceMesh: raises its own clear error when it has several dimensions
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(
            f"process group {group!r} is a {type(group).__name__}; pass a ProcessGroup or a one-dimensional DeviceMesh"
        )
    if not is_alive(group):
        raise ConfigurationError("the process group was destroyed; initialize it again and pass the new one")
    return group


def join(
    group: Any = None,
    ranks_per_node: int | None = None,
    timeout_s: float | None = None,
    problem: Exception | None = None,
    site: str | None = None,
    *,
    meets: bool = False,
) -> Membership:
    """Return the membership of `group`, and build it on the first call. Collective over the group's ranks.

    Calls with equal arguments share one set of process groups, as all of them use one lane in one order. Raises
    ConfigurationError for an invalid shape or timeout, on every rank even if only one has it. Raises MismatchError when
    ranks disagree, TransportError when the rendezvous store does not answer.

    ranks_per_node: declares blocks of the group's ranks to be nodes, instead of asking the hosts. The variable
        COMMOPT_RANKS_PER_NODE does this with blocks of global ranks.
    timeout_s: None: the timeout of `group` itself, or 600 s if torch does not tell it.
    problem: reason why the caller cannot continue, raised here on every rank unless the groups exist already.
    site: where this rank's node is, outermost level first, as in "berlin/rack3"; None: as COMMOPT_SITE or Slurm says.
    meets: whether ranks that have groups meet first: else those that ask for others would wait for the rest there.
    """
    try:
        parent = resolve_group(group)
    except ConfigurationError as error:
        raise problem or error from None  # no other rank can be told
    known = _memberships.setdefault(parent, {})
    key = (ranks_per_node, timeout_s, site)
    built = key in known and known[key].alive
    alive = {asked: each.name for asked, each in known.items() if each.alive}
    if meets and alive:
        _require_same_groups(parent, key, problem, alive)
    if not built:
        known[key] = _build(parent, ranks_per_node, timeout_s, problem, site)
    return known[key]


def read_arguments(ranks_per_node: int | None, timeout: float | timedelta | None) -> tuple[int | None, float | None]:
    """Return these arguments of `join`, the timeout in seconds. Raises ConfigurationError for wrong types.

    Values of the right type are checked by all ranks together, in `join`.
    """
    timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float | None):
        raise ConfigurationError(
            f"timeout {timeout_s!r} is a {type(timeout_s).__name__}; pass seconds or a timedelta, as in timeout=60"
        )
    if isinstance(ranks_per_node, bool) or not isinstance(ranks_per_node, int | None):
        raise ConfigurationError(
            f"ranks_per_node {ranks_per_node!r} is a {type(ranks_per_node).__name__}; pass a whole number, as in "
            f"ranks_per_node=8"
        )
    return ranks_per_node, timeout_s


def _timeout_of(parent: dist.ProcessGroup) -> float:
    """Return the timeout of a process group in seconds; all its backends have the same."""
    for device in parent._device_types:
        backend = parent._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        try:
            timeout = backend.options._timeout
        except (AttributeError, RuntimeError):  # not every backend, and not every torch, has options
            continue
        if isinstance(timeout, timedelta) and timeout > timedelta(0):
            return timeout.total_seconds()
    return DEFAULT_TIMEOUT_S


def _require_same_groups(
    parent: dist.ProcessGroup, key: _Arguments, problem: Exception | None, alive: Mapping[_Arguments, str]
) -> None:
    """Raise MismatchError, or `problem`, unless all ranks ask for the same groups; collective.

    alive: the names of those that this rank has, by what was asked for; there are some.
    """
    ranks_per_node, timeout_s, _ = key
    asked = {
        "ranks_per_node": ranks_per_node,
        "timeout in seconds": "nan" if timeout_s != timeout_s else timeout_s,  # NaN, refused later, equals nothing
    }
    at_another_site = key not in alive and any(other[:2] == key[:2] for other in alive)
    site = {"site": f"that of {alive[key]}" if key in alive else "another than before"}
    before = {_ANY: True, _THESE: None if at_another_site else key in alive}
    limit_s = _own_timeout_s(parent)
    if timeout_s is not None and 0 < timeout_s <= _LONGEST_TIMEOUT_S:
        limit_s = timeout_s
    ranks, store = dist.get_process_group_ranks(parent), limited_store(f"commopt/{parent.group_name}", limit_s)
    meet = partial(exchange_facts, store, ranks, parent.rank(), _SETUP, asked | site | before, limit_s)
    answers = meet(failures_among(ranks), problem)
    _require_on_all_or_none(ranks, answers, _ANY)
    require_equal(ranks, answers, asked)
    _require_on_all_or_none(ranks, answers, _THESE)
    require_equal(ranks, answers, site)


def _require_on_all_or_none(ranks: Sequence[int], answers: Sequence[Facts], groups: str) -> None:
    """Raise MismatchError, alike on every rank, where some have closed the `groups` that others have."""
    having = [str(rank) for rank, answer in zip(ranks, answers, strict=True) if answer.get(groups) is True]
    lacking = [str(rank) for rank, answer in zip(ranks, answers, strict=True) if answer.get(groups, False) is False]
    if having and lacking:
        raise MismatchError(
            f"rank {', '.join(having)} has {groups} from before, and rank {', '.join(lacking)} has none, as after a "
            f"close() there alone; call close() of a HookState or Communicator on every rank or on none: now on rank "
            f"{', '.join(having)} too, and then make the same call again"
        )


def _own_timeout_s(parent: dist.ProcessGroup) -> float:
    return min(_timeout_of(parent), _LONGEST_TIMEOUT_S)


def _build(
    parent: dist.ProcessGroup,
    ranks_per_node: int | None,
    asked_for_s: float | None,
    problem: Exception | None,
    given_site: str | None,
) -> Membership:
    timeout_s, host = _own_timeout_s(parent), None
    site, told = "", given_site is not None or SITE_VARIABLE in os.environ
    checks, heartbeat_s, connections = False, 0.0, None
    try:  # an error of one rank is raised on all
        if asked_for_s is not None:
            timeout_s = require_timeout(asked_for_s)
        emulated = _ranks_per_node_from_environment() if ranks_per_node is None else None
        checks, heartbeat_s = checking(), heartbeat_interval_s()
        connections = asked_for()
        host = _host(emulated).as_dict()
        site = read_site(given_site, emulated=emulated is not None or ranks_per_node is not None)
    except Exception as error:
        problem, emulated = problem or error, None
    facts = {
        "commopt version": __version__,
        "torch version": torch.__version__,
        "ranks_per_node": ranks_per_node,
        ENVIRONMENT_VARIABLE: emulated,
        "timeout in seconds": asked_for_s,
        "COMMOPT_CHECK": checks,
        HEARTBEAT_VARIABLE: heartbeat_s,
        CONNECTIONS_VARIABLE: connections,
    }
    own = {
        "host": host,
        "site": site,
        "told": told,
        "timeout of the process group": timeout_s,
        "interfaces": listed_interfaces(),
    }
    ranks, me = dist.get_process_group_ranks(parent), parent.rank()
    own["token"] = secrets.token_hex(4) if me == 0 else None  # all ranks would read that of all
    store = limited_store(f"commopt/{parent.group_name}", timeout_s)
    raise_failures = failures_among(ranks)
    answers = exchange_facts(store, ranks, me, _SETUP, facts | own, timeout_s, raise_failures, problem)
    _require_on_all_or_none(ranks, answers, _ANY)
    require_equal(ranks, answers, facts)
    timeout_s = max(answer["timeout of the process group"] for answer in answers)
    cluster = _cluster(answers, ranks_per_node, emulated=emulated is not None)
    if me == 0:
        _describe(cluster)
    name = f"commopt/{parent.group_name}/{answers[0]['token']}"
    meet = partial(exchange_facts, store, ranks, me, timeout_s=timeout_s, interrupt=raise_failures)
    try:
        groups = LevelGroups(parent, cluster, name, timeout_s, meet)
        team, chosen = groups.make(connections, [answer["interfaces"] for answer in answers])
    except BaseException:
        for group in [group for group, known in c10d._world.pg_names.items() if known.startswith(f"{name}/")]:
            dist.destroy_process_group(group)
        raise
    own_store, beat_s = store.under(name, timeout_s), paced_interval_s(heartbeat_s, len(ranks))
    worlds = ref(parent), ref(world_group())
    return Membership(name, *worlds, cluster, team, timeout_s, own_store, heartbeat_s=beat_s, connections=chosen)


def require_timeout(timeout_s: float) -> float:
    """Return a valid timeout of a process group, in seconds. Raises ConfigurationError for any other."""
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s <= _LONGEST_TIMEOUT_S:
        raise ConfigurationError(
            f"timeout {timeout_s} is not between 0 and {_LONGEST_TIMEOUT_S:.0f} seconds; pass for example timeout=60"
        )
    return timeout_s


def _host(ranks_per_node: int | None) -> HostIdentity:
    """Return this process's host; an emulated one if the environment declares blocks of global ranks to be nodes."""
    if ranks_per_node is None:
        return read_host_identity()
    rank = dist.get_rank()
    node = _blocks(dist.get_world_size(), ranks_per_node).node_of(rank)
    return HostIdentity(f"node{node}", boot_id="", nccl_hostid=None, local_rank=rank % ranks_per_node)


def _cluster(answers: Sequence[Facts], ranks_per_node: int | None, *, emulated: bool) -> Cluster:
    """Return the nodes and sites of all ranks. Raises ConfigurationError, alike on every rank, for impossible ones."""
    if ranks_per_node is None:
        cluster = Cluster.from_hosts([HostIdentity(**answer["host"]) for answer in answers], emulated)
    else:
        cluster = _blocks(len(answers), ranks_per_node)
    try:
        return cluster.in_sites([answer["site"] for answer in answers])
    except ValueError as error:
        if any(answer["told"] for answer in answers):
            raise ConfigurationError(f"{error} ({SITE_VARIABLE}, or site=...)") from None
        _log.warning("the switches that Slurm names make no sites, and are left out: %s (%s)", error, SITE_VARIABLE)
        return cluster


def _describe(cluster: Cluster) -> None:
    if not cluster.node_contiguous:
        _log.warning(
            "ranks are not numbered node by node (%s): commopt orders its own groups by node, but other collectives "
            "may cross the network once per rank instead of once per node; launch the ranks of a node together",
            cluster.nodes,
        )
    if cluster.site_levels:
        sites: dict[str, list[str]] = {}
        for name, site in zip(cluster.names, cluster.sites, strict=True):
            sites.setdefault("/".join(site), []).append(name)
        _log.info("%s: %s", cluster, "; ".join(f"{site}: {', '.join(names)}" for site, names in sites.items()))


def _blocks(world_size: int, ranks_per_node: int) -> Cluster:
    try:
        return Cluster.from_ranks_per_node(world_size, ranks_per_node)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def _ranks_per_node_from_environment() -> int | None:
    text = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise ConfigurationError(f"{ENVIRONMENT_VARIABLE}={text!r} is not a positive whole number; set it or unset it")
    return int(text)
