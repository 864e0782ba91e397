# SPDX-License-Identifier: Apache-2.0
"""One agreement of hundreds of ranks that are threads: the real exchange over a real store, without groups.

What all of them together take of two processors is the clients' work; the store's own processor time is what counts.
"""

from __future__ import annotations

import json
import resource
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bench.evidence.scale.counting import CountingStore, Counts
from bench.evidence.scale.job import FORK, cpu_s, store_host
from commopt.groups.agreement import exchange_facts
from commopt.groups.store import limited
from commopt.version import __version__
from topology import HostIdentity

_PROCESSES = 8
_RANKS_PER_NODE = 8
_LIMIT_S = 300.0
_EXCHANGES = 3


def facts_of(rank: int) -> dict[str, Any]:
    """Return what a rank states when groups are set up, on nodes of eight whose names and boot ids differ."""
    node, local_rank = divmod(rank, _RANKS_PER_NODE)
    boot_id = f"{hash((node, 'boot')) & (2**128 - 1):032x}"
    host = HostIdentity(f"ip-10-0-{node // 256}-{node % 256}.cluster.internal", boot_id, None, local_rank)
    same = dict.fromkeys(("ranks_per_node", "COMMOPT_RANKS_PER_NODE", "timeout in seconds"))
    mine = {"host": host.as_dict(), "site": "", "told": False, "token": "0123abcd" if rank == 0 else None}
    versions = {"commopt version": __version__, "torch version": torch.__version__}
    return {**versions, **same, "COMMOPT_CHECK": False, "COMMOPT_HEARTBEAT": 5.0, **mine, "timeout of the group": 600.0}


def run_crowd(size: int) -> dict[str, Any]:
    """Let `size` ranks agree a few times; return what the last exchange asked and took."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with store_host() as (port, host):
            found, barrier = FORK.Queue(), FORK.Barrier(size)
            parts = [range(first, size, _PROCESSES) for first in range(_PROCESSES)]
            processes = [FORK.Process(target=_part, args=(part, size, port, host, barrier, found)) for part in parts]
            for process in processes:
                process.start()
            counted = [found.get(timeout=_LIMIT_S) for _ in processes]
            for process in processes:
                process.join()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    requests = {kind: sum(each["requests"].get(kind, 0) for each in counted) for kind in counted[0]["requests"]}
    return {
        "ranks": size,
        "requests": requests,
        "nbytes": sum(each["nbytes"] for each in counted),
        "seconds": max(each["end"] for each in counted) - min(each["begin"] for each in counted),
        "host_cpu_s": max(each["host_cpu_s"] for each in counted),
        "facts_nbytes": len(json.dumps([facts_of(rank) for rank in range(size)])),
    }


def _part(part: range, size: int, port: int, host: int, barrier: Any, found: Any) -> None:
    """Be some of the ranks, each in a thread of its own."""
    counts = Counts()
    connection = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_LIMIT_S))
    store = CountingStore(connection, counts)
    times: dict[str, float] = {"begin": float("inf"), "end": 0.0}
    lock = threading.Lock()

    def rank(me: int) -> None:
        mine = limited(store, "crowd", _LIMIT_S)
        for number in range(_EXCHANGES):
            barrier.wait(_LIMIT_S)
            if me == part[0] and number == _EXCHANGES - 1:
                counts.take()
                times["host_cpu_s"] = -cpu_s(host)
            barrier.wait()
            begin = time.monotonic()
            answers = exchange_facts(mine, range(size), me, "an agreement", facts_of(me), _LIMIT_S)
            with lock:
                if number == _EXCHANGES - 1:
                    times["begin"], times["end"] = min(times["begin"], begin), max(times["end"], time.monotonic())
            assert len(answers) == size
            barrier.wait()
        if me == part[0]:
            times["host_cpu_s"] += cpu_s(host)

    threads = [threading.Thread(target=rank, args=(me,)) for me in part]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = counts.take()
    found.put({**times, "requests": counted["requests"], "nbytes": sum(counted["nbytes"].values())})
