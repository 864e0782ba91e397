"""What a log of NCCL means: which transports, adapters and algorithms were used, what that costs, what to do."""

from __future__ import annotations

from commopt.doctor.checks.gdr import LOAD
from commopt.doctor.facts.machine import version_text
from commopt.doctor.finding import Check, Finding, in_order
from commopt.doctor.log.reader import HOW, Log

VERSION = Check("log-version", "NCCL")
FAILED = Check("log-warnings", "Warnings of NCCL")
NETWORK = Check("log-network", "Transport between nodes")
GDR = Check("log-gdr", "GPUDirect RDMA in use")
INSIDE = Check("log-inside", "Transport inside the nodes")
ADAPTERS = Check("log-adapters", "Adapters in use")
PLAN = Check("log-plan", "NCCL's plan")
CHOICES = Check("log-algorithms", "Algorithms")
ENVIRONMENT = Check("log-environment", "NCCL's settings")

# A part of the warning, and what to do about it.
KNOWN_WARNINGS = (
    ("ibv_reg_mr", "ulimit -l unlimited (limits.conf; docker run --ulimit memlock=-1)"),
    ("ibv_create_qp", "ulimit -l unlimited; ibstat"),
    ("ibv_modify_qp", "NCCL_IB_GID_INDEX and NCCL_IB_HCA: unset, or the same network on both ends; ibstat"),
    ("Got completion", "cable, switch or flow control: python -m commopt doctor on both nodes, during the job"),
    ("shared memory", "docker run --shm-size=8g ... (or --ipc=host)"),
    ("No space left", "docker run --shm-size=8g ... (or --ipc=host)"),
    ("Duplicate GPU", "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))"),
    ("no socket interface", "export NCCL_SOCKET_IFNAME to an interface that exists and has an address"),
    (
        "Connection refused",
        "the peer's process is gone, or a firewall is between: look for the first error of all ranks",
    ),
    ("Connection closed", "the peer's process is gone: look for the first error of all ranks"),
    ("Mismatched NCCL version", "install the same torch on every node"),
    ("libnccl-net", "LD_LIBRARY_PATH of the provider's plugin, or: unset NCCL_NET_PLUGIN"),
)


def examine(log: Log) -> list[Finding]:
    """Say what the log tells, worst first."""
    found = [
        *_failed(log),
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
    shown += f" on {log.nodes} node(s)" if log.nodes else ""
    return [VERSION.info(log.source, shown, "for reference")]


def _failed(log: Log) -> list[Finding]:
    found = []
    for text, count in log.warnings.most_common(8):
        remedy = next((what for part, what in KNOWN_WARNINGS if part.lower() in text.lower()), None)
        shown = text[:160] + (f" ({count} times)" if count > 1 else "")
        if remedy is not None:
            found.append(FAILED.error(log.source, shown, "no warning", remedy, "medium"))
        else:
            found.append(FAILED.warning(log.source, shown, "no warning", "read the lines before it", "low"))
    return found


def _network(log: Log) -> list[Finding]:
    used = log.network_channels
    sockets = sum(count for name, count in used.items() if name.startswith("NET/Socket"))
    names = ", ".join(f"{name} {count} times" for name, count in sorted(used.items()))
    if not used:
        if log.nodes == 1 or (log.channels and log.nodes is None):
            return [NETWORK.ok(log.source, "no connection over a network", "one node")]
        network = ", ".join(log.networks)
        if network == "Socket" and _why_sockets(log) is not None:
            return [_sockets(log, "Using network Socket")]
        why = "no line `Channel ... via`: " + (f"only `Using network {network}`" if network else "not in this log")
        return [NETWORK.unread(log.source, why, HOW)]
    if sockets:
        return [_sockets(log, names)]
    return [NETWORK.info(log.source, names, "the fast network")]


def _sockets(log: Log, names: str) -> Finding:
    cost = (
        "RDMA where the machine has it: TCP copies every byte through both CPUs, and often reaches half the line rate"
    )
    because = _why_sockets(log)
    if because is None:
        remedy = "no RDMA adapter? then: NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4, and compress between nodes"
        return NETWORK.warning(log.source, names, cost, remedy, "medium")
    why, remedy = because
    return NETWORK.error(log.source, f"{names}; {why}", cost, remedy)


def _why_sockets(log: Log) -> tuple[str, str] | None:
    """Return why NCCL fell back to TCP although there may be RDMA, and the remedy; None when the log has no reason."""
    if log.environment.get("NCCL_IB_DISABLE", "0") not in ("0", "0."):
        return "NCCL_IB_DISABLE is set", "unset NCCL_IB_DISABLE"
    if log.environment.get("NCCL_NET", "").lower() == "socket":
        return "NCCL_NET is Socket", "unset NCCL_NET"
    if log.no_verbs:
        return "libibverbs is not installed", "apt-get install libibverbs1 ibverbs-providers, in the container"
    if log.no_ib_device and "NCCL_IB_HCA" in log.environment:
        return f"NCCL_IB_HCA={log.environment['NCCL_IB_HCA']} fits no adapter", "unset NCCL_IB_HCA; ibstat"
    if log.devices.get("IB"):
        return f"RDMA adapters are there ({', '.join(log.devices['IB'])})", "python -m commopt doctor, on that machine"
    return None


def _gdr(log: Log) -> list[Finding]:
    direct = sum(count for name, count in log.network_channels.items() if name.endswith("/GDRDMA"))
    rdma = sum(count for name, count in log.network_channels.items() if not name.startswith("NET/Socket"))
    if not rdma:
        return []
    if direct == rdma:
        return [GDR.ok(log.source, f"all {rdma} times", "on all")]
    reasons = [text for text, _ in log.no_gdr.most_common(3)]
    value = f"{direct} of {rdma} times" + (f"; disabled for {'; '.join(reasons)}" if reasons else "")
    expected = "on all: every message is copied through CPU memory otherwise, which can halve the bandwidth"
    remedy = LOAD
    if any("distance" in reason for reason in reasons):
        remedy = "a nearer adapter (NCCL_IB_HCA), or try: export NCCL_NET_GDR_LEVEL=PHB (or SYS)"
    elif not any("no module" in reason for reason in reasons):
        remedy += "; then: python -m commopt doctor (ACS, NCCL_NET_GDR_LEVEL)"
    kind = GDR.warning if direct else GDR.error
    return [kind(log.source, value, expected, remedy)]


def _inside(log: Log) -> list[Finding]:
    inside = {name: count for name, count in log.channels.items() if not name.startswith("NET/")}
    shown = ", ".join(f"{name} {count} times" for name, count in sorted(inside.items()))
    shared = sum(count for name, count in inside.items() if name.startswith("SHM"))
    if not inside:
        return []
    for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"):
        value = log.environment.get(name, "0")
        if shared and value != "0":
            return [INSIDE.error(log.source, f"{shown}; {name}={value}", "peer access between GPUs", f"unset {name}")]
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
    if not listed and not log.adapters:
        return []
    shown = "; ".join(f"{name}: {', '.join(devices)}" for name, devices in listed.items()) or "not listed"
    if log.adapters:
        shown += "; used: " + ", ".join(f"{name} x{count}" for name, count in sorted(log.adapters.items()))
    idle = [
        f"{devices[place]}"
        for plugin, devices in listed.items()
        for place in range(len(devices))
        if log.adapters
        and any(name.startswith(f"{plugin} ") for name in log.adapters)
        and f"{plugin} {place}" not in log.adapters
    ]
    bootstrap = ", ".join(log.bootstrap)
    shown += f"; first contact over {bootstrap}" if bootstrap else ""
    if idle:
        expected = f"all of them; no connection uses {', '.join(idle)}"
        remedy = "normal with few ranks; otherwise export NCCL_IB_HCA to the wanted list, or NCCL_CROSS_NIC=1"
        return [ADAPTERS.info(log.source, shown, expected, remedy, "low")]
    return [ADAPTERS.info(log.source, shown, "all fast adapters")]


def _plan(log: Log) -> list[Finding]:
    found = []
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
    forced = [
        name for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_MAX_NCHANNELS") if name in log.environment
    ]
    shown = ", ".join(f"{name}={value}" for name, value in sorted(log.environment.items()))
    if forced:
        expected = "unset, unless measured: one choice for all sizes is slow for some of them"
        return [ENVIRONMENT.warning(log.source, shown, expected, f"unset {' '.join(forced)}", "medium")]
    return [ENVIRONMENT.info(log.source, shown, "only what was measured to help")] if shown else []
