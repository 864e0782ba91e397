"""What a log of NCCL means: which transports, adapters and algorithms were used, what that costs, what to do."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from commopt.doctor.checks.gdr import LOAD
from commopt.doctor.checks.settings import leftovers
from commopt.doctor.facts.machine import Machine, version_text
from commopt.doctor.finding import Check, Finding, Severity, in_order
from commopt.doctor.log.reader import HOW, TCP, Log
from commopt.doctor.log.warnings import explain
from commopt.doctor.provider import provider_profile

VERSION = Check("log-version", "NCCL")
NETWORK = Check("log-network", "Transport between nodes")
GDR = Check("log-gdr", "GPUDirect RDMA in use")
INSIDE = Check("log-inside", "Transport inside the nodes")
ADAPTERS = Check("log-adapters", "Adapters in use")
PLAN = Check("log-plan", "NCCL's plan")
CHOICES = Check("log-algorithms", "Algorithms")
ENVIRONMENT = Check("log-environment", "NCCL's settings")

# Plugins for InfiniBand and RoCE: NCCL's own, NVIDIA's under its names, Google's.
INFINIBAND = ("IB", "NCCL RDMA", "gIB", "SHARP", "UCX")


def examine(log: Log) -> list[Finding]:
    """Say what the log tells, worst first."""
    found = [
        *explain(log.source, log.warnings, log.hints),
        *_network(log),
        *_gdr(log),
        *_inside(log),
        *_adapters(log),
        *_plan(log),
        *_choices(log),
        *_environment(log),
        *_version(log),
    ]
    return in_order(found)


def _version(log: Log) -> list[Finding]:
    if log.version is None:
        return [VERSION.unread(log.source, "no line with NCCL's version", HOW)]
    shown = f"{version_text(log.version)}, {log.ranks or 'unknown number of'} ranks"
    shown += f" on {log.machines} node(s)" if log.machines else ""
    return [VERSION.info(log.source, shown, "for reference")]


def _network(log: Log) -> list[Finding]:
    used = log.network_channels
    names = ", ".join(f"{name} {count} times" for name, count in sorted(used.items()))
    if used and log.all_over_network:
        off = "NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1"
        expected = "unset: ranks of one machine talk over the network, if there are several"
        remedy = "unset NCCL_P2P_DISABLE NCCL_SHM_DISABLE"
        inside = NETWORK.error(log.source, f"{names}; {off}", expected, remedy)
        return [inside] if log.machines == 1 else [inside, *_between(log, names)]
    return _between(log, names)


def _between(log: Log, names: str) -> list[Finding]:
    used = log.network_channels
    if not used:
        return [_no_network(log)]
    if log.machines == 1:
        expected = "P2P or shared memory: one node needs no network"
        remedy = "unset NCCL_P2P_DISABLE NCCL_SHM_DISABLE; ranks in different containers: --ipc=host on all"
        return [NETWORK.warning(log.source, f"{names}, inside one node", expected, remedy, "medium")]
    if any(name.endswith("NET/Socket") for name in used):
        return [_sockets(log, names)]
    if log.provider in ("tcp", "sockets", "udp", "net"):
        expected = "efa: libfabric goes over TCP although its plugin is there"
        remedy = "fi_info -p efa; export FI_PROVIDER=efa; container: --device=/dev/infiniband"
        return [NETWORK.error(log.source, f"{names}; provider {log.provider}", expected, remedy)]
    if all(name.split("/")[1] in TCP for name in used):
        return [NETWORK.info(log.source, names, "TCP, as fast as the provider's plugin makes it")]
    return [NETWORK.info(log.source, names, "the fast network")]


def _no_network(log: Log) -> Finding:
    if "P2P/MNNVL" in {name.removesuffix("/CE").removesuffix("/read") for name in log.channels}:
        return NETWORK.ok(log.source, "NVLink between the nodes (MNNVL)", "the fast network")
    if log.machines == 1 or (log.channels and log.machines is None):
        return NETWORK.ok(log.source, "no connection over a network", "one node")
    if log.mnnvl:
        return NETWORK.info(
            log.source, "NVLink between the nodes (MNNVL)", "the fast network; no connection in this log"
        )
    network = ", ".join(log.networks)
    if network == "Socket" and _why_sockets(log) is not None:
        return _sockets(log, "Using network Socket")
    why = "no line `Channel ... via NET`: " + (f"only `Using network {network}`" if network else "not in this log")
    return NETWORK.unread(log.source, why, HOW)


def _sockets(log: Log, names: str) -> Finding:
    cost = (
        "RDMA where the machine has it: TCP copies every byte through both CPUs, and often reaches half the line rate"
    )
    because = _why_sockets(log)
    if because is None:
        remedy = "no RDMA adapter? then: NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4, and compress between nodes"
        if (log.sockets or 1) > 1:
            names, remedy = f"{names}, {log.sockets} sockets each", "no RDMA adapter? then: compress between nodes"
        return NETWORK.warning(log.source, names, cost, remedy, "medium")
    why, remedy = because
    if log.no_verbs and "libibverbs" in why:  # normal where there is no adapter, which the log does not tell
        return NETWORK.warning(log.source, f"{names}; {why}", cost, remedy, "medium")
    return NETWORK.error(log.source, f"{names}; {why}", cost, remedy)


def _why_sockets(log: Log) -> tuple[str, str] | None:
    """Return why NCCL fell back to TCP although there may be RDMA, and the remedy; None when the log has no reason."""
    if log.environment.get("NCCL_IB_DISABLE", "0") not in ("0", "0."):
        return "NCCL_IB_DISABLE is set", "unset NCCL_IB_DISABLE"
    if log.environment.get("NCCL_NET", "").lower() == "socket":
        return "NCCL_NET is Socket", "unset NCCL_NET"
    if log.plugin_error is not None:
        return (
            f"the network plugin does not load: {log.plugin_error}",
            "ldd libnccl-net.so in the container; a plugin that was built for this image and this libfabric",
        )
    if log.no_verbs:
        return (
            "libibverbs is not installed",
            "apt-get install libibverbs1 ibverbs-providers, where ls /sys/class/infiniband lists adapters",
        )
    if log.no_ib_device and "NCCL_IB_HCA" in log.environment:
        return f"NCCL_IB_HCA={log.environment['NCCL_IB_HCA']} fits no adapter", "unset NCCL_IB_HCA; ibstat"
    if log.devices.get("IB"):
        return f"RDMA adapters are there ({', '.join(log.devices['IB'])})", "python -m commopt doctor, on that machine"
    return None


def _gdr(log: Log) -> list[Finding]:
    rdma = sum(log.ends.values())
    direct = sum(count for (_, is_direct), count in log.ends.items() if is_direct)
    if not rdma:
        return _gdr_foretold(log)
    if direct == rdma:
        return [GDR.ok(log.source, f"all {rdma} times", "on all")]
    reasons = [text for text, _ in log.no_gdr.most_common(3)]
    value = f"{direct} of {rdma} times" + (f"; disabled for {'; '.join(reasons)}" if reasons else "")
    if log.no_gdr_gpu is not None:
        return [GDR.info(log.source, value, f"{log.no_gdr_gpu} has no GPUDirect RDMA")]
    expected = (
        "on all: every message is copied through CPU memory otherwise, which can halve the bandwidth "
        "(GeForce cards and GB10 have none)"
    )
    if direct and not log.ends["send", True] and not log.ends["receive", False]:
        shown = f"{value}: on receiving only"
        usual = "on sending too; NCCL does not read GPU memory directly by default where GPUs have no NVLink"
        return [GDR.info(log.source, shown, usual, "try: export NCCL_NET_GDR_READ=1", "medium")]
    plugins = {name.split("/")[1] for name in log.network_channels} - {*TCP}
    if not any(name.startswith(INFINIBAND) for name in plugins):
        remedy = "the plugin's own lines in the log: does this kind of machine have it?"
        if any("Libfabric" in name for name in plugins) and log.provider in (None, "efa"):
            remedy = "on AWS P4d, P5 and later: export FI_EFA_USE_DEVICE_RDMA=1; other types have no GPUDirect RDMA"
        return [GDR.warning(log.source, value, expected, remedy, "medium")]
    kind = GDR.warning if direct else GDR.error
    return [kind(log.source, value, expected, _mend_gdr(log, reasons))]


def _gdr_foretold(log: Log) -> list[Finding]:
    """Before the first connection: adapters without it are named; pairs that are too far apart need not be used."""
    without = [text for text in log.no_gdr if "distance" not in text]
    only_tcp = bool(log.networks) and set(log.networks) <= {*TCP}
    if not without or log.machines == 1 or only_tcp or log.no_gdr_gpu is not None:
        return []
    value = f"disabled for {'; '.join(without[:3])}"
    expected = "enabled: messages between nodes are copied through CPU memory otherwise"
    return [GDR.warning(log.source, value, expected, _mend_gdr(log, without), "medium")]


def _mend_gdr(log: Log, reasons: list[str]) -> str:
    for name in ("NCCL_NET_GDR_LEVEL", "NCCL_IB_GDR_LEVEL"):
        if log.environment.get(name, "").upper() in ("LOC", "0"):
            return f"unset {name}"
    if any("distance" in reason for reason in reasons):
        return "a nearer adapter (NCCL_IB_HCA), or try: export NCCL_NET_GDR_LEVEL=PHB (or SYS)"
    if any("no module" in reason for reason in reasons):
        return LOAD
    return f"{LOAD}; then: python -m commopt doctor (ACS, NCCL_NET_GDR_LEVEL)"


def _inside(log: Log) -> list[Finding]:
    inside = {name: count for name, count in log.channels.items() if name not in log.network_channels}
    shown = ", ".join(f"{name} {count} times" for name, count in sorted(inside.items()))
    shared = sum(count for name, count in inside.items() if name.startswith("SHM"))
    if not inside:
        return []
    for name, off in (("NCCL_P2P_DISABLE", ("1",)), ("NCCL_P2P_LEVEL", ("LOC", "0"))):
        value = log.environment.get(name, "")
        if shared and value.upper() in off:
            return [INSIDE.error(log.source, f"{shown}; {name}={value}", "peer access between GPUs", f"unset {name}")]
    if shared and log.no_gdr_gpu == "GeForce":
        return [INSIDE.info(log.source, shown, "GeForce cards have no peer access, except those on an NVLink bridge")]
    if shared:
        expected = "P2P: through shared memory every byte is written and read once more by way of the CPU"
        remedy = "nvidia-smi topo -p2p r; nvidia-smi topo -m; check ACS and IOMMU (GeForce cards have no peer access)"
        kind = INSIDE.warning if log.no_peer or shared == sum(inside.values()) else INSIDE.info
        return [kind(log.source, shown, expected, remedy, "medium")]
    if "P2P/indirect" in inside:
        expected = "P2P: an indirect connection goes through a third GPU"
        return [INSIDE.info(log.source, shown, expected, "nvidia-smi topo -m", "medium")]
    return [INSIDE.info(log.source, shown, "P2P")]


def _adapters(log: Log) -> list[Finding]:
    listed = {name: devices for name, devices in log.devices.items() if devices}
    if not listed and not log.adapters and log.provider is None:
        return []
    shown = "; ".join(f"{name}: {', '.join(devices)}" for name, devices in listed.items()) or "not listed"
    if log.adapters:
        shown += "; used: " + ", ".join(f"{name} x{count}" for name, count in sorted(log.adapters.items()))
    shown += f"; libfabric over {log.provider}" if log.provider else ""
    shown += f", {log.provider_nics} adapters" if log.provider_nics else ""
    idle = [
        "/".join(names)
        for plugin, places in log.places.items()
        for place, names in places.items()
        if any(name.startswith(f"{plugin} ") for name in log.adapters)
        and f"{plugin} {place}" not in log.adapters
        and not log.merged
    ]
    kinds = {
        name.split("/")[1].split("+")[0]
        for plugin, places in log.places.items()
        for place, names in places.items()
        for name in names
        if f"{plugin} {place}" in log.adapters and "/" in name
    }
    if len(kinds) > 1:
        expected = "one kind of network: NCCL cannot connect InfiniBand with Ethernet"
        remedy = "export NCCL_IB_HCA to the adapters of one kind: ibstat | grep -e CA -e layer"
        return [ADAPTERS.warning(log.source, shown, expected, remedy, "medium")]
    bootstrap = ", ".join(log.bootstrap)
    shown += f"; first contact over {bootstrap}" if bootstrap else ""
    if idle:
        expected = f"all of them; no connection uses {', '.join(idle)}"
        choice = "NCCL_SOCKET_IFNAME" if set(listed) <= {*TCP} else "NCCL_IB_HCA"
        remedy = f"normal with few ranks; otherwise export {choice} to the wanted list"
        return [ADAPTERS.info(log.source, shown, expected, remedy, "low")]
    return [ADAPTERS.info(log.source, shown, "all fast adapters")]


def _plan(log: Log) -> list[Finding]:
    found = []
    if log.nvls:
        found.append(PLAN.info(log.source, f"NVLS: {log.nvls} channels", "NVSwitch adds in the network"))
    for plan in log.patterns:
        if plan.name != "ring":
            continue
        shown = f"ring: {plan.channels} channels, {plan.channels * plan.intra_gbs:g} GB/s inside a node"
        shown += f", {plan.channels * plan.inter_gbs:g} GB/s between nodes, paths {plan.intra} and {plan.inter}"
        rdma = any(not name.startswith("NET/Socket") for name in log.network_channels)
        if rdma and plan.inter in ("PHB", "SYS"):
            expected = "PIX or PXB between GPU and adapter: this path goes through a CPU"
            remedy = "python -m topology; NCCL_TOPO_FILE from the provider in a virtual machine"
            found.append(PLAN.warning(log.source, shown, expected, remedy, "medium"))
        else:
            found.append(PLAN.info(log.source, shown, "what NCCL believes the machine can do"))
    return found


def _choices(log: Log) -> list[Finding]:
    if not log.choices:
        return [CHOICES.unread(log.source, "no line `Bytes -> Algo`: add TUNING to NCCL_DEBUG_SUBSYS", HOW)]
    shown = "; ".join(
        f"{what}: {algorithm}/{protocol} {count} times, up to {log.largest[what, algorithm, protocol]} bytes"
        for (what, algorithm, protocol), count in log.choices.most_common(6)
    )
    slow = [key for key in log.choices if key[2].upper() == "LL" and log.largest[key] >= 4 << 20]
    if slow:
        expected = "Simple or LL128 for messages of megabytes: LL sends a flag with every 4 bytes, half the bandwidth"
        remedy = "unset NCCL_PROTO"
        return [CHOICES.warning(log.source, shown, expected, remedy, "medium")]
    return [CHOICES.info(log.source, shown, "chosen by NCCL for each size")]


def _environment(log: Log) -> list[Finding]:
    """What was set, by the same rules as in a process's own environment."""
    chosen = {
        name: value
        for name, value in log.environment.items()
        if name not in log.by_plugin and not name.startswith("NCCL_DEBUG")
    }
    harmful = [
        replace(
            finding,
            check=ENVIRONMENT.id,
            title=ENVIRONMENT.title,
            read=log.source,
            value=f"{finding.read}={finding.value}",
        )
        for finding in [*leftovers(Machine(Path(os.devnull), chosen)), *_gid_index(log)]
        if finding.severity in (Severity.ERROR, Severity.WARNING)
    ]
    shown = ", ".join(f"{name}={value}" for name, value in sorted(log.environment.items()))
    networks = [{"NCCL_NET": network} for network in log.networks] or [{}]
    provider = next(filter(None, (provider_profile(network | log.environment) for network in networks)), None)
    if harmful and provider is not None:
        expected = f"these look like the settings of {provider}, made for its machines: leave them, unset only your own"
        return [ENVIRONMENT.info(log.source, shown, expected, confidence="medium")]
    return harmful + ([ENVIRONMENT.info(log.source, shown, "for reference")] if shown else [])


def _gid_index(log: Log) -> list[Finding]:
    """A number that is right on one machine is another kind of address on the next, and NCCL finds the right one."""
    name = "NCCL_IB_GID_INDEX"
    value = log.environment.get(name, "-1")
    over_infiniband = any(device.endswith("/IB") for device in log.devices.get("IB", []))
    finds = log.version is not None and log.version >= (2, 21)
    if value == "-1" or over_infiniband or not (value == "0" or finds):
        return []
    expected = "unset: NCCL 2.21 and later find it" + ("; 0 is a link-local address of RoCE v1" if value == "0" else "")
    remedy = (
        f"unset {name}" if finds else f"show_gids, then export {name} to that of RoCE v2 with the port's IPv4 address"
    )
    return [ENVIRONMENT.warning(name, value, expected, remedy, "medium")]
