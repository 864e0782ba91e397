# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of one node for one run after the other: `node.py NODE_RANK RANKS_PER_NODE ADDRESS`.

Orders come as JSON lines on stdin; process ids and exit statuses go to stdout. Ranks are forked from this process,
which has loaded torch and commopt, so that a run begins at once. Ranks that fail leave the others alone. Node 0 has the
store, in a process of its own, until the line "end": as torchrun's agent has, which outlives its ranks.

With a parameter server each node is one worker: a world, and a store, of its own. The scheduler is beside node 0's
store, and the server a process of that node whose number comes after those of all ranks.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

from commopt.chaos.parameter_server import WorkerObserver, serve_workers
from commopt.chaos.rank import Observer, RunOrder, train
from commopt.cluster.node import set_variables
from commopt.server.scheduler import Scheduler, host_and_port
from commopt.server.secret import LOOPBACK
from commopt.server.settings import ADDRESS_VARIABLE


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
        scheduler = f"{address}:{port + 1}" if order.has_server else ""
        if node_rank == 0 or scheduler:
            store = _host_store(LOOPBACK if scheduler else address, port, scheduler if node_rank == 0 else "", order)
        ranks: dict[int, int] = {}
        for place in range(ranks_per_node[node_rank] + (scheduler != "" and node_rank == 0)):
            is_server = place == ranks_per_node[node_rank]
            rank = sum(ranks_per_node) if is_server else sum(ranks_per_node[:node_rank]) + place
            if (pid := os.fork()) == 0:
                _become(order, rank)
                if is_server:
                    sys.exit(serve_workers(order, rank, scheduler, len(ranks_per_node)))
                if scheduler:
                    set_variables(0, ranks_per_node[node_rank : node_rank + 1], LOOPBACK, port, place)
                    os.environ.update({"GROUP_RANK": str(node_rank), ADDRESS_VARIABLE: scheduler})
                else:
                    set_variables(node_rank, ranks_per_node, address, port, place)
                train(order, rank, WorkerObserver if scheduler else Observer)
                return
            ranks[pid] = rank
            _tell(rank=rank, pid=pid)
        while ranks:
            pid, status = os.wait()
            if (ended := ranks.pop(pid, None)) is not None:
                _tell(rank=ended, status=os.waitstatus_to_exitcode(status), t=time.monotonic())


def _become(order: RunOrder, rank: int) -> None:
    """Give a rank its variables, a file for its output, and no part in the conversation."""
    os.environ.update(order.environment)
    log = os.open(Path(order.folder, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _host_store(address: str, port: int, scheduler: str, order: RunOrder) -> int:
    """Fork a process with the store, which has threads; return its id once ranks can connect.

    scheduler: the address at which it is the scheduler, too; "" for none.
    """
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        import torch.distributed as dist

        os.environ.update(order.environment)
        held: list[object] = [dist.TCPStore(address, port, is_master=True, wait_for_workers=False)]
        if scheduler:
            host, number = host_and_port(scheduler)
            held.append(Scheduler(number, host, order.timeout_s))
        os.write(writing, b"1")
        while held:
            time.sleep(3600)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    return pid


def _tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]), [int(count) for count in sys.argv[2].split(",")], sys.argv[3])
