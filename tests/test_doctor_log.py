# SPDX-License-Identifier: Apache-2.0
"""The doctor reads NCCL's own log: transports, adapters, algorithms, and why the fast way was not taken."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commopt.__main__ import main
from commopt.doctor.finding import Finding, Severity, exit_status
from commopt.doctor.log_findings import examine
from commopt.doctor.log_reader import Log, parse_log, read_logs
from commopt.doctor.settings import provider_profile


def lines(*texts: str) -> list[str]:
    """Lines as NCCL writes them, rank after rank."""
    return [f"host-a:4100:41{place:02} [{place % 2}] NCCL INFO {text}\n" for place, text in enumerate(texts)]


def read(*texts: str, more: tuple[str, ...] = ()) -> Log:
    log = parse_log([*lines(*texts), *more], "test.log")
    assert log is not None
    return log


def found(log: Log, check: str) -> Finding:
    (finding,) = [finding for finding in examine(log) if finding.check == check]
    return finding


START = (
    "Bootstrap: Using ens1:10.1.0.1<0>",
    "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ens1:10.1.0.1<0>",
    "Using network IB",
    "comm 0x55 rank 0 nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0",
)
RDMA = (
    *START,
    "Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0/GDRDMA",
    "Channel 01/0 : 1[1] -> 2[0] [send] via NET/IB/1/GDRDMA",
    "Channel 00/0 : 3[1] -> 0[0] [receive] via NET/IB/0/GDRDMA",
    "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
    "Connected all rings",
)
VERSION = "NCCL version 2.28.9+cuda12.8\n"
NO_RDMA = tuple(text for text in START if "NET/IB" not in text and "network IB" not in text)
SOCKET = (
    *NO_RDMA,
    "NET/Socket : Using [0]ens1:10.1.0.1<0>",
    "Using network Socket",
    "Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0",
)


def test_the_facts_of_a_fast_run() -> None:
    log = read(*RDMA, "NCCL_IB_HCA set by environment to mlx5.", more=(VERSION,))
    assert log.version == (2, 28, 9)
    assert (log.ranks, log.nodes) == (4, 2)
    assert log.names("IB") == ["mlx5_0:1/IB", "mlx5_1:1/IB"]
    assert dict(log.networks) == {"IB": 1}
    # Each end counts: it has an adapter of its own, with or without GPUDirect RDMA.
    assert dict(log.channels) == {"NET/IB/GDRDMA": 3, "P2P/CUMEM/read": 1}
    assert dict(log.adapters) == {("IB", 0): 2, ("IB", 1): 1}
    assert log.environment == {"NCCL_IB_HCA": "mlx5"}


# fmt: off
CONNECTIONS = [
    ("Channel 00 : 0[1a000] -> 1[1b000] [send] via NET/IB/0/GDRDMA comm 0x7f nRanks 02", "NET/IB/GDRDMA", "IB 0"),
    ("Channel 04/1 : 1[1] -> 8[0] [send] via NET/IB/3(0)/GDRDMA/Shared", "NET/IB/GDRDMA", "IB 3"),
    ("Channel 00/0 : 0[0] -> 1[0] [send] via NET/AWS Libfabric/2", "NET/AWS Libfabric", "AWS Libfabric 2"),
    ("Ring 01 : 3 -> 4 [send] via NET/Socket/1", "NET/Socket", "Socket 1"),
    ("Channel 00 : 0[19000] -> 1[1a000] via P2P/direct pointer", "P2P/direct pointer", None),
    ("Channel 00 : 0[19000] -> 1[1a000] via direct shared memory", "SHM", None),
    ("Channel 00/0 : 0[0] -> 3[3] via P2P/indirect/1[1]", "P2P/indirect", None),
    ("Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Libfabric/0/GDRDMA/flush=None", "NET/Libfabric/GDRDMA",
        "Libfabric 0"),
    ("Channel 00/0 : 1[0] -> 0[0] [receive] via NET/NCCL RDMA Plugin v10/0", "NET/NCCL RDMA Plugin v10",
        "NCCL RDMA Plugin v10 0"),
    ("CollNet 00/0 : 2 [send] via COLLNET/SHARP/1/GDRDMA(PCI)", "COLLNET/SHARP/GDRDMA", "SHARP 1"),
    ("Coll 00 : 2 [receive] via COLLNET/IBext/0", "COLLNET/IBext", "IBext 0"),
    ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read/CE comm 0x1 nRanks 32", "P2P/CUMEM/read/CE", None),
    ("Channel 00/0 : 0[0] -> 1[1] via P2P/IPC\x1b[0m", "P2P/IPC", None),
]
# fmt: on


@pytest.mark.parametrize(("text", "transport", "adapter"), CONNECTIONS)
def test_the_ways_in_which_versions_write_connections(text: str, transport: str, adapter: str | None) -> None:
    log = read(text)
    assert dict(log.channels) == {transport: 1}
    assert [f"{plugin} {place}" for plugin, place in log.adapters] == ([adapter] if adapter else [])


def test_the_names_of_interfaces_come_without_their_addresses() -> None:
    log = read("NET/Socket : Using [0]ens1:10.1.0.1<0> [1]bond0.526:fe80::1%bond0<0>")
    assert log.names("Socket") == ["bond0.526", "ens1"]


def test_a_fast_run_has_nothing_to_mend() -> None:
    findings = examine(read(*RDMA, more=(VERSION,)))
    assert {finding.severity for finding in findings} <= {Severity.OK, Severity.INFO}
    assert all(finding.value is not None for finding in findings)


# fmt: off
LINES = [
    ((*SOCKET, "NCCL_IB_DISABLE set by environment to 1."), "log-network", "error", "NCCL_IB_DISABLE",
        "unset NCCL_IB_DISABLE"),
    ((*SOCKET, "NET/Plugin: libnccl-net.so: /lib/libc.so.6: version `GLIBC_2.38' not found (required by it)"),
        "log-network", "error", "GLIBC_2.38", "built for this image"),
    # Normal on a machine without an adapter, which the log does not tell.
    ((*SOCKET, "Failed to open libibverbs.so[.1]"), "log-network", "warning", "libibverbs", "apt-get install"),
    ((*SOCKET, "NET/Socket: Using 4 threads and 2 sockets per thread"), "log-network", "warning", "8 sockets each",
        "compress between nodes"),
    (("comm 0x1 rank 0 nRanks 2 nNodes 1 localRanks 2", "Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0"),
        "log-network", "warning", "inside one node", "unset NCCL_P2P_DISABLE"),
    ((*NO_RDMA, "Using network FastSocket", "Channel 00/0 : 1[1] -> 2[0] [send] via NET/FastSocket/0"), "log-network",
        "info", "NET/FastSocket 1 times", ""),
    ((*NO_RDMA[:2], "Channel 00/0 : 4[0] -> 3[3] via P2P/MNNVL"), "log-network", "ok", "MNNVL", ""),
    (
        (*NO_RDMA, "NET/OFI Selected provider is tcp, fabric is 10.0.0.0/24 (found 1 nics)",
         "Channel 00/0 : 1[1] -> 2[0] [send] via NET/Libfabric/0"),
        "log-network", "error", "provider tcp", "FI_PROVIDER=efa"),
    (
        (*NO_RDMA, "NET/OFI Selected Provider is efa (found 4 nics)",
         "Channel 00/0 : 1[1] -> 2[0] [send] via NET/AWS Libfabric/0"),
        "log-gdr", "warning", "0 of 1 times", "P4d, P5"),
    ((*NO_RDMA, "NET/OFI Selected provider is efa, fabric is efa (found 16 nics)"), "log-adapters", "info",
        "libfabric over efa", ""),
    ((*NO_RDMA, 'NET/OFI Setting NCCL_PROTO to "simple"', "NCCL_PROTO set by environment to simple"),
        "log-environment", "info", "NCCL_PROTO=simple", ""),
    (
        (*START, "Channel 00 : 1[1b000] -> 2[3d000] [receive] via NET/IB/0/GDRDMA",
         "Channel 00 : 2[3d000] -> 1[1b000] [send] via NET/IB/0"),
        "log-gdr", "info", "on receiving only", "NCCL_NET_GDR_READ=1"),
    ((*START, "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"), "log-gdr", "warning", "HCA 0 'mlx5_0'",
        "modprobe nvidia-peermem"),
    ((*START, "NCCL_NET_GDR_LEVEL set by environment to LOC", "Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0"),
        "log-gdr", "error", "0 of 1", "unset NCCL_NET_GDR_LEVEL"),
    (
        ("NET/IB : Using [0]mlx5_8:1/IB [1]mlx5_16:1/RoCE ; OOB ib8:192.168.1.8<0>",
         "Channel 00 : 2[c7000] -> 0[87000] [receive] via NET/IB/0/GDRDMA",
         "Channel 01 : 2[c7000] -> 0[87000] [receive] via NET/IB/1/GDRDMA"),
        "log-adapters", "warning", "mlx5_16:1/RoCE", "NCCL_IB_HCA"),
    ((*RDMA, "NCCL_NVLS_ENABLE set by environment to 0.", "8 coll channels, 0 collnet channels, 0 nvls channels"),
        "log-environment", "warning", "NCCL_NVLS_ENABLE=0", "unset"),
    (("NCCL_P2P_LEVEL set by environment to LOC", "Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"), "log-inside",
        "error", "NCCL_P2P_LEVEL=LOC", "unset NCCL_P2P_LEVEL"),
    ((*SOCKET, "NET/IB : No device found.", "NCCL_IB_HCA set by environment to mlx9."), "log-network", "error",
        "NCCL_IB_HCA=mlx9", "unset NCCL_IB_HCA"),
    (SOCKET, "log-network", "warning", "NET/Socket 1 times", "NCCL_SOCKET_NTHREADS=4"),
    ((*START, "Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0"), "log-gdr", "error", "0 of 1 times",
        "modprobe nvidia-peermem"),
    ((*RDMA, "Channel 02/0 : 0[0] -> 2[0] [send] via NET/IB/0/Shared"), "log-gdr", "warning", "3 of 4 times",
        "doctor"),
    (
        (*START, "GPU Direct RDMA Disabled for GPU 0 / HCA 1 (distance 7 > 5)",
         "Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/1"),
        "log-gdr", "error", "distance 7", "NCCL_NET_GDR_LEVEL"),
    (
        (*START, "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0' (no module)",
         "Channel 00 : 1[1b000] -> 2[3d000] [send] via NET/IB/0"),
        "log-gdr", "error", "no module", "modprobe nvidia-peermem"),
    ((*RDMA, "P2P is disabled between connected GPUs", "Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"),
        "log-inside", "warning", "SHM/direct/direct 1 times", "topo -p2p"),
    (("NCCL_P2P_DISABLE set by environment to 1.", "Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"), "log-inside",
        "error", "NCCL_P2P_DISABLE=1", "unset NCCL_P2P_DISABLE"),
    ((*START, "Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0/GDRDMA"), "log-adapters", "info", "IB 0 x1", ""),
    (
        ("NET/IB : Using [0]={[0] mlx5_2:1/RoCE, [1] mlx5_3:1/RoCE} [RO]; OOB bond0:10.0.0.9<0>",
         "Channel 00/0 : 1[0] -> 0[0] [send] via NET/IBext_v8/0/GDRDMA"),
        "log-adapters", "info", "mlx5_2:1/RoCE, mlx5_3:1/RoCE", ""),
]
# fmt: on


@pytest.mark.parametrize(("texts", "check", "severity", "value", "remedy"), LINES)
def test_what_a_line_means(texts: tuple[str, ...], check: str, severity: str, value: str, remedy: str) -> None:
    log = read(*texts)
    findings = [finding for finding in examine(log) if finding.check == check]
    assert any(
        (finding.severity.value, value in (finding.value or ""), remedy in (finding.remedy or ""))
        == (severity, True, True)
        for finding in findings
    ), findings


def test_lines_of_ranks_that_ran_into_each_other_are_told_apart() -> None:
    first = "(Worker pid=7, ip=10.0.0.1) host-a:7:9 [3] NCCL INFO Channel 05/0 : 3[3] -> 0[0] via P2P/IPC"
    second = "host-b:8:9 [3] NCCL INFO Channel 07/0 : 3[3] -> 8[0] [send] via NET/gIB/2/GDRDMA"
    third = "host-b:8:9 [1] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer"
    log = parse_log([f"[1,0]<stdout>:{first}{second}{third}\n"], "test.log")
    assert log is not None
    assert dict(log.channels) == {"P2P/IPC": 1, "NET/gIB/GDRDMA": 1}
    assert list(log.warnings) == ["socketProgress: Connection closed by remote peer"]


def test_nodes_are_counted_by_name_where_nccl_does_not_say() -> None:
    prefixes = ("0: host-a:1:2 [0]", "[rank1]:host-b:1:2 [0]", "host-b: host-b:3:4 [1]")
    log = parse_log([f"{prefix} NCCL INFO Channel 00 : 0[0] -> 1[1] via P2P/IPC" for prefix in prefixes], "test.log")
    assert log is not None
    assert log.machines == 2
    assert found(log, "log-network").value is None  # two nodes, and no word about what is between them
    torn = "host-a:1:2 [0] NCCL INFO threadThresholds 8/8/64 | 512host-a:1:3 [1] NCCL INFO Connected all rings"
    log = parse_log([torn, "NCCL INFO Channel 00 : 0[0] -> 1[1] via P2P/IPC"], "test.log")
    assert log is not None
    assert log.machines is None


def test_nodes_with_different_adapters_under_one_number_use_all_of_them() -> None:
    devices = "NET/IB : Using [0]mlx5_{}:1/IB [1]mlx5_{}:1/IB [RO]; OOB ib0:10.1.0.1<0>"
    log = read(devices.format(0, 1), devices.format(4, 5))
    assert log.names("IB") == ["mlx5_0:1/IB", "mlx5_1:1/IB", "mlx5_4:1/IB", "mlx5_5:1/IB"]
    pairs = "NET/IB : Using [0]={[0] mlx5_0:1/IB, [1] mlx5_1:1/IB} [1]={[2] mlx5_2:1/IB, [3] mlx5_3:1/RoCE} [RO]"
    ends = [f"Channel 0{place}/0 : 0[0] -> 1[1] [send] via NET/IB/{place}/GDRDMA" for place in range(2)]
    assert found(read(pairs, ends[0]), "log-adapters").severity is Severity.INFO
    assert found(read(pairs, *ends), "log-adapters").severity is Severity.WARNING


def test_a_library_that_old_versions_miss_loudly_is_no_warning_of_its_own() -> None:
    log = read(*SOCKET, more=("host-a:1:2 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]\n",))
    assert log.no_verbs
    assert not log.warnings


def test_warnings_of_nccl_come_with_a_remedy_where_one_is_known() -> None:
    warnings = (
        "host-a:1:2 [0] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_reg_mr failed\n",
        "host-a:1:2 [0] NCCL WARN something nobody has seen\n",
    )
    first, second = [finding for finding in examine(read(*RDMA, more=warnings)) if finding.check == "log-warnings"]
    assert (first.severity, "memlock" in (first.remedy or "")) == (Severity.ERROR, True)
    assert (second.severity, second.confidence) == (Severity.WARNING, "low")


def warned(*texts: str) -> list[Finding]:
    """What is said about lines of warnings, in order."""
    log = parse_log([f"host-a:1:2 [0] file.cc:1 NCCL {text}\n" for text in texts], "test.log")
    assert log is not None
    return [finding for finding in examine(log) if finding.check == "log-warnings"]


def test_the_root_cause_stands_above_what_follows_from_it() -> None:
    lost = [f"WARN socketProgress: Connection closed by remote peer node{n}<{4000 + n}>" for n in range(12)]
    polled = [f"WARN Socket recv failed while polling for opId=0x55a5196{n:02}c80" for n in range(12)]
    cause, closed, polling = warned(*lost[:6], *polled, "WARN Call to ibv_reg_mr failed", *lost[6:])
    assert (cause.severity, "memlock" in (cause.remedy or "")) == (Severity.ERROR, True)
    assert (closed.severity, "(12 times)" in (closed.value or "")) == (Severity.INFO, True)
    assert "a consequence of the findings above" in closed.expected
    assert "(12 times)" in (polling.value or "")
    (alone,) = warned(*lost)
    assert (alone.severity, "first error of all ranks" in (alone.remedy or "")) == (Severity.ERROR, True)


def test_many_kinds_of_warnings_are_not_passed_over() -> None:
    findings = warned(*[f"WARN something {'x' * n} odd" for n in range(20)])
    assert findings[-1].value == "8 more kinds of warnings"


COMPLETION = "WARN NET/IB : Got completion from peer 10.0.0.{}<{}> with status={} opcode={} len=0 vendor err {} (Recv)"
NAMED = "WARN NET/IB: Got completion from peer a<1> with status=IBV_WC_{}({}) opcode=IBV_WC_SEND(0) vendor_err={} hca m"


# fmt: off
WARNINGS = [
    ((COMPLETION.format(1, 4000, 4, 32614, 81),), "ACS, which breaks GPUDirect", "disable ACS"),
    ((NAMED.format("LOC_PROT_ERR", 4, 81),), "(vendor error 81)", "NCCL_NET_GDR_LEVEL=LOC"),
    ((COMPLETION.format(1, 4000, 5, 0, 249),), "of one node cannot talk", "two adapters"),
    (("NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129",), "rails", "NCCL_IB_TIMEOUT"),
    ((NAMED.format("REM_ACCESS_ERR", 10, 136),), "remote access error", "NCCL_IB_HCA"),
    ((COMPLETION.format(1, 4000, 3, 0, 0),), "the network failed", "cable"),
    # A flushed request and an exceeded retry follow from a protection error.
    (tuple(COMPLETION.format(1, 1, status, 0, 81) for status in (5, 12, 4)), "ACS", "disable ACS"),
    (("unlink shared memory /dev/shm/nccl-a1b2c3 failed, error: No such file (2)",), "systemd", "RemoveIPC=no"),
    (("Error: failed to extend /dev/shm/nccl-a1b2c3 to 9637892 bytes",), "/dev/shm is full", "--shm-size"),
    (("Error while attaching to shared memory segment /dev/shm/nccl-x (size 9)",), "not there", "RemoveIPC"),
    (("MNNVL (cliqueSize 8) is available but not working on this system. Check the IMEX configuration",),
        "IMEX channel and domain", "nvidia-imex-ctl -N"),
    (("Cuda failure 101 'invalid device ordinal'",), "no IMEX channel", "nvidia-caps-imex-channels"),
    (("Call to ibv_modify_qp failed with 110 Connection timed out",), "rails", "NCCL_CROSS_NIC=0"),
    (("Call to ibv_modify_qp failed with error Invalid argument",), "GID index", "unset NCCL_IB_GID_INDEX"),
    (("NET/OFI Unable to register memory for device 0. RC: 12",), "locked", "memlock"),
    (("Call to ibv_modify_qp failed with error Network is unreachable",), "no route", "ip route get"),
    (("Call to ibv_reg_mr failed with error Invalid argument",), "GPUDirect RDMA does not work", "peermem"),
    (("failed to open CUDA IPC handle : 217 peer access",), "no peer access", "NCCL_P2P_DISABLE=1"),
    (("NET/IB : collective mismatch error",), "ranks disagree", "TORCH_DISTRIBUTED_DEBUG"),
    (("communicator encountered a fatal error (detected in ncclIbTest)",), "came before", "first error"),
    (("NET/IB : Got async event : port error",), "a port changed", "cable"),
    (("NET/IB : Got async event : local catastrophic error",), "adapter failed", "fw_ver"),
    (("NET/IB : mlx5_0:1 Got async event : local access violation work queue error",), "may not reach", "ACS"),
    (("Failed to bind NVLink SHARP (NVLS) Multicast memory : CUDA error 401",), "NVSwitch", "Fabric"),
    (("NET/OFI Request 0x7f completed with error. RC: 21",), "EFA does not reach", "security group"),
    (("Call to shm_open failed : Permission denied",), "no right", "chmod 1777"),
]
# fmt: on


@pytest.mark.parametrize(("texts", "expected", "remedy"), WARNINGS)
def test_what_a_warning_means(texts: tuple[str, ...], expected: str, remedy: str) -> None:
    first, *others = warned(*(text if text.startswith("WARN") else f"WARN {text}" for text in texts))
    assert (first.severity.value, expected in first.expected, remedy in (first.remedy or "")) == ("error", True, True)
    assert all(finding.severity is not Severity.ERROR for finding in others)


def test_errors_of_cuda_come_with_their_place() -> None:
    (line,) = lines("x")
    log = parse_log(
        [line.replace("NCCL INFO x", "transport/nvls.cc:244 NCCL WARN Cuda failure 1 'invalid argument'")], "l"
    )
    assert log is not None
    finding = found(log, "log-warnings")
    assert finding.value == "Cuda failure 1 'invalid argument' (transport/nvls.cc)"
    assert "NVSwitch" in finding.expected


def test_the_error_that_torch_repeats_is_a_warning_too() -> None:
    text = (
        "[rank2]: torch.distributed.DistBackendError: NCCL error in: x.cpp:77, unhandled, NCCL version 2.26.2\n"
        "[rank2]: ncclUnhandledCudaError: Call to CUDA function failed.\n[rank2]: Last error:\n"
        "[rank2]: Cuda failure 802 'system not yet initialized'\n"
    )
    log = parse_log(text.splitlines(), "test.log")
    assert log is not None
    assert "fabricmanager" in (found(log, "log-warnings").remedy or "")
    assert parse_log(["Last error:", "no space"], "other.log") is None


def test_the_last_error_is_found_behind_a_prefix_and_in_what_xla_says() -> None:
    text = "w-1: NCCL error in: x.cpp:1197\nw-1: Last error:\nw-1: Cuda failure 'initialization error'\n"
    log = parse_log(text.splitlines(), "l")
    assert log is not None
    assert found(log, "log-warnings").value == "Cuda failure 'initialization error'"
    text = "failed. Last NCCL warning(error) log entry (may be unrelated) 'Cuda failure 2 'out of memory''.; scope: x"
    log = parse_log([text], "l")
    assert log is not None
    assert found(log, "log-warnings").value == "Cuda failure 2 'out of memory'"


NO_PATHS = ("NCCL_P2P_DISABLE set by environment to 1.", "NCCL_SHM_DISABLE set by environment to 1.")


def test_ranks_of_one_machine_that_may_not_reach_each_other_are_not_nodes() -> None:
    comm = "comm 0x{0} rank {0} nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0"
    sockets = (
        "NCCL_IB_DISABLE set by environment to 1.",
        "Using network Socket",
        "Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0",
    )
    log = read(*NO_PATHS, *sockets, comm.format(0), comm.format(1))
    assert log.machines == 1
    finding = found(log, "log-network")
    assert (finding.severity, finding.remedy) == (Severity.ERROR, "unset NCCL_P2P_DISABLE NCCL_SHM_DISABLE")
    # Where not all ranks wrote the log, others may be on other machines.
    log = read(*NO_PATHS, *sockets, comm.format(0))
    assert log.machines is None
    assert [finding.remedy for finding in examine(log) if finding.check == "log-network"] == [
        "unset NCCL_P2P_DISABLE NCCL_SHM_DISABLE",
        "unset NCCL_IB_DISABLE",
    ]


def test_a_gid_index_is_not_for_reference_only() -> None:
    roce = ("NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>", "NCCL_IB_GID_INDEX set by environment to 0.")
    finding, _ = [one for one in examine(read(*roce, more=(VERSION,))) if one.check == "log-environment"]
    assert (finding.severity, finding.remedy) == (Severity.WARNING, "unset NCCL_IB_GID_INDEX")
    infiniband = ("NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>", roce[1])
    assert found(read(*infiniband, more=(VERSION,)), "log-environment").severity is Severity.INFO


def test_the_settings_of_a_provider_are_left_alone() -> None:
    settings = tuple(
        f"NCCL_{name} set by environment to {value}" for name, value in (("ALGO", "Ring"), ("NVLS_ENABLE", "0"))
    )
    for line in ("Using network gIB", "NCCL_FASTRAK_IFNAME set by environment to eth1"):
        log = read(*RDMA, *settings, line)
        told = [one for one in examine(log) if one.check == "log-environment"]
        assert {one.severity for one in told} == {Severity.INFO}
        assert "choice of Google A3" in told[0].expected
    assert {one.severity for one in examine(read(*RDMA, *settings)) if one.check == "log-environment"} == {
        Severity.WARNING,
        Severity.INFO,
    }


def test_sockets_of_a_plugin_lose_no_gpudirect() -> None:
    log = read(*NO_RDMA, "NET/FastSocket : GPU Direct RDMA Disabled for HCA 0 'eth0'", "Using network FastSocket")
    assert "log-gdr" not in {finding.check for finding in examine(log)}


@pytest.mark.parametrize("gpu", ["NVIDIA GeForce RTX 4090", "NVIDIA GB10"])
def test_gpus_without_gpudirect_have_nothing_to_mend(gpu: str) -> None:
    device = f"#  Rank  0 Group  0 Pid 7 on host-a device  0 [0x01] {gpu}\n"
    log = read(*START, "Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0", more=(device,))
    assert (found(log, "log-gdr").severity, found(log, "log-gdr").remedy) == (Severity.INFO, None)
    disabled = "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"
    assert "log-gdr" not in {finding.check for finding in examine(read(*START, disabled, more=(device,)))}


def test_geforce_cards_share_memory_without_a_warning() -> None:
    device = "#  Rank  0 Group  0 Pid 7 on host-a device  0 [0x01] NVIDIA GeForce RTX 4090\n"
    log = read(
        "P2P is disabled between connected GPUs", "Channel 00 : 0[0] -> 1[1] via SHM/direct/direct", more=(device,)
    )
    assert found(log, "log-inside").severity is Severity.INFO


def test_nvlink_between_nodes_needs_no_network() -> None:
    comm = "comm 0x1 rank 0 nRanks 8 nNodes 2 localRanks 4 localRank 0 MNNVL 1"
    log = read(comm, "Failed to open libibverbs.so[.1]", "Using network Socket")
    assert found(log, "log-network").severity is Severity.INFO


def test_a_log_without_connections_says_so() -> None:
    log = read("Using network IB")
    assert found(log, "log-network").value is None
    assert found(log, "log-version").value is None
    assert found(log, "log-understood").severity is Severity.WARNING
    assert exit_status(examine(log)) == 1  # silence is not health


def test_a_version_that_is_too_old_for_the_reader_is_named() -> None:
    old = ("NET : Using interface eth0:10.0.0.1<0>", "Using internal Network Socket", "rank 0 nranks 8")
    log = read(*old, more=("NCCL version 2.3.7+cuda9.0\n",))
    assert (found(log, "log-understood").severity, found(log, "log-understood").value) == (
        Severity.WARNING,
        "NCCL 2.3.7",
    )
    assert dict(log.networks) == {"Socket": 1}
    assert log.ranks == 8
    assert {name for _, name, _ in log.interfaces} == {"eth0"}


def test_one_node_needs_no_network() -> None:
    log = read("comm 0x1 rank 0 nRanks 2 nNodes 1 localRanks 2", "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM")
    assert found(log, "log-network").severity is Severity.OK


def test_the_command_reads_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "nccl.log"
    file.write_text("".join([VERSION, *lines(*SOCKET, "NCCL_IB_DISABLE set by environment to 1.")]))
    assert main(["doctor", "--log", str(file), "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert answer["findings"][0]["check"] == "log-network"
    assert answer["findings"][0]["read"] == str(file)
    file.write_text("".join([VERSION, *lines(*RDMA)]))
    assert main(["doctor", "--log", str(file)]) == 0


def test_the_files_of_all_ranks_are_one_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, text in enumerate(("Call to ibv_reg_mr failed", "socketProgress: Connection closed by remote peer a<1>")):
        line = f"host-{rank}:1:2 [0] misc/x.cc:1 NCCL WARN {text}\n"
        (tmp_path / f"nccl.host-{rank}").write_text("".join(lines(*RDMA)) + line)
    (tmp_path / "notes.txt").write_text("Epoch 1\n")
    files = sorted(str(file) for file in tmp_path.iterdir())
    for paths in ([str(tmp_path)], files[:2], files):
        assert main(["doctor", "--json", "--log", *paths]) == 3
        first, *_ = json.loads(capsys.readouterr().out)["findings"]
        assert "ibv_reg_mr" in first["value"]
        assert str(paths[0]) in first["read"]
    assert main(["doctor", "--log", str(tmp_path / "notes.txt")]) == 2
    (empty := tmp_path / "empty").mkdir()
    assert main(["doctor", "--log", str(empty)]) == 2


def test_a_line_without_an_end_is_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "nccl.log"
    file.write_text("".join(lines(*RDMA)) + "x" * 50_000_000)
    tracemalloc.start()
    log = read_logs([file])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert log.ranks == 4
    assert peak < 5_000_000


@pytest.mark.parametrize("content", [b"", b"Epoch 1: loss 2.5\n", bytes(range(256)) * 4000])
def test_what_is_no_log_is_refused_in_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.log"
    file.write_bytes(content)
    assert main(["doctor", "--log", str(file)]) == 2
    assert main(["doctor", "--log", str(tmp_path / "absent")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    first, second = output.err.splitlines()
    assert str(file) in first
    assert "NCCL_DEBUG=INFO" in first
    assert "absent" in second


def hosts(*texts: str) -> Log:
    """Lines of two hosts in turn."""
    log = parse_log([f"host-{'ab'[place % 2]}:1:2 [0] NCCL INFO {text}\n" for place, text in enumerate(texts)], "l")
    assert log is not None
    return log


def interfaces(devices: str, *texts: str) -> Log:
    """Two nodes whose sockets go over the second of `devices`; {} is the number of the host."""
    first = devices.split()[0].removeprefix("[0]")
    return hosts(
        f"Bootstrap : Using {first.format(1)}",
        f"Bootstrap : Using {first.format(2)}",
        f"NET/Socket : Using {devices.format(*[1] * 4)}",
        f"NET/Socket : Using {devices.format(*[2] * 4)}",
        "Using network Socket",
        "Using network Socket",
        "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/1",
        *texts,
    )


# fmt: off
ASTRAY = [
    ("[0]ens5:10.0.0.{}<0> [1]virbr0:192.168.122.1<0>", "error", "virbr0", "==ens5"),
    ("[0]ens5:10.0.0.{}<0> [1]br-850839b9f073:172.18.0.1<0>", "error", "same address on host-a and host-b", "==ens5"),
    ("[0]ens5:10.0.0.{}<0> [1]veth70ec058:fe80::e0:11ff:fec8:925f%veth70ec058<0>", "error", "veth70ec058", "==ens5"),
    ("[0]ens5:10.0.0.{}<0> [1]flannel.1:10.244.{}.0<0>", "warning", "flannel.1", "==ens5"),
    ("[0]ens5:10.0.0.{}<0> [1]cni0:10.244.{}.1<0>", "warning", "cni0", "==ens5"),
    ("[0]ens5:10.0.0.{}<0> [1]tunl0:10.42.1.{}<0>", "warning", "tunnel", "==ens5"),
    ("[0]ens5:10.0.0.{}<0> [1]tailscale0:100.64.0.{}<0>", "warning", "tunnel", "==ens5"),
    ("[0]bond0:10.0.0.{}<0> [1]eno1:fe80::{}ec8:925f%eno1<0>", "warning", "members of a bond", "==bond0"),
    ("[0]ens5:10.0.0.{}<0> [1]ens6:192.168.1.1<0>", "error", "so each host finds itself", "==ens5"),
    ("[0]lo:127.0.0.1<0> [1]lo:127.0.0.1<0>", "error", "loopback", "MASTER_ADDR"),
    ("[0]docker0:172.17.0.1<0> [1]docker0:172.17.0.1<0>", "error", "docker0", "ip route get"),
]
# fmt: on


@pytest.mark.parametrize(("devices", "severity", "value", "remedy"), ASTRAY)
def test_interfaces_that_lead_to_no_other_node_are_named(devices: str, severity: str, value: str, remedy: str) -> None:
    finding = found(interfaces(devices), "log-interfaces")
    assert (finding.severity.value, value in (finding.value or ""), remedy in (finding.remedy or "")) == (
        severity,
        True,
        True,
    )


def test_an_interface_that_only_its_name_speaks_against_is_the_best_there_is() -> None:
    log = interfaces("[0]ip6tnl0:fe80::{}866:19ff%ip6tnl0<0> [1]veth0:2a02:6b8:fc1d::{}<0>")
    finding = found(log, "log-interfaces")
    assert (finding.severity, finding.remedy) == (Severity.ERROR, "export NCCL_SOCKET_IFNAME==veth0")


def test_interfaces_that_do_lead_there_or_carry_nothing_are_left_alone() -> None:
    good = interfaces("[0]ens5:10.0.0.{}<0> [1]eth1:10.1.0.{}<0>")
    beside = interfaces("[0]ens5:10.0.0.{}<0> [1]eth1:10.1.0.{}<0> [2]virbr0:192.168.122.1<0>")  # no connection has it
    one_node = read(
        "Bootstrap : Using lo:127.0.0.1<0>",
        "comm 0x1 rank 0 nRanks 2 nNodes 1 localRanks 2",
        "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
    )
    for log in (good, beside, one_node):
        assert "log-interfaces" not in {finding.check for finding in examine(log)}


def test_what_follows_from_a_wrong_interface_is_no_error_of_its_own() -> None:
    refused = "host-b:1:2 [0] misc/socket.cc:484 NCCL WARN Net : Connect to {}<45123> failed : Connection refused\n"
    lo = "[0]lo:127.0.0.1<0> [1]lo:127.0.0.1<0>"
    log = interfaces(lo)
    both = parse_log([*lines(*START[:1]), refused.format("127.0.0.1")], "l")
    assert both is not None
    for one in (both,):
        first, *others = examine(one)
        assert (first.check, first.severity) == ("log-interfaces", Severity.ERROR)
        assert "127.0.0.1 did not answer" in (first.value or "")
        assert {finding.severity for finding in others if finding.check == "log-warnings"} == {Severity.INFO}
    assert examine(log)[0].check == "log-interfaces"
    other = parse_log([*lines(*START[:1]), refused.format("10.1.0.7")], "l")
    assert other is not None
    assert found(other, "log-warnings").severity is Severity.ERROR


def test_ipoib_without_verbs_is_the_cause() -> None:
    texts = ("NET/IB : No device found.", "NET/Socket : Using [0]ibp12s0:10.149.0.32<0>", "Using network Socket")
    more = ("host-b:1:2 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer a<5>\n",)
    connection = "Channel 00/0 : 0[0] -> 8[0] [receive] via NET/Socket/0"
    findings = examine(read(*texts, connection, more=more))
    assert (findings[0].check, findings[0].severity) == ("log-verbs", Severity.ERROR)
    assert "/dev/infiniband" in (findings[0].remedy or "")
    assert [finding.severity for finding in findings if finding.check == "log-warnings"] == [Severity.INFO]
    assert not any("no RDMA adapter?" in (finding.remedy or "") for finding in findings)
    off = read(*texts, connection, "NCCL_IB_DISABLE set by environment to 1.")
    assert "log-verbs" not in {finding.check for finding in examine(off)}


# fmt: off
FACTS = [
    # A remedy that the log contradicts is not given, another is.
    (("NET/IB : GPU Direct RDMA (DMABUF) enabled for HCA 0 'mlx5_0'",), "NCCL_NET_GDR_LEVEL=PHB", "modprobe"),
    (("NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'",), "NCCL_NET_GDR_LEVEL=PHB", "modprobe"),
    (("NCCL_NET_GDR_LEVEL set by environment to PIX",), "(now PIX)", "modprobe"),
    (("NCCL_DMABUF_ENABLE set by environment to 0.",), "unset NCCL_DMABUF_ENABLE", "NCCL_NET_GDR_LEVEL"),
    ((), "modprobe nvidia-peermem", "NCCL_NET_GDR_LEVEL"),
]
# fmt: on


@pytest.mark.parametrize(("texts", "given", "withheld"), FACTS)
def test_a_remedy_for_gpudirect_agrees_with_the_log(texts: tuple[str, ...], given: str, withheld: str) -> None:
    finding = found(read(*START, *texts, "Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0"), "log-gdr")
    assert finding.severity is Severity.ERROR
    assert given in (finding.remedy or "")
    assert withheld not in (finding.remedy or "")


def test_a_remedy_leaves_out_what_is_set_already_and_what_is_not() -> None:
    text = "WARN Call to ibv_modify_qp failed with error Invalid argument"
    set_to = "INFO NCCL_{} set by environment to 3."
    for name, expected in (("IB_GID_INDEX", True), ("CROSS_NIC", False)):
        (finding,) = warned(set_to.format(name), text)
        assert ("unset NCCL_IB_GID_INDEX" in (finding.remedy or "")) is expected
    (finding,) = warned("INFO NCCL_CROSS_NIC set by environment to 0.", "WARN Call to ibv_modify_qp failed with 110 x")
    assert "NCCL_CROSS_NIC=0" not in (finding.remedy or "")


# fmt: off
SETTINGS = [
    ("graph/search.cc:719", "XML Import Channel : dev 2 not found.", "NCCL_GRAPH_FILE=/g.xml", "unset NCCL_GRAPH_FILE"),
    ("graph/xml.cc:7", "something new about XML", "NCCL_TOPO_FILE=/t.xml", "unset NCCL_TOPO_FILE"),
    ("graph/xml.h:77", "Attribute arch of node cpu not found", "NCCL_TOPO_FILE=/t.xml", "unset NCCL_TOPO_FILE"),
    ("graph/topo.cc:1", "an error that is not known", "NCCL_NET_MERGE_LEVEL=SYS", "unset NCCL_NET_MERGE_LEVEL"),
    ("misc/socket.cc:1", "ncclSocketInit: connecting to address  with family 59936 is neither AF_INET(2) nor AF_INET6",
        "NCCL_SOCKET_IFNAME=eth2", "export NCCL_SOCKET_IFNAME to an interface that exists"),
    ("bootstrap.cc:1", "Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME=eth2", "exists on every node"),
    ("bootstrap.cc:9", "an error that is not known", "NCCL_COMM_ID=10.0.0.1:5", "NCCL_COMM_ID"),
    ("enqueue.cc:422", "Error : no algorithm/protocol available", "NCCL_ALGO=Tree", "unset NCCL_ALGO"),
    ("enqueue.cc:1", "an error that is not known", "NCCL_PROTO=LL128", "unset NCCL_PROTO"),
    ("init.cc:1083", "Failed to determine local ranks rank 0 hostHash 1b2", "NCCL_HOSTID=node", "unset NCCL_HOSTID"),
    ("transport/net_ib/init.cc:5", "an error that is not known", "NCCL_IB_HCA=mlx5_9", "unset NCCL_IB_HCA"),
    ("misc/ibvwrap.cc:5", "an error that is not known", "NCCL_IB_GID_INDEX=3", "unset NCCL_IB_GID_INDEX"),
    ("plugin/net.cc:5", "an error that is not known", "NCCL_NET_PLUGIN=ofi", "unset NCCL_NET_PLUGIN"),
    ("init.cc:388", "Error: network IB not found.", "NCCL_NET=IB", "unset NCCL_NET"),
    ("net.cc:540", "Error: network AWS Libfabric not found.", "NCCL_NET=AWS Libfabric", "unset NCCL_NET"),
    ("transport/p2p.cc:5", "an error that is not known", "NCCL_P2P_USE_CUDA_MEMCPY=1", "unset NCCL_P2P_USE_CUDA"),
    ("transport/shm.cc:5", "an error that is not known", "NCCL_SHM_LOCALITY=1", "unset NCCL_SHM_LOCALITY"),
    ("transport.cc:37", "No transport found for rank 0 -> rank 1", "NCCL_SHM_DISABLE=1", "unset NCCL_SHM_DISABLE"),
    ("transport/nvls.cc:1", "an error that is not known", "NCCL_NVLS_ENABLE=1", "unset NCCL_NVLS_ENABLE"),
]
# fmt: on


@pytest.mark.parametrize(("place", "text", "setting", "remedy"), SETTINGS)
def test_a_setting_of_a_warnings_family_is_named(place: str, text: str, setting: str, remedy: str) -> None:
    name, _, value = setting.partition("=")
    told = f"host-a:1:2 [0] NCCL INFO {name} set by environment to {value}\n"
    other = "host-a:1:2 [0] NCCL INFO NCCL_LAUNCH_MODE set by environment to GROUP\n"
    log = parse_log([told, other, f"host-a:1:2 [0] {place} NCCL WARN {text}\n"], "l")
    assert log is not None
    finding = found(log, "log-warnings")
    assert finding.severity is Severity.ERROR
    assert f"{setting} is set" in finding.expected
    assert remedy in (finding.remedy or "")
    # The same warning with a setting of another family, or a harmless one.
    apart = parse_log([other, f"host-a:1:2 [0] {place} NCCL WARN {text}\n"], "l")
    assert apart is not None
    assert "is set:" not in found(apart, "log-warnings").expected


def test_a_fault_of_a_version_is_named() -> None:
    merged = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [2]={[0] mlx5_0:1/IB, [1] mlx5_1:1/IB} [RO]"
    text = "host-a:1:2 [0] graph/paths.cc:31 NCCL WARN Could not find NET with id 0\n"
    first, *_ = examine(read(merged, more=("NCCL version 2.26.2+cuda12.6\n", text)))
    assert (first.severity, "NCCL 2.27" in (first.remedy or "")) == (Severity.ERROR, True)
    first, *_ = examine(read(merged, more=("NCCL version 2.27.3+cuda12.6\n", text)))
    assert "NCCL 2.27" not in (first.remedy or "")


def test_a_slow_order_is_a_warning_and_no_error() -> None:
    for kind in ("WARN", "INFO"):  # as versions have it
        (finding,) = warned(f"{kind} Could not find a path for pattern 4, falling back to simple order")
        assert (finding.severity, "NCCL_TOPO_FILE" in (finding.remedy or "")) == (Severity.WARNING, True)


def test_a_bond_needs_several_queue_pairs() -> None:
    texts = (
        "NET/IB : Using [0]mlx5_bond_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
        "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA",
    )
    finding = found(read(*texts), "log-adapters")
    assert (finding.severity, "NCCL_IB_QPS_PER_CONNECTION=2" in (finding.remedy or "")) == (Severity.WARNING, True)
    queues = "NCCL_IB_QPS_PER_CONNECTION set by environment to 4."
    assert found(read(*texts, queues), "log-adapters").severity is Severity.INFO


def test_an_adapter_of_another_kind_is_named() -> None:
    texts = ("NET/IB : Using [0]mlx5_0:1/RoCE [1]i40iw0:1/RoCE ; OOB e:10.0.0.1<0>",)
    finding = found(read(*texts), "log-adapters")
    assert (finding.severity, finding.remedy) == (Severity.WARNING, "export NCCL_IB_HCA==mlx5_0:1")


def test_errors_that_come_back_without_a_warning_are_told() -> None:
    chain = ("misc/socket.cc:505 -> 2 (Operation now in progress)", "bootstrap.cc:275 -> 2", "init.cc:1493 -> 2")
    finding = found(read("Using network IB", *chain), "log-warnings")
    assert (finding.severity, "misc/socket.cc:505" in (finding.value or "")) == (Severity.ERROR, True)
    # Sockets that close when a job ends well return an error to nobody, and 7 means that it is not ready yet.
    for ends in (("misc/socket.cc:47 -> 3", "misc/socket.cc:805 -> 3"), ("init.cc:9 -> 7",)):
        assert "log-warnings" not in {finding.check for finding in examine(read(*RDMA, *ends))}


@pytest.mark.parametrize(
    ("environment", "provider"),
    [
        ({"NCCL_FASTRAK_IFNAME": "enp6s0,enp7s0"}, "Google A3 Mega (FasTrak)"),
        ({"NCCL_GPUDIRECTTCPX_CTRL_DEV": "eth0"}, "Google A3 High (GPUDirect-TCPX)"),
        ({"NCCL_TUNER_CONFIG_PATH": "/usr/local/gib/configs/tuner_config_a3u.txtpb"}, "Google A3 Ultra, A4 (gIB)"),
        ({"NCCL_TUNER_PLUGIN": "/opt/amazon/ofi-nccl/lib/libnccl-ofi-tuner.so"}, "AWS (OFI plugin)"),
        ({"NCCL_TOPO_FILE": "/opt/aws-ofi-nccl/share/aws-ofi-nccl/xml/p4d-24xl-topo.xml"}, "AWS (OFI plugin)"),
        ({"NCCL_TOPO_FILE": "/opt/microsoft/ndv5-topo.xml"}, "Azure"),
        ({"NCCL_TUNER_PLUGIN": "/shared/libnccl-ocituner.so.1.0.2"}, "Oracle"),
        ({"NCCL_TUNER_PLUGIN": "/home/me/libnccl-tuner.so", "NCCL_TOPO_FILE": "/home/me/topo.xml"}, None),
        ({"NCCL_FASTRAK_IFNAME": "", "NCCL_TUNER_CONFIG_PATH": "/home/me/empty.txt", "NCCL_ALGO": "Ring"}, None),
        ({}, None),
    ],
)
def test_settings_of_providers_are_recognised(environment: dict[str, str], provider: str | None) -> None:
    assert provider_profile(environment) == provider


PIECES = st.sampled_from(
    [
        "NCCL INFO ",
        "NCCL WARN ",
        "Channel 00/0 : 0[0] -> 1[1] via ",
        "NET/IB/0",
        "/GDRDMA",
        "99999999999999999999",
        ": Using [0]",
        "[1]={",
        " Bytes -> Algo 9 proto 9",
        "comm x rank 1 nranks ",
        "NCCL_NET set to ",
        "CollNet 00/0 : 0 [send] via COLLNET/",
        "NET/OFI Selected provider is ",
        "\n",
        "\x00",
        "via SHM",
    ]
)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.one_of(PIECES, st.text(max_size=12)), max_size=12).map("".join))
def test_no_log_is_so_broken_that_reading_it_fails(text: str) -> None:
    log = parse_log(["NCCL INFO x", *text.splitlines()], "fuzz")
    assert log is not None
    examine(log)
