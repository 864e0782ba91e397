# SPDX-License-Identifier: Apache-2.0
"""What one request costs the process that hosts the store: its processor time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bench.evidence.scale.job import FORK, cpu_s, store_host

_SHORT_NBYTES = 200
_LONG_NBYTES = 100_000
_REQUESTS = 24_000
_CLIENTS = (1, 4, 16, 64)

_KINDS: dict[str, Callable[[Any, str], object]] = {
    "check": lambda store, key: store.check([key]),
    "set": lambda store, key: store.set(key, "x" * _SHORT_NBYTES),
    "get": lambda store, key: store.get("short"),
    "compare_set": lambda store, key: store.compare_set(key, "", "x" * _SHORT_NBYTES),
    "add": lambda store, key: store.add(f"{key} number", 1),
    "delete_key": lambda store, key: store.delete_key(f"{key} absent"),
    "long get": lambda store, key: store.get("long"),
}


def measure_host() -> list[dict[str, Any]]:
    """Return a record for each kind of request from 16 clients, and of checks for each number of clients."""
    records = []
    with store_host() as (port, host):
        mine = dist.TCPStore("127.0.0.1", port, is_master=False)
        mine.set("short", "x" * _SHORT_NBYTES)
        mine.set("long", "x" * _LONG_NBYTES)
        others = [(kind, 16) for kind in _KINDS if kind != "check"]
        for kind, clients in [*(("check", clients) for clients in _CLIENTS), *others]:
            each = _REQUESTS // clients // (10 if kind == "long get" else 1)
            barrier = FORK.Barrier(clients + 1)
            processes = [FORK.Process(target=_ask, args=(port, kind, each, barrier)) for _ in range(clients)]
            for process in processes:
                process.start()
            barrier.wait()
            cpu = cpu_s(host)
            for process in processes:
                process.join()
            records.append({"request": kind, "clients": clients, "us": 1e6 * (cpu_s(host) - cpu) / each / clients})
    return records


def _ask(port: int, kind: str, times: int, barrier: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
    call, key = _KINDS[kind], f"key {id(store)}"
    barrier.wait()
    for _ in range(times):
        call(store, key)
    store.check([key])  # a set has no answer
