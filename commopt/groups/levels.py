# SPDX-License-Identifier: Apache-2.0
"""The process groups of a membership: one for each level, made in one order on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from commopt.errors import ConfigurationError
from commopt.groups import choice
from commopt.groups.agreement import Facts
from commopt.groups.connections import (
    CONNECTIONS_VARIABLE,
    INTERFACES_VARIABLE,
    MOST_CONNECTIONS,
    Connections,
    connections_of,
    with_connections,
)
from commopt.groups.shape import with_levels
from commopt.groups.team import Team
from topology import Cluster

_Ranks = tuple[int, ...]

_log = logging.getLogger("commopt")


@dataclass(frozen=True)
class LevelGroups:
    """Makes the process groups of a membership, one for each level; its methods are collective.

    meet: exchange_facts with all but its purpose, facts and problem.
    """

    parent: dist.ProcessGroup
    cluster: Cluster
    name: str
    timeout_s: float
    meet: Callable[..., list[Facts]]

    def make(self, connections: int | None, interfaces: Sequence[Sequence[str]]) -> tuple[Team, Connections]:
        """Return the team of this rank, with all its levels, and the connections between its nodes.

        connections: None: as many as are best, if the user has listed no interfaces.
        interfaces: what each rank has listed.
        """
        if connections is None and not self.cluster.emulated and _may_choose(self.parent, interfaces):
            return self._measured()
        team, _ = self._whole(connections)
        return team, _told(connections, interfaces[0])

    def _measured(self) -> tuple[Team, Connections]:
        team, round_trips_us = self._whole(None, choice.round_trip_us)
        long_us = max(round_trips_us, default=0.0)
        if long_us < choice.LONG_US:
            return team, Connections()
        _log.info("the round trip between nodes takes %.0f ms: measuring with more connections", long_us / 1e3)
        trial = replace(self, name=f"{self.name}/trial")
        tried, rates = trial._whole(MOST_CONNECTIONS, choice.measure_gbps)
        count = choice.best(rates)
        chosen = Connections(count, choice.reason(rates, long_us), count > 1)
        _log.info("%s", chosen)
        if count == MOST_CONNECTIONS:
            team.close()
            return tried, chosen
        tried.close()
        if count > 1:
            team.close()
            team, _ = replace(self, name=f"{self.name}/{count}")._whole(count)
        return team, chosen

    def _whole(
        self, connections: int | None, measure: Callable[[dist.ProcessGroup], Any] | None = None
    ) -> tuple[Team, list[Any]]:
        """Return the team and what ranks measured between nodes, once all ranks have both.

        A rank that went on and destroyed its groups would break connections that others are still making.
        """
        problem: Exception | None = None
        team = measured = None
        try:
            team = self._team(connections)
            apart = choice.across(team)
            if measure is not None and apart is not None:
                measured = apart.measure(measure)
        except Exception as error:  # any error must be raised on the other ranks too
            problem = error.with_traceback(None)  # its frames would hold the group
            with suppress(RuntimeError):
                if team is not None:
                    team.close()  # which frees peers that wait in a measurement
        answers = self.meet("the end of commopt group setup", {"measured": measured}, problem=problem)
        assert team is not None  # else there was a problem
        return team, [each["measured"] for each in answers if each["measured"] is not None]

    def _team(self, connections: int | None) -> Team:
        """Create the groups in a fixed order, from the world inwards. Levels of the same ranks share a group.

        connections: between two ranks, of groups that span nodes.
        """
        parent, cluster = self.parent, self.cluster
        ranks_of_parent = dist.get_process_group_ranks(parent)
        global_ranks = [ranks_of_parent[position] for position in cluster.order]
        node_of = [node for node, positions in enumerate(cluster.nodes) for _ in positions]
        sites = [[site[node] for node in node_of] for site in cluster.site_levels]
        backends = _backends(parent)
        groups: dict[_Ranks, dist.ProcessGroup | None] = {}

        def create(level: str, members: Sequence[int]) -> Team:
            ranks = tuple(global_ranks[member] for member in members)
            nodes = tuple(node_of[member] for member in members)
            if ranks not in groups:
                called = level if level == "world" else f"{level}{members[0]}"  # by the first of its ranks
                several = connections if len(set(nodes)) > 1 else None
                groups[ranks] = _new_group(parent, ranks, f"{self.name}/{called}", self.timeout_s, several)
            placed = [[site[member] for member in members] for site in sites]
            return Team(ranks, nodes, groups[ranks], backends, level, placed)

        return with_levels(create, cluster.order.index(parent.rank()), [node_of, *sites])


def _new_group(
    parent: dist.ProcessGroup, ranks: tuple[int, ...], name: str, timeout_s: float, connections: int | None
) -> dist.ProcessGroup | None:
    """Create a process group of exactly `ranks` in exactly this order. Only these ranks take part.

    `dist.new_group` would sort the ranks, so that a ring alternates between nodes. It would also derive the group's
    name from counters, which differ between ranks that belong to different groups.
    """
    if len(ranks) == 1:
        return None
    create: Any = c10d._new_process_group_helper  # not public, hence typed differently from one torch to the next
    group: dist.ProcessGroup
    with _unbound(), with_connections(connections):
        group, _ = create(
            len(ranks),
            ranks.index(dist.get_rank()),
            list(ranks),
            dist.Backend(_backend_config(parent)),
            c10d._get_default_store(),
            name,
            None,
            timeout=timedelta(seconds=timeout_s),
            group_desc=name,
        )
    c10d._world.pg_group_ranks[group] = {global_rank: position for position, global_rank in enumerate(ranks)}
    if connections is not None and "gloo" in _backends(parent).values() and connections_of(group) != connections:
        raise ConfigurationError(
            f"{CONNECTIONS_VARIABLE}={connections}: this torch makes its groups of gloo in another way, with "
            f"{connections_of(group)} connection(s); unset the variable"
        )
    return group


def _backend_config(parent: dist.ProcessGroup) -> str:
    """Return the names of `parent`'s backends, as a single name if they are equal.

    For several names torch finds no default, and warns whenever such a group is destroyed.
    """
    names = set(_backends(parent).values())
    return names.pop() if len(names) == 1 else str(dist.get_backend_config(parent))


@contextmanager
def _unbound() -> Iterator[None]:
    """Hide the device that init_process_group(device_id=...) bound to the world.

    With a bound device torch makes NCCL groups by splitting the world's communicator, which needs every rank of the
    world; here only the group's own ranks take part.
    """
    world = world_group()
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def _told(connections: int | None, interfaces: Sequence[str]) -> Connections:
    if connections is not None:
        return Connections(connections, CONNECTIONS_VARIABLE)
    return Connections(len(interfaces), INTERFACES_VARIABLE) if len(interfaces) > 1 else Connections()


def _may_choose(parent: dist.ProcessGroup, interfaces: Sequence[Sequence[str]]) -> bool:
    """Return whether commopt chooses how many connections there are, alike on all ranks: nobody else has."""
    only_gloo = set(_backends(parent).values()) == {"gloo"}
    return only_gloo and all(len(names) < 2 and list(names) != ["lo"] for names in interfaces)


def _backends(parent: dist.ProcessGroup) -> dict[str, str]:
    """Return the name of the backend for each type of device."""
    return dict(part.split(":") for part in str(dist.get_backend_config(parent)).split(","))


def world_group() -> dist.ProcessGroup:
    """Return the default process group, which must exist."""
    world = dist.group.WORLD
    assert world is not None  # is_initialized() said so
    return world
