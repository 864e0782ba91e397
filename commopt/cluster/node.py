# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a node, as torchrun does: `node.py NODE_RANK RANKS_PER_NODE ADDRESS PORT FD [-m] SCRIPT ARGS...`.

The ranks are forked from a process that has loaded torch, because loading it takes seconds and the nodes share the
processors. They get torchrun's variables, and its store at ADDRESS. The file FD is closed when they are started. Exits
when a rank fails; the others keep running.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
import time


def start(node_rank: int, ranks_per_node: list[int], address: str, port: int, started: int, command: list[str]) -> int:
    """Start the ranks, close `started`, wait. Return the exit status of the first that failed, in a shell's form."""
    import torch.distributed as dist

    first, count = sum(ranks_per_node[:node_rank]), ranks_per_node[node_rank]
    gc.freeze()  # otherwise a rank scans all loaded objects when it exits, and copies every page
    ranks: dict[int, int] = {}
    for place in range(count):
        if (pid := os.fork()) == 0:
            os.close(started)
            set_variables(node_rank, ranks_per_node, address, port, place)
            _run(command)
            return 0
        ranks[pid] = first + place
    os.close(started)
    # After the fork, which copies no threads.
    store = dist.TCPStore(address, port, is_master=node_rank == 0, wait_for_workers=False)
    while ranks:
        pid, status = os.wait()
        rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if code:
            print(f"rank {rank} failed, the first of its node; exit code: {code}", file=sys.stderr)
            return code if code > 0 else 128 - code
    store.add("nodes that are done", 1)
    while node_rank == 0 and store.add("nodes that are done", 0) < len(ranks_per_node):
        time.sleep(0.02)  # ranks of other nodes may still need the store
    return 0


def set_variables(node_rank: int, ranks_per_node: list[int], address: str, port: int, place: int) -> None:
    """Set torchrun's variables of the rank at `place` in its node."""
    rank, total = str(sum(ranks_per_node[:node_rank]) + place), str(sum(ranks_per_node))
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun sets it, like the variables below
    os.environ.update(TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0", TORCHELASTIC_RUN_ID="none")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_ADDR=address, MASTER_PORT=str(port))
    os.environ.update(WORLD_SIZE=total, ROLE_WORLD_SIZE=total, ROLE_NAME="default")
    os.environ.update(GROUP_RANK=str(node_rank), GROUP_WORLD_SIZE=str(len(ranks_per_node)))
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks_per_node[node_rank]), LOCAL_RANK=str(place), RANK=rank, ROLE_RANK=rank)


def _run(command: list[str]) -> None:
    """Run the command in this process, as `python` would."""
    module = command[0] == "-m"
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(command[0]))
    sys.argv = command[module:]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(os.path.abspath(sys.argv[0]), run_name="__main__")


if __name__ == "__main__":
    node_rank, counts, address, port, started, *command = sys.argv[1:]
    ranks_per_node = [int(count) for count in counts.split(",")]
    sys.exit(start(int(node_rank), ranks_per_node, address, int(port), int(started), command))
