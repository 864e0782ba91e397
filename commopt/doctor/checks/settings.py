"""Settings left over from debugging, and settings that keep communication from overlapping with computation."""

from __future__ import annotations

from commopt.doctor.facts.machine import Machine
from commopt.doctor.finding import Check, Confidence, Finding, Severity
from topology.live.machine import VIRTUAL_TOPOLOGY

LEFTOVERS = Check("leftovers", "Settings left over from debugging")
FILE = Check("topology-file", "Topology file")
OVERLAP = Check("overlap", "Overlap of communication and computation")

# Variable, the values that hurt (None: any), how much, why.
HARMFUL: tuple[tuple[str, tuple[str, ...] | None, Severity, str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", ("1",), Severity.ERROR, "unset: every kernel waits for the one before, nothing overlaps"),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), Severity.ERROR, "unset: every collective is checked with another one"),
    ("TORCH_NCCL_BLOCKING_WAIT", ("1",), Severity.WARNING, "unset: the process stands still during each collective"),
    ("NCCL_BLOCKING_WAIT", ("1",), Severity.WARNING, "unset: the process stands still during each collective"),
    ("NCCL_DEBUG", ("TRACE",), Severity.WARNING, "WARN, or unset: tracing slows each operation"),
    ("NCCL_DEBUG", ("INFO",), Severity.INFO, "WARN, or unset, in production"),
    ("NCCL_CHECKS_DISABLE", None, Severity.INFO, "unset: obsolete, replaced by NCCL_CHECK_POINTERS"),
    ("NCCL_CHECK_POINTERS", ("1",), Severity.WARNING, "unset: every call checks its pointers"),
    ("NCCL_ALGO", None, Severity.WARNING, "unset: one algorithm for all sizes is slow for some of them"),
    (
        "NCCL_PROTO",
        None,
        Severity.WARNING,
        "unset: LL costs bandwidth, Simple costs latency, LL128 is not safe everywhere",
    ),
    ("NCCL_BUFFSIZE", None, Severity.WARNING, "unset (4 MiB), unless measured"),
    ("NCCL_NTHREADS", None, Severity.WARNING, "unset, unless measured"),
    ("NCCL_MIN_CTAS", None, Severity.WARNING, "unset, unless measured: CTAs are taken from computation"),
    ("NCCL_MAX_CTAS", None, Severity.WARNING, "unset, unless measured: too few CTAs cap the bandwidth"),
    ("NCCL_MIN_NCHANNELS", None, Severity.WARNING, "unset, unless measured: channels are taken from computation"),
    ("NCCL_MAX_NCHANNELS", None, Severity.WARNING, "unset, unless measured: too few channels cap the bandwidth"),
    ("NCCL_NVLS_ENABLE", ("0",), Severity.WARNING, "unset: NVSwitch adds in the network, without it traffic doubles"),
    ("NCCL_CUMEM_ENABLE", ("0",), Severity.INFO, "unset: switches off NVLS and user buffers too"),
    ("NCCL_PXN_DISABLE", ("1",), Severity.WARNING, "unset: GPUs cannot send through the adapter of a neighbour"),
    ("NCCL_LAUNCH_MODE", ("GROUP",), Severity.INFO, "unset: PARALLEL is the default"),
    ("NCCL_GRAPH_FILE", None, Severity.INFO, "unset: a graph made for another machine is slow on this one"),
)


def leftovers(machine: Machine) -> list[Finding]:
    """List the variables that are useful in an experiment and expensive in a long run."""
    found = []
    for name, values, severity, expected in HARMFUL:
        value = machine.variable(name)
        if value is None or (values is not None and value.upper() not in values):
            continue
        # An explicit choice may have been measured; a debugging switch cannot be meant.
        confidence: Confidence = "medium" if values is None else "high"
        found.append(
            Finding(LEFTOVERS.id, LEFTOVERS.title, severity, name, value, expected, f"unset {name}", confidence)
        )
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
