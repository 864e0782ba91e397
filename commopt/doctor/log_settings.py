# SPDX-License-Identifier: Apache-2.0
"""Settings in a log: those that a warning makes suspect, and the remedies that agree with them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

CONF = "also in /etc/nccl.conf and ~/.nccl.conf"


class SettingFamily(NamedTuple):
    """The settings of one part of NCCL."""

    where: str
    """A pattern of file and text of the warnings of that part."""
    settings: tuple[str, ...]
    """Patterns of whole names, the most frequent causes first."""
    why: str
    remedy: str = f"unset {{name}}, {CONF}"
    certain: bool = False
    """Whether it applies also to warnings with a known meaning."""


GRAPH = (
    "NCCL_GRAPH_FILE",
    "NCCL_TOPO_FILE",
    "NCCL_NET_(?:FORCE_)?MERGE\\w*",
    "NCCL_HOSTID",
    "NCCL_IB_HCA",
    "NCCL_ALGO",
)
FAMILIES = (
    SettingFamily("neither AF_INET|no (?:socket )?interface|No IP interface|No interface|No usable|listening interface"
           "|same subnet",
           ("NCCL_OOB_NET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"),
           "a rank has no interface that it selects, or it has no address",
           "export {name} to an interface that exists on every node and has an address (ip address), or: unset {name}",
           True),
    SettingFamily("no device found matching|no device found after", ("NCCL_OOB_NET_IFNAME",),
           "no interface of this machine fits it", certain=True),
    SettingFamily("connect.*(?:refused|timed out|No route|unreachable)|Connection timed|No route to host",
           ("NCCL_COMM_ID", "NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME"),
           "the interface or address that it names may not lead to the other nodes",
           "export {name} to the interface on the network that all nodes share, then check firewalls", True),
    SettingFamily("algorithm/protocol", ("NCCL_ALGO", "NCCL_PROTO"), "it leaves nothing for this operation or machine",
           certain=True),
    SettingFamily("XML (?:Import|Export)|XML Graph|XML graph", ("NCCL_GRAPH_FILE",),
           "it is for another machine or another number of GPUs", certain=True),
    SettingFamily("XML |Attribute .* of node|dictionary", ("NCCL_TOPO_FILE",), "it is damaged, or of another machine",
           certain=True),
    SettingFamily("path for pattern",
           ("NCCL_ALGO", "NCCL_GRAPH_FILE", "NCCL_TOPO_FILE", "NCCL_CROSS_NIC", "NCCL_IB_HCA"),
           "it may exclude better ones", certain=True),
    SettingFamily("No transport", ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_NET", "NCCL_HOSTID"),
           "it takes away a way between ranks", certain=True),
    SettingFamily("^graph/|topo|path|NET with id|net id|NIC for|ring |tree |local ranks|hostHash|intra proc|nLocals"
           "|Group creation",
           GRAPH, "it may describe another machine or job", certain=True),
    SettingFamily("ibv_modify_qp|GID|status=12|error 12|traffic class",
           ("NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "NCCL_IB_(?:TC|SL|PKEY|ADDR_FAMILY|ROCE_VERSION_NUM|TIMEOUT"
            "|ADDR_RANGE)"),
           "it may fit one adapter and not the other"),
    SettingFamily("^transport/net_ib|^misc/ibv|NET/IB|ibv_", ("NCCL_IB_\\w+", "NCCL_NET_GDR_\\w+"),
           "it may not fit these adapters"),
    SettingFamily("^transport/(?:p2p|shm)|shared memory|shm|IPC|peer access|failed to peer",
           ("NCCL_P2P_\\w+", "NCCL_SHM_\\w+", "NCCL_CUMEM\\w*", "NCCL_IGNORE_\\w+"), "it may be the cause"),
    SettingFamily("network .* not found|^plugin|^net\\.cc|[Pp]lugin|libnccl|collNet|CollNet|NET/(?!IB|Socket)",
           ("NCCL_NET_PLUGIN", "NCCL_NET", "NCCL_TUNER_\\w+", "NCCL_COLLNET_ENABLE", "NCCL_\\w+_PLUGIN"),
           "it asks for a plugin that may not be here, or not of this version", certain=True),
    SettingFamily("^(?:src/)?(?:enqueue|graph/tuning|collectives)|algorithm|protocol|pattern",
           ("NCCL_ALGO", "NCCL_PROTO", "NCCL_(?:NTHREADS|BUFFSIZE|LL\\w*|\\w+_CTAS|\\w+_NCHANNELS)"),
           "it may leave nothing for this operation"),
    SettingFamily("nvls|multicast|NVLS|NVLink SHARP", ("NCCL_NVLS_\\w+", "NCCL_MNNVL_\\w+", "NCCL_CUMEM_\\w+"),
           "it needs features that this machine may not have"),
    SettingFamily("^bootstrap|^misc/socket|^os/|Bootstrap|Net :|[Ss]ocket|NET/Socket",
           ("NCCL_COMM_ID", "NCCL_OOB_NET_\\w+", "NCCL_SOCKET_\\w+", "NCCL_NSOCKS_\\w+"),
           "it may lead to another interface or address than the other ranks use",
           "export {name} to the same on every node, that of the network they share, or: unset {name}"),
    SettingFamily("^init", ("NCCL_HOSTID", "NCCL_COMM_ID", "NCCL_\\w+_CTAS", "NCCL_CROSS_NIC"), "it may be what does "
           "not fit"),
)  # fmt: skip


def suspected_setting(file: str, text: str, settings: Mapping[str, str], known: bool) -> tuple[str, str, str] | None:
    """Return a suspect setting for a warning, the reason, and the remedy; None if the log has no such setting.

    known: whether the warning has a known meaning; then only certain families count.
    """
    for family in FAMILIES:
        if (known and not family.certain) or not re.search(family.where, f"{file} {text}".strip()):
            continue
        found = (name for pattern in family.settings for name in sorted(settings) if re.fullmatch(pattern, name))
        doubted = [name for name in dict.fromkeys(found) if not _harmless(name, settings[name])][:3]
        if doubted:
            shown = ", ".join(f"{name}={settings[name]}" for name in doubted)
            names = " ".join(doubted) if family.remedy.startswith("unset {name}") else doubted[0]
            return doubted[0], f"{shown} is set: {family.why}", family.remedy.format(name=names)
    return None


def _harmless(name: str, value: str) -> bool:
    """Return whether this equals NCCL's own choice: interfaces to exclude, no plugin, or a default."""
    return (
        value.startswith("^")
        or value.lower() == "none"
        or (name.endswith(("_DISABLE", "_LEVEL")) and value in ("0", "-1"))
    )


def without_contradictions(remedy: str, settings: Mapping[str, str]) -> str:
    """Return a remedy without the parts that contradict the log: unset variables to unset, set variables to set.

    A log without any setting may lack them because of NCCL_DEBUG_SUBSYS, so it contradicts nothing.
    """
    if not any(not name.startswith("NCCL_DEBUG") for name in settings):
        return remedy
    kept = []
    for clause in remedy.split("; "):
        unset = re.match(r"unset ((?:NCCL_\w+ ?)+)(.*)", clause)
        given = re.match(r"(?:export )?(NCCL_\w+)=(\S+)$", clause)
        if unset:
            names = [name for name in unset[1].split() if name in settings]
            if names:
                kept.append(f"unset {' '.join(names)}" + re.sub(r"^(?=\w)", " ", unset[2]))
        elif given is None or settings.get(given[1]) != given[2]:
            kept.append(clause)
    return "; ".join(kept) or remedy
