# SPDX-License-Identifier: Apache-2.0
"""Settings and versions: variables that cost speed or stop NCCL, configuration files, a topology file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from commopt.doctor.finding import Finding, Severity, Unread, check, error, info, ok, warning
from commopt.doctor.machine import Machine, before, version_text
from commopt.doctor.network import active_ports, ports, switches_hidden
from topology.kernel_files import text
from topology.machine import VIRTUAL_TOPOLOGY

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
DEBUG, TUNING, SWITCH = "debug", "tuning", "switch"


def is_amazon(machine: Machine) -> bool:
    """Return whether all active RDMA ports are Amazon's (EFA)."""
    found = active_ports(machine)
    return bool(found) and all(port.elastic for port in found)


def needs_gpudirect(machine: Machine) -> bool:
    """Return whether there are GPUs and RDMA ports, between which data could move directly."""
    return bool(machine.hardware.gpus) and any(not port.elastic for port in active_ports(machine))


def nvlink_between_nodes(machine: Machine) -> bool:
    """Return whether a GPU's NVLink fabric spans machines."""
    return any(gpu.multi_node for gpu in machine.nvml.gpus)


def through_own_cpu(machine: Machine) -> bool:
    """Return whether NCCL uses GPUDirect RDMA through a CPU that shares its memory with the GPU (Grace)."""
    new = machine.coherent and not before(machine.software.nccl, (2, 27))
    return new and machine.variable("NCCL_NET_GDR_C2C") != "0" and needs_gpudirect(machine)


def _strict_order_is_slow(machine: Machine) -> bool:
    amd = "AuthenticAMD" in (machine.text("proc/cpuinfo") or "")
    return bool(active_ports(machine)) and (machine.virtual or amd)


def _own_roce(machine: Machine) -> bool:
    return bool(active_ports(machine, "Ethernet")) and provider_profile(machine.environ) is None


def _roce_without_class(machine: Machine) -> bool:
    roce = active_ports(machine, "Ethernet")
    forced = (machine.text(f"sys/class/infiniband/{port.device}/tc/{port.number}/traffic_class") for port in roce)
    return _own_roce(machine) and not all(forced)


class SettingRule(NamedTuple):
    """A rule for a variable with a harmful value."""

    name: str
    hurts: str | None
    """A pattern of the whole value, in any case; None: the variable is unset."""
    severity: Severity
    kind: str
    """DEBUG: a switch for debugging, never meant for a long run. TUNING: may have been measured, and providers set it.
    SWITCH: matters on some machines only."""
    expected: str
    when: Callable[[Machine], object] = lambda machine: True
    remedy: str = ""
    """"": unset the variable."""

    def fits(self, value: str | None) -> bool:
        """Return whether this value, or its absence, is harmful."""
        if self.hurts is None or value is None:
            return self.hurts is value
        return re.fullmatch(self.hurts, value, re.IGNORECASE | re.DOTALL) is not None


ANY, OFF, ON, SWITCHED_ON = ".*", "0", "1", "(?!0$).*"
NEAR, FAR = "NVL|C2C|PIX|PXB", "PHB|SYS|P2C|PXN"  # NCCL's names of distances
TCP = "unset: RDMA devices are there and TCP is several times slower"
STANDS_STILL = "unset: the process stands still during each collective"
HANGS = "unset: when a rank dies, the others wait forever"
MEASURED = "unset, unless measured"

RULES = tuple(SettingRule(*row) for row in (
    # Loss of the fast network or NVLink
    ("NCCL_IB_DISABLE", SWITCHED_ON, ERROR, SWITCH, TCP,
     lambda machine: active_ports(machine) and not is_amazon(machine)),
    ("NCCL_NET", "SOCKET", ERROR, SWITCH, TCP, active_ports),
    ("NCCL_NET", "IB", ERROR, SWITCH, "unset: there is no RDMA device, and NCCL does not start",
     lambda machine: not ports(machine)),
    ("NCCL_NET", "IB", ERROR, SWITCH, "unset: NCCL itself does not support EFA, and does not start", is_amazon),
    ("NCCL_NET_PLUGIN", "NONE", ERROR, SWITCH, "unset: without EFA's plugin NCCL falls back to TCP", is_amazon),
    ("FI_PROVIDER", r"\^.*efa.*|(?!\^|.*efa).*", ERROR, SWITCH, "efa, or unset: libfabric goes over TCP otherwise",
     is_amazon),
    ("FI_EFA_USE_DEVICE_RDMA", OFF, WARNING, SWITCH, "unset: every message is copied", is_amazon),
    ("NCCL_P2P_DISABLE", SWITCHED_ON, ERROR, SWITCH, "unset: GPUs exchange through CPU memory"),
    ("NCCL_SHM_DISABLE", SWITCHED_ON, ERROR, SWITCH, "unset: GPUs without peer access exchange over the network"),
    ("NCCL_P2P_LEVEL", "LOC|0", ERROR, SWITCH, "unset: LOC means no peer access at all"),
    ("NCCL_P2P_LEVEL", ANY, WARNING, SWITCH, "unset: NCCL knows how far peer access pays"),
    ("NCCL_CUMEM_ENABLE", OFF, ERROR, SWITCH, "unset: NVLink between nodes (MNNVL) needs it", nvlink_between_nodes),
    ("NCCL_MNNVL_ENABLE", OFF, ERROR, SWITCH, "unset: NVLink between nodes (MNNVL) needs it", nvlink_between_nodes),
    ("NCCL_DMABUF_ENABLE", OFF, WARNING, SWITCH, "unset: DMA-BUF is NCCL's first choice", needs_gpudirect),
    ("NCCL_IB_GDR_LEVEL", ANY, WARNING, SWITCH, "NCCL_NET_GDR_LEVEL, its name since NCCL 2.4", needs_gpudirect),
    ("NCCL_NET_GDR_LEVEL", "LOC|0", ERROR, SWITCH, "unset: LOC switches GPUDirect off", needs_gpudirect),
    ("NCCL_NET_GDR_LEVEL", NEAR, WARNING, SWITCH, "unset: adapters are reached through the CPU (P2C)",
     through_own_cpu),
    ("NCCL_NET_GDR_LEVEL", f"{NEAR}|{FAR}", INFO, SWITCH, "unset, unless it was measured", needs_gpudirect),
    ("NCCL_NET_GDR_LEVEL", ANY, WARNING, SWITCH, "PIX, PXB, PHB or SYS; numbers are read differently",
     needs_gpudirect, "unset NCCL_NET_GDR_LEVEL, or export one of these words"),
    # Left over from debugging
    ("CUDA_LAUNCH_BLOCKING", ON, ERROR, DEBUG, "unset: every kernel waits for the one before, nothing overlaps"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", ERROR, DEBUG, "unset: every collective is checked with another one"),
    ("TORCH_NCCL_BLOCKING_WAIT", ON, WARNING, DEBUG, STANDS_STILL),
    ("NCCL_BLOCKING_WAIT", ON, WARNING, DEBUG, STANDS_STILL),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", OFF, WARNING, DEBUG, HANGS),
    ("NCCL_ASYNC_ERROR_HANDLING", OFF, WARNING, DEBUG, HANGS),
    ("NCCL_DEBUG", "TRACE", WARNING, DEBUG, "WARN, or unset: tracing slows each operation"),
    ("NCCL_DEBUG", "INFO", INFO, DEBUG, "WARN, or unset, in production"),
    ("NCCL_CHECKS_DISABLE", ANY, INFO, DEBUG, "unset: obsolete, replaced by NCCL_CHECK_POINTERS"),
    ("NCCL_CHECK_POINTERS", ON, WARNING, DEBUG, "unset: every call checks its pointers"),
    ("NCCL_CHECK_MODE", "DEBUG_LOCAL|DEBUG_GLOBAL", WARNING, DEBUG, "unset: every call checks its arguments"),
    ("NCCL_P2P_DIRECT_DISABLE", ON, INFO, DEBUG, "unset: threads of one process exchange by a longer way"),
    ("NCCL_LAUNCH_MODE", "GROUP", INFO, DEBUG, "unset: PARALLEL is the default"),
    # Choices that NCCL makes better, for each size
    ("NCCL_ALGO", ANY, WARNING, TUNING, "unset: one algorithm for all sizes is slow for some of them"),
    ("NCCL_PROTO", ANY, WARNING, TUNING, "unset: LL costs bandwidth, Simple latency; LL128 is unsafe on some"),
    ("NCCL_BUFFSIZE", ANY, WARNING, TUNING, "unset (4 MiB), unless measured"),
    ("NCCL_NTHREADS", ANY, WARNING, TUNING, MEASURED),
    ("NCCL_MIN_CTAS", ANY, WARNING, TUNING, f"{MEASURED}: CTAs are taken from computation"),
    ("NCCL_MAX_CTAS", ANY, WARNING, TUNING, f"{MEASURED}: too few CTAs cap the bandwidth"),
    ("NCCL_MIN_NCHANNELS", ANY, WARNING, TUNING, f"{MEASURED}: channels are taken from computation"),
    ("NCCL_MAX_NCHANNELS", ANY, WARNING, TUNING, f"{MEASURED}: too few channels cap the bandwidth"),
    ("NCCL_NVLS_ENABLE", OFF, WARNING, TUNING, "unset: without additions in the NVSwitch traffic doubles"),
    ("NCCL_CUMEM_ENABLE", OFF, INFO, TUNING, "unset: switches off NVLS and user buffers too"),
    ("NCCL_CUMEM_HOST_ENABLE", OFF, INFO, TUNING, "unset: needed in containers with NCCL 2.24 to 2.26.4 only"),
    ("NCCL_PXN_DISABLE", ON, WARNING, TUNING, "unset: GPUs cannot send through a neighbour's adapter"),
    ("NCCL_NET_GDR_READ", OFF, WARNING, TUNING, "unset: sent data is first copied from the GPU to CPU memory"),
    ("NCCL_NET_GDR_C2C", OFF, WARNING, TUNING, "unset: on Grace machines nothing goes directly from GPU to adapter"),
    ("NCCL_CROSS_NIC", ON, INFO, TUNING, "unset (2), or 0 where every rail has switches of its own"),
    ("NCCL_IB_TIMEOUT", r"1?[0-7]|[89]", WARNING, TUNING, "unset (20): a busy network breaks the connection earlier"),
    ("NCCL_IB_TIMEOUT", r"2[1-9]|3[01]", INFO, TUNING, "unset (20): a longer time hides a network that loses packets"),
    ("NCCL_IB_ADAPTIVE_ROUTING", OFF, INFO, TUNING, "unset: NCCL uses it on InfiniBand, not on Ethernet"),
    ("NCCL_IB_SPLIT_DATA_ON_QPS", ON, INFO, TUNING, "unset (0): each message is split over all its connections"),
    ("NCCL_GRAPH_FILE", ANY, INFO, TUNING, "unset: a graph made for another machine is slow on this one"),
    # Settings that matter on some machines
    ("CUDA_DEVICE_MAX_CONNECTIONS", ON, WARNING, SWITCH, "unset: with one queue communication waits for computation"),
    ("NCCL_IB_PCI_RELAXED_ORDERING", OFF, WARNING, SWITCH, "unset: this platform loses bandwidth with strict ordering",
     _strict_order_is_slow),
    ("NCCL_IB_PCI_RELAXED_ORDERING", OFF, INFO, SWITCH, "unset: NCCL uses it where it exists", active_ports),
    ("NCCL_LAUNCH_ORDER_IMPLICIT", ON, WARNING, SWITCH, "CUDA 12.3 or newer: before it, operations do not overlap",
     lambda machine: min(filter(None, (machine.software.cuda, machine.nvml.cuda)), default=(99,)) < (12, 3)),
    ("NCCL_IB_TC", None, INFO, SWITCH, "the class that the switches protect (PFC, ECN), unless that is class 0",
     _roce_without_class, "ask the network's operators; export NCCL_IB_TC=NUMBER (4 times the DSCP; 106 is common)"),
    ("NCCL_IB_QPS_PER_CONNECTION", None, INFO, SWITCH, "several, where switches spread flows over paths (ECMP)",
     _own_roce, "try: export NCCL_IB_QPS_PER_CONNECTION=4"),
))  # fmt: skip


def harmful_settings(machine: Machine, kinds: tuple[str, ...] = (DEBUG, TUNING, SWITCH)) -> Iterator[Finding]:
    """Yield findings about harmful variables. A variable's first matching rule counts; a provider's choices stay."""
    # A topology file alone shows the provider, but not that the other settings are the provider's.
    provider = provider_profile({name: value for name, value in machine.environ.items() if name != "NCCL_TOPO_FILE"})
    seen, theirs = set(), []
    for rule in RULES:
        value = machine.variable(rule.name)
        if rule.name in seen or rule.kind not in kinds or not rule.fits(value) or not rule.when(machine):
            continue
        seen.add(rule.name)
        if provider is not None and rule.kind is TUNING:
            theirs.append(f"{rule.name}={value}")
            continue
        # An explicit choice may have been measured; a debugging switch is never meant.
        sure = "medium" if rule.hurts in (ANY, None) else "high"
        remedy = rule.remedy or f"unset {rule.name}"
        yield Finding(rule.severity, value or "unset", rule.expected, remedy, sure, rule.name)
    if theirs:
        yield info(", ".join(theirs), f"the choice of {provider}, whose plugin may refuse any other", None, "medium")


@check("environment")
def settings(machine: Machine) -> Iterator[Finding]:
    """Settings of NCCL and torch: none that is known to cost speed."""
    yield from harmful_settings(machine)


# In the order of the search: variable, value, provider. Only settings that nobody else uses: the name of a tuner or a
# topology file alone may come from anywhere.
PROVIDERS = (
    (r"NCCL_FASTRAK_\w+", r".*", "Google A3 Mega (FasTrak)"),
    (r"NCCL_GPUDIRECTTCPX_\w+", r".*", "Google A3 High (GPUDirect-TCPX)"),
    (r"NCCL_NET", r"fastrak", "Google A3 Mega (FasTrak)"),
    (r"NCCL_NET", r"gpudirecttcpx.*", "Google A3 High (GPUDirect-TCPX)"),
    (r"NCCL_NET", r"gib", "Google A3 Ultra, A4 (gIB)"),
    (r"NCCL_(?:TUNER_PLUGIN|TUNER_CONFIG_PATH|TOPO_FILE|SHIMNET_\w+)", r".*/gib/.*", "Google A3 Ultra, A4 (gIB)"),
    (r"NCCL_(?:TUNER_CONFIG_PATH|SHIMNET_\w+)", r".*/a3plus_\w+\.\w+", "Google A3 Mega (FasTrak)"),
    (r"NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE", r".*", "Google A3 or A4"),
    (r"NCCL_TUNER_PLUGIN", r"ofi|.*libnccl-(?:tuner-ofi|ofi-tuner)[\w.]*|.*ofi-nccl/.*", "AWS (OFI plugin)"),
    (r"NCCL_TOPO_FILE", r".*ofi-nccl/.*", "AWS (OFI plugin)"),
    (r"NCCL_TOPO_FILE", r"/opt/microsoft/.*", "Azure"),
    (r"NCCL_(?:TUNER_PLUGIN|TUNER_CONFIG_\w+|TOPO_FILE)", r"/opt/oci-hpc/.*|.*libnccl-ocituner\b.*", "Oracle"),
)


def provider_profile(environment: Mapping[str, str]) -> str | None:
    """Return the provider of these settings ("Google A3 Mega (FasTrak)"); None if no provider is recognised.

    The provider has tested such a profile for that machine, and some plugins refuse to start without it.
    """
    given = [(name, value.strip()) for name, value in environment.items() if value]
    for variable, pattern, provider in PROVIDERS:
        if any(re.fullmatch(variable, name) and re.fullmatch(pattern, value, re.I) for name, value in given):
            return provider
    return None


SYSTEM_FILE = "etc/nccl.conf"


def _settings_of(root: Path, path: str) -> dict[str, str]:
    """Return the settings in a configuration file of NCCL; empty if there is none."""
    lines = (line.split("#")[0] for line in (text(root / path) or "").splitlines())
    matches = [re.fullmatch(r"\s*(NCCL_\w+)\s*=\s*(.*?)\s*", line, re.ASCII) for line in lines]
    return {match[1]: match[2] for match in matches if match}


def _own_file(environ: Mapping[str, str]) -> str:
    """Return the path of the user's file below the root. NCCL reads it before the system's file."""
    return (environ.get("NCCL_CONF_FILE") or f"{environ.get('HOME') or '/root'}/.nccl.conf").lstrip("/")


def effective(root: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment as NCCL sees it: variables override the user's file, which overrides the system's."""
    return {**_settings_of(root, SYSTEM_FILE), **_settings_of(root, _own_file(environ)), **environ}


@check("~/.nccl.conf, /etc/nccl.conf")
def nccl_conf(machine: Machine) -> Iterator[Finding]:
    """NCCL's configuration files: none, or those of the provider; they set variables that the environment does not."""
    for path in (_own_file(machine.environ), SYSTEM_FILE):
        shown = ", ".join(f"{name}={value}" for name, value in _settings_of(machine.root, path).items())
        if shown:
            expected = "only settings that every job on this machine needs; edit the file, as unset has no effect"
            yield info(shown, expected, f"sudoedit /{path}", "medium", f"/{path}")


@check("NCCL_TOPO_FILE", "unset NCCL_TOPO_FILE, or: ls -l $NCCL_TOPO_FILE")
def topology_file(machine: Machine) -> Iterator[Finding]:
    """Topology file: unset, or the provider's; it replaces the topology that NCCL would detect."""
    value = machine.variable("NCCL_TOPO_FILE")
    unusable = [line for line in machine.topology.warnings if "is refused" in line or "cannot be read" in line]
    seen, real = len(machine.topology.gpus), len(machine.hardware.gpus)
    if value is None and not machine.exists(VIRTUAL_TOPOLOGY):
        if switches_hidden(machine):
            shipped = [name for name in machine.listing("opt/microsoft") if name.endswith("topo.xml")]
            file = "FILE  # Azure: one of /opt/microsoft/*-topo.xml; others: in their images"
            file = f"/opt/microsoft/{shipped[0]}" if len(shipped) == 1 else file
            expected = "the provider's file: without it NCCL does not know which adapter is near to which GPU"
            shown = "unset, in a virtual machine that shows no PCIe switches"
            yield warning(shown, expected, f"export NCCL_TOPO_FILE={file}")
    elif unusable:
        yield error(unusable[0], "NCCL's XML: NCCL fails, or plans without it")
    elif seen and seen < real:
        shown = f"{value or f'/{VIRTUAL_TOPOLOGY}'}: {seen} GPUs"
        yield warning(shown, f"the {real} GPUs of this machine: the file is another one's", confidence="medium")


@check("torch.version.cuda, torch.cuda.nccl.version(), NVML")
def versions(machine: Machine) -> Iterator[Finding]:
    """Versions: driver, CUDA and NCCL fit together."""
    software, driver = machine.software, machine.nvml.cuda
    if software.torch is None:
        raise Unread("not read: these are another machine's files", "pip show torch", "torch")
    if machine.hardware.gpus and software.cuda is None:
        remedy = "pip uninstall -y torch; pip install torch  # PyPI's for Linux is built for CUDA"
        yield error(str(software), "a torch built for CUDA: this one cannot use the GPUs", remedy)
    elif driver is not None and software.cuda is not None and driver[0] < software.cuda[0]:
        value = f"driver for CUDA {version_text(driver)}, torch for CUDA {version_text(software.cuda)}"
        remedy = "update the driver, or install a torch for the older CUDA"
        yield error(value, f"a driver for CUDA {software.cuda[0]} or newer", remedy)
    else:
        yield ok(str(software))
