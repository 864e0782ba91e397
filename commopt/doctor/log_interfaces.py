# SPDX-License-Identifier: Apache-2.0
"""The interfaces named in a log, and those among them that cannot connect nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from commopt.doctor.finding import Finding, error, warning
from commopt.doctor.log_reader import TCP, Log
from commopt.doctor.network import INFINIBAND, TUNNELS, unsuitable_reason

_REFUSED = re.compile(r"refused|timed out|[Nn]o route|unreachable|abort|returned 11[0-3]|reset|retry count")
_PEER = re.compile(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([0-9a-fA-F:.]+(?:%[\w.]+)?))<\d+>")


SAME = "the same address"


class LogInterface(NamedTuple):
    """An interface named in a log of NCCL."""

    name: str
    address: str
    use: str
    """ "Bootstrap", "Socket", "OOB"; "peer" for an address that did not answer."""
    why: str | None
    """Reason why it cannot lead to other nodes; None if there is none in the log."""


def named_interfaces(log: Log) -> list[LogInterface]:
    """Return the interfaces of a log, with reasons from their names, addresses and hosts with the same address."""
    hosts: dict[str, set[str]] = {}
    names = log.host_names
    for (_, _, address), stated_by in log.interfaces.items():
        hosts.setdefault(address, set()).update(stated_by)
    found = []
    for use, name, address in log.interfaces:
        why = unsuitable_reason(name, address)
        if len(same := hosts[address] & names) > 1:
            everywhere = f"{SAME} on {' and '.join(sorted(same)[:3])}, so each host finds itself there"
            why = everywhere if why is None else f"{why}, and {everywhere}"
        found.append(LogInterface(name, address, use, why))
    return found


def unreachable_peers(log: Log) -> list[LogInterface]:
    """Return addresses that did not answer and cannot belong to another node: loopback, Docker, libvirt."""
    names = {address: name for _, name, address in log.interfaces}
    found = {}
    for one in log.warnings.values():
        for match in _PEER.finditer(one.text if _REFUSED.search(one.text) else ""):
            address = match[1] or match[2]
            if (why := unsuitable_reason(names.get(address, ""), address)) is not None:
                found[address] = LogInterface(names.get(address, ""), address, "peer", why)
    return [*found.values()]


def interface_findings(log: Log) -> Iterator[Finding]:
    """Yield findings about unsuitable interfaces of a job on several nodes."""
    if log.machines == 1 or (log.machines is None and log.channels and not log.network_channels):
        return
    every, refused = named_interfaces(log), unreachable_peers(log)
    bad = _in_use(log, [one for one in every if one.why is not None])
    if not bad and not refused:
        return
    apart = (log.machines or 1) > 1
    fine = sorted({one.name for one in every if one.why is None})
    shown = [f"{one.name} {one.address}: {one.why}" for one in {(one.name, one.address): one for one in bad}.values()]
    known = {one.address for one in bad}
    shown += [f"{one.address} did not answer: {one.why}" for one in refused if one.address not in known]
    value = "; ".join(shown[:4]) + (f"; and {len(shown) - 4} more" if len(shown) > 4 else "")
    expected = "an interface on the network that the nodes share" + (f" ({', '.join(fine[:4])})" if fine else "")
    # A tunnel leads to other nodes slowly. A name alone may mislead: in some containers the only interface is veth0.
    ends = [one for one in bad if SAME in (one.why or "") or unsuitable_reason("", one.address) is not None]
    named_only = {one.name for one in bad if one not in ends and not one.name.startswith(TUNNELS)}
    alone = bool(ends) and (not fine or any(one.use == "Bootstrap" for one in ends))
    wrong = bool(refused) or (apart and (alone or any(SAME in (one.why or "") for one in ends)))
    remedy = _remedy(log, fine or sorted(named_only), any("loopback" in (one.why or "") for one in [*bad, *refused]))
    yield (error if wrong else warning)(value, expected, remedy, "high" if wrong else "medium")


def _in_use(log: Log, bad: list[LogInterface]) -> list[LogInterface]:
    """Return the interfaces in use, without sockets beside RDMA and those that no connection uses."""
    places = {place for plugin, place in log.adapters if plugin in TCP}
    devices = {name for place in places for plugin in TCP for name in log.devices.get(plugin, {}).get(place, [])}
    sockets = bool(places) or any(name in TCP for name in log.networks) or not log.networks
    return [one for one in bad if one.use != "Socket" or (sockets and (not places or one.name in devices))]


def _remedy(log: Log, fine: list[str], loopback: bool) -> str:
    variable, value = "NCCL_SOCKET_IFNAME", log.environment.get("NCCL_SOCKET_IFNAME")
    if fine:
        return f"export {variable}=={','.join(fine[:4])}" + (f" (now {value})" if value else "")
    find = f"export {variable}=NAME (ip route get ADDRESS_OF_THE_OTHER_NODE names it)"
    names = "; correct a host name, or MASTER_ADDR, that means 127.0.0.1 in /etc/hosts" if loopback else ""
    return (f"unset {variable} (now {value}), or " if value else "") + find + names


def ipoib_interfaces(log: Log) -> list[str]:
    """Return the IPoIB interfaces that sockets use although no connection uses verbs."""
    if log.names("IB") or not any(name in TCP for name in log.networks):
        return []
    return sorted({name for use, name, _ in log.interfaces if use != "OOB" and INFINIBAND.match(name)})
