# SPDX-License-Identifier: Apache-2.0
"""The meaning of NCCL's warnings: causes, consequences of another rank's end, and remedies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

from commopt.doctor.finding import Finding, error, info, warning
from commopt.doctor.log_settings import suspected_setting, without_contradictions
from commopt.doctor.machine import Version

MOST = 12


class NcclWarning(NamedTuple):
    """A warning of NCCL."""

    text: str
    times: int
    """How often it, or a similar one, was written."""
    file: str
    """File of NCCL's source: "graph/search.cc"; "" if the log does not name it."""


class WarningKind(IntEnum):
    """Distance of a warning from the root cause, nearest first."""

    CAUSE = 0
    NETWORK = 1
    """The network failed, or the rank at the other end."""
    SLOW = 2
    """NCCL continues, more slowly."""
    UNKNOWN = 3
    CONSEQUENCE = 4
    """Another rank ended, for an unknown reason."""
    HARMLESS = 5


class Meaning(NamedTuple):
    """Meaning of a warning."""

    kind: WarningKind
    why: str
    remedy: str


CAUSE, NETWORK, SLOW, CONSEQUENCE = WarningKind.CAUSE, WarningKind.NETWORK, WarningKind.SLOW, WarningKind.CONSEQUENCE
SHM_SIZE = "docker run --shm-size=8g ... (or --ipc=host); df /dev/shm"
FIRST = "look for the first error of all ranks: python -m commopt doctor --log FOLDER"
SUBNET = "export NCCL_SOCKET_IFNAME to the network that the nodes share (containers: --network=host); check firewalls"
MEMLOCK = "ulimit -l unlimited (limits.conf; docker run --ulimit memlock=-1; services: LimitMEMLOCK=infinity)"
IMEX = "nvidia-imex-ctl -N; ls /dev/nvidia-caps-imex-channels (one channel per container, one IMEX domain per job)"
SLEEPING_FABRIC = "sudo systemctl enable --now nvidia-fabricmanager; nvidia-smi -q | grep -A3 Fabric"
NVLS = "nvidia-smi -q | grep -A3 Fabric; reboot; to continue without: NCCL_NVLS_ENABLE=0; between nodes: "
COMPLETION = r"Got completion .*?(?:status=|error )(?:IBV_WC_\w+\()?"
"""The text in front of InfiniBand's completion status."""
ON_BOTH = "python -m commopt doctor on both nodes, during the job"

# The first pattern found in a warning (or in the error that torch repeats) gives its meaning.
MEANINGS = tuple((re.compile(pattern, re.IGNORECASE), Meaning(kind, why, fix)) for pattern, kind, why, fix in (
    ("ibv_modify_qp failed.*retrying", SLOW, "an adapter answered late, and NCCL tried again",
     f"{ON_BOTH}; NCCL_CROSS_NIC=0 where rails are not joined"),
    (f"{COMPLETION}4\\b", CAUSE,
     "local protection error: the adapter may not reach the buffer; often ACS, which breaks GPUDirect RDMA",
     "disable ACS: sudo python -m commopt doctor; to be sure, one run with NCCL_NET_GDR_LEVEL=LOC"),
    (f"{COMPLETION}5\\b", CONSEQUENCE, "flushed: another request failed before; or adapters of one node cannot talk",
     f"{FIRST}; otherwise: ib_write_bw between two adapters of the node"),
    (f"{COMPLETION}(?:9|10)\\b", CAUSE,
     "remote access error: the peer's adapter may not reach its buffer, or is not for traffic between nodes",
     "NCCL_IB_HCA to the adapters between the nodes; one run with NCCL_NET_GDR_LEVEL=LOC, to see if GPUDirect fails"),
    (f"{COMPLETION}12\\b", NETWORK,
     "no answer: rails that do not reach each other, GID, packet loss, or the peer ended",
     "ib_write_bw between the two adapters; RoCE: NCCL_IB_GID_INDEX to RoCE v2 as show_gids has it, with NCCL 2.21 and "
     "later unset; NCCL_CROSS_NIC=0; then NCCL_IB_TIMEOUT=22"),
    (f"{COMPLETION}13\\b", NETWORK, "receiver not ready: the peer takes nothing",
     f"{FIRST}; otherwise flow control: {ON_BOTH}"),
    (COMPLETION, NETWORK, "the network failed", f"cable, switch or flow control: {ON_BOTH}"),
    # Written by a plugin of Google in successful runs.
    ("Cannot get incoming CPU|Maximum retry reached", WarningKind.HARMLESS, "this one does no harm", ""),
    # graph/: the machine as NCCL sees it
    ("XML (?:Import|Export) Channel|XML Graph|XML graph file", CAUSE,
     "a graph file (NCCL_GRAPH_FILE) names GPUs or adapters that this job does not have: it is for another machine "
     "or job",
     "unset NCCL_GRAPH_FILE, also in /etc/nccl.conf and ~/.nccl.conf"),
    (r"XML (?:Parse|Mismatch|Topology|topology)|XML parser|too many XML|Attribute \w+ of node|in dictionary|system "
     r"node not"
     "|could not find CPU|Unknown CPU architecture", CAUSE,
     "a topology file (NCCL_TOPO_FILE) is damaged, or of another kind of machine or version of NCCL",
     "unset NCCL_TOPO_FILE, also in /etc/nccl.conf, or the provider's file of this version; then NCCL_TOPO_DUMP_FILE"),
    ("Could not find a path for pattern", SLOW,
     "NCCL found no good order of the GPUs and adapters and takes a simple, slow one: the topology of a virtual "
     "machine is "
     "hidden, adapters are not in the container, or one algorithm was forced",
     "NCCL_TOPO_FILE of the provider; unset NCCL_ALGO; a newer NCCL; to look: NCCL_TOPO_DUMP_FILE=topo.xml"),
    ("Tried merging multiple devices|Tried to merge too many NICs|force merge NICs|Specified fused NIC|merge "
     "incompatible"
     "|Fusing NET devices|make virtual NIC|virtual devices? \\(|Only matched .* devices", CAUSE,
     "NCCL cannot make one adapter of these", "export NCCL_NET_MERGE_LEVEL=LOC; unset NCCL_NET_FORCE_MERGE"),
    (r"Could not find NET with id|Could not find net id|Could not find any local path|Could not find NIC for"
     r"|between GPU rank "
     r"\S+ and NIC", CAUSE, "the adapters that the plugin lists are not in NCCL's picture of the machine",
     "unset NCCL_TOPO_FILE NCCL_IB_HCA; NCCL_NET_MERGE_LEVEL=LOC; a newer NCCL; to look: NCCL_TOPO_DUMP_FILE=topo.xml"),
    ("No path computed|rev link|reverse path|does not loop back|does not contain rank|tree already has|find gpu "
     "rank|Could not "
     "find (?:node of type|id|rank|gpu)|too many (?:Topo links|nodes of type|DEV nodes)|Topo(?:Rank|Dev)To|find "
     "rank", CAUSE,
     "NCCL's picture of the machine does not fit together: ranks see different machines, or a file describes "
     "another one",
     "unset NCCL_TOPO_FILE NCCL_GRAPH_FILE NCCL_HOSTID; the same settings and NCCL on every rank; NCCL_TOPO_DUMP_FILE"),
    ("No transport found", CAUSE, "no way is left between two ranks: shared memory, peer access or the network is off",
     "unset NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_NET NCCL_HOSTID; containers: --ipc=host"),
    ("Could not find real path|could not find path for|sysfs", CAUSE, "/sys does not show the device, as in some "
     "containers",
     "mount /sys from the host (docker run -v /sys:/sys:ro), or NCCL_TOPO_FILE of this machine"),
    ("mixed local (?:Net|CollNet) device counts", CAUSE, "ranks see different numbers of adapters",
     "the same NCCL_IB_HCA and devices in all containers; ibstat on each node"),
    ("Failed to determine (?:local|intra proc) ranks|nLocals|Group creation failed", CAUSE,
     "ranks disagree about who shares a machine: one NCCL_HOSTID for several, or containers with one host name",
     "unset NCCL_HOSTID, or another value on each machine, the same for all its ranks"),
    # enqueue and arguments
    ("no algorithm/protocol available", CAUSE,
     "NCCL_ALGO or NCCL_PROTO leave nothing for this operation or machine: Tree is for sums only, CollNet and NVLS "
     "need "
     "their hardware", "unset NCCL_ALGO NCCL_PROTO"),
    ("fn maxSharedMem|no kernel image|invalid device function|named symbol not found|PTX|unsupported toolchain", CAUSE,
     "this build of NCCL has no code for this GPU or driver", "a torch and driver that know the GPU: "
     "nvidia-smi; python -c 'import torch; print(torch.version.cuda, torch.cuda.get_arch_list())'"),
    ("Driver/library version mismatch", CAUSE, "the driver was updated while the old one is loaded", "reboot, or "
     "reload "
     "the nvidia modules; containers: restart them"),
    ("driver version is insufficient|CUDA Driver version found|not supported in the installed CUDA driver|stub library"
     "|PFN functions|prior to CUDA|driver < R|forward compat|Failed to find CUDA library|Failed to open "
     "libnvidia-ml", CAUSE,
     "the driver is older than this CUDA, or not the one that is loaded",
     "nvidia-smi: a newer driver, or torch for its CUDA; containers: --gpus all, no stubs in LD_LIBRARY_PATH"),
    ("busy or unavailable|exclusive", CAUSE, "another process holds the GPU, or it is in exclusive mode",
     "nvidia-smi; sudo nvidia-smi -c DEFAULT; one rank per GPU"),
    ("resources? exhausted", CAUSE, "more GPUs want to reach each other than the driver maps",
     "NCCL_P2P_DISABLE=1 for these, or fewer GPUs in one process"),
    ("Cuda failure (?:999 )?'unknown error'(?!.*nvls)|Cuda failure (?:3 )?'initialization error'", CAUSE,
     "the driver lost the GPU, or CUDA was begun before a fork", "dmesg | grep -i xid; nvidia-smi; spawn instead "
     "of fork"),
    ("is not a valid pointer|allocated on device|argument is NULL|invalid root|invalid type|invalid reduction|not "
     "initialized via"
     "|Invalid config|Invalid rank|Invalid device (?:count|\\d)|exceeds ndev|invalid device count|ncclRedOp"
     "|corrupted comm|already been "
     "destroyed|before the previous operation returned|improper usage|matching (?:recv|send)|reduction operation "
     "\\d", CAUSE,
     "the program called NCCL with something that it does not take",
     "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything else; tensors on that GPU; NCCL_CHECK_MODE"),
    ("captured|Group operations|in the same group|not in a group|CUDA graph", CAUSE,
     "captured and other operations are mixed in a CUDA graph", "capture all operations of a group, or none"),
    ("ran out of channel|nvmlDevice.*more devices|GPU has fallen", CAUSE, "a limit of NCCL, or a GPU that is lost",
     "nvidia-smi; a newer NCCL"),
    # bootstrap and sockets
    ("family \\d+ is neither AF_INET", CAUSE, "a rank gave no address: it found no interface to listen on",
     "export NCCL_SOCKET_IFNAME to an interface that exists on every node and has an address; ip address"),
    ("NCCL_OOB_NET_IFNAME", CAUSE, "no interface is called so", "unset NCCL_OOB_NET_IFNAME; ip address"),
    ("same subnet as", CAUSE, "no interface is in the network of the address in NCCL_COMM_ID, or of rank 0",
     "export NCCL_SOCKET_IFNAME to the network that the nodes share; unset NCCL_COMM_ID"),
    ("getting address info|getaddrinfo|Name or service not known|<?IPv4_or_hostname|:port pair|string is null", CAUSE,
     "an address cannot be read or resolved", "unset NCCL_COMM_ID, or HOST:PORT of rank 0; getent hosts NAME on "
     "every node"),
    ("should not be called when NCCL_COMM_ID|Bootstrap Root|already checked in|localId .* out of range", CAUSE,
     "two jobs, or two ranks of one number, met: an address in NCCL_COMM_ID that is in use, or an unequal world size",
     "unset NCCL_COMM_ID; the same WORLD_SIZE and another RANK for each process; end processes of the last job"),
    ("Address already in use|Cannot assign requested address|bind failed|Call to bind", CAUSE,
     "the address or port is taken, or is not this machine's", "unset NCCL_COMM_ID; ss -ltnp; end the last job's "
     "processes"),
    ("Address family not supported|unsupported IP family", CAUSE, "IPv6 is switched off here, and asked for",
     "export NCCL_SOCKET_FAMILY=AF_INET"),
    ("Too many open files|Too many connections", CAUSE, "the limit of open files", "ulimit -n 65536"),
    ("Thread creation failed|Resource temporarily unavailable|pthread_create", CAUSE, "the limit of processes or "
     "threads",
     "ulimit -u; containers: --pids-limit=-1"),
    ("Failed to (?:CUDA host alloc|malloc)|malloc\\(|Allocation failed", CAUSE,
     "the host's memory is full", f"free -g; {MEMLOCK}"),
    ("magic mismatch.*discarding", SLOW,
     "something else connected to NCCL's port: a scanner, or a rank of another job or version",
     "the same NCCL on every rank; end processes of the last job; keep port scanners away"),
    # plugins and switches
    ("Unable to (?:open device|query device|query port)", CAUSE, "no access to the adapter",
     "docker run --device=/dev/infiniband ...; ibv_devinfo"),
    ("Cannot initialize CollNet", SLOW, "additions in the InfiniBand switches (SHARP) are not available",
     "unset NCCL_COLLNET_ENABLE, or ask who runs the network for SHARP"),
    ("GID table changed|non-fatal async event", SLOW, "an address of the port changed while the job ran",
     "ip -ts monitor address, during the job; give the port's interface a fixed address"),
    ("NCCL_NVLS_ENABLE has been set|Both NCCL_CTA|unknown value|is being ignored|greater than the maximum", SLOW,
     "a setting that NCCL does not take as it is", "unset the variable that the line names"),
    (r"without a warning: (?:misc/socket|bootstrap|os/|include/socket)", NETWORK,
     "ranks did not reach each other at the start: another network, a firewall, or a rank that ended",
     f"{FIRST}; otherwise: {SUBNET}"),
    ("IMEX|MNNVL", CAUSE, "NVLink between nodes (MNNVL) needs an IMEX channel and domain", IMEX),
    ("ibv_reg_.*(?:Invalid argument|Bad address|not supported)", CAUSE,
     "this memory cannot be registered with the adapter: GPUDirect RDMA does not work",
     "lsmod | grep nvidia_peermem; one run with NCCL_NET_GDR_LEVEL=LOC, to be sure"),
    ("ibv_reg_|Unable to register memory|ibv.*Cannot allocate memory", CAUSE,
     "memory could not be locked, or registered with the adapter", MEMLOCK),
    ("ibv_create_qp|ibv_create_cq", CAUSE, "the adapter gave no queue", f"{MEMLOCK}; ibstat"),
    ("ibv_modify_qp failed with (?:110|error Connection timed out)|ibv_modify_qp.*timed out", CAUSE,
     "the two adapters do not reach each other: rails that are not joined",
     "export NCCL_CROSS_NIC=0; NCCL_IB_HCA to the adapters that reach each other"),
    ("ibv_modify_qp.*(?:unreachable|No such device)", CAUSE,
     "no route from the adapter's address to the peer's, or its interface is in another network namespace",
     "ip route get ADDRESS; NCCL_CROSS_NIC=0 where rails are not joined; containers: --network=host"),
    ("ibv_modify_qp", CAUSE, "the two ends do not fit: GID index, or kind of network",
     "unset NCCL_IB_GID_INDEX; NCCL_IB_HCA to adapters of one network; ibstat"),
    ("ibv_open_device", CAUSE, "no access to the adapter", "docker run --device=/dev/infiniband ...; ibv_devinfo"),
    ("async .*event.*(?:access violation|protection)", CAUSE,
     "the adapter may not reach a buffer: GPUDirect RDMA, or an adapter that is not for traffic",
     "python -m commopt doctor (ACS, IOMMU); NCCL_IB_HCA to the adapters between the nodes"),
    (r"async .*event.*\b(?:port|link|lid|sm|gid)\b", CAUSE, "a port changed its state while the job ran",
     "ibstat; cable and switch of that port"),
    ("async .*event", CAUSE, "the adapter failed or refused a request: firmware, driver or hardware",
     "dmesg | grep -i mlx; ibv_devinfo | grep fw_ver, the same and recent on all nodes"),
    ("incompatible devices|device is incompatible", CAUSE, "InfiniBand and Ethernet do not connect",
     "export NCCL_IB_HCA to the adapters of one kind of network"),
    ("optimal provider|Only EFA provider", CAUSE, "libfabric found no EFA",
     "fi_info -p efa, in the container (--device=/dev/infiniband); LD_LIBRARY_PATH of libfabric"),
    ("system not yet initialized", CAUSE, "the NVSwitch fabric is not up", SLEEPING_FABRIC),
    ("P2P is disabled between NVLINK", CAUSE, "NVLinks are there, but peer access is not",
     "nvidia-smi topo -p2p n; nvidia-smi nvlink -s; unset NCCL_P2P_DISABLE NCCL_P2P_LEVEL"),
    ("CUDA IPC handle|peer access is not supported|failed to peer with|cudaIpc|mapping of buffer object", CAUSE,
     "the GPUs have no peer access, although NCCL took it for there (GeForce, containers, ACS)",
     "nvidia-smi topo -p2p r; export NCCL_P2P_DISABLE=1; containers: --ipc=host"),
    ("invalid device ordinal", CAUSE, "a GPU that is not there; with NVLink between nodes (MNNVL): no IMEX channel",
     f"nvidia-smi -L; CUDA_VISIBLE_DEVICES; {IMEX}"),
    (r"Cuda failure.*\((?:include/(?:shm|alloc)|misc/shmutils|transport/shm)", CAUSE,
     "memory of the host could not be shared or registered with the GPU", f"{SHM_SIZE}; {MEMLOCK}"),
    ("failed to extend|No space left", CAUSE, "/dev/shm is full", SHM_SIZE),
    ("unlink shared memory", CAUSE, "systemd removed it when a session of this user ended",
     "RemoveIPC=no in /etc/systemd/logind.conf; sudo systemctl restart systemd-logind"),
    ("attaching to shared memory", CAUSE,
     "another rank's segment is not there: removed by systemd, or in another container's /dev/shm",
     "RemoveIPC=no in /etc/systemd/logind.conf; --ipc=host on all containers; NCCL_CUMEM_HOST_ENABLE=0"),
    ("shm_open failed|Permission denied", CAUSE, "no right to /dev/shm", "ls -ld /dev/shm; sudo chmod 1777 /dev/shm"),
    ("shared memory", CAUSE, "no memory to share between ranks", f"{SHM_SIZE}; ls -ld /dev/shm"),
    (r"NVLink SHARP|NVLS.*Multicast|multicast memory|nvls\.cc", CAUSE,
     "the NVSwitch fabric gave no memory for additions in the switch", NVLS + IMEX),
    ("out of memory|Failed to CUDA (?:calloc|malloc)", CAUSE, "the GPU is full",
     "nvidia-smi: another process on the GPU, or two ranks on one"),
    ("Duplicate GPU|ranks are using the same GPU", CAUSE, "two ranks took one GPU",
     "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))"),
    ("no socket interface|no interface found|No IP interface|No usable listening interface", CAUSE,
     "no interface to use",
     "export NCCL_SOCKET_IFNAME to an interface that exists and has an address; containers: --network=host"),
    ("Mismatched NCCL version", CAUSE, "ranks run different versions", "install the same torch on every node"),
    (r"\bnetwork .{1,40} not found", CAUSE, "no plugin offers this network, or its adapters are not there",
     "unset NCCL_NET NCCL_NET_PLUGIN; LD_LIBRARY_PATH of the provider's plugin"),
    ("libnccl-net|Failed to initialize any NET plugin", CAUSE, "the network plugin does not load",
     "LD_LIBRARY_PATH of the provider's plugin, or: unset NCCL_NET_PLUGIN NCCL_NET"),
    ("message truncated|magic mismatch|collective mismatch|incorrect receive info|wrong type", CAUSE,
     "ranks disagree about what is sent: other collectives, other sizes, or another program on the port",
     "TORCH_DISTRIBUTED_DEBUG=DETAIL for one run; the same code and NCCL on every rank"),
    ("illegal memory access|unspecified launch failure|device-side assert|uncorrectable", CAUSE,
     "a kernel or a GPU failed", "dmesg | grep -i xid; compute-sanitizer; CUDA_LAUNCH_BLOCKING=1 for one run"),
    ("NET/OFI.*completed with error", NETWORK, "EFA does not reach the peer, or the peer ended",
     f"{FIRST}; security group: all traffic from and to itself, inbound and outbound"),
    ("No route to host|Network is unreachable", NETWORK, "no way to the peer's address", SUBNET),
    ("timed out|Connection timed", NETWORK, "no answer from the peer's address", SUBNET),
    ("connection abort", NETWORK, "the peer is gone, or its address is not reachable", SUBNET),
    ("Connection refused|returned .*exceeded error retry count", CONSEQUENCE,
     "the peer's process is gone, or a firewall is between", f"{FIRST}; otherwise: {SUBNET}"),
    ("Connection closed|Connection reset|Broken pipe|Socket recv failed|socketProgress|Unexpected EOF|Accept failed"
     "|ncclOsSocket.*(?:recv|send)|proxy|opId|Could not receive type|UDS: |Service thread|abort|remote process"
     "|remote error", CONSEQUENCE, "the peer's process is gone", FIRST),
    ("Got CQE with error|cleanup comm|commDestroy|driver shutting down|communicator encountered|ibv_get_async_event",
     CONSEQUENCE, "another error came before", FIRST),
))  # fmt: skip

_VENDOR = re.compile(r"vendor[ _]err[ =](\d+)")

# The variable parts of similar warnings: files, peers, addresses, numbers.
_VARYING = (
    (re.compile(r"/dev/shm/\S+"), "/dev/shm/..."),
    (re.compile(r"(?:\[[0-9a-fA-F:.%\w]+\]|[\w.:%-]+)<\d+>"), "<peer>"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b|\b[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){3,7}\b"), "<address>"),
    (re.compile(r"\b0x[0-9a-fA-F]+\b|\b[0-9a-f]*\d[0-9a-f]{5,}\b|\d+"), "#"),
)
_KEPT = re.compile(r"((?:status=|error |Cuda failure )(?:IBV_WC_\w+\()?\d+\)?)")


def normalized(text: str) -> str:
    """Return `text` without addresses, ports, files and numbers, which differ between ranks. Error codes stay."""
    first, *rest = _KEPT.split(text, maxsplit=1)
    code, last = rest or ("", "")
    for pattern, word in _VARYING:
        first, last = pattern.sub(word, first), pattern.sub(word, last)
    return first + code + last


def meaning_of(warned: NcclWarning, settings: Mapping[str, str], version: Version | None, merged: bool) -> Meaning:
    """Return the meaning of a warning. For an unknown one, a setting of its family may be suspected.

    settings: the settings in the log.
    version: version of NCCL.
    merged: whether NCCL merged several adapters into one.
    """
    known = next((meaning for pattern, meaning in MEANINGS if pattern.search(warned.text)), None)
    of_graph = warned.file.startswith("graph/") or re.search("NET with id|path for pattern", warned.text)
    if merged and version is not None and version[:2] == (2, 26) and of_graph:
        why = f"a fault of NCCL {version[0]}.{version[1]} with adapters that it makes one (merged, as [2]={{[0],[1]}})"
        return Meaning(
            CAUSE, why, "NCCL 2.27 or newer (torch 2.8 has it); NCCL_NET_MERGE_LEVEL=LOC does not always help"
        )
    doubted = suspected_setting(warned.file, warned.text, settings, known is not None)
    if doubted is not None and (known is None or known.kind < WarningKind.CONSEQUENCE):
        name, why, remedy = doubted
        kind, reason = (CAUSE, "") if known is None else (known.kind, f"{known.why}; ")
        rest = "" if known is None or name in known.remedy else f"; otherwise: {known.remedy}"
        return Meaning(kind, f"{reason}{why}", f"{remedy}{rest}")
    if known is None:
        return Meaning(WarningKind.UNKNOWN, "no warning", f"read the lines before it; {FIRST}")
    return known._replace(remedy=without_contradictions(known.remedy, settings))


def explain(
    warnings: Mapping[str, NcclWarning],
    settings: Mapping[str, str],
    version: Version | None,
    merged: bool,
    caused: bool,
) -> Iterable[Finding]:
    """Yield findings about the warnings, causes first. Possible consequences of a cause are no errors of their own.

    warnings: the first warning of each kind, in the order of the log.
    caused: whether other lines of the log show the cause.
    """
    meant = [(meaning_of(one, settings, version, merged), one) for one in warnings.values()]
    known = sorted(meant, key=lambda one: one[0].kind)
    for meaning, one in known[:MOST]:
        value = one.text[:160] + (f" ({one.times} times)" if one.times > 1 else "")
        yield _finding(meaning, value, one.text, known[0][0].kind, caused)
    if known[MOST:]:
        yield info(f"{len(known) - MOST} more kinds of warnings", "no warning", "grep 'NCCL WARN'")


def _finding(meaning: Meaning, value: str, text: str, nearest: WarningKind, caused: bool) -> Finding:
    vendor = _VENDOR.search(text)
    why = meaning.why + (f" (vendor error {vendor[1]})" if vendor else "")
    later = f"{why}; this may be a consequence of the findings above"
    if meaning.kind is WarningKind.HARMLESS:
        return info(value, f"no warning, but {why}", None, "medium")
    if meaning.kind in (NETWORK, CONSEQUENCE) and caused:
        return info(value, f"{why}; this is a consequence of the findings above", None, "medium")
    if meaning.kind is SLOW:
        return warning(value, why, meaning.remedy, "medium")
    if meaning.kind is WarningKind.UNKNOWN:
        return warning(value, why, meaning.remedy, "low")
    if meaning.kind is nearest or nearest is SLOW:
        return error(value, why, meaning.remedy, "medium")
    if meaning.kind is CONSEQUENCE and nearest is not WarningKind.UNKNOWN:
        return info(value, later, None, "low")
    return warning(value, later, meaning.remedy, "low")
