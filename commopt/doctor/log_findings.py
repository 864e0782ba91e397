"""What a log of NCCL means: which transports, adapters and algorithms were used, what that costs, what to do."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from commopt.doctor.finding import Finding, Severity, check, error, in_order, info, ok, unread, warning
from commopt.doctor.gpudirect import LOAD
from commopt.doctor.log_causes import explain
from commopt.doctor.log_reader import HOW, TCP, Log
from commopt.doctor.machine import Machine, version_text
from commopt.doctor.settings import DEBUG, TUNING, harmful, provider_profile

# Plugins for InfiniBand and RoCE: NCCL's own, NVIDIA's under its names, Google's.
INFINIBAND = ("IB", "NCCL RDMA", "gIB", "SHARP", "UCX")
UNSET_BOTH = "unset NCCL_P2P_DISABLE NCCL_SHM_DISABLE"


def examine(log: Log) -> list[Finding]:
    """Say what the log tells, worst first."""
    checks = (causes, network, gpudirect, inside, adapters, algorithms, environment, version)
    return in_order(replace(finding, read=log.source) for look in checks for finding in look(log))


def _times(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {count} times" for name, count in sorted(counts))


@check("log-warnings", "Warnings of NCCL", "log")
def causes(log: Log) -> Iterable[Finding]:
    """Explain the warnings, causes first."""
    return explain(log.warnings, log.hints)


@check("log-version", "NCCL", "log")
def version(log: Log) -> Iterator[Finding]:
    """Name the version and the size of the job."""
    if log.version is None:
        yield unread("no line with NCCL's version", HOW)
        return
    nodes = f" on {log.machines} node(s)" if log.machines else ""
    yield info(f"{version_text(log.version)}, {log.ranks or 'unknown number of'} ranks{nodes}", "for reference")


@check("log-network", "Transport between nodes", "log")
def network(log: Log) -> Iterator[Finding]:
    """Say what carried the data between nodes, and why it was TCP if it was."""
    used, names = log.network_channels, _times(log.network_channels.items())
    if used and log.all_over_network:
        expected = "unset: ranks of one machine talk over the network, if there are several"
        yield error(f"{names}; NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1", expected, UNSET_BOTH)
        if log.machines == 1:
            return
    if not used:
        yield from _no_network(log)
    elif log.machines == 1:
        remedy = f"{UNSET_BOTH}; ranks in different containers: --ipc=host on all"
        expected = "P2P or shared memory: one node needs no network"
        yield warning(f"{names}, inside one node", expected, remedy, "medium")
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


def _no_network(log: Log) -> Iterator[Finding]:
    mnnvl, names = "NVLink between the nodes (MNNVL)", ", ".join(log.networks)
    if any(name.startswith("P2P/MNNVL") for name in log.channels):
        yield ok(mnnvl, "the fast network")
    elif log.machines == 1 or (log.channels and log.machines is None):
        yield ok("no connection over a network", "one node")
    elif log.mnnvl:
        yield info(mnnvl, "the fast network; no connection in this log")
    elif names == "Socket" and _why_sockets(log) is not None:
        yield _sockets(log, "Using network Socket")
    else:
        why = f"only `Using network {names}`" if names else "not in this log"
        yield unread(f"no line `Channel ... via NET`: {why}", HOW)


def _sockets(log: Log, names: str) -> Finding:
    cost = "RDMA where there is any: TCP copies every byte through both CPUs, often at half the line rate"
    because = _why_sockets(log)
    if because is None:
        remedy = "no RDMA adapter? then: NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4, and compress between nodes"
        if (log.sockets or 1) > 1:
            names, remedy = f"{names}, {log.sockets} sockets each", "no RDMA adapter? then: compress between nodes"
        return warning(names, cost, remedy, "medium")
    why, remedy = because
    if "libibverbs" in why:  # normal where there is no adapter, which the log does not tell
        return warning(f"{names}; {why}", cost, remedy, "medium")
    return error(f"{names}; {why}", cost, remedy)


def _why_sockets(log: Log) -> tuple[str, str] | None:
    """Return why NCCL fell back to TCP although there may be RDMA, and the remedy; None when the log has no reason."""
    hca, names = log.environment.get("NCCL_IB_HCA"), ", ".join(log.names("IB"))
    install = "apt-get install libibverbs1 ibverbs-providers, where ls /sys/class/infiniband lists adapters"
    rebuild = "ldd libnccl-net.so in the container; a plugin that was built for this image and this libfabric"
    disabled = log.environment.get("NCCL_IB_DISABLE", "0") not in ("0", "0.")
    reasons = (
        (disabled, "NCCL_IB_DISABLE is set", "unset NCCL_IB_DISABLE"),
        (log.environment.get("NCCL_NET", "").lower() == "socket", "NCCL_NET is Socket", "unset NCCL_NET"),
        (log.plugin_error, f"the network plugin does not load: {log.plugin_error}", rebuild),
        (log.no_verbs, "libibverbs is not installed", install),
        (log.no_ib_device and hca, f"NCCL_IB_HCA={hca} fits no adapter", "unset NCCL_IB_HCA; ibstat"),
        (names, f"RDMA adapters are there ({names})", "python -m commopt doctor, on that machine"),
    )
    return next(((why, remedy) for holds, why, remedy in reasons if holds), None)


@check("log-gdr", "GPUDirect RDMA in use", "log")
def gpudirect(log: Log) -> Iterator[Finding]:
    """Count the connections over RDMA that went directly to GPU memory."""
    rdma = sum(log.ends.values())
    direct = sum(count for (_, is_direct), count in log.ends.items() if is_direct)
    if not rdma:
        yield from _gpudirect_foretold(log)
        return
    reasons = [text for text, _ in log.no_gdr.most_common(3)]
    value = f"{direct} of {rdma} times" + (f"; disabled for {'; '.join(reasons)}" if reasons else "")
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


def _gpudirect_foretold(log: Log) -> Iterator[Finding]:
    """Before the first connection: adapters without it are named; pairs that are too far apart need not be used."""
    without = [text for text in log.no_gdr if "distance" not in text]
    only_tcp = bool(log.networks) and set(log.networks) <= {*TCP}
    if without and log.machines != 1 and not only_tcp and log.no_gdr_gpu is None:
        expected = "enabled: messages between nodes are copied through CPU memory otherwise"
        yield warning(f"disabled for {'; '.join(without[:3])}", expected, _fix_gpudirect(log, without), "medium")


def _fix_gpudirect(log: Log, reasons: list[str]) -> str:
    for name in ("NCCL_NET_GDR_LEVEL", "NCCL_IB_GDR_LEVEL"):
        if log.environment.get(name, "").upper() in ("LOC", "0"):
            return f"unset {name}"
    if any("distance" in reason for reason in reasons):
        return "a nearer adapter (NCCL_IB_HCA), or try: export NCCL_NET_GDR_LEVEL=PHB (or SYS)"
    return LOAD if any("no module" in reason for reason in reasons) else f"{LOAD}; then: python -m commopt doctor"


@check("log-inside", "Transport inside the nodes", "log")
def inside(log: Log) -> Iterator[Finding]:
    """Say how the GPUs of a node exchanged data."""
    used = {name: count for name, count in log.channels.items() if name not in log.network_channels}
    shown, shared = _times(used.items()), sum(count for name, count in used.items() if name.startswith("SHM"))
    off = [
        f"{name}={value}"
        for name, words in (("NCCL_P2P_DISABLE", ("1",)), ("NCCL_P2P_LEVEL", ("LOC", "0")))
        if (value := log.environment.get(name, "")).upper() in words
    ]
    if shared and off:
        yield error(f"{shown}; {off[0]}", "peer access between GPUs", f"unset {off[0].split('=')[0]}")
    elif shared and log.no_gdr_gpu == "GeForce":
        yield info(shown, "GeForce cards have no peer access, except those on an NVLink bridge")
    elif shared:
        expected = "P2P: through shared memory every byte is written and read once more by way of the CPU"
        remedy = "nvidia-smi topo -p2p r; nvidia-smi topo -m; check ACS and IOMMU (GeForce cards have no peer access)"
        kind = warning if log.no_peer or shared == sum(used.values()) else info
        yield kind(shown, expected, remedy, "medium")
    elif "P2P/indirect" in used:
        expected = "P2P: an indirect connection goes through a third GPU"
        yield info(shown, expected, "nvidia-smi topo -m", "medium")
    elif used:
        yield info(shown, "P2P")


@check("log-adapters", "Adapters in use", "log")
def adapters(log: Log) -> Iterator[Finding]:
    """Compare the adapters that NCCL found with those that its connections use."""
    listed = {plugin: names for plugin in log.devices if (names := log.names(plugin))}
    if not listed and not log.adapters and log.provider is None:
        return
    shown = "; ".join(f"{plugin}: {', '.join(names)}" for plugin, names in listed.items()) or "not listed"
    if log.adapters:
        shown += "; used: " + ", ".join(f"{name} x{count}" for name, count in sorted(log.adapters.items()))
    if log.provider:
        shown += f"; libfabric over {log.provider}" + (f", {log.provider_nics} adapters" if log.provider_nics else "")
    if log.bootstrap:
        shown += f"; first contact over {', '.join(log.bootstrap)}"
    plugins = {name.rsplit(" ", 1)[0] for name in log.adapters}
    places = [(f"{plugin} {place}", names) for plugin, of in log.devices.items() for place, names in of.items()]
    idle = [
        "/".join(names) for place, names in places if place.rsplit(" ", 1)[0] in plugins and place not in log.adapters
    ]
    kinds = {
        name.split("/")[1].split("+")[0]
        for place, names in places
        for name in names
        if place in log.adapters and "/" in name
    }
    if len(kinds) > 1:
        remedy = "export NCCL_IB_HCA to the adapters of one kind: ibstat | grep -e CA -e layer"
        yield warning(shown, "one kind of network: NCCL cannot connect InfiniBand with Ethernet", remedy, "medium")
    elif idle and not log.merged:
        variable = "NCCL_SOCKET_IFNAME" if set(listed) <= {*TCP} else "NCCL_IB_HCA"
        remedy = f"normal with few ranks; otherwise export {variable} to the wanted list"
        yield info(shown, f"all of them; no connection uses {', '.join(idle)}", remedy, "low")
    else:
        yield info(shown, "all fast adapters")


@check("log-algorithms", "Algorithms", "log")
def algorithms(log: Log) -> Iterator[Finding]:
    """Show which algorithm and protocol NCCL chose, and how often."""
    if not log.choices:
        yield unread("no line `Bytes -> Algo`: add TUNING to NCCL_DEBUG_SUBSYS", HOW)
        return
    shown = "; ".join(
        f"{what}: {algorithm}/{protocol} {count} times, up to {log.largest[what, algorithm, protocol]} bytes"
        for (what, algorithm, protocol), count in log.choices.most_common(6)
    )
    if any(key[2].upper() == "LL" and log.largest[key] >= 4 << 20 for key in log.choices):
        expected = "Simple or LL128 for messages of megabytes: LL sends a flag with every 4 bytes, half the bandwidth"
        yield warning(shown, expected, "unset NCCL_PROTO", "medium")
    else:
        yield info(shown, "chosen by NCCL for each size")


@check("log-environment", "NCCL's settings", "log")
def environment(log: Log) -> Iterator[Finding]:
    """Judge what was set by the same rules as a process's own environment."""
    shown = ", ".join(f"{name}={value}" for name, value in sorted(log.environment.items()))
    chosen = {
        name: value
        for name, value in log.environment.items()
        if name not in log.by_plugin and not name.startswith("NCCL_DEBUG")
    }
    found = [*harmful(Machine(Path(os.devnull), chosen), (DEBUG, TUNING)), *_gid_index(log)]
    alarms = [one for one in found if one.severity in (Severity.ERROR, Severity.WARNING)]
    networks = [{"NCCL_NET": network} for network in log.networks] or [{}]
    provider = next(filter(None, (provider_profile(network | log.environment) for network in networks)), None)
    if alarms and provider is not None:
        expected = f"these look like the settings of {provider}, made for its machines: leave them, unset only your own"
        yield info(shown, expected, None, "medium")
        return
    yield from (replace(one, value=f"{one.read}={one.value}") for one in alarms)
    if shown:
        yield info(shown, "for reference")


def _gid_index(log: Log) -> Iterator[Finding]:
    """A number that is right on one machine is another kind of address on the next, and NCCL finds the right one."""
    name = "NCCL_IB_GID_INDEX"
    value = log.environment.get(name, "-1")
    over_infiniband = any(device.endswith("/IB") for device in log.names("IB"))
    finds = log.version is not None and log.version >= (2, 21)
    if value == "-1" or over_infiniband or not (value == "0" or finds):
        return
    expected = "unset: NCCL 2.21 and later find it" + ("; 0 is a link-local address of RoCE v1" if value == "0" else "")
    remedy = f"show_gids, then export {name} to that of RoCE v2 with the port's IPv4 address"
    yield warning(value, expected, f"unset {name}" if finds else remedy, "medium", name)
