# SPDX-License-Identifier: Apache-2.0
"""Findings from a log of NCCL: transports, adapters and settings in use, their cost, and remedies."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from commopt.doctor.finding import Check, Finding, Severity, Unread, check, error, in_order, info, ok, warning
from commopt.doctor.gpudirect import LOAD
from commopt.doctor.hang import hangs
from commopt.doctor.log_causes import NcclWarning, explain
from commopt.doctor.log_interfaces import interface_findings, ipoib_interfaces, unreachable_peers
from commopt.doctor.log_reader import LOG_VARIABLES, OLDEST, TCP, Log
from commopt.doctor.machine import Machine, version_text
from commopt.doctor.settings import DEBUG, TUNING, harmful_settings

# Plugins for InfiniBand and RoCE: NCCL's own, NVIDIA's under its names, Google's.
INFINIBAND = ("IB", "NCCL RDMA", "gIB", "SHARP", "UCX")
_SLOW_RDMA = re.compile(r"i40iw|irdma|iw_?cxgb|cxgb|siw|rxe|rdmap?_?rxe")
# The errors of ncclResult_t.
RESULTS = ("", "CUDA error", "system error", "internal error", "invalid argument", "invalid usage", "remote error")
UNSET_BOTH = "unset NCCL_P2P_DISABLE NCCL_SHM_DISABLE"


def examine(log: Log) -> list[Finding]:
    """Return the findings of a log, worst first."""
    checks: tuple[Check[Log], ...] = (
        log_hang,
        log_interfaces,
        log_verbs,
        log_warnings,
        log_network,
        log_gdr,
        log_inside,
        log_adapters,
        log_environment,
        log_version,
        log_understood,
    )
    return in_order(replace(finding, read=log.source) for look in checks for finding in look(log))


def _times(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count} times" for name, count in sorted(counts.items()))


@check("log")
def log_hang(log: Log) -> Iterable[Finding]:
    """Ranks that hang"""
    return hangs(log.hang)


@check("log")
def log_interfaces(log: Log) -> Iterable[Finding]:
    """Interfaces between nodes"""
    return interface_findings(log)


@check("log")
def log_verbs(log: Log) -> Iterator[Finding]:
    """InfiniBand in reach"""
    names = ipoib_interfaces(log)
    switched_off = log.environment.get("NCCL_IB_DISABLE", "0") != "0" or "NCCL_NET" in log.environment
    if names and not switched_off and log.machines != 1:
        expected = "RDMA: InfiniBand is there, but NCCL sees no device of verbs and sends IP packets over it, several "
        expected += "times slower; in a container /dev/infiniband is missing, or memory may not be locked"
        remedy = "docker run --device=/dev/infiniband --ulimit memlock=-1 --cap-add=IPC_LOCK ...; ibv_devinfo in there"
        value = f"sockets over {', '.join(names)} (IPoIB)" + (", NET/IB : No device found" if log.no_ib_device else "")
        yield error(value, expected, remedy)


@check("log")
def log_warnings(log: Log) -> Iterable[Finding]:
    """Warnings of NCCL"""
    caused = bool(unreachable_peers(log)) or any(one.severity is Severity.ERROR for one in interface_findings(log))
    caused = caused or bool(ipoib_interfaces(log)) or bool(log.hang.groups)
    # A failure usually has a warning. Otherwise the returned result is used.
    warnings = log.warnings or _first_failure(log)
    return explain(warnings, log.environment, log.version, bool(log.merged), caused)


def _first_failure(log: Log) -> dict[str, NcclWarning]:
    """Return the first error that was returned to a call; some errors occur at the end of a successful job."""
    returned = any(re.search(r"(?:^|/)(?:init|group|enqueue|collectives)\.cc", one.file) for one in log.failed.values())
    if not returned or log.hang:
        return {}
    kind, one = next(iter(log.failed.items()))
    result = RESULTS[int(one.text.partition("-> ")[2][:1])]
    return {kind: one._replace(text=f"{result} without a warning: {one.text}")}


@check("log")
def log_understood(log: Log) -> Iterator[Finding]:
    """Content of the log"""
    if log.version is not None and log.version < OLDEST:
        expected = f"NCCL {version_text(OLDEST)} or newer: the log format of older versions is unknown here"
        remedy = "a newer torch (or NCCL) with a more detailed log; its own lines: grep -e Ring -e via -e WARN"
        yield warning(f"NCCL {version_text(log.version)}", expected, remedy)
    elif not log.channels and not log.warnings and not log.failed and not log.hang:
        expected = "lines `Channel ... via`: without them the log does not show whether communication is slow"
        yield warning("no connection in this log", expected, f"run to the first step with {LOG_VARIABLES}", "medium")


@check("log")
def log_version(log: Log) -> Iterator[Finding]:
    """NCCL"""
    if log.version is None:
        raise Unread("no line with NCCL's version", LOG_VARIABLES)
    nodes = f" on {log.machines} node(s)" if log.machines else ""
    yield info(f"{version_text(log.version)}, {log.ranks or 'unknown number of'} ranks{nodes}", "for reference")


@check("log")
def log_network(log: Log) -> Iterator[Finding]:
    """Transport between nodes"""
    used, names = log.network_channels, _times(log.network_channels)
    if used and log.all_over_network:
        expected = "unset: ranks of one machine talk over the network, if there are several"
        yield error(f"{names}; NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1", expected, UNSET_BOTH)
        if log.machines == 1:
            return
    if not used:
        yield _no_network(log)
    elif log.machines == 1:
        remedy = f"{UNSET_BOTH}; ranks in different containers: --ipc=host on all"
        yield warning(f"{names}, inside one node", "P2P or shared memory: one node needs no network", remedy, "medium")
    elif any(name.endswith("NET/Socket") for name in used):
        yield _sockets(log, names)
    elif log.provider in ("tcp", "sockets", "udp", "net"):
        remedy = "fi_info -p efa; export FI_PROVIDER=efa; container: --device=/dev/infiniband"
        expected = "efa: libfabric goes over TCP although its plugin is there"
        yield error(f"{names}; provider {log.provider}", expected, remedy)
    elif all(name.split("/")[1] in TCP for name in used):
        yield info(names, "TCP, as fast as the provider's plugin makes it")
    else:
        yield info(names, "the fast network")


def _no_network(log: Log) -> Finding:
    mnnvl, names = "NVLink between the nodes (MNNVL)", ", ".join(log.networks)
    if any(name.startswith("P2P/MNNVL") for name in log.channels):
        return ok(mnnvl, "the fast network")
    if log.machines == 1 or (log.channels and log.machines is None):
        return ok("no connection over a network", "one node")
    if log.mnnvl:
        return info(mnnvl, "the fast network; no connection in this log")
    if names == "Socket" and _why_sockets(log) is not None:
        return _sockets(log, "Using network Socket")
    why = f"only `Using network {names}`" if names else "not in this log"
    raise Unread(f"no line `Channel ... via NET`: {why}", LOG_VARIABLES)


def _sockets(log: Log, names: str) -> Finding:
    cost = "RDMA where there is any: TCP copies every byte through both CPUs, often at half the line rate"
    because = _why_sockets(log)
    if because is not None:
        # libibverbs is normally absent on machines without adapters, and the log does not show adapters.
        kind, sure = (warning, "medium") if "libibverbs" in because[0] else (error, "high")
        return kind(f"{names}; {because[0]}", cost, because[1], sure)
    question = "" if ipoib_interfaces(log) else "no RDMA adapter? then: "
    remedy = f"{question}NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4, and compress between nodes"
    if log.sockets > 1:
        names, remedy = f"{names}, {log.sockets} sockets each", f"{question}compress between nodes"
    elif {"NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"} & {*log.environment}:
        remedy = f"{question}compress between nodes"
    return warning(names, cost, remedy, "medium")


def _why_sockets(log: Log) -> tuple[str, str] | None:
    """Return the reason why NCCL fell back to TCP, and the remedy; None if the log has no reason."""
    hca, names = log.environment.get("NCCL_IB_HCA"), ", ".join(log.names("IB"))
    install = "apt-get install libibverbs1 ibverbs-providers, where ls /sys/class/infiniband lists adapters"
    rebuild = "ldd libnccl-net.so in the container; a plugin that was built for this image and this libfabric"
    reasons = (
        (log.environment.get("NCCL_IB_DISABLE", "0") != "0", "NCCL_IB_DISABLE is set", "unset NCCL_IB_DISABLE"),
        (log.environment.get("NCCL_NET", "").lower() == "socket", "NCCL_NET is Socket", "unset NCCL_NET"),
        (log.plugin_error, f"the network plugin does not load: {log.plugin_error}", rebuild),
        (log.no_verbs, "libibverbs is not installed", install),
        (log.no_ib_device and hca, f"NCCL_IB_HCA={hca} fits no adapter", "unset NCCL_IB_HCA; ibstat"),
        (names, f"RDMA adapters are there ({names})", "python -m commopt doctor, on that machine"),
    )
    return next(((why, remedy) for holds, why, remedy in reasons if holds), None)


@check("log")
def log_gdr(log: Log) -> Iterator[Finding]:
    """GPUDirect RDMA in use"""
    rdma = sum(log.ends.values())
    direct = sum(count for (_, is_direct), count in log.ends.items() if is_direct)
    reasons = [text for text, _ in log.no_gdr.most_common(3)]
    if not rdma:
        # Before the first connection the log names adapters without it. Pairs that are too far apart may be unused.
        without = [text for text in reasons if "distance" not in text]
        only_tcp = bool(log.networks) and set(log.networks) <= {*TCP}
        if without and log.machines != 1 and not only_tcp and log.no_gdr_gpu is None:
            expected = "enabled: messages between nodes are copied through CPU memory otherwise"
            yield warning(f"disabled for {'; '.join(without)}", expected, _fix_gpudirect(log, without), "medium")
        return
    value = f"{direct} of {rdma} times" + (f"; disabled for {'; '.join(reasons)}" if reasons else "")
    if log.gdr and not direct:
        value += f"; though enabled for {', '.join(sorted(log.gdr)[:3])}"
    expected = "on all: other messages are copied through CPU memory, which can halve the bandwidth "
    expected += "(GeForce cards and GB10 have none)"
    plugins = {name.split("/")[1] for name in log.network_channels} - {*TCP}
    if direct == rdma:
        yield ok(f"all {rdma} times", "on all")
    elif log.no_gdr_gpu is not None:
        yield info(value, f"{log.no_gdr_gpu} has no GPUDirect RDMA")
    elif direct and not log.ends["send", True] and not log.ends["receive", False]:
        usual = "on sending too; NCCL does not read GPU memory directly by default where GPUs have no NVLink"
        yield info(f"{value}: on receiving only", usual, "try: export NCCL_NET_GDR_READ=1", "medium")
    elif not any(name.startswith(INFINIBAND) for name in plugins):
        remedy = "the plugin's own lines in the log: does this kind of machine have it?"
        if any("Libfabric" in name for name in plugins) and log.provider in (None, "efa"):
            remedy = "on AWS P4d, P5 and later: export FI_EFA_USE_DEVICE_RDMA=1; other types have no GPUDirect RDMA"
        yield warning(value, expected, remedy, "medium")
    else:
        yield (warning if direct else error)(value, expected, _fix_gpudirect(log, reasons))


def _fix_gpudirect(log: Log, reasons: list[str]) -> str:
    for name in ("NCCL_NET_GDR_LEVEL", "NCCL_IB_GDR_LEVEL"):
        if log.environment.get(name, "").upper() in ("LOC", "0"):
            return f"unset {name}"
    level = log.environment.get("NCCL_NET_GDR_LEVEL", log.environment.get("NCCL_IB_GDR_LEVEL"))
    # An adapter that the log calls enabled has its module or DMA-BUF, so the distance from the GPU is the reason.
    if any("distance" in reason for reason in reasons) or log.gdr or level is not None:
        now = f" (now {level})" if level is not None else ""
        return f"a nearer adapter (NCCL_IB_HCA), or try: export NCCL_NET_GDR_LEVEL=PHB (or SYS){now}"
    if log.environment.get("NCCL_DMABUF_ENABLE") == "0":
        return f"unset NCCL_DMABUF_ENABLE, or: {LOAD}"
    return f"{LOAD}; then: python -m commopt doctor"


@check("log")
def log_inside(log: Log) -> Iterator[Finding]:
    """Transport inside the nodes"""
    used = {name: count for name, count in log.channels.items() if name not in log.network_channels}
    shown, shared = _times(used), sum(count for name, count in used.items() if name.startswith("SHM"))
    off = [
        name
        for name, words in (("NCCL_P2P_DISABLE", ("1",)), ("NCCL_P2P_LEVEL", ("LOC", "0")))
        if log.environment.get(name, "").upper() in words
    ]
    if shared and off:
        yield error(f"{shown}; {off[0]}={log.environment[off[0]]}", "peer access between GPUs", f"unset {off[0]}")
    elif shared and log.no_gdr_gpu == "GeForce":
        yield info(shown, "GeForce cards have no peer access, except those on an NVLink bridge")
    elif shared:
        expected = "P2P: through shared memory every byte is written and read once more by way of the CPU"
        remedy = "nvidia-smi topo -p2p r; nvidia-smi topo -m; check ACS and IOMMU (GeForce cards have no peer access)"
        kind = warning if log.no_peer or shared == sum(used.values()) else info
        yield kind(shown, expected, remedy, "medium")
    elif "P2P/indirect" in used:
        yield info(shown, "P2P: an indirect connection goes through a third GPU", "nvidia-smi topo -m", "medium")
    elif used:
        yield info(shown, "P2P")


@check("log")
def log_adapters(log: Log) -> Iterator[Finding]:
    """Adapters in use"""
    listed = {plugin: names for plugin in log.devices if (names := log.names(plugin))}
    if not listed and not log.adapters and log.provider is None:
        return
    shown = "; ".join(f"{plugin}: {', '.join(names)}" for plugin, names in listed.items()) or "not listed"
    if log.adapters:
        shown += "; used: " + ", ".join(f"{name} {place} x{n}" for (name, place), n in sorted(log.adapters.items()))
    if log.provider:
        shown += f"; libfabric over {log.provider}"
    used = [name for plugin, place in log.adapters for name in log.devices.get(plugin, {}).get(place, [])]
    # If queues cannot be connected, the numbers may mean other adapters on the next node.
    joined = not any("ibv_modify_qp" in one.text or "ncompatible" in one.text for one in log.warnings.values())
    if len({name.split("/")[1] for name in (used if joined else log.names("IB")) if "/" in name}) > 1:
        remedy = "export NCCL_IB_HCA to the adapters of one kind: ibstat | grep -e CA -e layer"
        yield warning(shown, "one kind of network: NCCL cannot connect InfiniBand with Ethernet", remedy, "medium")
    elif soft := sorted({name for name in log.names("IB") if _SLOW_RDMA.match(name)}):
        others = ",".join(name.partition("/")[0] for name in log.names("IB") if name not in soft)
        remedy = f"export NCCL_IB_HCA=={others}" if others else "export NCCL_IB_DISABLE=1"
        expected = f"adapters of RoCE or InfiniBand: {', '.join(soft)} is iWARP, or RDMA in software"
        yield warning(shown, expected, remedy, "medium")
    elif bonds := sorted({name for name in used or log.names("IB") if "bond" in name}):
        queues = log.environment.get("NCCL_IB_QPS_PER_CONNECTION", "1")
        if queues in ("0", "1"):
            expected = "several queue pairs: each goes over one port of the bond, so one uses half of the bandwidth"
            remedy = "export NCCL_IB_QPS_PER_CONNECTION=2 (or 4) NCCL_IB_SPLIT_DATA_ON_QPS=0"
            value = f"{shown}; one queue pair per connection over {', '.join(bonds)}"
            yield warning(value, expected, remedy, "medium")
        else:
            yield info(shown, f"bonds, with {queues} queue pairs per connection")
    elif all(plugin in TCP for plugin in listed) and all(plugin in TCP for plugin, _ in log.adapters):
        yield info(shown, "the interfaces that sockets may use")
    else:
        yield info(shown, "all fast adapters, with enough ranks")


@check("log")
def log_environment(log: Log) -> Iterator[Finding]:
    """NCCL's settings"""
    shown = ", ".join(f"{name}={value}" for name, value in sorted(log.environment.items()))
    own = {name: value for name, value in log.environment.items() if name not in log.by_plugin}
    own = {name: value for name, value in own.items() if not name.startswith("NCCL_DEBUG")}
    network = next((name for name in log.networks if name not in ("IB", *TCP)), "")  # the network of a provider
    # The same rules as for a process's own environment.
    machine = Machine(Path(os.devnull), {"NCCL_NET": network} | own)
    for one in (*harmful_settings(machine, (DEBUG, TUNING)), *_gid_index(log)):
        if one.severity is not Severity.INFO:
            yield replace(one, value=f"{one.read}={one.value}")
        elif not one.read:  # chosen by a provider
            yield one
    if shown:
        yield info(shown, "for reference")


def _gid_index(log: Log) -> Iterator[Finding]:
    """Yield a warning about a fixed GID index: it may be another kind of address on other machines."""
    name = "NCCL_IB_GID_INDEX"
    value = log.environment.get(name, "-1")
    over_infiniband = any(device.endswith("/IB") for device in log.names("IB"))
    finds = log.version is not None and log.version >= (2, 21)
    if value == "-1" or over_infiniband or not (value == "0" or finds):
        return
    expected = "unset: NCCL 2.21 and later find it" + ("; 0 is a link-local address of RoCE v1" if value == "0" else "")
    remedy = f"show_gids, then export {name} to that of RoCE v2 with the port's IPv4 address"
    yield warning(value, expected, f"unset {name}" if finds else remedy, "medium", name)
