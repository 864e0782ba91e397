# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of one node for one run after the other: `node.py NODE_RANK RANKS_PER_NODE ADDRESS`.

Orders come as JSON lines on stdin; process ids and exit statuses go to stdout. Ranks are forked from this process,
which has loaded torch and commopt, so that a run begins at once. Ranks that fail leave the others alone. Node 0 has the
store, in a process of its own, until the line "end": as torchrun's agent has, which outlives its ranks.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

from commopt.chaos.rank import RunOrder, train
from commopt.cluster.node import set_variables


def serve(node_rank: int, ranks_per_node: list[int], address: str) -> None:
    """Follow orders until stdin ends; returns in a rank, too, when its script has ended."""
    gc.collect()
    gc.freeze()
    store = 0
    _tell(ready=True)
    for line in sys.stdin:
        if store:
            os.kill(store, signal.SIGKILL)
            os.waitpid(store, 0)
            store = 0
        if line.strip() == "end":
            _tell(ended=True)
            continue
        told = json.loads(line)
        port, order = told.pop("port"), RunOrder.heard(told)
        if node_rank == 0:
            store = _host_store(address, port)
        ranks: dict[int, int] = {}
        for place in range(ranks_per_node[node_rank]):
            rank = sum(ranks_per_node[:node_rank]) + place
            if (pid := os.fork()) == 0:
                _become(order, rank)
                set_variables(node_rank, ranks_per_node, address, port, place)
                os.environ.update(order.environment)
                train(order, rank)
                return
            ranks[pid] = rank
            _tell(rank=rank, pid=pid)
        while ranks:
            pid, status = os.wait()
            if (ended := ranks.pop(pid, None)) is not None:
                _tell(rank=ended, status=os.waitstatus_to_exitcode(status), t=time.monotonic())


def _become(order: RunOrder, rank: int) -> None:
    """Give a rank a file for its output, and no part in the conversation."""
    log = os.open(Path(order.folder, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _host_store(address: str, port: int) -> int:
    """Fork a process with the store, which has threads; return its id once ranks can connect."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        import torch.distributed as dist

        store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
        os.write(writing, b"1")
        while store:
            time.sleep(3600)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    return pid


def _tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]), [int(count) for count in sys.argv[2].split(",")], sys.argv[3])
