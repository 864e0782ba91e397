"""What NCCL's warnings mean: which are causes, which follow from another rank's end, and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from commopt.doctor.finding import Check, Finding

FAILED = Check("log-warnings", "Warnings of NCCL")

MOST_CAUSES = 8
MOST_OTHERS = 3


class Kind(IntEnum):
    """How near to the root, nearest first."""

    CAUSE = 0
    NETWORK = 1
    """The network failed, or the rank at its other end."""
    UNKNOWN = 2
    CONSEQUENCE = 3
    """Another rank ended: says nothing about why."""
    HARMLESS = 4


@dataclass(frozen=True)
class Meaning:
    """What is known about a warning."""

    kind: Kind
    why: str
    remedy: str


_SHM_SIZE = "docker run --shm-size=8g ... (or --ipc=host); df /dev/shm"
_FIRST_ERROR = "look for the first error of all ranks: python -m commopt doctor --log FOLDER"
_SUBNET = (
    "export NCCL_SOCKET_IFNAME to the network that the nodes share (containers: --network=host); a firewall in between"
)
_MEMLOCK = (
    "ulimit -l unlimited (limits.conf; docker run --ulimit memlock=-1; of slurmd and services: LimitMEMLOCK=infinity)"
)
_IMEX = (
    "nvidia-imex-ctl -N; ls /dev/nvidia-caps-imex-channels (one channel in each container, one IMEX domain over all "
    "nodes of the job)"
)

# The first pattern that is found in a warning (or in the error that torch repeats) says what it means.
_MEANINGS: tuple[tuple[str, Meaning], ...] = tuple(
    (pattern, Meaning(kind, why, remedy))
    for kind, entries in {
        Kind.HARMLESS: (
            # Of a plugin of Google, in runs that are well.
            ("Cannot get incoming CPU|Maximum retry reached", "this one does no harm", ""),
        ),
        Kind.CAUSE: (
            ("IMEX|MNNVL", "NVLink between nodes (MNNVL) needs an IMEX channel and domain", _IMEX),
            (
                "ibv_reg_.*(?:Invalid argument|Bad address|not supported)",
                "this memory cannot be registered with the adapter: GPUDirect RDMA does not work",
                "lsmod | grep nvidia_peermem; one run with NCCL_NET_GDR_LEVEL=LOC, to be sure",
            ),
            (
                "ibv_reg_|Unable to register memory|ibv.*Cannot allocate memory",
                "memory could not be locked, or registered with the adapter",
                _MEMLOCK,
            ),
            ("ibv_create_qp|ibv_create_cq", "the adapter gave no queue", f"{_MEMLOCK}; ibstat"),
            (
                "ibv_modify_qp failed with (?:110|error Connection timed out)|ibv_modify_qp.*timed out",
                "the two adapters do not reach each other: rails that are not joined",
                "export NCCL_CROSS_NIC=0; NCCL_IB_HCA to the adapters that reach each other",
            ),
            (
                "ibv_modify_qp.*(?:unreachable|No such device)",
                "no route from the adapter's address to the peer's, or its interface is in another network namespace",
                "ip route get ADDRESS; NCCL_CROSS_NIC=0 where rails are not joined; containers: --network=host",
            ),
            (
                "ibv_modify_qp",
                "the two ends do not fit: GID index, or kind of network",
                "unset NCCL_IB_GID_INDEX; NCCL_IB_HCA to adapters of one network; ibstat",
            ),
            ("ibv_open_device", "no access to the adapter", "docker run --device=/dev/infiniband ...; ibv_devinfo"),
            (
                "async .*event.*(?:access violation|protection)",
                "the adapter may not reach a buffer: GPUDirect RDMA, or an adapter that is not for traffic",
                "python -m commopt doctor (ACS, IOMMU); NCCL_IB_HCA to the adapters between the nodes",
            ),
            (
                r"async .*event.*\b(?:port|link|lid|sm|gid)\b",
                "a port changed its state while the job ran",
                "ibstat; cable and switch of that port",
            ),
            (
                "async .*event",
                "the adapter failed or refused a request: firmware, driver or hardware",
                "dmesg | grep -i mlx; ibv_devinfo | grep fw_ver, the same and recent on all nodes",
            ),
            (
                "incompatible devices|device is incompatible",
                "InfiniBand and Ethernet do not connect",
                "export NCCL_IB_HCA to the adapters of one kind of network",
            ),
            (
                "optimal provider|Only EFA provider",
                "libfabric found no EFA",
                "fi_info -p efa, in the container (--device=/dev/infiniband); LD_LIBRARY_PATH of libfabric",
            ),
            (
                "system not yet initialized",
                "the NVSwitch fabric is not up",
                "sudo systemctl enable --now nvidia-fabricmanager; nvidia-smi -q | grep -A3 Fabric",
            ),
            (
                "P2P is disabled between NVLINK",
                "NVLinks are there, but peer access is not",
                "nvidia-smi topo -p2p n; nvidia-smi nvlink -s; unset NCCL_P2P_DISABLE NCCL_P2P_LEVEL",
            ),
            (
                "CUDA IPC handle|peer access is not supported",
                "the GPUs have no peer access, although NCCL took it for there (GeForce, containers, ACS)",
                "nvidia-smi topo -p2p r; export NCCL_P2P_DISABLE=1; containers: --ipc=host",
            ),
            (
                "invalid device ordinal",
                "a GPU that is not there; with NVLink between nodes (MNNVL): no IMEX channel",
                f"nvidia-smi -L; CUDA_VISIBLE_DEVICES; {_IMEX}",
            ),
            ("failed to extend|No space left", "/dev/shm is full", _SHM_SIZE),
            (
                "unlink shared memory",
                "systemd removed it when a session of this user ended",
                "RemoveIPC=no in /etc/systemd/logind.conf; sudo systemctl restart systemd-logind",
            ),
            (
                "attaching to shared memory",
                "another rank's segment is not there: removed by systemd, or in another container's /dev/shm",
                "RemoveIPC=no in /etc/systemd/logind.conf; --ipc=host on all containers; NCCL_CUMEM_HOST_ENABLE=0",
            ),
            ("shm_open failed|Permission denied", "no right to /dev/shm", "ls -ld /dev/shm; sudo chmod 1777 /dev/shm"),
            ("shared memory", "no memory to share between ranks", f"{_SHM_SIZE}; ls -ld /dev/shm"),
            (
                r"NVLink SHARP|NVLS.*Multicast|multicast memory|nvls\.cc",
                "the NVSwitch fabric gave no memory for additions in the switch",
                "nvidia-smi -q | grep -A3 Fabric; reboot (restarting nvidia-fabricmanager needs a reset of the GPUs); "
                f"to go on without: NCCL_NVLS_ENABLE=0; between nodes: {_IMEX}",
            ),
            (
                "out of memory|Failed to CUDA (?:calloc|malloc)",
                "the GPU is full",
                "nvidia-smi: another process on the GPU, or two ranks on one",
            ),
            (
                "Duplicate GPU|ranks are using the same GPU",
                "two ranks took one GPU",
                "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
            ),
            (
                "no socket interface|no interface found|No IP interface|No usable listening interface",
                "no interface to use",
                "export NCCL_SOCKET_IFNAME to an interface that exists and has an address; containers: --network=host",
            ),
            ("Mismatched NCCL version", "ranks run different versions", "install the same torch on every node"),
            (
                "libnccl-net|Failed to initialize any NET plugin",
                "the network plugin does not load",
                "LD_LIBRARY_PATH of the provider's plugin, or: unset NCCL_NET_PLUGIN NCCL_NET",
            ),
            (
                "message truncated|magic mismatch|collective mismatch|incorrect receive info|wrong type",
                "ranks disagree about what is sent: other collectives, other sizes, or another program on the port",
                "TORCH_DISTRIBUTED_DEBUG=DETAIL for one run; the same code and NCCL on every rank",
            ),
            (
                "illegal memory access|unspecified launch failure|device-side assert|uncorrectable",
                "a kernel or a GPU failed",
                "dmesg | grep -i xid; compute-sanitizer; CUDA_LAUNCH_BLOCKING=1 for one run",
            ),
        ),
        Kind.NETWORK: (
            (
                "NET/OFI.*completed with error",
                "EFA does not reach the peer, or the peer ended",
                f"{_FIRST_ERROR}; security group: all traffic from and to itself, inbound and outbound",
            ),
            ("No route to host|Network is unreachable", "no way to the peer's address", _SUBNET),
            ("timed out|Connection timed", "no answer from the peer's address", _SUBNET),
            ("connection abort", "the peer is gone, or its address is not reachable", _SUBNET),
        ),
        Kind.CONSEQUENCE: (
            (
                "Connection refused|returned .*exceeded error retry count",
                "the peer's process is gone, or a firewall is between",
                f"{_FIRST_ERROR}; otherwise: {_SUBNET}",
            ),
            (
                "Connection closed|Connection reset|Broken pipe|Socket recv failed|socketProgress|Unexpected EOF"
                "|ncclOsSocket.*(?:recv|send)|Accept failed|[Pp]roxy|opId|Could not receive type|UDS: |Service thread"
                "|abort|remote process|remote error",
                "the peer's process is gone",
                _FIRST_ERROR,
            ),
            (
                "Got CQE with error|cleanup comm|commDestroy|driver shutting down|communicator encountered"
                "|ibv_get_async_event",
                "another error came before",
                _FIRST_ERROR,
            ),
        ),
    }.items()
    for pattern, why, remedy in entries
)

_COMPLETION = re.compile(r"Got completion .*?(?:status=|error )(?:IBV_WC_\w+\()?(\d+)\)?")
_VENDOR = re.compile(r"vendor[ _]err[ =](\d+)")
_REMOTE_ACCESS = Meaning(
    Kind.CAUSE,
    "remote access error: the peer's adapter may not reach its buffer, or is not for traffic between nodes",
    "NCCL_IB_HCA to the adapters between the nodes; one run with NCCL_NET_GDR_LEVEL=LOC, to see if GPUDirect fails",
)
# InfiniBand's completion status.
_STATUS = {
    4: Meaning(
        Kind.CAUSE,
        "local protection error: the adapter may not reach the buffer; often ACS, which breaks GPUDirect RDMA",
        "disable ACS: sudo python -m commopt doctor; to be sure, one run with NCCL_NET_GDR_LEVEL=LOC",
    ),
    5: Meaning(
        Kind.CONSEQUENCE,
        "flushed: another request failed before; if there is none, adapters of one node cannot talk to each other",
        f"{_FIRST_ERROR}; otherwise: ib_write_bw between two adapters of the node",
    ),
    9: _REMOTE_ACCESS,
    10: _REMOTE_ACCESS,
    12: Meaning(
        Kind.NETWORK,
        "retries exceeded, the peer does not answer: rails that do not reach each other, GID, packet loss, or it ended",
        "ib_write_bw between the two adapters; unset NCCL_IB_GID_INDEX; NCCL_CROSS_NIC=0; then NCCL_IB_TIMEOUT=22",
    ),
    13: Meaning(
        Kind.NETWORK,
        "receiver not ready: the peer does not take what is sent",
        f"{_FIRST_ERROR}; otherwise flow control: python -m commopt doctor on both nodes, during the job",
    ),
}
_OTHER_STATUS = Meaning(
    Kind.NETWORK,
    "the network failed",
    "cable, switch or flow control: python -m commopt doctor on both nodes, during the job",
)
# NCCL prints the hints of later cases too (2.31): only those that belong to a status which was seen are shown.
_HINTS = {"ACS": 4, "NCCL_NET_GDR_LEVEL": 4, "same instance": 5, "NCCL_IB_TIMEOUT": 12, "Default value is 20": 12}

# What differs between two warnings of one kind.
_VARYING = (
    (re.compile(r"/dev/shm/\S+"), "/dev/shm/..."),
    (re.compile(r"(?:\[[0-9a-fA-F:.%\w]+\]|[\w.:%-]+)<\d+>"), "<peer>"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b|\b[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){3,7}\b"), "<address>"),
    (re.compile(r"\b0x[0-9a-fA-F]+\b|\b[0-9a-f]*\d[0-9a-f]{5,}\b"), "#"),
    (re.compile(r"\d+"), "#"),
)
_KEPT = re.compile(r"(?:status=|error |Cuda failure )(?:IBV_WC_\w+\()?\d+\)?")


def alike(text: str) -> str:
    """Return `text` without what differs between ranks: addresses, ports, files, numbers. Error codes stay."""
    kept = _KEPT.search(text)
    start, end = kept.span() if kept else (0, 0)
    return _without_varying(text[:start]) + text[start:end] + _without_varying(text[end:])


def _without_varying(text: str) -> str:
    for pattern, word in _VARYING:
        text = pattern.sub(word, text)
    return text


def status_of(text: str) -> int | None:
    """The completion status in a warning; None where there is none."""
    match = _COMPLETION.search(text)
    return None if match is None else int(match[1])


def meaning_of(text: str) -> Meaning | None:
    """What is known about a warning; None when nothing is."""
    status = status_of(text)
    if status is not None:
        return _STATUS.get(status, _OTHER_STATUS)
    return next((known for pattern, known in _MEANINGS if re.search(pattern, text, re.IGNORECASE)), None)


def explain(source: str, warnings: dict[str, tuple[str, int]], hints: list[str]) -> list[Finding]:
    """Say what the warnings mean, causes first; `warnings` has the first of each kind, in the order of the log.

    Where there is a cause, what may follow from it is no error of its own.
    """
    known = sorted(
        ((meaning_of(text) or Meaning(Kind.UNKNOWN, "", ""), text, count) for text, count in warnings.values()),
        key=lambda one: one[0].kind,
    )
    nearest = known[0][0].kind if known else Kind.HARMLESS
    found: list[Finding] = []
    shown: dict[Kind, int] = {}
    for meaning, text, count in known:
        shown[meaning.kind] = shown.get(meaning.kind, 0) + 1
        if shown[meaning.kind] <= (MOST_CAUSES if meaning.kind is nearest else MOST_OTHERS):
            found.append(_finding(source, meaning, text, count, nearest))
    left = sum(shown.values()) - len(found)
    if left:
        found.append(FAILED.info(source, f"{left} more kinds of warnings", "no warning", "grep 'NCCL WARN'"))
    statuses = {status_of(text) for text, _ in warnings.values()}
    belonging = [hint for hint in hints if all(status in statuses for part, status in _HINTS.items() if part in hint)]
    if belonging:
        found.append(FAILED.info(source, " ".join(belonging), "NCCL's own hints", confidence="medium"))
    return found


def _finding(source: str, meaning: Meaning, text: str, count: int, nearest: Kind) -> Finding:
    value = text[:160] + (f" ({count} times)" if count > 1 else "")
    if meaning.kind is Kind.HARMLESS:
        return FAILED.info(source, value, f"no warning, but {meaning.why}", confidence="medium")
    if meaning.kind is Kind.UNKNOWN:
        return FAILED.warning(source, value, "no warning", "read the lines before it", "low")
    vendor = _VENDOR.search(text)
    why = meaning.why + (f" (vendor error {vendor[1]})" if vendor else "")
    if meaning.kind is nearest:
        return FAILED.error(source, value, why, meaning.remedy, "medium")
    why += "; this may follow from what stands above"
    if meaning.kind is Kind.CONSEQUENCE and nearest is not Kind.UNKNOWN:
        return FAILED.info(source, value, why, confidence="low")
    return FAILED.warning(source, value, why, meaning.remedy, "low")
