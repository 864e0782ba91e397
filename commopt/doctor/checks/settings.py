"""Settings left over from debugging, and settings that keep communication from overlapping with computation."""

from __future__ import annotations

from commopt.doctor.facts.machine import Machine
from commopt.doctor.facts.nearness import switches_hidden
from commopt.doctor.finding import Check, Confidence, Finding, Severity
from commopt.doctor.provider import provider_profile
from topology.machine import VIRTUAL_TOPOLOGY

LEFTOVERS = Check("leftovers", "Settings left over from debugging")
FILE = Check("topology-file", "Topology file")
OVERLAP = Check("overlap", "Overlap of communication and computation")

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
DEBUG, TUNING = "debug", "tuning"
FEW = tuple(str(number) for number in range(18))
MANY = tuple(str(number) for number in range(21, 32))

SHIPPED = "opt/microsoft"

# Variable, the values that hurt (None: any), how much, why, and what it is: a switch for debugging, which nobody means
# in a long run, or a choice of tuning, which may have been measured and which providers make.
HARMFUL: tuple[tuple[str, tuple[str, ...] | None, Severity, str, str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", ("1",), ERROR, "unset: every kernel waits for the one before, nothing overlaps", DEBUG),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), ERROR, "unset: every collective is checked with another one", DEBUG),
    ("TORCH_NCCL_BLOCKING_WAIT", ("1",), WARNING, "unset: the process stands still during each collective", DEBUG),
    ("NCCL_BLOCKING_WAIT", ("1",), WARNING, "unset: the process stands still during each collective", DEBUG),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", ("0",), WARNING, "unset: when a rank dies, the others wait forever", DEBUG),
    ("NCCL_ASYNC_ERROR_HANDLING", ("0",), WARNING, "unset: when a rank dies, the others wait forever", DEBUG),
    ("NCCL_DEBUG", ("TRACE",), WARNING, "WARN, or unset: tracing slows each operation", DEBUG),
    ("NCCL_DEBUG", ("INFO",), INFO, "WARN, or unset, in production", DEBUG),
    ("NCCL_CHECKS_DISABLE", None, INFO, "unset: obsolete, replaced by NCCL_CHECK_POINTERS", DEBUG),
    ("NCCL_CHECK_POINTERS", ("1",), WARNING, "unset: every call checks its pointers", DEBUG),
    ("NCCL_CHECK_MODE", ("DEBUG_LOCAL",), WARNING, "unset: every call checks its arguments", DEBUG),
    ("NCCL_CHECK_MODE", ("DEBUG_GLOBAL",), WARNING, "unset: ranks compare the arguments of their calls", DEBUG),
    ("NCCL_ALGO", None, WARNING, "unset: one algorithm for all sizes is slow for some of them", TUNING),
    (
        "NCCL_PROTO",
        None,
        WARNING,
        "unset: LL costs bandwidth, Simple costs latency, LL128 is not safe everywhere",
        TUNING,
    ),
    ("NCCL_BUFFSIZE", None, WARNING, "unset (4 MiB), unless measured", TUNING),
    ("NCCL_NTHREADS", None, WARNING, "unset, unless measured", TUNING),
    ("NCCL_MIN_CTAS", None, WARNING, "unset, unless measured: CTAs are taken from computation", TUNING),
    ("NCCL_MAX_CTAS", None, WARNING, "unset, unless measured: too few CTAs cap the bandwidth", TUNING),
    ("NCCL_MIN_NCHANNELS", None, WARNING, "unset, unless measured: channels are taken from computation", TUNING),
    ("NCCL_MAX_NCHANNELS", None, WARNING, "unset, unless measured: too few channels cap the bandwidth", TUNING),
    ("NCCL_NVLS_ENABLE", ("0",), WARNING, "unset: NVSwitch adds in the network, without it traffic doubles", TUNING),
    ("NCCL_CUMEM_ENABLE", ("0",), INFO, "unset: switches off NVLS and user buffers too", TUNING),
    ("NCCL_CUMEM_HOST_ENABLE", ("0",), INFO, "unset: needed in containers with NCCL 2.24 to 2.26.4 only", TUNING),
    ("NCCL_PXN_DISABLE", ("1",), WARNING, "unset: GPUs cannot send through the adapter of a neighbour", TUNING),
    ("NCCL_NET_GDR_READ", ("0",), WARNING, "unset: what a GPU sends is copied through CPU memory first", TUNING),
    ("NCCL_NET_GDR_C2C", ("0",), WARNING, "unset: on Grace machines nothing goes directly from GPU to adapter", TUNING),
    ("NCCL_P2P_DIRECT_DISABLE", ("1",), INFO, "unset: threads of one process exchange by a longer way", DEBUG),
    ("NCCL_CROSS_NIC", ("1",), INFO, "unset (2), or 0 where every rail has switches of its own", TUNING),
    ("NCCL_IB_TIMEOUT", FEW, WARNING, "unset (20): a busy network breaks the connection earlier", TUNING),
    ("NCCL_IB_TIMEOUT", MANY, INFO, "unset (20): a longer time hides a network that loses packets", TUNING),
    ("NCCL_IB_ADAPTIVE_ROUTING", ("0",), INFO, "unset: NCCL uses it on InfiniBand, not on Ethernet", TUNING),
    ("NCCL_IB_SPLIT_DATA_ON_QPS", ("1",), INFO, "unset (0): each message is split over all its connections", TUNING),
    ("NCCL_LAUNCH_MODE", ("GROUP",), INFO, "unset: PARALLEL is the default", DEBUG),
    ("NCCL_GRAPH_FILE", None, INFO, "unset: a graph made for another machine is slow on this one", TUNING),
)


def leftovers(machine: Machine) -> list[Finding]:
    """List the variables that are useful in an experiment and expensive in a long run; a provider's are left alone."""
    found, theirs = [], []
    # A topology file alone says where the machine is, not that the other settings are the provider's.
    provider = provider_profile({name: text for name, text in machine.environ.items() if name != "NCCL_TOPO_FILE"})
    for name, values, severity, expected, kind in HARMFUL:
        value = machine.variable(name)
        if value is None or (values is not None and value.upper() not in values):
            continue
        if provider is not None and kind is TUNING:
            theirs.append(f"{name}={value}")
            continue
        # An explicit choice may have been measured; a debugging switch cannot be meant.
        confidence: Confidence = "medium" if values is None else "high"
        found.append(
            Finding(LEFTOVERS.id, LEFTOVERS.title, severity, name, value, expected, f"unset {name}", confidence)
        )
    if theirs:
        expected = f"as {provider} wants it: its plugin may refuse anything else"
        found.append(LEFTOVERS.info("environment", ", ".join(theirs), expected, confidence="medium"))
    return found or [LEFTOVERS.ok("environment", "none of the known ones", "unset")]


def overlap(machine: Machine) -> list[Finding]:
    """One hardware queue makes streams wait for each other; what a program's code does cannot be seen from here."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = machine.variable(name)
    if value != "1":
        return [OVERLAP.ok(name, value or "unset", "unset, or more than 1")]
    expected = "unset: with one queue communication and computation wait for each other, unless launch order is planned"
    return [OVERLAP.warning(name, value, expected, f"unset {name} (tensor parallelism may want it)", "medium")]


def topology_file(machine: Machine) -> list[Finding]:
    """A file given to NCCL replaces what NCCL would find by itself, right or wrong."""
    value = machine.variable("NCCL_TOPO_FILE") or f"unset, /{VIRTUAL_TOPOLOGY} counts"
    if machine.variable("NCCL_TOPO_FILE") is None and not machine.exists(VIRTUAL_TOPOLOGY):
        if switches_hidden(machine):
            shown = "unset, in a virtual machine that shows no PCIe switches"
            expected = "the provider's file: without it NCCL does not know which adapter is near to which GPU"
            return [FILE.warning("NCCL_TOPO_FILE", shown, expected, f"export NCCL_TOPO_FILE={_shipped(machine)}")]
        return [FILE.ok("NCCL_TOPO_FILE", "unset", "unset, or the provider's file")]
    unusable = [text for text in machine.topology.warnings if "is refused" in text or "cannot be read" in text]
    if unusable:
        expected = "a topology in NCCL's XML: NCCL fails, or plans without it"
        return [FILE.error("NCCL_TOPO_FILE", unusable[0], expected, "unset NCCL_TOPO_FILE, or: ls -l $NCCL_TOPO_FILE")]
    told, real = len(machine.topology.gpus), len(machine.hardware.gpus)
    if told and told < real:
        expected = f"the {real} GPUs of this machine: the plan is for another one"
        return [FILE.warning("NCCL_TOPO_FILE", f"{value}: {told} GPUs", expected, "unset NCCL_TOPO_FILE", "medium")]
    return [FILE.ok("NCCL_TOPO_FILE", value, "unset, or the provider's file")]


def _shipped(machine: Machine) -> str:
    """Return the file that the provider put on this machine, else where such files are."""
    files = [f"/{SHIPPED}/{name}" for name in machine.listing(SHIPPED) if name.endswith("topo.xml")]
    return files[0] if len(files) == 1 else f"FILE  # Azure: one of /{SHIPPED}/*-topo.xml; others: in their images"
