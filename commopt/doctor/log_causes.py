# SPDX-License-Identifier: Apache-2.0
"""What NCCL's warnings mean: which are causes, which follow from another rank's end, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

from commopt.doctor.finding import Finding, error, info, warning

MOST = 12


class Kind(IntEnum):
    """How near to the root, nearest first."""

    CAUSE = 0
    NETWORK = 1
    """The network failed, or the rank at its other end."""
    UNKNOWN = 2
    CONSEQUENCE = 3
    """Another rank ended: says nothing about why."""
    HARMLESS = 4


class Meaning(NamedTuple):
    """What is known about a warning."""

    kind: Kind
    why: str
    remedy: str


CAUSE, NETWORK, CONSEQUENCE = Kind.CAUSE, Kind.NETWORK, Kind.CONSEQUENCE
SHM_SIZE = "docker run --shm-size=8g ... (or --ipc=host); df /dev/shm"
FIRST = "look for the first error of all ranks: python -m commopt doctor --log FOLDER"
SUBNET = "export NCCL_SOCKET_IFNAME to the network that the nodes share (containers: --network=host); check firewalls"
MEMLOCK = "ulimit -l unlimited (limits.conf; docker run --ulimit memlock=-1; services: LimitMEMLOCK=infinity)"
IMEX = "nvidia-imex-ctl -N; ls /dev/nvidia-caps-imex-channels (one channel per container, one IMEX domain per job)"
SLEEPING_FABRIC = "sudo systemctl enable --now nvidia-fabricmanager; nvidia-smi -q | grep -A3 Fabric"
NVLS = "nvidia-smi -q | grep -A3 Fabric; reboot; to go on without: NCCL_NVLS_ENABLE=0; between nodes: "
COMPLETION = r"Got completion .*?(?:status=|error )(?:IBV_WC_\w+\()?"
"""In front of InfiniBand's completion status."""
ON_BOTH = "python -m commopt doctor on both nodes, during the job"

# The first pattern that is found in a warning (or in the error that torch repeats) says what it means.
MEANINGS = tuple((re.compile(pattern, re.IGNORECASE), Meaning(kind, why, fix)) for pattern, kind, why, fix in (
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
     "ib_write_bw between the two adapters; unset NCCL_IB_GID_INDEX; NCCL_CROSS_NIC=0; then NCCL_IB_TIMEOUT=22"),
    (f"{COMPLETION}13\\b", NETWORK, "receiver not ready: the peer takes nothing",
     f"{FIRST}; otherwise flow control: {ON_BOTH}"),
    (COMPLETION, NETWORK, "the network failed", f"cable, switch or flow control: {ON_BOTH}"),
    # Of a plugin of Google, in runs that are well.
    ("Cannot get incoming CPU|Maximum retry reached", Kind.HARMLESS, "this one does no harm", ""),
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
    ("CUDA IPC handle|peer access is not supported", CAUSE,
     "the GPUs have no peer access, although NCCL took it for there (GeForce, containers, ACS)",
     "nvidia-smi topo -p2p r; export NCCL_P2P_DISABLE=1; containers: --ipc=host"),
    ("invalid device ordinal", CAUSE, "a GPU that is not there; with NVLink between nodes (MNNVL): no IMEX channel",
     f"nvidia-smi -L; CUDA_VISIBLE_DEVICES; {IMEX}"),
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

# What differs between two warnings of one kind: files, peers, addresses, numbers.
_VARYING = (
    (re.compile(r"/dev/shm/\S+"), "/dev/shm/..."),
    (re.compile(r"(?:\[[0-9a-fA-F:.%\w]+\]|[\w.:%-]+)<\d+>"), "<peer>"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b|\b[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){3,7}\b"), "<address>"),
    (re.compile(r"\b0x[0-9a-fA-F]+\b|\b[0-9a-f]*\d[0-9a-f]{5,}\b|\d+"), "#"),
)
_KEPT = re.compile(r"((?:status=|error |Cuda failure )(?:IBV_WC_\w+\()?\d+\)?)")


def alike(text: str) -> str:
    """Return `text` without what differs between ranks: addresses, ports, files, numbers. Error codes stay."""
    first, *rest = _KEPT.split(text, maxsplit=1)
    code, last = rest or ("", "")
    for pattern, word in _VARYING:
        first, last = pattern.sub(word, first), pattern.sub(word, last)
    return first + code + last


def meaning_of(text: str) -> Meaning:
    """Return what is known about a warning."""
    known = (meaning for pattern, meaning in MEANINGS if pattern.search(text))
    return next(known, Meaning(Kind.UNKNOWN, "no warning", "read the lines before it"))


def explain(warnings: Mapping[str, tuple[str, int]]) -> Iterable[Finding]:
    """Say what the warnings mean, causes first; `warnings` has the first of each kind, in the order of the log.

    Where there is a cause, what may follow from it is no error of its own.
    """
    known = sorted(((meaning_of(text), text, count) for text, count in warnings.values()), key=lambda one: one[0].kind)
    for meaning, text, count in known[:MOST]:
        yield _finding(meaning, text[:160] + (f" ({count} times)" if count > 1 else ""), text, known[0][0].kind)
    if known[MOST:]:
        yield info(f"{len(known) - MOST} more kinds of warnings", "no warning", "grep 'NCCL WARN'")


def _finding(meaning: Meaning, value: str, text: str, nearest: Kind) -> Finding:
    vendor = _VENDOR.search(text)
    why = meaning.why + (f" (vendor error {vendor[1]})" if vendor else "")
    later = f"{why}; this may follow from what stands above"
    if meaning.kind is Kind.HARMLESS:
        return info(value, f"no warning, but {why}", None, "medium")
    if meaning.kind is Kind.UNKNOWN:
        return warning(value, why, meaning.remedy, "low")
    if meaning.kind is nearest:
        return error(value, why, meaning.remedy, "medium")
    if meaning.kind is CONSEQUENCE and nearest is not Kind.UNKNOWN:
        return info(value, later, None, "low")
    return warning(value, later, meaning.remedy, "low")
